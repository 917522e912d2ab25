"""Transports that look at the entropy of the distribution each token was drawn from."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from cct.rollout import Credit, Rollout

from .base import Transport, Wrapper, transports
from .group import GRPO


@transports.register("gtpo")
class GTPO(Transport):
    """A success is worth more at tokens with more entropy than the group's other successes have there (GTPO, Tan et al. 2025).

    r_it = s_i [(1 - share) + share H_it / mean_k H_kt] for s_i > 0, over the group's responses k with a positive score and
    a t-th token, and r_it = s_i otherwise; A_it = (r_it - mean) / (deviation + eps) over the group's tokens; [B, T].
    Source: after arXiv 2508.04349, by its abstract and a public implementation of its equations (3), (5) and (6). There a
    failure's tokens get -1, weighted by the inverse of their entropy, and successes and failures are normalised apart. Here
    failures are not weighted, both are normalised together, so that a success is worth more than a failure whatever its
    entropies, and groups of equal scores get exactly 0.
    Defaults: share 0.1 (public implementations give the rest a weight of 0.9 or of 1), ddof 0. With share 0 and equal lengths
    it is `grpo` with ddof 0.
    Pitfall: the t-th tokens of two responses need have nothing in common. Scores must be positive for success only.
    A KL acts on groups of equal scores all the same.
    """

    share: float = Field(0.1, ge=0, le=1)
    """Share of a success that is distributed by entropy; the rest is the same at each token."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 0
    """Divide the sum of squares over the group's n tokens by n - ddof."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"groups"})

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import entropy_weighted_advantage

        advantages = entropy_weighted_advantage(
            rollout.scores,
            rollout.groups,
            rollout.stats["entropy"],
            rollout.mask,
            share=self.share,
            ddof=self.ddof,
            eps=self.eps,
        )
        return Credit(advantages)


@transports.register("high_entropy")
class HighEntropy(Wrapper):
    """Another transport's advantages at the tokens of highest entropy, 0 at all others (80/20, Wang et al. 2025).

    A_it = A'_it where H_it is at or above the (1 - fraction) quantile of the entropies of all trainable tokens of the
    iteration, 0 elsewhere; [B, T]. Value targets and gate are those of the other transport.
    Source: arXiv 2506.01939; the threshold is TRL's (`top_entropy_quantile`), over the iteration and not a minibatch.
    Default: the top 20%, of `grpo`.
    Pitfall: the loss still divides by all tokens, as in the source, so its policy gradient is smaller; a KL term acts on
    the tokens left out as well.
    """

    of: Annotated[Transport, transports] = GRPO()
    """The transport whose advantages it keeps or drops."""
    fraction: float = Field(0.2, gt=0, le=1)
    """Share of the batch's tokens that keep their advantage."""

    def __call__(self, rollout: Rollout) -> Credit:
        from .functional import high_entropy_mask

        credit = self.of.checked(rollout)
        kept = high_entropy_mask(rollout.stats["entropy"], rollout.mask, self.fraction)
        return replace(credit, advantages=credit.advantages.masked_fill(~kept, 0.0))
