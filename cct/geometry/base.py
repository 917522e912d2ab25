"""The Geometry axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.registry import Component, Registry

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_over_constant"]


class Geometry(Component):
    """Turns advantages into a loss per token."""

    aggregation: Aggregation = "token_mean"
    """Mean over all tokens, over responses of their means, or sums over responses divided by `constant`."""
    constant: float = Field(1024.0, gt=0)
    """Divisor per response of `sequence_sum_over_constant`, usually the length limit."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Weigh the loss by trainer's over engine's probability of what was sampled: capped at the bound, or 0 outside
    [1 / bound, bound] (Yao et al. 2025, truncated importance sampling). It corrects the engine, not the policy's own change."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether each token has its own weight, or each response that of all its tokens together."""
    correction_bound: float = Field(2.0, gt=1, le=1000)
    """Greatest weight."""

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, reference_logprobs: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All [B, T]. Returns the loss per token [B, T], 0 where masked, and metrics per token [B, T]."""
        raise NotImplementedError


geometries: Registry[Geometry] = Registry("geometry", Geometry)
