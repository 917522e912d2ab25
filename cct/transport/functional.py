"""Transport as pure tensor functions. Shapes are [B, T] (responses x tokens) unless said otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Gap = Literal["carry", "decay", "cut"]
Baseline = Literal["mean", "leave_one_out", "length_weighted"]
Scale = Literal["group", "batch", "none"]
Single = Literal["zero", "raw"]
EpsAt = Literal["std", "variance", "floor"]
Unit = Literal["tokens", "responses"]
GAPS = ("carry", "decay", "cut")

# Rows from which one step per token beats a scan in blocks: each step then fills the cores by itself.
TIME_MAJOR_ROWS = 256
SCAN_BLOCK = 64

# Numbers that differ by so many units in the last place of the largest are equal: sums taken in another order.
ROUNDING = 8


@torch.no_grad()
def scan(a: Tensor, b: Tensor) -> Tensor:
    """Solve A_t = a_t + b_t * A_{t+1} along the last dimension, with A after the end = 0. Every trace here is one.

    a, b: [B, T]. Returns [B, T]. O(B*T) memory. Many rows: one fused step per token. Few rows: all
    blocks of 64 tokens at once (value and product), then one carry from block to block. Works on
    products, never on logarithms, so zeros and signs in b are exact. Carries no gradient.
    """
    batch, length = a.shape
    if length == 0 or batch == 0:
        return torch.zeros_like(a)
    if batch >= TIME_MAJOR_ROWS or length <= SCAN_BLOCK:
        return _scan_steps(a, b)
    pad = -length % SCAN_BLOCK
    blocks = (length + pad) // SCAN_BLOCK
    a_block = torch.nn.functional.pad(a, (0, pad)).view(batch * blocks, SCAN_BLOCK)
    b_block = torch.nn.functional.pad(b, (0, pad), value=1.0).view(batch * blocks, SCAN_BLOCK)
    inside = _scan_steps(a_block, b_block).view(batch, blocks, SCAN_BLOCK)  # as if every block were the last
    reach = b_block.flip(1).cumprod(1).flip(1).view(batch, blocks, SCAN_BLOCK)  # product from t to its block's end
    carry = _scan_steps(inside[..., 0], reach[..., 0])  # A at the first token of each block
    later = torch.nn.functional.pad(carry[:, 1:], (0, 1))
    return (inside + reach * later.unsqueeze(-1)).reshape(batch, -1)[:, :length]


def _scan_steps(a: Tensor, b: Tensor) -> Tensor:
    a_TB, b_TB = a.t().contiguous(), b.t().contiguous()
    out_TB = torch.empty_like(a_TB)
    last = torch.zeros_like(a_TB[0])
    for t in range(a_TB.shape[0] - 1, -1, -1):
        last = torch.addcmul(a_TB[t], b_TB[t], last, out=out_TB[t])
    return out_TB.t()


def _at_least_float32(x: Tensor) -> Tensor:
    """In eight bits a sum over a response loses its digits, and then its deviation falls below what counts as any."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _next_step(mask: Tensor) -> Tensor:
    """Index of the next unmasked position after t, [B, T]; T where there is none."""
    length = mask.shape[1]
    index = torch.arange(length, device=mask.device).expand_as(mask)
    later = torch.where(mask, index, length).flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(later, (0, 1), value=length)[:, 1:]


