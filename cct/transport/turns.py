"""Credit over turns: a turn is a run of tokens that the policy emitted, set apart by a tool's or an environment's output."""

from __future__ import annotations

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Transport, transports
from .gae import TokenCredit


@transports.register("bi_level_gae")
class BiLevelGAE(TokenCredit):
    """GAE from turn to turn, and within each turn GAE from token to token that starts from the turn's advantage (VAGEN)."""

    lam: float = Field(1.0, ge=0, le=1)
    """Trace decay of the advantage within a turn: 1 trusts the outcome, 0 trusts the critic."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """Trace decay of the value target, in turns and between them."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token within a turn."""
    gamma_turn: float = Field(1.0, gt=0, le=1)
    """Discount from turn to turn."""
    lam_turn: float = Field(1.0, ge=0, le=1)
    """Trace decay of the advantage from turn to turn."""

    @property
    def waives(self) -> dict[str, str]:
        return {"gap": "a gap ends a turn"}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import bi_level_gae

        assert rollout.values is not None
        advantages, targets = bi_level_gae(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            gamma=self.gamma,
            lam=self.lam,
            gamma_turn=self.gamma_turn,
            lam_turn=self.lam_turn,
            lam_value=self.lam_value,
            bootstrap=rollout.bootstrap,
        )
        return Credit(self._finish(rollout, advantages), targets)


@transports.register("gigpo")
class GiGPO(Transport):
    """The response relative to its group, plus each turn relative to turns of the group from the same state (Feng et al. 2025).

    Needs `anchors`: an environment that says in which state each turn began (`rollout.anchors`).
    """

    weight: float = Field(1.0, ge=0, le=100)
    """Factor of the turn's part; 0 is GRPO."""
    gamma: float = Field(0.95, gt=0, le=1)
    """Discount per turn of the return that turns are compared by."""
    std: bool = True
    """Divide both parts by their group's standard deviation."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""

    @property
    def unread(self) -> dict[str, str]:
        without = {} if self.std else {"eps": "with std: false nothing is divided by a deviation"}
        return without | ({} if self.weight else {"gamma": "with weight: 0 turns do not count"})

    @property
    def waives(self) -> dict[str, str]:
        return {
            "gap": "a gap ends a turn",
            "equal": "turns from one state are compared by the discounted return after them, where equals may differ",
        }

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups", "anchors"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import gigpo_advantage

        if rollout.anchors is None:
            raise ValueError("gigpo compares turns that began in the same state, and rollout.anchors does not say in which")
        return Credit(
            gigpo_advantage(
                rollout.rewards,
                rollout.mask,
                rollout.groups,
                rollout.anchors,
                gamma=self.gamma,
                weight=self.weight,
                std=self.std,
                eps=self.eps,
            )
        )
