"""cct from Python: train, resume, evaluate; callbacks of Lightning's and of one's own."""

import json
import re
import subprocess
import sys

import pytest
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from test_training import RECIPES, TINY, TINY_CHAIN, tiny

import cct
from cct import evaluate, resume, train
from cct.cli import main
from cct.loading import load_recipe
from cct.recipe import RecipeError
from cct.run_folder import RunFolder


class Seen(Callback):
    """The reward that a monitor would see after each iteration."""

    def __init__(self):
        self.rewards = []

    def on_train_epoch_end(self, trainer, module):
        self.rewards.append(float(trainer.callback_metrics["train/reward"]))


def test_importing_cct_imports_no_part_of_it_until_it_is_asked_for():
    code = "import cct, sys; assert 'torch' not in sys.modules and 'cct.api' not in sys.modules; assert callable(cct.train)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = cct.trian


def test_a_recipe_is_trained_resumed_and_evaluated_from_python(tmp_path, capsys):
    seen = Seen()
    run = train(tiny("grpo", "training.checkpoint_every=1"), runs=tmp_path, callbacks=[seen], quiet=True)
    events = [event for event in run.metrics if event["iteration"] > 0]
    assert run.folder == tmp_path / "grpo" / "001" and run.policy.is_dir()
    assert seen.rewards == pytest.approx([event["train/reward"] for event in events])
    assert evaluate(run)["eval/accuracy"] == events[-1]["eval/accuracy"]
    assert resume(run, ["training.iterations=3"], quiet=True) == run and run.metrics[-1]["iteration"] == 3
    assert capsys.readouterr().out == ""


def test_what_cannot_be_trained_on_is_refused_before_there_is_a_folder(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    rows = {"use": "jsonl", "path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "train.jsonl")}
    recipe = load_recipe(RECIPES / "grpo.yaml", [f"task={rows}", "policy.warm_start="])
    with pytest.raises(RecipeError, match="task: 'jsonl': 1 prompts are both in"):
        train(recipe, runs=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()


MINE = """
from pathlib import Path
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

class Mine(Callback):
    def __init__(self, into):
        self.into = into

    def on_train_end(self, trainer, module):
        Path(self.into).write_text(str(module.iteration))
"""


def test_a_recipe_names_callbacks_of_lightning_and_of_a_file(tmp_path):
    """Early stopping by a metric that is there at some iterations only, and a class of a file beside the recipe."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "recipe.yaml").write_text(
        f"base: {RECIPES / 'grpo.yaml'}\n"
        "callbacks:\n"
        "- use: lightning.pytorch.callbacks.EarlyStopping\n"
        "  arguments: {monitor: eval/accuracy, mode: max, patience: 2}\n"
        f"- {{use: './mine.py:Mine', arguments: {{into: {tmp_path / 'end'}}}}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml", [*TINY, *TINY_CHAIN, "training.iterations=9", "evaluation.every=4"])
    run = train(recipe, runs=tmp_path / "runs", quiet=True)
    assert [event["iteration"] for event in run.metrics] == [0, 1, 2, 3]  # the first is the best, and two are no better
    assert (tmp_path / "end").exists() and run.policy.is_dir()
    assert [path.stem for path in RunFolder(run.folder).checkpoints] == ["000003"]


@pytest.mark.parametrize(
    "callback, message",
    [
        ("{use: lightning.pytorch.callbacks.EarlyStoping}", "has no attribute 'EarlyStoping'"),
        ("{use: no_such_module.Mine}", "No module named 'no_such_module'"),
        ("{use: pathlib.Path}", "not a subclass of lightning.pytorch.Callback"),
        ("{use: lightning.pytorch.callbacks.EarlyStopping}", "missing 1 required positional argument: 'monitor'"),
        ("{use: Mine}", "callbacks.0.use: .*should match"),
        ("{use: ./nowhere.py:Mine}", "nowhere.py"),
    ],
)
def test_a_callback_that_cannot_be_made_is_one_message(callback, message, tmp_path, capsys):
    sets = [part for one in (*TINY, *TINY_CHAIN, f"callbacks=[{callback}]") for part in ("--set", one)]
    assert main(["run", str(RECIPES / "grpo.yaml"), "--runs", str(tmp_path), *sets]) == 2
    found = capsys.readouterr().err
    assert found.startswith("error: ") and found.count("\n") == 1
    assert re.search(message, found), found
    assert not list(tmp_path.rglob("recipe.yaml"))


FAULTY = """
import sys
from pathlib import Path
from lightning import Callback

class Broken(Exception):
    def __str__(self):
        raise ValueError

class Faulty(Callback):
    def __init__(self, kind):
        self.kind = kind

    def on_train_epoch_end(self, trainer, module):
        if self.kind == "raises":
            raise KeyError("\\x1b[31m")
        if self.kind == "leaves":
            sys.exit(0)
        if self.kind == "speechless":
            raise Broken

    def state_dict(self):
        return {"state": Path("p") if self.kind == "keeps a path" else 1}
"""


@pytest.mark.parametrize(
    "kind, said",
    [
        ("raises", r"faulty.py:Faulty': KeyError: '\\x1b\[31m'"),
        ("leaves", "faulty.py:Faulty': SystemExit: 0"),
        ("speechless", r"faulty.py:Faulty': Broken: \(its message cannot be made\)"),
        ("keeps a path", "faulty.py:Faulty': its state_dict cannot be read back from a checkpoint.*pathlib"),
    ],
)
def test_a_callback_that_fails_in_a_run_is_named(kind, said, tmp_path, capsys):
    (tmp_path / "faulty.py").write_text(FAULTY)
    callback = json.dumps({"use": str(tmp_path / "faulty.py:Faulty"), "arguments": {"kind": kind}})
    sets = [part for one in (*TINY, *TINY_CHAIN, f"callbacks=[{callback}]") for part in ("--set", one)]
    assert main(["run", str(RECIPES / "grpo.yaml"), "--runs", str(tmp_path), *sets]) == 1
    said_on = capsys.readouterr().err.splitlines()[0]
    assert re.match(f"stopped: callback '.*{said}", said_on), said_on


def test_a_callback_that_lightning_refuses_beside_cct_s_settings_is_one_message(tmp_path, capsys):
    progress = "callbacks=[{use: lightning.pytorch.callbacks.RichProgressBar}]"
    sets = [part for one in (*TINY, *TINY_CHAIN, progress) for part in ("--set", one)]
    assert main(["run", str(RECIPES / "grpo.yaml"), "--runs", str(tmp_path), *sets]) == 1
    assert capsys.readouterr().err.startswith("stopped: callbacks: MisconfigurationException: ")


def test_lightning_keeps_the_best_checkpoint_beside_the_run_s_own(tmp_path):
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="train/reward", mode="max", save_top_k=1)
    run = train(tiny("grpo", "evidence.0.pattern=(.)", "training.iterations=4"), runs=tmp_path, callbacks=[best], quiet=True)
    rewards = [event["train/reward"] for event in run.metrics if event["iteration"] > 0]
    assert float(best.best_model_score) == pytest.approx(max(rewards)) and len(list((tmp_path / "best").iterdir())) == 1
    assert [path.stem for path in RunFolder(run.folder).checkpoints] == ["000004"]


def test_the_notebook_runs(tmp_path):
    """Its code cells in order, in a process and a folder of their own."""
    notebook = json.loads((RECIPES.parent / "examples" / "from_python.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join([*cells, "assert len(rewards.seen) == 2 and mine.policy.is_dir()"]))
    done = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
