"""Results of a study: `results.json`, `cells.csv`, and the tables of `cct study summary`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cct.metrics import CELLS, EXPLAINED, OUTCOMES
from cct.system.files import whole, without_nan, write_text

from .runner import Work
from .statistics import (
    LEVEL,
    Estimate,
    area_under_curve,
    estimate,
    final_mean,
    fisher,
    holm,
    interaction,
    paired_difference,
    why_unstable,
)
from .study import Cell, Study


def summarise(study: Study, works: Sequence[Work]) -> dict[str, Any]:
    """Everything in `results.json`. NaN, which JSON lacks, becomes null."""
    cells = [_cell(study, work) for work in works]
    metrics = ["final_accuracy", "area", *dict.fromkeys(name for cell in cells for name in cell["evaluation"])]
    by_metric = {name: _by_arm(study, cells, name) for name in metrics}
    results = {
        "study": study.name,
        "level": LEVEL,
        "final_evaluations": study.final_evaluations,
        "stable_rule": study.stable.model_dump(),
        "cells": cells,
        "arms": [
            {"metric": name, "arm": arm, "setting": setting, **asdict(estimate(list(values.values())))}
            for name, found in by_metric.items()
            for (arm, setting), values in found.items()
        ],
        "comparisons": [row for name in metrics for row in _comparisons(study, by_metric[name], name)],
        "courses": _courses(study, works),
        "stability": _stability(study, cells),
    }
    return without_nan(results)


def _cell(study: Study, work: Work) -> dict[str, Any]:
    events, rule = work.events, study.stable
    evaluated = [event for event in events if "eval/accuracy" in event]
    accuracies = [event["eval/accuracy"] for event in evaluated]
    rounds = [event for event in events if event["iteration"] > 0]
    by = next((name for name in EXPLAINED if any(name in event for event in rounds)), "")
    explained = [event[by] for event in rounds if by in event]
    finite = not work.failed and all(math.isfinite(x) for event in events for x in event.values())
    unstable = why_unstable(
        accuracies,
        [event["policy/approx_kl"] for event in rounds if "policy/approx_kl" in event],
        finite,
        rule.max_drop,
        rule.max_kl,
    )
    trained = work.trained
    return {
        "arm": work.cell.arm,
        "setting": work.cell.setting,
        "seed": work.cell.seed,
        "state": work.state,
        "iterations": max(0, events[-1]["iteration"]) if events else 0,
        "final_accuracy": final_mean(accuracies, study.final_evaluations) if trained else math.nan,
        "area": area_under_curve([event["iteration"] for event in evaluated], accuracies) if trained else math.nan,
        "explained_variance": math.fsum(explained) / len(explained) if explained else math.nan,
        "stable": not unstable if trained or work.failed else None,
        "unstable": unstable,
        "evaluation": work.evaluation,
        "fidelity": work.fidelity,
    }


def _by_arm(study: Study, cells: Sequence[Mapping[str, Any]], metric: str) -> dict[tuple[str, str], dict[int, float]]:
    """Values by seed of each arm under each setting; cells without a value are left out."""
    found: dict[tuple[str, str], dict[int, float]] = {(arm, s): {} for s in study.settings for arm in study.arm_names}
    for cell in cells:
        value = cell[metric] if metric in cell else cell["evaluation"].get(metric, math.nan)
        if math.isfinite(value):
            found[cell["arm"], cell["setting"]][cell["seed"]] = value
    return found


def _comparisons(study: Study, values: Mapping[tuple[str, str], dict[int, float]], metric: str) -> list[dict[str, Any]]:
    """Differences and interactions within seeds; those of one metric form one family for Holm's correction.

    None for a single seed, which has no interval.
    """
    if len(study.seeds) < 2:
        return []
    found: list[tuple[dict[str, Any], Estimate]] = []
    for setting in study.settings:
        at = {arm: values[arm, setting] for arm in study.arm_names}
        for a, b in study.compare:
            what = {"kind": "difference", "name": f"{a} - {b}", "arms": [a, b], "setting": setting}
            found.append((what, paired_difference(at[a], at[b])))
        for name, ((a, b), (c, d)) in study.interactions.items():
            title = f"{name}: ({d} - {c}) - ({b} - {a})"
            what = {"kind": "interaction", "name": title, "arms": [a, b, c, d], "setting": setting}
            found.append((what, interaction(at[a], at[b], at[c], at[d])))
    adjusted = holm([each.p for _, each in found])
    return [{"metric": metric, **what, **asdict(each), "p_holm": p} for (what, each), p in zip(found, adjusted, strict=True)]


def _courses(study: Study, works: Sequence[Work]) -> list[dict[str, Any]]:
    """Of each compared pair the difference of held-out accuracy within seeds at every evaluation; no tests.

    Runs that did not come to their end are left out, as everywhere.
    """
    at: dict[tuple[str, str], dict[int, dict[int, float]]] = {}  # arm and setting -> iteration -> seed -> accuracy
    for work in works:
        for event in work.events if work.trained else ():
            if math.isfinite(event.get("eval/accuracy", math.nan)):
                course = at.setdefault((work.cell.arm, work.cell.setting), {}).setdefault(event["iteration"], {})
                course[work.cell.seed] = event["eval/accuracy"]
    found = []
    for setting in study.settings if len(study.seeds) > 1 else ():
        for a, b in study.compare:
            one, other = at.get((a, setting), {}), at.get((b, setting), {})
            for iteration in sorted(one.keys() & other.keys()):
                difference = asdict(paired_difference(one[iteration], other[iteration]))
                found.append({"name": f"{a} - {b}", "setting": setting, "iteration": iteration, **difference})
    return found


def _stability(study: Study, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many are stable: of a grid's settings, each of which counts if it is with every seed, or else of the seeds."""
    units: dict[str, dict[Any, list[bool]]] = {arm: {} for arm in study.arm_names}
    for cell in cells:
        if cell["stable"] is not None:
            unit = cell["setting"] if study.settings != [""] else cell["seed"]
            units[cell["arm"]].setdefault(unit, []).append(cell["stable"])
    counts = {arm: (sum(all(unit) for unit in found.values()), len(found)) for arm, found in units.items()}
    p_values = [fisher(*counts[a], *counts[b]) for a, b in study.compare]
    pairs = [
        {"a": a, "b": b, "p": p, "p_holm": adjusted}
        for (a, b), p, adjusted in zip(study.compare, p_values, holm(p_values), strict=True)
    ]
    return {"counts": [{"arm": arm, "stable": k, "of": n} for arm, (k, n) in counts.items()], "fisher": pairs}


