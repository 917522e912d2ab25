"""Value targets as distributions over bins, and baselines, as pure tensor functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cct.tensors import operator

# HL-Gauss: deviation in bin widths, as its source recommends; and bins added beyond each end of the range, so that a
# target at the end keeps all but 1e-6 of its mass and with it its mean.
SIGMA_IN_BINS = 0.75
PAD_BINS = 3
# Of the range: nearer to its ends no value counts, so that its log-odds are finite.
EDGE = 1e-6


@operator
def two_hot(target: Tensor, atoms: Tensor) -> Tensor:
    """Distribution over evenly spaced atoms [K] with mean `target` [...]: its two neighbours share it. Returns [..., K].

    Targets beyond the first or last atom count as there. The mean is the target exactly, which an
    HL-Gauss target's is only nearly; but the two neighbours are all that learns.
    Sources: MuZero, Schrittwieser et al. 2020; DreamerV3, Hafner et al. 2023.
    """
    place = ((target - atoms[0]) / (atoms[1] - atoms[0])).clamp(0, len(atoms) - 1)
    steps = torch.arange(len(atoms), device=target.device, dtype=place.dtype)
    return (1 - (place.unsqueeze(-1) - steps).abs()).clamp(min=0)


@operator
def hl_gauss(target: Tensor, atoms: Tensor, sigma: float) -> Tensor:
    """Mass of a normal around `target` [...] in the bins around evenly spaced atoms [K]; sums to 1. Returns [..., K].

    Bin i is [atom_i - w / 2, atom_i + w / 2] with w the spacing; what lies beyond the outer edges is
    divided out. Source: Farebrother et al. 2024, "Stop regressing". Pitfall: near an outer edge that division moves
    the mean inwards, so the atoms must go beyond the range of targets (`PAD_BINS`).
    """
    half = (atoms[1] - atoms[0]) / 2
    edges = torch.cat([atoms - half, atoms[-1:] + half])
    below = 0.5 * (1 + torch.erf((edges - target.unsqueeze(-1)) / (sigma * math.sqrt(2))))
    return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


@operator
def group_mean(x: Tensor, groups: Tensor, valid: Tensor, *, leave_one_out: bool = True) -> tuple[Tensor, Tensor]:
    """Mean of x [B] over the valid responses of each one's group, without its own where `leave_one_out`.

    groups: [B] int. Returns the mean [B], 0 where there is none, and over how many it is [B]. With its own outcome in it
    a baseline is no longer independent of the response, which shrinks advantages by (n - 1) / n in a group of n.
    Source: RLOO, Ahmadian et al. 2024.
    """
    x, weight = x.masked_fill(~valid, 0.0), valid.to(x.dtype)
    index = torch.unique(groups, return_inverse=True)[1]

    def per_group(y: Tensor) -> Tensor:
        return y.new_zeros(len(y)).index_add_(0, index, y)[index]

    total, count = per_group(x), per_group(weight)
    if leave_one_out:
        total, count = total - x, count - weight
    return torch.where(count > 0, total / count.clamp(min=1), 0.0), count


@operator
def at_level(values: Tensor, first: Tensor, level: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Values [B, T] with the shift of log-odds that takes the value `first` [B] to `level` [B]; all within bounds (low, high).

    A value at an end of the range stays there unless `first` is there too, which sets it apart from adding level - first. Where
    `first` is near an end and `level` is not, small differences beside it are stretched.
    """

    def log_odds(x: Tensor) -> Tensor:
        return torch.logit((x - bounds[0]) / (bounds[1] - bounds[0]), eps=EDGE)

    shift = log_odds(level) - log_odds(first)
    return bounds[0] + (bounds[1] - bounds[0]) * torch.sigmoid(log_odds(values) + shift.unsqueeze(-1))


@operator
def rank_in_group(groups: Tensor) -> Tensor:
    """Number of each row [B] among those of its group, 0, 1, ... in their order. groups: [B] int."""
    index = torch.unique(groups, return_inverse=True)[1]
    count = torch.bincount(index)
    order = index.argsort(stable=True)
    rank = torch.empty_like(index)
    rank[order] = torch.arange(len(index), device=index.device) - (count.cumsum(0) - count)[index[order]]
    return rank


@operator
def prompt_numbers(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A number per prompt [B] from left-padded tokens [B, P]: the same wherever and whenever the prompt comes."""
    modulus = 2**31 - 1
    place = attention_mask.cumsum(1) * attention_mask  # 1, 2, ... from the first token
    factors = (place * 2654435761) % modulus
    return (((input_ids + 1) * factors) % modulus).masked_fill(attention_mask == 0, 0).sum(1) % modulus
