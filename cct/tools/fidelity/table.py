"""`cct fidelity`: the scores of one or several runs as a table and as fidelity.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.status import Status
from rich.table import Table
from rich.text import Text

from cct.run_folder import RunFolder
from cct.system.files import without_nan, write_text
from cct.system.terminal import make_console, printable

from .measure import Measured, measure
from .scores import LEVEL, SCORES, SURE, ceiling, difference, split_half, true_variance, with_interval

WIDTH = 120  # of the table, where the terminal does not say


def summary(measured: Measured) -> dict[str, Any]:
    """The content of fidelity.json: scores with intervals, and their positions. NaN and infinity are null."""
    truth, own = measured.truth, next(iter(measured.credit.values()))
    transports = {}
    for name, credit in measured.credit.items():
        found: dict[str, Any] = {"critic": measured.critics[name], "explained_variance": measured.explained[name]}
        found |= {score: asdict(with_interval(of, credit, truth)) for score, of in SCORES.items()}
        if credit is not own:
            found["rank_correlation_minus_own"] = asdict(difference(credit, own, truth))
        transports[name] = found
    places = {"iteration": [p[0] for p in measured.places], "row": [p[1] for p in measured.places]}
    places |= {"token": [p[2] for p in measured.places], "prompt": truth.cluster.tolist()}
    return without_nan(
        {
            "source": measured.source,
            "recipe": measured.recipe,
            "critic": measured.critic,
            "iteration": measured.iteration,
            "at": measured.at,
            "positions": len(own),
            "responses": measured.responses,
            f"trained_{measured.at}": measured.trained,
            f"undecided_{measured.at}": measured.undecided,
            "below": measured.below,
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
            | {"advantage": truth.advantage.tolist(), "p": truth.p.tolist()}
            | {"credit": {name: credit.tolist() for name, credit in measured.credit.items()}},
        }
    )


def print_fidelity(sources: Sequence[Path], written: Sequence[str], output: Path | None, **knobs: Any) -> int:
    """Measure each run, print one table, write fidelity.json into each run's folder, and all to `output`. Returns 0."""
    terminal = make_console(WIDTH)
    found = []
    for source in sources:
        with terminal.status(Text(printable(str(source)))) as status:

            def on_stage(stage: str, source: Path = source, status: Status = status) -> None:
                status.update(Text(printable(f"{source}: {stage}")))

            found.append(summary(measure(source, written, on_stage=on_stage, **knobs)))
        if source.is_dir():
            write_text(RunFolder(source).fidelity_file, json.dumps(found[-1], indent=1) + "\n")
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")
    terminal.print(table(found))
    terminal.print(
        "Explained variance: of the Monte-Carlo return, by the values that the transport read. The other columns compare "
        f"credit with Q(s, a) - V(s), measured by continuing responses before and after a {found[0]['at'][:-1]}. "
        "Rank correlation: Spearman's; exact advantages would reach the ceiling. Same sign: where the advantage differs "
        "significantly from 0. Bias, variance: of credit / scale around the advantage, in units of reward and its square; "
        "credit / scale is modelled as the advantage plus a constant and noise. "
        f"[{LEVEL:.0%} intervals, bootstrap over prompts]",
    )
    for one in found:
        truth, at = one["truth"], one["at"]
        responses = "episodes" if at == "turns" else "responses"
        terminal.print(
            f"{one['source']}, iteration {one['iteration']}: {one['positions']} of the {one[f'undecided_{at}']:,} {at} (of "
            f"{one[f'trained_{at}']:,} in {one['responses']:,} {responses}) that were sampled with a probability below "
            f"{one['below']:g}, in responses to {one['prompts']} prompts; 2 x {one['continuations']} continuations each, "
            f"{one['continuation_tokens']:,} tokens, {one['seconds']:.0f} s. The advantage differs significantly from 0 at "
            f"{truth['surely_not_0']}; its variance is {truth['variance'] or math.nan:.2g}; the correlation of two halves of "
            f"the measurement is {_shown(truth['split_half'])}.",
        )
    return 0


def table(found: Sequence[dict[str, Any]]) -> Table:
    """One row for each transport of each run, and one for what exact knowledge would reach."""
    runs, pairs = len(found) > 1, any(len(one["transports"]) > 1 for one in found)
    result = Table(title=None if runs else f"{found[0]['source']}, critic {found[0]['critic']}", title_justify="left")
    if runs:
        result.add_column("run, critic", overflow="fold")
    result.add_column("transport", overflow="fold")
    minus = ["minus own"] if pairs else []
    for column in ("explained\nvariance", "rank correlation", *minus, "same sign", "bias", "variance"):
        result.add_column(column, justify="right")
    for one in found:
        run = [f"{one['source']}, {one['critic']}"] if runs else []
        for name, scores in one["transports"].items():
            less = scores.get("rank_correlation_minus_own")
            result.add_row(
                *run,
                name,
                _number(scores["explained_variance"]),
                _shown(scores["rank_correlation"]),
                *([_shown(less) if less else ""] if pairs else []),
                *(_shown(scores[score]) for score in ("sign_agreement", "bias", "variance")),
            )
        ceiling = ["", _shown(one["truth"]["ceiling"]), *([""] if pairs else []), f"of {one['truth']['surely_not_0']}", "", ""]
        result.add_row(*run, "ceiling", *ceiling, style="dim", end_section=True)
    return result


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2g}" if abs(x) < 0.1 else f"{x:.2f}"


def _shown(estimate: dict[str, float | None]) -> str:
    value, low, high = map(_number, (estimate["value"], estimate["low"], estimate["high"]))
    return f"{value} [{low}, {high}]" if value != "-" else "-"
