"""Properties of geometries: a loss per token and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cct.geometry import Geometry
from cct.registry import RAISED, described

from .base import Broken, Malformed, Property
from .cases import NOISE, Case, numbers, packing, python, same
from .operators import BFLOAT16, CALLS, ROUNDING
from .watch import Meddles, NoHalf, alone, grows_linearly, identical, later, unchanged

EXTREME = (200.0, -200.0, float("inf"), -float("inf"))  # log-ratios far beyond any bound
MOVED = (-0.7, -0.35, 0.35, 0.7)  # log-ratios beyond the bounds that clips have


@dataclass(frozen=True)
class Update:
    """What a geometry gets, all [B, T]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    reference_logprobs: Tensor

    def each(self, change: Callable[[Tensor], Tensor], *, mask: bool = True) -> Update:
        changed = {name: change(x) for name, x in vars(self).items() if mask or name != "mask"}
        return replace(self, **changed)


def update_of(case: Case) -> Update:
    """Two-digit numbers; the policy has moved away from the old one by up to half a nat."""
    rollout = case.rollout()
    generator = torch.Generator().manual_seed(case.seed + 1)
    moved = (torch.rand(rollout.mask.shape, generator=generator) * 100).round() / 100 - 0.5
    assert rollout.reference_logprobs is not None
    return Update(
        rollout.logprobs + moved, rollout.logprobs, torch.tensor(case.rewards), rollout.mask, rollout.reference_logprobs
    )


def losses(geometry: Geometry, update: Update) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss per token, the gradient of its sum by the log-probabilities, and the metrics."""
    logprobs = update.logprobs.clone().requires_grad_()
    try:
        loss, metrics = geometry(logprobs, update.old_logprobs, update.advantages, update.mask, update.reference_logprobs)
        if loss.requires_grad:
            loss.sum().backward()
    except RAISED as error:
        raise Malformed(f"it raised {type(error).__name__}: {error}") from error
    for name, x in {"the loss": loss, **{f"metric '{key}'": x for key, x in metrics.items()}}.items():
        if not isinstance(x, Tensor) or x.shape != update.mask.shape:
            raise Malformed(f"{name} is {described(x)}; expected one number per token, {tuple(update.mask.shape)}")
    return loss.detach(), torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad, metrics


def _agree(
    geometry: Geometry, update: Update, other: Update, when: str, back: Any = lambda x: x, tolerance: float = ROUNDING
) -> None:
    expected, got = losses(geometry, update)[:2], losses(geometry, other)[:2]
    for name, x, y in zip(("loss", "gradient"), expected, got, strict=True):
        same(name, x, back(y), when, tolerance)


def _form(geometry: Geometry, update: Update) -> None:
    loss, slope, metrics = losses(geometry, update)
    for name, x in {"loss": loss, "gradient": slope, **{f"metric '{key}'": x for key, x in metrics.items()}}.items():
        if not bool(x.isfinite().all()):
            raise Broken(f"{name} is {numbers(x)}; expected a finite number per token")
        if name in ("loss", "gradient") and bool(x[~update.mask].ne(0).any()):
            raise Broken(f"the {name} is not 0 where the mask is off: {numbers(x)}")
        if x.requires_grad:
            raise Broken(f"{name} carries a gradient; metrics are detached")


def form(geometry: Geometry, case: Case) -> None:
    _form(geometry, update_of(case))


def _pushed(geometry: Geometry, update: Update) -> Tensor:
    """The gradient by the log-probabilities, without what it is where all advantages are 0: that of a KL."""
    idle = replace(update, advantages=torch.zeros_like(update.advantages))
    return losses(geometry, update)[1] - losses(geometry, idle)[1]


def moves(geometry: Geometry, case: Case) -> None:
    """At the sampling policy every objective is the policy gradient, A grad log pi, for any advantages."""
    update = update_of(case)
    update = replace(update, logprobs=update.old_logprobs)
    mask, advantages = update.mask, update.advantages.masked_fill(~update.mask, 0.0)
    if geometry.grain == "sequence":  # advantages are averaged over a response first
        advantages = (advantages.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)) * mask
    slope = _pushed(geometry, update)
    if not torch.allclose(slope, -advantages, atol=ROUNDING):
        raise Broken(
            f"where no policy has moved, the gradient by the log-probabilities is {numbers(slope)}, not minus the advantages "
            f"{numbers(advantages)}"
        )


def clip(geometry: Geometry, case: None) -> None:
    """Away from the sampling policy: a token is pushed the way of its advantage or not at all, and pulled back where it moved
    against it. Only where it has moved the way of its advantage may a clip stop it."""
    for apart in MOVED:
        for sign in (1.0, -1.0):
            old, wide = torch.full((2, 3), -1.5), torch.ones(2, 3, dtype=torch.bool)
            slope = _pushed(geometry, Update(old + apart, old, torch.full((2, 3), sign), wide, old))
            where = f"with an advantage of {sign:g} and a ratio of {math.exp(apart):.3g}, the gradient is {numbers(slope)}"
            if bool((slope * sign > 0).any()):
                raise Broken(f"{where}: it pushes against the advantage")
            if apart * sign < 0 and not bool((slope * sign < 0).all()):
                raise Broken(f"{where}: nothing pulls the token back, which has moved against its advantage")


def weight(geometry: Geometry, case: None) -> None:
    """Importance counts once: a token's weight is at most its ratio or 1, whichever is larger."""
    for apart in MOVED:
        old, one = torch.full((2, 1), -1.5), torch.ones(2, 1, dtype=torch.bool)
        slope = _pushed(geometry, Update(old + apart, old, torch.tensor([[1.0], [-1.0]]), one, old))
        most = max(1.0, math.exp(apart))
        if bool((slope.abs() > most + ROUNDING).any()):
            raise Broken(
                f"with advantages of 1 and -1 and a ratio of {math.exp(apart):.3g}, the gradient is {numbers(slope)}, more "
                f"than {most:.3g}: the ratio counts more than once"
            )


