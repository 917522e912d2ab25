"""Studies: what a file says, which cells it makes, how they are run, killed and gone on with, what their files come to."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from cct.loading import load_recipe
from cct.policy import WARM_START_SEED
from cct.recipe import RecipeError
from cct.tools.study.command import command
from cct.tools.study.runner import submit_cells, works_of, write_recipes
from cct.tools.study.study import Cell, load_study, look_at_data
from cct.tools.study.summary import summarise, write

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
SHIPPED = sorted((RECIPES / "studies").glob("*.yaml"))

TINY = f"""
name: tiny
base: {RECIPES}/gae.yaml
arms:
  gae: {{training: {{critic_warmup: 1, critic_epochs: 1}}}}
  grpo: {{base: {RECIPES}/grpo.yaml}}
common:
  policy: {{hidden_size: 32, intermediate_size: 32, layers: 2, heads: 2, kv_heads: 1, warm_start: {{steps: 3, batch_size: 4}}}}
  generation: {{max_new_tokens: 8}}
  task: {{steps: 2, held_out_size: 8}}
  training: {{iterations: 2, checkpoint_every: 1, prompts_per_iteration: 4, responses_per_prompt: 4, minibatch_size: 8}}
  evaluation: {{every: 1}}
seeds: [0, 1]
compare: [[gae, grpo]]
jobs: 2
"""


def study_file(folder: Path, changes: str = "", text: str = TINY) -> Path:
    """A study file, with keys of its top level replaced."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(text) | (yaml.safe_load(changes) or {}), sort_keys=False))
    return path


