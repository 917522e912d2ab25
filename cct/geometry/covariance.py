"""Objectives that hold back the few tokens which cost the policy most of its entropy (Cui et al. 2025).

Those are the tokens whose log-probability and advantage are high together. Which ones is decided over a whole minibatch
from the behaviour policy's log-probabilities, before the minibatch is divided, and stays for all epochs of an iteration;
the source takes the present policy's over one forward, so that its choice depends on the micro-batch size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from .base import Geometry, geometries

if TYPE_CHECKING:
    from torch import Tensor


@geometries.register("clip_cov")
class ClipCov(Geometry):
    """PPO's clip, without a gradient for a few tokens drawn from those of high covariance (Cui et al. 2025)."""

    share: float = Field(2e-4, gt=0, le=1)
    """Share of the minibatch's tokens that get no gradient; at least one token, if any is in the range."""
    covariance_low: float = Field(1.0, ge=0)
    """Lowest covariance of a token that may be held back, in units of the advantage; the default suits whitened advantages."""
    covariance_high: float = Field(5.0, gt=0)
    """Highest covariance of a token that may be held back."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """As in `ppo_clip`."""
    clip_high: float = Field(0.2, ge=0, le=10)
    """As in `ppo_clip`."""

    @model_validator(mode="after")
    def _ordered(self) -> ClipCov:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(f"covariance_low ({self.covariance_low}) must be below covariance_high ({self.covariance_high})")
        return self

    def mark(self, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, seed: int) -> Tensor:
        from .functional import mark_some_covariances

        return mark_some_covariances(
            old_logprobs, advantages, mask, share=self.share, low=self.covariance_low, high=self.covariance_high, seed=seed
        )

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import clip_cov_loss

        return clip_cov_loss(logprobs, old_logprobs, advantages, mask, marked, clip_low=self.clip_low, clip_high=self.clip_high)


@geometries.register("kl_cov")
class KLCov(Geometry):
    """Unclipped ratio, and a KL to the old policy on the tokens of highest covariance (Cui et al. 2025).

    With one minibatch an iteration it is the plain policy gradient: the KL is 0 as long as nothing has moved. No other
    token has a bound on its ratio.
    """

    share: float = Field(2e-4, gt=0, le=1)
    """Share of the minibatch's tokens with a KL penalty; at least one token, if any has a covariance above 0."""
    coef: float = Field(1.0, ge=0, le=1000)
    """Weight of |log ratio| on those tokens."""

    def mark(self, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, seed: int) -> Tensor:
        from .functional import mark_top_covariances

        return mark_top_covariances(old_logprobs, advantages, mask, share=self.share)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import kl_cov_loss

        return kl_cov_loss(logprobs, old_logprobs, advantages, mask, marked, coef=self.coef)
