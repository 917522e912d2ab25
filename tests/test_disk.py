"""Disks that are full, files that were changed, two processes at one run, signals: nothing is lost, and one line says what."""

import io
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_training import RECIPES, TINY, TINY_CHAIN, TINY_CRITIC, assert_same_tensors, final_state, tiny

from cct.agent.building import restore
from cct.agent.export import export, quiet
from cct.agent.warm_start import warm_start
from cct.cli import main
from cct.loading import dump_recipe
from cct.policy.checkpoints import tensors_only, unreadable
from cct.recipe import RecipeError
from cct.run_folder import RunFolder
from cct.system.files import SUMS, WriteError, append, damage, forget, kept, locked, sweep, whole, write_text
from cct.system.signals import GRACE, Ending, Interrupted, answered
from cct.training.run import evaluate_run, resume, start

WINDOW = (
    "training.critic_window=2",
    "training.checkpoint_every=1",
    "training.keep_checkpoints=9",
    "training.schedule=constant",
)
LONGER = ("training.iterations=3",)


@contextmanager
def at_most(size: int):
    """Files may have so many bytes, as under `ulimit -f`; Python ignores SIGXFSZ."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def console() -> Console:
    return Console(file=io.StringIO(), width=500)


def said(by: Console) -> str:
    assert isinstance(by.file, io.StringIO)
    return " ".join(by.file.getvalue().split())


def one_error(capsys) -> str:
    """The only line on stderr."""
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.startswith("error: "), errors
    return errors


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two iterations, and one that went on to the third in one go."""
    root = tmp_path_factory.mktemp("runs")
    return [start(tiny("compo", *WINDOW, *more), root, console=console()) for more in ((), LONGER)]


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the run of two iterations, at another place."""
    return shutil.copytree(runs[0], tmp_path / "a run, copied é")


# --- writing ----------------------------------------------------------------------------------
def test_a_file_that_cannot_be_written_is_as_it_was_and_the_message_says_what_why_and_how_much_room(tmp_path):
    path = tmp_path / "file"
    write_text(path, "before")
    with at_most(100), pytest.raises(WriteError) as caught:
        write_text(path, "x" * 200)
    message = str(caught.value)
    assert message.startswith(
        f"{path}: cannot be written (File too large); files may have at most 100 bytes here (ulimit -f); "
    )
    assert f" free in {tmp_path}" in message
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "lines"
    append(path, "12345678\n")
    with at_most(12), pytest.raises(WriteError):
        append(path, "abcdefgh\n")
    assert path.read_text() == "12345678\n"
    append(path, "abcdefgh\n")
    assert path.read_text() == "12345678\nabcdefgh\n"


def test_a_file_where_a_folder_is_to_be_is_one_message(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="file/inside: cannot be written"), whole(tmp_path / "file" / "inside"):
        pass
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_appears_whole_or_not_at_all_and_takes_the_place_of_another(tmp_path):
    for content in ("old", "new"):
        with whole(tmp_path / "folder") as place:
            place.mkdir()
            (place / content).write_text(content)
    with pytest.raises(KeyError), whole(tmp_path / "folder") as place:
        place.mkdir()
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "new"]


def test_devices_are_written_to_and_links_stay(tmp_path):
    write_text(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(WriteError, match="/dev/full: cannot be written .No space left on device"):
        write_text(Path("/dev/full"), "too much")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_names_as_long_as_a_file_system_allows_and_permissions_of_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        with whole(tmp_path / ("n" * 255)) as place:
            place.touch(0o600)  # as safetensors makes them
    finally:
        os.umask(before)
    assert (tmp_path / ("n" * 255)).stat().st_mode & 0o777 == 0o640


def test_checksums_say_what_was_changed_and_follow_what_is_replaced(tmp_path):
    folder = tmp_path / "folder"
    for content in ("one", "two"):
        with kept(tmp_path, folder) as place:
            place.mkdir()
            (place / content).write_text(content)
        assert damage(tmp_path, folder) is None
    assert [line.split("  ")[1] for line in (tmp_path / SUMS).read_text().splitlines()] == ["folder/two"]
    (folder / "two").write_text("owt")
    assert damage(tmp_path, folder).startswith("folder/two is not as it was written")
    (folder / "two").unlink()
    assert damage(tmp_path, folder) == "folder/two is missing"
    forget(tmp_path, folder)
    assert damage(tmp_path, folder) is None and (tmp_path / SUMS).read_text() == ""


@pytest.mark.parametrize(
    ("verb", "size"),
    [
        (["export", "RUN", "out"], 1000),
        (["export", "RUN", "out"], 10_000),
        (["replay", "RUN", "--save"], 100),
        (["report", "RUN"], 100),
        (["eval", "RUN", "--json", "eval.json"], 10),
        (["new", "transport", "mine"], 10),
    ],
)
def test_a_command_that_cannot_write_ends_with_1_and_leaves_nothing_half_written(
    verb, size, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with at_most(size):
        assert main([str(run) if word == "RUN" else word for word in verb]) == 1
    assert "cannot be written (File too large)" in one_error(capsys)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


LIMIT = """
import resource
from lightning import Callback

