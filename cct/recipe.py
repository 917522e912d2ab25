"""The recipe: the parts put together. Loading, bases, `--set`, errors with file and line, dump and JSON schema.

    base: base/chain_arithmetic.yaml      # optional; this file's keys are laid over it
    transport: {use: comp_gae, lam: 0.95}

Laying over: mappings merge key by key; a component whose `use` differs replaces the other one whole
(another generation engine keeps what all engines share); everything else replaces. `--set a.b=c` is one more layer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from cct.critic import Critic, critics
from cct.evidence import Evidence, evidences
from cct.geometry import Geometry, geometries
from cct.policy import Generation, Policy, engines, policies
from cct.registry import REGISTRIES, Component, Knobs, PluginError, Registry, load_entry_points, load_plugin
from cct.task import Task, tasks
from cct.transport import Transport, transports


class RecipeError(ValueError):
    """One or several problems of a recipe, each with what was found, where, and what to do."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class Plugin(Knobs):
    """A file or module whose import registers components."""

    path: str
    """`./file.py`, relative to the recipe that names it, or an installed `package.module`."""
    sha256: str | None = None
    """Hash of the source; where it is given and differs, the recipe is refused. Written into every run."""


class Training(Knobs):
    """How much is sampled, and how actor and critic are updated from it."""

    iterations: int = Field(60, ge=1)
    """Rounds of sampling and updating the policy."""
    prompts_per_iteration: int = Field(16, ge=1)
    """Prompts in a round."""
    responses_per_prompt: int = Field(16, ge=1)
    """Responses sampled for each prompt."""
    epochs: int = Field(1, ge=1, le=100)
    """Passes of the policy update over a round's responses."""
    minibatch_size: int = Field(128, ge=1)
    """Responses per optimizer step; divides the responses of a round."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Responses per forward of one process; null takes its whole part of a minibatch. Never changes the gradient."""
    learning_rate: float = Field(2e-4, gt=0, le=1)
    """AdamW, actor, at the first iteration."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the actor's learning rate goes from iteration to iteration: linear and cosine fall to a tenth at the last one."""
    critic_learning_rate: float = Field(1e-3, gt=0, le=1)
    """AdamW, critic; constant."""
    critic_epochs: int = Field(1, ge=1, le=100)
    """Passes of the critic update over a round's responses, on what the actor's behaviour forward left behind."""
    critic_warmup: int = Field(0, ge=0)
    """Rounds before the first policy update in which only the critic learns, from responses of the starting policy."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """AdamW, both."""
    gradient_clip: float = Field(1.0, gt=0)
    """Greatest gradient norm, of the actor and of the critic each by itself."""
    checkpoint_every: int = Field(10, ge=1)
    """Iterations between checkpoints; the last iteration is always kept."""
    strategy: Literal["auto", "ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"] = "auto"
    """How processes share the work, through Lightning: auto is one process, or ddp where there are more; fsdp and
    deepspeed_3 split the weights too; deepspeed needs the extra `.[deepspeed]`. All run on CPUs as well."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What DeepSpeed keeps in the CPU's memory: the optimizer's state, or with ZeRO-3 the weights as well."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: forwards and backwards in bfloat16, weights and optimizer in float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward instead of keeping its activations; changes no number."""
    devices: int = Field(1, ge=1, le=1024)
    """Processes on each node, one per device; they divide every minibatch between them."""
    nodes: int = Field(1, ge=1, le=4096)
    """Machines, started by torchrun or SLURM."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; null leaves torch's default."""

    @model_validator(mode="after")
    def _divides(self) -> Training:
        responses = self.prompts_per_iteration * self.responses_per_prompt
        if responses % self.minibatch_size:
            raise ValueError(
                f"minibatch_size ({self.minibatch_size}) must divide the {responses} responses of an iteration "
                f"({self.prompts_per_iteration} prompts x {self.responses_per_prompt} responses)"
            )
        if self.offload != "none" and not self.strategy.startswith("deepspeed"):
            raise ValueError(f"offload is DeepSpeed's; strategy is {self.strategy}")
        if self.offload == "parameters" and self.strategy != "deepspeed_3":
            raise ValueError(f"offload: parameters needs strategy: deepspeed_3, which splits them; found {self.strategy}")
        if self.minibatch_size % self.processes:
            raise ValueError(f"{self.processes} processes must divide minibatch_size ({self.minibatch_size})")
        if (self.minibatch_size // self.processes) % self.rows_per_forward:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must divide the {self.minibatch_size // self.processes} responses "
                "of a minibatch that each process has"
            )
        return self

    @property
    def processes(self) -> int:
        return self.devices * self.nodes

    @property
    def rows_per_forward(self) -> int:
        """Responses in one forward of one process."""
        return self.micro_batch_size or self.minibatch_size // self.processes

    @property
    def micro_batches(self) -> int:
        """Forwards of one process in one optimizer step."""
        return self.minibatch_size // self.processes // self.rows_per_forward


