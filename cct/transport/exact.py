"""The ceiling of the laboratory: an oracle's credit, and its values in place of a critic's.

Not for use elsewhere: only tasks of the laboratory provide `exact_values`, and a recipe with any other is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cct.rollout import Credit, Rollout

from .base import Transport, Wrapper, transports
from .gae import GAE

if TYPE_CHECKING:
    from torch import Tensor


def _exact(rollout: Rollout) -> Tensor:
    assert rollout.exact_values is not None  # the recipe's needs are met
    return rollout.exact_values


@transports.register("exact")
class Exact(Transport):
    """An oracle's advantage, the laboratory's ceiling: A_t = r_t + V(s_t+1) - V(s_t) with exact values.

    On tokens that decide nothing it is 0. Only tasks of the laboratory have the oracle (parts, chain, filler, recall). What it
    takes for known: docs/lab.md.
    """

    scale: bool = True
    """Divide by the root mean square over the batch's tokens, as GRPO divides by a deviation; 0 stays 0."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"exact_values"})

    @property
    def claims(self) -> frozenset[str]:
        return frozenset() if self.scale else frozenset({"causal", "linear", "split"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import exact_advantage, root_mean_square

        advantages = exact_advantage(rollout.rewards, _exact(rollout), rollout.mask)
        return Credit(advantages / root_mean_square(advantages, rollout.mask) if self.scale else advantages)


@transports.register("exact_critic")
class ExactCritic(Wrapper):
    """Another transport on an oracle's values in place of a critic's: what a perfect critic would be worth to it.

    Only tasks of the laboratory have the oracle (parts, chain, filler, recall).
    """

    of: Annotated[Transport, transports] = GAE(lam=0.95)
    """The transport that reads them."""

    @property
    def needs(self) -> frozenset[str]:
        return self.of.needs - {"values"} | {"exact_values"}

    @property
    def provides(self) -> frozenset[str]:
        return self.of.needs & {"values"}

    def __call__(self, rollout: Rollout) -> Credit:
        credit = self.of(rollout.replace(values=_exact(rollout), bootstrap=None))
        return Credit(credit.advantages, gate=credit.gate)