class Limit(Callback):
    def __init__(self, size):
        self.size = size

    def on_train_start(self, trainer, module):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


def from_the_start_of_training(folder: Path, size: int) -> str:
    """The recipe's override by which no file may be larger than `size` once training starts, after the rehearsed export."""
    (folder / "limit.py").write_text(LIMIT)
    return f"callbacks=[{{use: '{folder / 'limit.py'}:Limit', arguments: {{size: {size}}}}}]"


@pytest.mark.parametrize(
    ("what", "size", "sets"),
    [
        ("recipe.yaml", 500, []),
        ("policy", 6000, []),
        ("metrics.jsonl", 2048, ["logging.rollouts=never", "logging.samples=0", "name=r"]),
        ("rollouts/0.safetensors", 4096, []),
        ("checkpoints/000001.ckpt", 100_000, []),
    ],
)
def test_a_run_that_cannot_write_says_so_in_a_line(what, size, sets, tmp_path, capsys):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"base: {RECIPES}/compo.yaml\n")
    late = [] if what in ("recipe.yaml", "policy") else [from_the_start_of_training(tmp_path, size)]
    words = [word for knob in (*TINY, *TINY_CHAIN, *TINY_CRITIC, *WINDOW, *sets, *late) for word in ("--set", knob)]
    folder = tmp_path / "run"
    with at_most(resource.RLIM_INFINITY if late else size):
        assert main(["run", str(recipe), "--into", str(folder), *words]) == 1
    assert f"error: {folder / what}: cannot be written (File too large)" in one_error(capsys)
    assert not unfinished(tmp_path) and not RunFolder(folder).checkpoints


@pytest.mark.parametrize("logger", ["csv", "tensorboard"])
def test_a_run_that_had_no_room_is_resumed_to_the_same_bits(logger, run, runs, capsys):
    pytest.importorskip(logger)
    arguments = ["run", "--resume", str(run), "--set", "training.iterations=3", "--set", f"logging.logger={logger}"]
    with at_most(resource.RLIM_INFINITY):
        assert main([*arguments, "--set", from_the_start_of_training(run.parent, 30_000)]) == 1
    output, errors = capsys.readouterr()
    assert errors.count("\n") == 1 and "checkpoints/000003.ckpt: cannot be written" in errors
    assert "stopped early; resume with: cct run --resume '" in output and not unfinished(run)
    assert main([*arguments, "--set", "callbacks=[]"]) == 0
    assert_same_tensors(final_state(run)["state_dict"], final_state(runs[1])["state_dict"])
    assert [event["iteration"] for event in RunFolder(run).metrics] == [0, 0, 1, 2, 3]


