"""Objectives whose ratio is one number per response.

Where an episode is several rows, each row has its own: a ratio is of what one forward computes, and the rows of an episode
may go through the model in different ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from cct.rollout import Aggregation, RatioScope

from .base import Geometry, Grain, geometries

if TYPE_CHECKING:
    from torch import Tensor


class _OfResponses(Geometry):
    """One ratio for a whole response."""

    aggregation: Aggregation = "sequence_mean"
    """The source weights responses equally (`sequence_mean`); `token_mean` weights them by length."""

    @property
    def weighs(self) -> RatioScope:
        return frozenset({"own", "later"})


class _GSPO(_OfResponses):
    """What GSPO and its token variant share."""

    clip_low: float = Field(3e-4, ge=0, le=1)
    """With a negative advantage, the ratio counts no lower than 1 - clip_low. PPO's 0.2 would never clip."""
    clip_high: float = Field(4e-4, ge=0, le=10)
    """With a positive advantage, the ratio counts no higher than 1 + clip_high."""


@geometries.register("gspo")
class GSPO(_GSPO):
    """PPO's clip on the geometric mean of a response's ratios (Zheng et al. 2025); averages advantages over the response."""

    grain: ClassVar[Grain] = "sequence"
    token_form: ClassVar[str] = "gspo_token"

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import gspo_loss

        return gspo_loss(logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)


@geometries.register("luspo")
class LUSPO(GSPO):
    """GSPO's objective times the length of the response (Liu et al. 2026), so that a long one moves the policy as a short one.

    Mean over responses of |y| min(s A, clip(s) A): the sum over tokens of the loss that GSPO takes the mean of. Source: arXiv
    2602.05261, bounds of its section 5.1. The loss grows with the length, and so does the step before it is clipped.
    """

    aggregation: Aggregation = "sequence_sum_over_constant"
    """The source sums over tokens (`sequence_sum_over_constant` with a constant of 1); `sequence_mean` is GSPO."""
    constant: float = Field(1.0, gt=0)
    """Divisor per response of `sequence_sum_over_constant`; 1 in the source. The maximum length keeps GSPO's scale."""
    clip_low: float = Field(2e-3, ge=0, le=1)
    """With a negative advantage, the ratio counts no lower than 1 - clip_low."""
    clip_high: float = Field(2.5e-3, ge=0, le=10)
    """With a positive advantage, the ratio counts no higher than 1 + clip_high."""


@geometries.register("gspo_token")
class GSPOToken(_GSPO):
    """GSPO with an advantage per token: the value of the response's ratio, the gradient of the token's."""

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import gspo_token_loss

        return gspo_token_loss(logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)


@geometries.register("gmpo")
class GMPO(_OfResponses):
    """Geometric mean of ratios that are clipped token by token (Zhao et al. 2025); averages advantages over the response."""

    grain: ClassVar[Grain] = "sequence"
    token_form: ClassVar[str] = "gspo_token"

    clip_low: float = Field(0.4, ge=0, le=20)
    """With a negative advantage, a token's log-ratio counts no lower than minus this. It bounds the logarithm, unlike PPO's."""
    clip_high: float = Field(0.4, ge=0, le=20)
    """With a positive advantage, a token's log-ratio counts no higher than this."""

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import gmpo_loss

        return gmpo_loss(logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)
