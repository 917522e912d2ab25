"""Transport as pure tensor functions. Shapes are [B, T] (responses x tokens) unless said otherwise."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Gap = Literal["carry", "decay", "cut"]

# Rows from which one step per token beats a scan in blocks: each step then fills the cores by itself.
TIME_MAJOR_ROWS = 256
SCAN_BLOCK = 64

# Numbers that differ by so many units in the last place of the largest are equal: sums taken in another order.
ROUNDING = 8


@torch.no_grad()
def scan(a: Tensor, b: Tensor) -> Tensor:
    """Solve A_t = a_t + b_t * A_{t+1} along the last dimension, with A after the end = 0.

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
    return torch.nn.functional.pad(later[:, 1:], (0, 1), value=length)


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
    if rewards.dim() != 2 or values.shape != rewards.shape or mask.shape != rewards.shape:
        raise ValueError(
            f"rewards, values and mask must share one shape [B, T]; got {tuple(rewards.shape)}, "
            f"{tuple(values.shape)}, {tuple(mask.shape)}"
        )
    if bootstrap is not None and bootstrap.shape != rewards.shape[:1]:
        raise ValueError(f"bootstrap must be [B] = [{rewards.shape[0]}]; got {tuple(bootstrap.shape)}")
    if gap not in ("carry", "decay", "cut"):
        raise ValueError(f"gap must be 'carry', 'decay' or 'cut'; got {gap!r}")
    if rewards.numel() == 0:
        return torch.zeros_like(rewards), torch.zeros_like(rewards)
    mask = mask.bool()
    rewards, values = (_at_least_float32(x).masked_fill(~mask, 0.0) for x in (rewards, values))

    position = torch.arange(mask.shape[1], device=mask.device)
    last_step = torch.where(mask, position, 0).cummax(1).values

    def per_token(knob: float | Tensor) -> Tensor:
        full = torch.as_tensor(knob, dtype=values.dtype, device=values.device)
        if full.dim() and full.shape != values.shape:
            raise ValueError(f"gamma and lam must be a float or [B, T] = {tuple(values.shape)}; got {tuple(full.shape)}")
        if not full.dim():
            return full.expand_as(values)
        # Where `decay` counts gaps as steps, they take the discount of the last token before them.
        return full.gather(1, last_step)

    g, lam_t, lam_v = per_token(gamma), per_token(lam), per_token(lam_value)
    end = torch.zeros_like(values[:, :1]) if bootstrap is None else bootstrap.unsqueeze(1).to(values.dtype)
    following = _next_step(mask)  # T after the last step
    is_step = mask
    if gap == "carry":  # the next step's value, however far
        next_values = torch.cat([values, end], 1).gather(1, following)
    else:  # the neighbour's, 0 in a gap
        neighbour = torch.nn.functional.pad(values[:, 1:], (0, 1))
        next_values = torch.where(following == mask.shape[1], end, neighbour)
        if gap == "decay":
            is_step = mask | (following < mask.shape[1])
    delta = (rewards + g * next_values - values).masked_fill(~is_step, 0.0)
    outside = 0.0 if gap == "cut" else 1.0  # what a position that is no step hands on

    def trace(lam: Tensor) -> Tensor:
        return scan(delta, torch.where(is_step, g * lam, outside))

    # R_t - V_t obeys the recurrence of A_t with lam_value in place of lam.
    return trace(lam_t).masked_fill(~mask, 0.0), (values + trace(lam_v)).masked_fill(~mask, 0.0)


@torch.no_grad()
def group_advantage(
    scores: Tensor,
    groups: Tensor,
    *,
    std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Score minus its group's mean, divided by its group's standard deviation where `std`.

    scores: [B], one per response. groups: [B] int. valid: bool [B]; others are left out and get 0.
    Standard deviation with ddof 1; a group of one, or of equal scores, gets exactly 0. Returns [B].
    Source: GRPO, Shao et al. 2024 (std); Dr. GRPO, Liu et al. 2025 (without).
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    scores = scores.masked_fill(~valid, 0.0)
    index = torch.unique(groups, return_inverse=True)[1]
    n_groups = int(index.max()) + 1 if index.numel() else 0

    def per_group(x: Tensor) -> Tensor:
        return x.new_zeros(n_groups).index_add_(0, index, x)

    count = per_group(valid.to(scores.dtype))
    mean = per_group(scores) / count.clamp(min=1)
    centred = (scores - mean[index]).masked_fill(~valid, 0.0)
    # Rounding noise in a group of equal scores must not become an advantage once divided by its own size.
    low = scores.new_full((n_groups,), float("inf")).scatter_reduce_(0, index, scores.where(valid, float("inf")), "amin")
    high = scores.new_full((n_groups,), -float("inf")).scatter_reduce_(0, index, scores.where(valid, -float("inf")), "amax")
    rounding = ROUNDING * torch.finfo(scores.dtype).eps * torch.maximum(low.abs(), high.abs())
    centred = centred.masked_fill((high - low <= rounding)[index], 0.0)
    if not std:
        return centred
    deviation = (per_group(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation[index] + eps)


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
def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit deviation over unmasked tokens of the batch; 0 at masked ones.

    Fewer than two tokens, or tokens that differ only by rounding, are centred and not divided.
    """
    mean, std = masked_mean_std(x, mask)
    centred = (x - mean).masked_fill(~mask, 0.0)
    return centred / (std + eps) if _varies(x, mask, std) else torch.zeros_like(centred)


def sigmoid_gate(statistic: Tensor, mean: float, std: float, low: float, high: float, slope: float) -> Tensor:
    """g = low + (high - low) sigmoid(slope * (statistic - mean) / std), detached; in [low, high]."""
    z = (statistic.detach() - mean) / max(std, 1e-6)
    return low + (high - low) * torch.sigmoid(slope * z)


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