def reference(geometry: Geometry, case: None) -> None:
    """The KL moves the policy towards the reference, on average over the policy's own tokens; two of them will show it."""
    one, none = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1)
    for first, other in ((0.8, 0.5), (0.3, 0.6), (0.5, 0.1)):
        policy, start = (torch.tensor([[p], [1 - p]]).log() for p in (first, other))
        loss, slope, _ = losses(geometry, Update(policy, policy, none, one, start))
        found = f"of two tokens of probability {numbers(policy.exp())}, under the reference {numbers(start.exp())}"
        if bool((loss == losses(geometry, Update(policy, policy, none, one, start - 1.0))[0]).all()):
            raise Broken(f"kl_coef is {geometry.kl_coef:g}, and the loss does not depend on the reference's log-probabilities")
        if float(slope[0] - slope[1]) * (first - other) < -ROUNDING:
            raise Broken(f"{found}, the gradient is {numbers(slope)}: it moves the policy away from the reference")


def garbage(geometry: Geometry, case: Case) -> None:
    """Where a number counts, NaN in its place must be seen: what hides it trains on garbage."""
    update, token = update_of(case), case.token(~torch.tensor(case.masked))
    if token is None:
        return
    before = losses(geometry, update)[:2]

    def found(name: str, value: float) -> tuple[Tensor, Tensor] | None:
        x = getattr(update, name).clone()
        x[token] = value
        try:
            return losses(geometry, replace(update, **{name: x}))[:2]
        except Broken:
            return None

    def counts(name: str, value: float) -> bool:
        after = found(name, value)
        return after is None or any(not torch.allclose(x, y, atol=ROUNDING) for x, y in zip(before, after, strict=True))

    for name in ("logprobs", "old_logprobs", "advantages", "reference_logprobs"):
        if any(counts(name, value) for value in (-0.3, 1.7, -2.5)):
            after = found(name, math.nan)
            if after is not None and all(bool(x.isfinite().all()) for x in after):
                raise Broken(
                    f"{name}{list(token)} counts, and where it is NaN loss and gradient are finite: garbage in must be NaN "
                    "out, or an error"
                )


