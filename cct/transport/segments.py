"""Credit over segments of a response, whose values are measured by continuing it from where they start.

A segment's advantage is the difference of two such values. The engine samples the continuations (`Transport.branches`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Transport, transports

if TYPE_CHECKING:
    from torch import Tensor


class _Branching(Transport):
    """Segments with Monte-Carlo values. Undiscounted; after the last token the value is 0, as for the continuations."""

    samples: int = Field(4, ge=1, le=1024)
    """Continuations sampled from each segment's start. They determine the cost: see `branch/tokens` in the metrics."""
    whiten: bool = True
    """Shift and scale the batch's advantages to mean 0 and deviation 1 over trainable tokens."""

    @property
    def branches(self) -> int:
        return self.samples

    @staticmethod
    def _values(rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Where segments start, and the values there."""
        if rollout.starts is None or rollout.branch_values is None:
            raise ValueError(
                "this transport needs continuations sampled from its segments (rollout.branch_values), which are missing"
            )
        return rollout.starts, rollout.branch_values

    def _finish(self, rollout: Rollout, advantages: Tensor, counted: Tensor) -> Tensor:
        from .functional import whiten

        return whiten(advantages.masked_fill(~counted, 0.0), counted) if self.whiten else advantages.masked_fill(~counted, 0.0)


@transports.register("vineppo")
class VinePPO(_Branching):
    """Steps of the text, each valued by continuing the response from its start (Kazemnejad et al. 2024)."""

    separator: str = Field("\n", min_length=1)
    """A token that contains this text ends a step."""

    def starts(self, rollout: Rollout, text_of: Callable[[int], str]) -> Tensor:
        from .functional import starts_after

        width = rollout.mask.shape[1]
        tokens = rollout.input_ids[:, -width:]
        ends = {token: self.separator in text_of(token) for token in tokens[rollout.mask].unique().tolist()}
        return starts_after(
            rollout.mask.new_tensor([[ends.get(token, False) for token in row] for row in tokens.tolist()]), rollout.mask
        )

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import segment_advantage

        starts, values = self._values(rollout)
        return Credit(self._finish(rollout, segment_advantage(rollout.rewards, values, rollout.mask, starts)[0], rollout.mask))


@transports.register("spo")
class SPO(_Branching):
    """Segments cut at low-probability tokens, each credited with the change of value over it (Guo et al. 2025)."""

    threshold: float = Field(0.9, gt=0, le=1)
    """A token sampled with a probability below this is a cut point."""
    cuts: int = Field(5, ge=1, le=100_000)
    """Number of cut points per segment."""
    only_cuts: bool = True
    """Give a segment's advantage only to its cut points: nothing was decided at its other tokens."""
    values: Literal["branches", "critic"] = "branches"
    """Source of the values: continuations by the engine, or the critic, which needs no sampling."""

    @property
    def unread(self) -> dict[str, str]:
        return {"samples": "values: critic samples no continuations"} if self.values == "critic" else {}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values"} if self.values == "critic" else ())

    @property
    def branches(self) -> int:
        return self.samples if self.values == "branches" else 0

    def _logprobs(self, rollout: Rollout) -> Tensor:
        """The engine's, which alone are known before continuations are sampled."""
        if rollout.rollout_logprobs is None:
            raise ValueError("spo needs the engine's log-probabilities (rollout.rollout_logprobs), which are missing")
        return rollout.rollout_logprobs

    def starts(self, rollout: Rollout, text_of: Callable[[int], str]) -> Tensor:
        from .functional import starts_at_cuts

        return starts_at_cuts(self._logprobs(rollout), rollout.mask, self.threshold, self.cuts)

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import gated_gae, improbable, segment_advantage, starts_at_cuts

        logprobs, targets, after = self._logprobs(rollout), None, None
        if self.values == "critic":
            assert rollout.values is not None
            starts, values, after = (
                starts_at_cuts(logprobs, rollout.mask, self.threshold, self.cuts),
                rollout.values,
                rollout.bootstrap,
            )
            targets = gated_gae(rollout.rewards, values, rollout.mask, gamma=1.0, lam=1.0, bootstrap=after)[1]
        else:
            starts, values = self._values(rollout)
        advantages = segment_advantage(rollout.rewards, values, rollout.mask, starts, bootstrap=after)[0]
        counted = improbable(logprobs, rollout.mask, self.threshold) if self.only_cuts else rollout.mask
        return Credit(self._finish(rollout, advantages, counted), targets)
