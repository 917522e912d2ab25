"""A function in a file of the user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from pydantic import Field, PrivateAttr, model_validator

from cct.registry import did_you_mean, run_file
from cct.rollout import Prompt, Response

from .base import Evidence, Verdict, evidences, in_order, plain


@evidences.register("python")
class PythonFunction(Evidence):
    """What your function f(prompt, response) returns: a score, one reward per emitted token, or None to abstain."""

    path: Path
    """Python file, relative to the recipe."""
    function: str = Field("score", min_length=1)
    """Name of the function in the file. It receives a cct.rollout.Prompt and a cct.rollout.Response, and the iteration if it
    has a parameter of that name."""
    low: float = Field(0.0, ge=-1e6, le=1e6)
    """Lowest total of a response."""
    high: float = Field(1.0, ge=-1e6, le=1e6)
    """Highest total of a response. Bounded critics rely on both bounds; a total outside is an error."""
    workers: int = Field(2, ge=0, le=256)
    """Worker processes that judge; 0 judges in the trainer's process and needs `time_limit: null`."""
    time_limit: float | None = Field(10.0, gt=0, le=86400)
    """Time limit for one response in seconds; a worker that exceeds it is ended and replaced. Null: no limit."""

    _iteration: int = PrivateAttr(0)

    _bounded = model_validator(mode="after")(in_order)

    @cached_property
    def _function(self) -> Callable[..., Verdict]:
        path = self.path.resolve()
        if not path.is_file():
            raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
        functions = {name: value for name, value in vars(run_file(path)).items() if callable(value)}
        if self.function not in functions:
            own = [name for name, value in functions.items() if getattr(value, "__module__", "") == run_file(path).__name__]
            raise ValueError(f"{path}: {did_you_mean('function', self.function, own)}")
        return functions[self.function]

    @cached_property
    def _wants_iteration(self) -> bool:
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except ValueError:  # of a function written in C
            return False
        return any(p.name == "iteration" or p.kind is p.VAR_KEYWORD for p in parameters)

    def ready(self) -> None:
        _ = self._function

    def at(self, iteration: int) -> PythonFunction:
        if not self._wants_iteration:
            return self
        bound = self.model_copy()
        bound._iteration = iteration
        return bound

    def __call__(self, prompt: Prompt, response: Response) -> Verdict:
        now = {"iteration": self._iteration} if self._wants_iteration else {}
        numbers = plain(self._function(prompt, response, **now), self.function)
        if numbers is None and not self.low <= 0 <= self.high:
            raise ValueError(
                f"{self.function} abstained, which counts 0, outside [{self.low:g}, {self.high:g}]; set low and high"
            )
        if numbers is None:
            return None
        total = math.fsum(numbers) if isinstance(numbers, list) else numbers
        slack = 1e-6 * max(1.0, abs(self.low), abs(self.high))
        if not self.low - slack <= total <= self.high + slack:
            raise ValueError(f"{self.function} returned {total:g}, outside [{self.low:g}, {self.high:g}]; set low and high")
        return numbers

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high
