"""The transformers engine: a response is a function of its seed, and its log-probabilities are those it was drawn with."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import MODELS, tiny_model
from test_training import tiny

from cct.agent.building import build
from cct.policy import end_tokens
from cct.policy.builtin import Auto, Transformers
from cct.policy.generation import Engine
from cct.policy.sampling import exponential
from cct.policy.weights import add_lora, named_weights

PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 4], [5]] * 3


@pytest.fixture(scope="module")
def model():
    agent, tokenizer, _ = build(tiny("grpo"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return agent.actor, tokenizer


def opened(model, **knobs) -> Engine:
    return Transformers(max_new_tokens=12, **knobs).open(*model)


def trainer_logprobs(actor, prompt, tokens, temperature=1.0):
    with torch.no_grad():
        logits = actor(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_trainers(model, temperature):
    for prompt, c in zip(PROMPTS, opened(model, temperature=temperature).generate(PROMPTS, range(12)), strict=True):
        trainer = trainer_logprobs(model[0], prompt, c.tokens, temperature).gather(1, torch.tensor([c.tokens]).T).squeeze(1)
        torch.testing.assert_close(torch.tensor(c.logprobs), trainer, rtol=0, atol=1e-5)


def test_a_response_depends_on_its_seed_only(model):
    whole = opened(model).generate(PROMPTS, range(12))
    small = opened(model, batch_size=5).generate(PROMPTS[::-1], range(11, -1, -1))
    assert [c.tokens for c in whole] == [c.tokens for c in small[::-1]]
    assert len({c.tokens for c in opened(model).generate([[3, 4]] * 8, range(8))}) > 1


@pytest.mark.parametrize("family", [*MODELS])
def test_a_prompt_that_several_responses_share_is_read_once_and_gives_the_same_responses(family):
    actor = tiny_model(family)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    engine = Transformers(max_new_tokens=8).open(actor, tokenizer)
    prompts = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
    read = []
    hook = actor.get_input_embeddings().register_forward_hook(lambda module, args, output: read.append(args[0].numel()))
    grouped = engine.generate([prompt for prompt in prompts for _ in range(4)], range(12))
    hook.remove()
    assert read[:2] == [3 * 4, 12 * 1]  # all but the last tokens of three prompts, then the last of twelve rows
    for number, completion in enumerate(grouped):
        (alone,) = engine.generate([prompts[number // 4]], [number])
        assert completion.tokens == alone.tokens
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_the_noise_is_exponential_and_independent_over_seeds_steps_and_columns():
    """Kolmogorov-Smirnov of 200,000 numbers, and correlations of neighbours within five standard errors."""
    from scipy.stats import kstest

    seeds = torch.arange(100)
    numbers = torch.stack([exponential(seeds, step, 50) for step in range(40)]).double()  # [step, seed, column]
    assert kstest(numbers.flatten().numpy(), "expon").pvalue > 1e-4
    centred = numbers - numbers.mean()
    for dim in range(3):
        length = numbers.shape[dim] - 1
        neighbours = centred.narrow(dim, 0, length) * centred.narrow(dim, 1, length)
        assert abs(neighbours.mean() / centred.var()) < 5 / neighbours.numel() ** 0.5
    diagonal = centred[:-1, 1:, :] * centred[1:, :-1, :]  # a seed and a step that add up to the same
    assert abs(diagonal.mean() / centred.var()) < 5 / diagonal.numel() ** 0.5
    assert (numbers > 0).all() and numbers.unique().numel() > 199_000


def test_noise_is_splitmix64():
    """Seed 0 of the published generator starts with 0xE220A8397B1DCDAF; here that is the key's own mix, at seed and step 0."""
    first = -math.log(((0xE220A8397B1DCDAF >> 11) + 0.5) * 2.0**-53)
    assert exponential(torch.zeros(1, dtype=torch.long), 0, 1).item() == pytest.approx(first, rel=1e-6)


def test_responses_are_distributed_as_the_policy_says(model):
    """Chi-squared of 4,000 first tokens against their probabilities: p > 1e-4."""
    from scipy.stats import chisquare

    tokens = [
        c.tokens[0] for c in Transformers(max_new_tokens=1, batch_size=4000).open(*model).generate([[3, 4]] * 4000, range(4000))
    ]
    expected = trainer_logprobs(model[0], [3, 4], [0])[0].exp().double()
    assert expected.min() * 4000 > 5  # as the test wants it
    found = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    assert chisquare(found, expected / expected.sum() * 4000).pvalue > 1e-4


