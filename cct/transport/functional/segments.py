"""Turns and segments: where they start, and credit for each as a whole. [B, T] unless said otherwise."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from cct.tensors import operator

from .groups import Scale, _grouping, group_advantage
from .masked import next_step, ordered, previous_step
from .traces import Steps, gated_gae, scan

TurnBaseline = Literal["episode", "turn"]


@operator
def turn_starts(mask: Tensor) -> Tensor:
    """First tokens of turns, [B, T] bool: a turn is a run of unmasked tokens, set apart by masked ones (a tool's output)."""
    return mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]


@operator
def turn_ends(mask: Tensor) -> Tensor:
    """Last tokens of turns, [B, T] bool."""
    return mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]


@operator
def from_start(x: Tensor, starts: Tensor) -> Tensor:
    """x [B, T] at the last start at or before t: what belongs to a turn or segment, given to each of its tokens."""
    position = torch.arange(x.shape[1], device=x.device)
    return x.gather(1, torch.where(starts, position, 0).cummax(1).values)


@torch.no_grad()
@operator
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
    s = Steps.of(rewards, values, mask, bootstrap, "carry")
    ends = turn_ends(s.mask)
    after = torch.zeros_like(s.values[:, :1]) if bootstrap is None else bootstrap.unsqueeze(1).to(s.values.dtype)
    next_end = next_step(ends)
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
@operator
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    lam_value: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE whose steps are turns: each turn's advantage on each of its tokens, and value targets, [B, T] each.

    With V_k read at the first token of turn k and R_k the sum of its rewards:
    A_k = R_k + gamma V_{k+1} - V_k + gamma lam A_{k+1}. After the last turn V is `bootstrap` [B], default 0.
    The target of a turn's first token is V_k + the same trace with lam_value; that of a later one is this less the turn's
    rewards before it, so that the critic learns at every token. No other value than those at first tokens reaches an advantage.

    It is GAE that decays at the last token of each turn only, read at the first ones; with turns of one token it is GAE.
    Source: Turn-PPO, Li et al. 2025, arXiv 2512.17008.
    """
    ends = turn_ends(mask)

    def between(knob: float) -> Tensor:
        return torch.ones_like(rewards).masked_fill(ends, knob)

    g, to_advantage, to_target = between(gamma), between(lam), between(lam_value)
    advantages, targets = gated_gae(rewards, values, mask, gamma=g, lam=to_advantage, lam_value=to_target, bootstrap=bootstrap)
    return from_start(advantages, turn_starts(mask)).masked_fill(~mask, 0.0), targets


@torch.no_grad()
@operator
def turn_return(
    rewards: Tensor, mask: Tensor, groups: Tensor, *, gamma: float = 1.0, baseline: TurnBaseline = "episode"
) -> Tensor:
    """The return from each turn on, relative to the group, on each of the turn's tokens, [B, T].

    With R_k the sum of the rewards of turn k: G_k = R_k + gamma G_{k+1}. groups: [B] int; empty responses do not count.
    baseline `episode`: A_k = G_k - the mean of G_1 over the other episodes of the group. It knows nothing of the episode
    itself, so the policy gradient is unbiased, whatever ends an episode.
    `turn`: A_k = sum over j >= k of gamma^(j-k) (R_j - the mean of R_j over the group's episodes with a turn j).
    An episode alone in its group gets 0.

    Sources: Williams 1992 (return to go); Ahmadian et al. 2024 (leave one out). Per turn: after MT-GRPO, Zeng et al. 2025,
    arXiv 2505.11821, for any number of turns and without its division by deviations.
    Pitfall: `turn` takes off one mean for each turn that the episode has. A policy that decides when to stop decides how many,
    so its gradient is biased, against going on where later turns are rewarded (verl issue 7244).
    """
    rewards, starts, valid = rewards.masked_fill(~mask, 0.0), turn_starts(mask), mask.any(1)
    index, per_group = _grouping(groups)
    decay = torch.ones_like(rewards).masked_fill(turn_ends(mask), gamma)
    if baseline == "turn":
        place = index.unsqueeze(1), starts.long().cumsum(1)  # group, and number of the turn from 1 on
        empty = rewards.new_zeros(len(per_group(valid)), mask.shape[1] + 1)
        total = empty.index_put(place, rewards, accumulate=True)
        reached = empty.index_put(place, starts.to(rewards.dtype), accumulate=True).clamp(min=1)
        advantages = scan(rewards - (total / reached)[place].masked_fill(~starts, 0.0), decay)
    else:
        onwards = scan(rewards, decay)
        whole = torch.nn.functional.pad(onwards, (0, 1))[:, 0]  # where there are no positions, 0
        relative = group_advantage(whole, groups, baseline="leave_one_out", scale="none", valid=valid)
        alone = (per_group(valid.to(rewards.dtype)) <= 1)[index]
        advantages = (onwards + (relative - whole).unsqueeze(1)).masked_fill(alone.unsqueeze(1), 0.0)
    return from_start(advantages, starts).masked_fill(~mask, 0.0)


@torch.no_grad()
@operator
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


@operator
def improbable(logprobs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Unmasked tokens sampled with probability below `threshold`, [B, T] bool. Raises ValueError where one is NaN."""
    return mask & (ordered(logprobs, mask).masked_fill(~mask, 0.0) < math.log(threshold))


@operator
def starts_at_cuts(logprobs: Tensor, mask: Tensor, threshold: float, cuts: int) -> Tensor:
    """Segment starts: the first token, and every `cuts`-th of the tokens sampled with probability below `threshold`."""
    cut = improbable(logprobs, mask, threshold)
    number = cut.long().cumsum(1)
    return _with_first(cut & (number > 1) & ((number - 1) % cuts == 0), mask)


@operator
def starts_after(ends: Tensor, mask: Tensor) -> Tensor:
    """Segment starts: the first unmasked token, and each that follows one marked in `ends` [B, T] bool."""
    before = previous_step((ends & mask).float(), mask, first=0.0)
    return _with_first(mask & (before > 0), mask)


def _with_first(starts: Tensor, mask: Tensor) -> Tensor:
    return starts | (mask & (mask.long().cumsum(1) == 1))


@torch.no_grad()
@operator
def segment_advantage(
    rewards: Tensor, values: Tensor, mask: Tensor, starts: Tensor, *, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Change of value over each segment: rewards in it + V(start of the next) - V(its start), on each of its tokens.

    values: [B, T], read at segment starts only. starts: [B, T] bool; the first unmasked token is one in any case. After the
    last segment V is `bootstrap` [B], default 0. Undiscounted. Returns advantages [B, T], and the segments' numbers from 1
    on, both 0 where masked. With every token a start it is the TD(0) error; with one segment the return minus V.
    Sources: VinePPO, Kazemnejad et al. 2024; SPO, Guo et al. 2025.
    """
    starts = _with_first(starts & mask, mask)
    values = torch.where(starts, values, 0.0)  # a value between starts is never read, nor what stands there
    s = Steps.of(rewards, values, mask, bootstrap, "carry")
    ends = (s.next_of(starts.to(s.values.dtype), s.values.new_ones(len(mask))) > 0) & mask
    gained = s.trace(s.rewards + s.next_values.masked_fill(~ends, 0.0), (~ends).to(s.values.dtype)) - s.values
    return s.only(from_start(gained, starts)), starts.long().cumsum(1).masked_fill(~mask, 0)
