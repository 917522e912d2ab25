"""Evaluation, logging and callbacks: what observes a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator

from cct.evidence import Evidence, evidences
from cct.registry import Knobs, did_you_mean, run_file
from cct.statistic import Statistic, statistics
from cct.task import Task, tasks

AnyStatistic = Annotated[Statistic, statistics]  # under a knob called `statistics`
T = TypeVar("T")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]

CLASS = r"(.+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)"
LOGGERS = {"csv": "lightning", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Loggers that have a name, and the module that each needs."""


class EvaluationSet(Knobs):
    """One more set of held-out problems, evaluated while a run trains."""

    task: Annotated[Task, tasks]
    """Whose held-out problems they are."""
    evidence: list[Annotated[Evidence, evidences]] | None = Field(None, min_length=1)
    """What judges them, accuracy by the first one; null is the recipe's evidence."""
    every: int | None = Field(None, ge=1)
    """Iterations between evaluations; there is also one before the first and one after the last. Null: `evaluation.every`."""
    samples: int = Field(0, ge=0, le=10_000)
    """Responses sampled to each problem at the temperature of training, for avg@n and pass@n; 0 decodes greedily only."""


class Evaluation(Knobs):
    """Greedy decoding of the task's held-out prompts, and of further sets."""

    every: int = Field(10, ge=1)
    """Iterations between evaluations; there is always one before the first iteration and one after the last."""
    sets: dict[Name, EvaluationSet] = Field({}, max_length=64)
    """Further evaluation sets by name, logged as `sets/NAME/accuracy` and so on."""
    best: str | None = Field(None, min_length=1, max_length=200)
    """Metric of metrics.jsonl, `eval/accuracy` or `sets/NAME/accuracy` for example: policy/ then holds the policy of the
    iteration from 1 on where it was best, the first of equals, and that checkpoint is kept. Null, or if it was never measured:
    the last iteration's policy."""
    best_is: Literal["max", "min"] = "max"
    """Whether the greatest or the smallest value of `best` is the best one."""
    frozen: dict[Name, Annotated[Task, tasks]] = Field({}, max_length=64)
    """Further evaluation sets by name, each the held-out problems of a task. Only `cct eval` reads them; a run never does."""

    @property
    def other_tasks(self) -> dict[str, Task]:
        """The tasks of all further sets by their places in the recipe."""
        frozen = {f"evaluation.frozen.{name}": task for name, task in self.frozen.items()}
        return {f"evaluation.sets.{name}": one.task for name, one in self.sets.items()} | frozen

    def best_of(self, events: Iterable[Mapping[str, float]]) -> tuple[int, float] | None:
        """Iteration and value of the first best `best` among events of metrics.jsonl, from iteration 1 on; never NaN."""
        sign, name = 1 if self.best_is == "max" else -1, self.best or ""
        found = [(int(event["iteration"]), event[name]) for event in events if event["iteration"] > 0 and name in event]
        found = [each for each in found if math.isfinite(each[1])]
        return max(found, key=lambda each: sign * each[1], default=None)

    @property
    def unread(self) -> dict[str, str]:
        return {} if self.best else {"best_is": "evaluation.best names no metric"}


class LightningPart(Knobs):
    """A class by its import path or file, and its arguments."""

    use: str = Field(pattern=rf"^{CLASS}$", max_length=1000)
    """The class: `lightning.pytorch.callbacks.EarlyStopping`, or `./mine.py:Mine`, with the file relative to the recipe."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""

    def made(self, base: type[T], called: str) -> T:
        """An instance. called: what the base class is called. Raises whatever the class does, TypeError if it is of another."""
        where, _, name = self.use.rpartition(":" if ".py:" in self.use else ".")
        cls = getattr(run_file(Path(where)) if where.endswith(".py") else import_module(where), name)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise TypeError(f"it is not a subclass of {called}")
        return cls(**self.arguments)


class LightningCallback(LightningPart):
    """A Lightning callback, Lightning's or yours. It may monitor any metric of metrics.jsonl."""


class LightningLogger(LightningPart):
    """A logger by its name, or a Lightning logger's class, and its arguments."""

    use: str = Field(max_length=1000)
    """csv, tensorboard, wandb, mlflow or trackio; or a class, `lightning.pytorch.loggers.CometLogger` or `./mine.py:Mine`."""

    @field_validator("use")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in LOGGERS or re.fullmatch(CLASS, name):
            return name
        raise ValueError(f"{did_you_mean('logger', name, LOGGERS)}; or name a class, `package.Class` or `./file.py:Class`")


def _several(asked: Any) -> Any:
    """One logger or several, each a name or a mapping with `use`."""
    every = asked if isinstance(asked, list) else [asked]
    return [{"use": one} if isinstance(one, str) else one for one in every]


OneOrSeveral = str | LightningLogger | list[str | LightningLogger]


class Logging(Knobs):
    """What a run writes besides metrics.jsonl."""

    logger: Annotated[list[LightningLogger], BeforeValidator(_several, json_schema_input_type=OneOrSeveral)] = Field(
        [LightningLogger(use="csv")], max_length=16
    )
    """Where metrics go: one logger or a list, each csv, tensorboard, wandb, mlflow or trackio, or `{use: wandb, arguments:
    {project: mine, offline: true}}`. The arguments are those of Lightning's class, of trackio those of `trackio.init`. All but
    csv need the extra of their name."""
    samples: int = Field(8, ge=0, le=1000)
    """Responses per iteration in samples.jsonl, and in a table of samples of each logger that has tables."""
    artifacts: bool = True
    """Give recipe.yaml, samples.jsonl and, at the end, report.html to each logger that keeps files."""
    statistics: list[AnyStatistic] = Field([], max_length=64)
    """Statistics of the behaviour forward to measure in each iteration, in addition to those that the transport reads. Mean and
    standard deviation over trainable tokens are logged as `statistic/NAME/mean` and `/std`; stored rollouts hold them."""
    rollouts: Literal["auto", "always", "never"] = "auto"
    """Store what transports read of each iteration in rollouts/, for `cct replay`. auto: stop once a run's rollouts would
    exceed rollouts_mb. always: no limit."""
    rollouts_mb: float = Field(64.0, gt=0, le=1e6)
    """Limit of auto for the rollouts of one run, in megabytes."""

    @property
    def unread(self) -> dict[str, str]:
        return {} if self.rollouts == "auto" else {"rollouts_mb": f"rollouts: {self.rollouts} has no limit"}
