"""GAE with a fixed discount, and Comp-GAE, whose discount is a gate per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from cct.rollout import Concentration, Credit, Rollout

from .base import Gate, Transport, gates, transports
from .gate import AttentionGate

if TYPE_CHECKING:
    from torch import Tensor


class _Trace(Transport):
    """What GAE and Comp-GAE share."""

    lam: float = Field(1.0, ge=0, le=1)
    """Trace decay of the advantage: 1 trusts the outcome, 0 trusts the critic."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """Trace decay of the value target; 1 fits the critic to the (gated) Monte-Carlo return."""
    gap: Literal["carry", "decay", "cut"] = "carry"
    """What tokens that the policy did not emit do to credit that crosses them: nothing, decay it, stop it."""
    whiten: bool = True
    """Shift and scale the batch's advantages to mean 0 and deviation 1 over trainable tokens."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.whiten else frozenset({"causal", "linear", "split"})

    @property
    def waives(self) -> dict[str, str]:
        return {} if self.gap == "carry" else {"gap": f"gap: {self.gap} lets masked tokens count"}

    def _credit(self, rollout: Rollout, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
        from .functional import gated_gae, whiten

        assert rollout.values is not None
        advantages, targets = gated_gae(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            gamma=gamma,
            lam=self.lam,
            lam_value=self.lam_value,
            bootstrap=rollout.bootstrap,
            gap=self.gap,
        )
        return (whiten(advantages, rollout.mask) if self.whiten else advantages), targets


@transports.register("gae")
class GAE(_Trace):
    """Generalised advantage estimation with one fixed discount (Schulman et al. 2016)."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""

    def __call__(self, rollout: Rollout) -> Credit:
        return Credit(*self._credit(rollout, self.gamma))


@transports.register("comp_gae")
class CompGAE(_Trace):
    """GAE whose per-token discount is a gate, by default the policy's attention concentration (Comp-GAE)."""

    gate: Annotated[Gate, gates] = AttentionGate()
    """What meters credit at each token."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values"}) | self.gate.needs

    @property
    def statistics(self) -> dict[str, Concentration]:
        return self.gate.statistics

    @property
    def claims(self) -> frozenset[str]:
        return super().claims if "split" in self.gate.claims else super().claims - {"split"}

    @property
    def waives(self) -> dict[str, str]:
        inherited = {name: why for name, why in self.gate.waives.items() if name in ("gap", "padding", "order")}
        return {name: f"gate '{self.gate.use}': {why}" for name, why in inherited.items()} | super().waives

    def __call__(self, rollout: Rollout) -> Credit:
        gate = self.gate(rollout)
        return Credit(*self._credit(rollout, gate), gate=gate)