class Evaluation(Knobs):
    """Greedy decoding of the task's held-out prompts."""

    every: int = Field(10, ge=1)
    """Iterations between evaluations; before the first and after the last one there always is one."""
    frozen: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Annotated[Task, tasks]] = {}
    """Further evaluation sets by name, each the held-out problems of a task. `cct eval` alone reads them, a run never does."""


class Logging(Knobs):
    """What a run writes besides metrics.jsonl."""

    logger: Literal["csv", "tensorboard"] = "csv"
    """Lightning logger; tensorboard needs the extra `.[tensorboard]`."""
    samples: int = Field(8, ge=0, le=1000)
    """Responses per iteration in samples.jsonl."""
    rollouts: Literal["auto", "always", "never"] = "auto"
    """Keep what transports read of each iteration in rollouts/, for `cct replay`: auto leaves off for the rest of a run
    whose rollouts would take more than rollouts_mb, always has no limit."""
    rollouts_mb: float = Field(64.0, gt=0, le=1e6)
    """Megabytes that auto gives the rollouts of one run."""


class Recipe(Knobs):
    """A whole training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Names the run's folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """The one seed: weights, problems, sampling and shuffling derive from it."""
    plugins: list[Plugin] = []
    """Files or modules that register components of your own."""
    task: Annotated[Task, tasks]
    """Prompts and gold answers."""
    policy: Annotated[Policy, policies]
    """The language model."""
    generation: Annotated[Generation, engines]
    """The engine that samples."""
    evidence: list[Annotated[Evidence, evidences]] = Field(min_length=1)
    """What tells success; rewards are the weighted sum, accuracy is the first one's mean."""
    critic: Annotated[Critic, critics] | None = None
    """Predicts returns; null for critic-free transports."""
    transport: Annotated[Transport, transports]
    """Carries rewards back along the tokens."""
    geometry: Annotated[Geometry, geometries]
    """Turns advantages into a policy change."""
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()

    @property
    def parts(self) -> dict[str, Component]:
        """Every component by its place, gates inside transports and frozen evaluation sets included."""
        found: dict[str, Component] = {}

        def add(place: str, value: Any) -> None:
            if isinstance(value, list):
                for index, item in enumerate(value):
                    add(f"{place}.{index}", item)
            elif isinstance(value, dict):
                for key, item in value.items():
                    add(f"{place}.{key}", item)
            elif isinstance(value, Knobs):
                if isinstance(value, Component):
                    found[place] = value
                for name in type(value).model_fields:
                    add(f"{place}.{name}", getattr(value, name))

        for name in type(self).model_fields:
            add(name, getattr(self, name))
        return found

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Least and greatest reward of a response."""
        ends = [sorted(bound * part.weight for bound in part.bounds) for part in self.evidence]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    def providers(self, need: str) -> list[str]:
        """Places of this recipe that provide `need`."""
        training = {place: part for place, part in self.parts.items() if not place.startswith("evaluation.")}
        found = [place for place, part in training.items() if need in part.provides]
        if need == "groups" and self.training.responses_per_prompt >= 2:
            found.append("training.responses_per_prompt")
        return found

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        problems = [
            (place, self._unmet(part, need))
            for place, part in self.parts.items()
            for need in sorted(part.needs)
            if not self.providers(need)
        ]
        each = self.training.responses_per_prompt
        problems += [
            (
                place,
                f"'{part.use}' tells responses to one prompt apart from {part.least_responses} of them on; "
                f"training.responses_per_prompt is {each}",
            )
            for place, part in self.parts.items()
            if isinstance(part, Transport) and 2 <= each < part.least_responses
        ]
        if self.generation.truncates and self.geometry.correction == "none" and self.geometry.ratio_to == "trainer":
            problems.append(
                (
                    "generation",
                    f"top_p ({self.generation.top_p}) or top_k ({self.generation.top_k}) leaves tokens out, so the trainer's "
                    "ratios are not of the distribution sampled from; set geometry.correction to truncate or mask, or "
                    "geometry.ratio_to to engine",
                )
            )
        if self.training.processes % self.generation.processes_per_engine:
            problems.append(
                (
                    "generation.tensor_parallel",
                    f"{self.generation.processes_per_engine} processes share an engine, which must divide the "
                    f"{self.training.processes} of training.devices x training.nodes",
                )
            )
        problems += self._ill_matched()
        if self.reward_bounds[0] >= self.reward_bounds[1]:
            problems.append(("evidence", "all evidence has weight 0, so every reward is the same; give one a weight"))
        if self.critic is not None and not any("values" in part.needs for part in self.parts.values()):
            problems.append(("critic", f"transport '{self.transport.use}' has no use for a critic; set `critic: null`"))
        if self.critic is None and self.training.critic_warmup:
            problems.append(("training.critic_warmup", "there is no critic to warm up; set it to 0"))
        if problems:
            raise ValidationError.from_exception_data(
                "Recipe",
                [
                    {
                        "type": PydanticCustomError("pairing", "{message}", {"message": message}),
                        "loc": tuple(int(key) if key.isdigit() else key for key in place.split(".")),
                        "input": place,
                    }
                    for place, message in problems
                ],
            )
        return self

    def _ill_matched(self) -> list[tuple[str, str]]:
        """Pairs that would run and silently mean something else, with what would keep the meaning."""
        geometry, transport = self.geometry, self.transport
        problems = []
        if transport.grain == "token" and geometry.grain == "sequence":
            able = [name for name in geometries.names() if geometries[name].grain == "token" and name != geometry.token_form]
            form = [f"{geometry.token_form}, its token form"] if geometry.token_form else []
            problems.append(
                (
                    "geometry",
                    f"'{geometry.use}' averages advantages over each response, which would erase the credit that transport "
                    f"'{transport.use}' gives to single tokens; these keep it: {', '.join([*form, *able])}",
                )
            )
        if transport.grain == "sequence" and transport.whitens == "token":
            problems.append(
                (
                    "transport",
                    f"'{transport.use}' gives one number per response and whitens over tokens, where a long response counts as "
                    "often as it has tokens; whiten over responses, or not at all",
                )
            )
        if geometry.kl_coef and geometry.kl_in_reward:
            problems.append(
                (
                    "geometry.kl_in_reward",
                    f"the KL to the starting policy would count twice, in rewards ({geometry.kl_in_reward}) and in the loss "
                    f"(kl_coef {geometry.kl_coef}); set one of them to 0",
                )
            )
        if geometry.kl_in_reward and self.critic is not None and self.critic.bounded:
            problems.append(
                (
                    "geometry.kl_in_reward",
                    f"takes returns out of the range of the evidence, which critic '{self.critic.use}' cannot leave; set its "
                    "output to scalar, or use kl_coef, the KL in the loss",
                )
            )
        if geometry.correction != "none" and geometry.ratio_to == "engine":
            problems.append(
                (
                    "geometry.correction",
                    f"'{geometry.correction}' weighs by trainer over engine, which a ratio to the engine holds already, and "
                    "would count twice; set ratio_to to trainer, which keeps the correction, or correction to none",
                )
            )
        return problems

    @staticmethod
    def _unmet(part: Component, need: str) -> str:
        if need == "groups":
            return f"'{part.use}' compares responses to one prompt: set training.responses_per_prompt to 2 or more"
        able = [
            f"{axis}: {name}"
            for axis, registry in REGISTRIES.items()
            for name in registry.names()
            if need in _provided(registry[name])
        ]
        what = f"provided by {', '.join(able)}" if able else "which no registered component provides"
        return f"'{part.use}' needs {need}, and nothing in this recipe provides it; {what}"


def _provided(cls: type[Component]) -> frozenset[str]:
    try:
        return cls.model_construct().provides
    except AttributeError:  # it depends on a knob without default
        return frozenset()


# --- loading ----------------------------------------------------------------------------------
Key = tuple[str | int, ...]


class _Source:
    """Plain data, and for each key path the place where it was written."""

    def __init__(self, data: Any = None, marks: dict[Key, str] | None = None):
        self.data = data if data is not None else {}
        self.marks = marks or {}

    def lay_over(self, base: _Source) -> _Source:
        marks = dict(base.marks)

        def merge(low: Any, high: Any, path: Key) -> Any:
            if isinstance(high, Mapping) and isinstance(low, str) and "use" not in high:
                low = {"use": low}  # `--set transport.lam=1` over `transport: gae`
            if (
                isinstance(high, Mapping)
                and high
                and isinstance(low, list)
                and all(isinstance(k, str) and k.isdecimal() for k in high)
            ):
                changed = {int(key): value for key, value in high.items()}
                for index in changed:
                    if index >= len(low):
                        raise RecipeError(f"{self.mark(path)}{dotted(path)} has {len(low)} entries; there is no number {index}")
                return [merge(item, changed[i], (*path, i)) if i in changed else item for i, item in enumerate(low)]
            registry = REGISTRIES.get(str(path[-1])) if path else None
            if registry and registry.keeps_shared and isinstance(low, Mapping):
                high = {"use": high} if isinstance(high, str) else high
                if isinstance(high, Mapping) and high.get("use", low.get("use")) != low.get("use"):
                    low = {"use": high["use"]} | {key: low[key] for key in registry.base.model_fields if key in low}
            same = isinstance(high, Mapping) and isinstance(low, Mapping) and high.get("use", low.get("use")) == low.get("use")
            if same:
                return {
                    key: merge(low[key], high[key], (*path, key)) if key in low and key in high else high.get(key, low.get(key))
                    for key in [*low, *(k for k in high if k not in low)]
                }
            for key in [key for key in marks if key[: len(path)] == path]:
                del marks[key]
            return high

        return _Source(merge(base.data, self.data, ()), marks | self.marks)

    def mark(self, path: Sequence[str | int]) -> str:
        """`file, line N: ` of the longest written prefix of a key path."""
        keys = tuple(path)
        while keys and keys not in self.marks:
            keys = keys[:-1]
        return self.marks.get(keys, "") and f"{self.marks[keys]}: "


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _read_yaml(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise RecipeError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    marks: dict[Key, str] = {}
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            _walk(root, (), marks, path, ())
        data = loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = f", line {mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{path}{at}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(data, dict):
        raise RecipeError(
            f"{path}: a recipe is a mapping of sections; found {'nothing' if data is None else type(data).__name__}"
        )
    return _Source(data, marks)


class _Loader(yaml.SafeLoader):
    """YAML whose odd values are errors with a line: `2024-13-45` looks like a date and is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r}: {error}; quote it if it is a text", problem_mark=node.start_mark
            ) from None


