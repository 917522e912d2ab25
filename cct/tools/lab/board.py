"""The study that the laboratory runs: which tasks, which arms, and the recipe beneath them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from cct.loading import Source, override, read_part, recipe_of
from cct.recipe import RecipeError
from cct.registry import REGISTRIES, Component, did_you_mean
from cct.task import tasks
from cct.task.lab import LabTask
from cct.tools.conformance.report import find
from cct.tools.study.summary import CEILING, FLOOR
from cct.transport import transports

TASKS = [name for name in tasks.names() if issubclass(tasks[name], LabTask)]
EVERY = "all"  # in place of an operator: each transport that comes with cct
ORACLE = "exact"  # in place of a critic
Critics = Sequence[Component | None]  # None: the oracle
TAKEN = ("transport", "gate", "critic")  # axes of operators

# Half a minute a run on one core; so few responses that noise in the credit is felt.
BASE: dict[str, Any] = {
    "task": {"use": "parts"},
    "policy": {
        "use": "scratch",
        "hidden_size": 96,
        "layers": 4,
        "heads": 3,
        "kv_heads": 3,
        "warm_start": {"steps": 500, "batch_size": 64, "learning_rate": 2e-3},
    },
    "generation": {"use": "transformers", "max_new_tokens": 48, "temperature": 1.0},
    "evidence": ["lab"],
    "transport": FLOOR,
    "geometry": {"use": "ppo_clip", "aggregation": "token_mean"},
    "training": {
        "iterations": 32,
        "prompts_per_iteration": 4,
        "responses_per_prompt": 4,
        "minibatch_size": 16,
        "learning_rate": 2e-4,
    },
    "evaluation": {"every": 4},
    "logging": {"rollouts": "never"},
}

# Of an arm with a critic. It learns from eight iterations at once: sixteen responses alone tell it next to nothing.
CRITIC: dict[str, Any] = {
    "critic_learning_rate": 1e-3,
    "critic_epochs": 1,
    "critic_window": 8,
    "critic_warmup": 16,
}


@dataclass(frozen=True)
class Arm:
    """A transport and its critic, laid over the recipe."""

    name: str
    layer: dict[str, Any]

    @property
    def transport(self) -> str:
        part = self.layer["transport"]
        return part["of"]["use"] if part["use"] == "exact_critic" else part["use"]

    @property
    def critic(self) -> str:
        oracle = self.layer["transport"]["use"] == "exact_critic"
        return ORACLE if oracle else (self.layer.get("critic") or {}).get("use", "none")


def board(
    name: str, operators: Sequence[str], critics: Sequence[str], task_names: Sequence[str], seeds: int, changes: Sequence[str]
) -> tuple[dict[str, Any], list[Arm], list[str]]:
    """The study as plain data, its arms, and what was left out of `all`, with the reason of each.

    operators: names, YAML, `file.py:name`, or `all`. critics: names or YAML, `exact` for the oracle, under each of which a
    transport that reads values is run. changes: `a.b=c` of the recipe beneath. Raises RecipeError.
    """
    common = Source({})
    for text in changes:
        common = override(text).lay_over(common)
    training = common.data.get("training", {})
    critic = CRITIC | {key: training.pop(key) for key in CRITIC if key in training}  # of the arms that have one
    levels = {task: _level(task, common.data) for task in task_names}
    their = [None if written.strip() == ORACLE else read_part("critic", written) for written in critics]
    arms = [Arm(FLOOR, {"transport": {"use": FLOOR}}), Arm(CEILING, {"transport": {"use": CEILING}})]
    left_out: list[str] = []
    for written in operators:
        if written == EVERY:
            found, left_out = _every(their, common)
            arms += found
        else:
            arms += _arms(written, their)
    arms = list({arm.name: arm for arm in arms}.values())
    for arm in arms:
        if "critic" in arm.layer:
            arm.layer["training"] = critic
    study = {
        "name": name,
        "base": "base.yaml",
        "arms": {arm.name: arm.layer for arm in arms},
        "factors": {"task": levels},
        "common": common.data,
        "seeds": list(range(seeds)),
        "compare": [[arm.name, FLOOR] for arm in arms[1:]],
        "stable": {"max_drop": 0.2, "max_kl": 0.1},
    }
    return study, arms, left_out


def _level(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What an arm's recipe is laid under for a task: the task, and room for its longest response."""
    if name not in TASKS:
        raise RecipeError(did_you_mean("task of the laboratory", name, TASKS))
    knobs = changes.get("task", {})
    try:
        task = TypeAdapter(Annotated[LabTask, tasks]).validate_python({**knobs, "use": name} if knobs else name)
    except ValidationError as error:
        raise RecipeError(*(f"task {name}: {problem['msg']}" for problem in error.errors())) from None
    return {"task": {"use": name}, "generation": {"max_new_tokens": task.longest_answer + 1}}


