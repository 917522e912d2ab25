"""The table of metrics: complete, and what is shown of it and where."""

import ast
import re
from pathlib import Path

import pytest
from conversations import conversations
from test_training import run, tiny

from cct import metrics
from cct.run_folder import RunFolder
from cct.training.run import closing_table

ROOT = Path(__file__).parents[1]
SHOWN = {*metrics.TERMINAL, *metrics.CLOSING, *metrics.SUMMARY, *metrics.CELLS, *metrics.EXPLAINED, *metrics.CURVES}


def explained(name: str) -> bool:
    return any(each.covers(name) for each in metrics.METRICS)


def test_a_placeholder_stands_for_the_name_of_a_part():
    assert explained("evidence/errors/exact_match") and explained("eval/timeouts/python")
    assert not explained("evidence/errors/") and not explained("evidence/errors") and not explained("train/rewards")


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("compo", ["training.critic_warmup=1", "generation.overlong=drop"]),
        ("compo", ["transport={use: vineppo, samples: 2}", "critic=", "training.critic_warmup=0"]),
        ("remax", ["logging.statistics=[entropy]"]),
        ("grpo", ["geometry.kl_coef=0.1", "geometry.correction=truncate", "training.minibatch_size=16"]),
        ("grpo", ["geometry={use: clip_cov}", "geometry.kl_in_reward=0.1"]),
        ("guess_number_grpo", []),
        ("grpo", ["generation.lag=1", "geometry.correction=mask", "training.refill=1"]),
    ],
)
def test_every_metric_that_a_run_writes_is_explained(recipe, changes, tmp_path):
    events = RunFolder(run(tiny(recipe, *changes), tmp_path)).metrics
    written = {name for event in events for name in event} - {"iteration"}
    assert "train/reward" in written
    assert {name for name in written if not explained(name)} == set()


def test_every_metric_that_the_loop_names_is_explained():
    """Names in the source, those that no run of the test above writes included."""
    groups = "|".join(sorted({name.split("/")[0] for each in metrics.METRICS for name in each.names.split(", ")}))
    written = {
        node.value
        for folder in ("training", "policy")
        for path in (ROOT / "cct" / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(rf"({groups})/\w+", node.value)
    }
    assert {"train/entropy", "engine/probe_gap", "branch/tokens"} <= written
    assert {name for name in written if not explained(name)} == set()


def test_what_is_shown_is_explained():
    assert {name for name in SHOWN if not explained(name)} == {"left"}  # of the terminal alone
    assert all(explained(f"time/{stage}") for stage in metrics.STAGES)


def test_a_name_with_a_placeholder_stands_for_what_was_written():
    written = ["episode/reward/win", "train/reward", "episode/reward/hint", "episode/reward/win"]
    assert metrics.among(["train/reward", "train/x", "episode/reward/NAME"], written) == [
        "train/reward", "train/x", "episode/reward/win", "episode/reward/hint"
    ]  # fmt: skip
    charts = metrics.curves(written)
    assert charts["episode/reward/hint"].caption == "Reward of an episode: hint" and charts["train/reward"].unit == "reward"
    assert "environment/errors" not in charts


def test_the_closing_table_shows_episodes_and_failures(tmp_path):
    table = closing_table(conversations(tmp_path / "run"), 1.0)
    rows = dict(zip(table.columns[0]._cells, zip(*(column._cells for column in table.columns[1:]), strict=True), strict=True))
    assert rows["episode/turns"] == ("2", "2", "2") and rows["episode/reward/hint"] == ("0.25", "0.25", "0.25")
    assert rows["environment/errors"] == ("0", "3", "1.5")  # an iteration without failures counts


def test_no_other_list_of_metrics_is_left():
    """Whoever shows metrics takes their names from the table: elsewhere at most two of them stand in a row."""
    for path in [*(ROOT / "cct" / "tools").rglob("*.py"), *(ROOT / "cct" / "training").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                assert len([name for name in names if name in SHOWN]) <= 2, f"{path}:{node.lineno}"


def test_the_docs_hold_the_table():
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    assert metrics.markdown() in page, "python -c 'from cct.metrics import markdown; print(markdown())'"
