"""The content of fidelity.json as a forest plot and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from .page import Section, Table
from .svg import Interval, forest, number

SCORES = {
    "rank_correlation": "rank correlation",
    "sign_agreement": "same sign",
    "scale": "scale",
    "bias": "bias",
    "variance": "variance",
}


def fidelity_section(found: Sequence[tuple[str, dict[str, Any]]], *, named: bool) -> tuple[Section, Table]:
    """From pairs (run, fidelity.json): how well each transport's credit agrees with the advantage measured by branching.

    named: rows of the plot name their run.
    """
    rows, intervals, notes = [], [], []
    for name, one in found:
        for transport, scores in one["transports"].items():
            only = len(one["transports"]) == 1
            label = name if only and named else f"{name}: {transport}" if named else transport
            intervals.append(_interval(label, scores["rank_correlation"]))
            explained = scores.get("explained_variance")
            read = [scores["critic"] or "none", "\N{EN DASH}" if explained is None else number(explained)]
            rows.append([name, transport, *read, *(_shown(scores[score]) for score in SCORES)])
        truth, at = one["truth"], one.get("at", "tokens")
        rows.append([name, "exact knowledge", "", "", _shown(truth["ceiling"]), "", "", "", ""])
        intervals.append(_interval(f"{name}: ceiling" if named else "ceiling", truth["ceiling"]))
        notes.append(
            f"{name}: after iteration {one['iteration']}, {one['positions']} of the {one[f'undecided_{at}']:,} {at} sampled "
            f"with a probability below {one['below']:g}, in responses to {one['prompts']} prompts; {one['continuations']} "
            f"continuations before and after each. The advantage differs significantly from 0 (p below {truth['p_below']:g}) "
            f"at {truth['surely_not_0']} of them; the correlation of two halves of the measurement is "
            f"{_shown(truth['split_half'])}."
        )
    table = Table(["run", "transport", "critic", "explained variance", *SCORES.values()], rows, texts=3)
    plot = forest(
        "Rank correlation of credit with the true advantage",
        intervals,
        x_label="Spearman's rank correlation, 95% interval over prompts",
        note="Ceiling: what exact advantages would reach; it is below 1 because the true advantage is measured with noise.",
    )
    told = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return Section("Fidelity of credit", f'<div class="scroll">{plot}</div>{table.html()}{told}'), table


def _interval(label: str, estimate: dict[str, float | None]) -> Interval:
    value, low, high = (math.nan if (x := estimate[end]) is None else x for end in ("value", "low", "high"))
    return Interval(label, value, low, high)


def _shown(estimate: dict[str, float | None]) -> str:
    if estimate["value"] is None:
        return "\N{EN DASH}"
    return f"{number(estimate['value'])} [{number(estimate['low'])}, {number(estimate['high'])}]"
