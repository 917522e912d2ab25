"""The page of one run, or of several side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from cct.metrics import STAGES, SUMMARY, Curve, among, curves, is_count

from .fidelity import fidelity_section
from .page import Report, Section, Table, facts
from .read import Run, read_run
from .svg import Series, lines, number, stacked
from .tokens import Pane, token_view

SAMPLES = 12


def runs_report(folders: Sequence[Path]) -> Report:
    """One run, or several side by side. Raises ReportError where a folder is not a run folder."""
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    numbers = summary(runs, names)
    sections = [Section("Learning curves", _curves(runs, names)), Section("Numbers", _legend() + numbers.html())]
    tables = {"Numbers": numbers}
    if view := _tokens(runs, names):
        turns = any("turn" in response for run in runs for response in run.tokens)
        sections.append(Section("Credit by token and turn" if turns else "Credit by token", view))
    if found := [(name, run.fidelity) for name, run in zip(names, runs, strict=True) if run.fidelity is not None]:
        section, tables["Fidelity of credit"] = fidelity_section(found, named=len(runs) > 1)
        sections.append(section)
    if any(run.samples for run in runs):
        sections.append(
            Section("Samples", "".join(_samples(run, name, len(runs) > 1) for name, run in zip(names, runs, strict=True)))
        )
    recipes = "".join(
        f"<details><summary>{escape(run.name)}/recipe.yaml</summary><pre>{escape(run.written)}</pre></details>" for run in runs
    )
    sections.append(Section("Recipe", recipes))
    title = runs[0].recipe["name"] if len(runs) == 1 else " and ".join(names)
    return Report(title, "".join(_lead(run) for run in runs), sections, tables)


def summary(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """First, last, least, greatest and mean of the metrics that matter, as they stand in metrics.jsonl, warm-up left out."""
    rows = []
    written = [name for run in runs for name in run.metrics]
    for metric in among(SUMMARY, written):
        for name, run in zip(names, runs, strict=True):
            values = [y for y in run.series(metric, warm_up=False)[1] if math.isfinite(y)]
            if values and (metric in run.metrics or not is_count(metric)):
                told = (values[0], values[-1], min(values), max(values), sum(values) / len(values))
                label = (metric, name) if len(runs) > 1 else (metric,)
                rows.append([*label, *map(precise, told)])
    columns = ["metric", *(["run"] if len(runs) > 1 else []), "first", "last", "least", "greatest", "mean"]
    return Table(columns, rows, texts=2 if len(runs) > 1 else 1)


def precise(x: float) -> str:
    """Four significant digits, which is what tables give."""
    return f"{x:,.0f}" if abs(x) >= 10_000 else f"{x:.4g}"


def _legend() -> str:
    return '<p class="note">Of iterations after the warm-up; each metric is defined in docs/runs.md.</p>'


def _names(runs: Sequence[Run]) -> list[str]:
    """Labels that distinguish the runs: the recipes' names, or the folders if the names are equal."""
    names = [str(run.recipe["name"]) for run in runs]
    return names if len(set(names)) == len(names) else [run.name for run in runs]


def _lead(run: Run) -> str:
    training, parts = run.recipe["training"], run.parts
    accuracy = run.series("eval/accuracy")
    size = f"{training['prompts_per_iteration']} \N{MULTIPLICATION SIGN} {training['responses_per_prompt']} responses"
    last = max((event["iteration"] for event in run.events), default=0)
    pairs = {
        "run": run.name,
        **parts,
        "seed": str(run.recipe["seed"]),
        "iterations": f"{last} of {training['iterations']}, {size} each",
        "time": _duration(sum(run.series("time/iteration")[1]) + sum(run.series("time/evaluate")[1])),
    }
    if accuracy[1]:
        pairs["held-out accuracy"] = f"{number(accuracy[1][0])} → {number(accuracy[1][-1])}"
    return facts(pairs)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def chart(curve: Curve, series: Sequence[Series], **options: Any) -> str:
    """A metric over iterations."""
    options |= {"y_label": curve.unit, "y_range": curve.range, "least_span": curve.least_span, "zero": curve.zero}
    return lines(curve.caption, series, x_label="iteration", **options)


