"""Responses among those to the same prompt: every critic-free advantage. [B] unless said otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from cct.tensors import operator

from .masked import ROUNDING, masked_mean_std, relative, varies
from .traces import token_returns

Baseline = Literal["mean", "leave_one_out", "length_weighted"]

Scale = Literal["group", "others", "batch", "mean", "none"]

Single = Literal["zero", "raw"]


@torch.no_grad()
@operator
def group_advantage(
    scores: Tensor,
    groups: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    single: Single = "zero",
    lengths: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """(score - baseline) / (deviation + eps): every critic-free advantage that is one number per response.

    scores: [B], one per response. groups: [B] int. lengths: [B] tokens of each response, for `length_weighted`.
    valid: bool [B]; others are left out and get 0.
    baseline: `mean` of the group; `leave_one_out`, the mean of the others, which is (score - mean) n / (n - 1);
    `length_weighted`, sum(length * score) / sum(length).
    scale: standard deviation, with ddof, of the `group`'s scores, of the `others`' in the group, where it is not 0, or of the
    whole `batch`'s; the `mean` score of the group, where it is above 0, else the result is 0; `none` divides by nothing.
    single: a group of one gets 0, or its `raw` score (deviation 1 where it is the group's).

    Returns [B]. A group of equal scores, rounding aside, gets exactly 0.
    Sources: GRPO, Shao et al. 2024 (mean, group); Dr. GRPO, Liu et al. 2025 (mean, none); RLOO, Ahmadian et al. 2024
    (leave_one_out, none); OPO, Hao et al. 2025 (length_weighted, none); Lite PPO, Liu et al. 2025 (mean, batch); MaxRL,
    Tajwar et al. 2026 (mean, mean); NeMo RL `calculate_baseline_and_std_per_prompt` (leave_one_out, others).
    Pitfall: frameworks differ in eps (1e-4 to 1e-9) and in what a group of one gets; both change numbers silently.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    scores = scores.masked_fill(~valid, 0.0)
    index, per_group = _grouping(groups)
    count = per_group(valid.to(scores.dtype))
    weights = valid.to(scores.dtype)
    if baseline == "length_weighted":
        if lengths is None:
            raise ValueError("baseline 'length_weighted' needs lengths")
        weights = lengths.to(scores.dtype).masked_fill(~valid, 0.0)
    mean = per_group(weights * scores) / per_group(weights).clamp(min=torch.finfo(scores.dtype).tiny)
    centred = (scores - mean[index]).masked_fill(~valid, 0.0)
    if baseline == "leave_one_out":
        centred = centred * (count / (count - 1).clamp(min=1))[index]
    centred = centred.masked_fill(~_group_varies(scores, valid, index, len(count))[index], 0.0)
    if single == "raw":
        centred = centred.where(~(valid & (count == 1)[index]), scores)
    if scale == "none":
        return centred
    if scale == "mean":
        hopeless = (mean <= ROUNDING * torch.finfo(scores.dtype).eps * per_group(scores.abs())) & (count != 1)
        return (centred / torch.where(count == 1, 1.0, mean + eps)[index]).masked_fill(hopeless[index], 0.0)
    if scale == "batch":
        deviation = _deviation(scores, valid, ddof)
        return centred / (deviation.where(deviation > 0, 1.0) + eps)  # or `raw` of a batch of equals would be divided by eps
    return centred / _of_groups(scores, valid, groups, ddof, eps, others=scale == "others")


def _of_groups(scores: Tensor, valid: Tensor, groups: Tensor, ddof: int, eps: float, *, others: bool) -> Tensor:
    """What each response's centred score is divided by: the deviation of its group plus eps, taking 1 for a group of one.

    scores: 0 where not valid. others: the deviation of the other responses, and 1 in all where that is 0.
    """
    index, per_group = _grouping(groups)
    count = per_group(valid.to(scores.dtype))
    own = scores - (per_group(scores) / count.clamp(min=1))[index]
    squares = per_group(own.masked_fill(~valid, 0.0).square())
    if not others:
        return (squares / (count - ddof).clamp(min=1)).sqrt()[index].masked_fill(valid & (count == 1)[index], 1.0) + eps
    left_over = (count - 1).clamp(min=1)[index]
    left = squares[index] - own.square() * (1 + 1 / left_over)  # sum of squares of the others about their own mean
    varies = left > ROUNDING * torch.finfo(scores.dtype).eps * squares[index]
    return torch.where(varies, (left.clamp(min=0) / (left_over - ddof).clamp(min=1)).sqrt() + eps, 1.0)


@torch.no_grad()
@operator
def explained_variance_within(values: Tensor, returns: Tensor, mask: Tensor, groups: Tensor) -> float:
    """`explained_variance` of what sets the responses of a group apart: returns and values, each minus its group's mean.

    1 - Var((G - mean G) - (V - mean V)) / Var(G - mean G), means over the unmasked tokens of each group, variances over those
    of all groups. values, returns: [B, T]. mask: bool [B, T]. groups: [B] int. Groups with fewer than two responses are left
    out; 0 where the returns of no group vary. Values that know the prompt alone get 0, however good or bad they are.
    """
    index, per_group = _grouping(groups)
    counted = mask & (per_group(mask.any(1).to(returns.dtype)) > 1)[index].unsqueeze(1)
    tokens = per_group(counted.sum(1).to(returns.dtype)).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        return x - (per_group(x.masked_fill(~counted, 0.0).sum(1)) / tokens)[index].unsqueeze(1)

    own = centred(returns)
    spread = masked_mean_std(own, counted)[1]
    if not varies(returns, counted, spread):
        return 0.0
    return float(1 - (masked_mean_std(own - centred(values), counted)[1] / spread) ** 2)


def _grouping(groups: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Group number of each response, counted from 0, and the sum per group of a [B]."""
    index = torch.unique(groups, return_inverse=True)[1]
    n_groups = int(index.max()) + 1 if index.numel() else 0
    return index, lambda x: x.new_zeros(n_groups).index_add_(0, index, x)


def _group_varies(scores: Tensor, valid: Tensor, index: Tensor, n_groups: int) -> Tensor:
    """[groups] whether valid scores differ by more than rounding, which divided by its own size would be an advantage."""
    low = scores.new_full((n_groups,), float("inf")).scatter_reduce_(0, index, scores.where(valid, float("inf")), "amin")
    high = scores.new_full((n_groups,), -float("inf")).scatter_reduce_(0, index, scores.where(valid, -float("inf")), "amax")
    return ~(high - low <= ROUNDING * torch.finfo(scores.dtype).eps * torch.maximum(low.abs(), high.abs()))  # NaN varies


def _deviation(x: Tensor, valid: Tensor, ddof: int) -> Tensor:
    """Standard deviation over valid entries; 0 where there are no more than ddof."""
    count = valid.sum()
    mean = x.masked_fill(~valid, 0.0).sum() / count.clamp(min=1)
    return ((x - mean).masked_fill(~valid, 0.0).square().sum() / (count - ddof).clamp(min=1)).sqrt()


@torch.no_grad()
@operator
def informative_rescale(
    advantages: Tensor,
    scores: Tensor,
    groups: Tensor,
    *,
    by: Literal["groups", "nonzero_scores"] = "groups",
    valid: Tensor | None = None,
) -> Tensor:
    """GPG's factor: what responses without a gradient would have weighed goes to the others.

    A * B / B', with B the valid responses and B' those that count. By `groups`: of groups in which an advantage is not 0.
    By `nonzero_scores`: those whose score is not 0. The factor is 1 where B' is 0.

    advantages, scores: [B]. groups: [B] int. valid: bool [B]; others are left out and get 0. Returns [B].
    Source: GPG, Chu et al. 2025, arXiv 2504.02546 (by groups); verl `compute_gpg_outcome_advantage` (by nonzero scores).
    Pitfall: by nonzero scores the factor also grows where the policy merely fails, and is 1 for scores of -1 and 1.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    advantages = advantages.masked_fill(~valid, 0.0)
    if by == "groups":
        index, per_group = _grouping(groups)
        counted = valid & (per_group(advantages.abs()) > 0)[index]
    else:
        counted = valid & (scores != 0)
    return advantages * (valid.sum() / counted.sum()) if bool(counted.any()) else advantages


@torch.no_grad()
@operator
def pass_at_k_advantage(scores: Tensor, groups: Tensor, *, k: int, valid: Tensor | None = None) -> Tensor:
    """Advantage for the best of k, exact: the mean over all k-subsets of a group in which the response stands.

    scores: [B]. groups: [B] int. valid: bool [B]; others are left out and get 0. k >= 1.
    With M(S) the best score of a k-subset S: A_i = (E[M | i in S] - E[M]) / sqrt(Var M), over all C(n, k) subsets of the
    group's n valid responses. For scores 0 and 1 with n0 zeros: E[M] = 1 - C(n0, k) / C(n, k), Var M = E[M] (1 - E[M]), and
    a zero has E[M | i] = 1 - C(n0 - 1, k - 1) / C(n - 1, k - 1). k = 1 is GRPO with ddof 0 and eps 0.

    Returns [B], computed in float64; 0 in groups where M does not vary, which is any group of k or fewer.
    Source: Chen et al. 2025, arXiv 2508.10751 (scores 0 and 1); subsets of any scores by the same counting.
    Pitfall: a group with more than n - k successes teaches nothing, so it stops short of what pass@1 needs.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    result = torch.zeros_like(scores, dtype=torch.float64)
    for group in groups.unique():
        rows = (valid & (groups == group)).nonzero().squeeze(1)
        n = len(rows)
        if n <= k:
            continue
        ordered, order = scores[rows].double().sort()
        best = _choose(range(n), k - 1, n, k, like=ordered)  # P(the j-th smallest is the best of S)
        mean = (best * ordered).sum()
        variance = (best * (ordered - mean).square()).sum()
        if bool(variance.sqrt() <= ROUNDING * torch.finfo(scores.dtype).eps * ordered.abs().max()):
            continue
        below = _choose(range(n), k - 1, n - 1, k - 1, like=ordered)  # P(i, the j-th smallest, is the best | i in S)
        # P(the m-th smallest is the best | i in S), the same for every i below it.
        above = _choose(range(-1, n - 1), k - 2, n - 1, k - 1, like=ordered)
        later = (above * ordered).flip(0).cumsum(0).flip(0) - above * ordered
        result[rows[order]] = (below * ordered + later - mean) / variance.sqrt()
    return result.to(scores.dtype)


def _choose(tops: range, take: int, n: int, k: int, *, like: Tensor) -> Tensor:
    """C(top, take) / C(n, k) for each top; 0 where top or take is negative."""
    whole = math.comb(n, k)
    return like.new_tensor([math.comb(top, take) / whole if top >= 0 and take >= 0 else 0.0 for top in tops])


@torch.no_grad()
@operator
def lead_advantage(
    scores: Tensor, groups: Tensor, *, std: bool = True, ddof: int = 1, eps: float = 1e-6, valid: Tensor | None = None
) -> Tensor:
    """The best response of a group gets its lead over the second best, the others 0: pass@k with k the whole group.

    scores: [B]. groups: [B] int. valid: bool [B]; others are left out and get 0. std: divide by the group's standard
    deviation (ddof) plus eps. Returns [B]; 0 where two are best, and in a group of one.
    It is max over all minus max over the others, the leave-one-out advantage of the best of n.
    Source: Tang et al. 2025, arXiv 2503.19595; verl `compute_grpo_passk_outcome_advantage`.
    Pitfall: with scores 0 and 1 only a group with exactly one success teaches anything, and nothing is ever negative.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    result = torch.zeros_like(scores)
    for group in groups.unique():
        rows = (valid & (groups == group)).nonzero().squeeze(1)
        if len(rows) < 2:
            continue
        best, place = scores[rows].topk(2)
        lead = best[0] - best[1]
        if not bool(lead <= ROUNDING * torch.finfo(scores.dtype).eps * best.abs().max()):
            deviation = _deviation(scores[rows], torch.ones_like(rows, dtype=torch.bool), ddof) + eps if std else 1.0
            result[rows[place[0]]] = lead / deviation
    return result


@torch.no_grad()
@operator
def greedy_advantage(rewards: Tensor, greedy_scores: Tensor, mask: Tensor, *, reward_to_go: bool = False) -> Tensor:
    """ReMax: a response's score, or each token's reward to go, minus the score of its prompt's greedy response.

    rewards: [B, T]. greedy_scores: [B], NaN where there is none, and the response gets 0. mask: bool [B, T]. Returns
    [B, T], 0 where masked.
    Source: Li et al. 2023, arXiv 2310.10505 (score); verl `compute_remax_outcome_advantage` (reward to go).
    Pitfall: the greedy response must come from the same policy as the sampled ones, or the baseline is of another one.
    """
    returns = token_returns(rewards, mask)
    if not reward_to_go:
        returns = rewards.masked_fill(~mask, 0.0).sum(1, keepdim=True).expand_as(mask)
    known = mask & greedy_scores.isfinite().unsqueeze(1)
    return (returns - greedy_scores.unsqueeze(1)).masked_fill(~known, 0.0)


@torch.no_grad()
@operator
def entropy_weighted_advantage(
    scores: Tensor, groups: Tensor, entropy: Tensor, mask: Tensor, *, share: float, ddof: int = 0, eps: float = 1e-6
) -> Tensor:
    """GTPO: a success is worth more where the policy was less sure than its fellow successes at that token.

    r_it = s_i [(1 - share) + share * H_it / mean_k H_kt] for s_i > 0, with k over the responses of the group that have a
    positive score and a t-th token; r_it = s_i for the others. A_it = (r_it - mean) / (deviation + eps), over all tokens
    of the group. t counts trainable tokens.

    scores: [B], finite where the response has tokens. groups: [B] int. entropy: [B, T]. mask: bool [B, T].
    Returns [B, T], 0 where masked. A group of equal scores gets exactly 0: there is no outcome to distribute.
    Source: Tan et al. 2025, arXiv 2508.04349. That equal scores get 0 is ours: dividing by the deviation would blow the
    entropies of an all-right group up to full advantages.
    Pitfall: the t-th tokens of two responses need have nothing in common. Where few successes are long, their last tokens
    are compared with few or none, and weigh 1 then.
    """
    valid = mask.any(1)
    index, per_group = _grouping(groups)
    n_groups, width = int(per_group(scores).numel()), mask.shape[1]
    scores = scores.masked_fill(~valid, 0.0)
    rank = relative(mask)[0].clamp(min=0)
    counted = mask & (scores > 0).unsqueeze(1)
    entropy = entropy.masked_fill(~counted, 0.0)
    cell = index.unsqueeze(1) * width + rank  # one for each group and step

    def over_responses(x: Tensor) -> Tensor:
        return x.new_zeros(n_groups * width).index_add_(0, cell.flatten(), x.flatten())[cell]

    mean = over_responses(entropy) / over_responses(counted.to(entropy.dtype)).clamp(min=1)
    weight = torch.where(counted & ~(mean <= 0), entropy / mean.clamp(min=torch.finfo(entropy.dtype).tiny), 1.0)
    shaped = (scores.unsqueeze(1) * ((1 - share) + share * weight)).masked_fill(~mask, 0.0)
    tokens = per_group(mask.sum(1).to(scores.dtype))
    centred = (shaped - (per_group(shaped.sum(1)) / tokens.clamp(min=1))[index].unsqueeze(1)).masked_fill(~mask, 0.0)
    deviation = (per_group(centred.square().sum(1)) / (tokens - ddof).clamp(min=1)).sqrt()
    varies = _group_varies(scores, valid, index, n_groups)
    return (centred / (deviation[index] + eps).unsqueeze(1)).masked_fill(~varies[index].unsqueeze(1), 0.0)