def test_a_warm_start_too_large_for_the_disk_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CCT_CACHE", str(tmp_path))
    recipe, lines = tiny("grpo", "policy.warm_start={steps: 1, batch_size: 2}"), []
    with at_most(2000):
        warm_start(recipe.policy, recipe.task, 0, say=lines.append)
    assert len(lines) == 1 and "not kept" in lines[0] and "File too large" in lines[0]
    assert not unfinished(tmp_path) and not [
        path for path in tmp_path.rglob("*") if path.is_dir() and path.name != "warm_start"
    ]


# --- files that were changed ------------------------------------------------------------------
class Planted:
    """Unpickled, it leaves a file behind."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_code_in_a_checkpoint_is_refused_with_the_reason_and_not_run(form, run, tmp_path):
    proof, newest = tmp_path / "proof", RunFolder(run).checkpoints[-1]
    if form == "torch":
        torch.save(final_state(run) | {"more": Planted(proof)}, newest)
    else:
        newest.write_bytes(pickle.dumps(Planted(proof)))
    (run / SUMS).unlink()  # who plants a file can change its checksum
    for read in (lambda: export(run, tmp_path / "out"), lambda: restore(run)):
        with pytest.raises(RecipeError, match=r"000002\.ckpt: cannot be read"):
            read()
    by = console()
    resume(run, None, LONGER, console=by)
    assert "000002.ckpt: skipped, it cannot be read (" in said(by)
    assert form != "torch" or "(it holds posix.mkdir, which could run code; only tensors" in said(by)
    assert not proof.exists()


def test_code_in_a_checkpoint_of_deepspeed_is_refused_and_its_own_classes_are_read(tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    proof, part = tmp_path / "proof", tmp_path / "000001.ckpt" / "checkpoint" / "part.pt"
    part.parent.mkdir(parents=True)
    torch.save({"loss_scaler": LossScaler(1.0)}, part)
    assert unreadable(tmp_path / "000001.ckpt") is None
    torch.save({"loss_scaler": Planted(proof)}, part)
    assert "it holds posix.mkdir" in unreadable(tmp_path / "000001.ckpt")
    with tensors_only(), pytest.raises(pickle.UnpicklingError):
        torch.load(part, weights_only=False)  # as DeepSpeed calls it
    assert not proof.exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_of_a_checkpoint_with_a_flipped_bit_the_one_before_is_taken_and_that_is_said(run, runs):
    flip_a_bit(RunFolder(run).checkpoints[-1])
    by = console()
    resume(run, None, LONGER, console=by)
    assert "000002.ckpt: skipped, it cannot be read (checkpoints/000002.ckpt is not as it was written" in said(by)
    assert_same_tensors(final_state(run)["state_dict"], final_state(runs[1])["state_dict"])


def test_changed_rollouts_and_a_changed_policy_are_refused(run):
    path = RunFolder(run).rollouts[1]
    flip_a_bit(path)
    with pytest.raises(RecipeError, match=r"1\.safetensors is not as it was written"):
        RunFolder(run).rollout(1)
    flip_a_bit(run / "policy" / "model.safetensors")
    with pytest.raises(RecipeError, match=r"policy/model\.safetensors is not as it was written.*cct export"):
        evaluate_run(run)


def test_a_checkpoint_without_a_checksum_is_read(run):
    (run / SUMS).unlink()
    assert restore(run)[-1] == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recipe.yaml", b"a: ["),
        ("recipe.yaml", b""),
        ("fidelity.json", b"{"),
        ("tokens.json", b"[]"),
        ("metrics.jsonl", b'\xff\n{"iteration": 0}\n'),
        ("samples.jsonl", b'12\n{"iteration": 0}\n'),
    ],
)
def test_a_damaged_file_of_a_run_is_named_by_its_report(name, content, run, capsys):
    shutil.rmtree(run / "rollouts")
    (run / name).write_bytes(content)
    assert main(["report", str(run)]) == 2
    assert f"{run / name}" in one_error(capsys)


def test_output_that_cannot_be_written_is_one_message():
    done = subprocess.run(f"{sys.executable} -m cct.cli ls > /dev/full", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


# --- two processes at one run -----------------------------------------------------------------
def test_a_run_in_which_another_process_trains_is_refused_and_one_whose_process_died_is_not(run, capsys):
    with locked(run):
        assert main(["run", "--resume", str(run), "--set", "training.iterations=3"]) == 2
        assert f"{run}: process {os.getpid()} on " in one_error(capsys)
    assert (run / ".lock").read_text().startswith("process ")
    with RunFolder(run).only_run():
        pass


def test_what_a_killed_process_left_half_written_is_removed_when_the_run_goes_on(run):
    for place in (run, run / "checkpoints"):
        (place / ".half.0123.tmp").mkdir()
    with RunFolder(run).only_run():
        assert not unfinished(run)
    sweep(run / "no such folder")


# --- resuming under another recipe ------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ("training.prompts_per_iteration=2", True),
        ("training.responses_per_prompt=8", True),
        ("evidence=[{use: exact_match, weight: 0.5}, {use: format, pattern: '.*#.*', weight: 0.5}]", True),
        ("transport.lam=0.9", True),
        ("training.critic_window=1", False),
        ("training.learning_rate=1e-5", False),
    ],
)
def test_the_critics_window_holds_iterations_under_one_recipe(change, anew, run):
    by = console()
    resume(run, None, [*LONGER, change], console=by)
    assert ("the critic's window starts empty: its 1 earlier iterations" in said(by)) == anew
    assert RunFolder(run).metrics[-1]["iteration"] == 3


def test_a_critic_does_not_go_on_with_other_bounds_of_the_reward(run):
    with pytest.raises(RecipeError, match=r"evidence: rewards in \(0\.0, 1\.0\) -> \(0\.0, 2\.0\), which bound the"):
        RunFolder(run).to_resume(None, [*LONGER, "evidence.0.weight=2"])


def test_a_run_is_not_resumed_to_fewer_iterations_than_are_done(run):
    with pytest.raises(RecipeError, match=r"iteration 2 is done, and training\.iterations is 1; .*available: 1, 2"):
        resume(run, None, ["training.iterations=1"], console=console())
    shutil.rmtree(run / "policy")
    with pytest.raises(RecipeError, match="iteration 2 is done"):
        resume(run, None, ["training.iterations=1"], console=console())
    assert not (run / "policy").exists()


def test_a_resumed_run_makes_no_warm_start_again(tmp_path, monkeypatch):
    recipe = tiny("grpo", "policy.warm_start={steps: 2, batch_size: 4}", "training.checkpoint_every=1")
    folder = start(recipe, tmp_path, console=console())
    monkeypatch.setenv("CCT_CACHE", str(tmp_path / "another cache"))
    by = console()
    resume(folder, None, [*LONGER, "task.held_out_size=4"], console=by)
    assert "warm start" not in said(by) and not (tmp_path / "another cache").exists()


def test_the_reference_model_of_a_run_stays_the_one_it_began_with(tmp_path):
    recipe = tiny("grpo", "policy.warm_start={steps: 2, batch_size: 4}", "geometry.kl_coef=0.1")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "000001.ckpt").touch()
    write_text(tmp_path / "recipe.yaml", dump_recipe(recipe))
    RunFolder(tmp_path).to_resume()
    with pytest.raises(RecipeError, match="task: another one, on whose demonstrations the reference model would be made again"):
        RunFolder(tmp_path).to_resume(None, ["task.steps=3"])


# --- plug-ins of a run that is looked at ------------------------------------------------------
def test_a_plug_in_of_a_run_is_imported_with_its_recorded_hash_or_where_it_is_trusted(run, tmp_path, capsys):
    proof, plugin = tmp_path / "proof", tmp_path / f"plug_{abs(hash(str(tmp_path)))}.py"
    plugin.write_text(f"open({str(proof)!r}, 'a').write('run')\n")
    text = (run / "recipe.yaml").read_text().replace("plugins: []", f"plugins: [{plugin}]")
    (run / "recipe.yaml").write_text(text)
    for verb in (["report"], ["replay"], ["export", str(tmp_path / "out")], ["eval"], ["fidelity"]):
        assert main([verb[0], str(run), *verb[1:]]) == 2
        assert "has no recorded SHA-256" in (error := one_error(capsys)) and "--trust-plugins" in error
    assert not proof.exists()
    recipe = RunFolder(run).load_recipe(trust=True)
    assert proof.read_text() == "run" and recipe.plugins[0].sha256
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    RunFolder(run).load_recipe()
    plugin.write_text("pass")
    with pytest.raises(RecipeError, match="has changed"):
        RunFolder(run).load_recipe()


# --- signals ----------------------------------------------------------------------------------
ASKED = '''
import os, signal
from cct.transport import transports
from cct.transport.group import GRPO

@transports.register("{name}")
class Asked(GRPO):
    """Asks its own process to end."""
    at: int = 1
    by: int = signal.SIGTERM
    def __call__(self, rollout):
        self.__dict__.setdefault("calls", []).append(1)
        if len(self.__dict__["calls"]) == self.at:
            os.kill(os.getpid(), self.by)
        return super().__call__(rollout)
'''


@pytest.fixture
def asked(tmp_path):
    plugin = tmp_path / f"asked_{abs(hash(str(tmp_path)))}.py"
    plugin.write_text(ASKED.format(name=plugin.stem))
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"base: {RECIPES}/grpo.yaml\nplugins: [{plugin}]\n")

    def go(at: int, by: int = signal.SIGTERM) -> tuple[int, Path]:
        sets = [*TINY, *TINY_CHAIN, "training.iterations=4", f"transport={{use: {plugin.stem}, at: {at}, by: {int(by)}}}"]
        folder = tmp_path / f"run {at}"
        return main(["run", str(recipe), "--into", str(folder), *(x for knob in sets for x in ("--set", knob))]), folder

    return go


@pytest.mark.parametrize(("by", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_before_anything_was_trained_ends_the_run_and_says_so(by, code, asked, capsys):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert asked(1, by)[0] == code
    output, errors = capsys.readouterr()
    assert "nothing was trained yet" in output and errors.startswith("interrupted") and "Traceback" not in errors
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_lets_a_short_iteration_end_and_takes_a_checkpoint(asked, capfd):
    code, folder = asked(3)
    output, errors = capfd.readouterr()
    assert code == 143 and "SIGTERM: ends after this iteration" in errors and "interrupted by SIGTERM" in errors
    assert f"resume with: cct run --resume '{folder}'" in output
    assert [path.stem for path in RunFolder(folder).checkpoints] == ["000003"] and damage(
        folder, RunFolder(folder).checkpoints[0]
    ) is None
    resume(folder, None, ["transport.at=0"], console=console())
    assert asked(9)[0] == 0
    assert_same_tensors(final_state(folder)["state_dict"], final_state(folder.with_name("run 9"))["state_dict"])


def test_an_iteration_that_takes_long_is_not_waited_for_and_a_second_signal_ends_at_once():
    ending = Ending(first=True)
    with pytest.raises(Interrupted):  # how long one takes is not known yet
        ending(signal.SIGTERM)
    ending.lap()
    ending._took = GRACE + 60
    with pytest.raises(Interrupted):
        ending(signal.SIGTERM)
    ending._took = 1.0
    ending(signal.SIGTERM)
    assert ending.asked == signal.SIGTERM
    with pytest.raises(Interrupted) as caught:
        ending(signal.SIGTERM)
    ending.close()
    assert caught.value.exit_code == 143
    others = Ending(first=False)
    others(signal.SIGINT)
    assert others.asked == signal.SIGINT  # the first process decides


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with answered():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_deepspeed_says_nothing_about_its_accelerator_where_nobody_asked(caplog):
    import logging

    quiet()
    record = logging.makeLogRecord({"msg": "Setting accelerator to CPU. If you have GPU or other accelerator, ..."})
    assert not logging.getLogger("DeepSpeed").filter(record)
    assert logging.getLogger("DeepSpeed").filter(logging.makeLogRecord({"msg": "another"}))
