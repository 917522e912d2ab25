"""Critics: what they may know, that the actor feels nothing of them, and that TAC attends as the actor does."""

from __future__ import annotations

import pytest
import torch
from conftest import eager_twin, padded, tiny_model
from torch import nn
from torch.testing import assert_close

from cct.critic import critics
from cct.rollout import Trace
from cct.training.agent import Agent

PROMPTS, RESPONSES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]], [[12, 13, 14, 15], [16, 17, 18, 19, 3, 4, 1], [5]]
BOUNDS = (-1.0, 2.0)

CRITICS = {
    "standard": {"use": "standard"},
    "value_head": {"use": "value_head", "width": 16},
    "scalar": {"use": "tac", "width": 16, "output": "scalar"},
    "tac": {"use": "tac", "width": 16},
    "tac-no-memory": {"use": "tac", "width": 16, "memory": 0},
    "tac-no-attention": {"use": "tac", "width": 16, "borrow_attention": False},
    "tac-no-concentration": {"use": "tac", "width": 16, "concentration": False},
    "tac-hidden-states-only": {"use": "tac", "width": 16, "concentration": False, "borrow_attention": False, "memory": 0},
    **{f"tac-depth-{depth}": {"use": "tac", "width": 16, "depth": depth} for depth in (1, 2, 3, 4)},
}
each_critic = pytest.mark.parametrize("knobs", CRITICS.values(), ids=CRITICS.keys())
each_family = pytest.mark.parametrize("family", ["qwen3", "llama"])


def make_agent(knobs: dict, family: str = "qwen3", **config) -> Agent:
    """An agent whose critic is far from its start, where every output is the same."""
    actor = tiny_model(family, **config)
    critic = critics[knobs["use"]].model_validate({k: v for k, v in knobs.items() if k != "use"}).build(actor, BOUNDS).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Agent(actor, critic, 0.9)


def values(agent: Agent, ids, mask, width) -> torch.Tensor:
    with torch.no_grad():
        return agent(ids, mask, width, with_critic=True).values


# --- what a value knows ---------------------------------------------------------------------------
@each_critic
@each_family
def test_a_value_does_not_know_the_token_it_is_read_before_nor_later_ones(knobs, family):
    agent = make_agent(knobs, family)
    ids, mask, width = padded([[3, 4, 5], [6, 7]], [[8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19]], left=1)
    before = values(agent, ids, mask, width)
    assert before.shape == (2, 7) and before.std() > 1e-3
    for t in range(width):
        other = ids.clone()
        other[:, -width + t :] = (other[:, -width + t :] + 4) % 17 + 3
        after = values(agent, other, mask, width)
        assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-6, rtol=0)
        assert (after[:, t + 1] - before[:, t + 1]).abs().min() > 1e-6  # it does know the token before


@each_critic
@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_padding_and_other_rows_change_no_value(knobs, family):
    agent = make_agent(knobs, family)
    ids, mask, width = padded(PROMPTS, RESPONSES)
    plain, order = values(agent, ids, mask, width), torch.tensor([2, 0, 1])
    known = torch.nn.functional.pad(mask[:, -width:], (1, 0), value=1).bool()  # index t is read after t tokens
    wide = values(agent, *padded(PROMPTS, RESPONSES, left=5, right=4))
    assert_close(wide[:, : width + 1][known], plain[known], atol=1e-5, rtol=1e-5)
    assert_close(values(agent, ids[order], mask[order], width)[known[order]], plain[order][known[order]], atol=1e-5, rtol=1e-5)
    alone = values(agent, *padded(PROMPTS[:1], RESPONSES[:1]))
    assert_close(alone[0], plain[0, :5], atol=1e-5, rtol=1e-5)
    assert_close(values(agent, torch.where(mask.bool(), ids, 7), mask, width)[known], plain[known], atol=1e-5, rtol=1e-5)


# --- gradients ------------------------------------------------------------------------------------
@each_critic
@each_family
def test_the_critic_s_loss_reaches_every_part_of_the_critic_and_nothing_of_the_actor(knobs, family):
    agent = make_agent(knobs, family)
    assert agent.critic is not None
    ids, mask, width = padded(PROMPTS, RESPONSES, left=2)
    trace = agent(ids, mask, width, with_critic=True).trace
    raw, _ = agent.values(trace, width)
    loss = agent.critic.head.loss(raw[:, :-1], torch.full((3, width), 0.5)) * mask[:, -width:]
    loss.sum().backward()
    assert all(parameter.grad is None for parameter in agent.actor.parameters())
    for name, parameter in agent.critic.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.ne(0).any(), name


@each_critic
def test_the_trace_carries_no_gradient(knobs):
    agent = make_agent(knobs)
    reading = agent(*padded(PROMPTS, RESPONSES), with_critic=True)
    trace = reading.trace
    tensors = [trace.token_logprobs, trace.entropy, *trace.hidden_states.values(), *trace.concentration.values()]
    tensors += [x for a in trace.attention.values() for x in (a.query, a.key)]
    assert not any(x.requires_grad for x in tensors) and reading.logprobs.requires_grad


@each_critic
def test_critic_and_actor_share_no_weights(knobs):
    agent = make_agent(knobs)
    ids, mask, width = padded(PROMPTS, RESPONSES)
    before = agent(ids, mask, width).logprobs
    with torch.no_grad():
        for parameter in agent.critic.parameters():
            parameter.mul_(2)
    assert torch.equal(agent(ids, mask, width).logprobs, before)


@each_critic
def test_the_critic_changes_nothing_of_what_is_read_of_the_actor(knobs):
    agent = make_agent(knobs)
    batch = padded(PROMPTS, RESPONSES)
    plain, with_critic = agent(*batch), agent(*batch, with_critic=True)
    assert_close(plain.logprobs, with_critic.logprobs)
    assert_close(plain.entropy, with_critic.entropy)


# --- the head -------------------------------------------------------------------------------------
@each_critic
def test_bounded_values_stay_in_the_range_of_rewards(knobs):
    agent = make_agent(knobs)
    with torch.no_grad():
        for parameter in agent.critic.parameters():
            parameter.mul_(30)
    got = values(agent, *padded(PROMPTS, RESPONSES))
    if knobs.get("output") == "scalar":
        assert got.abs().max() > 2
    else:
        assert got.min() >= -1 and got.max() <= 2 and (got - 0.5).abs().max() > 1.49


@each_critic
def test_values_start_in_the_middle_or_near_it(knobs):
    actor = tiny_model()
    critic = critics[knobs["use"]].model_validate({k: v for k, v in knobs.items() if k != "use"}).build(actor, BOUNDS)
    start = values(Agent(actor, critic), *padded(PROMPTS, RESPONSES))
    assert (start - (0 if knobs.get("output") == "scalar" else 0.5)).abs().max() < 0.8


def head_of(output: str):
    return critics["value_head"](output=output).build(tiny_model(), BOUNDS).head


@pytest.mark.parametrize("output", ["bounded", "scalar"])
@pytest.mark.parametrize("target", [-0.9, 0.0, 0.5, 1.7])
def test_the_loss_is_least_where_the_value_is_the_target(output, target):
    head = head_of(output)
    raw = torch.linspace(-6, 6, 2401)
    best = raw[head.loss(raw, torch.full_like(raw, target)).argmin()]
    assert head.value(best).item() == pytest.approx(target, abs=6e-3)
    slope = torch.tensor(best.item(), requires_grad=True)
    head.loss(slope, torch.tensor(target)).backward()
    assert abs(slope.grad.item()) < 6e-3


def test_losses_by_hand():
    bounded, scalar = head_of("bounded"), head_of("scalar")
    zero = torch.zeros(3)
    assert_close(bounded.value(zero), torch.full((3,), 0.5))
    assert_close(bounded.loss(zero, torch.tensor([-1.0, 0.5, 2.0])), torch.full((3,), 2.0).log())
    far = torch.tensor([-9.0, 9.0])
    assert_close(
        bounded.loss(torch.ones(2), far), bounded.loss(torch.ones(2), torch.tensor([-1.0, 2.0]))
    )  # beyond the range: its end
    assert_close(scalar.loss(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 7.0])), torch.tensor([0.5, 8.0]))
    assert_close(scalar.value(far), far)


# --- TAC ------------------------------------------------------------------------------------------
@each_family
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 3])
def test_tac_mixes_its_values_with_the_actor_s_attention(family, kv_heads, depth):
    """The tower written out, with the actor's eager attention maps in place of its queries and keys."""
    knobs = {"use": "tac", "width": 16, "depth": depth, "memory": 0, "concentration": False}
    agent = make_agent(knobs, family, kv_heads=kv_heads)
    ids, mask, width = padded(PROMPTS, RESPONSES, left=2, right=1)
    trace = agent(ids, mask, width, with_critic=True).trace
    with torch.no_grad():
        eager = eager_twin(agent.actor)(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            output_attentions=True,
            use_cache=False,
        )
        tokens, x = mask.unsqueeze(2), 0.0
        emitted = torch.stack([trace.token_logprobs, trace.entropy], 2) * tokens
        for block, layer in zip(agent.critic.blocks, [3] if depth == 1 else [1, 2, 3], strict=True):
            state = block.read_norm(trace.hidden_states[layer]) * tokens
            before = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], 1)
            x = x + block.read(torch.cat([state, before, emitted], 2))
            value = block.mix_value(block.mix_norm(x)).view(*ids.shape, kv_heads, 8).transpose(1, 2)
            mixed = eager.attentions[layer - 1] @ value.repeat_interleave(4 // kv_heads, 1)
            x = x + block.mix_out(mixed.transpose(1, 2).flatten(2))
            x = x + block.think(x)
        expected = agent.critic.out(agent.critic.norm(x)).squeeze(2)
        got = agent.critic(trace)
    assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


def test_tac_s_attention_reaches_a_token_that_no_neighbour_knows():
    """A change early in the response reaches a late value through attention or memory alone."""
    ids, mask, width = padded([[3, 4]], [[5, 6, 7, 8, 9, 10, 11, 12]])
    trace = make_agent(CRITICS["tac"])(ids, mask, width, with_critic=True).trace

    def last_value(knobs: dict, change: float) -> torch.Tensor:
        agent = make_agent(knobs)
        states = {layer: x.clone() for layer, x in trace.hidden_states.items()}
        for x in states.values():
            x[0, 2] += change * torch.linspace(-1, 1, x.shape[2])
        changed = Trace(ids, mask, states, trace.attention, trace.token_logprobs, trace.entropy, trace.concentration)
        return agent.values(changed, width)[1][0, -1]

    blind = {"use": "tac", "width": 16, "memory": 0, "borrow_attention": False}
    assert torch.equal(last_value(blind, 0.0), last_value(blind, 5.0))
    for knobs in ({"use": "tac", "width": 16, "memory": 0}, {**blind, "memory": 32}):
        assert (last_value(knobs, 0.0) - last_value(knobs, 5.0)).abs() > 1e-5


def test_tac_reads_a_ladder_of_layers_up_to_the_last():
    actor = tiny_model(layers=8)

    def build(**knobs):
        return critics["tac"](width=16, **knobs).build(actor, BOUNDS)

    assert [build(depth=depth).reads_hidden for depth in (1, 2, 4)] == [(8,), (4, 8), (2, 4, 6, 8)]
    assert build(depth=2).reads_attention == (3, 7)  # the attention of the layers whose output it reads
    assert build(borrow_attention=False, concentration=False).reads_attention == ()


def test_tac_is_small_and_the_standard_critic_is_another_actor():
    actor = tiny_model(layers=8)

    def size(module):
        return sum(p.numel() for p in module.parameters())

    base = size(actor.base_model)
    assert size(critics["standard"]().build(actor, BOUNDS)) == base + 33
    assert size(critics["tac"](width=4, depth=1, memory=0).build(actor, BOUNDS)) < 0.05 * base


def test_the_standard_critic_starts_from_the_actor_s_weights():
    actor = tiny_model()
    critic = critics["standard"]().build(actor, BOUNDS)
    ids, mask, _ = padded(PROMPTS, RESPONSES)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        nn.init.normal_(critic.out.weight)
        states = actor.base_model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        trace = Trace(ids, mask, {}, {}, torch.zeros(ids.shape), torch.zeros(ids.shape))
        assert_close(critic(trace)[mask.bool()], (states @ critic.out.weight[0])[mask.bool()], atol=1e-5, rtol=1e-5)