def marks(geometry: Geometry, case: Case) -> None:
    """`mark` chooses among the tokens that are trained on, the same ones every time, and whatever stands elsewhere."""
    update = update_of(case)

    def marked(of: Update) -> Tensor:
        found = geometry.mark(of.old_logprobs, of.advantages, of.mask, case.seed)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != of.mask.shape:
            raise Broken(f"mark gave {described(found)}; expected a bool tensor of shape {tuple(of.mask.shape)}")
        return found

    chosen = marked(update)
    if bool((chosen & ~update.mask).any()):
        raise Broken(f"mark chose masked positions: {numbers(chosen)} under the mask {numbers(update.mask)}")
    same("the choice", chosen, marked(update), "called again")
    for value in NOISE:
        hidden = update.each(lambda x, value=value: x.where(update.mask, value), mask=False)  # type: ignore[misc]
        same("the choice", chosen, marked(hidden), f"with {value} at masked positions")


def noise(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    expected = losses(geometry, update)
    for value in NOISE:
        hidden = update.each(lambda x, value=value: x.where(update.mask, value), mask=False)  # type: ignore[misc]
        got, when = losses(geometry, hidden), f"with {value} at masked positions"
        same("loss", expected[0], got[0], when)
        same("gradient", expected[1], got[1], when)
        for name, x in expected[2].items():
            same(f"metric '{name}'", x, got[2][name], when)


def gap(geometry: Geometry, case: Case) -> None:
    update, index = update_of(case), packing(~torch.tensor(case.masked))
    packed = update.each(lambda x: x.gather(1, index))
    _agree(geometry, update, packed, "with the gaps removed", lambda x: torch.zeros_like(x).scatter(1, index, x))


def padding(geometry: Geometry, case: Case) -> None:
    update, width = update_of(case), len(case.masked[0])
    for left, right in ((0, 70), (3, 0)):
        wide = update.each(lambda x, pad=(left, right): torch.nn.functional.pad(x, pad))  # type: ignore[misc]
        when = f"with {left} positions of padding before and {right} after"
        _agree(geometry, update, wide, when, lambda x, left=left: x[:, left : left + width])


def order(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    _agree(geometry, update, update.each(lambda x: x.flip(0)), "with the responses in reverse order", lambda x: x.flip(0))


def split(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    whole = losses(geometry, update)[:2]
    for row in range(len(case.groups)):
        steps = update.mask[row].nonzero()
        width = int(steps.max()) + 1 if len(steps) else 1
        part = losses(geometry, update.each(lambda x, row=row, width=width: x[row : row + 1, :width]))[:2]  # type: ignore[misc]
        for name, x, y in zip(("loss", "gradient"), whole, part, strict=True):
            same(name, x[row : row + 1, :width], y, f"with response {row} alone in a micro-batch", ROUNDING)


def packed(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    shape = update.mask.shape
    _agree(geometry, update, update.each(lambda x: x.reshape(1, -1)), "with all responses in one row", lambda x: x.view(shape))


def gradient(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    live = {name: x.clone().requires_grad_() for name, x in vars(update).items() if name != "mask"}
    loss, _ = geometry(live["logprobs"], live["old_logprobs"], live["advantages"], update.mask, live["reference_logprobs"])
    if loss.requires_grad:
        loss.sum().backward()
    for name in ("old_logprobs", "advantages", "reference_logprobs"):
        found = live[name].grad
        if found is not None and bool(found.ne(0).any()):
            raise Broken(f"a gradient reaches {name}: {numbers(found)}; detach it")


def precision(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    with NoHalf():
        _agree(geometry, update.each(Tensor.double, mask=False), update, "in float32 against float64")
    low = update.each(Tensor.bfloat16, mask=False)
    exact, got = losses(geometry, low.each(Tensor.double, mask=False))[0], losses(geometry, low)[0]
    same("loss", exact, got, "from bf16 inputs against float64", BFLOAT16)  # its gradient jumps where a clip begins


def determinism(geometry: Geometry, case: Case) -> None:
    """Asked, asked about something else, and asked again a day later; then the same of another instance of it."""
    case = replace(case, seed=case.seed + 1000 * next(CALLS))

    def answer(asked: Geometry, about: Case, seed: int) -> dict[str, Tensor]:
        update = update_of(about)
        try:
            with alone(seed):
                loss, slope, metrics = losses(asked, update)
        except Meddles:
            raise
        except Broken:
            return {}  # of a wrong form, which `form` says
        unchanged("update", update_of(about), update)
        return {"loss": loss, "gradient": slope, **metrics}

    first = answer(geometry, case, 0)
    answer(geometry, replace(case, seed=case.seed + 1, rewards=case.rewards[::-1], masked=case.masked[::-1]), 1)
    another = type(geometry)(**{name: getattr(geometry, name) for name in type(geometry).model_fields})
    with later():
        calls = {
            "called again": answer(geometry, case, 2),
            "of another instance with the same knobs": answer(another, case, 3),
        }
    for when, again in calls.items():
        for name, x in first.items():
            if not identical(x, again[name]):
                raise Broken(f"{when}, {name} of the same input is {numbers(again[name])} instead of {numbers(x)}")


def extreme(geometry: Geometry, case: None) -> None:
    for apart in EXTREME:
        for sign in (1.0, -1.0):
            new = torch.zeros(1, 2)
            old, advantages = torch.full((1, 2), -apart), torch.full((1, 2), sign)
            try:
                _form(geometry, Update(new, old, advantages, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)))
            except Broken as error:
                raise type(error)(f"with a log-ratio of {apart} and an advantage of {sign:g}: {error}") from error


def short(geometry: Geometry, case: None) -> None:
    for steps in ([[True]], [[False]], [[True, True], [False, False]]):
        mask = torch.tensor(steps)
        even = torch.full(mask.shape, -0.5)
        _form(geometry, Update(even + 0.1, even, torch.ones(mask.shape), mask, even))


def length(geometry: Geometry, case: None) -> None:
    def make(tokens: int) -> Callable[[], None]:
        even = torch.full((2, tokens), -0.5)
        update = Update(even + 0.001, even, torch.ones(2, tokens), torch.ones(2, tokens, dtype=torch.bool), even)
        return lambda: _form(geometry, update)

    grows_linearly(make)


GEOMETRY = [
    Property("determinism", "the same input gives the same result and stays unchanged", determinism, 0.5),
    Property("form", "a finite loss per token, 0 where masked, detached metrics per token", form),
    Property("moves", "at the sampling policy, its gradient is the policy gradient, A grad log pi", moves, waivable=True),
    Property(
        "clip",
        "off policy, a token is never pushed against its advantage, and is pulled back if it moved against it",
        clip,
        cases=0,
        waivable=True,
    ),
    Property("weight", "a token's weight is at most its ratio or 1, whichever is larger", weight, cases=0, waivable=True),
    Property(
        "reference",
        "the KL moves the policy towards the reference",
        reference,
        cases=0,
        waivable=True,
        excused=lambda geometry: "" if geometry.kl_coef else "kl_coef is 0",
    ),
    Property(
        "marks",
        "marked tokens are trainable, and do not depend on masked positions",
        marks,
        cases=0.5,
        excused=lambda geometry: "" if geometry.marks else "it marks none",
    ),
    Property("noise", "the content of masked positions, NaN included, changes no bit of loss, gradient or metrics", noise),
    Property("garbage", "NaN in a number that matters gives NaN or an error", garbage, cases=0.25),
    Property("gap", "a response with a gap equals the one without it", gap),
    Property("padding", "neither the amount nor the side of padding matters", padding),
    Property("order", "the order of the responses does not matter", order),
    Property("split", "each response alone in a micro-batch, without extra padding, gets the same loss and gradient", split),
    Property(
        "packed",
        "several responses in one row get the same loss and gradient",
        packed,
        claimed="if a response has one ratio, it needs a row of its own; the trainer gives each response its own row",
    ),
    Property(
        "gradient",
        "no gradient reaches old log-probabilities, advantages or the reference",
        gradient,
        claimed="the trainer hands it all but the new log-probabilities detached",
    ),
    Property(
        "precision", "float32 and bf16 inputs agree with float64; nothing is computed below float32", precision, waivable=True
    ),
    Property("extreme", "ratios beyond all bounds give a finite loss and gradient", extreme, cases=0),
    Property("short", "one-token and empty responses", short, cases=0),
    Property("length", "1 to 16,384 tokens in O(B*T) memory", length, cases=0),
]


def show(geometry: Geometry, case: Case) -> str:
    return python(**vars(update_of(case)))
