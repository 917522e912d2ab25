"""From a statistic to a discount per token, and the controls that rearrange one. [B, T] unless said otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cct.tensors import operator

from .masked import packed, relative


@operator
def sigmoid_gate(statistic: Tensor, mean: float, std: float, low: float, high: float, slope: float) -> Tensor:
    """g = low + (high - low) sigmoid(slope * (statistic - mean) / std), detached; in [low, high]."""
    z = (statistic.detach() - mean) / max(std, 1e-6)
    return low + (high - low) * torch.sigmoid(slope * z)


@operator
def geometric_mean(gate: Tensor, mask: Tensor) -> float:
    """exp of the mean log-gate over unmasked tokens; 1 where there are none."""
    return float((gate.clamp(min=1e-12).log().masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)).exp())


@operator
def match_mean_log(gate: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Power of the gate whose mean logarithm over unmasked tokens is log(gamma): same mean decay as a fixed gamma.

    gate: [B, T] in (0, 1]. A gate of ones everywhere cannot be matched and becomes gamma.
    """
    mean = geometric_mean(gate, mask)
    return torch.full_like(gate, gamma) if mean >= 1 else gate.clamp(min=1e-12) ** (math.log(gamma) / math.log(mean))


@operator
def position_curve(mask: Tensor, start: float, end: float, shape: str, tokens: float) -> Tensor:
    """A curve from `start` to `end` over the unmasked tokens before each one, [B, T] float32.

    shape: `exponential` (closer by a factor e every `tokens`), `linear` (over `tokens`), `step` (after `tokens`).
    """
    place = (mask.long().cumsum(1) - mask.long()) / tokens
    left = {"exponential": (-place).exp(), "linear": (1 - place).clamp(min=0), "step": (place < 1).float()}[shape]
    return end + (start - end) * left


@operator
def shuffle_within(x: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Permute each response's unmasked entries at random; each response keeps its product."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(x.shape, generator=generator).to(x.device)
    slots = torch.where(mask, torch.arange(x.shape[1], device=x.device), x.shape[1]).sort(1).indices
    drawn = torch.where(mask, keys, 2.0).argsort(1)
    return torch.where(mask, x.scatter(1, slots, x.gather(1, drawn)), x)


@operator
def position_profile(x: Tensor, mask: Tensor) -> Tensor:
    """Replace each entry by the batch's mean at its relative position, every response stretched to one length."""
    rank, count = relative(mask)
    rows = mask.any(1)
    if not bool(rows.any()):
        return x
    longest = int(count.max())
    places = (torch.arange(longest, device=x.device) + 0.5) / longest  # relative positions
    stretched = packed(x, mask)[rows].gather(1, (places * count[rows]).long())
    profile = stretched.mean(0)
    return torch.where(mask, profile[((rank + 0.5) * longest / count.clamp(min=1)).long().clamp(0, longest - 1)], x)


@operator
def swap_between(x: Tensor, mask: Tensor) -> Tensor:
    """Each response takes the next response's entries, stretched to its own length (nearest neighbour).

    Responses without tokens are passed over. With one response, nothing changes.
    """
    rows = mask.any(1).nonzero().squeeze(1)
    if len(rows) < 2:
        return x
    rank, count = relative(mask)
    together = packed(x, mask)
    source = torch.arange(len(x), device=x.device)
    source[rows] = rows.roll(-1)
    index = ((rank + 0.5) * count[source] / count.clamp(min=1)).long().clamp(min=0)
    return torch.where(mask, together[source].gather(1, index.clamp(max=x.shape[1] - 1)), x)


@operator
def draw_marginal(x: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Replace each unmasked entry by one drawn independently from all unmasked entries of the batch."""
    pool = x[mask]
    if not len(pool):
        return x
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(pool), x.shape, generator=generator).to(x.device)
    return torch.where(mask, pool[drawn], x)
