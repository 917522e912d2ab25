"""The scan A_t = a_t + b_t A_{t+1} beside a loop over columns; gated GAE, advantages and targets, beside torchrl's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cct.transport.functional import gated_gae, scan

from .measure import Result, Table, Target, agree, device, in_turn, ratios, spread

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    rows: int
    length: int
    least_torchrl: float | None = None  # how many times as long torchrl takes for the whole estimate
    least_loop: float | None = None  # how many times as long the loop takes for the scan


SHAPES = (
    Shape(64, 8192, least_torchrl=10, least_loop=8),
    Shape(512, 4096, least_torchrl=5, least_loop=2.5),
    Shape(256, 32768, least_torchrl=5, least_loop=4),
)
QUICK = (Shape(64, 1024), Shape(512, 512))

LAM = 0.95
TORCHRL, TWICE, LOOP = "torchrl, tensor gamma", "torchrl twice, once for each lam", "plain loop"


def run(shapes: tuple[Shape, ...] = SHAPES, rounds: int = 7, estimator: Callable[..., Pair] = gated_gae) -> Result:
    """estimator: what is held to the definition and timed, called as `gated_gae`."""
    rows, targets = [], []
    for shape in shapes:
        found, bounds = _one(shape, rounds, estimator)
        rows += found
        targets += bounds
    columns = ("rows x tokens", "what", "ms", "its peer takes times as long", "greatest error")
    return Result((Table("Scan and gated GAE, float32", columns, tuple(rows)),), tuple(targets))


def loop(a: Tensor, b: Tensor) -> Tensor:
    """The definition, a column at a time."""
    result, after = torch.empty_like(a), torch.zeros_like(a[:, 0])
    for t in range(a.shape[1] - 1, -1, -1):
        after = a[:, t] + b[:, t] * after
        result[:, t] = after
    return result


def torchrl_gae(gamma: Tensor, rewards: Tensor, values: Tensor, lam_value: float = LAM) -> Callable[[], Pair]:
    """torchrl's GAE with a tensor of discounts: advantages and value targets of responses without gaps.

    It knows one lam; another one for targets takes a second call.
    """
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    done = torch.zeros_like(rewards, dtype=torch.bool)
    done[:, -1] = True
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    inputs = [x.unsqueeze(2) for x in (values, following, rewards, done)]

    def estimate(lam: float) -> Pair:
        advantages, targets = generalized_advantage_estimate(gamma.unsqueeze(2), lam, *inputs)
        return advantages.squeeze(2), targets.squeeze(2)

    if lam_value == LAM:
        return lambda: estimate(LAM)
    return lambda: (estimate(LAM)[0], estimate(lam_value)[1])


def definition(rewards: Tensor, values: Tensor, mask: Tensor, gamma: Tensor, lam: float) -> Tensor:
    """Advantages in float64, a column at a time; a masked position is no step."""
    result, ahead = torch.zeros_like(rewards, dtype=torch.float64), rewards.new_zeros(2, len(rewards), dtype=torch.float64)
    for t in range(rewards.shape[1] - 1, -1, -1):
        r, v, g = (x[:, t].double() for x in (rewards, values, gamma))
        advantage = r + g * ahead[0] - v + g * lam * ahead[1]
        result[:, t] = advantage * mask[:, t]
        ahead = torch.where(mask[:, t], torch.stack([v, advantage]), ahead)
    return result


def _one(shape: Shape, rounds: int, estimator: Callable[..., Pair]) -> tuple[list[tuple[str, ...]], list[Target]]:
    generator, size = torch.Generator().manual_seed(0), (shape.rows, shape.length)
    draw = lambda: torch.rand(size, generator=generator).to(device())  # noqa: E731
    rewards, values, gamma, gaps = draw() - 0.5, draw(), 0.99 + 0.01 * draw(), draw() < 0.9
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    a, b = rewards + gamma * following - values, gamma * LAM
    whole = torch.ones_like(gaps)
    lengths = (torch.arange(shape.rows, device=device()) % 4 + 1).unsqueeze(1) * shape.length // 4
    mask = gaps & (torch.arange(shape.length, device=device()) < lengths)

    def ours(mask: Tensor, lam_value: float) -> Callable[[], Pair]:
        return lambda: estimator(rewards, values, mask, gamma=gamma, lam=LAM, lam_value=lam_value)

    estimates = {
        "gated GAE": (ours(whole, LAM), whole, LAM),
        "gated GAE, lam 1 for targets": (ours(whole, 1.0), whole, 1.0),
        "gated GAE, gaps": (ours(mask, LAM), mask, LAM),
        "gated GAE, gaps, lam 1 for targets": (ours(mask, 1.0), mask, 1.0),
        TORCHRL: (torchrl_gae(gamma, rewards, values), whole, LAM),
        TWICE: (torchrl_gae(gamma, rewards, values, 1.0), whole, 1.0),
    }
    scans = {"scan": lambda: scan(a, b), LOOP: lambda: loop(a, b)}
    errors = {name: agree(name, function(), loop(a.double(), b.double()), 1e-3) for name, function in scans.items()}
    for name, (function, steps, lam_value) in estimates.items():
        advantages, targets = function()
        expected = definition(rewards, values, steps, gamma, LAM), definition(rewards, values, steps, gamma, lam_value)
        error = agree(f"advantages of {name}", advantages, expected[0], 1e-3)
        errors[name] = max(error, agree(f"targets of {name}", targets, expected[1] + values * steps, 1e-3))
    seconds = in_turn(scans | {name: function for name, (function, *_) in estimates.items()}, rounds)

    peers = dict.fromkeys(scans, LOOP) | {name: TORCHRL if lam == LAM else TWICE for name, (*_, lam) in estimates.items()}
    times = {name: ratios(seconds[peer], seconds[name]) for name, peer in peers.items()}
    name = f"{shape.rows} x {shape.length}"
    rows: list[tuple[str, ...]] = [
        (name, what, spread(taken, 1e-3), "" if what in peers.values() else spread(times[what]), f"{errors[what]:.1e}")
        for what, taken in seconds.items()
    ]
    least = {LOOP: shape.least_loop, TORCHRL: shape.least_torchrl, TWICE: shape.least_torchrl}
    bounds = [
        Target(f"{name}: {peer} / {what}", times[what], bound)
        for what, peer in peers.items()
        if what != peer and (bound := least[peer]) is not None
    ]
    return rows, bounds
