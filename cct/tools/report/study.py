"""The page of a study, from its results.json and cells.csv."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cct.metrics import CURVES, OUTCOMES

from .fidelity import fidelity_section
from .page import Report, Section, Table, facts
from .read import ReportError
from .runs import chart
from .svg import Interval, Series, forest, heat_map, lines, number, slopes


def is_study(folder: Path) -> bool:
    return (folder / "results.json").is_file()


def study_report(folder: Path) -> Report:
    """Raises ReportError where results.json or cells.csv is missing or not what a study writes."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        with (folder / "cells.csv").open(encoding="utf-8", newline="") as file:
            cells = list(csv.DictReader(file))
        arms = list(dict.fromkeys(row["arm"] for row in results["arms"]))
        settings = list(dict.fromkeys(row["setting"] for row in results["arms"]))
        seeds = sorted({cell["seed"] for cell in results["cells"]})
    except (OSError, ValueError, KeyError) as error:
        raise ReportError(
            f"{folder}: not the results of a study ({type(error).__name__}: {error}); `cct study` writes them"
        ) from None
    grid = settings != [""]
    done = sum(cell["final_accuracy"] is not None for cell in results["cells"])
    lead = facts(
        {
            "arms": str(len(arms)),
            **({"settings": str(len(settings))} if grid else {}),
            "seeds": ", ".join(map(str, seeds)),
            "cells done": f"{done} of {len(results['cells'])}",
            "final accuracy": f"mean of the last {results['final_evaluations']} evaluations",
        }
    )
    sections = [Section("Learning curves", _curves(arms, cells, grid))]
    every = list(dict.fromkeys(row["metric"] for row in results["arms"]))
    main = [metric for metric in every if metric in OUTCOMES]
    others = [metric for metric in every if metric not in main]
    tables = {"Arms": _arms(results, arms, settings, seeds, main)}
    more = ""
    if others:
        tables["Further metrics"] = _further(results, arms, settings, others)
        more = f"<details><summary>Further metrics</summary>{tables['Further metrics'].html()}</details>"
    note = (
        f'<p class="note">Means over seeds, [{results["level"]:.0%} t interval]. Explained variance: of the Monte-Carlo '
        "return, by what the transport read.</p>"
    )
    sections.append(Section("Arms", tables["Arms"].html() + note + more))
    if results["comparisons"]:
        tables["Differences within seeds"] = whole = _differences(results, grid, every)
        some = _differences(results, grid, main)
        rest = f"<details><summary>All metrics</summary>{whole.html()}</details>" if others else ""
        sections.append(Section("Differences within seeds", _forests(results, main) + _courses(results) + some.html() + rest))
    if squares := _interactions(results):
        sections.append(Section("Interactions", f'<div class="charts">{squares}</div>'))
    tables["Stability"] = _counts(results)
    rule = results["stable_rule"]
    told = (
        f'<p class="note">Stable: no failure, no NaN, no fall of the held-out accuracy of more than {number(rule["max_drop"])} '
        f"below the best evaluation before, approx_kl at most {number(rule['max_kl'])} nats.</p>"
    )
    heat = _grid(results, arms, settings) if grid else ""
    sections.append(Section("Stability", heat + tables["Stability"].html() + told))
    if found := _fidelity(results):
        section, tables["Fidelity of credit"] = fidelity_section(found, named=True)
        sections.append(section)
    return Report(f"Study {results['study']}", lead, sections, tables)


def _estimate(row: Mapping[str, Any], sign: str = "") -> str:
    if row["mean"] is None:
        return "\N{EN DASH}"
    ends = "" if row["low"] is None else f" [{row['low']:{sign}.3f}, {row['high']:{sign}.3f}]"
    return f"{row['mean']:{sign}.3f}{ends}".replace("-", "\N{MINUS SIGN}")


