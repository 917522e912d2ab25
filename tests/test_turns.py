"""Credit over turns and segments: numbers by hand, definitions as loops, and what they reduce to."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import make_mask, make_rollout
from torch.testing import assert_close

from cct.loading import load_recipe
from cct.transport import (
    bi_level_gae,
    gated_gae,
    gigpo_advantage,
    group_advantage,
    segment_advantage,
    transports,
    turn_gae,
    turn_return,
)
from cct.transport.functional import from_start, starts_after, starts_at_cuts, turn_ends, turn_starts

NAN = float("nan")
MASKS = make_mask("1110011111", "1111111111", "1000000000", "0111110011", "0000000000", "1101100101")


def T(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def turns_of(mask: torch.Tensor) -> list[list[int]]:
    """Places of each run of unmasked tokens in one row."""
    turns: list[list[int]] = []
    for t in mask.nonzero().flatten().tolist():
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


# --- turns ----------------------------------------------------------------------------------------
def test_turns_are_runs_of_emitted_tokens():
    for mask, starts, ends in zip(MASKS, turn_starts(MASKS), turn_ends(MASKS), strict=True):
        assert starts.nonzero().flatten().tolist() == [turn[0] for turn in turns_of(mask)]
        assert ends.nonzero().flatten().tolist() == [turn[-1] for turn in turns_of(mask)]


def test_bi_level_gae_by_hand():
    # turns (0 1) and (4 5); gamma_turn .5, lam_turn .5, gamma 1, lam .5; r = 0 0, 1 2; V = .1 .2, .3 .4
    # last turn: A_5 = 2 - .4 = 1.6;  A_4 = 1 + .4 - .3 + .5*1.6 = 1.9
    # turn 1 ends: A_1 = 0 + 1 (before turn 2's last token) + .5*.4 - .2 + .25*1.6 = 1.4;  A_0 = .2 - .1 + .5*1.4 = .8
    mask = make_mask("11001100")
    rewards, values = T([0, 0, NAN, 9, 1, 2, 9, 9]), T([0.1, 0.2, NAN, 9, 0.3, 0.4, 9, 9])
    advantages, targets = bi_level_gae(rewards, values, mask, gamma=1.0, lam=0.5, gamma_turn=0.5, lam_turn=0.5, lam_value=0.5)
    assert_close(advantages, T([0.8, 1.4, 0, 0, 1.9, 1.6, 0, 0]))
    assert_close(targets, T([0.9, 1.6, 0, 0, 2.2, 2.0, 0, 0]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lam_value", [1.0, 0.4])
def test_bi_level_gae_equals_its_definition_as_a_loop(seed, lam_value):
    rollout = make_rollout(mask=MASKS, seed=seed)
    knobs = {"gamma": 0.9, "lam": 0.8, "gamma_turn": 0.7, "lam_turn": 0.6}
    rewards, values = rollout.rewards.double(), rollout.values.double()
    got = bi_level_gae(rewards, values, MASKS, **knobs, lam_value=lam_value, bootstrap=rollout.bootstrap)

    def loop(row: int, lam: float, lam_turn: float) -> dict[int, float]:
        r, v, found, later = rewards[row].tolist(), values[row].tolist(), {}, None
        for turn in reversed(turns_of(MASKS[row])):
            end = turn[-1]
            if later is None:
                found[end] = r[end] + 0.9 * rollout.bootstrap[row].item() - v[end]
            else:
                reward = r[end] + sum(r[t] for t in later[:-1])
                found[end] = reward + 0.7 * v[later[-1]] - v[end] + 0.7 * lam_turn * found[later[-1]]
            for t in reversed(turn[:-1]):
                found[t] = r[t] + 0.9 * v[t + 1] - v[t] + 0.9 * lam * found[t + 1]
            later = turn
        return found

    for row in range(len(MASKS)):
        for t, expected in loop(row, 0.8, 0.6).items():
            assert got[0][row, t].item() == pytest.approx(expected, abs=1e-12)
        for t, expected in loop(row, lam_value, lam_value).items():
            assert got[1][row, t].item() == pytest.approx(values[row, t].item() + expected, abs=1e-12)
    assert got[0][~MASKS].eq(0).all() and got[1][~MASKS].eq(0).all()


def test_bi_level_gae_of_one_turn_is_gae():
    mask = make_mask("1111111", "0111100", "1000000")
    rollout = make_rollout(mask=mask)
    knobs = {"gamma": 0.9, "lam": 0.8, "lam_value": 0.7, "whiten": False}
    one, gae = transports["bi_level_gae"](gamma_turn=0.3, lam_turn=0.2, **knobs)(rollout), transports["gae"](**knobs)(rollout)
    assert_close(one.advantages, gae.advantages)
    assert_close(one.value_targets, gae.value_targets)


def test_bi_level_gae_without_any_decay_is_the_return_minus_the_value():
    rollout = make_rollout(mask=MASKS, bootstrap=torch.zeros(6))
    assert_close(
        transports["bi_level_gae"](whiten=False)(rollout).advantages,
        transports["monte_carlo"](whiten=False)(rollout).advantages,
    )


@pytest.mark.parametrize("knobs", [{"gamma": 0.5, "lam": 0.5, "lam_value": 0.25}, {"gamma": 0.9, "lam": 1.0, "lam_value": 0.0}])
def test_turn_gae_equals_its_definition_as_a_loop(knobs):
    rollout = make_rollout(mask=MASKS, seed=3)
    rewards, values = rollout.rewards.double(), rollout.values.double()
    got = turn_gae(rewards, values, MASKS, **knobs, bootstrap=rollout.bootstrap)
    for row in range(len(MASKS)):
        v_next = rollout.bootstrap[row].item()
        advantage = trace = 0.0
        for turn in reversed(turns_of(MASKS[row])):
            r, v = rewards[row, turn], values[row, turn[0]].item()
            delta = r.sum().item() + knobs["gamma"] * v_next - v
            advantage = delta + knobs["gamma"] * knobs["lam"] * advantage
            trace = delta + knobs["gamma"] * knobs["lam_value"] * trace
            for place, t in enumerate(turn):
                assert got[0][row, t].item() == pytest.approx(advantage, abs=1e-12)
                assert got[1][row, t].item() == pytest.approx(v + trace - r[:place].sum().item(), abs=1e-12)
            v_next = v
    assert got[0][~MASKS].eq(0).all() and got[1][~MASKS].eq(0).all()


def test_turn_gae_by_hand():
    # turns (0 1) and (4 5), gamma .5, lam .5: A_2 = 1 + 2 + .5 * 4 - .3 = 4.7;  A_1 = 1 + .5 * .3 - .1 + .25 * 4.7 = 2.225
    rewards, values = T([0, 1, NAN, 9, 1, 2, 9, 9]), T([0.1, 7, NAN, 9, 0.3, -5, 9, 9])
    after = torch.tensor([4.0])
    got = turn_gae(rewards, values, make_mask("11001100"), gamma=0.5, lam=0.5, lam_value=1.0, bootstrap=after)
    assert_close(got[0], T([2.225, 2.225, 0, 0, 4.7, 4.7, 0, 0]))
    # targets: 3 + .5 * 4 = 5 and 5 - 1;  1 + .5 * 5 = 3.5, twice, since nothing is given before the second token
    assert_close(got[1], T([3.5, 3.5, 0, 0, 5, 4, 0, 0]))


def test_turn_gae_with_turns_of_one_token_is_gae():
    rollout = make_rollout(mask=make_mask("1010101", "0100100"))
    knobs = {"gamma": 0.9, "lam": 0.8, "lam_value": 0.7}
    one, gae = transports["turn_gae"](**knobs)(rollout), transports["gae"](**knobs)(rollout)
    assert_close(one.advantages, gae.advantages)
    assert_close(one.value_targets, gae.value_targets)


def test_turn_return_by_hand():
    # Returns from each turn on: 3 2 | 5 | 1 1 ... of 3, 5 and 1 the others' means are 3, 2 and 4.
    mask = make_mask("1101", "1110", "1011", "0000")
    rewards = T([0, 1, NAN, 2], [0, 0, 5, 9], [0, 9, 0, 1], [9, 9, 9, 9])
    groups = torch.zeros(4).long()
    assert_close(turn_return(rewards, mask, groups), T([0, 0, 0, -1], [3, 3, 3, 0], [-3, 0, -3, -3], [0] * 4))
    # discounted by .5 per turn: 2 2 | 5 | .5 1; the others' means of 2, 5 and .5 are 2.75, 1.25 and 3.5
    got = turn_return(rewards, mask, groups, gamma=0.5)
    assert_close(got, T([-0.75, -0.75, 0, -0.75], [3.75] * 3 + [0], [-3, 0, -2.5, -2.5], [0] * 4))
    # per turn: means 1 + 5 + 0 over three, 2 + 1 over two; centred -1, .5 | 3 | -2, -.5
    got = turn_return(rewards, mask, groups, baseline="turn")
    assert_close(got, T([-0.5, -0.5, 0, 0.5], [3, 3, 3, 0], [-2.5, 0, -0.5, -0.5], [0] * 4))
    alone = torch.arange(4)
    assert turn_return(rewards, mask, alone).eq(0).all() and turn_return(rewards, mask, alone, baseline="turn").eq(0).all()


def test_turn_return_of_one_reward_at_the_end_is_leave_one_out():
    rollout = make_rollout(mask=MASKS)
    last = MASKS & (MASKS.flip(1).cumsum(1).flip(1) == 1)
    rollout = rollout.replace(rewards=rollout.rewards * last)
    assert_close(transports["turn_return"]()(rollout).advantages, transports["rloo"]()(rollout).advantages)


# A policy that may stop: after each of its turns but the last it goes on with probability p. Turns are tokens, masked ones lie
# between them; the decision at a turn is that turn's token. PAID[k]: what turn k gives.
PAID = (-0.25, 1.0, -0.5)
GO_ON = (0.3, 0.6)


def expected_gradient(advantages_of, size: int = 3) -> torch.Tensor:
    """The mean policy gradient by the logits of going on after each turn, over all groups of `size` episodes."""
    turns = range(1, len(PAID) + 1)
    probability, scores = {}, {}
    for n in turns:
        went_on = [1.0] * (n - 1) + [0.0] * (n <= len(GO_ON))
        probability[n] = math.prod(p if go else 1 - p for p, go in zip(GO_ON, went_on, strict=False))
        scores[n] = [go - p for p, go in zip(GO_ON, went_on, strict=False)]  # d log pi / d logit, at each decision
    total = torch.zeros(len(GO_ON), dtype=torch.float64)
    for group in itertools.product(turns, repeat=size):
        mask = make_mask(*("101010"[: 2 * n].ljust(6, "0") for n in group))
        rewards = torch.tensor([[PAID[0], 9, PAID[1], 9, PAID[2], 9]] * size, dtype=torch.float64)
        advantages = advantages_of(rewards, mask, torch.zeros(size).long())[:, ::2]
        weight = math.prod(probability[n] for n in group) / size
        for row, n in enumerate(group):
            for k, score in enumerate(scores[n]):
                total[k] += weight * score * advantages[row, k]
    return total


def test_turn_return_has_the_true_policy_gradient_where_the_policy_decides_when_to_stop():
    p, q = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (math.log(0.3 / 0.7), math.log(0.6 / 0.4)))
    value = PAID[0] + p.sigmoid() * (PAID[1] + q.sigmoid() * PAID[2])
    true = torch.stack(torch.autograd.grad(value, (p, q)))
    assert true[0] > 0.1 and true[1] < -0.02  # one more turn pays, a third does not
    assert_close(expected_gradient(turn_return), true)
    biased = expected_gradient(lambda *x: turn_return(*x, baseline="turn"))
    assert abs(biased[0]) < 1e-12 and abs(biased[1]) < 1e-12  # every turn is worth its own mean: nothing is learnt


def test_per_turn_means_point_the_wrong_way_where_the_decision_itself_has_a_price():
    """Going on costs .25 at once and brings 1 with the next turn: to be learnt. By per-turn means it is unlearnt."""
    probability, true = 0.4, 0.4 * 0.6 * (1 - 0.25)
    found = {"episode": 0.0, "turn": 0.0}
    for group in itertools.product([True, False], repeat=2):
        mask = make_mask(*("101" if go else "100" for go in group))
        rewards = torch.tensor([[-0.25 if go else 0.0, 9.0, 1.0] for go in group])
        weight = math.prod(probability if go else 1 - probability for go in group) / 2
        for baseline in found:
            advantages = transports["turn_return"](baseline=baseline)(
                make_rollout(mask=mask, rewards=rewards, groups=torch.zeros(2).long())
            ).advantages
            found[baseline] += sum(weight * (go - probability) * advantages[row, 0].item() for row, go in enumerate(group))
    assert found["episode"] == pytest.approx(true) and true > 0
    assert found["turn"] == pytest.approx(-0.4 * 0.6 * 0.25 / 2)  # the price alone, halved as each counts in its own mean


def test_gigpo_by_hand():
    # Two responses to one prompt, two turns each. First turns begin in state 0, second ones in states 1 and 2: alone.
    mask, rewards = make_mask("110110", "110110"), T([0, 0, 9, 0, 1, 9], [0, 0, NAN, 0, 0, 9])
    anchors = torch.tensor([[0, 5, 5, 1, 5, 5], [0, 6, 6, 2, 6, 6]])  # read at first tokens only
    got = gigpo_advantage(rewards, mask, torch.tensor([3, 3]), anchors, gamma=0.5, weight=2.0, std=False)
    # response: 1 and 0, centred +-.5.  first turns: returns .5*1 and 0, centred +-.25, twice: +-.5
    assert_close(got, T([1, 1, 0, 0.5, 0.5, 0], [-1, -1, 0, -0.5, -0.5, 0]))
    negative = torch.where(anchors == 0, -1, anchors)  # in no known state
    assert_close(
        gigpo_advantage(rewards, mask, torch.tensor([3, 3]), negative, gamma=0.5, weight=2.0, std=False),
        T([0.5, 0.5, 0, 0.5, 0.5, 0], [-0.5, -0.5, 0, -0.5, -0.5, 0]),
    )


@pytest.mark.parametrize("std", [True, False])
def test_gigpo_compares_like_turns_of_one_group_as_grpo_compares_responses(std):
    rollout = make_rollout(mask=MASKS, seed=5)
    got = gigpo_advantage(rollout.rewards, MASKS, rollout.groups, rollout.anchors, gamma=0.7, weight=3.0, std=std)
    scores, keys, places = [], [], []
    for row in range(len(MASKS)):
        turns = turns_of(MASKS[row])
        for number, turn in enumerate(turns):
            onwards = sum(0.7**k * rollout.rewards[row, later].sum().item() for k, later in enumerate(turns[number:]))
            scores.append(onwards)
            keys.append(10 * rollout.groups[row].item() + rollout.anchors[row, turn[0]].item())
            places.append((row, turn))
    of_turns = group_advantage(torch.tensor(scores), torch.tensor(keys), scale="group" if std else "none")
    whole = group_advantage(rollout.scores, rollout.groups, scale="group" if std else "none", valid=rollout.valid)
    expected = torch.zeros(MASKS.shape)
    for (row, turn), x in zip(places, of_turns, strict=True):
        expected[row, turn] = whole[row] + 3 * x
    assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_gigpo_without_its_turns_is_grpo():
    rollout = make_rollout(mask=MASKS)
    assert_close(transports["gigpo"](weight=0.0)(rollout).advantages, transports["grpo"]()(rollout).advantages)


def test_gigpo_needs_an_environment_that_names_its_states():
    with pytest.raises(ValueError, match="anchors"):
        transports["gigpo"]()(make_rollout(anchors=None))
    with pytest.raises(ValueError, match="'gigpo' needs anchors, and nothing in this recipe provides it"):
        load_recipe(Path(__file__).parents[1] / "recipes" / "grpo.yaml", ["transport=gigpo"])


# --- segments -------------------------------------------------------------------------------------
def test_segment_starts_by_hand():
    mask = make_mask("1111110", "0110011", "0000000")
    low, high = math.log(0.5), math.log(0.95)
    logprobs = T([high, low, low, high, low, low, NAN], [low, low, high, low, low, high, low], [low] * 7)

    def starts(cuts):
        return [row.nonzero().flatten().tolist() for row in starts_at_cuts(logprobs, mask, 0.9, cuts)]

    assert starts(1) == [[0, 2, 4, 5], [1, 6], []]
    assert starts(2) == [[0, 4], [1], []]
    ends = make_mask("0010011", "1111010", "1111111")
    assert [row.nonzero().flatten().tolist() for row in starts_after(ends, mask)] == [[0, 3], [1, 2, 5, 6], []]


def test_segment_advantages_by_hand():
    # segments (0 1), (2), (5 6 7): .4 - .5;  1 + .9 - .4;  2 + 3 - .9
    mask, starts = make_mask("11100111"), make_mask("10100100")
    rewards, values = T([0, 0, 1, 9, NAN, 0, 2, 3]), T([0.5, NAN, 0.4, NAN, 9, 0.9, 7, 7])
    advantages, numbers = segment_advantage(rewards, values, mask, starts)
    assert_close(advantages, T([-0.1, -0.1, 1.5, 0, 0, 4.1, 4.1, 4.1]))
    assert numbers.tolist() == [[1, 1, 2, 0, 0, 3, 3, 3]]
    assert_close(segment_advantage(rewards, values, mask, starts, bootstrap=torch.tensor([1.0]))[0][0, 5:], T([5.1] * 3)[0])


def test_segments_of_one_token_are_td0_and_one_segment_is_monte_carlo():
    rollout = make_rollout(mask=MASKS)
    inputs = (rollout.rewards, rollout.values, MASKS)
    td0, _ = gated_gae(*inputs, gamma=1.0, lam=0.0, bootstrap=rollout.bootstrap)
    assert_close(segment_advantage(*inputs, MASKS, bootstrap=rollout.bootstrap)[0], td0)
    whole, _ = segment_advantage(*inputs, torch.zeros_like(MASKS))
    first = from_start(rollout.values, turn_starts(MASKS) & (MASKS.cumsum(1) == 1))
    assert_close(whole, (rollout.scores.unsqueeze(1) - first).masked_fill(~MASKS, 0.0))


def test_advantages_of_segments_add_up_to_the_outcome_minus_the_first_value():
    rollout = make_rollout(5, 40)
    advantages, numbers = segment_advantage(rollout.rewards, rollout.branch_values, rollout.mask, rollout.starts)
    for row in range(5):
        each = [advantages[row][numbers[row] == k][0].item() for k in range(1, int(numbers[row].max()) + 1)]
        first = rollout.branch_values[row][rollout.mask[row]][0].item()
        assert sum(each) == pytest.approx(rollout.scores[row].item() - first, abs=1e-4)


def test_spo_gives_credit_to_cut_points_only():
    rollout = make_rollout(5, 40)
    spo = {"threshold": 0.6, "cuts": 3, "whiten": False}
    some, all_ = transports["spo"](**spo)(rollout).advantages, transports["spo"](only_cuts=False, **spo)(rollout).advantages
    cut = (rollout.rollout_logprobs.exp() < 0.6) & rollout.mask
    assert torch.equal(some[cut], all_[cut]) and some[~cut].eq(0).all() and all_[rollout.mask & ~cut].ne(0).any()
    white = transports["spo"](threshold=0.6, cuts=3)(rollout).advantages[cut]
    assert white.mean().abs() < 1e-5 and white.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_spo_with_a_critic_reads_its_values_at_segment_starts():
    rollout = make_rollout(5, 40)
    spo = transports["spo"](values="critic", threshold=0.6, cuts=2, whiten=False, only_cuts=False)
    starts = starts_at_cuts(rollout.rollout_logprobs, rollout.mask, 0.6, 2)
    expected, _ = segment_advantage(rollout.rewards, rollout.values, rollout.mask, starts, bootstrap=rollout.bootstrap)
    assert torch.equal(spo(rollout).advantages, expected)
    assert spo.needs == {"values"} and spo.branches == 0 and transports["spo"]().branches == 4
    elsewhere = rollout.replace(values=rollout.values.where(starts, NAN))
    assert torch.equal(spo(elsewhere).advantages, expected)


def test_vineppo_cuts_after_tokens_that_hold_the_separator():
    mask = make_mask("111110", "011111")
    rollout = make_rollout(mask=mask)
    ids = rollout.input_ids.clone()
    ids[:, -6:] = torch.tensor([[3, 7, 3, 7, 7, 7], [7, 3, 3, 8, 3, 3]])
    starts = transports["vineppo"](separator=";").starts(
        rollout.replace(input_ids=ids), lambda token: {7: ";", 8: "a;b"}.get(token, "x")
    )
    assert [row.nonzero().flatten().tolist() for row in starts] == [[0, 2, 4], [1, 4]]


@pytest.mark.parametrize("name", ["vineppo", "spo"])
def test_without_continuations_there_is_no_value(name):
    with pytest.raises(ValueError, match="continuations"):
        transports[name]()(make_rollout(branch_values=None))
