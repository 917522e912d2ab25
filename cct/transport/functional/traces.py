"""Traces A_t = a_t + b_t A_{t+1}: one scan, and GAE, V-trace, Retrace and returns by it. [B, T] unless said otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from cct.tensors import as_mask, operator

from .masked import relative

Gap = Literal["carry", "decay", "cut"]

GAPS = ("carry", "decay", "cut")

# Numbers in the tensors that a CPU works on at once: they stay in its cache, and their memory is not new every time.
CHUNK = 2**18


@torch.no_grad()
@operator
def scan(a: Tensor, b: Tensor, end: Tensor | None = None) -> Tensor:
    """Solve A_t = a_t + b_t * A_{t+1} along the last dimension. Every trace here is one.

    a, b: [B, T]. end: [B], A after the last token, default 0. Returns [B, T]. O(B*T) work and memory in about 4 log2(T)
    operations, 5 log2(T) with an end, so on a GPU no launch per token. Works on products, never on logarithms, so zeros and
    signs in b are exact; products of b must not overflow, as those of discounts do not. Carries no gradient.
    Source: odd-even reduction, as in Blelloch 1990, Prefix sums and their applications.
    """
    result = a.clone(memory_format=torch.contiguous_format)
    for rows in _chunks(a):
        _solve(result[rows], b[rows], end[rows] if end is not None else None)
    return result


def _chunks(x: Tensor) -> Iterator[slice]:
    """Of the rows of x [B, T]: all at once on a GPU, which many small operations would leave idle."""
    size = max(1, CHUNK // max(1, x.shape[1])) if x.device.type == "cpu" else len(x)
    return (slice(start, start + size) for start in range(0, len(x) if x.numel() else 0, size))


def _solve(a: Tensor, b: Tensor, end: Tensor | None) -> None:
    """A instead of a. Two tokens in a row are one step; solved for those, the token inside each is one operation away."""
    length = a.shape[1]
    if length == 1:
        _last(a, b, end)
    elif length % 2:
        _solve(a[:, 1:], b[:, 1:], end)
        a[:, 0].addcmul_(b[:, 0], a[:, 1])
    else:
        first, second, b_first, b_second = a[:, ::2], a[:, 1::2], b[:, ::2], b[:, 1::2]
        pairs = torch.addcmul(first, b_first, second)
        _solve(pairs, b_first * b_second, end)
        first.copy_(pairs)
        second[:, :-1].addcmul_(b_second[:, :-1], pairs[:, 1:])
        _last(a, b, end)


def _last(a: Tensor, b: Tensor, end: Tensor | None) -> None:
    if end is not None:
        a[:, -1].addcmul_(b[:, -1], end)


@torch.no_grad()
@operator
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
    _check(rewards, values, mask, bootstrap, gap, gamma, lam, lam_value)
    part = lambda x, rows: x[rows] if isinstance(x, Tensor) and x.dim() else x  # noqa: E731
    one_lam = lam is lam_value or (not isinstance(lam, Tensor) and not isinstance(lam_value, Tensor) and lam == lam_value)
    advantages, targets = (torch.empty_like(rewards, dtype=_precision(rewards, values)) for _ in range(2))
    for rows in _chunks(rewards):
        s = Steps.of(rewards[rows], values[rows], mask[rows], part(bootstrap, rows), gap)
        g = s.knob(part(gamma, rows))
        returns = s.returns(g, part(lam, rows))
        s.only(torch.sub(returns, s.given[1], out=advantages[rows]), out=advantages[rows])
        if not one_lam:
            returns = s.returns(g, part(lam_value, rows))
        s.only(returns, out=targets[rows])
    return advantages, targets


def _precision(rewards: Tensor, values: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)


def _check(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor | None, gap: Gap, *knobs: float | Tensor) -> None:
    if rewards.dim() != 2 or values.shape != rewards.shape or mask.shape != rewards.shape:
        raise ValueError(
            f"rewards, values and mask must share one shape [B, T]; got {tuple(rewards.shape)}, "
            f"{tuple(values.shape)}, {tuple(mask.shape)}"
        )
    if bootstrap is not None and bootstrap.shape != rewards.shape[:1]:
        raise ValueError(f"bootstrap must be [B] = [{rewards.shape[0]}]; got {tuple(bootstrap.shape)}")
    if gap not in GAPS:
        raise ValueError(f"gap must be 'carry', 'decay' or 'cut'; got {gap!r}")
    for knob in knobs:
        if isinstance(knob, Tensor) and knob.dim() and knob.shape != rewards.shape:
            raise ValueError(f"gamma and lam must be a float or [B, T] = {tuple(rewards.shape)}; got {tuple(knob.shape)}")


def _as_bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """All bits set where the mask is True and none elsewhere, in numbers of the size of `dtype`."""
    return mask.view(torch.int8).neg().to(torch.int64 if dtype.itemsize == 8 else torch.int32)


def _only(x: Tensor, bits: Tensor, out: Tensor | None = None) -> Tensor:
    """x where `bits` are set, 0 elsewhere, whatever stands there. `torch.where` takes eight times as long on a CPU."""
    target = out.view(bits.dtype) if out is not None else None
    return torch.bitwise_and(x.view(bits.dtype), bits, out=target).view(x.dtype)


@dataclass
class Steps:
    """A batch laid out for a trace: what follows each token, and on which positions the recurrence steps."""

    given: tuple[Tensor, Tensor]  # rewards and values, [B, T]; anything where masked
    mask: Tensor  # [B, T]
    after: Tensor  # [B] V after the last step
    gap: Gap
    unmasked: Tensor  # [B, T] the mask as bits
    steps: Tensor  # [B, T] where the recurrence steps, as bits
    handed_on: Tensor  # [B, T] the share of what follows that passes where it does not step

    @classmethod
    def of(cls, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor | None, gap: Gap) -> Steps:
        """Raises ValueError on shapes that disagree."""
        _check(rewards, values, mask, bootstrap, gap)
        mask, dtype = as_mask(mask), _precision(rewards, values)
        unmasked = steps = _as_bits(mask, dtype)
        given = rewards.to(dtype), values.to(dtype)
        after = given[1].new_zeros(len(values)) if bootstrap is None else bootstrap.to(dtype)
        over = ~mask
        if gap != "carry":
            over &= mask.cumsum(1) == mask.sum(1, keepdim=True)  # behind the last step
            steps = _as_bits(~over, dtype) if gap == "decay" else unmasked
        handed_on = over.view(torch.int8).to(dtype)  # of a bool, a CPU takes one number at a time
        return cls(given, mask, after, gap, unmasked, steps, handed_on)

    @cached_property
    def rewards(self) -> Tensor:
        """[B, T], 0 where masked."""
        return self.only(self.given[0])

    @cached_property
    def values(self) -> Tensor:
        """[B, T], 0 where masked."""
        return self.only(self.given[1])

    @cached_property
    def next_values(self) -> Tensor:
        """V of what follows each step, [B, T]."""
        return self.next_of(self.values, self.after)

    def next_of(self, x: Tensor, end: Tensor | None = None) -> Tensor:
        """x [B, T] at what follows each step; end: [B] after the last one, default 0."""
        end = x.new_zeros(len(x)) if end is None else end
        if self.gap == "carry":  # the next step, however far
            return _shifted(scan(_only(x, self.steps), self.handed_on, end), end)
        neighbour = _shifted(x, end)  # which x must make 0 in a gap, where it is to be 0
        return torch.where(_shifted(self.handed_on, torch.ones_like(end)) > 0, end.unsqueeze(1), neighbour)

    def knob(self, knob: float | Tensor) -> Tensor:
        """A float or [B, T] as [B, T], 0 where the recurrence does not step.

        Where `decay` counts gaps as steps, they take the knob of the last token before them.
        """
        values = self.given[1]
        _check(values, values, self.mask, None, self.gap, knob)
        full = torch.as_tensor(knob, dtype=values.dtype, device=values.device).expand_as(values)
        if self.gap == "decay":
            position = torch.arange(self.mask.shape[1], device=self.mask.device)
            full = full.gather(1, torch.where(self.mask, position, 0).cummax(1).values)
        return _only(full, self.steps)

    def trace(self, a: Tensor, b: Tensor) -> Tensor:
        """`scan` over the steps; what is none hands credit on, or stops it under `cut`."""
        return scan(_only(a, self.steps), _only(b, self.steps) + self.handed_on)

    def returns(self, g: Tensor, lam: float | Tensor) -> Tensor:
        """Q_t = r_t + g_t [(1 - lam) V_{t+1} + lam Q_{t+1}], [B, T], anything where masked; lam: float or [B, T].

        g: by `knob`.
        """
        if isinstance(lam, Tensor):
            return self.values + self.trace(self.rewards + g * self.next_values - self.values, g * self.knob(lam))
        # What a step is told by the one that follows, (1 - lam) V + lam Q, is a trace of its own, which gaps hand on: so
        # nobody has to look for the V behind a gap.
        rewards, values = self.given
        told, share = torch.lerp(values, rewards, lam), torch.add(self.handed_on, g, alpha=lam)
        _solve(self.only(told, out=told), share, self.after)
        if lam == 1:
            return told
        result = share  # its memory: the trace is solved, and new memory costs a CPU more than the arithmetic
        torch.addcmul(rewards[:, :-1], g[:, :-1], told[:, 1:], out=result[:, :-1])
        torch.addcmul(rewards[:, -1], g[:, -1], self.after, out=result[:, -1])
        return result

    def only(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x where the mask is True, 0 elsewhere, in the precision of the values."""
        return _only(x.to(self.after.dtype), self.unmasked, out)


