"""What goes wrong: a wrong recipe, a cut file, a full disk, an interrupt, a part of one's own that breaks its promise.

Each is said in a line, and leaves what was there as it was.
"""

import io
import json
import shutil
import signal
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from held import Held
from rich.console import Console
from test_cli import cct_process, python
from test_training import RECIPES, TINY, TINY_CHAIN, assert_same_tensors, final_state, run, tiny

from cct.agent.building import build
from cct.agent.export import export
from cct.agent.warm_start import warm_start
from cct.cli import main
from cct.errors import TrainingStopped
from cct.evidence import Evidence, close_workers, plain
from cct.evidence.python import PythonFunction
from cct.loading import dump_recipe, load_recipe
from cct.preflight import preflight
from cct.recipe import RecipeError
from cct.rollout import Prompt, Response
from cct.run_folder import RunFolder, read_lines
from cct.task.chain_arithmetic import ChainArithmetic
from cct.tools.plan import plan
from cct.training.judge import judge
from cct.training.processes import strategy_of
from cct.training.run import resume, start


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock and Lightning's logs, of which a start makes its own folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "logs" not in path.parts and path.name != ".lock"
    }


def line_of(path: Path, code: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if code in line)


def told(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def quiet_console() -> Console:
    return Console(file=io.StringIO(), width=500)


# --- resuming with another recipe -------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tiny("compo", "training.checkpoint_every=1"), tmp_path_factory.mktemp("finished"))


@pytest.mark.parametrize(
    "change",
    [
        "name=other",
        "seed=1",
        "policy.hidden_size=64",
        "policy.lora={rank: 2}",
        "critic.depth=1",
        "critic=standard",
        "training.critic_warmup=2",
        "training.strategy=deepspeed_1",
    ],
)
def test_a_run_is_not_gone_on_with_towards_other_weights(finished, change):
    before = content(finished)
    with pytest.raises(RecipeError, match=rf"a resumed run keeps its .*; these would change: {change.split('=')[0]}"):
        resume(finished, None, ["training.iterations=9", change], console=quiet_console())
    assert content(finished) == before


def test_the_characters_of_the_tokenizer_stay_and_the_rest_of_the_task_may_change(finished):
    other = load_recipe(finished / "recipe.yaml", ["training.iterations=9", "task.steps=3"])
    assert other.task.alphabet == load_recipe(finished / "recipe.yaml").task.alphabet
    assert main(["run", "--resume", str(finished), "--dry-run", "--set", "training.iterations=9", "--set", "task.steps=3"]) == 0

    class Letters(ChainArithmetic):
        """Other characters."""

        use = "letters"

        @property
        def alphabet(self):
            return "abc"

    with pytest.raises(RecipeError, match="these would change: task: other characters"):
        resume(finished, other.model_copy(update={"task": Letters()}), [], console=quiet_console())


def test_the_recipe_of_another_run_is_refused_in_one_line(finished, tmp_path, capsys):
    other = tmp_path / "grpo.yaml"
    other.write_text(dump_recipe(tiny("grpo", "training.iterations=9")))
    before = content(finished)
    assert main(["run", str(other), "--resume", str(finished)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "name: compo -> grpo" in errors and len(errors) < 700
    assert content(finished) == before


BROKEN = '''
from cct.critic import Critic
from cct.geometry import Geometry, geometries
from cct.rollout import Credit
from cct.statistic import TokenEntropy
from cct.transport import Gate, Transport, gates, transports
import torch

@transports.register("{name}")
class Broken(Transport):
    """Does what it is told."""
    gives: str = "error"
    def __call__(self, rollout):
        x = rollout.rewards
        if self.gives == "error":
            raise KeyError("gone")
        if self.gives == "library":
            torch.tensor([1.0]).reshape(7)
        if self.gives == "leave":
            raise SystemExit(0)
        if self.gives == "interrupt":
            raise KeyboardInterrupt
        if self.gives == "later":
            self.__dict__.setdefault("calls", []).append(1)
            if len(self.__dict__["calls"]) > 1:
                raise KeyboardInterrupt
        return {{
            "nothing": None,
            "tensor": x,
            "bool": Credit(x > 0),
            "short": Credit(x[:, 1:]),
            "targets": Credit(x, x.long()),
            "gate": Credit(x, gate=x[0]),
        }}.get(self.gives, Credit(x))

@gates.register("{name}")
class BrokenGate(Gate):
    """None, or an error."""
    raises: bool = False
    def __call__(self, rollout):
        return rollout.nothing if self.raises else None

class Wide(TokenEntropy):
    """Two numbers a token."""
    def measure(self, forward):
        return torch.stack([forward.entropy] * 2)

@gates.register("{name}_statistic")
class WithStatistic(BrokenGate):
    """Asks for a statistic that is of the wrong shape."""
    @property
    def statistics(self):
        return {{"wide": Wide()}}

@geometries.register("{name}")
class BrokenGeometry(Geometry):
    """No loss for each token, or an error."""
    raises: bool = False
    def surrogate(self, logprobs, old_logprobs, advantages, mask, marked):
        return (logprobs.nothing if self.raises else logprobs.sum()), {{}}
'''


@pytest.fixture
def broken(tmp_path):
    """(--set of the plug-in, the name of its parts, its file)"""
    path = tmp_path / f"broken_{abs(hash(str(tmp_path)))}.py"
    path.write_text(BROKEN.format(name=path.stem))
    return f"plugins=[{path}]", path.stem, path


def test_a_resumed_run_that_cannot_begin_leaves_the_folder_as_it_was(broken, tmp_path):
    sets, name, _ = broken
    folder = run(tiny("grpo"), tmp_path)
    before, console = content(folder), quiet_console()
    with pytest.raises(TrainingStopped, match=f"transport '{name}' in iteration 3: KeyError: 'gone'"):
        resume(folder, None, ["training.iterations=3", sets, f"transport={name}"], console=console)
    assert content(folder) == before and "stopped early" not in told(console)


# --- files that were cut ----------------------------------------------------------------------
@pytest.mark.parametrize("end", ['{"iteration": 2, "a', '{"iteration": 2, "a\n', "12\n", "\0\0\0", "\n"])
def test_a_last_line_that_is_not_whole_is_left_out(end, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0}\n{"iteration": 1}\n' + end)
    assert read_lines(path) == [{"iteration": 0}, {"iteration": 1}] == RunFolder(tmp_path).metrics


def test_a_line_in_the_middle_that_is_not_whole_is_named_and_no_run_goes_on_over_it(tmp_path):
    folder = run(tiny("grpo"), tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    before = content(folder)
    with pytest.raises(RecipeError, match=r"metrics\.jsonl, line 2: "):
        resume(folder, None, ["training.iterations=3"], console=quiet_console())
    assert content(folder) == before


def test_a_checkpoint_that_cannot_be_read_is_skipped_and_its_iterations_made_again(tmp_path):
    sets = ("training.iterations=4", "training.checkpoint_every=1", "training.keep_checkpoints=1")
    whole = run(tiny("grpo", *sets), tmp_path / "whole")
    cut = run(tiny("grpo", *sets, "training.keep_checkpoints=3"), tmp_path / "cut")
    shutil.rmtree(cut / "policy")
    for path in RunFolder(cut).checkpoints[1:]:
        path.write_bytes(path.read_bytes()[:-100])
    console = quiet_console()
    resume(cut, None, ["training.keep_checkpoints=1"], console=console)
    said = told(console)
    assert said.index("000004.ckpt: skipped, it cannot be read (") < said.index("000003.ckpt: skipped")
    assert_same_tensors(final_state(whole)["state_dict"], final_state(cut)["state_dict"])
    assert [path.name for path in RunFolder(cut).checkpoints] == ["000004.ckpt"]
    assert [event["iteration"] for event in RunFolder(cut).metrics] == [0, 1, 2, 3, 4]


def test_without_a_checkpoint_that_can_be_read_nothing_is_touched(tmp_path):
    folder = run(tiny("grpo", "training.checkpoint_every=1"), tmp_path)
    for path in RunFolder(folder).checkpoints:
        path.write_bytes(b"")
    before = content(folder)
    with pytest.raises(RecipeError, match="no checkpoint can be read") as caught:
        resume(folder, None, ["training.iterations=3"], console=quiet_console())
    assert len(caught.value.problems) == 3 and content(folder) == before
    with pytest.raises(RecipeError, match=r"000002\.ckpt: cannot be read .*other iterations with a checkpoint: 1"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- a cache that cannot be written, an interrupt ---------------------------------------------
def test_a_warm_start_that_cannot_be_kept_is_made_all_the_same(tmp_path, monkeypatch):
    recipe = tiny("grpo", "policy.warm_start={steps: 2, batch_size: 4}")
    (tmp_path / "file").touch()
    said: list[str] = []
    models = []
    for place in ("file", "folder"):
        monkeypatch.setenv("CCT_CACHE", str(tmp_path / place))
        models.append(warm_start(recipe.policy, recipe.task, 0, say=said.append)[0])
    (line,) = said
    assert f"nothing can be written into {tmp_path / 'file'}" in line and "set CCT_CACHE" in line
    assert_same_tensors(dict(models[0].state_dict()), dict(models[1].state_dict()))
    assert [model.training for model in models] == [False, False]


@pytest.fixture
def interrupts():
    """Lightning switches SIGINT off when it was interrupted."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def of_ones_own(folder, recipe, *sets):
    path = folder / "own.yaml"
    path.write_text(f"base: {RECIPES / recipe}.yaml\n")
    words = [word for knob in (*TINY, *TINY_CHAIN, *sets) for word in ("--set", knob)]
    return ["run", str(path), "--runs", str(folder / "runs"), *words]


@pytest.mark.parametrize(("gives", "code", "says"), [("interrupt", 130, "interrupted\n"), ("error", 1, "stopped: transport")])
def test_a_folder_in_which_nothing_was_found_out_is_not_left_behind(gives, code, says, broken, interrupts, tmp_path, capsys):
    sets, name, _ = broken
    assert main(of_ones_own(tmp_path, "grpo", sets, f"transport={{use: {name}, gives: {gives}}}")) == code
    output, errors = capsys.readouterr()
    assert errors.startswith(says) and "Traceback" not in errors
    assert "nothing was trained yet" in output and not list((tmp_path / "runs" / "grpo").iterdir())


def test_a_run_folder_may_be_called_like_markup(broken, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*of_ones_own(tmp_path, "grpo"), "--into", "[/]x"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "[/]x" in output and (tmp_path / "[" / "]x" / "policy").is_dir()


def test_an_interrupted_run_says_how_to_go_on(broken, interrupts, tmp_path, capsys):
    sets, name, _ = broken
    transport = f"transport={{use: {name}, gives: later}}"
    assert main(of_ones_own(tmp_path, "grpo", sets, transport, "training.checkpoint_every=1")) == 130
    output, errors = capsys.readouterr()
    folder = tmp_path / "runs" / "grpo" / "001"
    assert errors == "interrupted\n" and f"stopped early; resume with: cct run --resume {folder}" in output
    assert [path.name for path in RunFolder(folder).checkpoints] == ["000001.ckpt"]


# --- evidence ---------------------------------------------------------------------------------
SLOW = """
import sys, time
from pathlib import Path

def score(prompt, response):
    with Path(__file__).with_name("judged").open("a") as file:
        file.write("x")
    if response.text == "bad":
        raise KeyError("bad")
    if response.text == "leave":
        sys.exit(0)
    time.sleep(30)
    return 1.0
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_failure_ends_the_judging(workers, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    part = PythonFunction(path=tmp_path / "slow.py", workers=workers, time_limit=60.0 if workers else None)
    responses = [Response(text, (5,), True) for text in ("bad", *"abcdefgh")]
    try:
        with pytest.raises(TrainingStopped, match=r"evidence 'python' failed: KeyError: 'bad' \(.*slow\.py:9\), judging 'bad'"):
            judge([part], [Prompt("p")] * len(responses), responses)
    finally:
        close_workers()
    assert len((tmp_path / "judged").read_text()) <= 1 + workers  # one may have been under way


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_leaves_is_a_failure_like_another(workers, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    part = PythonFunction(path=tmp_path / "slow.py", workers=workers, time_limit=60.0 if workers else None, on_error="zero")
    try:
        assert judge([part], [Prompt("p")], [Response("leave", (5,), True)]) == ([[0.0]], [True], {"errors/python": 1})
    finally:
        close_workers()


@pytest.mark.parametrize(
    ("verdict", "numbers"),
    [
        (0.5, 0.5),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        ((1, 0), [1.0, 0.0]),
        (np.array([1.0, 0.5]), [1.0, 0.5]),
        (torch.tensor([0.5]), [0.5]),
    ],
)
def test_any_number_is_a_verdict(verdict, numbers):
    assert plain(verdict) == numbers and type(plain(verdict)) is type(numbers)


@pytest.mark.parametrize("verdict", ["good", "0.5", b"1", float("nan"), float("inf"), {"score": 1}, [None], 1j, [[1.0]]])
def test_what_is_no_number_is_said_in_its_own_words(verdict, tmp_path):
    with pytest.raises(ValueError, match="^score returned .*; expected a finite number, or one for each token$"):
        plain(verdict, "score")
    (tmp_path / "own.py").write_text(f"nan = inf = float('nan')\ndef score(prompt, response):\n    return {verdict!r}\n")
    part = PythonFunction(path=tmp_path / "own.py", workers=0, time_limit=None)
    with pytest.raises(TrainingStopped, match="evidence 'python' failed: ValueError: score returned "):
        judge([part], [Prompt("p")], [Response("a", (5,), True)])


def test_a_wrong_count_of_rewards_says_both_counts():
    class Two(Evidence):
        """Two rewards."""

        def __call__(self, prompt, response):
            return [0.5, 0.5]

    with pytest.raises(TrainingStopped, match="it returned 2 numbers for 3 tokens; expected one for each, or one in all"):
        judge([Two()], [Prompt("p")], [Response("abc", (5, 6, 7), True)])


# --- transports, gates, statistics, geometries of one's own ------------------------------------
@pytest.mark.parametrize(
    ("gives", "says"),
    [
        ("nothing", r"returned None in iteration 1; expected Credit\(advantages \[B, T\] float\)"),
        ("tensor", r"returned a tensor of torch\.float32 and shape \(16, \d\) in iteration 1; expected Credit"),
        (
            "bool",
            r"returned a tensor of torch\.bool .* as advantages in iteration 1; expected a float tensor of shape \(16, \d\)",
        ),
        ("short", r"returned a tensor of torch\.float32 and shape \(16, \d\) as advantages"),
        ("targets", r"returned a tensor of torch\.int64 .* as value_targets"),
        ("gate", r"returned a tensor of torch\.float32 and shape \(\d,\) as gate"),
        ("error", r"in iteration 1: KeyError: 'gone' \(FILE:LINE\)$"),
        ("leave", r"in iteration 1: SystemExit: 0 \(FILE:LINE\)$"),
        ("library", r"in iteration 1: RuntimeError: shape '\[7\]' is invalid for input of size 1 \(FILE:LINE\)$"),
    ],
)
def test_a_transport_that_breaks_its_promise_is_named(gives, says, broken):
    sets, name, path = broken
    recipe = tiny("grpo", sets, f"transport={{use: {name}, gives: {gives}}}")
    agent, tokenizer, _ = build(recipe)
    line = line_of(path, {"error": "KeyError", "leave": "SystemExit"}.get(gives, "reshape"))
    says = says.replace("FILE", str(path)).replace("LINE", str(line))
    with pytest.raises(TrainingStopped, match=rf"^transport '{name}' {says}"):
        Held(recipe, agent, tokenizer).collect(1)


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (
            "NAME",
            r"^gate 'NAME' \(transport.gate\) returned None in iteration 1; expected a float tensor of shape",
        ),
        ("{use: NAME, raises: true}", r"transport 'comp_gae' in iteration 1: AttributeError: .*'nothing' \(FILE:LINE\)$"),
        (
            "NAME_statistic",
            r"^statistic 'wide' \(Wide\): ValueError: it has shape \(2, \d+, \d\); expected one number",
        ),
        ("{use: shuffle, of: NAME}", r"^gate 'NAME' \(transport.gate.of\) returned None"),
    ],
)
def test_a_gate_that_breaks_its_promise_is_named(gate, says, broken):
    sets, name, path = broken
    recipe = tiny("compo", sets, f"transport.gate={gate.replace('NAME', name)}")
    agent, tokenizer, _ = build(recipe)
    says = says.replace("NAME", name).replace("FILE:LINE", f"{path}:{line_of(path, 'rollout.nothing')}")
    with pytest.raises(TrainingStopped, match=says):
        Held(recipe, agent, tokenizer).collect(1)


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        ("false", r"returned a tensor of torch\.float32 and shape \(\) as the loss in iteration 1; expected a tensor of shape"),
        ("true", r"in iteration 1: AttributeError: .*'nothing' \(FILE:LINE\)$"),
    ],
)
def test_a_geometry_that_breaks_its_promise_is_named(raises, says, broken, tmp_path):
    sets, name, path = broken
    says = says.replace("FILE:LINE", f"{path}:{line_of(path, 'logprobs.nothing')}")
    with pytest.raises(TrainingStopped, match=rf"^geometry '{name}' {says}"):
        run(tiny("grpo", sets, f"geometry={{use: {name}, raises: {raises}}}"), tmp_path)


def test_the_traceback_of_a_part_is_there_for_who_asks(broken, tmp_path, capsys, monkeypatch):
    sets, name, path = broken
    arguments = of_ones_own(tmp_path, "grpo", sets, f"transport={name}")
    assert main(arguments) == 1
    first, hint = capsys.readouterr().err.splitlines()
    place = f"{path}:{line_of(path, 'KeyError')}"
    assert first == f"stopped: transport '{name}' in iteration 1: KeyError: 'gone' ({place})" and "CCT_TRACEBACK=1" in hint
    monkeypatch.setenv("CCT_TRACEBACK", "1")
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(first) and "Traceback (most recent call last)" in errors and 'raise KeyError("gone")' in errors


# --- what `cct check` sees --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("logging.logger=tensorboard", "logging.logger: tensorboard is not installed: pip install -e '.[tensorboard]'"),
        (
            "training.strategy=deepspeed_2",
            "training.strategy: deepspeed_2 needs DeepSpeed, which is not installed: pip install",
        ),
        ("policy={use: pretrained, path: /nowhere}", "policy: 'pretrained': policy.path: /nowhere does not exist"),
        ("policy={use: pretrained, path: ~/no/where}", "policy: 'pretrained': policy.path: ~/no/where does not exist"),
        ("generation.max_new_tokens=600", "generation.max_new_tokens: 600, but the model has 512 positions"),
        ("transport.gate.layers=[9]", "transport.gate: layers [9] do not fit a model of 2 layers"),
        ("transport.gate.heads=[5]", "transport.gate: heads [5] do not fit a model of 2 attention heads"),
    ],
)
def test_what_a_run_would_refuse_is_found_before(change, says, tmp_path, monkeypatch):
    for missing in ("tensorboard", "tensorboardX", "deepspeed"):
        monkeypatch.setitem(sys.modules, missing, None)
    recipe = tiny("compo", change)
    with pytest.raises(RecipeError) as checked:
        preflight(recipe)
    assert len(checked.value.problems) == 1 and checked.value.problems[0].startswith(says)
    with pytest.raises(RecipeError) as tried:
        start(recipe, tmp_path, console=quiet_console())
    assert tried.value.problems == checked.value.problems


def test_the_sizes_of_a_model_on_disk_are_known_to_the_check(finished):
    path = finished / "policy"
    policy = "{use: pretrained, path: " + str(path) + "}"
    preflight(tiny("compo", f"policy={policy}"))
    with pytest.raises(RecipeError, match=r"^transport\.gate: layers \[2\] do not fit a model of 2 layers$"):
        preflight(tiny("compo", f"policy={policy}", "transport.gate.layers=[2]"))
    with pytest.raises(RecipeError, match="512 positions for prompt and response together; lower it"):
        preflight(tiny("compo", f"policy={policy}", "generation.max_new_tokens=512"))


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt_is_refused_with_its_line(text, tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": text, "answer": "2"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "b", "answer": "3"}) + "\n")
    task = f"task={{use: jsonl, path: {tmp_path / 'train.jsonl'}, held_out_path: {tmp_path / 'held.jsonl'}}}"
    recipe = load_recipe(RECIPES / "grpo.yaml", [*TINY[:-5], task])
    with pytest.raises(RecipeError, match=r"task: 'jsonl': .*train\.jsonl:2: the prompt is empty"):
        preflight(recipe)


def test_a_part_of_ones_own_that_raises_when_it_is_asked_is_a_problem_like_another():
    class Own(Evidence):
        """Raises."""

        def ready(self):
            raise KeyError("key")

    with pytest.raises(RecipeError, match=r"^evidence\.0: '': KeyError: 'key' \(.*test_mishaps\.py:\d+\)$"):
        preflight(tiny("grpo").model_copy(update={"evidence": [Own()]}))


class Unreachable(ChainArithmetic):
    """Data that cannot be had; counts how often it is asked."""

    use = "unreachable"

    def ask(self):
        self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
        raise OSError("the hub is away\nsee there")

    def prompts(self, seed, start, count):
        return self.ask()

    def held_out(self):
        return self.ask()

    @property
    def alphabet(self):
        return self.ask()


def test_a_plan_asks_for_data_once():
    task = Unreachable()
    found = plan(tiny("grpo", "policy.alphabet=0123456789").model_copy(update={"task": task}))
    assert task.__dict__["asked"] == 1
    assert [note for note in found.notes if "cannot be read: the hub is away" in note and "see there" not in note]


# --- little things ----------------------------------------------------------------------------
LIGHT = """
import sys
from cct.cli import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize("words", ["eval", "replay", "export RUN/out", "run --resume"])
@pytest.mark.parametrize("there", [False, True])
def test_a_folder_is_looked_at_before_torch_is_imported(words, there, tmp_path):
    folder = tmp_path / "001"
    verb, *rest = words.split()
    if there:
        folder.mkdir()
    done = python("-c", LIGHT, verb, *(["--resume"] if rest[:1] == ["--resume"] else []), str(folder), *rest[verb == "run" :])
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith(f"error: {folder}: {'not a run folder' if there else 'no such folder'}")


def test_a_complete_run_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(tiny("grpo")))
    (tmp_path / "policy").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "000002.ckpt").touch()
    done = python("-c", LIGHT, "run", "--resume", str(tmp_path))
    assert done.stdout == "2 False\n" and f"{tmp_path}: complete, all 2 iterations are done" in done.stderr


def test_an_export_says_one_line(finished, tmp_path):
    done = cct_process("export", str(finished), str(tmp_path / "out"))
    assert done.returncode == 0 and done.stderr == ""
    said = [line for line in done.stdout.splitlines() if "real_accelerator" not in line]  # DeepSpeed's own, on a CPU
    assert said == [f"wrote {tmp_path / 'out'} from {RunFolder(finished).checkpoints[-1]}"]


@pytest.mark.parametrize(("recipe", "looks"), [("grpo", False), ("compo", True)])
def test_processes_look_for_weights_without_gradient_only_where_a_critic_has_passes_of_its_own(recipe, looks):
    strategy = strategy_of(tiny(recipe, "training.devices=2"))
    assert strategy._ddp_kwargs["find_unused_parameters"] is looks
