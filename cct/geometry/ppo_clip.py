"""PPO's clipped objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from .base import Geometry, geometries

if TYPE_CHECKING:
    from torch import Tensor


@geometries.register("ppo_clip")
class PPOClip(Geometry):
    """The clipped surrogate of PPO (Schulman et al. 2017), with separate bounds, dual clip and KL to a reference."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio counts no lower than 1 - clip_low where the advantage is negative."""
    clip_high: float = Field(0.2, ge=0, le=10)
    """The ratio counts no higher than 1 + clip_high where the advantage is positive."""
    dual_clip: float | None = Field(None, gt=1, le=100)
    """Bound on the ratio where the advantage is negative (Ye et al. 2020); null for none."""
    kl_coef: float = Field(0.0, ge=0, le=100)
    """Weight of the KL to the starting policy in the loss; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate of the KL (Schulman, "Approximating KL divergence"); as a loss, k1 has no gradient in expectation."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.kl_coef else frozenset()

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"packed"})

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, reference_logprobs: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import kl_estimate, ppo_clip_loss

        loss, metrics = ppo_clip_loss(
            logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )
        if self.kl_coef and reference_logprobs is not None:
            kl = kl_estimate(logprobs, reference_logprobs, mask, self.kl_estimator)
            loss, metrics["reference_kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics
