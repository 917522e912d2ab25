"""The pages: what they hold, that text is escaped, that numbers are those of the files; and charts by hand."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from conversations import conversations
from hypothesis import given
from hypothesis import strategies as st
from test_training import run, tiny

from cct.cli import main
from cct.run_folder import read_lines
from cct.tools.report.page import Table
from cct.tools.report.read import ReportError, read_run
from cct.tools.report.runs import precise
from cct.tools.report.svg import Interval, Series, _apart, forest, heat_map, lines, number, slopes, stacked, ticks
from cct.tools.report.tokens import Pane, token_view
from cct.tools.report.write import write_report

VOID = {"meta", "input", "br"}
NASTY = "<script>alert('x')</script> & \"</style>|"


class Page(HTMLParser):
    """Tags with their attributes, text by tag, and whether everything that was opened was closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def count(self, tag: str, kind: str | None = None) -> int:
        return sum(t == tag and (kind is None or kind in a.get("class", "").split()) for t, a in self.tags)


def parsed(path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.count("script")
    for tag, attributes in page.tags:  # nothing is fetched: no source, and links within the page only
        assert "src" not in attributes and tag not in ("link", "img", "iframe")
        assert attributes.get("href", "#").startswith("#")
    assert "@import" not in text and "url(" not in text
    return page


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two iterations of CompPO and one of critic warm-up."""
    return run(tiny(), tmp_path_factory.mktemp("runs"))


# --- runs -----------------------------------------------------------------------------------------
def test_the_page_of_a_run_has_its_parts_and_the_numbers_of_its_metrics(finished, capsys):
    assert main(["report", str(finished), "--transport", "{use: gae, lam: 0.5}"]) == 0
    assert capsys.readouterr().out.split() == ["wrote", str(finished / "report.html"), "wrote", str(finished / "report.md")]
    page = parsed(finished / "report.html")
    assert page.texts["h1"] == ["compo"]
    assert page.texts["h2"] == ["Learning curves", "Numbers", "Credit by token", "Samples", "Recipe"]
    captions = page.texts["figcaption"]
    for caption in ("Held-out accuracy, greedy", "Explained variance of the Monte-Carlo return", "Time per stage"):
        assert caption in captions
    assert page.count("svg") == len(captions) and all(a["aria-label"] for t, a in page.tags if t == "svg")
    assert "".join(page.texts["pre"]) == (finished / "recipe.yaml").read_text()
    events = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    table = [
        re.split(r"\s*\|\s*", line.strip("| ")) for line in (finished / "report.md").read_text().splitlines() if "/" in line
    ]
    assert [row[0] for row in table][:2] == ["eval/accuracy", "train/reward"]
    for name, *told in table:
        values = [e[name] for e in events if name in e and (e["iteration"] > 0 or name.startswith("eval/"))]
        expected = (values[0], values[-1], min(values), max(values), sum(values) / len(values))
        assert told == [precise(x) for x in expected], name
        assert set(told) <= set(page.texts["td"])


def test_tokens_carry_the_credit_of_both_transports(finished):
    main(["report", str(finished), "--transport", "{use: gae, lam: 0.5}"])
    responses = json.loads((finished / "tokens.json").read_text())["responses"]
    own, other = responses[0]["credit"]
    assert (own, other) == ("comp_gae (the run's own)", "{use: gae, lam: 0.5}")
    page = parsed(finished / "report.html")
    assert page.count("div", "response") == len(responses) and page.count("div", "pane") == 2 * len(responses)
    titles = [a["title"] for t, a in page.tags if t == "span" and "t" in a.get("class", "").split()]
    assert len(titles) == 2 * sum(len(r["tokens"]) for r in responses)
    first = responses[0]
    at = first["credit"][own]
    expected = (("A", at["advantage"][0]), ("δ", at["delta"][0]), ("g", at["gate"][0]), ("V", first["value"][0]))
    assert titles[0] == f"token 0: {first['tokens'][0]!r}  " + "  ".join(f"{name} {number(x)}" for name, x in expected)
    assert first["credit"][other]["gate"] is None
    assert sum(t == "input" and a["type"] == "radio" for t, a in page.tags) == 4


def test_what_replay_saved_is_shown_until_there_are_newer_rollouts(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    assert main(["replay", str(folder), "--transport", "grpo", "--save"]) == 0
    assert main(["report", str(folder)]) == 0
    assert parsed(folder / "report.html").texts["h4"][:2] == ["comp_gae (the run's own)", "grpo"]
    later = (folder / "tokens.json").stat().st_mtime + 10
    os.utime(folder / "rollouts" / "2.safetensors", (later, later))
    main(["report", str(folder)])
    assert set(parsed(folder / "report.html").texts["h4"]) == {"comp_gae (the run's own)"}


def test_text_of_a_model_is_text(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    sample = {"iteration": 2, "prompt": NASTY, "response": NASTY, "reward": 0.0, "advantage": 0.0, "finished": True}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    main(["replay", str(folder), "--save"])
    tokens = json.loads((folder / "tokens.json").read_text())
    tokens["responses"][0] |= {"prompt": NASTY, "tokens": [NASTY] * len(tokens["responses"][0]["tokens"])}
    (folder / "tokens.json").write_text(json.dumps(tokens))
    page = parsed(write_report([folder])[0])
    assert page.texts["td"].count(NASTY) == 2
    assert page.texts["span"].count(NASTY) == 1 + len(tokens["responses"][0]["tokens"])
    (folder / "recipe.yaml").write_text(
        (folder / "recipe.yaml").read_text().replace("name: compo", f"name: '{NASTY}'".replace("('x')", ""))
    )
    assert parsed(write_report([folder])[0]).texts["h1"][0].startswith("<script>")


def test_several_runs_stand_side_by_side(finished, tmp_path):
    other = run(tiny("grpo"), tmp_path)
    assert main(["report", str(finished), str(other), "-o", str(tmp_path / "both.html")]) == 0
    page = parsed(tmp_path / "both.html")
    assert page.texts["h1"] == ["compo and grpo"] and page.count("dl", "facts") == 2 and page.count("details") == 6
    assert page.count("path", "line") > page.count("svg", "chart") - 2  # lines of both where both have the metric
    assert "| eval/accuracy | grpo |" in (tmp_path / "both.md").read_text()
    assert any(heading.startswith("grpo: grpo") for heading in page.texts["h4"])


def test_a_run_that_goes_on_and_one_without_rollouts_have_a_page(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "rollouts")
    (folder / "tokens.json").unlink(missing_ok=True)
    (folder / "samples.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "train/re')
    assert main(["report", str(folder)]) == 0
    assert parsed(folder / "report.html").texts["h2"] == ["Learning curves", "Numbers", "Recipe"]


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        ({}, [], "neither a run (recipe.yaml, metrics.jsonl) nor a study (results.json)"),
        ({"recipe.yaml": "name: a", "metrics.jsonl": ""}, [], "no events yet"),
        ({"recipe.yaml": "name: a", "metrics.jsonl": "x\n{}\n"}, [], "metrics.jsonl, line 1: not JSON"),
        ({"recipe.yaml": "name: a", "metrics.jsonl": "{}"}, ["--transport", "gae"], "needs a run's stored rollouts"),
        ({"results.json": "{}"}, [], "not the results of a study"),
    ],
)
def test_what_has_no_page_is_said(tmp_path, capsys, files, arguments, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_of_another_version_is_said(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "fidelity.json").write_text('{"transports": {}}')
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "a file lacks 'truth', so another version" in capsys.readouterr().err


def test_a_page_is_html(finished, tmp_path):
    with pytest.raises(ReportError, match=r"must end in \.html"):
        write_report([finished], tmp_path / "page.pdf")


def test_metrics_that_are_no_numbers_break_the_line(finished, tmp_path):
    (tmp_path / "recipe.yaml").write_text((finished / "recipe.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "train/reward": NaN}\n{"iteration": 2, "train/reward": 0.5}\n')
    x, y = read_run(tmp_path).series("train/reward")
    assert x == [1, 2] and math.isnan(y[0]) and y[1] == 0.5
    assert read_lines(tmp_path / "none.jsonl") == []


# --- episodes -------------------------------------------------------------------------------------
def texts_of(page: str, kind: str) -> list[str]:
    """Of each element of a class, its text."""
    return [re.sub("<[^>]*>", " ", one) for one in re.findall(rf'<(?:p|div) class="{kind}">(.*?)</(?:p|div)>', page, re.DOTALL)]


def test_an_episode_is_a_conversation(tmp_path):
    folder = conversations(tmp_path / "run").path
    assert main(["report", str(folder), "--transport", "turn_return"]) == 0
    page, text = parsed(folder / "report.html"), (folder / "report.html").read_text()
    assert "Credit by token and turn" in page.texts["h2"] and ", 2 turns, cut by a limit" in page.texts["h3"]
    assert page.count("div", "pane") == 4 and page.count("div", "turn") == 8 + 2  # two of each pane, and those of the sample
    titles = [a["title"] for t, a in page.tags if t == "span" and "t" in a.get("class", "").split()]
    assert len(titles) == 2 * (4 + 4) and not any("not trained" in title for title in titles)  # what is observed is no token
    assert " ".join(texts_of(text, "beside")[0].split()) == "mean A 1.25 reward 0.25 hint 0.25 turn 1"
    fork, observed = texts_of(text, "text-of observed")[0], texts_of(text, "text-of observed")[2]
    assert (
        "history rewritten, 3 tokens read again" in fork and fork.endswith(" &gt;") and observed.split() == ["observed", "&lt;"]
    )
    mean = re.search(r'<span class="mean advantage" style="background:([^"]*)">mean A 1.25<', text)
    token = re.search(r'<span class="t" style="--a:([^"]*)"', text)
    assert mean[1] == token[1] == "rgb(var(--pos)/0.80)"  # a turn is coloured on the scale of its tokens


def test_a_long_episode_is_cut_and_its_turns_are_counted_whole():
    response = {
        "prompt": "p", "tokens": ["a"] * 700, "trained": [True] * 700, "value": None, "turn": [0] * 10 + [1] * 690,
        "turns": [{"reward": 0.0, "rewards": {}}] * 2, "forks": [],
        "credit": {"x": {"advantage": [1.0] * 355 + [3.0] * 345, "gate": None, "delta": None}},
    }  # fmt: skip
    shown = token_view([("", [Pane("x", response, "x", "x")])], "by")
    assert Page(shown).count("div", "turn") == 2 and shown.count('<span class="t"') == 600
    assert "… 100 more tokens" in shown and ">mean A 2<" in shown


def test_samples_and_numbers_show_turns(tmp_path):
    folder = conversations(tmp_path / "run").path
    page, text = parsed(write_report([folder])[0]), (folder / "report.html").read_text()
    assert [one.split() for one in texts_of(text, "beside")] == [
        ["state", "1-15/2", "reward", "hint", "0.25", "turn", "1"],
        ["cut", "reward", "1", "turn", "2"],
    ]
    assert texts_of(text, "observed") == ["&lt;b&gt;"] and "∅" in text
    assert {"Turns of an episode", "Reward of an episode: hint", "Failures of the environment: errors"} <= set(
        page.texts["figcaption"]
    )
    table = (folder / "report.md").read_text()
    assert "| episode/reward/hint | 0.25 |" in table and "| environment/errors | 0 | 3 | 0 | 3 | 1.5 |" in table


# --- studies --------------------------------------------------------------------------------------
ARMS = ("gae", "gae_tac", "comp_gae_standard", "compo")


def study(folder, settings=("",)):
    """What `cct study` writes: each arm's final accuracy is 0.5, and 0.1 more for each step towards compo."""
    folder.mkdir()
    mean = {arm: 0.5 + 0.1 * number for number, arm in enumerate(ARMS)}
    row = lambda value, width=0.05: {"mean": value, "low": value - width, "high": value + width, "n": 2, "p": 0.01}  # noqa: E731
    cells = [
        {
            "arm": arm, "setting": setting, "seed": seed, "state": "done", "iterations": 2, "final_accuracy": mean[arm],
            "area": 0.5, "explained_variance": 0.25 if arm == "compo" else None, "stable": arm != "gae" or seed == 0,
            "unstable": [], "evaluation": {},
        }
        for seed in (0, 1) for setting in settings for arm in ARMS
    ]  # fmt: skip
    square = "gates x critic: (compo - comp_gae_standard) - (gae_tac - gae)"
    compared = [
        {"kind": "difference", "name": "compo - gae", "arms": ["compo", "gae"], **row(0.3)},
        {"kind": "interaction", "name": square, "arms": list(ARMS), **row(0.0)},
    ]
    results = {
        "study": "a < b",
        "level": 0.95,
        "final_evaluations": 1,
        "stable_rule": {"max_drop": 0.1, "max_kl": 0.1},
        "cells": cells,
        "arms": [
            {"metric": metric, "arm": arm, "setting": setting, **row(mean[arm])}
            for metric in ("final_accuracy", "area")
            for setting in settings
            for arm in ARMS
        ],
        "comparisons": [
            {"metric": "final_accuracy", "setting": setting, **one, "p_holm": 0.02} for setting in settings for one in compared
        ],
        "courses": [
            {"name": "compo - gae", "setting": setting, "iteration": n, "mean": mean, "low": low, "high": high, "n": 2}
            for setting in settings
            for n, mean, low, high in ((0, 0.0, None, None), (1, 0.1, -2.5, 2.7), (2, 0.3, 0.25, 0.35))
        ],
        "stability": {
            "counts": [{"arm": arm, "stable": 1 if arm == "gae" else 2, "of": 2} for arm in ARMS],
            "fisher": [{"a": "compo", "b": "gae", "p": 1.0, "p_holm": 1.0}],
        },
    }
    (folder / "results.json").write_text(json.dumps(results))
    with (folder / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "setting", "seed", "iteration", "eval/accuracy", "critic/explained_variance"])
        for cell in cells:
            for iteration in (0, 1, 2):
                explained = 0.1 * iteration if cell["arm"] == "compo" else ""
                writer.writerow(
                    [cell["arm"], cell["setting"], cell["seed"], iteration, 0.1 * iteration + cell["seed"], explained]
                )
    return folder


