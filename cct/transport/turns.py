"""Credit over turns: a turn is a run of tokens that the policy emitted, set apart by a tool's or an environment's output."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Transport, transports
from .gae import TokenCredit


@transports.register("bi_level_gae")
class BiLevelGAE(TokenCredit):
    """GAE over turns, then within each turn GAE over tokens that starts from the turn's advantage (VAGEN)."""

    lam: float = Field(1.0, ge=0, le=1)
    """Trace decay of the advantage within a turn: 1 trusts the outcome, 0 trusts the critic."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """Trace decay of the value target, within and between turns."""
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


@transports.register("turn_gae")
class TurnGAE(TokenCredit):
    """GAE from turn to turn: V at a turn's first token, the turn's advantage on each of its tokens (Turn-PPO, Li et al. 2025).

    Source: arXiv 2512.17008, which clips per turn as well. Pitfall: all tokens of a turn get the same credit; whitened over
    tokens, long turns weigh more.
    """

    lam: float = Field(1.0, ge=0, le=1)
    """Trace decay of the advantage from turn to turn: 1 trusts the outcome, 0 trusts the critic."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """Trace decay of the value target from turn to turn."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn."""

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.whiten else frozenset({"linear", "split"})

    @property
    def waives(self) -> dict[str, str]:
        return {"gap": "a gap ends a turn"}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import turn_gae

        assert rollout.values is not None
        advantages, targets = turn_gae(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            gamma=self.gamma,
            lam=self.lam,
            lam_value=self.lam_value,
            bootstrap=rollout.bootstrap,
        )
        return Credit(self._finish(rollout, advantages), targets)


@transports.register("turn_return")
class TurnReturn(Transport):
    """The return from each turn on, minus the mean return of the other episodes of the group; it needs no critic.

    A turn is credited with the rewards from it on, where `rloo` credits it with all of the episode's; with one reward at the
    end the two are the same. Sources: Williams 1992, Ahmadian et al. 2024; `baseline: turn` after MT-GRPO, Zeng et al. 2025,
    arXiv 2505.11821.
    """

    reads_policy = False
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn."""
    baseline: Literal["episode", "turn"] = "episode"
    """episode: the mean return of the group's other episodes, which is unbiased. turn: each turn's reward minus its mean over
    the group's episodes that have a turn of that number, as in other frameworks. This is biased if the policy decides when to
    stop: each further turn subtracts one more mean, so that continuing gets no credit for the value of later turns."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"})

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"linear", "split"})

    @property
    def waives(self) -> dict[str, str]:
        found = {"gap": "a gap ends a turn"}
        if self.baseline == "turn":
            found["equal"] = "turns are compared by their own rewards, which differ where episodes have equal sums"
            found["outcome"] = "a turn gets 0 if no other episode of the group has a turn of that number"
        elif self.gamma < 1:
            found["equal"] = "returns are discounted per turn, so equal sums differ after different numbers of turns"
        return found

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import turn_return

        return Credit(turn_return(rollout.rewards, rollout.mask, rollout.groups, gamma=self.gamma, baseline=self.baseline))


@transports.register("gigpo")
class GiGPO(Transport):
    """The response relative to its group, plus each turn relative to turns of the group from the same state (Feng et al. 2025).

    Needs `anchors`: an environment that says in which state each turn began (`rollout.anchors`).
    """

    weight: float = Field(1.0, ge=0, le=100)
    """Weight of the turn's part; 0 is GRPO."""
    gamma: float = Field(0.95, gt=0, le=1)
    """Discount per turn of the returns by which turns are compared."""
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
            "equal": "turns from one state are compared by discounted returns, which may differ for equal sums",
        }

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups", "anchors"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import gigpo_advantage

        if rollout.anchors is None:
            raise ValueError("gigpo compares turns that begin in the same state, but rollout.anchors is missing")
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
