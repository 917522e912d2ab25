"""Traces A_t = a_t + b_t A_{t+1}: one scan, and GAE, V-trace, Retrace and returns by it. [B, T] unless said otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .masked import at_least_float32, next_step, relative

Gap = Literal["carry", "decay", "cut"]

GAPS = ("carry", "decay", "cut")

# Rows from which one step per token beats a scan in blocks: each step then fills the cores by itself.
TIME_MAJOR_ROWS = 256

SCAN_BLOCK = 64


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
    s = Steps.of(rewards, values, mask, bootstrap, gap)
    g, lam_t, lam_v = s.knob(gamma), s.knob(lam), s.knob(lam_value)
    delta = s.rewards + g * s.next_values - s.values
    # R_t - V_t obeys the recurrence of A_t with lam_value in place of lam.
    return s.only(s.trace(delta, g * lam_t)), s.only(s.values + s.trace(delta, g * lam_v))


@dataclass
class Steps:
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
    def of(cls, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor | None, gap: Gap) -> Steps:
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
        rewards, values = (at_least_float32(x).masked_fill(~mask, 0.0) for x in (rewards, values))
        last_step = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).cummax(1).values
        following = next_step(mask)
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
    s = Steps.of(rewards, values, mask, bootstrap, gap)
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
    s = Steps.of(rewards, values, mask, bootstrap, gap)
    g, ratio = s.knob(gamma), s.only(log_ratio).clamp(max=math.log(c_bar)).exp()
    delta = s.rewards + g * s.next_values - s.values
    advantages = s.trace(delta, g * s.next_of(s.knob(lam) * ratio))
    return s.only(advantages), s.only(s.values + ratio * advantages)


@torch.no_grad()
def token_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, gap: Gap = "carry") -> Tensor:
    """Discounted reward to go, G_t = r_t + gamma G_{t+1}, [B, T]; 0 where masked. `gap` as in `gated_gae`.

    Pitfall: nothing is added after the last token of a response that the length limit cut.
    """
    return gated_gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0, gap=gap)[0]


@torch.no_grad()
def trace_weights(mask: Tensor, decay: float, kind: Literal["recent", "both", "outcome"]) -> Tensor:
    """What an eligibility trace makes of an outcome of 1 given at every token, or at the last one; float64 [B, T].

    With t = 0 ... n - 1 counting unmasked tokens: `recent`, sum_{u>=t} decay^(u-t); `both`, sum_{u>=t} max(decay^(u-t),
    decay^t); `outcome`, decay^(n-1-t). mask: bool [B, T]; masked positions are no steps and get 0.
    Source: Parthasarathi et al. 2025, arXiv 2510.00194 (recent, both).
    Pitfall: `recent` adds up to 1 / (1 - decay), `outcome` leaves decay^n at the first token: the decay has to fit the length.
    """
    rank, count = relative(mask)
    later = (count - 1 - rank).clamp(min=0)  # tokens after t
    base = torch.full((), decay, dtype=torch.float64, device=mask.device)

    def series(terms: Tensor) -> Tensor:
        return terms.double() if decay == 1 else (1 - base**terms) / (1 - base)

    if kind == "outcome":
        weights = base**later
    elif kind == "recent":
        weights = series(later + 1)
    elif kind == "both":  # decay^(u-t) is the greater one as long as u - t is no more than t
        first = rank.clamp(min=0)
        weights = series(torch.minimum(later, first) + 1) + (later - first).clamp(min=0) * base**first
    else:
        raise ValueError(f"kind must be 'recent', 'both' or 'outcome'; got {kind!r}")
    return weights.masked_fill(~mask, 0.0)


@torch.no_grad()
def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha * length) per response, [B, T]; 0 where alpha * length is below 1.

    Length counts unmasked tokens. A trace then reaches over a fixed share of the response: sum_k lam^k ~ alpha * length.
    Source: VAPO, Yue et al. 2025 (alpha = 0.05).
    """
    reach = alpha * mask.sum(1, keepdim=True).clamp(min=1)
    return (1 - 1 / reach).clamp(min=0).expand(mask.shape)


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