def _curves(runs: Sequence[Run], names: Sequence[str]) -> str:
    warm_up = [run.recipe["training"].get("critic_warmup", 0) for run in runs]
    shade = 0.5 if any(warm_up) else None
    iterations = [float(event["iteration"]) for run in runs for event in run.events]
    span = min(iterations), max(iterations)  # of every chart, so that they can be compared
    charts = []
    for metric, curve in curves(name for run in runs for name in run.metrics).items():
        series = []
        for colour, (name, run) in enumerate(zip(names, runs, strict=True)):
            x, y = run.series(metric)
            if x:
                low = high = None
                if metric == "gate/mean" and len(runs) == 1:
                    spread = run.series("gate/std")[1]
                    low, high = [a - b for a, b in zip(y, spread, strict=True)], [a + b for a, b in zip(y, spread, strict=True)]
                series.append(Series(name, x, y, low, high, metric.startswith("eval/"), colour))
        if not series:
            continue
        charts.append(
            chart(
                curve,
                series,
                x_range=span,
                shade_to=shade,
                note="Band: one standard deviation over tokens." if series[0].low is not None else "",
            )
        )
    for name, run in zip(names, runs, strict=True):
        x = run.series("time/iteration")[0]
        events = [event for event in run.events if "time/iteration" in event]
        stages = {s: [float(event.get(f"time/{s}", 0.0)) for event in events] for s in STAGES}
        if any(map(any, stages.values())):
            caption = "Time per stage" + (f", {name}" if len(runs) > 1 else "")
            charts.append(stacked(caption, x, stages, x_label="iteration", y_label="s"))
    note = "<p class=note>Grey: the critic's warm-up, before the first update of the policy.</p>" if shade else ""
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def _tokens(runs: Sequence[Run], names: Sequence[str]) -> str:
    shown = [(name, run) for name, run in zip(names, runs, strict=True) if run.tokens]
    if not shown:
        return ""
    blocks: list[tuple[str, list[Pane]]] = []
    if len(shown) == 1:
        for response in shown[0][1].tokens:
            blocks.append(
                (
                    _heading(response),
                    [Pane(name, response, name, f"{name} {response['iteration']}") for name in response["credit"]],
                )
            )
    else:
        for responses in zip(*(run.tokens for _, run in shown), strict=False):
            panes = []
            for (name, _), response in zip(shown, responses, strict=True):
                transport = next(iter(response["credit"]))
                iteration, reward = response["iteration"], number(response["reward"])
                heading = f"{name}: {transport}, iteration {iteration}, reward {reward}"
                panes.append(Pane(heading, response, transport, f"{name} {iteration}"))
            blocks.append(("", panes))
    intro = (
        '<p class="note">Sampled responses of the first and of the last stored iteration; of each prompt one that scored '
        "highest and one that scored lowest. Blue is positive, orange negative, green large; point at a token for its "
        "numbers.</p>"
    )
    if any("turn" in response for _, run in shown for response in run.tokens):
        intro += (
            '<p class="note">An episode is one conversation. Boxes are the policy\'s turns, each with the mean over its tokens '
            "and the turn's reward; what stands in grey between them the policy only read.</p>"
        )
    return intro + token_view(blocks, "by")


def _heading(response: dict) -> str:
    turns = len(response.get("turns", ()))
    how = f", {turns} turn{'s' * (turns != 1)}" if turns else ""
    how += "" if response["finished"] else ", cut by a limit" if turns else ", cut by the length limit"
    return f"<b>iteration {response['iteration']}</b>, reward <b>{number(response['reward'])}</b>{how}"


def _samples(run: Run, name: str, named: bool) -> str:
    if not run.samples:
        return ""
    numbers = sorted({sample["iteration"] for sample in run.samples})
    chosen = [s for s in run.samples if s["iteration"] == numbers[-1]][:SAMPLES]
    earlier = [s for s in run.samples if s["iteration"] == next((n for n in numbers if n > 0), numbers[0])][:SAMPLES]
    tables = []
    for title, some, is_open in (("last", chosen, True), ("first", earlier, False)):
        rows = "".join(
            f'<tr><td class="text">{escape(s["prompt"])}</td><td class="text">{_said(s)}</td>'
            f'<td class="n">{number(s["reward"])}</td><td class="n">{number(s["advantage"])}</td>'
            f"<td>{'yes' if s['finished'] else 'no'}</td></tr>"
            for s in some
        )
        head = "".join(
            f'<th scope="col"{kind}>{column}</th>'
            for column, kind in (
                ("prompt", ""),
                ("response", ""),
                ("reward", ' class="n"'),
                ("mean advantage", ' class="n"'),
                ("ended by itself", ""),
            )
        )
        whose = f"{escape(name)}, " if named else ""
        tables.append(
            f"<details{' open' if is_open else ''}><summary>{whose}{title} iteration ({some[0]['iteration']})</summary>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
        )
    return "".join(tables if len(numbers) > 1 else tables[:1])


def _said(sample: dict[str, Any]) -> str:
    """The response, or the turns of an episode with what was observed between them."""
    turns = sample.get("turns")
    if not turns:
        return escape(sample["response"])
    every = []
    for number_of, turn in enumerate(turns, 1):
        rewards = ", ".join(f"{name} {number(x)}".strip() for name, x in turn["rewards"].items())
        facts = [] if turn["finished"] else ["cut"]
        facts += [] if turn["state"] is None else [f"state {turn['state']}"]
        facts += [*([f"reward {rewards}"] if rewards else []), f"turn {number_of}"]
        every.append(
            f'<div class="turn"><div class="beside">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</div>'
            f"{escape(turn['text']) or '∅'}</div>"
        )
        if turn["observation"]:
            every.append(f'<div class="observed">{escape(turn["observation"])}</div>')
    return "".join(every)
