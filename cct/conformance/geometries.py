"""Properties of geometries: a loss per token and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cct.geometry import Geometry

from .base import Broken, Property
from .cases import NOISE, Case, grows_linearly, numbers, packing, python, same
from .operators import BFLOAT16, ROUNDING

EXTREME = (200.0, -200.0, float("inf"), -float("inf"))  # log-ratios far beyond any bound


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
    except Exception as error:
        raise Broken(f"it raised {type(error).__name__}: {error}") from error
    if loss.shape != update.mask.shape:
        raise Broken(f"the loss is {tuple(loss.shape)}; expected one number per token, {tuple(update.mask.shape)}")
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
        if x.shape != update.mask.shape or not bool(x.isfinite().all()):
            raise Broken(f"{name} is {numbers(x)}; expected a finite number per token")
        if name in ("loss", "gradient") and bool(x[~update.mask].ne(0).any()):
            raise Broken(f"the {name} is not 0 where the mask is off: {numbers(x)}")
        if x.requires_grad:
            raise Broken(f"{name} carries a gradient; metrics are detached")


def form(geometry: Geometry, case: Case) -> None:
    _form(geometry, update_of(case))


def moves(geometry: Geometry, case: None) -> None:
    """At the sampling policy, where a good and a bad token stand beside each other."""
    even = torch.full((2, 2), -1.0)
    signed = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    _, slope, _ = losses(geometry, Update(even, even, signed, torch.ones(2, 2, dtype=torch.bool), even))
    if not bool((slope[0] < 0).all() and (slope[1] > 0).all()):
        raise Broken(f"the gradient by the log-probabilities is {numbers(slope)} where the advantages are {numbers(signed)}")


def noise(geometry: Geometry, case: Case) -> None:
    update = update_of(case)
    for value in NOISE:
        hidden = update.each(lambda x, value=value: x.where(update.mask, value), mask=False)  # type: ignore[misc]
        _agree(geometry, update, hidden, f"with {value} at masked positions", tolerance=0.0)


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
    _agree(geometry, update.each(Tensor.double, mask=False), update, "in float32 against float64")
    low = update.each(Tensor.bfloat16, mask=False)
    exact, got = losses(geometry, low.each(Tensor.double, mask=False))[0], losses(geometry, low)[0]
    same("loss", exact, got, "from bf16 inputs against float64", BFLOAT16)  # its gradient jumps where a clip begins


def determinism(geometry: Geometry, case: Case) -> None:
    update, untouched = update_of(case), update_of(case)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        first = losses(geometry, update)
        torch.manual_seed(case.seed + 1)
        second = losses(geometry, update)
    same("loss", first[0], second[0], "called again")
    same("gradient", first[1], second[1], "called again")
    for name, x in vars(untouched).items():
        if not torch.equal(x, getattr(update, name)):
            raise Broken(f"it wrote into {name}: {numbers(x)} became {numbers(getattr(update, name))}")


def extreme(geometry: Geometry, case: None) -> None:
    for apart in EXTREME:
        for sign in (1.0, -1.0):
            new = torch.zeros(1, 2)
            old, advantages = torch.full((1, 2), -apart), torch.full((1, 2), sign)
            try:
                _form(geometry, Update(new, old, advantages, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)))
            except Broken as error:
                raise Broken(f"with a log-ratio of {apart} and an advantage of {sign:g}: {error}") from error


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
    Property("form", "a finite loss per token, 0 where masked, detached metrics per token", form),
    Property(
        "moves",
        "at the sampling policy, a good token becomes likelier and a bad one less likely",
        moves,
        cases=0,
        waivable=True,
    ),
    Property("noise", "whatever stands at masked positions, NaN too, changes no bit of loss or gradient", noise),
    Property("gap", "a response with a gap equals the one without it", gap),
    Property("padding", "neither the amount nor the side of padding matters", padding),
    Property("order", "the order of the responses does not matter", order),
    Property("split", "each response alone in a micro-batch, as wide as it needs, gets the same loss and gradient", split),
    Property(
        "packed",
        "several responses in one row get the same loss and gradient",
        packed,
        claimed="where a response has one ratio, its tokens must stand in a row of their own; the trainer gives each its row",
    ),
    Property(
        "gradient",
        "no gradient reaches old log-probabilities, advantages or the reference",
        gradient,
        claimed="the trainer hands it all but the new log-probabilities detached",
    ),
    Property("precision", "float32 agrees with float64, and so do bf16 inputs", precision, waivable=True),
    Property("determinism", "the same input gives the same and is not written into", determinism),
    Property("extreme", "ratios beyond all bounds give a finite loss and gradient", extreme, cases=0),
    Property("short", "one-token and empty responses", short, cases=0),
    Property("length", "1 to 16,384 tokens in O(B*T) memory", length, cases=0),
]


def show(geometry: Geometry, case: Case) -> str:
    return python(**vars(update_of(case)))
