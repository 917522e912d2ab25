"""`cct fidelity`: the scores of one or several runs as a table and as fidelity.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.status import Status
from rich.table import Table

from .measure import Measured, measure
from .scores import LEVEL, SCORES, SURE, ceiling, difference, split_half, true_variance, with_interval

FILE = "fidelity.json"
WIDTH = 120  # of the table, where the terminal does not say


def summary(measured: Measured) -> dict[str, Any]:
    """What fidelity.json holds: scores with intervals, and the positions that they are of. NaN and infinity are null."""
    truth, own = measured.truth, next(iter(measured.credit.values()))
    transports = {}
    for name, credit in measured.credit.items():
        found = {score: asdict(with_interval(of, credit, truth)) for score, of in SCORES.items()}
        if credit is not own:
            found["rank_correlation_minus_own"] = asdict(difference(credit, own, truth))
        transports[name] = found
    places = {"iteration": [p[0] for p in measured.places], "row": [p[1] for p in measured.places]}
    places |= {"token": [p[2] for p in measured.places], "prompt": truth.cluster.tolist()}
    return _finite(
        {
            "source": measured.source,
            "recipe": measured.recipe,
            "critic": measured.critic,
            "iteration": measured.iteration,
            "positions": len(own),
            "responses": measured.responses,
            "prompts": len(np.unique(truth.cluster)),
            "continuations": measured.continuations,
            "continuation_tokens": measured.tokens,
            "seconds": round(measured.seconds, 1),
            "level": LEVEL,
            "truth": {
                "variance": true_variance(truth),
                "surely_not_0": int(truth.sure.sum()),
                "p_below": SURE,
                "split_half": asdict(with_interval(split_half, own, truth)),
                "ceiling": asdict(with_interval(ceiling, own, truth)),
            },
            "transports": transports,
            "at_positions": places
            | {"advantage": truth.advantage.round(6).tolist(), "p": truth.p.round(6).tolist()}
            | {"credit": {name: credit.round(6).tolist() for name, credit in measured.credit.items()}},
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_fidelity(sources: Sequence[Path], written: Sequence[str], output: Path | None, **knobs: Any) -> int:
    """Measure each run, print one table, write fidelity.json into each run's folder, and all to `output`. Returns 0."""
    console = Console()
    console = console if console.is_terminal else Console(width=max(WIDTH, console.width))
    found = []
    for source in sources:
        with console.status(str(source)) as status:

            def on_stage(stage: str, source: Path = source, status: Status = status) -> None:
                status.update(f"{source}: {stage}")

            found.append(summary(measure(source, written, on_stage=on_stage, **knobs)))
        if source.is_dir():
            (source / FILE).write_text(json.dumps(found[-1], indent=1) + "\n", encoding="utf-8")
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(table(found))
    console.print(
        "credit against Q(s, a) - V(s) by continuing responses. rank correlation: Spearman's; exact knowledge would reach the "
        "ceiling. same sign: where the advantage is surely not 0. bias, variance: of credit / scale, in units of reward and "
        f"its square; scale is 1 where credit is the advantage plus noise. [{LEVEL:.0%} intervals, bootstrap over prompts]",
        highlight=False,
    )
    for one in found:
        console.print(
            f"{one['source']}, iteration {one['iteration']}: {one['positions']} positions of {one['responses']} responses to "
            f"{one['prompts']} prompts, 2 x {one['continuations']} continuations each, {one['continuation_tokens']:,} tokens, "
            f"{one['seconds']:.0f} s; halves of the truth correlate {_shown(one['truth']['split_half'])}; its variance is "
            f"{one['truth']['variance']:.2g}",
            highlight=False,
        )
    return 0


def table(found: Sequence[dict[str, Any]]) -> Table:
    """One row for each transport of each run, and one for what perfect knowledge would reach."""
    result = Table(show_lines=False)
    result.add_column("run", overflow="fold")
    result.add_column("transport, critic", overflow="fold")
    several = any(len(one["transports"]) > 1 for one in found)
    for column in ("rank correlation", *(("minus own",) if several else ()), "same sign", "scale", "bias", "variance"):
        result.add_column(column, justify="right")
    for one in found:
        for name, scores in one["transports"].items():
            less = scores.get("rank_correlation_minus_own")
            result.add_row(
                one["source"],
                f"{name}, {one['critic'] or 'no critic'}",
                _shown(scores["rank_correlation"]),
                *((_shown(less) if less else "",) if several else ()),
                *(_shown(scores[score]) for score in ("sign_agreement", "scale", "bias", "variance")),
            )
        sure = f"of {one['truth']['surely_not_0']}"
        result.add_row(
            one["source"], "ceiling", _shown(one["truth"]["ceiling"]), *(("",) if several else ()), sure, "", "", "",
            style="dim", end_section=True,
        )  # fmt: skip
    return result


def _shown(estimate: dict[str, float | None]) -> str:
    def number(x: float | None) -> str:
        return "-" if x is None else f"{x:.2g}" if abs(x) < 0.1 else f"{x:.2f}"

    value, low, high = map(number, (estimate["value"], estimate["low"], estimate["high"]))
    return f"{value} [{low}, {high}]" if value != "-" else "-"