def problems(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_study(path)
    return str(caught.value)


# --- the file ---------------------------------------------------------------------------------
def test_a_cell_is_its_arm_under_its_setting_laid_over_the_base(tmp_path):
    changes = """
    factors:
      rate: {slow: {training: {learning_rate: 1.0e-4}}, fast: {training: {learning_rate: 1.0e-3}}}
      clip: {tight: {geometry: {clip_low: 0.1}}, wide: null}
    threads: 3
    """
    study, recipes = load_study(study_file(tmp_path, changes))
    assert study.settings == ["slow-tight", "slow-wide", "fast-tight", "fast-wide"] and len(recipes) == 2 * 4 * 2
    recipe = recipes[Cell("gae", "fast-tight", 1)]
    assert (recipe.name, recipe.seed, recipe.training.threads) == ("gae-fast-tight", 1, 3)
    assert (recipe.training.learning_rate, recipe.geometry.clip_low, recipe.geometry.clip_high) == (1e-3, 0.1, 0.2)
    assert (recipe.training.critic_warmup, recipe.training.iterations, recipe.critic.use) == (1, 2, "standard")
    grpo = recipes[Cell("grpo", "slow-wide", 0)]
    assert (grpo.transport.use, grpo.critic, grpo.geometry.clip_low) == ("grpo", None, 0.2)  # its own base
    assert [cell.seed for cell in study.cells] == [0] * 8 + [1] * 8  # whole seeds first


def test_factors_without_arms_make_the_arms(tmp_path):
    path = tmp_path / "square.yaml"
    path.write_text(
        f"name: square\nbase: {RECIPES}/compo.yaml\nseeds: [3]\n"
        "factors:\n"
        "  transport: {fixed: {transport: {use: gae, lam: 1.0}}, gated: {}}\n"
        "  critic: {standard: {critic: standard}, tac: {}}\n"
        "interactions: {both: [[fixed-standard, fixed-tac], [gated-standard, gated-tac]]}\n"
    )
    study, recipes = load_study(path)
    parts = {cell.name: (recipe.transport.use, recipe.critic.use) for cell, recipe in recipes.items()}
    assert study.settings == [""] and parts == {
        "fixed-standard": ("gae", "standard"),
        "fixed-tac": ("gae", "tac"),
        "gated-standard": ("comp_gae", "standard"),
        "gated-tac": ("comp_gae", "tac"),
    }


def test_set_changes_a_study(tmp_path):
    study, recipes = load_study(study_file(tmp_path), ["seeds=[7]", "arms.gae.training.epochs=2", "jobs=1"])
    assert (study.jobs, [cell.seed for cell in recipes]) == (1, [7, 7])
    assert [recipe.training.epochs for recipe in recipes.values()] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("arms: {}", "give arms or factors"),
        ("seeds: [0, 0]", "a seed occurs twice"),
        ("seeds: []", "seeds: "),
        ("sedes: [1]", "did you mean 'seeds'"),
        ("compare: [[gae, gorp]]", "did you mean 'grpo'"),
        ("factors: {rate: {}}", "factor 'rate' has no level"),
        ("arms: {a: {}, a-b: {}}\nfactors: {f: {b-c: {}, c: {}}}\ncompare: []", "two cells would have the name 'a-b-c'"),
        ("base: nope.yaml", "nope.yaml: no such file"),
        ("base: null", "no recipe to start from"),
        ("arms: {gae: {transport: {use: gae, lamb: 1.0}}, grpo: {transport: grpo}}", "did you mean 'lam'"),
        ("arms: {gae: {}, grpo: {transport: grpo}}", "no use for a critic"),
        ("threads: 2\narms: {gae: {training: {threads: 1}}}\ncompare: []", "training.threads is 1"),
        ("evaluate: {samples: 4, ks: [8]}", "pass@8 needs at least 8 samples"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_it_runs(tmp_path, changes, says):
    assert says in problems(study_file(tmp_path, changes))


def test_a_problem_of_an_arm_is_named_with_its_line(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(TINY.replace("critic_epochs: 1", "critic_epoch: 1"))
    assert f"cell gae: {path}, line 5: training.critic_epoch: no key is called" in problems(path)


@pytest.mark.parametrize(
    ("layer", "differs"),
    [
        ("task: {steps: 3}", "task"),
        ("policy: {layers: 3}", "policy"),
        ("training: {responses_per_prompt: 8}", "training.responses_per_prompt"),
    ],
)
def test_what_is_compared_within_seeds_must_share_warm_start_prompts_and_streams(tmp_path, layer, differs):
    text = f"{{name: a, base: {RECIPES}/compo.yaml, seeds: [0], arms: {{one: {{}}, other: {{{layer}}}}}}}"
    load_study(study_file(tmp_path, "", text))  # side by side, but not compared
    square = "interactions: {square: [[one, other], [one, one]]}"
    for compared in ("compare: [[one, other]]", square):
        assert f"compared within seeds but differ in {differs}:" in problems(study_file(tmp_path, compared, text))


def test_what_is_evaluated_and_demonstrated_is_found_before_the_first_cell(tmp_path):
    path = study_file(tmp_path)
    _, recipes = load_study(path)
    look_at_data(recipes)
    task, warm_start = recipes[Cell("grpo", "", 1)].task, recipes[Cell("grpo", "", 1)].policy.warm_start
    (text, _), *_ = task.demonstrations(1 + WARM_START_SEED, warm_start.batch_size, 1)
    files = {"path": tmp_path / "other.jsonl", "held_out_path": tmp_path / "shown.jsonl"}
    for file, problem in zip(files.values(), ("1+1=", text), strict=True):
        file.write_text(json.dumps({"prompt": problem, "answer": "1"}) + "\n")
    data = yaml.safe_load(path.read_text())
    data["common"]["evaluation"]["frozen"] = {"shown": {"use": "jsonl"} | {key: str(file) for key, file in files.items()}}
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(RecipeError, match="cell gae seed 1: evaluation.frozen.shown: 1 evaluation problems"):
        look_at_data(load_study(path)[1])


# --- what is shipped --------------------------------------------------------------------------
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_cell_of_a_shipped_study_is_valid(path):
    study, recipes = load_study(path)
    assert study.name == path.stem and len(recipes) == len(study.cells) > 0
    look_at_data(recipes)


FIVE = {"grpo", "gae", "gae_tac", "comp_gae_standard", "compo"}


def test_the_critic_at_the_group_s_level_is_the_only_difference():
    for name in ("sample_limited", "level"):
        _, recipes = load_study(RECIPES / "studies" / f"{name}.yaml")
        for plain in ("gae_tac", "compo"):
            here = {cell.seed: recipe for cell, recipe in recipes.items() if cell.arm == plain}
            for seed, recipe in here.items():
                other = recipes[Cell(plain.replace("_tac", "") + "_level", "", seed)]
                assert (other.critic.use, other.critic.of) == ("group_level", recipe.critic)
                assert other.model_copy(update={"critic": recipe.critic, "name": recipe.name}) == recipe


@pytest.mark.parametrize("name", ["compo", "sample_limited", "reasoning_gym"])
def test_the_five_arms_are_the_shipped_recipes_on_equal_terms(name):
    study, recipes = load_study(RECIPES / "studies" / f"{name}.yaml")
    assert set(study.arm_names) - {"gae_level", "compo_level"} == FIVE and len(study.seeds) >= 5
    for cell, recipe in recipes.items():
        if cell.arm not in FIVE:
            continue
        alone = load_recipe(RECIPES / f"{cell.arm}.yaml")
        for part in ("critic", "geometry"):
            assert getattr(recipe, part) == getattr(alone, part), part
        tuned = {} if recipe.critic is None else {"lam": recipe.transport.lam}
        assert recipe.transport == alone.transport.model_copy(update=tuned)
    first = next(iter(recipes.values()))
    for recipe in recipes.values():  # but for the arms' own rates, all spend the same
        assert (recipe.task, recipe.policy, recipe.generation) == (first.task, first.policy, first.generation)
        assert recipe.evaluation == first.evaluation and recipe.training.iterations == first.training.iterations
        assert recipe.critic is None or (recipe.training.critic_warmup, recipe.training.critic_epochs) == (
            recipes[Cell("compo", "", 0)].training.critic_warmup,
            recipes[Cell("compo", "", 0)].training.critic_epochs,
        )


def test_every_arm_is_tuned_over_as_many_settings_on_a_seed_that_no_report_uses():
    critics, grpo = (load_study(RECIPES / "studies" / f"{name}.yaml")[0] for name in ("tuning", "tuning_grpo"))
    assert set(critics.arm_names) == {"gae", "gae_tac", "comp_gae_standard", "compo"}
    assert len(critics.settings) == len(grpo.arm_names) and critics.seeds == grpo.seeds
    for path in SHIPPED:
        if not path.stem.startswith("tuning"):
            assert not set(load_study(path)[0].seeds) & set(critics.seeds), path


def test_the_controls_keep_the_gate_that_they_are_controls_of():
    study, recipes = load_study(RECIPES / "studies" / "controls.yaml")
    first = {arm: recipes[Cell(arm, "", study.seeds[0])] for arm in study.arm_names}
    ungated = first.pop("gae_tac")
    assert ungated.transport.use == "gae" and ungated.critic == first["compo"].critic
    assert all(recipe.training == ungated.training for recipe in first.values())
    gates = {arm: recipe.transport.gate for arm, recipe in first.items()}
    own = gates.pop("compo")
    assert gates.pop("reversed") == own.model_copy(update={"sign": -1})
    assert {arm: gate.use for arm, gate in gates.items()} == {arm: arm for arm in gates}
    assert set(gates) == {"constant", "shuffle", "position", "swap", "random"} and all(g.of == own for g in gates.values())


def test_the_grid_has_twelve_settings():
    study, recipes = load_study(RECIPES / "studies" / "stability.yaml")
    knobs = {(r.training.learning_rate, r.geometry.clip_low, r.geometry.clip_high, r.training.epochs) for r in recipes.values()}
    assert len(study.settings) == len(knobs) == 12 and study.arm_names == ["compo", "gae", "grpo"]


# --- runs -------------------------------------------------------------------------------------
# Judging stops at the N-th response of a process until the gate file is there, where a blocked process leaves its number.
GATED = """
import os, time
from pathlib import Path
HERE, judged = Path(__file__).parent, 0
def score(prompt, response):
    global judged
    judged += 1
    if judged == STOP and not (HERE / "gate").exists():
        (HERE / f"blocked-{os.getpid()}").touch()
        while not (HERE / "gate").exists():
            time.sleep(0.05)
    return float(sum(map(ord, prompt.text + response.text)) % 2)
"""
BROKEN = "def score(prompt, response):\n    raise RuntimeError('the verifier is broken')\n"
INLINE = "workers: 0, time_limit: null"


def cct_study(path: Path, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CCT_CACHE": str(path.parent / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "cct.cli", "study", str(path), "--studies", str(path.parent), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=path.parent,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )


def blocked(folder: Path, count: int, runner: subprocess.Popen) -> list[int]:
    """Numbers of the processes that wait at the gate, when there are so many."""
    while len(found := list(folder.glob("blocked-*"))) < count:
        assert runner.poll() is None, runner.communicate()[0]
        time.sleep(0.05)
    return [int(path.name.split("-")[1]) for path in found]


def works(path: Path, *overrides: str):
    study, recipes = load_study(path, overrides)
    return study, {(work.cell.arm, work.cell.seed): work for work in works_of(study, recipes, path.parent / study.name)}


def commands(work) -> list[str]:
    """What was run for a cell: `run`, `run --resume`, `eval`."""
    lines = [line.split() for line in work.beside("log").read_text().splitlines() if line.startswith("$ cct ")]
    return [" ".join(word for word in line[2:4] if "/" not in word) for line in lines]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_and_runs_nothing_twice(tmp_path):
    # 8 held-out problems, 16 responses, 8 problems, and the next response is the second iteration's.
    (tmp_path / "gated.py").write_text(GATED.replace("STOP", "33"))
    data = yaml.safe_load(TINY) | {"compare": [["grpo", "rloo"]]}
    data["arms"] = {name: {"base": f"{RECIPES}/{name}.yaml"} for name in ("grpo", "rloo")}
    data["common"]["evidence"] = yaml.safe_load(f"[{{use: python, path: gated.py, {INLINE}}}]")
    path = study_file(tmp_path, "", yaml.safe_dump(data, sort_keys=False))

    runner = cct_study(path)
    first = blocked(tmp_path, 2, runner)[0]
    runner.kill()
    runner.communicate()
    _, cells = works(path)
    states = {place: work.state for place, work in cells.items()}
    assert sorted(states.values()) == ["running", "running", "waiting", "waiting"]  # they outlive the runner
    assert {seed for (_, seed), state in states.items() if state == "running"} == {0, 1}  # no two with one warm start
    os.kill(first, signal.SIGKILL)
    while not (cut := [place for place, work in cells.items() if work.state == "cut"]):
        time.sleep(0.05)
    (tmp_path / "gate").touch()

    runner = cct_study(path)
    output = runner.communicate()[0]
    assert runner.returncode == 0, output
    study, cells = works(path)
    assert {work.state for work in cells.values()} == {"done"}
    for place, work in cells.items():
        assert commands(work) == (["run", "run --resume"] if [place] == cut else ["run"])
        assert [(e["iteration"], "eval/accuracy" in e) for e in work.events] == [(0, True), (1, True), (2, True)]
    assert sum("warm start" in work.beside("log").read_text() for work in cells.values()) == 2  # once for each seed
    for seed in study.seeds:  # one warm start, one stream of prompts, one stream of samples
        one, other = (
            [json.loads(line) for line in (cells[arm, seed].folder / "samples.jsonl").read_text().splitlines()]
            for arm in ("grpo", "rloo")
        )
        assert cells["grpo", seed].events[0]["eval/accuracy"] == cells["rloo", seed].events[0]["eval/accuracy"]
        text = lambda samples, *keys: [[s["iteration"], *(s[key] for key in keys)] for s in samples]  # noqa: E731
        assert text(one, "prompt") == text(other, "prompt")
        same = [[s for s in samples if s["iteration"] == 1] for samples in (one, other)]
        assert text(same[0], "response") == text(same[1], "response")
    assert {len(work.events) for work in cells.values()} == {3}
    logs = {place: work.beside("log").read_text() for place, work in cells.items()}
    runner = cct_study(path)
    assert "differences within seeds" in runner.communicate()[0] and runner.returncode == 0
    assert logs == {place: work.beside("log").read_text() for place, work in cells.items()}

    for work in cells.values():  # begun by a version of cct that did not know this knob yet
        held = work.folder / "recipe.yaml"
        held.write_text("".join(line for line in held.read_text().splitlines(True) if "critic_window" not in line))
    assert command("status", path, [], tmp_path) == 0

    data["common"]["training"]["learning_rate"] = 1e-3
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(
        RecipeError, match=r"cells/grpo/0: was started with another recipe \(training.learning_rate: 0.0002 -> 0.001\)"
    ):
        command("run", path, [], tmp_path)


def test_no_cell_starts_after_the_study_s_hours(tmp_path, capsys):
    path = study_file(tmp_path)
    assert command("run", path, ["hours=1.0e-9"], tmp_path) == 1
    assert "4 waiting of 4 cells" in (output := capsys.readouterr().out) and "cells are left" in output
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_failed_cell_stops_no_other_and_an_interrupt_ends_what_runs(tmp_path):
    (tmp_path / "gated.py").write_text(GATED.replace("STOP", "1"))
    (tmp_path / "broken.py").write_text(BROKEN)
    data = yaml.safe_load(TINY) | {"seeds": [0], "compare": []}
    data["arms"] = {
        name: {"base": f"{RECIPES}/grpo.yaml", "evidence": yaml.safe_load(f"[{{use: python, path: {name}.py, {INLINE}}}]")}
        for name in ("broken", "gated")
    }
    path = study_file(tmp_path, "", yaml.safe_dump(data, sort_keys=False))
    runner = cct_study(path)
    (process,) = blocked(tmp_path, 1, runner)
    while not (tmp_path / "tiny/cells/broken/0.failed").exists():
        time.sleep(0.05)
    time.sleep(2)  # until the runner, which looks every now and then, has seen it too
    runner.send_signal(signal.SIGINT)
    output = runner.communicate()[0]
    assert runner.returncode == 130 and not alive(process)
    assert "failed  broken seed 0: exit code 1" in output and "RuntimeError: the verifier is broken" in output
    _, cells = works(path)
    assert {arm: work.state for (arm, _), work in cells.items()} == {
        "broken": "failed",
        "gated": "waiting",
    }  # nothing of it is left

    (tmp_path / "gate").touch()
    runner = cct_study(path)
    output = runner.communicate()[0]
    assert runner.returncode == 1 and "--retry" in output, output
    assert {arm: work.state for (arm, _), work in cells.items()} == {"broken": "failed", "gated": "done"}
    assert commands(cells["broken", 0]) == ["run"] and commands(cells["gated", 0]) == ["run", "run"]
    results = json.loads((tmp_path / "tiny" / "results.json").read_text())
    assert [(cell["state"], cell["stable"]) for cell in results["cells"]] == [("failed", False), ("done", True)]

    (tmp_path / "broken.py").write_text("def score(prompt, response):\n    return 1.0\n")
    runner = cct_study(path, "--retry")
    output = runner.communicate()[0]
    assert runner.returncode == 0, output
    assert {work.state for work in cells.values()} == {"done"}


def test_a_job_of_submitit_brings_a_cell_to_its_evaluation(tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "even.py").write_text(GATED.replace("STOP", "0"))
    data = yaml.safe_load(TINY) | {"seeds": [0], "compare": [], "evaluate": {"samples": 4, "ks": [1, 4]}, "executor": "slurm"}
    data["arms"] = {"grpo": {"base": f"{RECIPES}/grpo.yaml"}}
    data["common"]["evidence"] = yaml.safe_load(f"[{{use: python, path: even.py, {INLINE}}}]")
    data["common"]["evaluation"]["frozen"] = {"one": {"use": "chain_arithmetic", "steps": 1, "held_out_size": 8}}
    study, recipes = load_study(study_file(tmp_path, "", yaml.safe_dump(data)))
    cells = works_of(study, recipes, tmp_path / study.name)
    write_recipes(cells, recipes)
    for _ in range(2):  # the second time there is nothing to do
        submit_cells(study, cells, Console(quiet=True), cluster="local")
        assert [work.state for work in cells] == ["done"] and commands(cells[0]) == ["run", "eval"]
    found = cells[0].evaluation
    assert found["frozen/accuracy"] == found["frozen/one/accuracy"] and 0 < found["frozen/pass@1"] < found["frozen/pass@4"]
    assert found["eval/avg@4"] == pytest.approx(found["eval/pass@1"])
    (row,) = [row for row in summarise(study, cells)["arms"] if row["metric"] == "frozen/pass@4"]
    assert row["mean"] == found["frozen/pass@4"]


# --- what it comes to -------------------------------------------------------------------------
def test_results_and_table_of_cells_come_from_the_files(tmp_path):
    text = (
        f"name: made\nbase: {RECIPES}/grpo.yaml\nseeds: [0, 1, 2]\n"
        "arms: {grpo: {}, rloo: {transport: rloo}}\ncompare: [[rloo, grpo]]\n"
        "final_evaluations: 2\nstable: {max_drop: 0.1, max_kl: 0.05}\n"
    )
    study, cells = works(study_file(tmp_path, "", text))
    for (arm, seed), work in cells.items():
        (work.folder / "policy").mkdir(parents=True)
        gain = 0.1 * (arm == "rloo") * (seed + 1)
        kl = 0.2 if (arm, seed) == ("rloo", 2) else 0.01
        events = [
            {"iteration": 0, "eval/accuracy": 0.2},
            {"iteration": 10, "eval/accuracy": 0.4, "policy/approx_kl": kl},
            {"iteration": 20, "eval/accuracy": 0.6 + gain, "policy/approx_kl": 0.01},
        ]
        (work.folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"iteration": 3')
    measured = {"iteration": 10, "transports": {"rloo": {"bias": {"value": 0.1}}}}
    (cells["rloo", 1].folder / "fidelity.json").write_text(
        json.dumps(measured | {"source": "here", "at_positions": {"row": [1]}})
    )
    results = summarise(study, list(cells.values()))
    assert [cell["fidelity"] for cell in results["cells"] if cell["fidelity"]] == [measured]
    write(results, list(cells.values()), tmp_path / "made")
    assert json.loads((tmp_path / "made" / "results.json").read_text()) == results
    final, area = results["comparisons"]
    assert (final["metric"], final["name"], final["n"]) == ("final_accuracy", "rloo - grpo", 3)
    assert final["mean"] == pytest.approx(0.1) and area["mean"] == pytest.approx(0.05)  # of 0.05, 0.10, 0.15 at the end
    assert final["p"] == pytest.approx(final["p_holm"]) == pytest.approx(0.0742, abs=1e-4)  # t = 2 sqrt(3), 2 degrees
    assert results["stability"]["counts"] == [
        {"arm": "grpo", "stable": 3, "of": 3},
        {"arm": "rloo", "stable": 2, "of": 3},
    ]
    assert [cell["unstable"] for cell in results["cells"] if cell["unstable"]] == [["approx_kl 0.2"]]
    courses = [(row["name"], row["iteration"], row["n"], round(row["mean"], 12)) for row in results["courses"]]
    assert courses == [("rloo - grpo", 0, 3, 0.0), ("rloo - grpo", 10, 3, 0.0), ("rloo - grpo", 20, 3, 0.2)]
    assert results["courses"][-1]["high"] == pytest.approx(0.2 + 4.3027 * 0.1 / 3**0.5, abs=1e-4)
    lines = (tmp_path / "made" / "cells.csv").read_text().splitlines()
    assert len(lines) == 1 + 6 * 3 and lines[0].startswith("arm,setting,seed,iteration,eval/accuracy")
    assert lines[1].startswith("grpo,,0,0,0.2,")


def test_a_setting_of_a_grid_is_stable_if_every_seed_is(tmp_path):
    text = (
        f"name: made\nbase: {RECIPES}/grpo.yaml\nseeds: [0, 1]\narms: {{grpo: {{}}, rloo: {{transport: rloo}}}}\n"
        "factors: {rate: {slow: {training: {learning_rate: 1.0e-4}}, fast: {}}}\ncompare: [[rloo, grpo]]\n"
    )
    study, recipes = load_study(study_file(tmp_path, "", text))
    cells = works_of(study, recipes, tmp_path / "made")
    for work in cells:
        (work.folder / "policy").mkdir(parents=True)
        falls = work.cell == Cell("grpo", "fast", 1)
        accuracies = [0.2, 0.9, 0.5 if falls else 0.9]
        (work.folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"iteration": n, "eval/accuracy": x}) + "\n" for n, x in enumerate(accuracies))
        )
    results = summarise(study, cells)
    assert results["stability"]["counts"] == [{"arm": "grpo", "stable": 1, "of": 2}, {"arm": "rloo", "stable": 2, "of": 2}]
    assert {row["setting"] for row in results["comparisons"]} == {"slow", "fast"}
