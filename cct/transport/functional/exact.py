"""Credit where the truth is known: the exact advantage, and how well other credit agrees with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cct.tensors import at_least_float32

from .masked import masked_mean_std
from .traces import gated_gae


def exact_advantage(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """r_t + V(s_t+1) - V(s_t), [B, T], 0 where masked; what follows the last token is worth 0."""
    return gated_gae(rewards, values, mask, gamma=1.0, lam=0.0)[0]


def root_mean_square(x: Tensor, mask: Tensor) -> Tensor:
    """Over trainable tokens; 1 where all are 0, so that dividing by it changes nothing."""
    root = masked_mean_std(at_least_float32(x).square(), mask)[0].sqrt()
    return torch.where(root > 0, root, 1.0)


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1 on of a vector [N]; equal numbers share the mean of theirs."""
    inverse, count = torch.unique(x, return_inverse=True, return_counts=True)[1:]
    return (count.cumsum(0) - (count - 1) / 2)[inverse]


def agreement(credit: Tensor, truth: Tensor) -> dict[str, float]:
    """Of credit [N] with the exact advantage [N]: rank correlation (Spearman), right signs, bias and variance.

    right_signs: share of equal signs where the advantage is not 0; credit of 0 agrees with none. scale: cov(credit, A) /
    var(A), 1 of an unbiased estimator. bias and variance: mean and variance of credit / scale - A, in units of reward, where
    the scale is positive. What is not defined is left out.
    """
    credit, truth = (at_least_float32(x).double() for x in (credit, truth))
    found: dict[str, float] = {}
    decided = truth.abs() > 1e-6
    if bool(decided.any()):
        found["right_signs"] = float((credit.sign() == truth.sign())[decided].double().mean())
    if len(credit) < 2 or float(truth.std()) == 0:
        return found
    if float(credit.std()) > 0:
        found["rank_correlation"] = float(torch.corrcoef(torch.stack([ranks(credit), ranks(truth)]))[0, 1])
    scale = float(torch.cov(torch.stack([credit, truth]))[0, 1] / truth.var())
    found["scale"] = scale
    if scale > 0:
        error = credit / scale - truth
        found |= {"bias": float(error.mean()), "variance": float(error.var())}
    return {name: x for name, x in found.items() if math.isfinite(x)}
