"""What every part here asks of masked tensors: moments, whitening, neighbours, ranks. [B, T] unless said otherwise."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from cct.tensors import operator

# Numbers that differ by so many units in the last place of the largest are equal: sums taken in another order.
ROUNDING = 8

EpsAt = Literal["std", "variance", "floor"]

Unit = Literal["tokens", "responses"]


@operator
def masked_mean_std(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (ddof 0) over unmasked positions; 0 and 0 where there are none."""
    count = mask.sum().clamp(min=1)
    x = x.masked_fill(~mask, 0.0)
    mean = x.sum() / count
    return mean, ((x - mean).masked_fill(~mask, 0.0).square().sum() / count).sqrt()


@operator
def varies(x: Tensor, mask: Tensor, std: Tensor) -> bool:
    """Whether unmasked entries differ by more than the rounding of float32, in which rewards and values come; NaN does."""
    largest = x.masked_fill(~mask, 0.0).abs().amax() if x.numel() else x.new_zeros(())
    return not bool(std <= ROUNDING * torch.finfo(torch.float32).eps * largest)


@torch.no_grad()
@operator
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
    if not varies(x, mask, std):
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


@operator
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over unmasked tokens; 0 where the returns do not vary."""
    spread = masked_mean_std(returns, mask)[1]
    if not varies(returns, mask, spread):
        return 0.0
    return float(1 - (masked_mean_std(returns - values, mask)[1] / spread) ** 2)


@operator
def relative(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each unmasked token within its response [B, T], and the number of tokens [B, 1]."""
    return mask.long().cumsum(1) - 1, mask.sum(1, keepdim=True)


@operator
def packed(x: Tensor, mask: Tensor) -> Tensor:
    """Unmasked entries first, in their order; what follows them is arbitrary."""
    return x.gather(1, (~mask).long().sort(dim=1, stable=True).indices)


@operator
def next_step(mask: Tensor) -> Tensor:
    """Index of the next unmasked position after t, [B, T]; T where there is none."""
    length = mask.shape[1]
    index = torch.arange(length, device=mask.device).expand_as(mask)
    later = torch.where(mask, index, length).flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(later, (0, 1), value=length)[:, 1:]


@operator
def previous_step(x: Tensor, mask: Tensor, first: float) -> Tensor:
    """x [B, T] at the last unmasked position strictly before t; `first` where there is none."""
    position = torch.arange(mask.shape[1], device=mask.device)
    here = torch.where(mask, position, -1).cummax(1).values  # the last step here or before
    before = torch.nn.functional.pad(here, (1, 0), value=-1)[:, :-1]
    return torch.where(before >= 0, x.gather(1, before.clamp(min=0)), torch.full_like(x, first))


@operator
def ordered(x: Tensor, mask: Tensor) -> Tensor:
    """x. Raises ValueError where an unmasked entry is NaN, which has no place in an order and would vanish in it."""
    if bool((mask & x.isnan()).any()):
        raise ValueError("a number by which tokens are chosen is NaN")
    return x


@operator
def largest_share(x: Tensor, mask: Tensor, share: float) -> Tensor:
    """The ceil(share * n) largest of each response's n unmasked entries, [B, T] bool; of equal ones the earlier.

    Raises ValueError where one is NaN.
    """
    x = ordered(x, mask)
    order = x.masked_fill(~mask, -math.inf).sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(x.shape[1], device=x.device).expand_as(order))
    return mask & (rank < (share * mask.sum(1, keepdim=True) - 1e-6).ceil())


@torch.no_grad()
@operator
def high_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """bool [B, T], the unmasked tokens whose entropy is at or above the (1 - fraction) quantile of the batch.

    entropy: [B, T]. mask: bool [B, T]. The quantile interpolates linearly, so that of n distinct entropies
    n - ceil((1 - fraction) (n - 1)) are kept, at least one; ties at the threshold are all kept.
    Raises ValueError where one is NaN.
    Source: Wang et al. 2025, arXiv 2506.01939 (20%); the threshold is that of TRL's `get_high_entropy_mask`.
    """
    found = ordered(entropy, mask)[mask].sort().values
    if not len(found):
        return mask
    # A token at or above an interpolated quantile is at or above the next entropy. Rounded, or 0.3 * 10 would exceed 3.
    place = math.ceil(round((1 - fraction) * (len(found) - 1), 6))
    return mask & (entropy.masked_fill(~mask, 0.0) >= found[place])
