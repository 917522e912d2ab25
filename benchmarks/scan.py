"""The scan A_t = a_t + b_t A_{t+1} and the whole gated GAE, beside torchrl's GAE with a discount per token and a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cct.transport.functional import gated_gae, scan

from .measure import Result, Table, Target, agree, device, in_turn, ratios, spread


@dataclass(frozen=True)
class Shape:
    rows: int
    length: int
    least_torchrl: float | None = None  # how many times faster than torchrl
    least_loop: float | None = None
    most_gae: float | None = None  # gated GAE as a multiple of the scan


SHAPES = (
    Shape(64, 8192, least_torchrl=10, least_loop=8, most_gae=3),
    Shape(512, 4096, least_torchrl=2.5, least_loop=2.5, most_gae=3),
    Shape(256, 32768, least_loop=4, most_gae=3),
)
QUICK = (Shape(64, 1024), Shape(512, 512))

LAM = 0.95


def run(shapes: tuple[Shape, ...] = SHAPES, rounds: int = 7) -> Result:
    rows, targets = [], []
    for shape in shapes:
        found, bounds = _one(shape, rounds)
        rows += found
        targets += bounds
    columns = ("rows x tokens", "what", "ms", "times the scan", "greatest error")
    return Result((Table("Scan and gated GAE, float32", columns, tuple(rows)),), tuple(targets))


def loop(a: Tensor, b: Tensor) -> Tensor:
    """The definition, a column at a time."""
    result, after = torch.empty_like(a), torch.zeros_like(a[:, 0])
    for t in range(a.shape[1] - 1, -1, -1):
        after = a[:, t] + b[:, t] * after
        result[:, t] = after
    return result


def torchrl_gae(gamma: Tensor, rewards: Tensor, values: Tensor) -> Callable[[], Tensor]:
    """torchrl's GAE with a tensor of discounts; returns the advantages."""
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    done = torch.zeros_like(rewards, dtype=torch.bool)
    done[:, -1] = True
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    inputs = [x.unsqueeze(2) for x in (values, following, rewards, done)]
    return lambda: generalized_advantage_estimate(gamma.unsqueeze(2), LAM, *inputs)[0].squeeze(2)


def _one(shape: Shape, rounds: int) -> tuple[list[tuple[str, ...]], list[Target]]:
    generator, size = torch.Generator().manual_seed(0), (shape.rows, shape.length)
    draw = lambda: torch.rand(size, generator=generator).to(device())  # noqa: E731
    rewards, values, gamma, gaps = draw() - 0.5, draw(), 0.99 + 0.01 * draw(), draw() < 0.9
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    a, b = rewards + gamma * following - values, gamma * LAM
    whole = torch.ones_like(gaps)
    lengths = (torch.arange(shape.rows, device=device()) % 4 + 1).unsqueeze(1) * shape.length // 4
    mask = gaps & (torch.arange(shape.length, device=device()) < lengths)

    functions: dict[str, Callable[[], object]] = {
        "scan": lambda: scan(a, b),
        "gated GAE, gaps": lambda: gated_gae(rewards, values, mask, gamma=gamma, lam=LAM, lam_value=LAM),
        "gated GAE, gaps, targets of another lam": lambda: gated_gae(rewards, values, mask, gamma=gamma, lam=LAM),
        "torchrl, tensor gamma": torchrl_gae(gamma, rewards, values),
        "plain loop": lambda: loop(a, b),
    }
    exact = loop(a.double(), b.double())
    ours = gated_gae(rewards, values, whole, gamma=gamma, lam=LAM)[0]
    errors = {
        "scan": agree("scan", scan(a, b), exact, 1e-3),
        "gated GAE, gaps": agree("gated GAE", ours, exact, 1e-3),
        "torchrl, tensor gamma": agree("torchrl", torchrl_gae(gamma, rewards, values)(), exact, 1e-3),
        "plain loop": agree("loop", loop(a, b), exact, 1e-3),
    }
    seconds = in_turn(functions, rounds)
    name = f"{shape.rows} x {shape.length}"
    rows: list[tuple[str, ...]] = [
        (
            name,
            what,
            spread(taken, 1e-3),
            "" if what == "scan" else spread(ratios(taken, seconds["scan"])),
            f"{errors[what]:.1e}" if what in errors else "",
        )
        for what, taken in seconds.items()
    ]
    wanted = [
        ("torchrl, tensor gamma", shape.least_torchrl, None),
        ("plain loop", shape.least_loop, None),
        ("gated GAE, gaps", None, shape.most_gae),
        ("gated GAE, gaps, targets of another lam", None, shape.most_gae),
    ]
    targets = [
        Target(f"{name}: {what} / scan", ratios(seconds[what], seconds["scan"]), least, most)
        for what, least, most in wanted
        if least is not None or most is not None
    ]
    return rows, targets