@torch.no_grad()
def gated_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
    lam_value: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
    gap: Gap = "carry",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with a discount per token, and the value targets of the same kernel.

    delta_t = r_t + g_t V_{t+1} - V_t;  A_t = delta_t + g_t lam_t A_{t+1};
    R_t = r_t + g_t [(1 - lam_value) V_{t+1} + lam_value R_{t+1}].

    rewards, values: [B, T]. mask: bool [B, T], True where the policy emitted the token.
    gamma, lam, lam_value: float or [B, T]. bootstrap: [B], V after the last token of a response that
    was cut by the length limit (0, the default, for one that ended by itself).
    gap: what masked positions between steps do. `carry`: they are no steps, as if they were removed.
    `decay`: each multiplies credit by gamma*lam, with r = V = 0. `cut`: no credit crosses them and the
    step before bootstraps from 0.

    Returns advantages and value targets, [B, T], float32 at least, 0 at masked positions; whatever stands at a masked
    position, NaN included, changes nothing. Raises ValueError on shapes that disagree.
    Sources: Schulman et al. 2016 (GAE); torchrl `generalized_advantage_estimate` with tensor gamma.
    """
    s = _Steps.of(rewards, values, mask, bootstrap, gap)
    g, lam_t, lam_v = s.knob(gamma), s.knob(lam), s.knob(lam_value)
    delta = s.rewards + g * s.next_values - s.values
    # R_t - V_t obeys the recurrence of A_t with lam_value in place of lam.
    return s.only(s.trace(delta, g * lam_t)), s.only(s.values + s.trace(delta, g * lam_v))


@dataclass
class _Steps:
    """A batch laid out for a trace: what follows each token, and on which positions the recurrence steps."""

    rewards: Tensor  # [B, T], 0 where masked
    values: Tensor  # [B, T], 0 where masked
    next_values: Tensor  # [B, T] V of what follows
    mask: Tensor
    is_step: Tensor  # [B, T]
    following: Tensor  # [B, T] next unmasked position, T after the last
    last_step: Tensor  # [B, T] the unmasked position here or before
    gap: Gap

    @classmethod
    def of(cls, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor | None, gap: Gap) -> _Steps:
        """Raises ValueError on shapes that disagree."""
        if rewards.dim() != 2 or values.shape != rewards.shape or mask.shape != rewards.shape:
            raise ValueError(
                f"rewards, values and mask must share one shape [B, T]; got {tuple(rewards.shape)}, "
                f"{tuple(values.shape)}, {tuple(mask.shape)}"
            )
        if bootstrap is not None and bootstrap.shape != rewards.shape[:1]:
            raise ValueError(f"bootstrap must be [B] = [{rewards.shape[0]}]; got {tuple(bootstrap.shape)}")
        if gap not in GAPS:
            raise ValueError(f"gap must be 'carry', 'decay' or 'cut'; got {gap!r}")
        mask = mask.bool()
        rewards, values = (_at_least_float32(x).masked_fill(~mask, 0.0) for x in (rewards, values))
        last_step = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).cummax(1).values
        following = _next_step(mask)
        is_step = mask | (following < mask.shape[1]) if gap == "decay" else mask
        steps = cls(rewards, values, values, mask, is_step, following, last_step, gap)
        steps.next_values = steps.next_of(values, bootstrap)
        return steps

    def next_of(self, x: Tensor, end: Tensor | None = None) -> Tensor:
        """x [B, T] at what follows each token; end: [B] after the last one, default 0."""
        after = x.new_zeros(len(x), 1) if end is None else end.unsqueeze(1).to(x.dtype)
        if self.gap == "carry":  # the next step, however far
            return torch.cat([x, after], 1).gather(1, self.following)
        neighbour = torch.nn.functional.pad(x, (0, 1))[:, 1:]  # which x must make 0 in a gap, where it is to be 0
        return torch.where(self.following == x.shape[1], after, neighbour)

    def knob(self, knob: float | Tensor) -> Tensor:
        """A float or [B, T] as [B, T]. Where `decay` counts gaps as steps, they take the knob of the last token before them."""
        full = torch.as_tensor(knob, dtype=self.values.dtype, device=self.values.device)
        if full.dim() and full.shape != self.values.shape:
            raise ValueError(f"gamma and lam must be a float or [B, T] = {tuple(self.values.shape)}; got {tuple(full.shape)}")
        return full.gather(1, self.last_step) if full.dim() else full.expand_as(self.values)

    def trace(self, a: Tensor, b: Tensor) -> Tensor:
        """`scan` over the steps; what is none hands credit on, or stops it under `cut`."""
        outside = 0.0 if self.gap == "cut" else 1.0
        return scan(a.masked_fill(~self.is_step, 0.0), torch.where(self.is_step, b, outside))

    def only(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.mask, 0.0)


@torch.no_grad()
def vtrace(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    log_ratio: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap: Tensor | None = None,
    gap: Gap = "carry",
) -> tuple[Tensor, Tensor]:
    """V-trace advantages and value targets, [B, T] each, for tokens sampled from another policy.

    rho_t = min(rho_bar, pi/mu);  c_t = lam_t min(c_bar, pi/mu);  delta_t = rho_t (r_t + g_t V_{t+1} - V_t);
    v_t - V_t = delta_t + g_t c_t (v_{t+1} - V_{t+1});  A_t = rho_t (r_t + g_t v_{t+1} - V_t).

    log_ratio: [B, T], log pi(t) - log mu(t) of the token sampled; everything else as in `gated_gae`. With ratio 1 and
    lam 1, A and v are GAE's at lam 1. Below lam 1, A is not GAE(lam): it looks one full step ahead, then follows v.
    Pitfall: A carries rho_t itself, so a loss that weights tokens by pi/mu again counts it twice.
    Source: Espeholt et al. 2018 (IMPALA), with lam of its remark 2; torchrl `vtrace_advantage_estimate`.
    """
    s = _Steps.of(rewards, values, mask, bootstrap, gap)
    g, ratio = s.knob(gamma), s.only(log_ratio)
    rho, c = ratio.clamp(max=math.log(rho_bar)).exp(), s.knob(lam) * ratio.clamp(max=math.log(c_bar)).exp()
    excess = s.trace(rho * (s.rewards + g * s.next_values - s.values), g * c)
    next_targets = s.next_values + s.next_of(excess)
    return s.only(rho * (s.rewards + g * next_targets - s.values)), s.only(s.values + excess)


@torch.no_grad()
def retrace(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    log_ratio: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor = 1.0,
    c_bar: float = 1.0,
    bootstrap: Tensor | None = None,
    gap: Gap = "carry",
) -> tuple[Tensor, Tensor]:
    """Retrace(lam) with a state-value critic: advantages and value targets, [B, T] each.

    c_t = lam_t min(c_bar, pi/mu);  A_t = Q_t - V_t = r_t + g_t V_{t+1} - V_t + g_t c_{t+1} A_{t+1}.

    Retrace corrects Q(s_t, a_t), so the token at t needs no ratio and the trace is cut by those after it. It asks for Q of
    the sampled action in the trace; here V stands for it, which is its expectation under pi. The value target takes the
    token's own ratio in: V_t + min(c_bar, pi/mu) A_t, which is V-trace's with rho_bar = c_bar and lam 1.
    log_ratio and the rest as in `vtrace`. With ratio 1 A is GAE(lam)'s. Source: Munos et al. 2016.
    """
    s = _Steps.of(rewards, values, mask, bootstrap, gap)
    g, ratio = s.knob(gamma), s.only(log_ratio).clamp(max=math.log(c_bar)).exp()
    delta = s.rewards + g * s.next_values - s.values
    advantages = s.trace(delta, g * s.next_of(s.knob(lam) * ratio))
    return s.only(advantages), s.only(s.values + ratio * advantages)


@torch.no_grad()
def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha * length) per response, [B, T]; 0 where alpha * length is below 1.

    Length counts unmasked tokens. A trace then reaches over a fixed share of the response: sum_k lam^k ~ alpha * length.
    Source: VAPO, Yue et al. 2025 (alpha = 0.05).
    """
    reach = alpha * mask.sum(1, keepdim=True).clamp(min=1)
    return (1 - 1 / reach).clamp(min=0).expand(mask.shape)


