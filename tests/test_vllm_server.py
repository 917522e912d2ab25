"""vLLM servers: the same responses from however many, whatever happens to them, or an error that says what did."""

import importlib.util
import io
import threading
from contextlib import contextmanager, suppress

import pytest
import torch
from fake_vllm import FakeVLLM
from pydantic import ValidationError
from test_training import assert_same_tensors, final_state, run, tiny
from test_vllm import nudge, scratch

from cct.policy import engines
from cct.policy.generation import EngineError
from cct.policy.vllm import write_configuration

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
    with opened(model, fakes[:1]) as one, opened(model, fakes) as two:
        pass
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
