"""Critic-free: one number per response, given to each of its tokens."""

from __future__ import annotations

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Transport, transports


@transports.register("grpo")
class GRPO(Transport):
    """Score relative to the other responses to the same prompt, on every token (Shao et al. 2024)."""

    std: bool = True
    """Divide by the group's standard deviation; off is Dr. GRPO (Liu et al. 2025)."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"})

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"split"}) if self.std else frozenset({"split", "linear"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import group_advantage

        advantage = group_advantage(rollout.scores, rollout.groups, std=self.std, eps=self.eps, valid=rollout.valid)
        return Credit(advantage.unsqueeze(1) * rollout.mask)