def turn_starts(mask: Tensor) -> Tensor:
    """First tokens of turns, [B, T] bool: a turn is a run of unmasked tokens, set apart by masked ones (a tool's output)."""
    return mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]


def turn_ends(mask: Tensor) -> Tensor:
    """Last tokens of turns, [B, T] bool."""
    return mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]


def from_start(x: Tensor, starts: Tensor) -> Tensor:
    """x [B, T] at the last start at or before t: what belongs to a turn or segment, given to each of its tokens."""
    position = torch.arange(x.shape[1], device=x.device)
    return x.gather(1, torch.where(starts, position, 0).cummax(1).values)


@torch.no_grad()
def bi_level_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    gamma_turn: float,
    lam_turn: float,
    lam_value: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over turns, then over the tokens of each turn; advantages and value targets, [B, T] each.

    Turns are runs of unmasked tokens. With e(k) the last token of turn k:
    A_e(k) = R_k + gamma_turn V_e(k+1) - V_e(k) + gamma_turn lam_turn A_e(k+1), where R_k = r_e(k) + rewards of turn k+1 before
    its last token; within a turn A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}. After the last turn, `bootstrap` [B] is
    discounted by gamma. Value targets are V + the same trace with lam_value at both levels.

    One turn is GAE(gamma, lam). All discounts and traces at 1 is the Monte-Carlo return minus V. VAGEN counts a turn's reward
    at its last token only; here rewards within the following turn are not lost between the turns. Two scans, O(B*T).
    Source: VAGEN, Wang et al. 2025.
    """
    s = _Steps.of(rewards, values, mask, bootstrap, "carry")
    ends = turn_ends(s.mask)
    after = torch.zeros_like(s.values[:, :1]) if bootstrap is None else bootstrap.unsqueeze(1).to(s.values.dtype)
    next_end = _next_step(ends)
    is_last = ends & (next_end == ends.shape[1])
    discount = torch.full_like(s.values, gamma_turn).masked_fill(is_last, gamma)
    inside = scan(s.rewards.masked_fill(ends, 0.0), (~ends).to(s.values.dtype))  # from here to before the turn's last token
    ahead = s.rewards + s.next_of(inside) + discount * torch.cat([s.values, after], 1).gather(1, next_end)
    delta_turn = (ahead - s.values).masked_fill(~ends, 0.0)
    delta = s.rewards + gamma * s.next_values - s.values

    def trace(within: float, between: float) -> Tensor:
        of_turns = scan(delta_turn, torch.where(ends, discount * between, 1.0))
        decay = torch.full_like(delta, gamma * within).masked_fill(ends, 0.0)
        return s.trace(torch.where(ends, of_turns, delta), decay)

    return s.only(trace(lam, lam_turn)), s.only(s.values + trace(lam_value, lam_value))


@torch.no_grad()
def gigpo_advantage(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    anchors: Tensor,
    *,
    gamma: float = 0.95,
    weight: float = 1.0,
    std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-in-group advantage, [B, T]: the response's among its group, plus `weight` times its turn's among like turns.

    groups: [B] int. anchors: [B, T] int, read at the first token of each turn: the state in which it began; turns of one
    group with the same number are compared, negative ones with none. A turn's score is the return from it on, discounted by
    gamma per turn; each turn counts once. A response alone in its group, or a turn alone in its state, adds 0.
    Source: GiGPO, Feng et al. 2025.
    """
    mask = mask.bool()
    scale: Scale = "group" if std else "none"
    rewards = rewards.masked_fill(~mask, 0.0)
    starts = turn_starts(mask)
    onwards = scan(rewards, torch.ones_like(rewards).masked_fill(turn_ends(mask), gamma))
    row, column = starts.nonzero(as_tuple=True)
    state = anchors[row, column]
    key = torch.unique(torch.stack([groups[row], state], 1), dim=0, return_inverse=True)[1]
    of_turns = torch.zeros_like(rewards)
    of_turns[row, column] = group_advantage(onwards[row, column], key, scale=scale, eps=eps, valid=state >= 0)
    of_response = group_advantage(rewards.sum(1), groups, scale=scale, eps=eps, valid=mask.any(1))
    return (of_response.unsqueeze(1) + weight * from_start(of_turns, starts)).masked_fill(~mask, 0.0)


