"""The Evidence axis. A recipe lists one or several; a response's reward is their weighted sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cct.rollout import Prompt, Response


class Evidence(Component):
    """Judges one response: a score, or one reward per emitted token."""

    weight: float = Field(1.0, ge=-1000, le=1000)
    """Factor in the weighted sum of all evidence."""
    on_error: Literal["fail", "zero", "drop"] = "fail"
    """Where judging raises: stop the run, count 0, or leave the response out of the update."""

    def __call__(self, prompt: Prompt, response: Response) -> float | Sequence[float]:
        """A score, counted at the last emitted token, or a sequence of len(response.tokens) rewards."""
        raise NotImplementedError

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest total a response can get before weighting; bounded critics rely on it."""
        return 0.0, 1.0


evidences: Registry[Evidence] = Registry("evidence", Evidence)
