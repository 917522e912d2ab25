"""A run's folder, without torch: its files, their content, and whether the run can be resumed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cct.loading import Source, changes, load_recipe, override, read_yaml, recipe_of, with_bases
from cct.recipe import Logging, Recipe, RecipeError
from cct.system.files import LOCK, Held, damage, forget, kept, locked, remove, sweep, write_text, writing

if TYPE_CHECKING:
    from cct.rollout import Rollout

# What a resumed run keeps: the weights, what they were made from, and how epochs are counted.
KEPT = ("name", "seed", "policy", "critic", "training.critic_warmup")
# Beside these where DeepSpeed wrote the checkpoint: a folder of parts, one for each process.
KEPT_BY_DEEPSPEED = ("training.strategy", "training.offload", "training.devices", "training.nodes")
NAMED = ("stats", "components")  # fields of a rollout that hold [B, T] by name, stored as `stats/NAME`
SHOWN, LONG = 4, 80  # changes named in a refusal, and characters of each


class RunFolder:
    """The folder of a run; docs/runs.md describes its files."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe_file = path / "recipe.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.samples_file = path / "samples.jsonl"
        self.tokens_file = path / "tokens.json"
        self.fidelity_file = path / "fidelity.json"
        self.evaluation_file = path / "eval.json"  # of a study's cell
        self.trace_file = path / "trace.json.gz"
        self.policy = path / "policy"  # written last, whole or not at all
        self.full = path / "rollouts" / "full"  # the limit was reached in the iteration that it names; no rollout since then

    @classmethod
    def new(cls, root: Path, name: str) -> RunFolder:
        """`root/name/001`, or the next number that is free; created."""
        number = 1 + max([int(p.name) for p in (root / name).glob("*") if p.name.isdigit()], default=0)
        while True:
            folder = root / name / f"{number:03d}"
            with writing(folder):
                try:
                    folder.mkdir(parents=True)
                    return cls(folder)
                except FileExistsError:  # another run took it
                    number += 1

    def __str__(self) -> str:
        return str(self.path)

    def must_be_run(self) -> None:
        """Raises RecipeError where the folder is not a run folder."""
        if not self.path.is_dir():
            found = "is no folder" if self.path.exists() else "no such folder"
            raise RecipeError(f"{self}: {found}; a run folder looks like runs/compo/001")
        if not self.recipe_file.is_file():
            raise RecipeError(f"{self}: not a run folder (no recipe.yaml)")

    def must_be_trained(self) -> None:
        """Raises RecipeError where the folder is not a finished run."""
        self.must_be_run()
        if not self.policy.is_dir():
            raise RecipeError(f"{self}: no exported policy (policy/); the run has not ended yet")

    @property
    def has_begun(self) -> bool:
        """Whether an iteration of the run was finished; before that it has evaluated its starting policy at most."""
        return bool(self.checkpoints) or any("train/reward" in event for event in self.metrics)

    @contextmanager
    def only_run(self) -> Iterator[None]:
        """Hold the lock, and remove what a killed process left half written. Raises RecipeError where another has it."""
        try:
            with locked(self.path):
                for place in (self.path, self.path / "checkpoints", self.path / "rollouts"):
                    sweep(place)
                yield
        except Held as held:
            raise RecipeError(f"{self}: {held} is training in this folder (it holds {LOCK}); wait for it, or end it") from None

    def load_recipe(self, overrides: Sequence[str] = (), *, trust: bool = False) -> Recipe:
        """The run's recipe. Raises RecipeError where the folder is not a run folder.

        A plug-in is imported, which runs it, where it has the SHA-256 that the run recorded; with `trust` any is.
        """
        self.must_be_run()
        path = self.recipe_file
        source = with_bases(read_yaml(path), path)
        for text in overrides:
            source = override(text).lay_over(source)
        named = source.data.get("plugins")
        plugins = [dict(one) if isinstance(one, dict) else {"path": one} for one in named] if isinstance(named, list) else []
        for plugin in plugins:
            if trust:
                plugin["sha256"] = None
            elif not plugin.get("sha256"):
                raise RecipeError(
                    f"{path}: the plug-in {plugin.get('path')} has no recorded SHA-256, so it may be anyone's "
                    "code; --trust-plugins runs it"
                )
        return recipe_of(Source(source.data | ({"plugins": plugins} if plugins else {}), source.marks), path)

    # --- numbers ------------------------------------------------------------------------------
    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The events. Raises BrokenLine."""
        return read_lines(self.metrics_file)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Responses, for people. Raises BrokenLine."""
        return read_lines(self.samples_file)

    # --- checkpoints --------------------------------------------------------------------------
    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first; each is named by the iteration after which it was taken."""
        return sorted((self.path / "checkpoints").glob("[0-9]*.ckpt"), key=lambda path: int(path.stem))

    def best(self, recipe: Recipe, reached: int | None = None) -> tuple[int, float] | None:
        """Iteration and value of the best `evaluation.best`, up to iteration `reached`, among those that have a checkpoint."""
        kept = {int(path.stem) for path in self.checkpoints}
        kept = {number for number in kept if reached is None or number <= reached}
        return recipe.evaluation.best_of(event for event in self.metrics if event["iteration"] in kept)

    def checkpoint_file(self, iteration: int) -> Path:
        return self.path / "checkpoints" / f"{iteration:06d}.ckpt"

    def checkpoint(self, iteration: int | None = None) -> Path:
        """The checkpoint after an iteration, the newest where None. Raises RecipeError where there is none that can be read."""
        self.must_be_run()
        saved = {int(path.stem): path for path in self.checkpoints}
        if not saved or iteration not in {None, *saved}:
            there = f"there are those of iterations {', '.join(map(str, saved))}" if saved else "none was taken yet"
            raise RecipeError(f"{self}: no checkpoint of iteration {iteration}; {there}")
        chosen = saved[max(saved) if iteration is None else iteration]
        if (why := self._damaged(chosen)) is not None:
            others = ", ".join(str(number) for number, path in saved.items() if path != chosen) or "none"
            raise RecipeError(f"{chosen}: cannot be read ({why}); other iterations with a checkpoint: {others}")
        return chosen

    def newest_readable(self) -> tuple[Path, list[str]]:
        """The newest checkpoint that can be read, and a line on each newer one. Raises RecipeError where there is none."""
        skipped: list[str] = []
        for checkpoint in reversed(self.checkpoints):
            if (why := self._damaged(checkpoint)) is None:
                return checkpoint, skipped
            skipped.append(f"{checkpoint}: skipped, it cannot be read ({why})")
        raise RecipeError(*skipped, f"{self}: no checkpoint can be read; start the recipe again")

    def _damaged(self, checkpoint: Path) -> str | None:
        from cct.policy.checkpoints import unreadable

        return damage(self.path, checkpoint) or unreadable(checkpoint)

    # --- rollouts -----------------------------------------------------------------------------
    @property
    def rollouts(self) -> dict[int, Path]:
        """The stored rollouts by iteration, the earliest first."""
        found = self.full.parent.glob("*.safetensors")
        return dict(sorted((int(path.stem), path) for path in found if re.fullmatch(r"-?\d+", path.stem)))

    def store(self, rollout: Rollout, iteration: int, logging: Logging) -> None:
        """Write what a transport reads of an iteration, unless the recipe says otherwise or the run's limit is reached."""
        import torch
        from safetensors.torch import save_file

        if logging.rollouts == "never" or (logging.rollouts == "auto" and self.full.exists()):
            return
        tensors = {name: x.detach().cpu().contiguous() for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)}
        for kind in NAMED:
            tensors |= {f"{kind}/{name}": x.detach().float().cpu().contiguous() for name, x in getattr(rollout, kind).items()}
        # Token numbers are small, and padding is seen from the mask: half the bytes.
        tensors = {name: x.to(torch.int32) if x.dtype == torch.int64 else x for name, x in tensors.items()}
        tensors["attention_mask"] = tensors["attention_mask"].bool()
        if logging.rollouts == "auto":
            size = sum(x.numel() * x.element_size() for x in tensors.values())
            there = sum(path.stat().st_size for path in self.full.parent.glob("*.safetensors"))
            if there + size > logging.rollouts_mb * 1e6:
                write_text(self.full, f"{iteration}\n")
                return
        metadata = {"moments": json.dumps(rollout.moments), "seed": str(rollout.seed), "weights": json.dumps(rollout.weights)}
        with kept(self.path, self.full.with_name(f"{iteration}.safetensors")) as unfinished:
            save_file(tensors, unfinished, metadata)

    def rollout(self, iteration: int) -> Rollout:
        """A stored rollout, on the CPU. Raises RecipeError where the file is none, or not as it was written."""
        import torch
        from safetensors import SafetensorError, safe_open

        from cct.rollout import Rollout

        path = self.rollouts[iteration]
        if (why := damage(self.path, path)) is not None:
            raise RecipeError(f"{path}: {why}; remove it to read the others")
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise RecipeError(f"{path}: cannot be read ({error})") from None
        whole = {name: x.long() if x.dtype == torch.int32 or name == "attention_mask" else x for name, x in tensors.items()}
        named: dict[str, Any] = {
            kind: {name.removeprefix(f"{kind}/"): whole.pop(name) for name in tensors if name.startswith(f"{kind}/")}
            for kind in NAMED
        }
        moments = {name: (float(mean), float(std)) for name, (mean, std) in json.loads(metadata["moments"]).items()}
        assert all(math.isfinite(x) for pair in moments.values() for x in pair)
        weights = {name: float(weight) for name, weight in json.loads(metadata.get("weights", "{}")).items()}
        return Rollout(**whole, **named, moments=moments, weights=weights, seed=int(metadata["seed"]))

    # --- going on -----------------------------------------------------------------------------
    def drop_after(self, iteration: int) -> None:
        """Remove what a resumed run makes again: later events, samples, rollouts and checkpoints."""
        for path in (self.metrics_file, self.samples_file):
            events = [event for event in read_lines(path) if event["iteration"] <= iteration]
            if path.is_file():
                write_text(path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events))
        later = [path for number, path in self.rollouts.items() if number > iteration]
        later += [path for path in self.checkpoints if int(path.stem) > iteration]  # they could not be read
        if self.full.exists() and int(self.full.read_text(encoding="utf-8")) > iteration:
            later.append(self.full)
        self.drop(*later)

    def drop(self, *paths: Path) -> None:
        """Remove files and their checksums."""
        for path in paths:
            remove(path)
        forget(self.path, *paths)

    def to_resume(self, recipe: Recipe | None = None, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
        """The recipe to resume the run with, and what it changes: `recipe`, or by default the run's own with `overrides`.

        Raises RecipeError where nothing is left to do, no checkpoint was taken, or the recipe is for other weights.
        """
        self.must_be_run()
        if not (saved := self.checkpoints):
            raise RecipeError(f"{self}: no checkpoint was taken yet; start the recipe again")
        _ = self.metrics, self.samples  # or they would be found broken when the run has begun
        before = load_recipe(self.recipe_file)
        recipe = recipe or load_recipe(self.recipe_file, overrides)
        changed = changes(before.model_dump(mode="json"), recipe.model_dump(mode="json"))
        keeps = KEPT + (KEPT_BY_DEEPSPEED if saved[-1].is_dir() or recipe.training.strategy.startswith("deepspeed") else ())
        if refused := _for_other_weights(before, recipe, changed, keeps):
            more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
            raise RecipeError(
                f"{self}: a resumed run keeps its {', '.join(keeps)}; these would change: {'; '.join(refused[:SHOWN])}{more}. "
                "Start a new run instead"
            )
        reached, wanted = int(saved[-1].stem), recipe.training.iterations
        if reached > wanted:
            raise RecipeError(
                f"{self}: iteration {reached} is done, and training.iterations is {wanted}; "
                f"`cct export {self} FOLDER --iteration N` writes the policy of an earlier checkpoint "
                f"(available: {', '.join(str(int(path.stem)) for path in saved)})"
            )
        if reached >= wanted and self.policy.exists():
            raise RecipeError(
                f"{self}: complete, all {wanted} iterations are done; `--set training.iterations={2 * reached}` trains further"
            )
        return recipe, changed


def _for_other_weights(before: Recipe, recipe: Recipe, changed: Sequence[str], keeps: Sequence[str]) -> list[str]:
    """Changes that do not fit the checkpoint's weights."""
    refused = [line for line in changed if any(line.startswith((f"{place}:", f"{place}.")) for place in keeps)]
    refused = [line if len(line) <= LONG else f"{line[:LONG]}..." for line in refused]
    if recipe.task != before.task and recipe.policy.warm_start is not None and recipe.needs("reference"):
        refused.append("task: another one, on whose demonstrations the reference model would be made again")
    if recipe.critic is not None and recipe.reward_bounds != before.reward_bounds:
        bounds = f"{before.reward_bounds} -> {recipe.reward_bounds}"
        refused.append(f"evidence: rewards in {bounds}, which bound the critic's values")
    if recipe.policy.reads_alphabet and recipe.alphabet != before.alphabet:
        refused.append("task: other characters, of which the policy's tokenizer is made")
    return refused


class BrokenLine(RecipeError):
    """A line of a .jsonl file is not a JSON object; `place` names file and line."""

    def __init__(self, place: str, error: Exception):
        super().__init__(f"{place}: {error}; take the line out, or begin a new run")
        self.place = place


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none where it is missing. A last line that is not whole is left out. Raises BrokenLine."""
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n") if path.is_file() else []
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError("not an object")
            events.append(event)
        except ValueError as error:
            if number < len(lines):
                raise BrokenLine(f"{path}, line {number}", error) from None
    return events