def write(results: Mapping[str, Any], works: Sequence[Work], folder: Path) -> None:
    """`results.json`, and `cells.csv`: one line per cell and event of its metrics.jsonl."""
    write_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    columns = ("iteration", *CELLS)
    with whole(folder / "cells.csv") as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "setting", "seed", *columns])
        for work in works:
            for event in work.events:
                row = [f"{x:.6g}" if isinstance(x := event.get(name, ""), float) else x for name in columns]
                writer.writerow([work.cell.arm, work.cell.setting, work.cell.seed, *row])


# --- tables -----------------------------------------------------------------------------------
def _interval(each: Mapping[str, Any], sign: str = "") -> str:
    if each["mean"] is None:
        return "-"
    shown = f"{each['mean']:{sign}.3f}"
    return shown if each["low"] is None else f"{shown} [{each['low']:{sign}.3f}, {each['high']:{sign}.3f}]"


def _p(value: float | None) -> str:
    return "-" if value is None else "<0.0001" if value < 1e-4 else f"{value:.4f}"


def print_tables(study: Study, results: Mapping[str, Any], console: Console) -> None:
    """Arms, what `cct eval` found of them, comparisons, stability."""
    _print_arms(study, results, console)
    _print_frozen(study, results, console)
    _print_differences(results, console)
    _print_stability(study, results, console)