def test_the_page_of_a_study(tmp_path):
    folder = study(tmp_path / "study")
    assert main(["report", str(folder)]) == 0
    page = parsed(folder / "report.html")
    assert page.texts["h1"] == ["Study a < b"]
    assert page.texts["h2"] == ["Learning curves", "Arms", "Differences within seeds", "Interactions", "Stability"]
    assert page.count("path", "band") == 4 + 1 + 1  # accuracy of every arm, explained variance of one, and a difference
    assert "compo \N{MINUS SIGN} gae" in page.texts["figcaption"]
    ticks_of_differences = page.texts["text"][-page.texts["text"][::-1].index("difference of held-out accuracy") - 1 - 5 :]
    assert "\N{MINUS SIGN}1.0" in ticks_of_differences and not any("2" in told for told in ticks_of_differences[:5])
    told = page.texts["td"]
    assert "0.800 [0.750, 0.850]" in told and "+0.300 [+0.250, +0.350]" in told and "1 of 2" in told
    assert page.count("circle", "clear") == 1 and page.count("circle", "unclear") == 1  # 0.3 leaves out 0, 0.0 does not
    assert page.texts["figcaption"].count("gates x critic") == 1
    markdown = (folder / "report.md").read_text()
    assert "| compo | 2/2 | 0.800 [0.750, 0.850] |" in markdown and "| compo against gae |  | 1.0000 | 1.0000 |" in markdown