def improbable(logprobs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Unmasked tokens sampled with probability below `threshold`, [B, T] bool."""
    return mask & (logprobs.masked_fill(~mask, 0.0) < math.log(threshold))


def starts_at_cuts(logprobs: Tensor, mask: Tensor, threshold: float, cuts: int) -> Tensor:
    """Segment starts: the first token, and every `cuts`-th of the tokens sampled with probability below `threshold`."""
    cut = improbable(logprobs, mask, threshold)
    number = cut.long().cumsum(1)
    return _with_first(cut & (number > 1) & ((number - 1) % cuts == 0), mask)


def starts_after(ends: Tensor, mask: Tensor) -> Tensor:
    """Segment starts: the first unmasked token, and each that follows one marked in `ends` [B, T] bool."""
    before = previous_step((ends & mask).float(), mask, first=0.0)
    return _with_first(mask & (before > 0), mask)


def _with_first(starts: Tensor, mask: Tensor) -> Tensor:
    return starts | (mask & (mask.long().cumsum(1) == 1))


@torch.no_grad()
def segment_advantage(
    rewards: Tensor, values: Tensor, mask: Tensor, starts: Tensor, *, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Change of value over each segment: rewards in it + V(start of the next) - V(its start), on each of its tokens.

    values: [B, T], read at segment starts only. starts: [B, T] bool; the first unmasked token is one in any case. After the
    last segment V is `bootstrap` [B], default 0. Undiscounted. Returns advantages [B, T], and the segments' numbers from 1
    on, both 0 where masked. With every token a start it is the TD(0) error; with one segment the return minus V.
    Sources: VinePPO, Kazemnejad et al. 2024; SPO, Guo et al. 2025.
    """
    mask = mask.bool()
    starts = _with_first(starts.bool() & mask, mask)
    values = torch.where(starts, values, 0.0)  # a value between starts is never read, nor what stands there
    s = _Steps.of(rewards, values, mask, bootstrap, "carry")
    ends = (s.next_of(starts.to(s.values.dtype), torch.ones_like(s.values[:, :1]).squeeze(1)) > 0) & mask
    gained = s.trace(s.rewards + s.next_values.masked_fill(~ends, 0.0), (~ends).to(s.values.dtype)) - s.values
    return s.only(from_start(gained, starts)), starts.long().cumsum(1).masked_fill(~mask, 0)


@torch.no_grad()
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
    scale: standard deviation of the `group`'s scores or of the whole `batch`'s, with ddof; `none` divides by nothing.
    single: a group of one gets 0, or its `raw` score (deviation 1 where it is the group's).

    Returns [B]. A group of equal scores, rounding aside, gets exactly 0.
    Sources: GRPO, Shao et al. 2024 (mean, group); Dr. GRPO, Liu et al. 2025 (mean, none); RLOO, Ahmadian et al. 2024
    (leave_one_out, none); OPO, Hao et al. 2025 (length_weighted, none); Lite PPO, Liu et al. 2025 (mean, batch).
    Pitfall: frameworks differ in eps (1e-4 to 1e-9) and in what a group of one gets; both change numbers silently.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
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
    alone = valid & (count == 1)[index]
    if single == "raw":
        centred = centred.where(~alone, scores)
    if scale == "none":
        return centred
    if scale == "batch":
        deviation = _deviation(scores, valid, ddof)
        deviation = deviation.where(deviation > 0, 1.0).expand_as(
            scores
        )  # or `raw` of a batch of equals would be divided by eps
    else:
        middle = per_group(scores) / count.clamp(min=1)
        squares = per_group((scores - middle[index]).masked_fill(~valid, 0.0).square())
        deviation = (squares / (count - ddof).clamp(min=1)).sqrt()[index].masked_fill(alone, 1.0)
    return centred / (deviation + eps)


def _grouping(groups: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Group number of each response, counted from 0, and the sum per group of a [B]."""
    index = torch.unique(groups, return_inverse=True)[1]
    n_groups = int(index.max()) + 1 if index.numel() else 0
    return index, lambda x: x.new_zeros(n_groups).index_add_(0, index, x)


def _group_varies(scores: Tensor, valid: Tensor, index: Tensor, n_groups: int) -> Tensor:
    """[groups] whether valid scores differ by more than rounding, which divided by its own size would be an advantage."""
    low = scores.new_full((n_groups,), float("inf")).scatter_reduce_(0, index, scores.where(valid, float("inf")), "amin")
    high = scores.new_full((n_groups,), -float("inf")).scatter_reduce_(0, index, scores.where(valid, -float("inf")), "amax")
    return high - low > ROUNDING * torch.finfo(scores.dtype).eps * torch.maximum(low.abs(), high.abs())


def _deviation(x: Tensor, valid: Tensor, ddof: int) -> Tensor:
    """Standard deviation over valid entries; 0 where there are no more than ddof."""
    count = valid.sum()
    mean = x.masked_fill(~valid, 0.0).sum() / count.clamp(min=1)
    return ((x - mean).masked_fill(~valid, 0.0).square().sum() / (count - ddof).clamp(min=1)).sqrt()


@torch.no_grad()
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
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    advantages = advantages.masked_fill(~valid, 0.0)
    if by == "groups":
        index, per_group = _grouping(groups)
        counted = valid & (per_group(advantages.abs()) > 0)[index]
    else:
        counted = valid & (scores != 0)
    return advantages * (valid.sum() / counted.sum()) if bool(counted.any()) else advantages


@torch.no_grad()
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
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
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
        if not bool(variance.sqrt() > ROUNDING * torch.finfo(scores.dtype).eps * ordered.abs().max()):
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
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    result = torch.zeros_like(scores)
    for group in groups.unique():
        rows = (valid & (groups == group)).nonzero().squeeze(1)
        if len(rows) < 2:
            continue
        best, place = scores[rows].topk(2)
        lead = best[0] - best[1]
        if bool(lead > ROUNDING * torch.finfo(scores.dtype).eps * best.abs().max()):
            deviation = _deviation(scores[rows], torch.ones_like(rows, dtype=torch.bool), ddof) + eps if std else 1.0
            result[rows[place[0]]] = lead / deviation
    return result


@torch.no_grad()
def token_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, gap: Gap = "carry") -> Tensor:
    """Discounted reward to go, G_t = r_t + gamma G_{t+1}, [B, T]; 0 where masked. `gap` as in `gated_gae`.

    Pitfall: nothing is added after the last token of a response that the length limit cut.
    """
    return gated_gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0, gap=gap)[0]


@torch.no_grad()
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
def outcome_trace(outcomes: Tensor, mask: Tensor, decay: float) -> Tensor:
    """decay^(tokens that follow t) * outcome, [B, T]: the eligibility trace of an outcome known at the last token.

    outcomes: [B]. mask: bool [B, T]; masked positions are no steps and get 0. decay 1 gives each token the outcome.
    Pitfall: after n tokens decay^n of the outcome is left, so the decay has to fit the length.
    """
    rank, count = _relative(mask)
    power = outcomes.new_tensor(decay) ** (count - 1 - rank).clamp(min=0)
    return (outcomes.unsqueeze(1) * power).masked_fill(~mask, 0.0)


@torch.no_grad()
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
    rank = _relative(mask)[0].clamp(min=0)
    counted = mask & (scores > 0).unsqueeze(1)
    entropy = entropy.masked_fill(~counted, 0.0)
    cell = index.unsqueeze(1) * width + rank  # one for each group and step

    def over_responses(x: Tensor) -> Tensor:
        return x.new_zeros(n_groups * width).index_add_(0, cell.flatten(), x.flatten())[cell]

    mean = over_responses(entropy) / over_responses(counted.to(entropy.dtype)).clamp(min=1)
    weight = torch.where(counted & (mean > 0), entropy / mean.clamp(min=torch.finfo(entropy.dtype).tiny), 1.0)
    shaped = (scores.unsqueeze(1) * ((1 - share) + share * weight)).masked_fill(~mask, 0.0)
    tokens = per_group(mask.sum(1).to(scores.dtype))
    centred = (shaped - (per_group(shaped.sum(1)) / tokens.clamp(min=1))[index].unsqueeze(1)).masked_fill(~mask, 0.0)
    deviation = (per_group(centred.square().sum(1)) / (tokens - ddof).clamp(min=1)).sqrt()
    varies = _group_varies(scores, valid, index, n_groups)
    return (centred / (deviation[index] + eps).unsqueeze(1)).masked_fill(~varies[index].unsqueeze(1), 0.0)


@torch.no_grad()
def high_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """bool [B, T], the unmasked tokens whose entropy is at or above the (1 - fraction) quantile of the batch.

    entropy: [B, T]. mask: bool [B, T]. The quantile interpolates linearly, so that of n distinct entropies
    n - ceil((1 - fraction) (n - 1)) are kept, at least one; ties at the threshold are all kept.
    Source: Wang et al. 2025, arXiv 2506.01939 (20%); the threshold is that of TRL's `get_high_entropy_mask`.
    """
    found = entropy[mask].sort().values
    if not len(found):
        return mask
    # A token at or above an interpolated quantile is at or above the next entropy. Rounded, or 0.3 * 10 would exceed 3.
    place = math.ceil(round((1 - fraction) * (len(found) - 1), 6))
    return mask & (entropy.masked_fill(~mask, 0.0) >= found[place])


def masked_mean_std(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (ddof 0) over unmasked positions; 0 and 0 where there are none."""
    count = mask.sum().clamp(min=1)
    x = x.masked_fill(~mask, 0.0)
    mean = x.sum() / count
    return mean, ((x - mean).masked_fill(~mask, 0.0).square().sum() / count).sqrt()


def _varies(x: Tensor, mask: Tensor, std: Tensor) -> bool:
    """Whether unmasked entries differ by more than rounding."""
    largest = x.masked_fill(~mask, 0.0).abs().amax() if x.numel() else x.new_zeros(())
    return bool(std > ROUNDING * torch.finfo(x.dtype).eps * largest)


@torch.no_grad()
def whiten(
    x: Tensor, mask: Tensor, *, eps: float = 1e-8, eps_at: EpsAt = "std", ddof: int = 0, unit: Unit = "tokens"
) -> Tensor:
    """Zero mean and unit deviation over unmasked tokens of the batch, [B, T]; 0 at masked ones.

    eps_at: eps is added to the `std`, added to the `variance`, or is a `floor` under the variance.
    unit: what counts as one in mean, variance and ddof. `tokens`: each token. `responses`: each response, whose tokens
    share its weight; with one number per response it is whitening over responses.

    Fewer than two units, or tokens that differ only by rounding, give 0.
    Sources: verl `masked_whiten` (ddof 1, 1e-8 added to the variance); OpenRLHF (ddof 0, floor of 1e-8 under it).
    Pitfall: over tokens long responses weigh more, so the mean of the responses' advantages is not 0.
    """
    mean, std = masked_mean_std(x, mask)
    if not _varies(x, mask, std):
        return torch.zeros_like(x)
    count = mask.sum()
    if unit == "responses":
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1)
        count = mask.any(1).sum()
        mean = (x.masked_fill(~mask, 0.0) * weights).sum() / count
        std = ((x - mean).masked_fill(~mask, 0.0).square() * weights).sum().div(count).sqrt()
    if count < 2:
        return torch.zeros_like(x)
    std = std * (count / (count - ddof)).sqrt()
    scaled = {"std": std + eps, "variance": (std.square() + eps).sqrt(), "floor": std.square().clamp(min=eps).sqrt()}[eps_at]
    return (x - mean).masked_fill(~mask, 0.0) / scaled


def sigmoid_gate(statistic: Tensor, mean: float, std: float, low: float, high: float, slope: float) -> Tensor:
    """g = low + (high - low) sigmoid(slope * (statistic - mean) / std), detached; in [low, high]."""
    z = (statistic.detach() - mean) / max(std, 1e-6)
    return low + (high - low) * torch.sigmoid(slope * z)


@torch.no_grad()
def redistribute(rewards: Tensor, weights: Tensor, mask: Tensor, beta: float) -> Tensor:
    """(1 - beta) r_t + beta w_t sum_t r_t, with the weights of each response's unmasked tokens divided by their sum.

    rewards, weights: [B, T], weights >= 0; all equal where they are all 0. Returns [B, T], 0 where masked; each response's
    total stays what it was. Source: attention-based credit, Chan et al. 2024.
    """
    rewards, weights = rewards.masked_fill(~mask, 0.0), weights.masked_fill(~mask, 0.0)
    total = weights.sum(1, keepdim=True)
    weights = torch.where(
        total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), mask / mask.sum(1, True).clamp(min=1)
    )
    return (1 - beta) * rewards + beta * weights * rewards.sum(1, keepdim=True)


def largest_share(x: Tensor, mask: Tensor, share: float) -> Tensor:
    """The ceil(share * n) largest of each response's n unmasked entries, [B, T] bool; of equal ones the earlier."""
    order = x.masked_fill(~mask, -math.inf).sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(x.shape[1], device=x.device).expand_as(order))
    return mask & (rank < (share * mask.sum(1, keepdim=True) - 1e-6).ceil())


