"""Traces besides GAE: Monte Carlo, TD(0), TD(lambda), a length-adaptive lambda, V-trace and Retrace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from cct.rollout import Credit, RatioScope, Rollout

from .base import transports
from .gae import CriticTrace

if TYPE_CHECKING:
    from torch import Tensor


class _Discounted(CriticTrace):
    """A trace with one fixed discount."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""


@transports.register("monte_carlo")
class MonteCarlo(_Discounted):
    """The discounted return from each token on, with or without the critic's value subtracted (REINFORCE with reward to go)."""

    baseline: bool = True
    """Subtract the critic's value; off needs no critic."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values"} if self.baseline else ())

    @property
    def waives(self) -> dict[str, str]:
        return super().waives | {"bootstrap": "a Monte-Carlo return ends where the response is truncated"}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import gated_gae

        zeros = rollout.rewards.new_zeros(rollout.rewards.shape)
        returns = gated_gae(rollout.rewards, zeros, rollout.mask, gamma=self.gamma, lam=1.0, gap=self.gap)[0]
        advantages = returns
        if self.baseline:
            assert rollout.values is not None
            advantages = (returns - rollout.values.detach()).masked_fill(~rollout.mask, 0.0)
        return Credit(self._finish(rollout, advantages), returns if self.baseline else None)


@transports.register("td0")
class TD0(_Discounted):
    """The one-step TD error r + gamma V' - V; the critic is fitted to r + gamma V'."""

    def __call__(self, rollout: Rollout) -> Credit:
        return Credit(*self._gae(rollout, self.gamma, 0.0, 0.0))


@transports.register("td_lambda")
class TDLambda(_Discounted):
    """The lambda-return minus the value, one lambda for advantage and target (Sutton 1988)."""

    lam: float = Field(0.95, ge=0, le=1)
    """1 is the Monte-Carlo return, 0 is TD(0)."""

    def __call__(self, rollout: Rollout) -> Credit:
        return Credit(*self._gae(rollout, self.gamma, self.lam, self.lam))


@transports.register("length_adaptive_gae")
class LengthAdaptiveGAE(_Discounted):
    """GAE whose lambda grows with response length, 1 - 1 / (alpha length), and a separate lambda for the critic (VAPO)."""

    alpha: float = Field(0.05, gt=0, le=100)
    """Share of the response that the advantage's trace spans."""
    lam_value: float = Field(1.0, ge=0, le=1)
    """Trace decay of the value target; 1 fits the critic to the Monte-Carlo return."""

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import length_adaptive_lambda

        lam = length_adaptive_lambda(rollout.mask, self.alpha)
        return Credit(*self._gae(rollout, self.gamma, lam, self.lam_value))


class _OffPolicy(_Discounted):
    """A trace that knows which distribution the tokens were drawn from: the engine's, against the trainer's policy.

    The ratio is exp(rollout.logprobs - rollout.rollout_logprobs). It is 1 up to rounding where engine and trainer compute
    alike, and differs with a low-precision engine, with top-p or top-k, or with weights that are behind.
    """

    lam: float = Field(1.0, ge=0, le=1)
    """Trace decay, on top of the clipped ratios."""
    c_bar: float = Field(1.0, gt=0, le=1e6)
    """Upper bound on the ratio in the trace."""

    @staticmethod
    def _log_ratio(rollout: Rollout) -> Tensor:
        if rollout.rollout_logprobs is None:
            raise ValueError("this trace needs the engine's log-probabilities (rollout.rollout_logprobs), which are missing")
        from cct.tensors import at_least_float32

        return at_least_float32(rollout.logprobs.detach()) - rollout.rollout_logprobs


@transports.register("vtrace")
class VTrace(_OffPolicy):
    """V-trace: ratios of trainer to engine clipped in the advantage and along the trace (Espeholt et al. 2018).

    The advantage holds the token's own ratio already, so `geometry.correction` or `ratio_to: engine` would count it twice.
    """

    rho_bar: float = Field(1.0, gt=0, le=1e6)
    """Upper bound on the token's own ratio."""

    @property
    def engine_ratio(self) -> RatioScope:
        return frozenset({"own", "later"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import vtrace

        assert rollout.values is not None
        advantages, targets = vtrace(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            self._log_ratio(rollout),
            gamma=self.gamma,
            lam=self.lam,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
            bootstrap=rollout.bootstrap,
            gap=self.gap,
        )
        return Credit(self._finish(rollout, advantages), targets)


@transports.register("retrace")
class Retrace(_OffPolicy):
    """Retrace with V instead of Q: the trace shrinks at tokens that the trainer finds less likely (Munos et al. 2016).

    The token's own ratio is not in its advantage; `geometry.correction` or `ratio_to: engine` brings it in. The ratios of
    later tokens are, so that `correction_level: sequence` would count them twice.
    """

    @property
    def engine_ratio(self) -> RatioScope:
        return frozenset({"later"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import retrace

        assert rollout.values is not None
        advantages, targets = retrace(
            rollout.rewards,
            rollout.values,
            rollout.mask,
            self._log_ratio(rollout),
            gamma=self.gamma,
            lam=self.lam,
            c_bar=self.c_bar,
            bootstrap=rollout.bootstrap,
            gap=self.gap,
        )
        return Credit(self._finish(rollout, advantages), targets)