def test_a_grid_has_a_heat_map(tmp_path):
    page = parsed(write_report([study(tmp_path / "study", ("lr1", "lr2"))])[0])
    heat = [a for t, a in page.tags if t == "td" and "heat" in a.get("class", "")]
    styles = [a["style"] for a in heat]
    assert styles[:8].count("--heat:50%") == 2  # gae, one seed of two
    assert page.texts["td"].count("2/2") >= 6
    first = page.texts["td"].index("0.50")
    assert page.texts["td"][first : first + 8] == ["0.50"] * 2 + ["0.60"] * 2 + ["0.70"] * 2 + ["0.80"] * 2
    assert styles[8:] == [f"--heat:{n}%" for n in (50, 50, 60, 60, 70, 70, 80, 80)]


ONE, NOTHING = {"value": 0.5, "low": 0.25, "high": 0.75}, {"value": None, "low": None, "high": None}
SCORES = {"critic": "tac", "rank_correlation": ONE, "sign_agreement": NOTHING, "scale": ONE, "bias": ONE, "variance": ONE}
FIDELITY = {
    "critic": "tac", "iteration": 2, "positions": 10, "prompts": 4, "continuations": 8, "below": 0.95, "undecided_tokens": 30,
    "truth": {"ceiling": ONE, "split_half": ONE, "surely_not_0": 0, "p_below": 0.01, "variance": 0.1},
    "transports": {"comp_gae (the run's own)": SCORES | {"explained_variance": 0.125}},
}  # fmt: skip


def test_a_study_shows_the_fidelity_of_its_cells(tmp_path):
    folder = study(tmp_path / "study")
    results = json.loads((folder / "results.json").read_text())
    next(cell for cell in results["cells"] if (cell["arm"], cell["seed"]) == ("compo", 1))["fidelity"] = FIDELITY
    (folder / "results.json").write_text(json.dumps(results))
    page = parsed(write_report([folder])[0])
    assert page.texts["h2"][-1] == "Fidelity of credit" and "compo, seed 1" in page.texts["text"]
    assert {"0.5 [0.25, 0.75]", "0.125"} <= set(page.texts["td"]) and "compo, seed 1" in page.texts["td"]


def test_a_run_shows_its_fidelity(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "fidelity.json").write_text(json.dumps(FIDELITY | {"transports": {"gae": SCORES, "grpo": SCORES}}))
    page = parsed(write_report([folder])[0])
    assert "Fidelity of credit" in page.texts["h2"] and {"gae", "grpo", "ceiling"} <= set(page.texts["text"])
    assert "| compo | grpo | tac | \N{EN DASH} | 0.5 [0.25, 0.75] | \N{EN DASH} |" in (folder / "report.md").read_text()


def test_a_study_is_named_alone(tmp_path):
    folder = study(tmp_path / "study")
    with pytest.raises(ReportError, match="name it alone"):
        write_report([folder, folder])


