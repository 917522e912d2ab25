"""Each benchmark at a size that takes a moment: it works, and what it compares gives the same results. No time decides."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from benchmarks import concentration, gpu, growth, large, scan, sharing, step
from benchmarks.__main__ import BENCHMARKS, main, markdown, write
from benchmarks.measure import Machine, Result, Table, Target, agree, extra_memory, in_turn, number, ratios, spread
from cct.transport import gated_gae


# --- measuring ------------------------------------------------------------------------------------
def test_rounds_are_taken_in_turn_forwards_and_backwards():
    order = []
    seconds = in_turn({name: lambda name=name: order.append(name) for name in "abc"}, rounds=2, warm=1)
    assert "".join(order) == "abccbaabc"
    assert list(seconds) == list("abc") and all(len(taken) == 2 for taken in seconds.values())


def test_ratios_are_of_the_same_round_and_reported_by_their_median():
    found = ratios([2.0, 9.0, 8.0], [1.0, 3.0, 2.0])
    assert found == (2, 3, 4) and spread(found) == "3.00 [2.00..4.00]"
    assert Target("", found, least=3).reached and not Target("", found, least=3.01).reached
    assert Target("", found, most=3).reached and not Target("", found, most=2.99).reached


@pytest.mark.parametrize(
    "x, text", [(0, "0"), (0.01234, "0.0123"), (1.2, "1.20"), (12.34, "12.3"), (123.4, "123"), (12345, "12,345")]
)
def test_numbers_have_three_digits(x, text):
    assert number(x) == text


def test_results_that_differ_are_not_compared():
    with pytest.raises(AssertionError, match="the scan: .*not close"):
        agree("the scan", torch.tensor([1.0]), torch.tensor([1.1]), 1e-3)
    assert agree("the scan", torch.tensor([1.0]), torch.tensor([1.0005]), 1e-3) == pytest.approx(5e-4, rel=1e-3)


def test_extra_memory_is_what_a_function_takes_at_most():
    held = extra_memory(lambda: torch.ones(2**22).add_(1).sum())  # 16 MiB
    assert held is None or 15 * 2**20 <= held < 64 * 2**20  # the resident set is counted in pages, and some are there before


# --- the benchmarks -------------------------------------------------------------------------------
def test_scan():
    result = scan.run((scan.Shape(3, 50, least_torchrl=1, least_loop=1),), rounds=1)
    assert len(result.tables[0].rows) == 8
    peers = [target.what.split(": ")[1].split(" / ")[0] for target in result.targets]
    assert peers == [scan.LOOP, scan.TORCHRL, scan.TWICE, scan.TORCHRL, scan.TWICE]


def test_no_estimate_is_timed_whose_targets_differ_from_torchrl_s():
    def without_targets(*inputs, **knobs):
        advantages, targets = gated_gae(*inputs, **knobs)
        return advantages, torch.zeros_like(targets)

    with pytest.raises(AssertionError, match="targets of gated GAE"):
        scan.run((scan.Shape(3, 50),), rounds=1, estimator=without_targets)


def test_the_definition_skips_masked_positions():
    rewards, values, gamma = torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[0.5, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    found = scan.definition(rewards, values, torch.tensor([[True, False, True]]), gamma, 0.5)
    assert found.tolist() == [[1.25, 0, 1]]  # 2 - 1; 1 + 0.5 * 1 - 0.5 + 0.5 * 0.5 * 1


def test_the_plain_loop_is_the_definition():
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 9.0]])
    assert_close(scan.loop(a, b), torch.tensor([[0.5, -1.0, 3.0]]))


def test_concentration_and_taps():
    size = concentration.Size(2, 8, (24,), prompt=4, response=8, width=64, layers=4, vocabulary=30)
    result = concentration.run(size, rounds=1)
    assert [table.rows[0][0] for table in result.tables] == ["24", "no padding"]
    assert [target.bound for target in result.targets][-2:] == ["at most 1.2"] * 2


def test_growth():
    size = growth.Size((8, 16, 32), (1, 2, 4), rows_at=8, width=64, layers=2, vocabulary=30)
    result = growth.run(size, rounds=1)
    assert [row[0] for row in result.tables[0].rows] == ["8", "16", "32", "exponent"]
    assert [row[0] for row in result.tables[1].rows] == ["1", "2", "4", "exponent"]
    assert (result.figure is not None) == (find_spec("matplotlib") is not None)


def test_the_exponent_of_growth():
    points = {t: dict.fromkeys(growth.STAGES, growth.Point(t**2.0, None)) for t in (1, 2, 8)}
    assert growth.table("", "T", points).rows[-1] == ("exponent", *["2.00"] * len(growth.STAGES))


def test_a_whole_step():
    size = step.Size(prompts=2, responses=2, tokens=6, minibatch=2, width=32, layers=2, iterations=1)
    result = step.run(size, rounds=1)
    names = [row[0] for row in result.tables[0].rows]
    assert names[: len(step.CCT)] == list(step.CCT) and (step.TRL in names) == (find_spec("trl") is not None)
    assert bool(result.notes) == (find_spec("trl") is None)


def test_a_whole_step_over_long_prompts():
    result = step.long_prompts(24, "4x4", rounds=1, iterations=2, prompts=2)
    names = [row[0] for row in result.tables[0].rows]
    assert names[: len(step.SHARING)] == list(step.SHARING) and (step.TRL in names) == (find_spec("trl") is not None)
    assert len(result.targets) >= 2 + 2 * (step.TRL in names)


def test_sharing():
    (table,) = sharing.run(sharing.QUICK, rounds=1, width=64, layers=2).tables
    assert len(table.rows) == 1 and 0.3 < float(table.rows[0][1]) < 1


def test_what_a_gpu_is_held_to_holds_the_cpu_too(monkeypatch, tmp_path):
    monkeypatch.setenv("CCT_CACHE", str(tmp_path))
    errors, run = gpu.run(gpu.QUICK).tables
    assert {name for name, *_ in errors.rows} >= {"scan", "ppo_clip_loss", "shared prompts, gradient"}
    assert all(0 <= float(error) <= float(bound) for _, error, bound in errors.rows)
    assert len(run.rows) == 1


def test_an_error_is_found():
    one, two = torch.tensor([1.0, 100.0]), torch.tensor([1.5, 101.0])
    assert gpu.error_of(two, one) == 0.5
    assert gpu.error_of(torch.tensor([float("nan"), 1.0]), one) == gpu.error_of(one, torch.ones(3)) == float("inf")


def test_large_models_at_a_small_size():
    shape = large.Model("small", 64, 96, 4, 4, 2, rows=2, head_dim=16, vocabulary=40)
    table = large.on_device(large.Size((shape,), prompt=4, response=8, sampled=2), rounds=1).tables[0]
    assert len(table.rows) == 8 and "bfloat16" in table.title


# --- the command ----------------------------------------------------------------------------------
RESULT = Result((Table("Title", ("a", "b"), (("1", "2"),)),), (Target("x / y", (1.0, 2.0, 3.0), least=2.5),), ("A note.",))


def test_results_as_markdown():
    assert markdown(RESULT).split("\n\n") == [
        "**Title**",
        "| a | b |\n| --- | --- |\n| 1 | 2 |",
        "**Targets**",
        "| ratio | wanted | median [least..greatest] |  |\n| --- | --- | --- | --- |\n"
        "| x / y | at least 2.5 | 2.00 [1.00..3.00] | missed |",
        "A note.",
    ]


def test_results_are_written_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- scan:begin -->\nold\n<!-- scan:end -->\nafter\n")
    write(page, "scan", "new", figure="<svg/>")
    assert page.read_text() == "before\n<!-- scan:begin -->\n![scan](page-scan.svg)\n\nnew\n<!-- scan:end -->\nafter\n"
    assert (tmp_path / "page-scan.svg").read_text() == "<svg/>"
    with pytest.raises(SystemExit, match="no <!-- growth:begin"):
        write(page, "growth", "new", figure=None)


def test_the_command_prints_writes_and_tells_by_its_exit_code(tmp_path, capsys):
    benchmarks = {"scan": (lambda: RESULT, lambda: Result())}
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    page.write_text("<!-- scan:begin --><!-- scan:end -->")
    assert (
        main(["scan", "--threads", "1", "--write", str(page), "--json", str(numbers)], benchmarks) == 1
    )  # a target was missed
    assert "| x / y | at least 2.5 |" in capsys.readouterr().out
    assert "`python -m benchmarks scan` on" in page.read_text()
    found = json.loads(numbers.read_text())
    assert found["scan"]["targets"][0]["ratios"] == [1, 2, 3] and found["machine"]["versions"]["torch"] == torch.__version__
    assert main(["scan", "--quick", "--threads", "1"], benchmarks) == 0
    with pytest.raises(SystemExit):
        main(["speed"])
    assert "no benchmark speed" in capsys.readouterr().err


def test_every_benchmark_has_its_place_in_the_docs():
    page = (step.RECIPES.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [name for name in BENCHMARKS if f"<!-- {name}:begin -->" not in page or f"<!-- {name}:end -->" not in page] == []


def test_the_machine_is_named():
    machine = Machine.here()
    assert machine.cores >= 1 and math.isfinite(machine.load) and f"torch {torch.__version__}" in str(machine)
