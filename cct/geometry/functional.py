"""Update geometry as pure tensor functions. Shapes are [B, T] (responses x tokens) unless said otherwise."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cct.rollout import Aggregation
from cct.tensors import operator

# exp(20) is finite in float32 and far beyond any clip bound; larger log-ratios would overflow to inf and then to NaN.
MAX_LOG_RATIO = 20.0


def _ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm and value of new over old probability, [B, T]; 0 and 1 where masked."""
    log_ratio = (_at(mask, logprobs) - _at(mask, old_logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio, log_ratio.exp()


def _metrics(log_ratio: Tensor, cut: Tensor) -> dict[str, Tensor]:
    """Detached metrics per token: `ratio`, `clip_fraction`, `approx_kl` (k3 of old to new policy)."""
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {"ratio": ratio, "clip_fraction": cut.detach().to(ratio.dtype), "approx_kl": ratio - 1 - log_ratio}


def _response_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over each response's tokens, [B, 1]; 0 for a response without. x is 0 where masked."""
    return x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


@operator
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
    Pitfall: without dual_clip the loss of a negative advantage grows with the ratio without bound.
    """
    log_ratio, ratio = _ratio(logprobs, old_logprobs, mask)
    advantages = _at(mask, advantages)
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(plain, clipped)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return -surrogate, _metrics(log_ratio, plain > clipped)


@operator
def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), the same at every token of a response.

    s = exp(mean over the response of logprobs - old_logprobs); A the response's mean advantage. Arguments,
    returns and masks as `ppo_clip_loss`; `ratio` is the token's own. Source: GSPO, Zheng et al. 2025.
    Pitfall: averages advantages over the response, so that credit of single tokens is lost; bounds of
    PPO's size never clip a geometric mean, whose changes are a hundred times smaller.
    """
    log_ratio, _ = _ratio(logprobs, old_logprobs, mask)
    ratio, advantage = _response_mean(log_ratio, mask).exp(), _response_mean(_at(mask, advantages), mask)
    plain, clipped = ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    surrogate = torch.minimum(plain, clipped).expand_as(log_ratio)
    return _at(mask, -surrogate), _metrics(log_ratio, (plain > clipped) & mask)


@operator
def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t) with s_t = sg(s) pi_t / sg(pi_t).

    s as in `gspo_loss`, sg: no gradient. The value of s_t is the response's ratio, its gradient that of the
    token's log-probability, so that each token keeps its own advantage; equal advantages give GSPO's
    gradient. Arguments, returns and masks as `ppo_clip_loss`. Source: GSPO-token, Zheng et al. 2025.
    Pitfall: where tokens of one response have advantages of both signs, one and the same s clips only one sign.
    """
    log_ratio, _ = _ratio(logprobs, old_logprobs, mask)
    advantages, own = _at(mask, advantages), _at(mask, logprobs)
    ratio = _response_mean(log_ratio, mask).exp().detach() * (own - own.detach()).exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, clipped), _metrics(log_ratio, plain > clipped)


@operator
def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean over the response of clipped log-ratios), the same at every token of a response.

    A: the response's mean advantage. A log-ratio is capped at clip_high where A > 0 and at -clip_low from
    below where A < 0. Arguments, returns and masks as `ppo_clip_loss`. Source: GMPO, Zhao et al. 2025, with
    bounds (e^-0.4, e^0.4). Pitfall: bounds are of the logarithm; averages advantages over the response.
    """
    log_ratio, _ = _ratio(logprobs, old_logprobs, mask)
    advantage = _response_mean(_at(mask, advantages), mask)
    capped = torch.where(advantage > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    surrogate = (advantage * _response_mean(capped, mask).exp()).expand_as(log_ratio)
    return _at(mask, -surrogate), _metrics(log_ratio, (capped != log_ratio) & (advantage != 0))


@operator
def policy_gradient_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi; old_logprobs only for the metrics. Arguments, returns and masks as `ppo_clip_loss`.

    Source: REINFORCE, Williams 1992. Pitfall: unbiased only for samples of the present policy; its value
    says nothing, since log pi is not around 1 as a ratio is.
    """
    log_ratio, _ = _ratio(logprobs, old_logprobs, mask)
    return -_at(mask, advantages) * _at(mask, logprobs), _metrics(log_ratio, torch.zeros_like(mask))


@operator
def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi; sg: no gradient.

    Arguments, returns and masks as `ppo_clip_loss`. Every token keeps a gradient, its weight is bounded.
    Source: MiniMax-M1, 2025; no lower bound there, and an upper one of 5 in ScaleRL, Khatri et al. 2025.
    Pitfall: nothing stops a token that has already moved far, so many epochs drift.
    """
    log_ratio, ratio = _ratio(logprobs, old_logprobs, mask)
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * _at(mask, advantages) * _at(mask, logprobs), _metrics(log_ratio, weight != ratio)


@operator
def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_positive where A > 0 and tau_negative elsewhere.

    The gradient is -rho A 4 p (1 - p) with p = sigmoid(tau (rho - 1)): that of the policy gradient at rho = 1,
    fading on both sides. Arguments, returns and masks as `ppo_clip_loss`; `clip_fraction` is 0.
    Source: SAPO, Gao et al. 2025, arXiv 2511.20347, whose mean is over responses of means over tokens.
    Pitfall: the value is -2 A / tau at rho = 1, not -A; a good token that became rarer is pulled back less than by PPO.
    """
    log_ratio, ratio = _ratio(logprobs, old_logprobs, mask)
    advantages = _at(mask, advantages)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, _metrics(log_ratio, torch.zeros_like(mask))


@operator
def topr_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: Literal["sequence", "token"] = "sequence",
    bound: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-w A log pi, with w = 1 where A > 0 and sg(min(rho, bound)) elsewhere.

    rho: the product of the response's ratios, or the token's own. Arguments, returns and masks as
    `ppo_clip_loss`. Source: TOPR, Le Roux et al. 2025. Pitfall: a product over a long response is soon
    near 0, and then nothing bad is learnt from; good tokens have no bound at all, as in supervised learning.
    """
    log_ratio, _ = _ratio(logprobs, old_logprobs, mask)
    advantages, raw = _at(mask, advantages), log_ratio.detach()
    if level == "sequence":
        raw = raw.sum(1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(raw)
    tapered, bad = raw.exp().clamp(max=bound), advantages < 0
    loss = -torch.where(bad, tapered, 1.0) * advantages * _at(mask, logprobs)
    return loss, _metrics(log_ratio, bad & (tapered < raw.exp()))


@operator
def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    bound: float = 0.15,
    ratio_bound: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-M sg(min(rho, ratio_bound)) A log pi, M = 0 where the token moved on, the way A pushes it, beyond the bound.

    With old and new probability q and p of the sampled token, D = |p - q| (tv) or
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (kl): lower bounds of the divergences over the vocabulary.
    M = 0 where D > bound and p > q, A > 0 or p < q, A < 0. Arguments, returns and masks as `ppo_clip_loss`;
    `clip_fraction` is the share of M = 0. Source: DPPO, Qi et al. 2026, arXiv 2602.04879 (its binary approximations); bounds
    0.15 (tv) and 0.05 (kl) are those of its authors' runs in verl, 20 for the ratio is verl's default.
    Pitfall: the bound is of probabilities, so PPO's 0.2 is another size; rare tokens may change a hundredfold.
    """
    log_ratio, ratio = _ratio(logprobs, old_logprobs, mask)
    advantages = _at(mask, advantages)
    new, old = _at(mask, logprobs.detach()).exp(), _at(mask, old_logprobs).exp()
    if divergence == "tv":
        far = (new - old).abs() > bound
    else:
        rest = ((1 - old).clamp(min=1e-8) / (1 - new).clamp(min=1e-8)).log()
        far = old * -log_ratio.detach() + (1 - old) * rest > bound
    stopped = far & torch.where(advantages > 0, new > old, new < old) & (advantages != 0)
    weight = ratio.detach().clamp(max=ratio_bound).masked_fill(stopped, 0.0)
    return -weight * advantages * _at(mask, logprobs), _metrics(log_ratio, stopped)


@operator
def dis_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.3,
    clip_high: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(f(rho)) A log pi, with f(rho) = rho where 1 - clip_low < rho < 1 + clip_high, and 0 elsewhere.

    Arguments, returns and masks as `ppo_clip_loss`; old_logprobs are the engine's; `clip_fraction` is the share with f = 0.
    Source: direct double-sided importance sampling of SAO, 2026, arXiv 2607.07508, bounds 0.3 and 5 (mathematics), 0.8 and 3
    (code). That f carries no gradient is ours: f A log pi has no other use of one.
    Pitfall: a token that left the range has no gradient, in whichever direction its advantage points: nothing pulls it back.
    """
    log_ratio, ratio = _ratio(logprobs, old_logprobs, mask)
    outside = (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high)
    weight = ratio.detach().masked_fill(outside, 0.0)
    return -weight * _at(mask, advantages) * _at(mask, logprobs), _metrics(log_ratio, outside)


@operator
def vespo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(phi(W)) A log pi, with phi(W) = W^k exp(lambda (1 - W)) and W the product of the response's ratios.

    k and lambda: power_positive and decay_positive where A >= 0, power_negative and decay_negative elsewhere. phi(1) = 1.
    Arguments, returns and masks as `ppo_clip_loss`; `clip_fraction` is 0. W is kept within e^-20 and e^20.
    Source: VESPO, Shen et al. 2026, arXiv 2602.10693, and its authors' code. There A is one number per response.
    Pitfall: W is no mean, so over a long response it leaves 1 quickly, and phi falls to 0 on both sides. phi has its maximum at
    k / lambda, where with k < lambda a response that became rarer weighs more than 1.
    """
    log_ratio, _ = _ratio(logprobs, old_logprobs, mask)
    advantages = _at(mask, advantages)
    log_weight = log_ratio.detach().sum(1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    good = advantages >= 0
    power, decay = (torch.where(good, *pair) for pair in ((power_positive, power_negative), (decay_positive, decay_negative)))
    phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    return -phi * advantages * _at(mask, logprobs), _metrics(log_ratio, torch.zeros_like(mask))


@torch.no_grad()
@operator
def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - its mean) (A - its mean) per token [B, T], means over the unmasked tokens given; 0 where masked.

    Its mean is the covariance whose sign says whether a step raises or lowers the entropy (Cui et al. 2025).
    """
    count = mask.sum().clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = _at(mask, x)
        return _at(mask, x - x.sum() / count)

    return centred(logprobs) * centred(advantages)


@torch.no_grad()
@operator
def mark_some_covariances(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, share: float, low: float, high: float, seed: int
) -> Tensor:
    """Draws `share` of all tokens, at least one, from those with a covariance in [low, high]; bool [B, T].

    Over the tokens given: hand it a whole minibatch. Source: Clip-Cov, Cui et al. 2025.
    """
    covariance = token_covariances(logprobs, advantages, mask)
    candidates = (mask & (covariance >= low) & (covariance <= high)).flatten().nonzero().squeeze(1)
    count = min(len(candidates), max(1, int(share * int(mask.sum()))))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    marked = torch.zeros_like(mask).flatten()
    marked[candidates[order[:count]]] = True
    return marked.view_as(mask)


@torch.no_grad()
@operator
def mark_top_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The `share` of all tokens, at least one, with the highest covariance, where it is above 0; bool [B, T].

    Over the tokens given: hand it a whole minibatch. Source: KL-Cov, Cui et al. 2025.
    """
    covariance = token_covariances(logprobs, advantages, mask)
    count = min(mask.numel(), max(1, int(share * int(mask.sum()))))
    marked = torch.zeros_like(mask).flatten()
    marked[covariance.flatten().topk(count).indices] = True
    return marked.view_as(mask) & (covariance > 0)


@operator
def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    marked: Tensor | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_clip_loss`, whose marked tokens count and have no gradient; further metric `marked`.

    marked: bool [B, T] from `mark_some_covariances` over the whole minibatch; None for none.
    Source: Clip-Cov, Cui et al. 2025, where the covariance is of the present policy over one forward.
    """
    loss, metrics = ppo_clip_loss(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    held = torch.zeros_like(mask) if marked is None else marked & mask
    return torch.where(held, loss.detach(), loss), metrics | {"marked": held.to(loss.dtype)}


@operator
def kl_cov_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, marked: Tensor | None, *, coef: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-rho A, and + coef |log rho| on marked tokens; further metric `marked`.

    marked: bool [B, T] from `mark_top_covariances` over the whole minibatch; None for none.
    Source: KL-Cov, Cui et al. 2025, with |log rho| for the KL as its authors' code has it.
    Pitfall: the gradient of |log rho| has the size coef however near the policies are, and is 0 at rho = 1.
    """
    log_ratio, ratio = _ratio(logprobs, old_logprobs, mask)
    held = torch.zeros_like(mask) if marked is None else marked & mask
    loss = -ratio * _at(mask, advantages) + coef * held * log_ratio.abs()
    return loss, _metrics(log_ratio, torch.zeros_like(mask)) | {"marked": held.to(loss.dtype)}


@operator
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


@operator
def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    estimator: str = "k3",
    gradient: Literal["plain", "k2", "importance"] = "plain",
) -> Tensor:
    """`kl_estimate` [B, T] with the gradient named; 0 where masked.

    plain: the estimator's own. For tokens of the policy, d = log pi - log pi_ref, the gradient of KL(pi || pi_ref) is
    the mean of d grad log pi, which is k2's. k1's is grad log pi, 0 in the mean; k3's (1 - exp(-d)) grad log pi, that of
    KL(pi_ref || pi). k2: value of the estimator, gradient of k2; right while the policy is the one that sampled.
    importance: rho times the estimator with the gradient of both, that of the KL's mean over the old policy's samples;
    right for k1 and k3 however far the policy has moved, with the variance of rho.
    Sources: Schulman 2020; Tang and Munos 2025 (gradients); DeepSeek-V3.2, 2025 (importance). Raises ValueError on another.
    """
    estimate = kl_estimate(logprobs, reference_logprobs, mask, estimator)
    if gradient == "plain":
        return estimate
    if gradient == "k2":
        slope = kl_estimate(logprobs, reference_logprobs, mask, "k2")
        return estimate.detach() + slope - slope.detach()
    if gradient == "importance":
        return _ratio(logprobs, old_logprobs, mask)[1] * estimate
    raise ValueError(f"gradient must be 'plain', 'k2' or 'importance'; got {gradient!r}")


@operator
def aggregation_weights(
    mask: Tensor, aggregation: Aggregation = "token_mean", *, constant: float = 1024.0, episodes: Tensor | None = None
) -> Tensor:
    """Weight of each token [B, T] such that loss = sum(weights * loss_per_token) over the whole minibatch.

    Taken over the whole minibatch before it is split into micro-batches, so that the split never changes the gradient.
    `token_mean`: 1 / number of tokens. `sequence_mean`: 1 / (responses with tokens * tokens of the response).
    `sequence_sum_over_constant`: 1 / (responses with tokens * constant) (Dr. GRPO, Liu et al. 2025).
    episodes: [B] int, for rows of which several are one response; it counts once, by the tokens of all its rows. None: each is.
    An episode with rows in two minibatches counts once in each.
    Raises ValueError on another name.
    """
    weights = mask.float()
    tokens = weights.sum(1)
    if episodes is not None:
        index = torch.unique(episodes, return_inverse=True)[1]
        of_episode = torch.zeros_like(tokens).index_add_(0, index, tokens)
        responses, tokens = (of_episode > 0).sum().clamp(min=1), of_episode[index]
    else:
        responses = (tokens > 0).sum().clamp(min=1)
    if aggregation == "token_mean":
        return weights / weights.sum().clamp(min=1)
    if aggregation == "sequence_mean":
        return weights / (responses * tokens.unsqueeze(1).clamp(min=1))
    if aggregation == "sequence_sum_over_constant":
        return weights / (responses * constant)
    raise ValueError(f"aggregation must be token_mean, sequence_mean or sequence_sum_over_constant; got {aggregation!r}")


@operator
def aggregate(loss: Tensor, mask: Tensor, aggregation: Aggregation = "token_mean", *, constant: float = 1024.0) -> Tensor:
    """Scalar loss of one undivided minibatch; see `aggregation_weights`. Masked entries, NaN included, do not count."""
    return (_at(mask, loss) * aggregation_weights(mask, aggregation, constant=constant)).sum()


def _at(mask: Tensor, x: Tensor) -> Tensor:
    return x.masked_fill(~mask, 0.0)


@operator
def correction_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: Literal["none", "truncate", "mask"],
    level: Literal["token", "sequence"],
    bound: float,
    lower: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Importance of what an engine sampled under the trainer's policy: raw, and as it weighs the loss, both [B, T].

    w = p_trainer / p_engine of the token, or of the whole row, which may be one of several of an episode. truncate:
    min(w, bound). mask: w, and 0 outside [lower, bound]; lower None is 1 / bound. none: 1. Raw weights are 1 where masked.
    Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (truncate); IcePop, 2025,
    arXiv 2510.18855 (mask with two bounds).
    """
    log_ratio = (logprobs - rollout_logprobs).masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio).masked_fill(~mask, 0.0)
    raw = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    if kind == "truncate":
        return raw, raw.clamp(max=bound)
    if kind == "mask":
        return raw, raw.masked_fill((raw > bound) | (raw < (1 / bound if lower is None else lower)), 0.0)
    return raw, torch.ones_like(raw)
