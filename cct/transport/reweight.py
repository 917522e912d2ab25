"""Other uses of the policy's attention, to compare Comp-GAE with, and of critics' disagreement: they reweight rewards or
advantages, and are no gates.

All look at attention that later tokens pay, which a discount must not know and a weight of an advantage may.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cct.rollout import Credit, Rollout
from cct.statistic import Anchor, OutcomeAttention, Preplan, Statistic

from .base import Transport, Wrapper, transports
from .gae import GAE, LambdaTrace
from .group import GRPO


@transports.register("abc")
class AttentionBasedCredit(LambdaTrace):
    """The outcome spread over tokens by the last token's attention, then GAE (attention-based credit, Chan et al. 2024).

    There the attention is the reward model's; here it is the policy's own, since rewards may come from a verifier.
    """

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    beta: float = Field(0.5, ge=0, le=1)
    """Share of the response's reward that is spread; the rest stays where it was given."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = (-1,)
    """Layers averaged over."""

    @property
    def _spread_by(self) -> Statistic:
        return OutcomeAttention(layers=self.layers)

    @property
    def statistics(self) -> dict[str, Statistic]:
        return {self._spread_by.name: self._spread_by}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import redistribute

        spread = redistribute(rollout.rewards, rollout.stats[self._spread_by.name], rollout.mask, self.beta)
        return Credit(*self._gae(rollout.replace(rewards=spread), self.gamma, self.lam, self.lam_value))


@transports.register("disagreement")
class Disagreement(Wrapper):
    """Another transport's advantages where mini-critics disagree, 0 where they agree most (AsyPPO, Liu et al. 2025).

    A_it = A'_it, and 0 at the `share` of the iteration's trainable tokens with the least deviation of the critics' values;
    ties at the threshold are kept; [B, T]. Value targets and gate are those of the other transport.
    Source: arXiv 2510.01656, by public summaries of its equations: where critics agree, the policy is said to have learnt
    what there is. Default: the lowest 20%, the source's best, of `gae`.
    Pitfall: critics fresh from their start agree everywhere; then which tokens are left out means nothing.
    """

    of: Annotated[Transport, transports] = GAE()
    """The transport whose advantages it keeps or drops."""
    share: float = Field(0.2, ge=0, lt=1)
    """Share of the batch's tokens, those of least disagreement, that get advantage 0."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"disagreement"}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import high_entropy_mask

        credit = self.of.checked(rollout)
        kept = high_entropy_mask(rollout.stats["value_disagreement"], rollout.mask, 1 - self.share)
        return replace(credit, advantages=credit.advantages.masked_fill(~kept, 0.0))


@transports.register("rhythm")
class Rhythm(Wrapper):
    """Another transport's advantages, amplified at preplan or anchor tokens of the policy's attention (Li et al. 2025).

    The measures follow that work's, windowed distance and attention from later tokens, over all heads of the chosen layers;
    it chooses heads by how local they are.
    """

    of: Annotated[Transport, transports] = GRPO()
    """The transport whose advantages are amplified."""
    measure: Literal["preplan", "anchor"] = "anchor"
    """preplan: tokens at which the policy attended far back. anchor: tokens to which later ones attend."""
    share: float = Field(0.4, gt=0, le=1)
    """Share of each response's tokens, those with the largest measure, that is amplified."""
    factor: float = Field(1.5, ge=0, le=100)
    """Factor by which their advantages are multiplied."""
    layers: Literal["last_half", "last_quarter", "all"] | tuple[int, ...] = "last_quarter"
    """Layers averaged over; for each, the attention matrix is computed once more."""
    near: int = Field(4, ge=1, le=1_000_000)
    """anchor: only queries at least this many tokens later count."""
    far: int = Field(64, ge=1, le=1_000_000)
    """anchor: only queries at most this many tokens later count. preplan: a key farther back counts as this far."""

    @model_validator(mode="after")
    def _bounds(self) -> Rhythm:
        if self.near > self.far:
            raise ValueError(f"near ({self.near}) must not exceed far ({self.far})")
        return self

    @property
    def unread(self) -> dict[str, str]:
        return {"near": "measure: preplan counts every distance up to far"} if self.measure == "preplan" else {}

    @property
    def _chosen_by(self) -> Statistic:
        if self.measure == "preplan":
            return Preplan(layers=self.layers, window=self.far)
        return Anchor(layers=self.layers, near=self.near, far=self.far)

    @property
    def statistics(self) -> dict[str, Statistic]:
        return super().statistics | {self._chosen_by.name: self._chosen_by}

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import largest_share

        credit = self.of.checked(rollout)
        chosen = largest_share(rollout.stats[self._chosen_by.name].detach(), rollout.mask, self.share)
        return replace(credit, advantages=credit.advantages.where(~chosen, self.factor * credit.advantages))