def _p(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else "<0.0001" if value < 1e-4 else f"{value:.4f}"


def _interval(label: str, row: Mapping[str, Any], note: str = "") -> Interval:
    value, low, high = (math.nan if (x := row[end]) is None else x for end in ("mean", "low", "high"))
    return Interval(label, value, low, high, note)


def _called(metric: str) -> str:
    return OUTCOMES[metric][1] if metric in OUTCOMES else metric


def _named(arm: str, setting: str) -> str:
    return f"{arm}, {setting}" if setting else arm


def _curves(arms: Sequence[str], cells: Sequence[Mapping[str, str]], grid: bool) -> str:
    charts = []
    for metric, curve in CURVES.items():
        series = []
        for colour, arm in enumerate(arms):
            at: dict[float, list[float]] = {}
            for row in cells:
                if row["arm"] == arm and row.get(metric) and (int(row["iteration"]) > 0 or metric.startswith("eval/")):
                    at.setdefault(float(row["iteration"]), []).append(float(row[metric]))
            if at:
                x = sorted(at)
                y = [sum(at[i]) / len(at[i]) for i in x]
                low, high = [min(at[i]) for i in x], [max(at[i]) for i in x]
                series.append(Series(arm, x, y, low, high, metric.startswith("eval/"), colour))
        if series:
            charts.append(chart(curve, series))
    over = "seeds and settings" if grid else "seeds"
    return f'<div class="charts">{"".join(charts)}</div><p class="note">Lines: mean over {over}. Bands: least to greatest.</p>'


def _arms(
    results: Mapping[str, Any], arms: Sequence[str], settings: Sequence[str], seeds: Sequence[int], metrics: Sequence[str]
) -> Table:
    at = {(row["metric"], row["arm"], row["setting"]): row for row in results["arms"]}
    rows = []
    for setting in settings:
        for arm in arms:
            here = [cell for cell in results["cells"] if (cell["arm"], cell["setting"]) == (arm, setting)]
            explained = [cell["explained_variance"] for cell in here if cell["explained_variance"] is not None]
            judged = [cell["stable"] for cell in here if cell["stable"] is not None]
            rows.append(
                [
                    _named(arm, setting),
                    f"{at['final_accuracy', arm, setting]['n']}/{len(seeds)}",
                    *(_estimate(at[metric, arm, setting]) for metric in metrics),
                    f"{sum(explained) / len(explained):.2f}".replace("-", "\N{MINUS SIGN}") if explained else "\N{EN DASH}",
                    f"{sum(judged)}/{len(judged)}",
                ]
            )
    return Table(["arm", "seeds", *map(_called, metrics), "explained variance", "stable"], rows)


def _further(results: Mapping[str, Any], arms: Sequence[str], settings: Sequence[str], metrics: Sequence[str]) -> Table:
    at = {(row["metric"], row["arm"], row["setting"]): row for row in results["arms"]}
    columns = [(arm, setting) for setting in settings for arm in arms]
    rows = [[metric, *(_estimate(at[metric, arm, setting]) for arm, setting in columns)] for metric in metrics]
    return Table(["metric", *(_named(*column) for column in columns)], rows)


def _differences(results: Mapping[str, Any], grid: bool, metrics: Sequence[str]) -> Table:
    rows = [
        [
            _called(row["metric"]),
            row["name"],
            *([row["setting"]] if grid else []),
            _estimate(row, "+"),
            str(row["n"]),
            _p(row["p"]),
            _p(row["p_holm"]),
        ]
        for row in results["comparisons"]
        if row["metric"] in metrics
    ]
    columns = ["metric", "comparison", *(["setting"] if grid else []), "difference", "seeds", "p", "p (Holm)"]
    return Table(columns, rows, texts=3 if grid else 2)


def _forests(results: Mapping[str, Any], metrics: Sequence[str]) -> str:
    plots = []
    compared = {row["metric"] for row in results["comparisons"]}
    for metric in (metric for metric in metrics if metric in compared):
        rows = [
            _interval(_named(_short(row), row["setting"]), row) for row in results["comparisons"] if row["metric"] == metric
        ]
        plots.append(
            forest(
                f"Difference of {_called(metric)}",
                rows,
                x_label=f"difference within seeds, {results['level']:.0%} t interval",
            )
        )
    note = '<p class="note">Filled: the interval leaves out 0. Holm corrects p for all comparisons of a metric.</p>'
    return "".join(f'<div class="scroll">{plot}</div>' for plot in plots) + note


def _courses(results: Mapping[str, Any]) -> str:
    """A small chart for each comparison: they would hide each other in one."""
    pairs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in results.get("courses", ()):
        pairs.setdefault((row["name"], row["setting"]), []).append(row)
    ends = [row[end] for rows in pairs.values() for row in rows for end in ("low", "high", "mean") if row[end] is not None]
    over = max(-1.0, min([-0.02, *ends])), min(1.0, max([0.02, *ends]))  # of all of them
    charts = []
    for (name, setting), rows in pairs.items():
        mean, low, high = ([math.nan if row[end] is None else row[end] for row in rows] for end in ("mean", "low", "high"))
        series = Series(name, [float(row["iteration"]) for row in rows], mean, low, high, True)
        caption = _named(name.replace(" - ", " \N{MINUS SIGN} "), setting)
        charts.append(
            lines(caption, [series], x_label="iteration", y_label="difference of held-out accuracy", y_range=over, zero=True)
        )
    if not charts:
        return ""
    note = f"Bands: {results['level']:.0%} t interval at each evaluation separately."
    return f'<div class="charts">{"".join(charts)}</div><p class="note">{note}</p>'


def _short(row: Mapping[str, Any]) -> str:
    """A difference as it is written, an interaction by what stands before its formula."""
    return row["name"] if row["kind"] == "difference" else f"{row['name'].partition(': ')[0]} (interaction)"


def _interactions(results: Mapping[str, Any]) -> str:
    at = {(row["metric"], row["arm"], row["setting"]): row for row in results["arms"]}
    plots = []
    for row in results["comparisons"]:
        if row["kind"] == "interaction" and row["metric"] == "final_accuracy":
            name, _, formula = row["name"].partition(": ")
            a, b, c, d = (_interval(arm, at["final_accuracy", arm, row["setting"]]) for arm in row["arms"])
            plots.append(
                slopes(
                    _named(name, row["setting"]),
                    [(a, b), (c, d)],
                    y_label=_called("final_accuracy"),
                    note=f"{formula}: {_estimate(row, '+')}. Parallel lines: no interaction.",
                )
            )
    return "".join(plots)


def _grid(results: Mapping[str, Any], arms: Sequence[str], settings: Sequence[str]) -> str:
    values, shown = [], []
    for arm in arms:
        told = {s: [c["stable"] for c in results["cells"] if (c["arm"], c["setting"]) == (arm, s)] for s in settings}
        judged = {s: [x for x in found if x is not None] for s, found in told.items()}
        values.append([sum(found) / len(found) if found else math.nan for found in judged.values()])
        shown.append([f"{sum(found)}/{len(found)}" if found else "\N{EN DASH}" for found in judged.values()])
    stable = heat_map("Stable seeds of each setting", arms, settings, values, shown, low=0.0, high=1.0)
    reached = {(row["arm"], row["setting"]): row["mean"] for row in results["arms"] if row["metric"] == "final_accuracy"}
    values = [[math.nan if reached[arm, s] is None else reached[arm, s] for s in settings] for arm in arms]
    shown = [["\N{EN DASH}" if math.isnan(x) else f"{x:.2f}" for x in row] for row in values]
    return stable + heat_map("Final held-out accuracy of each setting", arms, settings, values, shown, low=0.0, high=1.0)


def _counts(results: Mapping[str, Any]) -> Table:
    rows = [[row["arm"], f"{row['stable']} of {row['of']}", "", ""] for row in results["stability"]["counts"]]
    rows += [[f"{r['a']} against {r['b']}", "", _p(r["p"]), _p(r["p_holm"])] for r in results["stability"]["fisher"]]
    return Table(["arm or pair of arms", "stable", "Fisher's exact p", "p (Holm)"], rows)


def _fidelity(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{_named(cell['arm'], cell['setting'])}, seed {cell['seed']}", cell["fidelity"])
        for cell in results["cells"]
        if cell.get("fidelity")
    ]