def _shifted(x: Tensor, end: Tensor) -> Tensor:
    """x [B, T] one position later; end: [B] in the last column."""
    return torch.cat([x, end.unsqueeze(1)], 1)[:, 1:]


@torch.no_grad()
@operator
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
@operator
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
@operator
def token_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, gap: Gap = "carry") -> Tensor:
    """Discounted reward to go, G_t = r_t + gamma G_{t+1}, [B, T]; 0 where masked. `gap` as in `gated_gae`.

    Pitfall: nothing is added after the last token of a response that the length limit cut.
    """
    return gated_gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0, gap=gap)[0]


@torch.no_grad()
@operator
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
@operator
def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha * length) per response, [B, T]; 0 where alpha * length is below 1.

    Length counts unmasked tokens. A trace then reaches over a fixed share of the response: sum_k lam^k ~ alpha * length.
    Source: VAPO, Yue et al. 2025 (alpha = 0.05).
    """
    reach = alpha * mask.sum(1, keepdim=True).clamp(min=1)
    return (1 - 1 / reach).clamp(min=0).expand(mask.shape)


@torch.no_grad()
@operator
def redistribute(rewards: Tensor, weights: Tensor, mask: Tensor, beta: float) -> Tensor:
    """(1 - beta) r_t + beta w_t sum_t r_t, with the weights of each response's unmasked tokens divided by their sum.

    rewards, weights: [B, T], weights >= 0; all equal where they are all 0. Returns [B, T], 0 where masked; each response's
    total stays what it was. Source: attention-based credit, Chan et al. 2024.
    """
    rewards, weights = rewards.masked_fill(~mask, 0.0), weights.masked_fill(~mask, 0.0)
    total = weights.sum(1, keepdim=True)
    weights = torch.where(
        total <= 0, mask / mask.sum(1, True).clamp(min=1), weights / total.clamp(min=torch.finfo(weights.dtype).tiny)
    )
    return (1 - beta) * rewards + beta * weights * rewards.sum(1, keepdim=True)