# --- charts ---------------------------------------------------------------------------------------
def test_ticks_are_round_and_within():
    assert ticks(0, 1) == {0: "0.00", 0.25: "0.25", 0.5: "0.50", 0.75: "0.75", 1: "1.00"}
    assert ticks(-0.13, 0.21) == {-0.1: "\N{MINUS SIGN}0.1", 0: "0.0", 0.1: "0.1", 0.2: "0.2"}
    assert ticks(3, 3) == {3: "3"} and [*ticks(0, 12, 5)] == [0, 2.5, 5, 7.5, 10]
    assert [*ticks(2.8701, 2.8709).values()] == ["2.8702", "2.8704", "2.8706", "2.8708"]
    assert [*ticks(0, 30_000, 3).values()] == ["0", "10,000", "20,000", "30,000"]
    assert [*ticks(0, 4e-6, 2).values()] == ["0", "2.0e\N{MINUS SIGN}06", "4.0e\N{MINUS SIGN}06"]


def test_numbers_for_people():
    told = [number(x) for x in (0.12345, -2.0, 12345.6, 1e-7, math.nan, math.inf, None)]
    assert told == ["0.123", "\N{MINUS SIGN}2", "12,346", "1e\N{MINUS SIGN}07", "\N{EN DASH}", "∞", "\N{EN DASH}"]


