"""PPO's clipped objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from .base import Geometry, geometries

if TYPE_CHECKING:
    from torch import Tensor


@geometries.register("ppo_clip")
class PPOClip(Geometry):
    """The clipped surrogate of PPO (Schulman et al. 2017), with separate bounds and dual clip.

    Clipping looks at one sampled token's ratio: rare tokens meet the bounds at tiny changes of the policy, frequent ones
    hardly ever. A negative advantage has no bound above without `dual_clip`.
    """

    clip_low: float = Field(0.2, ge=0, le=1)
    """With a negative advantage, the ratio counts no lower than 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0, le=10)
    """With a positive advantage, the ratio counts no higher than 1 + clip_high; clip-higher is 0.28 (DAPO)."""
    dual_clip: float | None = Field(None, gt=1, le=100)
    """Bound on the ratio with a negative advantage (Ye et al. 2020); null for none."""

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"packed"})

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import ppo_clip_loss

        return ppo_clip_loss(
            logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )
