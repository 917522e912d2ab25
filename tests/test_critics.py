"""Critics: what they may know, that the actor feels nothing of them, and that TAC attends as the actor does."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from conftest import eager_twin, make_mask, make_rollout, padded, tiny_model
from hypothesis import given
from pydantic import ValidationError
from torch import nn
from torch.testing import assert_close

from cct.agent.agent import Agent
from cct.critic import critics
from cct.critic.functional import at_level, group_mean, hl_gauss, prompt_numbers, rank_in_group, two_hot
from cct.rollout import Trace

PROMPTS, RESPONSES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]], [[12, 13, 14, 15], [16, 17, 18, 19, 3, 4, 1], [5]]
BOUNDS = (-1.0, 2.0)
NAN = float("nan")

CRITICS = {
    "standard": {"use": "standard"},
    "value_head": {"use": "value_head", "width": 16},
    "scalar": {"use": "tac", "width": 16, "output": "scalar"},
    "tac": {"use": "tac", "width": 16},
    "tac-no-memory": {"use": "tac", "width": 16, "memory": 0},
    "tac-no-attention": {"use": "tac", "width": 16, "borrow_attention": False},
    "tac-no-concentration": {"use": "tac", "width": 16, "concentration": False},
    "tac-hidden-states-only": {"use": "tac", "width": 16, "concentration": False, "borrow_attention": False, "memory": 0},
    "tac-ladder": {"use": "tac", "width": 16, "ladder": [1, -1]},
    "hl_gauss": {"use": "tac", "width": 16, "output": "hl_gauss", "bins": 11},
    "two_hot": {"use": "value_head", "width": 16, "output": "two_hot", "bins": 7},
    "standard-hl_gauss": {"use": "standard", "output": "hl_gauss"},
    "mini_critics": {"use": "mini_critics", "of": {"use": "tac", "width": 16, "depth": 1}, "count": 3},
    "group_level": {"use": "group_level", "of": {"use": "tac", "width": 16}},
    "mini_critics-two_hot": {"use": "mini_critics", "of": {"use": "value_head", "width": 16, "output": "two_hot", "bins": 7}},
    "mini_critics-ladder": {"use": "mini_critics", "of": {"use": "tac", "width": 16, "depth": 2, "ladder": [2, 3]}},
    "group_mean": {"use": "group_mean", "of": {"use": "tac", "width": 16}},
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
    if knobs["use"] == "mini_critics":  # of which some say one end and some the other
        assert got.min() >= -1 and got.max() <= 2 and (got - 0.5).abs().max() > 0.4
    elif knobs.get("output") == "scalar":
        assert got.abs().max() > 2
    else:
        assert got.min() >= -1 and got.max() <= 2 and (got - 0.5).abs().max() > 1.49


@each_critic
def test_values_start_in_the_middle_or_near_it(knobs):
    actor = tiny_model()
    critic = critics[knobs["use"]].model_validate({k: v for k, v in knobs.items() if k != "use"}).build(actor, BOUNDS)
    start = values(Agent(actor, critic), *padded(PROMPTS, RESPONSES))
    assert (start - (0 if knobs.get("output") == "scalar" else 0.5)).abs().max() < 0.8


def head_of(output: str, **knobs):
    return critics["value_head"](output=output, **knobs).build(tiny_model(), BOUNDS).head


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


# --- bins -----------------------------------------------------------------------------------------
TARGETS = torch.linspace(-1, 2, 61, dtype=torch.float64)


def test_two_hot_by_hand():
    atoms = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    got = two_hot(torch.tensor([-1.0, 0.25, 1.0, 2.0, -9.0, 9.0]), atoms)
    expected = [[1, 0, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1]]
    assert_close(got, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("bins", [2, 7, 51])
def test_the_mean_of_a_two_hot_target_is_the_target(bins):
    atoms = torch.linspace(-1, 2, bins, dtype=torch.float64)
    got = two_hot(TARGETS, atoms)
    assert_close((got * atoms).sum(1), TARGETS)
    assert_close(got.sum(1), torch.ones_like(TARGETS))
    assert got.min() >= 0 and (got > 1e-12).sum(1).max() <= 2


def test_hl_gauss_by_hand():
    """Bins [-0.5, 0.5] and [0.5, 1.5], target 0.5, deviation 1: half and half. Target 0, deviation 0.5: 1 and 3 deviations."""
    atoms = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert_close(hl_gauss(torch.tensor(0.5, dtype=torch.float64), atoms, 1.0), torch.tensor([0.5, 0.5], dtype=torch.float64))
    inner, all_of_it = 0.6826894921, (0.6826894921 + 0.9973002039) / 2  # within 1 deviation; from -1 to 3
    expected = torch.tensor([inner / all_of_it, 1 - inner / all_of_it], dtype=torch.float64)
    assert_close(hl_gauss(torch.tensor(0.0, dtype=torch.float64), atoms, 0.5), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("bins", [2, 7, 51])
def test_an_hl_gauss_target_sums_to_1_and_keeps_its_mean_up_to_the_ends(bins):
    head = head_of("hl_gauss", bins=bins)
    assert head.outputs == bins + 6
    atoms = head.atoms(TARGETS).double()
    assert atoms[3].item() == pytest.approx(-1.0) and atoms[-4].item() == pytest.approx(2.0)
    got = hl_gauss(TARGETS, atoms, 0.75 * head.width)
    assert_close(got.sum(1), torch.ones_like(TARGETS))
    assert_close((got * atoms).sum(1), TARGETS, atol=1e-5 * head.width, rtol=0)


@pytest.mark.parametrize("output", ["hl_gauss", "two_hot"])
@pytest.mark.parametrize("target", [-1.0, -0.3, 0.0, 1.99, 2.0, 7.0])
def test_bins_learn_the_target(output, target):
    """Gradient descent on the loss ends where the value is the target, or the end of the range."""
    head = head_of(output, bins=11)
    raw, goal = torch.zeros(head.outputs, requires_grad=True), torch.tensor(target)
    optimizer = torch.optim.Adam([raw], lr=0.1)
    for _ in range(600):
        optimizer.zero_grad()
        head.loss(raw, goal).backward()
        optimizer.step()
    assert head.value(raw).item() == pytest.approx(min(target, 2.0), abs=0.02)


def test_the_loss_of_bins_by_hand():
    head = head_of("two_hot", bins=4)
    assert_close(head.loss(torch.zeros(2, 4), torch.tensor([0.3, 1.0])), torch.full((2,), 4.0).log())
    raw = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert_close(head.loss(raw, torch.tensor(0.25)), -torch.tensor(0.75 * math.log(0.2) + 0.25 * math.log(0.3)))
    assert head.value(raw).item() == pytest.approx(-0.1 + 0.3 + 0.8)


# --- value clipping -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value, target, loss, gradient",  # the old value is 1, the clip 0.5
    [
        (1.2, 3.0, 0.5 * 1.8**2, -1.8),  # within the clip
        (2.0, 3.0, 0.5 * 1.5**2, 0.0),  # as if it had stayed at 1.5
        (2.0, 0.0, 0.5 * 2.0**2, 2.0),  # it went the wrong way
        (0.0, -1.0, 0.5 * 1.5**2, 0.0),
        (2.0, 1.6, 0.5 * 0.4**2, 0.4),  # beyond its target: the clipped one is nearer
    ],
)
def test_value_clipping_by_hand(value, target, loss, gradient):
    head, raw = head_of("scalar", value_clip=0.5), torch.tensor([value], requires_grad=True)
    got = head.loss(raw, torch.tensor([target]), old=torch.tensor([1.0]))
    got.sum().backward()
    assert got.item() == pytest.approx(loss) and raw.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("output", ["bounded", "hl_gauss", "two_hot"])
def test_value_clipping_stops_distributions_where_it_stops_scalars(output):
    head = head_of(output, value_clip=0.25)
    shape = (1,) if head.outputs == 1 else (1, head.outputs)
    for target, old, stopped in ((1.9, 0.0, True), (1.9, 0.4, False), (-0.9, 1.0, True), (-0.9, 0.0, False)):
        raw = torch.zeros(shape, requires_grad=True)  # the value is 0.5
        loss = head.loss(raw, torch.tensor([target]), old=torch.tensor([old]))
        loss.sum().backward()
        assert raw.grad.eq(0).all() == stopped
        assert_close(loss, head_of(output).loss(raw, torch.tensor([target])))


def test_without_a_clip_old_values_change_nothing():
    head, raw = head_of("scalar"), torch.tensor([2.0])
    assert torch.equal(head.loss(raw, torch.tensor([3.0]), old=torch.tensor([1.0])), head.loss(raw, torch.tensor([3.0])))


# --- mini-critics ---------------------------------------------------------------------------------
def test_the_value_is_the_mean_of_the_mini_critics_and_their_deviation_a_statistic():
    agent = make_agent(CRITICS["mini_critics"])
    ids, mask, width = padded(PROMPTS, RESPONSES)
    with torch.no_grad():
        reading = agent(ids, mask, width, with_critic=True)
        each = torch.stack([tower.head.value(tower(reading.trace)[:, -width - 1 :]) for tower in agent.critic.members], 2)
    assert_close(reading.values, each.mean(2))
    assert_close(reading.stats["value_disagreement"], each.std(2, correction=0)[:, :-1])
    assert reading.stats["value_disagreement"].min() > 1e-4
    assert_close(reading.trace.values, each)


@pytest.mark.parametrize("name", ["mini_critics", "mini_critics-two_hot"])
def test_each_mini_critic_learns_from_the_rows_dealt_to_it_alone(name):
    agent = make_agent(CRITICS[name])
    ids, mask, width = padded(PROMPTS, RESPONSES)
    trace, count = agent(ids, mask, width, with_critic=True).trace, len(agent.critic.members)
    keys = torch.tensor([7 * count + 1, 1, 5 * count])  # to critic 1, 1 and 0
    raw = agent.values(trace, width)[0][:, :-1]
    target = torch.full((3, width), 0.3)
    losses = agent.critic.head.loss(raw, target, keys=keys)
    for row, member in enumerate([1, 1, 0]):
        assert_close(losses[row], agent.critic.members[member].head.loss(raw[row, :, member], target[row]))
    losses[:2].sum().backward()
    for number, tower in enumerate(agent.critic.members):
        grads = [parameter.grad for parameter in tower.parameters()]
        assert all(g is None or g.eq(0).all() for g in grads) == (number != 1)


def test_responses_to_a_prompt_are_numbered_in_their_order():
    assert rank_in_group(torch.tensor([5, 2, 5, 5, 2, 9])).tolist() == [0, 0, 1, 2, 1, 0]
    assert rank_in_group(torch.tensor([3, 3, 3])).tolist() == [0, 1, 2]


def test_a_prompt_has_one_number_wherever_it_stands():
    prompts = [[3, 4, 5], [5, 4, 3], [3, 4], [3, 4, 5, 6], [4, 4, 5]]
    ids, mask, _ = padded(prompts, [[7]] * 5)
    wider, wider_mask, _ = padded(prompts[::-1], [[7]] * 5, left=9)
    numbers = prompt_numbers(ids[:, :-1], mask[:, :-1])
    assert numbers.unique().numel() == 5 and numbers.min() >= 0
    assert torch.equal(prompt_numbers(wider[:, :-1], wider_mask[:, :-1]).flip(0), numbers)
    other = ids.masked_fill(mask == 0, 9)
    assert torch.equal(prompt_numbers(other[:, :-1], mask[:, :-1]), numbers)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_prompts_are_shared_out_evenly(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 150_000, (3000, 12), generator=generator)
    shares = torch.bincount(prompt_numbers(ids, torch.ones_like(ids)) % count, minlength=count) / 3000
    assert (shares - 1 / count).abs().max() < 0.04


# --- group mean -----------------------------------------------------------------------------------
def test_the_group_mean_leaves_the_response_s_own_target_out():
    x, groups = torch.tensor([1.0, 2.0, 6.0, NAN, 5.0, 4.0]), torch.tensor([8, 8, 8, 8, 3, 2])
    valid = torch.tensor([True, True, True, False, True, True])
    mean, count = group_mean(x, groups, valid)
    assert count.tolist() == [2, 2, 2, 3, 0, 0]
    assert mean.tolist() == [4.0, 3.5, 1.5, 3.0, 0.0, 0.0]
    mean, count = group_mean(x, groups, valid, leave_one_out=False)
    assert mean.tolist() == [3.0, 3.0, 3.0, 3.0, 5.0, 4.0] and count.tolist() == [3, 3, 3, 3, 1, 1]


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_values_between_the_group_s_mean_and_the_critic_s(weight):
    rollout = make_rollout(mask=make_mask("0111", "1100", "1111", "0000"), groups=torch.tensor([0, 0, 1, 1]))
    rollout = rollout.replace(truncated=torch.tensor([True, False, True, False]), bootstrap=torch.tensor([0.2, 0.0, 0.4, 0.0]))
    targets = torch.tensor([[NAN, 0.7, 9.0, 9.0], [0.3, 9.0, NAN, NAN], [0.5, 9.0, 9.0, 9.0], [NAN] * 4])
    got = critics["group_mean"](weight=weight).baseline(rollout, targets, (0.0, 1.0))
    assert_close(got.values[0], weight * rollout.values[0] + (1 - weight) * 0.3)
    assert_close(got.values[1], weight * rollout.values[1] + (1 - weight) * 0.7)
    assert_close(got.values[2], rollout.values[2])  # alone: the other one was dropped
    assert got.bootstrap.tolist() == pytest.approx([weight * 0.2 + (1 - weight) * 0.3, 0.0, 0.4, 0.0])
    assert critics["group_mean"](weight=weight).baseline(rollout.replace(bootstrap=None), targets, (0.0, 1.0)).bootstrap is None


def test_values_are_shifted_in_log_odds():
    """At odds of 1 to 1 for `first` and 4 to 1 for `level` all odds become four times as great; the ends stay."""
    values = torch.tensor([[0.5, 0.2, 0.0, 1.0, 1 / 3]])
    expected = torch.tensor([[0.8, 0.5, 0.0, 1.0, 2 / 3]])
    assert_close(at_level(values, torch.tensor([0.5]), torch.tensor([0.8]), (0.0, 1.0)), expected, atol=1e-5, rtol=0)
    wide = at_level(values * 4 - 1, torch.tensor([1.0]), torch.tensor([2.2]), (-1.0, 3.0))
    assert_close(wide, expected * 4 - 1, atol=4e-5, rtol=0)
    assert_close(at_level(values, torch.tensor([0.3]), torch.tensor([0.3]), (0.0, 1.0)), values, atol=1e-5, rtol=0)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([(0.0, 1.0), (-0.5, 2.0)]),
)
def test_a_level_keeps_the_order_and_the_range(values, first, level, bounds):
    low, width = bounds[0], bounds[1] - bounds[0]
    given_values = low + width * torch.tensor([sorted(values)], dtype=torch.float64)
    first, level = (low + width * torch.tensor([x], dtype=torch.float64) for x in (first, level))
    got = at_level(given_values, first, level, bounds)
    assert (got.diff() >= 0).all() and (got >= bounds[0]).all() and (got <= bounds[1]).all()
    assert_close(at_level(first.unsqueeze(1), first, level, bounds).squeeze(1), level, atol=1e-5 * width, rtol=0)


def test_a_critic_s_shape_at_the_group_s_level():
    """Each first value counts as one response more: (0.2 + 0.8 + 2 * 0.5) / 4 for the first response."""
    rollout = make_rollout(mask=make_mask("0111", "1100", "1010", "1111", "0000"), groups=torch.tensor([0, 0, 0, 1, 1]))
    rollout = rollout.replace(
        values=torch.tensor([[NAN, 0.5, 0.2, 0.5], [0.5, 0.8, NAN, NAN], [0.5, NAN, 0.9, NAN], [0.3] * 4, [NAN] * 4]),
        truncated=torch.tensor([True, False, False, True, False]),
        bootstrap=torch.tensor([0.2, 0.0, 0.0, 0.7, 0.0]),
    )
    targets = torch.tensor([[NAN, 0.6, 9.0, 9.0], [0.2, 9.0, NAN, NAN], [0.8, 9.0, 9.0, 9.0], [0.9] * 4, [NAN] * 4])
    got = critics["group_level"](prior=2.0).baseline(rollout, targets, (0.0, 1.0))
    assert_close(got.values[0, 1:], torch.tensor([0.5, 0.2, 0.5]), atol=1e-5, rtol=0)  # (0.2 + 0.8 + 1) / 4 is its own
    assert_close(got.values[1, 0], torch.tensor(0.6), atol=1e-5, rtol=0)  # (0.6 + 0.8 + 1) / 4
    odds = 0.45 / 0.55 * 9  # (0.6 + 0.2 + 1) / 4 in place of 0.5
    assert_close(got.values[2, [0, 2]], torch.tensor([0.45, odds / (1 + odds)]), atol=1e-5, rtol=0)
    assert_close(got.values[3], rollout.values[3], atol=1e-5, rtol=0)  # alone: the other one was dropped
    assert got.bootstrap.tolist() == pytest.approx([0.2, 0.0, 0.0, 0.7, 0.0], abs=1e-5)
    assert critics["group_level"]().baseline(rollout.replace(bootstrap=None), targets, (0.0, 1.0)).bootstrap is None


def test_only_some_critics_stand_in_others():
    mini, mean, level = critics["mini_critics"], critics["group_mean"], critics["group_level"]
    assert mean(of=mini()).provides == {"values", "disagreement"} and mean(of=mini()).needs == {"groups"}
    for outer, inner in itertools.product((mini, mean, level), (mean, level)):
        with pytest.raises(ValidationError, match="single critics|a critic that does not use the group"):
            outer(of=inner())
    with pytest.raises(ValidationError, match="^.*\n.*group_level needs a critic that does not use the group; 'group_mean'"):
        level(of=mean())
    with pytest.raises(ValidationError, match="single critics"):
        mini(of=mini())
    assert all(kind().bounded for kind in (critics["tac"], mini, mean, level))
    scalar = critics["tac"](output="scalar")
    with pytest.raises(ValidationError, match="scalar"):
        level(of=scalar)
    assert not any(part.bounded for part in (scalar, mini(of=scalar), mean(of=scalar), mean(of=mini(of=scalar))))


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


def test_the_ladder_names_the_layers():
    actor = tiny_model(layers=8)
    tower = critics["tac"](width=16, depth=3, ladder=(1, 5, -1)).build(actor, BOUNDS)
    assert tower.reads_hidden == (1, 5, 8) and tower.reads_attention == (0, 4, 7) and len(tower.blocks) == 3
    with pytest.raises(ValidationError, match="3 layers.*depth"):
        critics["tac"](ladder=(1, 2, 3))
    for ladder in ((0, 1), (1, 9), (-9, 1)):
        with pytest.raises(ValueError, match="8 layers"):
            critics["tac"](ladder=ladder).build(actor, BOUNDS)


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