@pytest.mark.parametrize(("knobs", "kept"), [({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_p": 1e-6}, 1)])
def test_tokens_outside_top_k_and_top_p_are_never_drawn_and_the_rest_is_renormalised(model, knobs, kept):
    for prompt, c in zip(PROMPTS, opened(model, **knobs).generate(PROMPTS, range(12)), strict=True):
        trainer = trainer_logprobs(model[0], prompt, c.tokens)
        for step, token, logprob in zip(trainer, c.tokens, c.logprobs, strict=True):
            best = step.topk(kept)
            assert token in best.indices
            assert logprob == pytest.approx(float(step[token] - best.values.logsumexp(0)), abs=1e-5)


def test_a_stop_string_ends_a_response_and_stays_in_it(model):
    tokenizer = model[1]
    plain = opened(model).generate(PROMPTS, range(12))
    text = tokenizer.decode(list(max(plain, key=lambda c: len(c.tokens)).tokens[3:5]))
    stopped = opened(model, stop=[text]).generate(PROMPTS, range(12))
    assert any(text in tokenizer.decode(list(c.tokens)) for c in stopped)
    for c, before in zip(stopped, plain, strict=True):
        assert before.tokens[: len(c.tokens)] == c.tokens and len(c.logprobs) == len(c.tokens)
        if text in tokenizer.decode(list(c.tokens)):
            assert c.finished and tokenizer.decode(list(c.tokens)).endswith(text)
        else:
            assert c == before


def test_finished_means_an_end_token(model):
    ends = end_tokens(*model)
    completions = opened(model).generate(PROMPTS * 4, range(48))
    assert {c.finished for c in completions} == {True, False}
    for c in completions:
        assert c.finished == (c.tokens[-1] in ends) and not set(c.tokens[:-1]) & set(ends)
        assert c.finished or len(c.tokens) == 12


def test_every_end_token_of_the_generation_configuration_ends(model):
    actor, tokenizer = model
    before = actor.generation_config.eos_token_id
    try:
        actor.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
        completions = opened(model).generate(PROMPTS, range(12))
        assert any(c.tokens[-1] == 7 for c in completions) and all(7 not in c.tokens[:-1] for c in completions)
    finally:
        actor.generation_config.eos_token_id = before


def test_auto_takes_transformers_where_there_is_no_gpu(model):
    if not torch.cuda.is_available():
        assert type(Auto(max_new_tokens=3).open(*model)).__name__ == "TransformersEngine"


def test_named_weights_are_those_of_the_plain_model(model):
    actor, _ = model
    assert {n: w.data_ptr() for n, w in named_weights(actor)} == {n: w.data_ptr() for n, w in actor.state_dict().items()}


def test_adapters_come_merged(model):
    pytest.importorskip("peft")
    plain = build(tiny("grpo"))[0].actor
    adapted = build(tiny("grpo"))[0].actor
    add_lora(adapted, rank=2, alpha=4, targets="all-linear")
    assert dict(named_weights(adapted)).keys() == plain.state_dict().keys()
    assert (
        0 < sum(p.numel() for p in adapted.parameters() if p.requires_grad) < 0.5 * sum(p.numel() for p in plain.parameters())
    )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
        plain.load_state_dict(dict(named_weights(adapted)))
        ids = torch.tensor([PROMPTS[0]])
        torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, rtol=0, atol=1e-5)


def test_each_response_may_have_a_limit_of_its_own(model):
    whole = opened(model).generate(PROMPTS, range(12))
    limits = [1 + number % 5 for number in range(12)]
    for long, short, most in zip(whole, opened(model).generate(PROMPTS, range(12), limits), limits, strict=True):
        assert short.tokens == long.tokens[:most] and short.logprobs == pytest.approx(long.logprobs[:most], abs=1e-5)
        assert short.finished == (long.finished and len(long.tokens) <= most)


def test_the_registry_of_engines_is_no_module_once_a_run_was_imported():
    """A submodule of the same name would take the registry's place in `cct.policy`."""
    import cct.policy
    import cct.training.run

    assert cct.policy.engines["transformers"].use == "transformers"