def _walk(node: yaml.Node, keys: Key, marks: dict[Key, str], path: Path, above: tuple[yaml.Node, ...]) -> None:
    """Mark where each key path was written. Raises RecipeError where a key stands twice or a node holds itself."""
    if any(node is outer for outer in above):
        raise RecipeError(f"{path}, line {node.start_mark.line + 1}: {dotted(keys)} holds itself")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            where = f"{path}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{where}: not YAML that a recipe can hold (a key must be a name)")
            if key.value in seen:
                raise RecipeError(f"{where}: the key '{dotted((*keys, key.value))}' stands twice")
            seen.add(key.value)
            marks[(*keys, key.value)] = where
            _walk(value, (*keys, key.value), marks, path, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            marks[(*keys, index)] = f"{path}, line {item.start_mark.line + 1}"
            _walk(item, (*keys, index), marks, path, (*above, node))


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> _Source:
    source, above = _read_yaml(path), (*above, path.resolve())
    if isinstance(source.data.get("plugins"), list):  # relative to the file that names them
        source.data["plugins"] = [_absolute_plugin(entry, path.parent) for entry in source.data["plugins"]]
    if isinstance(source.data.get("evidence"), list):  # so are files with code of evidence
        source.data["evidence"] = [_absolute_python(entry, path.parent) for entry in source.data["evidence"]]
    base = source.data.pop("base", None)
    if base is None:
        return source
    if not isinstance(base, str):
        raise RecipeError(f"{source.mark(('base',))}base must name one YAML file; found {base!r}")
    target = path.parent / base
    if not target.is_file():
        raise RecipeError(f"{source.mark(('base',))}base: {target}: no such file")
    if target.resolve() in above:
        raise RecipeError(
            f"{source.mark(('base',))}bases go round in a circle: {' -> '.join(p.name for p in (*above, target))}"
        )
    return source.lay_over(_with_bases(target, above))


def _absolute_plugin(entry: Any, folder: Path) -> Any:
    plugin = {"path": entry} if isinstance(entry, str) else entry
    if isinstance(plugin, dict) and isinstance(plugin.get("path"), str) and plugin["path"].endswith(".py"):
        plugin = {**plugin, "path": str((folder / plugin["path"]).resolve())}
    return plugin


def _absolute_python(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict) and entry.get("use") == "python" and isinstance(entry.get("path"), str):
        entry = {**entry, "path": str((folder / entry["path"]).resolve())}
    return entry


def _override(text: str) -> _Source:
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {text}: expected a.b=value, for example --set training.iterations=10")
    try:
        data: Any = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what looks like a date or a number and is none
        raise RecipeError(
            f"--set {text}: the value is not YAML ({getattr(error, 'problem', None) or error}); quote it"
        ) from None
    for name in reversed(keys):
        data = {name: data}
    path = tuple(int(k) if k.isdecimal() else k for k in keys)
    return _Source(data, {path[: i + 1]: f"--set {text}" for i in range(len(path))})


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, lay over bases and `--set`s, import plug-ins, validate.

    Raises RecipeError with every problem found. An error inside a plug-in passes through with its own
    traceback, noted with the recipe's line.
    """
    source = _with_bases(Path(path))
    for text in overrides:
        source = _override(text).lay_over(source)
    load_entry_points()
    source.data["plugins"] = _import_plugins(source)
    try:
        return Recipe.model_validate(source.data)
    except ValidationError as error:
        raise RecipeError(*(_describe(problem, source, Path(path)) for problem in _joined(error.errors()))) from None


def read_part(axis: str, written: str, overrides: Sequence[str] = ()) -> Component:
    """A component as a recipe would hold it, from YAML: a name or `{use: name, knob: value}`, and `--set`s of its knobs.

    Raises RecipeError.
    """
    try:
        data = yaml.safe_load(written)
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{axis} {written}: not YAML ({getattr(error, 'problem', None) or error})") from None
    source = _Source({axis: data})
    for text in overrides:
        source = _override(f"{axis}.{text}").lay_over(source)
    registry = REGISTRIES[axis]
    try:
        adapter: TypeAdapter[Component] = TypeAdapter(Annotated[registry.base, registry])  # type: ignore[arg-type]
        return adapter.validate_python(source.data[axis])
    except ValidationError as error:
        problems = [
            f"{dotted((axis, *problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in _joined(error.errors())
        ]
        raise RecipeError(*problems) from None


def _import_plugins(source: _Source) -> list[dict[str, Any]]:
    entries = source.data.get("plugins")
    entries = [] if entries is None else entries
    if not isinstance(entries, list):
        raise RecipeError(f"{source.mark(('plugins',))}plugins must be a list of files or modules; found {entries!r}")
    loaded = []
    for index, entry in enumerate(entries):
        where = source.mark(("plugins", index))
        try:
            plugin = Plugin.model_validate({"path": entry} if isinstance(entry, str) else entry)
        except ValidationError as error:
            raise RecipeError(
                f"{where}a plug-in is a path or module name; found {entry!r} ({error.errors()[0]['msg']})"
            ) from None
        try:
            digest = load_plugin(plugin.path, Path.cwd(), plugin.sha256)
        except PluginError as error:
            raise RecipeError(f"{where}{error}") from None
        except Exception as error:
            error.add_note(f"{where}plug-in {plugin.path} failed to import")
            raise
        loaded.append({"path": plugin.path, "sha256": digest})
    return loaded


def _joined(problems: Sequence[Any]) -> list[Any]:
    """Pydantic reports each branch of a union by itself, with the branch in the key path; here they are one problem."""
    found: list[Any] = []
    branches: dict[tuple[str | int, ...], Any] = {}
    for problem in problems:
        keys = tuple(key for key in problem["loc"] if not (isinstance(key, str) and "[" in key))
        if keys != problem["loc"] and keys in branches:
            branches[keys]["msg"] += ", or " + problem["msg"].removeprefix("Input should be ")
        else:
            found.append(problem | {"loc": keys})
            branches[keys] = found[-1]
    return found


def _describe(problem: Any, source: _Source, path: Path) -> str:
    keys = problem["loc"]
    purpose = _purpose(keys, source.data)
    where = source.mark(keys) or f"{path}: "
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{where}{dotted(keys)} is missing and has no default. {purpose}".rstrip()
    if problem["type"] in ("component", "pairing", "unknown_key"):
        return f"{where}{dotted(keys)}{': ' if keys else ''}{message}"
    found = repr(problem["input"])
    shown = f" (found {found if len(found) < 80 else found[:77] + '...'})" if not isinstance(problem["input"], dict) else ""
    return f"{where}{dotted(keys)}: {message[:1].lower()}{message[1:]}{shown}. {purpose}".rstrip()


def _purpose(keys: Sequence[str | int], data: Any) -> str:
    """The docstring of the knob at a key path, where there is one."""
    knobs: Any = Recipe
    description, registry = "", None
    for key in keys:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            data = None
        if isinstance(key, str) and get_origin(knobs) is not dict:  # an index, or a name, stays within its axis
            field = knobs.model_fields.get(key) if isinstance(knobs, type) and issubclass(knobs, Knobs) else None
            if field is None:
                return ""
            description, knobs = field.description or "", field.annotation
            annotations = [*field.metadata, *(note for item in get_args(field.annotation) for note in get_args(item))]
            registry = next((note for note in annotations if isinstance(note, Registry)), None)
        name = data.get("use") if isinstance(data, dict) else data
        if registry is not None and name in registry.names():
            knobs = registry[name]
    return description


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every knob with its value."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def json_schema() -> dict[str, Any]:
    """JSON Schema of recipe files, for editors; plug-ins imported so far included."""
    schema = Recipe.model_json_schema(mode="validation")
    schema["$defs"] |= {axis: registry.json_schema() for axis, registry in REGISTRIES.items()}
    schema["properties"]["base"] = {"type": "string", "description": "Recipe file that this one is laid over."}
    schema["properties"]["plugins"]["items"] = {"anyOf": [{"type": "string"}, schema["properties"]["plugins"]["items"]]}
    schema.pop("required")  # any key may stand in a base

    def refer(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(node.get("axis"), str):
                return {
                    "$ref": f"#/$defs/{node['axis']}",
                    **({"description": node["description"]} if "description" in node else {}),
                }
            return {key: refer(value) for key, value in node.items()}
        return [refer(item) for item in node] if isinstance(node, list) else node

    return refer(schema)
