"""The Geometry axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cct.registry import Component, Registry
from cct.rollout import Aggregation, RatioScope

if TYPE_CHECKING:
    from torch import Tensor

Grain = Literal["token", "sequence"]


class Geometry(Component):
    """Turns advantages into a loss per token. One of your own overrides `surrogate`."""

    grain: ClassVar[Grain] = "token"
    """token: each token's gradient follows its own advantage. sequence: advantages are averaged over a response first."""
    token_form: ClassVar[str] = ""
    """Of the grain sequence: the geometry nearest to it that keeps tokens."""

    aggregation: Aggregation = "token_mean"
    """token_mean: mean over all tokens. sequence_mean: mean over responses of their token means. sequence_sum_over_constant:
    mean over responses of their token sums divided by `constant`. An episode of several rows is one response."""
    constant: float = Field(1024.0, gt=0)
    """Divisor per response of `sequence_sum_over_constant`, usually the length limit."""
    ratio_to: Literal["trainer", "engine"] = "trainer"
    """Old log-probabilities in the ratio. trainer: from the trainer's forward, so the ratio starts at 1. engine: as sampled, so
    the ratio also corrects for the engine, and clipping also acts where trainer and engine disagree; a recipe without critic,
    gate or reference model then needs no forward before the update."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Weight the policy term of the loss by the ratio of the trainer's to the engine's probability of what was sampled.
    truncate: the ratio, capped at the bound (Yao et al. 2025, truncated importance sampling). mask: 0 outside [lower,
    bound]. The weight corrects for the engine, not for the policy's change. The KL in the loss keeps its weight, as in verl and
    TRL."""
    correction_level: Literal["token", "sequence"] = "token"
    """token: one weight per token. sequence: one weight per response, from all its tokens. An episode of several rows has one
    weight per row, since a forward sees one row."""
    correction_bound: float = Field(2.0, gt=1, le=1000)
    """Upper bound on the weight."""
    correction_lower: float | None = Field(None, gt=0, le=1)
    """With `mask`, the weight below which a token counts nothing; null is 1 / correction_bound (IcePop, arXiv 2510.18855,
    sets both bounds)."""
    kl_coef: float = Field(0.0, ge=0, le=100)
    """Weight of the KL to the starting policy in the loss; with 0, no reference model is kept for it."""
    kl_in_reward: float = Field(0.0, ge=0, le=100)
    """Weight of the KL to the starting policy as a cost per token, subtracted from the rewards before the transport. `kl_coef`
    must be 0, or the KL would count twice. Returns leave the range of the evidence, so a critic's output must be scalar."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Per-token estimate of the KL (Schulman, "Approximating KL divergence"); null is k3 in the loss, and k1 in rewards, where
    its policy gradient is that of the KL. k2 and k3 in rewards, and the plain gradients of k1 and k3, are biased."""
    kl_gradient: Literal["plain", "k2", "importance"] = "plain"
    """Gradient of the KL in the loss. plain: the estimator's own (GRPO); for k1 it is 0 on average, for k3 it is the forward
    KL's. k2: the estimator's value with the gradient of k2, correct on policy. importance: the gradient of ratio times
    estimator, correct off policy too for k1 and k3 (DeepSeek-V3.2)."""

    @property
    def unread(self) -> dict[str, str]:
        idle = {}
        if self.aggregation != "sequence_sum_over_constant":
            idle["constant"] = f"aggregation: {self.aggregation} does not divide by it"
        if self.correction == "none":
            idle |= dict.fromkeys(("correction_level", "correction_bound"), "correction is none")
        if self.correction != "mask":
            idle["correction_lower"] = f"correction is {self.correction}, and only mask has a lower bound"
        if not self.kl_coef:
            idle["kl_gradient"] = "kl_coef is 0, so there is no KL in the loss"
            if not self.kl_in_reward:
                idle["kl_estimator"] = "kl_coef and kl_in_reward are 0, so there is no KL"
        return idle

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.kl_coef or self.kl_in_reward else frozenset()

    @property
    def weighs(self) -> RatioScope:
        """Whose ratio to the old policy weighs a token's loss: its own; where it is the response's, later tokens' too."""
        return frozenset({"own"})

    @property
    def engine_ratio(self) -> RatioScope:
        """Whose ratio of trainer to engine weighs a token's loss."""
        if self.correction == "none":
            return self.weighs if self.ratio_to == "engine" else frozenset()
        return frozenset({"own", "later"}) if self.correction_level == "sequence" else frozenset({"own"})

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss without KL, as `__call__`. Rows come in any number and any company: only whole responses are sure."""
        raise NotImplementedError

    @property
    def marks(self) -> bool:
        """Whether `mark` chooses any."""
        return type(self).mark is not Geometry.mark

    def mark(self, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, seed: int) -> Tensor | None:
        """Tokens [B, T] that `surrogate` treats apart, chosen from a whole minibatch's behaviour before it is divided.

        Anything that compares responses belongs here: what a forward sees depends on micro-batches and processes.
        """
        return None

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        reference_logprobs: Tensor | None,
        marked: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All [B, T]; marked: what `mark` chose, None for no token; correction: weights of the surrogate, not of the KL.

        Returns the loss per token [B, T], 0 where masked, and metrics per token [B, T].
        """
        from .functional import kl_estimate, kl_loss

        loss, metrics = self.surrogate(logprobs, old_logprobs, advantages, mask, marked)
        if correction is not None:
            loss = loss * correction
        if self.kl_coef and reference_logprobs is not None:
            estimator = self.kl_estimator or "k3"
            loss = loss + self.kl_coef * kl_loss(logprobs, old_logprobs, reference_logprobs, mask, estimator, self.kl_gradient)
            metrics["reference_kl"] = kl_estimate(logprobs.detach(), reference_logprobs, mask, estimator)
        return loss, metrics


geometries: Registry[Geometry] = Registry("geometry", Geometry)