def test_a_line_goes_where_its_numbers_are():
    drawn = lines("c", [Series("s", [0, 1, 2, 3], [0.0, 1.0, math.nan, 0.5])], x_label="x", y_label="y", y_range=(0, 1))
    (path,) = re.findall(r'class="line c0" stroke-dasharray="" d="([^"]*)"', drawn)
    assert path == "M52.0 204.0L157.3 24.0M368.0 114.0"  # a plot of 316 x 180 at (52, 24); the gap is one


def test_bars_stand_on_each_other():
    drawn = stacked("c", [1, 2], {"a": [1.0, 1.0], "b": [1.0, 3.0]}, x_label="x", y_label="s")
    bars = [
        tuple(map(float, bar))
        for bar in re.findall(r'<rect class="bar c\d" x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"', drawn)
    ]
    unit = 180 / 4.2  # the highest bar, 4, leaves a twentieth of room
    assert bars[0] == pytest.approx((204 - unit, unit), abs=0.1) and bars[3] == pytest.approx(
        (204 - 4 * unit, 3 * unit), abs=0.1
    )


def test_an_interval_without_end_runs_to_the_edge():
    drawn = forest("c", [Interval("a", 1.0, 0.5, math.inf), Interval("none", math.nan, 0, 0)], x_label="x")
    (whisker,) = re.findall(r'class="whisker" d="M([\d.]+) [\d.]+H([\d.]+)"', drawn)
    assert float(whisker[1]) == 90 + 510 - 160 and "none" not in drawn and "[0.5, ∞]" in drawn


@given(st.lists(st.one_of(st.floats(0, 200), st.just(math.nan)), max_size=6))
def test_labels_are_moved_apart_in_their_order(heights):
    moved = _apart(heights)
    assert [math.isnan(y) for y in moved] == [math.isnan(y) for y in heights]
    told = sorted((y, x) for y, x in zip(heights, moved, strict=True) if not math.isnan(y))
    assert all(b - a >= 13 - 1e-6 for (_, a), (_, b) in pairwise(told))
    if all(b - a >= 13 for (a, _), (b, _) in pairwise(told)):
        assert all(x == y for y, x in told)


def test_slopes_and_empty_charts():
    point = lambda label, y: Interval(label, y, y - 0.1, y + 0.1)  # noqa: E731
    drawn = slopes("c", [(point("a", 0), point("b", 1)), (point("c", 0), point("<d>", 3))], y_label="y")
    assert Page(drawn).count("circle") == 4 and "&lt;d&gt;" in drawn
    empty = Interval("a", math.nan, math.nan, math.nan)
    for chart in (
        lines("c", [Series("s", [1], [math.nan])], x_label="x", y_label="y"),
        forest("c", [empty], x_label="x"),
        slopes("c", [(empty, empty)], y_label="y"),
        stacked("c", [1], {"a": [0.0]}, x_label="x", y_label="y"),
    ):
        assert "no data" in chart and not Page(chart).count("svg")
    assert "\N{EN DASH}" in heat_map("c", ["r"], ["k"], [[math.nan]], ["\N{EN DASH}"], low=0, high=1)


def test_colours_of_tokens_by_hand():
    response = {
        "prompt": "p", "tokens": ["a", "b", "\n"], "trained": [True, True, False], "value": [0.0, 1.0, 9.0],
        "credit": {"x": {"advantage": [1.0, -0.5, None], "gate": None, "delta": None}},
    }  # fmt: skip
    shown = token_view([("", [Pane("x", response, "x", "x")])], "by")
    styles = re.findall(r'<span class="t[ m]*" style="([^"]*)"', shown)
    assert styles == [
        "--a:rgb(var(--pos)/0.80);--v:rgb(var(--seq)/0.00)",
        "--a:rgb(var(--neg)/0.40);--v:rgb(var(--seq)/0.75)",
        "",  # not trained on: neither coloured nor counted in the scale
    ]


def test_markdown_keeps_its_columns():
    assert Table(["a", "b"], [["x|y\nz", "1"]]).markdown() == "| a | b |\n|---|---:|\n| x\\|y z | 1 |\n"