def _arms(written: str, critics: Critics) -> list[Arm]:
    """The arms of one operator: a transport, a gate (of `comp_gae`), or a critic (under `gae`)."""
    if written.lstrip().startswith("{"):
        axis, part, plugins = "transport", read_part("transport", written), list[str]()
    else:
        axis, part = find(written, next((axis for axis in TAKEN if written in REGISTRIES[axis].names()), None), [])
        file, colon, _ = written.rpartition(":")
        plugins = [str(Path(file if file.endswith(".py") else f"{file}.py").resolve())] if colon else []
    dumped = part.model_dump(mode="json")
    more: dict[str, Any] = {"plugins": plugins} if plugins else {}
    if axis == "critic":
        return [_arm({"use": "gae"}, dumped, f"gae.{_slug(part)}", more)]
    if axis == "gate":
        of = read_part("transport", f"{{use: comp_gae, gate: {json.dumps(dumped)}}}")
        return _under(of, f"comp_gae.{_slug(part)}", critics, more)
    if axis != "transport":
        raise RecipeError(f"{written} is a {axis}; the laboratory takes transports, gates and critics")
    return _under(part, _slug(part), critics, more)


def _under(transport: Component, name: str, critics: Critics, more: dict[str, Any]) -> list[Arm]:
    """One arm, or where the transport reads values one for each critic."""
    dumped = transport.model_dump(mode="json")
    if "values" not in transport.needs:
        return [Arm(name, more | {"transport": dumped})]
    found = []
    for critic in critics:
        if critic is None:
            found.append(Arm(f"{name}.{ORACLE}", more | {"transport": {"use": "exact_critic", "of": dumped}}))
        else:
            found.append(_arm(dumped, critic.model_dump(mode="json"), f"{name}.{_slug(critic)}", more))
    return found


def _arm(transport: dict[str, Any], critic: dict[str, Any], name: str, more: dict[str, Any]) -> Arm:
    return Arm(name, more | {"transport": transport, "critic": critic})


def _every(critics: Critics, common: Source) -> tuple[list[Arm], list[str]]:
    """Arms of every transport of cct's, and those that do not fit the laboratory's recipe, each with the reason."""
    found, left_out = list[Arm](), list[str]()
    for name in transports.names():
        cls = transports[name]
        if name in (FLOOR, CEILING, "exact_critic") or not cls.__module__.startswith("cct."):
            continue
        try:
            for arm in _under(read_part("transport", name), name, critics, {}):
                recipe = common.lay_over(Source(arm.layer).lay_over(Source({"name": "lab"} | BASE)))
                recipe_of(recipe, Path(name))
                found.append(arm)
        except RecipeError as error:
            left_out.append(f"{name}: {error.problems[0]}")
    return found, left_out


def _slug(part: Component) -> str:
    """A name for a part: what it is, and the knobs that are not at their defaults."""
    changed = ((knob, getattr(part, knob)) for knob in type(part).model_fields)
    words = [f"{knob}{_word(x)}" for knob, x in changed if x != part.default_of(knob)]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join([part.use, *words])).strip("_")[:80]


def _word(value: Any) -> str:
    return _slug(value) if isinstance(value, Component) else str(value)


def names(text: str) -> list[str]:
    """`a,b` as names."""
    return [name.strip() for name in text.split(",") if name.strip()]
