"""Update geometry as pure tensor functions. Shapes are [B, T] (responses x tokens) unless said otherwise."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .base import Aggregation

# exp(20) is finite in float32 and far beyond any clip bound; larger log-ratios would overflow to inf and then to NaN.
MAX_LOG_RATIO = 20.0


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = exp(logprobs - old_logprobs).

    All [B, T]; mask bool. dual_clip c > 1: where A < 0 the loss is at most -c A. Masked positions give
    loss 0 and gradient 0 whatever stands there, NaN included. Returns the loss per token [B, T] and
    detached metrics per token: `ratio`, `clip_fraction`, `approx_kl` (k3 of old to new policy).
    Source: Schulman et al. 2017; dual clip: Ye et al. 2020; separate bounds: DAPO, Yu et al. 2025.
    """
    log_ratio = (_at(mask, logprobs) - _at(mask, old_logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = _at(mask, advantages)
    ratio = log_ratio.exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(plain, clipped)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    with torch.no_grad():
        metrics = {
            "ratio": ratio.detach(),
            "clip_fraction": (plain > clipped).to(ratio.dtype),
            "approx_kl": ratio.detach() - 1 - log_ratio.detach(),
        }
    return -surrogate, metrics


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate [B, T] of KL(policy || reference) on tokens drawn from the policy; 0 where masked.

    With d = logprobs - reference_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Raises ValueError
    on another name. Source: Schulman 2020, "Approximating KL divergence".
    """
    d = (_at(mask, logprobs) - _at(mask, reference_logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return (-d).exp() - 1 + d
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3'; got {estimator!r}")


def aggregation_weights(mask: Tensor, aggregation: Aggregation = "token_mean", *, constant: float = 1024.0) -> Tensor:
    """Weight of each token [B, T] such that loss = sum(weights * loss_per_token) over the whole minibatch.

    Taken over the whole minibatch before it is split into micro-batches, so that the split never changes the gradient.
    `token_mean`: 1 / number of tokens. `sequence_mean`: 1 / (responses with tokens * tokens of the response).
    `sequence_sum_over_constant`: 1 / (responses with tokens * constant) (Dr. GRPO, Liu et al. 2025).
    Raises ValueError on another name.
    """
    weights = mask.float()
    responses = mask.any(1).sum().clamp(min=1)
    if aggregation == "token_mean":
        return weights / weights.sum().clamp(min=1)
    if aggregation == "sequence_mean":
        return weights / (responses * weights.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "sequence_sum_over_constant":
        return weights / (responses * constant)
    raise ValueError(f"aggregation must be token_mean, sequence_mean or sequence_sum_over_constant; got {aggregation!r}")


def aggregate(loss: Tensor, mask: Tensor, aggregation: Aggregation = "token_mean", *, constant: float = 1024.0) -> Tensor:
    """Scalar loss of one undivided minibatch; see `aggregation_weights`. Masked entries, NaN included, do not count."""
    return (_at(mask, loss) * aggregation_weights(mask, aggregation, constant=constant)).sum()


def _at(mask: Tensor, x: Tensor) -> Tensor:
    return x.masked_fill(~mask, 0.0)


def correction_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: Literal["none", "truncate", "mask"],
    level: Literal["token", "sequence"],
    bound: float,
) -> tuple[Tensor, Tensor]:
    """Importance of what an engine sampled under the trainer's policy: raw, and as it weighs the loss, both [B, T].

    w = p_trainer / p_engine of the token, or of the whole response. truncate: min(w, bound). mask: w, and 0 outside
    [1 / bound, bound]. none: 1. Raw weights are 1 where masked. (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training".)
    """
    log_ratio = (logprobs - rollout_logprobs).masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio).masked_fill(~mask, 0.0)
    raw = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    if kind == "truncate":
        return raw, raw.clamp(max=bound)
    if kind == "mask":
        return raw, raw.masked_fill((raw > bound) | (raw < 1 / bound), 0.0)
    return raw, torch.ones_like(raw)
