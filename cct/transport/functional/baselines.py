"""Baselines of a token's own, of a reward's own, and of earlier iterations; and a teacher's judgement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cct.tensors import operator

from .groups import Single, _grouping, group_advantage
from .masked import ROUNDING, relative
from .traces import token_returns


@torch.no_grad()
@operator
def optimal_token_advantage(
    rewards: Tensor, logprobs: Tensor, collision: Tensor, mask: Tensor, groups: Tensor, *, single: Single = "zero"
) -> Tensor:
    """Reward to go minus the group's mean of it at the same step, weighted by the gradient that was gathered on the way.

    A_it = G_it - B_t, B_t = sum_k(W_kt G_kt) / sum_k(W_kt), over the responses k of the group with a t-th token. W_kt is the
    sum over u <= t of 1 - 2 pi_ku + collision_ku, the squared length of d log pi / d logits. t counts trainable tokens.

    rewards, logprobs, collision: [B, T], collision the sum of squared probabilities. mask: bool [B, T]. groups: [B] int.
    single: where no other response is that long, a token gets 0, or its `raw` reward to go. Returns [B, T], 0 where masked;
    exactly 0 where the returns of a step are equal. Where all weights of a step are 0, the mean is a plain one.
    Source: optimal token baseline, Li et al. 2026, arXiv 2602.07078; verl
    `compute_multi_turn_optimal_token_baseline_advantage`.
    Pitfall: the longest responses are compared with few others; those past all others have no baseline.
    """
    returns = token_returns(rewards, mask)
    squared = (1 - 2 * logprobs.exp() + collision).clamp(min=0).masked_fill(~mask, 0.0)
    energy = squared.cumsum(1)
    index, per_group = _grouping(groups)
    n_groups, width = len(per_group(torch.zeros_like(returns[:, 0]))) if mask.numel() else 0, mask.shape[1]
    if not n_groups:
        return torch.zeros_like(returns)
    rank = relative(mask)[0].clamp(min=0)
    cell = index.unsqueeze(1) * width + rank  # one for each group and step

    def over_responses(x: Tensor) -> Tensor:
        x = x.masked_fill(~mask, 0.0)
        return x.new_zeros(n_groups * width).index_add_(0, cell.flatten(), x.flatten())[cell]

    here = cell[mask]
    ends = [
        returns.new_full((n_groups * width,), -sign * torch.inf).scatter_reduce_(0, here, returns[mask], kind)[cell]
        for kind, sign in (("amin", -1.0), ("amax", 1.0))
    ]
    count, total = over_responses(mask.to(returns.dtype)), over_responses(energy)
    weights = torch.where(total > 0, energy, 1.0)
    baseline = over_responses(weights * returns) / over_responses(weights).clamp(min=torch.finfo(returns.dtype).tiny)
    equal = ends[1] - ends[0] <= ROUNDING * torch.finfo(returns.dtype).eps * torch.maximum(ends[0].abs(), ends[1].abs())
    advantages = (returns - baseline).masked_fill(equal | (count == 1), 0.0)
    if single == "raw":
        advantages = advantages.where(count != 1, returns)
    return advantages.masked_fill(~mask, 0.0)


@torch.no_grad()
@operator
def decoupled_advantage(
    components: Tensor,
    groups: Tensor,
    weights: Sequence[float],
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    single: Single = "zero",
    valid: Tensor | None = None,
) -> Tensor:
    """Each reward relative to its group, in units of its own deviation there; then their weighted sum, [B].

    sum_k w_k (r_k - mean_k) / (deviation_k + eps), mean and deviation (ddof) of reward k in the group.
    components: [B, K], one score per response and reward. groups: [B] int. weights: K numbers. valid: bool [B, K]; a reward
    that was not given counts in no mean and adds 0. single: as in `group_advantage`, for each reward.
    Source: GDPO, Liu et al. 2026, arXiv 2601.05242, before its normalisation over the batch.
    Pitfall: a reward that hardly ever varies weighs, where it does, as much as one that always does.
    """
    valid = torch.ones_like(components, dtype=torch.bool) if valid is None else valid
    total = components.new_zeros(len(components))
    for scores, weight, given in zip(components.unbind(1), weights, valid.unbind(1), strict=True):
        total = total + weight * group_advantage(scores, groups, ddof=ddof, eps=eps, single=single, valid=given)
    return total


def tracked(past: tuple[float, float], scores: Sequence[float], decay: float) -> tuple[float, float]:
    """A prompt's sum of scores and their number after more of them, with what came before discounted by decay.

    (decay S + sum of scores, decay N + number of scores); the value is S / N. With scores r of 0 and 1 it is the update of
    alpha = S and beta = N - S by decay alpha + r and decay beta + 1 - r.
    Source: the tracker of single-stream policy optimization, Xu and Ding 2025, arXiv 2509.13232, with a constant decay.
    """
    return decay * past[0] + sum(scores), decay * past[1] + len(scores)


@torch.no_grad()
@operator
def distillation_advantage(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, bound: float | None = None) -> Tensor:
    """log pi_teacher - log pi of each sampled token, [B, T], within [-bound, bound] where there is a bound; 0 where masked.

    logprobs, teacher_logprobs: [B, T], nats. mask: bool [B, T]. On the policy's own samples its mean is minus the KL from
    policy to teacher, and its policy gradient that of this KL, one token ahead: no token answers for later ones.
    Sources: Agarwal et al. 2024, "On-policy distillation of language models", arXiv 2306.13649 (reverse KL on the student's
    samples); Thinking Machines Lab 2025, "On-policy distillation" (as advantages per token, without a discount).
    """
    advantages = teacher_logprobs - logprobs
    return (advantages if bound is None else advantages.clamp(-bound, bound)).masked_fill(~mask, 0.0)
