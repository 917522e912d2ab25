"""Time and peak memory of each stage against the length of responses and against the batch."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cct.agent.agent import Agent
from cct.critic import critics
from cct.policy import attention_concentration
from cct.rollout import Trace
from cct.statistic import Concentration
from cct.transport.functional import gated_gae

from .concentration import model
from .measure import MIB, Result, Table, device, extra_memory, in_turn, number

PROMPT = 64
STAGES = {
    "transport": "gated GAE of the whole batch",
    "concentration": "of one layer's queries and keys: attention once more",
    "TAC": "the critic's forward and backward on the kept trace: two attentions and the rest",
    "TAC without attention": "the same without borrowing the actor's attention",
    "behaviour pass": "the actor's forward with the gate's concentration and TAC's values",
}


@dataclass(frozen=True)
class Size:
    """Of the model, and what is varied: one row at each length, one length for each number of rows."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rows_at: int = 512
    width: int = 256
    layers: int = 4
    vocabulary: int = 512


SIZE = Size()
QUICK = Size(lengths=(128, 256, 512), rows=(1, 2, 4), rows_at=128, width=64, layers=2)


@dataclass(frozen=True)
class Point:
    milliseconds: float
    bytes: int | None


def run(size: Size = SIZE, rounds: int = 3) -> Result:
    agents = {name: _agent(size, borrow) for name, borrow in (("TAC", True), ("TAC without attention", False))}
    by_length = {length: _points(agents, 1, length, rounds) for length in size.lengths}
    by_rows = {rows: _points(agents, rows, size.rows_at, rounds) for rows in size.rows}
    shape = f"Qwen3 of width {size.width}, {size.layers} layers, prompt {PROMPT}"
    tables = [
        table(f"Against T, one row ({shape}): ms, extra MiB", "T", by_length),
        table(f"Against rows, T = {size.rows_at}: ms, extra MiB", "rows", by_rows),
    ]
    notes = tuple(f"- {name}: {what}." for name, what in STAGES.items())
    exponent = "- Exponent: of T or of rows, by which the time grows from the middle of the column to its end; 1 is linear."
    return Result(tuple(tables), notes=("\n".join([*notes, exponent]),), figure=_figure(by_length, by_rows, size.rows_at))


def _agent(size: Size, borrow: bool) -> Agent:
    actor = model(size.width, size.layers, size.vocabulary, PROMPT + max(*size.lengths, size.rows_at))
    critic = critics["tac"].model_validate({"borrow_attention": borrow, "concentration": borrow}).build(actor, (0.0, 1.0))
    return Agent(actor, critic.to(device()))


def _points(agents: dict[str, Agent], rows: int, length: int, rounds: int) -> dict[str, Point]:
    generator = torch.Generator().manual_seed(0)
    agent = agents["TAC"]
    vocabulary = agent.actor.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (rows, PROMPT + length), generator=generator).to(device())
    whole = torch.ones_like(ids)
    draw = lambda: torch.rand(rows, length, generator=generator).to(device())  # noqa: E731
    rewards, values, gamma, mask = draw(), draw(), 0.99 + 0.01 * draw(), draw() < 0.9
    gate = {"concentration": Concentration()}

    def behaviour(agent: Agent) -> Trace:
        with torch.no_grad():
            trace = agent(ids, whole, length, statistics=gate, with_critic=True).trace
        assert trace is not None
        return trace

    def learn(agent: Agent, trace: Trace) -> None:
        agent.values(trace, length)[0].square().mean().backward()
        assert agent.critic is not None
        agent.critic.zero_grad()

    traces = {name: behaviour(one) for name, one in agents.items()}
    read = next(iter(traces["TAC"].attention.values()))
    functions: dict[str, Callable[[], object]] = {
        "transport": lambda: gated_gae(rewards, values, mask, gamma=gamma, lam=0.95),
        "concentration": lambda: attention_concentration(read.query, read.key, mask=read.mask, scaling=read.scaling),
        **{name: lambda name=name: learn(agents[name], traces[name]) for name in agents},  # type: ignore[misc]
        "behaviour pass": lambda: behaviour(agent),
    }
    seconds = in_turn(functions, rounds)
    return {name: Point(1e3 * sorted(seconds[name])[rounds // 2], extra_memory(functions[name])) for name in STAGES}


def table(title: str, first: str, points: dict[int, dict[str, Point]]) -> Table:
    def cell(point: Point) -> str:
        return f"{number(point.milliseconds)}, {'?' if point.bytes is None else number(point.bytes / MIB)}"

    rows = [(f"{x}", *(cell(each[name]) for name in STAGES)) for x, each in points.items()]
    x = list(points)
    middle, last = x[len(x) // 2], x[-1]
    slopes = (
        math.log(points[last][name].milliseconds / points[middle][name].milliseconds) / math.log(last / middle)
        for name in STAGES
    )
    return Table(title, (first, *STAGES), (*rows, ("exponent", *(f"{slope:.2f}" for slope in slopes))))


def _figure(by_length: dict[int, dict[str, Point]], by_rows: dict[int, dict[str, Point]], rows_at: int) -> str | None:
    """Time and memory, logarithmic; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    panels = figure.subplots(2, 2)
    for column, (points, x) in enumerate(((by_length, "T, one row"), (by_rows, f"rows, T = {rows_at}"))):
        for name in STAGES:
            panels[0][column].plot(list(points), [each[name].milliseconds for each in points.values()], "o-", label=name, ms=3)
            sizes = [(at, each[name].bytes) for at, each in points.items()]
            panels[1][column].plot(
                *zip(*[(at, s / MIB) for at, s in sizes if s], strict=True) or ((), ()), "o-", label=name, ms=3
            )
        for panel, y in zip((panels[0][column], panels[1][column]), ("ms", "extra MiB"), strict=True):
            panel.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
            panel.set_xticks(list(points), [f"{at}" for at in points])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