def previous_step(x: Tensor, mask: Tensor, first: float) -> Tensor:
    """x [B, T] at the last unmasked position strictly before t; `first` where there is none."""
    position = torch.arange(mask.shape[1], device=mask.device)
    here = torch.where(mask, position, -1).cummax(1).values  # the last step here or before
    before = torch.nn.functional.pad(here, (1, 0), value=-1)[:, :-1]
    return torch.where(before >= 0, x.gather(1, before.clamp(min=0)), torch.full_like(x, first))


def position_curve(mask: Tensor, start: float, end: float, shape: str, tokens: float) -> Tensor:
    """A curve from `start` to `end` over the unmasked tokens before each one, [B, T] float32.

    shape: `exponential` (closer by a factor e every `tokens`), `linear` (over `tokens`), `step` (after `tokens`).
    """
    place = (mask.long().cumsum(1) - mask.long()) / tokens
    left = {"exponential": (-place).exp(), "linear": (1 - place).clamp(min=0), "step": (place < 1).float()}[shape]
    return end + (start - end) * left


def geometric_mean(gate: Tensor, mask: Tensor) -> float:
    """exp of the mean log-gate over unmasked tokens; 1 where there are none."""
    return float((gate.clamp(min=1e-12).log().masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)).exp())


def match_mean_log(gate: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Power of the gate whose mean logarithm over unmasked tokens is log(gamma): same mean decay as a fixed gamma.

    gate: [B, T] in (0, 1]. A gate of ones everywhere cannot be matched and becomes gamma.
    """
    mean = geometric_mean(gate, mask)
    return gate.clamp(min=1e-12) ** (math.log(gamma) / math.log(mean)) if mean < 1 else torch.full_like(gate, gamma)


def shuffle_within(x: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Permute each response's unmasked entries at random; each response keeps its product."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(x.shape, generator=generator).to(x.device)
    slots = torch.where(mask, torch.arange(x.shape[1], device=x.device), x.shape[1]).sort(1).indices
    drawn = torch.where(mask, keys, 2.0).argsort(1)
    return torch.where(mask, x.scatter(1, slots, x.gather(1, drawn)), x)


def _relative(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each unmasked token within its response [B, T], and the number of tokens [B, 1]."""
    return mask.long().cumsum(1) - 1, mask.sum(1, keepdim=True)


def position_profile(x: Tensor, mask: Tensor) -> Tensor:
    """Replace each entry by the batch's mean at its relative position, every response stretched to one length."""
    rank, count = _relative(mask)
    rows = mask.any(1)
    if not bool(rows.any()):
        return x
    longest = int(count.max())
    places = (torch.arange(longest, device=x.device) + 0.5) / longest  # relative positions
    stretched = _packed(x, mask)[rows].gather(1, (places * count[rows]).long())
    profile = stretched.mean(0)
    return torch.where(mask, profile[((rank + 0.5) * longest / count.clamp(min=1)).long().clamp(0, longest - 1)], x)


def _packed(x: Tensor, mask: Tensor) -> Tensor:
    """Unmasked entries first, in their order; what follows them is arbitrary."""
    return x.gather(1, (~mask).long().sort(dim=1, stable=True).indices)


def swap_between(x: Tensor, mask: Tensor) -> Tensor:
    """Each response takes the next response's entries, stretched to its own length (nearest neighbour).

    Responses without tokens are passed over. With one response, nothing changes.
    """
    rows = mask.any(1).nonzero().squeeze(1)
    if len(rows) < 2:
        return x
    rank, count = _relative(mask)
    packed = _packed(x, mask)
    source = torch.arange(len(x), device=x.device)
    source[rows] = rows.roll(-1)
    index = ((rank + 0.5) * count[source] / count.clamp(min=1)).long().clamp(min=0)
    return torch.where(mask, packed[source].gather(1, index.clamp(max=x.shape[1] - 1)), x)


def draw_marginal(x: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Replace each unmasked entry by one drawn independently from all unmasked entries of the batch."""
    pool = x[mask]
    if not len(pool):
        return x
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(pool), x.shape, generator=generator).to(x.device)
    return torch.where(mask, pool[drawn], x)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over unmasked tokens; 0 where the returns do not vary."""
    spread = masked_mean_std(returns, mask)[1]
    if not _varies(returns, mask, spread):
        return 0.0
    return float(1 - (masked_mean_std(returns - values, mask)[1] / spread) ** 2)
