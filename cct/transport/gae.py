"""GAE with a fixed discount, and Comp-GAE, whose discount is a gate per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Gate, Transport, gates, transports
from .sigmoid import AttentionGate

if TYPE_CHECKING:
    from torch import Tensor


PASSED_ON = ("gap", "observation", "padding", "order", "dropped")  # properties that a gate gives up for who uses it


class TokenCredit(Transport):
    """Advantages token by token, which may be whitened over the batch's tokens."""

    whiten: bool = True
    """Shift and scale the batch's advantages to mean 0 and deviation 1 over trainable tokens."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"values"}

    @property
    def whitens(self) -> Literal["token", "sequence"] | None:
        return "token" if self.whiten else None

    def _finish(self, rollout: Rollout, advantages: Tensor) -> Tensor:
        from .functional import whiten

        return whiten(advantages, rollout.mask) if self.whiten else advantages


class CriticTrace(TokenCredit):
    """What every trace that leans on a critic shares."""

    gap: Literal["carry", "decay", "cut"] = "carry"
    """Effect on credit that crosses tokens the policy did not emit. carry: none. decay: it decays. cut: it stops."""

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.whiten else frozenset({"causal", "linear", "split"})

    @property
    def waives(self) -> dict[str, str]:
        found = {} if self.gap == "carry" else {"gap": f"gap: {self.gap} lets masked tokens count"}
        if self.gap == "decay":
            found |= {"observation": "gap: decay counts masked tokens", "targets": "gap: decay sets values in a gap to 0"}
        return found

    def _gae(
        self, rollout: Rollout, gamma: float | Tensor, lam: float | Tensor, lam_value: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        from .functional import gated_gae

        assert rollout.values is not None
        advantages, targets = gated_gae(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            gamma=gamma,
            lam=lam,
            lam_value=lam_value,
            bootstrap=rollout.bootstrap,
            gap=self.gap,
        )
        return self._finish(rollout, advantages), targets


class LambdaTrace(CriticTrace):
    """What GAE and Comp-GAE share. lam and lam_value may differ: decoupled GAE."""

    lam: float = Field(1.0, ge=0, le=1)
    """Trace decay of the advantage: 1 trusts the outcome, 0 trusts the critic."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """Trace decay of the value target; 1 fits the critic to the (gated) Monte-Carlo return."""
    target: Literal["kernel", "ungated"] = "kernel"
    """Discount of the value target: the advantage's (kernel) or none. If a critic of ungated returns bootstraps through a
    discount g below 1, every TD error is off by about -(1 - g) V."""

    @property
    def waives(self) -> dict[str, str]:
        return super().waives | ({"targets": "target: ungated has no discount"} if self.target == "ungated" else {})

    def _gae(
        self, rollout: Rollout, gamma: float | Tensor, lam: float | Tensor, lam_value: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        advantages, targets = super()._gae(rollout, gamma, lam, lam_value)
        return advantages, super()._gae(rollout, 1.0, lam, lam_value)[1] if self.target == "ungated" else targets


@transports.register("gae")
class GAE(LambdaTrace):
    """Generalised advantage estimation with one fixed discount (Schulman et al. 2016)."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""

    def __call__(self, rollout: Rollout) -> Credit:
        return Credit(*self._gae(rollout, self.gamma, self.lam, self.lam_value))


@transports.register("comp_gae")
class CompGAE(LambdaTrace):
    """GAE whose per-token discount is a gate, by default the policy's attention concentration (Comp-GAE)."""

    gate: Annotated[Gate, gates] = AttentionGate()
    """The gate, which gives each token its discount."""

    @property
    def claims(self) -> frozenset[str]:
        return super().claims if "split" in self.gate.claims else super().claims - {"split"}

    @property
    def waives(self) -> dict[str, str]:
        inherited = {name: why for name, why in self.gate.waives.items() if name in PASSED_ON}
        return {name: f"gate '{self.gate.use}': {why}" for name, why in inherited.items()} | super().waives

    def __call__(self, rollout: Rollout) -> Credit:
        gate = self.gate.discounts(rollout)
        return Credit(*self._gae(rollout, gate, self.lam, self.lam_value), gate=gate)
