"""The Evidence axis. A recipe lists one or several; a response's reward is their weighted sum."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, model_validator

from cct.registry import RAISED, Component, Registry, error_text

if TYPE_CHECKING:
    from cct.rollout import Prompt, Response

P = TypeVar("P", bound=Component)

TEXT = str | bytes | bytearray

# A number of evidence is no larger: its square, summed over a batch, has to stay within float32, weights included.
LARGEST = 1e12

# A score, counted at the last emitted token, or one reward per emitted token; None where the evidence does not apply.
Verdict = float | Sequence[float] | None


@dataclass(frozen=True)
class Failure:
    """Replaces a verdict if judging raised, its process died, or it took too long."""

    reason: str
    """`KeyError: 'x' (reward.py:12)`."""
    timed_out: bool = False
    """It took longer than `time_limit`."""
    cause: BaseException | None = None
    """What was raised, where that was in this process."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(error_text(error), cause=error)


def plain(verdict: Any, giver: str = "it") -> float | list[float] | None:
    """A verdict in plain numbers; one of numpy's or a tensor without dimensions is a number too. giver: for the message.

    Raises ValueError where it is neither a finite number nor several, of at most `LARGEST` in size, nor None.
    """
    if verdict is None:
        return None
    try:
        several = (isinstance(verdict, Sequence) and not isinstance(verdict, TEXT)) or len(getattr(verdict, "shape", ())) > 0
        found = [_number(x) for x in verdict] if several else [_number(verdict)]
    except Exception:  # whatever a value of the user's raises when it is asked for its number
        found, several = [math.nan], False
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{giver} returned {_shown(verdict)}; expected a finite number, or one for each token")
    if any(abs(x) > LARGEST for x in found):
        raise ValueError(f"{giver} returned {_shown(verdict)}; expected numbers between -{LARGEST:g} and {LARGEST:g}")
    return found if several else found[0]


def _number(x: Any) -> float:
    """Raises TypeError for text, for arrays, and for complex numbers, whose imaginary part numpy would drop."""
    is_complex = isinstance(x, numbers.Complex) and not isinstance(x, numbers.Real)
    if is_complex or isinstance(x, TEXT) or len(getattr(x, "shape", ())) > 0:
        raise TypeError
    return float(x.detach() if hasattr(x, "detach") else x)


def _shown(verdict: Any) -> str:
    """The beginning of its repr; Python writes no integer of thousands of digits, and a class's own may raise."""
    try:
        return repr(verdict)[:80]
    except Exception:
        return f"a value of type {type(verdict).__name__}"


def can_end_workers(part: P) -> P:
    """Of knobs with `workers` and `time_limit`: raises ValueError where no worker could be ended."""
    if part.time_limit is not None and not part.workers:  # type: ignore[attr-defined]
        raise ValueError("time_limit needs a worker process that can be ended: set workers to 1 or more, or time_limit: null")
    return part


def in_order(part: P) -> P:
    """Of knobs `low` and `high`: raises ValueError where low is not below high."""
    low, high = part.low, part.high  # type: ignore[attr-defined]
    if low >= high:
        raise ValueError(f"low ({low:g}) must be below high ({high:g})")
    return part


class Evidence(Component):
    """Judges one response: a score, or one reward per emitted token."""

    weight: float = Field(1.0, ge=-1000, le=1000)
    """Factor in the weighted sum of all evidence."""
    on_error: Literal["fail", "zero", "drop"] = "fail"
    """If judging raises or takes too long: stop the run, count 0, or leave the response out of the update."""
    workers: int = Field(0, ge=0, le=256)
    """Worker processes that judge. With 0, the trainer's process judges, and a verifier that hangs blocks the run."""
    time_limit: float | None = Field(None, gt=0, le=86400)
    """Time limit for one response in seconds; a worker that exceeds it is ended and replaced. Null: no limit. Needs workers."""

    _has_someone_to_end = model_validator(mode="after")(can_end_workers)

    def __call__(self, prompt: Prompt, response: Response) -> Verdict:
        """A score, counted at the last emitted token, or a sequence of len(response.tokens) rewards.

        None where it does not apply to the response: it is left out of the sum then. A response without tokens is not judged.
        """
        raise NotImplementedError

    def at(self, iteration: int) -> Evidence:
        """This evidence as it judges in an iteration of the run; the same in all of them, unless it says otherwise.

        1, 2, ...; 0 and below in the critic's warm-up. In an evaluation it is the last iteration before it.
        """
        return self

    def unreadable(self, prompt: Prompt) -> str | None:
        """Why judging any response to this prompt would raise, or None. Called for all prompts before a run."""
        return None

    def judge_batch(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Verdict | Failure]:
        """A verdict or a failure for each response; by default judges one by one."""
        return [self.attempt(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def attempt(self, prompt: Prompt, response: Response) -> Verdict | Failure:
        """The verdict on one response, or why there is none."""
        try:
            return self(prompt, response)
        except RAISED as error:
            return Failure.of(error)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest total of a response before weighting. Bounded critics rely on it; a total outside is an error."""
        return 0.0, 1.0

    def outside(self, rewards: Sequence[float]) -> str | None:
        """The error if a response's total reward is outside `bounds` by more than rounding; otherwise None."""
        (low, high), total = self.bounds, math.fsum(rewards)
        slack = 1e-6 * max(1.0, abs(low), abs(high))
        if low - slack <= total <= high + slack:
            return None
        return f"it returned {total:g}, outside its bounds [{low:g}, {high:g}]"

    @property
    def example(self) -> Prompt:
        """A prompt whose responses it can judge, for the conformance suite."""
        from cct.rollout import Prompt

        return Prompt("3+4=", "7")


evidences: Registry[Evidence] = Registry("evidence", Evidence)
