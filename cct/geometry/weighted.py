"""The policy gradient, and objectives that weigh it token by token instead of clipping it away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cct.rollout import Aggregation, RatioScope

from .base import Geometry, geometries

if TYPE_CHECKING:
    from torch import Tensor


@geometries.register("policy_gradient")
class PolicyGradient(Geometry):
    """Plain policy gradient (Williams 1992): -A log pi.

    Right for responses of the present policy only: with several minibatches or epochs an iteration nothing accounts for
    how far the policy has moved. `ratio_to` changes its metrics alone.
    """

    @property
    def weighs(self) -> RatioScope:
        return frozenset()

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import policy_gradient_loss

        return policy_gradient_loss(logprobs, old_logprobs, advantages, mask)


@geometries.register("cispo")
class CISPO(Geometry):
    """Policy gradient weighted by a clipped, detached ratio, so that no token loses its gradient (MiniMax-M1, 2025)."""

    clip_low: float = Field(1.0, ge=0, le=1)
    """The weight is no lower than 1 - clip_low; 1 is no bound."""
    clip_high: float = Field(4.0, ge=0, le=100)
    """The weight is no higher than 1 + clip_high; the default is the bound of 5 of ScaleRL (Khatri et al. 2025)."""

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import cispo_loss

        return cispo_loss(logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)


@geometries.register("sapo")
class SAPO(Geometry):
    """A sigmoid of the ratio instead of clipping (Gao et al. 2025)."""

    aggregation: Aggregation = "sequence_mean"
    """The source weights responses equally (`sequence_mean`); `token_mean` weights them by length."""

    tau_positive: float = Field(1.0, gt=0, le=100)
    """Steepness for a positive advantage: the larger, the sooner a token that has moved stops counting."""
    tau_negative: float = Field(1.05, gt=0, le=100)
    """Steepness for other advantages; slightly larger, since pushing a token down raises many others."""

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import sapo_loss

        return sapo_loss(
            logprobs, old_logprobs, advantages, mask, tau_positive=self.tau_positive, tau_negative=self.tau_negative
        )


@geometries.register("topr")
class TOPR(Geometry):
    """Tapered off-policy REINFORCE (Le Roux et al. 2025): good tokens in full, bad ones by a ratio of at most 1."""

    level: Literal["sequence", "token"] = "sequence"
    """The ratio that weights a bad token: the whole response's, as in the source, or the token's own. In an episode of several
    rows, the row's."""
    bound: float = Field(1.0, gt=0, le=100)
    """Upper bound on the weight of a token with a negative advantage."""

    @property
    def weighs(self) -> RatioScope:
        return frozenset({"own", "later"}) if self.level == "sequence" else frozenset({"own"})

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import topr_loss

        return topr_loss(logprobs, old_logprobs, advantages, mask, level=self.level, bound=self.bound)


@geometries.register("dppo")
class DPPO(Geometry):
    """Divergence PPO (Qi et al. 2026): a token stops counting once its probability, not its ratio, has moved too far."""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence of the distribution over two outcomes, the sampled token or any other: total variation, or KL(old || new)."""
    bound: float | None = Field(None, gt=0, le=100)
    """Largest divergence at which a token counts; null is 0.15 for tv and 0.05 for kl."""
    ratio_bound: float = Field(20.0, ge=1, le=1e6)
    """Upper bound on the weight of a token that counts."""

    @property
    def waives(self) -> dict[str, str]:
        return {"precision": "its bound is of probabilities, and rounding puts a token on the other side of it"}

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import dppo_loss

        bound = self.bound if self.bound is not None else {"tv": 0.15, "kl": 0.05}[self.divergence]
        return dppo_loss(
            logprobs, old_logprobs, advantages, mask, divergence=self.divergence, bound=bound, ratio_bound=self.ratio_bound
        )


@geometries.register("dis")
class DIS(Geometry):
    """Direct double-sided importance sampling (SAO, 2026): the ratio to the engine, and no gradient outside its range.

    Unlike PPO's clip it drops a token on either side, whatever the sign of its advantage. Source: arXiv 2607.07508.
    """

    ratio_to: Literal["trainer", "engine"] = "engine"
    """Old log-probabilities in the ratio; the source has those of the engine, which also corrects for it. trainer: from the
    trainer's forward."""
    clip_low: float = Field(0.3, ge=0, le=1)
    """A token whose ratio is at most 1 - clip_low gets no gradient. The source has 0.3 for mathematics, 0.8 for code."""
    clip_high: float = Field(5.0, gt=0, le=1000)
    """A token whose ratio is at least 1 + clip_high gets no gradient. The source has 5 for mathematics, 3 for code."""

    @property
    def waives(self) -> dict[str, str]:
        return {
            "clip": "a token outside the range counts nothing, so one that moved against its advantage is not pulled back",
            "precision": "it drops tokens at its bounds, and rounding puts a token on the other side of them",
        }

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import dis_loss

        return dis_loss(logprobs, old_logprobs, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high)


@geometries.register("vespo")
class VESPO(Geometry):
    """Policy gradient weighted by a smooth function of the whole response's ratio, 1 where nothing moved (Shen et al. 2026).

    W^k exp(lambda (1 - W)), with W the product of the ratios and k and lambda by the sign of the advantage. Source: arXiv
    2602.10693; its W is to the policy that sampled, which `ratio_to: engine` gives. In an episode of several rows, the row's.
    """

    power_positive: float = Field(2.0, ge=0, le=100)
    """k where the advantage is not negative: how fast a response that became rarer stops counting."""
    decay_positive: float = Field(3.0, ge=0, le=100)
    """lambda where the advantage is not negative: how fast a response that became more frequent stops counting."""
    power_negative: float = Field(3.0, ge=0, le=100)
    """k where the advantage is negative."""
    decay_negative: float = Field(2.0, ge=0, le=100)
    """lambda where the advantage is negative."""

    @property
    def weighs(self) -> RatioScope:
        return frozenset({"own", "later"})

    @property
    def waives(self) -> dict[str, str]:
        return {"weight": "its weight is greatest at a ratio of power / decay, and there above 1"}

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from .functional import vespo_loss

        names = ("power_positive", "decay_positive", "power_negative", "decay_negative")
        return vespo_loss(logprobs, old_logprobs, advantages, mask, **{name: getattr(self, name) for name in names})
