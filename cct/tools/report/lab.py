"""The laboratory's board, from lab.json: a forest plot of the shares, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .page import Section, Table
from .read import read_mapping
from .style import STYLE
from .svg import Interval, forest, number


def lab_section(folder: Path) -> tuple[Section, Table] | None:
    """Of a study's folder; None where no laboratory ran there."""
    if not (folder / "lab.json").is_file():
        return None
    results = read_mapping(folder / "lab.json")
    rows = [_row(task, row) for task in results["tasks"] for row in task["arms"]]
    columns = ["task", "arm", "critic", "area", "share of the headroom", "p (Holm)", "rank correlation", "right signs"]
    table = Table([*columns, "explained within", "tokens", "seconds"], rows, texts=3)
    notes = "".join(f'<p class="note">{escape(_headroom(task))}</p>' for task in results["tasks"])
    return Section("Laboratory", f'<div class="scroll">{_forest(results)}</div>{notes}{table.html()}'), table


def picture(results: Mapping[str, Any]) -> str:
    """The forest plot by itself, as an SVG file."""
    figure = _forest(results)
    if "<svg" not in figure:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>\n'
    svg = figure[figure.index("<svg") : figure.index("</svg>")] + "</svg>\n"
    head, _, rest = svg.partition(">")
    return f"{head}><style>{escape(STYLE, quote=False)}</style>{rest}"


def _forest(results: Mapping[str, Any]) -> str:
    """The shares; the headrooms where nothing but its two ends ran."""
    shares = [
        (f"{task['task']}: {row['arm']}", row["share"]) for task in results["tasks"] for row in task["arms"] if row["share"]
    ]
    headrooms = [(f"{task['task']}: headroom", task["headroom"]) for task in results["tasks"]]
    caption = "Share of the headroom that is taken" if shares else "Headroom: area of exact credit minus GRPO's"
    rows = []
    for label, found in shares or headrooms:
        value, low, high = (math.nan if (x := found[end]) is None else x for end in ("mean", "low", "high"))
        rows.append(Interval(label, value, low, high))
    return forest(caption, rows, x_label="0: GRPO; 1: exact credit" if shares else "area under the learning curve")


def _headroom(task: Mapping[str, Any]) -> str:
    found = task["headroom"]
    warning = "" if task["clear"] else " It is smaller than its interval, so these runs cannot tell credit apart."
    ends = f"[{number(found['low'])}, {number(found['high'])}]"
    return f"{task['task']}: headroom {number(found['mean'])} {ends}, {found['n']} seeds.{warning}"


def _row(task: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    share, fidelity = row["share"], row["fidelity"]
    taken = "\N{EN DASH}" if share is None else f"{number(share['mean'])} [{number(share['low'])}, {number(share['high'])}]"
    thirds = [", ".join(number(x) for x in fidelity[name].values()) for name in ("rank_correlation", "right_signs")]
    cost = [number(row[name]) for name in ("explained_within", "tokens", "seconds")]
    named, p = [task["task"], row["arm"], row["critic"]], number(share and share["p_holm"])
    return [*named, number(row["area"]["mean"]), taken, p, *thirds, *cost]