INTERVAL = f"[{100 * LEVEL:.0f}% t interval]"


def _arms(study: Study, results: Mapping[str, Any], metric: str) -> dict[tuple[str, str], Mapping[str, Any]]:
    """A metric's estimate for each arm under each setting."""
    found = {(row["arm"], row["setting"]): row for row in results["arms"] if row["metric"] == metric}
    return {(arm, setting): found[arm, setting] for setting in study.settings for arm in study.arm_names}


def _print_arms(study: Study, results: Mapping[str, Any], console: Console) -> None:
    finals, areas = (_arms(study, results, metric) for metric in ("final_accuracy", "area"))
    rows: list[tuple[str, ...]] = []
    for (arm, setting), final in finals.items():
        here = [cell for cell in results["cells"] if (cell["arm"], cell["setting"]) == (arm, setting)]
        explained = [cell["explained_variance"] for cell in here if cell["explained_variance"] is not None]
        judged = [cell["stable"] for cell in here if cell["stable"] is not None]
        rows.append(
            (
                Cell(arm, setting, 0).name,
                f"{final['n']}/{len(study.seeds)}",
                _interval(final),
                _interval(areas[arm, setting]),
                f"{sum(explained) / len(explained):.3f}" if explained else "-",
                f"{sum(judged)}/{len(judged)}",
            )
        )
    columns = ("arm", "seeds", "final accuracy", "area under curve", "explained variance", "stable")
    console.print(_table(f"{study.name}: mean over seeds {INTERVAL}", columns, rows))
    last, rule = study.final_evaluations, study.stable
    console.print(
        f"seeds: finished runs; final accuracy: mean of the last {last} evaluation{'s' if last > 1 else ''}; "
        "area: mean of the learning curve by trapezoids; explained variance: of the Monte-Carlo return by the values that the "
        f"transport read, mean over a run and seeds; stable: no failure, no NaN, no fall of over {rule.max_drop:g} below the "
        f"best evaluation before, approx_kl at most {rule.max_kl:g}",
    )


def _print_frozen(study: Study, results: Mapping[str, Any], console: Console) -> None:
    metrics = dict.fromkeys(row["metric"] for row in results["arms"])
    means = [
        (name.removeprefix("frozen/"), Cell(arm, setting, 0).name, _interval(row))
        for name in metrics
        if name.startswith("frozen/") and name.count("/") == 1
        for (arm, setting), row in _arms(study, results, name).items()
    ]
    if means:
        console.print(_table(f"frozen sets, mean over sets, then over seeds {INTERVAL}", ("metric", "arm", "mean"), means))


def _print_differences(results: Mapping[str, Any], console: Console) -> None:
    rows = [
        (
            OUTCOMES[row["metric"]][0],
            f"{row['setting']} {row['name']}".strip(),
            _interval(row, "+"),
            str(row["n"]),
            _p(row["p"]),
            _p(row["p_holm"]),
        )
        for row in results["comparisons"]
        if row["metric"] in OUTCOMES
    ]
    if rows:
        columns = ("metric", "comparison", "difference", "seeds", "p", "p (Holm)")
        console.print(_table(f"differences within seeds {INTERVAL}", columns, rows))


def _print_stability(study: Study, results: Mapping[str, Any], console: Console) -> None:
    stability = results["stability"]
    counts = ", ".join(f"{row['arm']} {row['stable']}/{row['of']}" for row in stability["counts"])
    console.print(f"stable {'settings' if study.settings != [''] else 'seeds'}: {counts}")
    for pair in stability["fisher"]:
        tested = f"Fisher's exact p {_p(pair['p'])}, {_p(pair['p_holm'])} after Holm's correction"
        console.print(f"  {pair['a']} against {pair['b']}: {tested}")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Texts on the left, numbers on the right; numbers are never broken."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        text = name in ("arm", "metric", "comparison")
        table.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
