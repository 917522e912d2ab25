"""What watches a run and changes nothing about it: loggers, evaluation sets, the best policy."""

import json
import math
import sqlite3

import pytest
import torch
from test_training import RECIPES, TINY, run, tiny
from transformers import AutoModelForCausalLM

from cct.agent.export import export
from cct.cli import main
from cct.loading import load_recipe
from cct.recipe import RecipeError
from cct.run_folder import RunFolder
from cct.watching import Evaluation

SETS = (
    "evaluation.sets={hard: {task: {use: chain_arithmetic, steps: 3, held_out_size: 4}, every: 1, samples: 2}, "
    "short: {task: {use: chain_arithmetic, steps: 2, held_out_size: 4}, evidence: [{use: length, max_tokens: 8, buffer: 4}]}}"
)


def test_further_sets_are_evaluated_by_their_own_evidence_when_they_are_due(tmp_path):
    folder = run(tiny("grpo", SETS, "training.iterations=3", "evaluation.every=2"), tmp_path)
    events = {event["iteration"]: event for event in RunFolder(folder).metrics}
    for iteration in (0, 1, 2, 3):
        assert (
            ("eval/accuracy" in events[iteration]) == (iteration in (0, 2, 3)) == ("sets/short/accuracy" in events[iteration])
        )
        assert {"sets/hard/accuracy", "sets/hard/length", "sets/hard/avg@2", "sets/hard/pass@2"} <= set(events[iteration])
    assert "sets/short/avg@2" not in events[3]


def test_sets_change_nothing_about_a_run(tmp_path):
    plain, watched = (RunFolder(run(tiny("grpo", *sets), tmp_path / str(len(sets)))) for sets in ([], [SETS]))
    for one, other in zip(plain.metrics, watched.metrics, strict=True):
        assert {key: x for key, x in other.items() if "sets/" not in key and "time" not in key and "second" not in key} == {
            key: x for key, x in one.items() if "time" not in key and "second" not in key
        }


@pytest.mark.parametrize("best_is", ["max", "min"])
def test_policy_is_that_of_the_best_iteration_whose_checkpoint_stays(best_is, tmp_path):
    sets = ["training.iterations=5", "training.keep_checkpoints=1", "evaluation.every=1"]
    folder = RunFolder(run(tiny("grpo", *sets, "evaluation.best=train/length", f"evaluation.best_is={best_is}"), tmp_path))
    lengths = {event["iteration"]: event["train/length"] for event in folder.metrics if event["iteration"] > 0}
    best = (max if best_is == "max" else min)(lengths, key=lambda n: lengths[n])  # the first of equals
    assert [int(path.stem) for path in folder.checkpoints] == sorted({best, 5})
    export(folder.path, tmp_path / "exported", best)
    wanted, found = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "exported", folder.policy))
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))


def test_a_resumed_run_knows_the_best_of_before(tmp_path):
    sets = ["training.iterations=2", "evaluation.every=1", "evaluation.best=train/length", "training.keep_checkpoints=1"]
    folder = RunFolder(run(tiny("grpo", *sets), tmp_path))
    before = {event["iteration"]: event["train/length"] for event in folder.metrics if event["iteration"] > 0}
    assert main(["run", "--resume", str(folder), "--set", "training.iterations=4"]) == 0
    lengths = before | {event["iteration"]: event["train/length"] for event in folder.metrics if event["iteration"] > 2}
    best = max(lengths, key=lambda n: lengths[n])
    assert best in [int(path.stem) for path in folder.checkpoints]
    export(folder.path, tmp_path / "exported", best)
    wanted, found = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "exported", folder.policy))
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))


def test_best_that_begins_on_resuming_is_among_the_checkpoints_that_there_are(tmp_path):
    sets = ["training.iterations=3", "training.keep_checkpoints=1", "evaluation.every=1"]
    folder = RunFolder(run(tiny("grpo", *sets), tmp_path))
    more = ["--set", "training.iterations=4", "--set", "evaluation.best=train/length"]
    assert main(["run", "--resume", str(folder), *more]) == 0
    lengths = {event["iteration"]: event["train/length"] for event in folder.metrics if event["iteration"] > 0}
    assert [int(path.stem) for path in folder.checkpoints] == ([3, 4] if lengths[3] >= lengths[4] else [4])
    assert (folder.policy / "config.json").is_file()


@pytest.mark.parametrize("best_is", ["max", "min"])
def test_what_is_no_number_is_never_best(best_is):
    knobs = Evaluation(best="x", best_is=best_is)
    events = [{"iteration": n, "x": x} for n, x in enumerate((5.0, math.nan, 2.0, 3.0, 3.0, 2.0))]
    assert knobs.best_of(events) == ((3, 3.0) if best_is == "max" else (2, 2.0))  # iteration 0 has no checkpoint
    assert knobs.best_of(events[:2]) is None


