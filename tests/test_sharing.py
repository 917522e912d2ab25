"""Prompts that several responses share are read once, and nothing else changes."""

import pytest
import torch
from conftest import padded, tiny_model
from torch.testing import assert_close

from cct.agent.agent import Agent
from cct.critic import critics
from cct.packing import pack, same_prompts, shared_attention, worth_sharing
from cct.policy.sharing import sharing_of, sharing_of_config
from cct.policy.weights import add_lora, without_dropout
from cct.statistic import statistics

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma", "opt", "gpt2", "gpt_neox", "granite", "phi3")


def groups(counts=(3, 1, 4), prompts=(7, 5, 2), longest=6, seed=0, vocabulary=20):
    """Rows in random order: unequal prompts and responses, one of them empty, groups of these sizes."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(2, vocabulary, (count,), generator=draw).tolist()

    asked = [tokens(length) for length in prompts]
    rows = [(asked[g], tokens(1 + (3 * n + g) % longest)) for g, count in enumerate(counts) for n in range(count)]
    rows[-1] = rows[-1][0], rows[-1][1] if len(rows) == 1 else []
    order = torch.randperm(len(rows), generator=draw).tolist()
    return padded([rows[i][0] for i in order], [rows[i][1] for i in order], left=1, right=1)


def agents(family="qwen3", critic=None, **knobs):
    """The same agent that shares prompts, and that does not."""
    model = without_dropout(tiny_model(family, **({"sliding_window": 64} if family == "mistral" else {})))
    tower = None
    if critic is not None:
        torch.manual_seed(1)
        tower = critics[critic]().build(model, (0.0, 1.0))
        for name, parameter in tower.named_parameters():
            if name.startswith(("out.", "layers.2.")):  # or every value would be the same
                torch.nn.init.normal_(parameter, std=0.5)
    return [Agent(model, tower, 0.8, share=share, **knobs) for share in (True, False)]


def both(family="qwen3", critic=None, rows=None, named=(), **knobs):
    ids, mask, width = rows or groups()
    there = mask[:, -width:].bool()
    return there, [
        agent(ids, mask, width, statistics=dict(named), with_critic=critic is not None)
        for agent in agents(family, critic, **knobs)
    ]


def gradients(family, rows, prepare=lambda model: None, **knobs):
    """Log-probabilities and the actor's gradients of a weighted sum of them, shared and not."""
    ids, mask, width = rows
    there, found = mask[:, -width:].bool(), []
    weights = torch.linspace(-1, 1, there.numel()).view(there.shape) / there.sum()
    for share in (True, False):
        model = without_dropout(tiny_model(family, **({"sliding_window": 64} if family == "mistral" else {})))
        prepare(model)
        logprobs = Agent(model.train(), None, 0.8, share=share, **knobs)(ids, mask, width).logprobs
        (logprobs * weights).masked_fill(~there, 0).sum().backward()
        found.append((logprobs.detach()[there], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [((3, 1, 4), (7, 5, 2)), ((1,), (4,)), ((6,), (3,)), ((4, 4), (5, 5))], ids=str)
def test_log_probabilities_and_gradients_are_those_of_rows_read_one_by_one(family, sizes):
    (shared, of_shared), (apart, of_apart) = gradients(family, groups(*sizes))
    assert_close(shared, apart, atol=1e-5, rtol=1e-5)
    assert of_shared.keys() == of_apart.keys()
    for name in of_apart:
        assert_close(of_shared[name], of_apart[name], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_in_float64_they_agree_to_its_precision():
    (shared, of_shared), (apart, of_apart) = gradients("qwen3", groups(), lambda model: model.double())
    assert_close(shared, apart, atol=1e-5, rtol=0)  # the head takes log-probabilities in float32
    for name in of_apart:
        assert_close(of_shared[name], of_apart[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda model: add_lora(model, rank=2, alpha=4, targets="all-linear", seed=0),
    ],
    ids=["gradient checkpointing", "lora"],
)
def test_checkpointing_and_adapters_compose_with_it(prepare):
    (shared, of_shared), (apart, of_apart) = gradients("qwen3", groups(), prepare)
    assert_close(shared, apart, atol=1e-5, rtol=1e-5)
    assert of_shared.keys() == of_apart.keys()
    for name in of_apart:
        assert_close(of_shared[name], of_apart[name], atol=1e-5, rtol=1e-4)


def test_in_bfloat16_they_differ_by_its_rounding():
    (shared, of_shared), (apart, of_apart) = gradients("qwen3", groups(), bf16=True)
    assert float((shared - apart).abs().mean()) < 0.05
    whole, other = (torch.cat([x.flatten() for x in part.values()]) for part in (of_shared, of_apart))
    assert float(torch.cosine_similarity(whole, other, dim=0)) > 0.98


@pytest.mark.parametrize(
    "critic, family",
    [("tac", "qwen3"), ("tac", "gpt_neox"), ("standard", "qwen3"), ("value_head", "qwen3")],
)
def test_critics_read_the_same_and_learn_the_same(critic, family):
    """This GPT-NeoX has keys of 4 heads under a configuration that says 2, as many as TAC makes of its values."""
    ids, mask, width = groups()
    there, (shared, apart) = both(family, critic)
    after = torch.nn.functional.pad(there, (1, 0), value=True)  # values stand before a token, and after the last one
    assert_close(shared.values[after], apart.values[after], atol=1e-5, rtol=1e-5)
    found = []
    for agent in agents(family, critic):
        trace = agent(ids, mask, width, with_critic=True).trace
        assert (trace.packed is not None) == agent.share
        raw = agent.values(trace, width)[0][:, :-1]
        raw.masked_fill(~there, 0).square().sum().backward()
        found.append([p.grad for p in agent.critic.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_critics_of_ones_own_are_given_rows():
    ids, mask, width = groups()
    for agent in agents(critic="tac"):
        agent.critic.reads_packed = False
        read = agent(ids, mask, width, with_critic=True)
        assert read.trace.packed is None and read.trace.hidden_states[3].shape[:2] == ids.shape
        found = read.values if agent.share else found  # noqa: F821
    there = torch.nn.functional.pad(mask[:, -width:].bool(), (1, 0), value=True)
    assert_close(found[there], read.values[there], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_every_statistic_is_the_same(family):
    every = {name: statistics[name]() for name in statistics.names()} | {
        "sinks": statistics["concentration"](sinks=1),
        "max": statistics["concentration"](statistic="max"),
        "renyi2": statistics["concentration"](statistic="renyi2"),
    }
    there, (shared, apart) = both(family, named=every)
    assert_close(shared.entropy[there], apart.entropy[there], atol=1e-5, rtol=1e-5)
    for name in every:
        assert_close(
            shared.stats[name][there], apart.stats[name][there], atol=1e-4, rtol=1e-4, msg=lambda text, n=name: n + text
        )


def test_a_model_that_cannot_share_says_why():
    assert sharing_of(tiny_model("gemma3")) == ("", 4)
    assert sharing_of(tiny_model("mistral", sliding_window=9)).window == 9
    assert sharing_of(tiny_model("qwen3")) == ("", None)
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    assert sharing_of(model).refused == "it has layers of chunked_attention"
    model = tiny_model("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args, kw: (args, {**kw, "packed": None}), with_kwargs=True)
    assert "do not hand to their attention" in sharing_of(model).refused
    model = tiny_model("llama")
    model.model.register_forward_pre_hook(lambda _, args, kw: (args, {**kw, "position_ids": None}), with_kwargs=True)
    assert sharing_of(model).refused == "it gives other logits then"


def test_a_configuration_tells_whether_the_model_can_share():
    assert sharing_of_config(tiny_model("gemma3").config) == ("", 4)
    assert sharing_of_config(tiny_model("gpt2").config) == ("", None)
    config = tiny_model("qwen3").config
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    assert sharing_of_config(config).refused == "it has layers of chunked_attention"


def test_a_sequence_longer_than_the_window_is_read_apart_or_refused():
    ids, mask, width = groups()
    model = tiny_model("mistral", sliding_window=8)
    window = sharing_of(model).window
    apart, auto, always = (Agent(model, None, share=share, window=window) for share in (False, "auto", True))
    assert torch.equal(auto(ids, mask, width).logprobs, apart(ids, mask, width).logprobs)
    with pytest.raises(ValueError, match="longer than the policy's sliding window of 8"):
        always(ids, mask, width)


def test_auto_shares_where_enough_tokens_are_saved():
    ids, mask, width = groups((4, 4), (12, 12), longest=2)
    assert worth_sharing(ids, mask, width)  # 2 * 12 of 8 * 12 prompt tokens are left
    ids, mask, width = groups((2, 2), (1, 1))  # 2 prompt tokens and 7 of responses are left of 11
    assert not worth_sharing(ids, mask, width)
    shared, apart = (Agent(tiny_model(), None, share=share)(ids, mask, width).logprobs for share in ("auto", False))
    assert torch.equal(shared, apart)


def test_a_pack_holds_each_prompt_once_and_rows_come_back():
    ids, mask, width = padded([[3, 4], [5, 6, 7], [3, 4]], [[8], [9, 2], []])
    packed = pack(ids, mask, width)
    assert packed.pack(ids).tolist() == [3, 4, 5, 6, 7, 8, 9, 2]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2, 2, 3, 4]]
    assert torch.equal(packed.unpack(packed.pack(ids))[mask.bool()], ids[mask.bool()])
    assert packed.responding(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0], [2, 3], [0, 0]]
    assert packed.earlier(packed.pack(ids)).tolist() == [0, 3, 0, 5, 6, 4, 7, 9]
    assert packed.running_max(torch.tensor([[3.0, 1, 0, 5, 2, 1, 6, 0]]).T).flatten().tolist() == [3, 3, 0, 5, 5, 3, 6, 6]
    assert same_prompts(ids[:, :-width], mask[:, :-width]).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="a token in every prompt"):
        pack(ids, mask * (ids != 3) * (ids != 4), width)


@pytest.mark.parametrize("heads", [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_attention_over_a_pack_passes_gradcheck(heads):
    ids, mask, width = groups((2, 1), (3, 2), longest=3)
    packed = pack(ids, mask, width)
    torch.manual_seed(0)
    query, key, value = (torch.randn(len(packed), count, 4, dtype=torch.float64, requires_grad=True) for count in heads)
    assert torch.autograd.gradcheck(lambda *x: shared_attention(*x, packed, 0.5), (query, key, value))