def test_failures_in_a_sampled_set_are_said_and_early_stopping_goes_on_after_a_resume(tmp_path, capsys):
    (tmp_path / "judge.py").write_text("def judge(prompt, response, iteration):\n    raise KeyError('gold')\n")
    evidence = f"evidence: [{{use: python, path: {tmp_path}/judge.py, function: judge, on_error: zero}}]"
    sets = f"evaluation.sets={{odd: {{task: {{use: chain_arithmetic, steps: 2, held_out_size: 2}}, samples: 2, {evidence}}}}}"
    stop = "{use: lightning.pytorch.callbacks.EarlyStopping, arguments: {monitor: eval/accuracy, mode: max, patience: 9}}"
    knobs = ["training.iterations=2", "evaluation.every=4", f"callbacks=[{stop}]"]
    folder = run(tiny("grpo", sets, *knobs), tmp_path)
    assert main(["run", "--resume", str(folder), "--set", "training.iterations=4"]) == 0
    events = RunFolder(folder).metrics
    assert [event["iteration"] for event in events] == [0, 1, 2, 3, 4] and "eval/accuracy" not in events[3]
    assert "sets/odd, sampled: evidence 'python' failed for 4 of 4 responses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["evaluation.best=eval/acuracy"], "no metric is called 'eval/acuracy' (did you mean 'eval/accuracy'?)"),
        (
            ["evaluation.best=sets/hardest/accuracy", SETS],
            "no set under evaluation.sets is called 'hardest' (did you mean 'hard'?)",
        ),
        (["evaluation.best=sets/hard/acuracy", SETS], "did you mean 'accuracy'"),
        (["evaluation.best=sets/short/avg@2", SETS], "no metric of sets/short is called 'avg@2'"),
        (["evaluation.best_is=min"], "evaluation.best names no metric"),
        (["evaluation.sets={hard: {}}"], "evaluation.sets.hard.task"),
        (["logging.logger=wandbb"], "logging.logger"),
    ],
)
def test_what_cannot_be_meant_is_refused(sets, message):
    with pytest.raises(RecipeError) as raised:
        load_recipe(RECIPES / "grpo.yaml", sets)
    assert message in str(raised.value)


def test_a_set_that_is_trained_on_is_refused(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "test.jsonl").write_text('{"prompt": "2+1=", "answer": "3"}\n')
    task = f"{{use: jsonl, path: {tmp_path}/train.jsonl, held_out_path: {tmp_path}/test.jsonl}}"
    same = f"{{use: jsonl, path: {tmp_path}/test.jsonl, held_out_path: {tmp_path}/train.jsonl}}"
    sets = ["policy.warm_start=", f"task={task}", f"evaluation.sets={{again: {{task: {same}}}}}"]
    arguments = [x for one in sets for x in ("--set", one)]
    assert main(["check", str(RECIPES / "grpo.yaml"), *arguments]) == 2
    assert "evaluation.sets.again: 1 evaluation problems of 'jsonl' would be trained on" in capsys.readouterr().err


# --- loggers --------------------------------------------------------------------------------------
def test_one_name_is_a_list_of_one():
    both = [load_recipe(RECIPES / "grpo.yaml", [f"logging.logger={one}"]).logging.logger for one in ("csv", "[csv]")]
    assert both[0] == both[1] and both[0][0].use == "csv"


OWN = """
from pathlib import Path
from lightning.pytorch.loggers.logger import Logger

class Lines(Logger):
    name = version = "lines"

    def __init__(self, path):
        super().__init__()
        self.path = Path(path)

    def log_hyperparams(self, params, *args, **kwargs):
        self.path.write_text(f"{params['name']}\\n")

    def log_metrics(self, metrics, step=None):
        with self.path.open("a") as file:
            file.write(f"{step} {metrics.get('train/length')}\\n")
"""


def test_a_logger_of_ones_own_gets_the_recipe_and_every_event(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    logger = f"{{use: ./mine.py:Lines, arguments: {{path: {tmp_path}/lines}}}}"
    (tmp_path / "recipe.yaml").write_text(f"base: {RECIPES}/grpo.yaml\nlogging: {{logger: [csv, {logger}]}}\n")
    folder = RunFolder(run(load_recipe(tmp_path / "recipe.yaml", [*TINY, "task.steps=2"]), tmp_path))
    first, *lines = (tmp_path / "lines").read_text().splitlines()
    assert first == "grpo" and lines == [f"{e['iteration']} {e.get('train/length')}" for e in folder.metrics]
    assert (folder.path / "logs").is_dir()


def test_a_logger_that_cannot_be_made_is_named(tmp_path):
    recipe = tiny("grpo", "logging.logger={use: csv, arguments: {nonsense: 1}}")
    with pytest.raises(RecipeError, match=r"logging\.logger: csv: .*nonsense"):
        run(recipe, tmp_path)


def test_wandb_mlflow_trackio_and_tensorboard_get_metrics_samples_and_files(tmp_path, monkeypatch):
    """All at once and without network: what each of them keeps is read back from its files."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    for name in ("wandb", "mlflow", "trackio", "tensorboard"):
        pytest.importorskip(name)
    folder = RunFolder(run(tiny("grpo", "logging.logger=[csv, tensorboard, wandb, mlflow, trackio]"), tmp_path))
    assert main(["run", "--resume", str(folder), "--set", "training.iterations=3"]) == 0
    events = {event["iteration"]: event for event in folder.metrics}

    with sqlite3.connect(folder.path / "logs/mlflow.db") as database:
        logged = dict(database.execute("select step, value from metrics where key = 'train/length'"))
        assert len(list(database.execute("select run_uuid from runs"))) == 1  # resumed in the same one
    assert logged == {n: events[n]["train/length"] for n in (1, 2, 3)}
    assert {path.name for path in (folder.path / "logs/mlflow").rglob("*") if path.is_file()} >= {"recipe.yaml", "report.html"}

    import trackio

    name = f"{folder.path.name}-{(folder.path / 'logs/id').read_text()[:8]}"
    assert [one.name for one in trackio.Api().runs("grpo") if one.name == name] == [name]
    assert list((folder.path / "logs/wandb").rglob("*.wandb"))
    assert list((folder.path / "logs").rglob("events.out.tfevents*"))
    assert json.loads(folder.samples_file.read_text().splitlines()[0])["iteration"] == 1
