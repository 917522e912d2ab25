"""Critic-free transports against numbers by hand, each framework's own numbers, an enumeration, and one another."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from typing import get_args

import pytest
import torch
from conftest import make_mask, make_rollout
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.testing import assert_close

from cct.geometry import geometries
from cct.transport import (
    group_advantage,
    high_entropy_mask,
    informative_rescale,
    lead_advantage,
    pass_at_k_advantage,
    token_returns,
    trace_weights,
    transports,
    whiten,
)

NAN, INF = float("nan"), float("inf")
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "lite_ppo", "grpo_pass_at_k", "grpo_lambda", "gtpo")


def T(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def judged(scores, groups, lengths=None, **fields):
    """A rollout of responses with these scores, each at the last of so many tokens (3); NaN stands in the padding."""
    lengths = torch.tensor(lengths if lengths is not None else [3] * len(scores)).unsqueeze(1)
    place = torch.arange(4)
    rewards = torch.where(place == lengths - 1, torch.tensor(scores, dtype=torch.float32).unsqueeze(1), 0.0)
    return make_rollout(
        mask=place < lengths, rewards=rewards.where(place < lengths, NAN), groups=torch.tensor(groups), **fields
    )


def outcomes(name, rollout, **knobs) -> torch.Tensor:
    """The one number of each response, [B]; it must stand on all its tokens and nowhere else."""
    credit = transports[name](**knobs)(rollout)
    number = credit.advantages.gather(1, rollout.mask.int().argmax(1, keepdim=True))
    assert torch.equal(credit.advantages, number * rollout.mask) and credit.value_targets is None
    return number.squeeze(1)


# --- the function behind most of them -------------------------------------------------------------
def test_group_advantage_by_hand():
    scores, groups = torch.tensor([1.0, 0, 0, 1, 5, 7]), torch.tensor([0, 0, 0, 0, 1, 1])
    deviation = math.sqrt(1 / 3)  # of 1 0 0 1 with ddof 1
    assert_close(group_advantage(scores, groups, scale="none"), torch.tensor([0.5, -0.5, -0.5, 0.5, -1, 1]))
    assert_close(
        group_advantage(scores, groups),
        torch.tensor(
            [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation, -1 / math.sqrt(2), 1 / math.sqrt(2)]
        ),
        atol=1e-5,
        rtol=0,
    )
    assert_close(group_advantage(scores, groups, eps=1.0)[4:], torch.tensor([-1, 1]) / (1 + math.sqrt(2)))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_group_of_one_gets_nothing(scale):
    assert group_advantage(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([4, 9, 9]), scale=scale)[0] == 0
    alone = group_advantage(torch.tensor([3.0, 1.0]), torch.tensor([0, 0]), scale=scale, valid=torch.tensor([True, False]))
    assert torch.equal(alone, torch.zeros(2))  # alone once the other was dropped


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("score", [0.1, 0.3, 1 / 3, -2.7, 1e-3, 12345.678, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_scores_get_exactly_nothing(scale, score, size):
    assert torch.equal(
        group_advantage(torch.full((size,), score), torch.zeros(size, dtype=torch.long), scale=scale), torch.zeros(size)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parts, whole", [([0.1] * 7, 0.7), ([0.1, 0.2], 0.3), ([1 / 3] * 6, 2.0), ([0.7, 0.1, 0.1, 0.1], 1.0)])
def test_scores_equal_up_to_rounding_get_exactly_nothing(dtype, parts, whole):
    """A sum of rewards and its value written at once differ in the last bit; divided by itself that would be an advantage."""
    total = torch.zeros((), dtype=dtype)
    for part in parts:
        total = total + torch.tensor(part, dtype=dtype)
    scores = torch.stack([total, torch.tensor(whole, dtype=dtype), torch.tensor(whole, dtype=dtype)])
    assert torch.equal(group_advantage(scores, torch.zeros(3, dtype=torch.long)), torch.zeros(3, dtype=dtype))


def test_a_small_but_real_difference_counts():
    assert_close(
        group_advantage(torch.tensor([1.0, 1.001]), torch.tensor([0, 0])),
        torch.tensor([-1, 1]) / math.sqrt(2),
        atol=5e-3,
        rtol=0,
    )


@pytest.mark.parametrize("bad", [NAN, 100.0])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_responses_left_out_change_nothing(bad, scale):
    scores, groups = torch.tensor([1.0, bad, 0.0, 1.0, bad]), torch.tensor([0, 0, 0, 0, 1])
    valid = torch.tensor([True, False, True, True, False])
    without = group_advantage(scores[valid], groups[valid], scale=scale)
    got = group_advantage(scores, groups, scale=scale, valid=valid)
    assert torch.equal(got[valid], without) and got[~valid].eq(0).all()


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 12))
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    scores, groups = (
        torch.randn(rows, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (rows,), generator=generator),
    )
    names, order = torch.tensor([70, -3, 12, 5]), torch.randperm(rows, generator=generator)
    assert_close(group_advantage(scores, groups)[order], group_advantage(scores[order], names[groups][order]))


@given(seed=st.integers(0, 10**6), shift=st.floats(-10, 10), scale=st.floats(0.1, 10))
def test_group_advantages_do_not_depend_on_the_scale_of_scores(seed, shift, scale):
    generator = torch.Generator().manual_seed(seed)
    scores, groups = torch.rand(8, generator=generator, dtype=torch.float64), torch.arange(8) // 4

    def run(x):
        return group_advantage(x, groups, eps=1e-12)

    assert_close(run(scores * scale + shift), run(scores), atol=1e-6, rtol=1e-6)
    for group in range(2):
        assert abs(run(scores)[groups == group].sum()) < 1e-9 and run(scores)[groups == group].std() == pytest.approx(
            1, abs=1e-6
        )


def test_grpo_gives_every_token_its_response_s_number():
    mask = make_mask("1100", "1111", "1011", "0000")
    rewards = torch.zeros(4, 4)
    rewards[0, 1], rewards[2, 2] = 1.0, NAN
    rewards[2] = T([0, NAN, 0.5, 0.5])[0]  # NaN stands in the gap
    rollout = make_rollout(mask=mask, rewards=rewards, groups=torch.zeros(4, dtype=torch.long))
    third = 1 / 3
    expected = T([third, third, 0, 0], [-2 * third] * 4, [third, 0, third, third], [0] * 4)
    assert_close(transports["grpo"](std=False)(rollout).advantages, expected)
    assert_close(transports["grpo"]()(rollout).advantages, expected / math.sqrt(third), atol=1e-5, rtol=0)
    assert transports["grpo"]()(rollout).value_targets is None


def test_baselines_by_hand():
    scores, groups = torch.tensor([1.0, 0, 0, 1, 5, 7]), torch.tensor([0, 0, 0, 0, 1, 1])
    others = group_advantage(scores, groups, baseline="leave_one_out", scale="none")
    assert_close(others, torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, -2, 2]))  # 1 - (0+0+1)/3, ..., 5 - 7, 7 - 5
    lengths = torch.tensor([1, 1, 2, 4, 1, 3])  # baselines (1 + 4) / 8 and (5 + 21) / 4
    optimal = group_advantage(scores, groups, baseline="length_weighted", scale="none", lengths=lengths)
    assert_close(optimal, torch.tensor([0.375, -0.625, -0.625, 0.375, -1.5, 0.5]))
    with pytest.raises(ValueError, match="lengths"):
        group_advantage(scores, groups, baseline="length_weighted")


def test_scales_by_hand():
    scores, groups = torch.tensor([1.0, 0, 0, 1, 5, 7]), torch.tensor([0, 0, 0, 0, 1, 1])
    centred = torch.tensor([0.5, -0.5, -0.5, 0.5, -1, 1])
    batch = math.sqrt((76 - 14 * 14 / 6) / 5)  # of the six scores: their squares sum to 76, they to 14
    assert_close(group_advantage(scores, groups, scale="batch", eps=1e-12), centred / batch)
    batch = math.sqrt((76 - 14 * 14 / 6) / 6)
    assert_close(group_advantage(scores, groups, scale="batch", ddof=0, eps=0.5), centred / (batch + 0.5))
    deviations = torch.tensor([0.5, 0.5, 0.5, 0.5, 1, 1])
    assert_close(group_advantage(scores, groups, ddof=0, eps=1e-12), centred / deviations)


def test_a_response_alone_keeps_its_raw_score_where_asked():
    scores, groups = torch.tensor([3.0, 1.0, 0.0, 8.0]), torch.tensor([4, 9, 9, 9])
    valid = torch.tensor([True, True, False, False])  # the second is alone once the others were dropped
    for scale, divisor in {"none": 1.0, "group": 1.5, "batch": math.sqrt(2) + 0.5}.items():
        got = group_advantage(scores, groups, scale=scale, eps=0.5, single="raw", valid=valid)
        assert_close(got, torch.tensor([3.0, 1.0, 0.0, 0.0]) / divisor)


@given(seed=st.integers(0, 10**6), baseline=st.sampled_from(["mean", "leave_one_out", "length_weighted"]))
def test_a_shift_of_all_scores_of_a_group_changes_nothing_and_a_factor_passes_through(seed, baseline):
    generator = torch.Generator().manual_seed(seed)
    scores, groups = torch.randn(9, generator=generator, dtype=torch.float64), torch.arange(9) // 3
    lengths = torch.randint(1, 50, (9,), generator=generator)

    def run(x):
        return group_advantage(x, groups, baseline=baseline, scale="none", lengths=lengths)

    assert_close(run(scores + groups * 7.0), run(scores))
    assert_close(run(-3 * scores), -3 * run(scores))
    weights = lengths.double() if baseline == "length_weighted" else torch.ones(9, dtype=torch.float64)
    assert (run(scores) * weights).view(3, 3).sum(1).abs().max() < 1e-9


@pytest.mark.parametrize("name", GROUPED)
def test_a_kl_acts_on_groups_of_equal_scores_and_the_docstring_says_so(name):
    rollout = judged([1.0] * 8, [0] * 8)
    advantages = transports[name]()(rollout.replace(stats={"entropy": torch.rand(rollout.mask.shape)})).advantages
    assert not advantages.any()
    logprobs = rollout.logprobs.clone().requires_grad_()
    reference = rollout.logprobs - 1
    loss, _ = geometries["ppo_clip"](kl_coef=0.1)(logprobs, rollout.logprobs, advantages, rollout.mask, reference)
    loss.sum().backward()
    assert logprobs.grad[rollout.mask].abs().min() > 0.01
    assert re.search(r"equal\s+scores.*KL|KL acts on groups of\s+equal scores", inspect.getdoc(transports[name]), re.DOTALL)


# --- each by hand, and as the frameworks have it --------------------------------------------------
CLOSE = [0.001, 0.0]  # deviation 0.000707107 with ddof 1: small enough that eps shows
MIXED = [1.0, 0.0, 2.0], [0, 0, 1]  # the third is alone


@pytest.mark.parametrize(
    "name, knobs, scores, groups, expected",
    [
        ("grpo", {}, CLOSE, [0, 0], [0.706108, -0.706108]),  # .0005 / .000708107
        ("grpo", {"ddof": 0}, CLOSE, [0, 0], [0.998004, -0.998004]),  # .0005 / .000501
        ("grpo", {"std": False}, *MIXED, [0.5, -0.5, 0]),
        ("grpo", {"like": "verl"}, CLOSE, [0, 0], [0.706108, -0.706108]),
        ("grpo", {"like": "verl"}, *MIXED, [0.707106, -0.707106, 1.999998]),  # alone: 2 / (1 + 1e-6)
        ("grpo", {"like": "trl"}, CLOSE, [0, 0], [0.619497, -0.619497]),  # .0005 / .000807107
        ("grpo", {"like": "trl"}, *MIXED, [0.707007, -0.707007, 0]),  # .5 / .707207
        ("grpo", {"like": "openrlhf"}, CLOSE, [0, 0], [0.707106, -0.707106]),  # .0005 / .000707108
        ("dr_grpo", {}, *MIXED, [0.5, -0.5, 0]),
        ("dr_grpo", {"like": "verl"}, *MIXED, [0.5, -0.5, 2]),
        # The others' mean and deviation: 0 and 0, which divides nothing; 1/3 and sqrt(1/3), + 1e-6.
        ("grpo", {"like": "nemo_rl"}, [1.0, 0, 0, 0], [0] * 4, [1, -0.577349, -0.577349, -0.577349]),
        ("grpo", {"like": "nemo_rl"}, [3.0, 1, 2], [0] * 3, [1.5 / 0.707108, -1.5 / 0.707108, 0]),
        ("grpo", {"like": "nemo_rl"}, *MIXED, [1, -1, 0]),  # one other has no deviation
        ("dr_grpo", {"like": "trl"}, *MIXED, [0.5, -0.5, 0]),
        ("dr_grpo", {"like": "openrlhf"}, *MIXED, [0.5, -0.5, 0]),
        ("rloo", {}, [1.0, 0, 0, 1, 5, 7], [0, 0, 0, 0, 1, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2, 2]),
        ("rloo", {"like": "verl"}, *MIXED, [1, -1, 2]),
        ("rloo", {"like": "nemo_rl"}, *MIXED, [1, -1, 0]),
        ("rloo", {"like": "openrlhf"}, [1.0, 0, 0, 1], [0] * 4, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", {"like": "trl"}, [1.0, 0, 0, 1], [0] * 4, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", {"like": "trl"}, *MIXED, [1, -1, 0]),  # 0 / 0 others
        # B = 5, and 2 are of a group whose scores differ: alpha 2.5; 3 scores are not 0: alpha 5/3
        ("gpg", {}, [1.0, 0, 3, 3, 0], [0, 0, 1, 1, 2], [1.25, -1.25, 0, 0, 0]),
        ("gpg", {"rescale": "none"}, [1.0, 0, 3, 3, 0], [0, 0, 1, 1, 2], [0.5, -0.5, 0, 0, 0]),
        ("gpg", {"rescale": "nonzero_scores"}, [1.0, 0, 3, 3, 0], [0, 0, 1, 1, 2], [5 / 6, -5 / 6, 0, 0, 0]),
        ("gpg", {"std": True, "eps": 0.5}, [1.0, 0, 3, 3, 0], [0, 0, 1, 1, 2], [1.035534, -1.035534, 0, 0, 0]),
        ("gpg", {"like": "verl"}, *MIXED, [0.75, -0.75, 3]),  # alpha 3/2
        ("lite_ppo", {}, [1.0, 0, 5, 7], [0, 0, 1, 1], [0.151330, -0.151330, -0.302660, 0.302660]),  # / sqrt(32.75 / 3)
        ("lite_ppo", {"ddof": 0}, [1.0, 0, 5, 7], [0, 0, 1, 1], [0.174741, -0.174741, -0.349482, 0.349482]),
        ("lite_ppo", {"like": "trl"}, [0.001, 0, 0.002], [0, 0, 1], [0.454545, -0.454545, 0]),  # .0005 / (.001 + .0001)
        ("grpo_pass_at_k", {"k": 2}, [1.0, 0, 0, 0], [0] * 4, [1, -1 / 3, -1 / 3, -1 / 3]),  # mean and deviation 1/2; 1/2 - 2/3
        ("grpo_pass_at_k", {"k": 2}, [1.0, 1, 0, 0], [0] * 4, [0.447214, 0.447214, -0.447214, -0.447214]),  # 5/6; 1/6, -1/6
        ("grpo_pass_at_k", {"k": 2}, [1.0, 1, 1, 0], [0] * 4, [0, 0, 0, 0]),  # every pair has a success
        ("grpo_pass_at_k", {"credit": "lead", "std": False}, [1.0, 0.25, 0, 3, 3], [0, 0, 0, 1, 1], [0.75, 0, 0, 0, 0]),
        ("grpo_pass_at_k", {"like": "verl"}, [1.0, 0.5, 0, 0], [0] * 4, [1.044464, 0, 0, 0]),  # .5 / (.478714 + 1e-6)
        ("grpo_pass_at_k", {"like": "verl"}, CLOSE, [0, 0], [1.412216, 0]),  # .001 / .000708107
    ],
)  # fmt: skip
def test_one_number_per_response(name, knobs, scores, groups, expected):
    assert_close(
        outcomes(name, judged(scores, groups), **knobs), torch.tensor(expected, dtype=torch.float32), atol=2e-6, rtol=0
    )


def test_opo_weighs_its_baseline_by_trainable_tokens():
    rollout = judged([1.0, 0, 0, 1, 2], [0, 0, 0, 0, 1], lengths=[1, 1, 2, 4, 3])  # baseline 5/8
    assert_close(outcomes("opo", rollout), torch.tensor([0.375, -0.625, -0.625, 0.375, 0]))
    assert_close(outcomes("opo", rollout, like="verl"), torch.tensor([0.375, -0.625, -0.625, 0.375, 2]))
    mask = make_mask("1011", "1000")  # a gap is not a part of the length
    gap = make_rollout(mask=mask, rewards=T([0, NAN, 0, 1], [0, 0, 0, 0]), groups=torch.zeros(2, dtype=torch.long))
    assert_close(outcomes("opo", gap), torch.tensor([0.25, -0.75]))


@pytest.mark.parametrize(
    "knobs, rewards, expected",
    [
        ({}, T([0, 1], [0, 9]), T([0, 1.224745], [-1.224745, 0])),  # returns .5 1 0: mean .5, deviation sqrt(1/6)
        ({"like": "openrlhf"}, T([0, 1], [0, 9]), T([0, 1.224745], [-1.224745, 0])),
        ({"like": "verl"}, T([0, 1], [0, 9]), T([0, 1], [-1, 0])),  # ddof 1: deviation 1/2
        ({}, T([0, 1e-4], [0, 9]), T([0, 1.224445], [-1.224445, 0])),  # 5e-5 / (4.08248e-5 + 1e-8)
        ({"like": "openrlhf"}, T([0, 1e-4], [0, 9]), T([0, 0.5], [-0.5, 0])),  # the variance 1.7e-9 is raised to 1e-8
        ({"like": "verl"}, T([0, 1e-4], [0, 9]), T([0, 0.447214], [-0.447214, 0])),  # 5e-5 / sqrt(2.5e-9 + 1e-8)
    ],
)
def test_reinforce_pp_by_hand(knobs, rewards, expected):
    rollout = make_rollout(mask=make_mask("11", "10"), rewards=rewards)  # the 9 stands in the padding
    assert_close(transports["reinforce_pp"](gamma=0.5, **knobs)(rollout).advantages, expected, atol=2e-6, rtol=0)


def test_reinforce_pp_over_responses_by_hand():
    rollout = make_rollout(mask=make_mask("11", "10"), rewards=T([0, 1], [0, 9]))  # returns .5 1; 0, each response weighing 1
    deviation = math.sqrt(((0.125**2 + 0.625**2) / 2 + 0.375**2) / 2)  # about the mean (.75 + 0) / 2
    expected = T([0.125, 0.625], [-0.375, 0]) / deviation
    assert_close(transports["reinforce_pp"](gamma=0.5, unit="responses")(rollout).advantages, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "knobs, expected",
    [
        ({}, T([0, 0, 1.224745], [-1.224745, 0, 0])),  # .5 and 1, as if the gap were not there; and 0
        ({"like": "openrlhf"}, T([-0.392232, 0, 1.372813], [-0.980581, 0, 0])),  # .25 and 1; and 0: variance .180556
        ({"like": "verl"}, T([0, 0, 1], [-1, 0, 0])),  # .5 and 1; and 0: variance 1/4 with ddof 1
    ],
)
def test_reinforce_pp_at_a_gap(knobs, expected):
    rollout = make_rollout(mask=make_mask("101", "100"), rewards=T([0, NAN, 1], [0, 0, 0]))
    assert_close(transports["reinforce_pp"](gamma=0.5, **knobs)(rollout).advantages, expected, atol=2e-6, rtol=0)


def test_reinforce_pp_like_verl_carries_the_return_over_a_tool_s_output():
    """Returns 1 1 1 1 and 0 0 0 0: mean 1/2, variance 2/7 with ddof 1; 0.5 / sqrt(2/7 + 1e-8) = 0.935414."""
    rollout = make_rollout(mask=make_mask("110011", "111100"), rewards=T([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]))
    advantages = transports["reinforce_pp"](like="verl")(rollout).advantages
    x = 0.935414
    assert_close(advantages, T([x, x, 0, 0, x, x], [-x, -x, -x, -x, 0, 0]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "knobs, expected",
    [
        ({"unit": "tokens"}, [1.732051, -0.577350]),  # .5 once and -.5 three times: mean -.25, variance .1875
        ({"like": "openrlhf"}, [1.732051, -0.577350]),
        ({"like": "verl"}, [1.5, -0.5]),  # variance .25 with ddof 1
        ({}, [1.0, -1.0]),
        ({"unit": "responses", "ddof": 1}, [0.707107, -0.707107]),
    ],
)
def test_reinforce_pp_baseline_by_hand(knobs, expected):
    rollout = judged([1.0, 0.0], [0, 0], lengths=[1, 3])
    assert_close(outcomes("reinforce_pp_baseline", rollout, **knobs), torch.tensor(expected), atol=2e-6, rtol=0)


def test_reinforce_pp_baseline_with_a_response_alone():
    rollout = judged([1.0, 0.0, 2.0], [0, 0, 1], lengths=[2, 2, 2])  # .5 -.5 and 0 or 2
    assert_close(outcomes("reinforce_pp_baseline", rollout, like="openrlhf"), torch.tensor([1.224745, -1.224745, 0]))
    deviation = math.sqrt(2 * (1 / 36 + 49 / 36 + 64 / 36) / 5)  # mean 2/3
    expected = torch.tensor([-1 / 6, -7 / 6, 8 / 6]) / deviation
    assert_close(outcomes("reinforce_pp_baseline", rollout, like="verl"), expected, atol=2e-6, rtol=0)


def test_remax_by_hand():
    mask, greedy = make_mask("110", "101", "111", "000"), torch.tensor([0.5, 0.25, NAN, 1.0])
    rewards = T([1, 2, NAN], [1, NAN, 0], [1, 1, 1], [NAN, NAN, NAN])
    rollout = make_rollout(mask=mask, rewards=rewards, greedy_scores=greedy)
    whole = T([2.5, 2.5, 0], [0.75, 0, 0.75], [0, 0, 0], [0, 0, 0])  # the third prompt's greedy response was not judged
    assert torch.equal(transports["remax"]()(rollout).advantages, whole)
    to_go = T([2.5, 1.5, 0], [0.75, 0, -0.25], [0, 0, 0], [0, 0, 0])
    for knobs in ({"reward_to_go": True}, {"like": "verl"}):
        assert torch.equal(transports["remax"](**knobs)(rollout).advantages, to_go)


def test_grpo_lambda_by_hand():
    mask, groups = make_mask("1110", "1011"), torch.zeros(2, dtype=torch.long)
    rollout = make_rollout(mask=mask, rewards=T([0, 0, 1, NAN], [0, NAN, 0, 0]), groups=groups)
    got = transports["grpo_lambda"](lam=0.5, std=False)(rollout).advantages
    assert_close(got, T([0.875, 0.75, 0.5, 0], [-0.875, 0, -0.75, -0.5]))  # 1 + 1/2 + 1/4, 1 + 1/2, 1; a gap costs nothing
    both = transports["grpo_lambda"](lam=0.5, std=False, trace="both", floor=-0.1)(rollout).advantages
    assert_close(both, T([1.5, 0.75, 0.5, 0], [-0.3, 0, -0.15, -0.1]))  # 1 + 1 + 1 at the first token
    outcome = transports["grpo_lambda"](lam=0.5, std=False, trace="outcome")(rollout).advantages
    assert_close(outcome, T([0.125, 0.25, 0.5, 0], [-0.125, 0, -0.25, -0.5]))


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 1.0])
def test_trace_weights_equal_their_definition_as_a_loop(decay):
    mask = make_mask("1110111", "1000000", "0000000", "1011010")
    for kind, share in {
        "recent": lambda t, u, n: decay ** (u - t),
        "both": lambda t, u, n: max(decay ** (u - t), decay**t),
        "outcome": lambda t, u, n: decay ** (u - t) if u == n - 1 else 0.0,
    }.items():
        got = trace_weights(mask, decay, kind)
        for row, n in enumerate(mask.sum(1).tolist()):
            expected = [sum(share(t, u, n) for u in range(t, n)) for t in range(n)]
            assert_close(got[row][mask[row]], torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)
        assert got[~mask].eq(0).all()
    with pytest.raises(ValueError, match="kind must be"):
        trace_weights(mask, decay, "late")


def test_a_trace_inside_the_ratio_has_these_weights_for_its_gradient_on_policy():
    """GRPO-lambda's objective, sum over t of A exp(sum over s <= t of lam^(t - s) log ratio_s), at ratio 1."""
    logprobs = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    old, lag = logprobs.detach(), torch.arange(6).unsqueeze(1) - torch.arange(6)
    recent = torch.where(lag >= 0, 0.8 ** lag.clamp(min=0).double(), 0.0)
    both = torch.where(lag >= 0, torch.maximum(recent, 0.8 ** torch.arange(6).double()), 0.0)
    for kind, weights in {"recent": recent, "both": both}.items():
        (slope,) = torch.autograd.grad((weights @ (logprobs - old)).exp().sum(), logprobs)
        assert_close(slope, trace_weights(torch.ones(1, 6, dtype=torch.bool), 0.8, kind)[0])


def test_gtpo_by_hand():
    mask = make_mask("110", "101", "111", "000")
    entropy = T([1, 3, NAN], [3, NAN, 9], [9, 9, 9], [NAN, NAN, NAN])
    rewards = T([0, 1, NAN], [1, NAN, 0], [0, 0, 0], [NAN, NAN, NAN])
    rollout = make_rollout(mask=mask, rewards=rewards, groups=torch.zeros(4, dtype=torch.long), stats={"entropy": entropy})
    # The successes' first tokens have entropies 1 and 3, so weigh 1/2 and 3/2; their second ones 3 and 9, so 1/2 and 3/2.
    shaped = torch.tensor([0.75, 0.75, 1.25, 1.25, 0, 0, 0])
    expected = (shaped - 4 / 7) / math.sqrt((2 * 0.75**2 + 2 * 1.25**2) / 7 - (4 / 7) ** 2)
    got = transports["gtpo"](share=0.5)(rollout).advantages
    assert_close(got[mask], expected, atol=1e-5, rtol=0)
    assert got[~mask].eq(0).all()


def test_gtpo_where_one_success_is_longer():
    rollout = judged(
        [1.0, 1.0, 0.0], [0, 0, 0], lengths=[2, 1, 2], stats={"entropy": T([1, 3, 0, 0], [3, 0, 0, 0], [9, 9, 0, 0])}
    )
    # r: .75 and 1 (alone at its second token), 1.25; 0 0. Mean .6; squares .0225 + .16 + .4225 + .36 + .36 = 1.325 / 5
    expected = T([0.291386, 0.777029, 0, 0], [1.262671, 0, 0, 0], [-1.165543, -1.165543, 0, 0])
    assert_close(transports["gtpo"](share=0.5)(rollout).advantages, expected, atol=1e-5, rtol=0)


def test_gtpo_without_entropy_anywhere_weighs_all_tokens_the_same():
    rollout = judged([1.0, 0.0], [0, 0], stats={"entropy": torch.zeros(2, 4)})
    assert_close(outcomes("gtpo", rollout, share=1.0), torch.tensor([1.0, -1.0]), atol=1e-5, rtol=0)


def test_gtpo_gives_nothing_to_a_group_that_is_all_right():
    rollout = judged([1.0, 1.0, 1.0], [0, 0, 0], stats={"entropy": torch.rand(3, 4)})
    assert transports["gtpo"](share=0.5)(rollout).advantages.eq(0).all()


# --- high entropy ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "count, fraction, kept", [(10, 0.2, 2), (5, 0.2, 1), (11, 0.3, 4), (11, 0.7, 8), (1, 0.2, 1), (7, 1.0, 7)]
)
def test_so_many_tokens_are_kept(count, fraction, kept):
    entropy = torch.randperm(count, generator=torch.Generator().manual_seed(count)).float().unsqueeze(0)
    got = high_entropy_mask(entropy, torch.ones(1, count, dtype=torch.bool), fraction)
    assert torch.equal(got, entropy >= count - kept)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([0.125, 0.25, 0.5, 0.75]))
def test_the_threshold_is_the_quantile_over_the_batch(seed, fraction):
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.randint(0, 12, (3, 9), generator=generator).double()
    mask = torch.rand(3, 9, generator=generator) < 0.7
    mask[0, 0] = True
    expected = mask & (entropy >= torch.quantile(entropy[mask], 1 - fraction))
    assert torch.equal(high_entropy_mask(entropy.where(mask, NAN), mask, fraction), expected)


def test_equal_entropies_are_all_kept_and_nothing_of_nothing():
    mask = make_mask("1101", "1000")
    assert torch.equal(high_entropy_mask(torch.full((2, 4), 0.3), mask, 0.2), mask)
    assert not high_entropy_mask(torch.rand(2, 4), torch.zeros_like(mask), 0.2).any()


def test_high_entropy_keeps_what_the_other_transport_says_at_few_tokens():
    entropy = T([0.1, 0.9, 0.2, INF], [0.3, 0.4, 0.8, INF])
    rollout = judged([1.0, 0.0], [0, 0], stats={"entropy": entropy})
    got = transports["high_entropy"](of=transports["dr_grpo"](), fraction=1 / 3)(rollout)
    assert_close(got.advantages, T([0, 0.5, 0, 0], [0, 0, -0.5, 0]))
    gae = transports["gae"](whiten=False)
    inner = gae(rollout)
    wrapped = transports["high_entropy"](of=gae, fraction=1 / 3)(rollout)
    kept = make_mask("0100", "0010")
    assert torch.equal(wrapped.advantages, inner.advantages * kept) and torch.equal(wrapped.value_targets, inner.value_targets)
    assert transports["high_entropy"](of=gae).needs == {"values"} and transports["high_entropy"]().needs == {"groups"}


# --- against an enumeration -----------------------------------------------------------------------
def best_of_k(scores: list[float], k: int) -> list[float]:
    subsets = list(itertools.combinations(range(len(scores)), k))
    best = [max(scores[i] for i in subset) for subset in subsets]
    mean = sum(best) / len(best)
    deviation = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best))
    if deviation < 1e-9:
        return [0.0] * len(scores)
    with_i = [[b for b, subset in zip(best, subsets, strict=True) if i in subset] for i in range(len(scores))]
    return [(sum(b) / len(b) - mean) / deviation for b in with_i]


@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=7),
    k=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_pass_at_k_equals_the_mean_over_all_subsets(scores, k, seed):
    expected = best_of_k(scores, k) if k < len(scores) else [0.0] * len(scores)
    other = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()  # another group, and one that was dropped
    got = pass_at_k_advantage(
        torch.tensor([*scores, *other, NAN], dtype=torch.float64),
        torch.tensor([7] * len(scores) + [3] * len(other) + [7]),
        k=k,
        valid=torch.tensor([True] * (len(scores) + len(other)) + [False]),
    )
    second = best_of_k(other, k) if k < len(other) else [0.0] * len(other)
    assert_close(got, torch.tensor([*expected, *second, 0.0], dtype=torch.float64), atol=1e-9, rtol=1e-9)


def test_the_lead_is_what_the_best_adds_to_the_maximum():
    scores = torch.tensor([0.3, 2.0, 1.25, -1.0])
    expected = [max(scores).item() - max(s for j, s in enumerate(scores.tolist()) if j != i) for i in range(4)]
    assert_close(lead_advantage(scores, torch.zeros(4), std=False), torch.tensor(expected))
    noisy = torch.tensor([0.7, 0.7 + 1e-7, 0.7])  # equal up to rounding: no lead
    assert lead_advantage(noisy, torch.zeros(3)).eq(0).all()
    dropped = lead_advantage(torch.tensor([NAN, 1.0, 0.0]), torch.zeros(3), std=False, valid=torch.tensor([False, True, True]))
    assert torch.equal(dropped, torch.tensor([0.0, 1.0, 0.0]))


# --- one is another -------------------------------------------------------------------------------
def same(a, b):
    assert_close(a.advantages, b.advantages, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_some_are_others_in_a_special_case(seed):
    t, rollout = transports, make_rollout(12, 9, seed=seed, statistics=["entropy"], greedy_scores=torch.zeros(12))
    rollout = rollout.replace(groups=torch.arange(12) // 4)
    same(t["dr_grpo"]()(rollout), t["grpo"](std=False)(rollout))
    same(t["gpg"](rescale="none")(rollout), t["dr_grpo"]()(rollout))
    same(t["gpg"]()(rollout), t["dr_grpo"]()(rollout))  # every group teaches
    same(t["gpg"](std=True)(rollout), t["grpo"]()(rollout))
    same(t["grpo_lambda"](lam=0.0)(rollout), t["grpo"]()(rollout))
    same(t["grpo_lambda"](lam=1.0, trace="outcome")(rollout), t["grpo"]()(rollout))
    same(t["grpo"](leave_one_out=True, std=False)(rollout), t["rloo"]()(rollout))
    same(t["grpo_pass_at_k"](k=1)(rollout), t["grpo"](ddof=0, eps=1e-12)(rollout))
    same(t["high_entropy"](fraction=1.0)(rollout), t["grpo"]()(rollout))
    leave_one_out = t["dr_grpo"]()(rollout).advantages * 4 / 3
    assert_close(t["rloo"]()(rollout).advantages, leave_one_out)
    one = rollout.replace(groups=torch.zeros(12, dtype=torch.long))  # all in one group, which is the batch
    same(t["lite_ppo"]()(one), t["grpo"]()(one))
    same(t["reinforce_pp_baseline"](unit="responses")(one), t["grpo"](ddof=0, eps=1e-8)(one))
    outcome = rollout.replace(rewards=rollout.rewards * (rollout.mask.cumsum(1) == rollout.mask.sum(1, keepdim=True)))
    same(t["remax"](reward_to_go=True)(outcome), t["remax"]()(outcome))
    assert_close(t["remax"]()(outcome).advantages, outcome.scores.unsqueeze(1) * outcome.mask)  # greedy always fails
    gae = t["gae"](gamma=0.9, lam=1.0, whiten=True)(rollout.replace(values=torch.zeros(12, 9), bootstrap=None))
    same(t["reinforce_pp"](gamma=0.9)(rollout), gae)


@pytest.mark.parametrize("seed", range(3))
def test_with_responses_of_one_length_tokens_and_responses_are_the_same_unit(seed):
    rollout = make_rollout(mask=torch.ones(8, 5, dtype=torch.bool), seed=seed, statistics=["entropy"])
    rollout = rollout.replace(groups=torch.arange(8) // 4)
    t = transports
    same(t["opo"]()(rollout), t["dr_grpo"]()(rollout))
    same(t["gtpo"](share=0.0)(rollout), t["grpo"](ddof=0)(rollout))
    same(t["reinforce_pp_baseline"]()(rollout), t["reinforce_pp_baseline"](unit="responses")(rollout))


def test_rloo_of_two_responses_is_their_difference():
    assert_close(outcomes("rloo", judged([3.0, 1.0], [0, 0])), torch.tensor([2.0, -2.0]))


@pytest.mark.parametrize("gap", ["carry", "decay", "cut"])
def test_token_returns_by_hand(gap):
    rewards, mask = T([1, NAN, 0, 4]), make_mask("1011")
    first = {"carry": 1 + 0.25 * 4, "decay": 1 + 0.125 * 4, "cut": 1.0}[gap]
    assert_close(token_returns(rewards, mask, gamma=0.5, gap=gap), T([first, 0, 2, 4]))


def test_traces_are_returns_of_rewards_at_the_last_token_and_at_every_token():
    mask = make_rollout(6, 9).mask
    at_end = (mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))).double()
    assert_close(trace_weights(mask, 0.9, "outcome"), token_returns(at_end, mask, gamma=0.9))
    assert_close(trace_weights(mask, 0.9, "recent"), token_returns(mask.double(), mask, gamma=0.9))


# --- invariances ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", GROUPED)
def test_dropped_responses_do_not_count_in_groups(name):
    """A response without tokens leaves the others as if it had not been sampled."""
    scores, groups, lengths = [1.0, 0.0, 9.0, 0.0, 0.0, 1.0, 1.0], [0] * 7, [3, 2, 0, 1, 4, 2, 3]
    entropy = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor(lengths) > 0
    knobs = {"k": 2} if name == "grpo_pass_at_k" else {}
    whole = judged(scores, groups, lengths, stats={"entropy": entropy})
    without = judged(
        *([x for x, n in zip(xs, lengths, strict=True) if n] for xs in (scores, groups, lengths)),
        stats={"entropy": entropy[kept]},
    )
    got = transports[name](**knobs)(whole).advantages
    assert got[~kept].eq(0).all() and got[kept].ne(0).any()
    assert_close(got[kept], transports[name](**knobs)(without).advantages)


@pytest.mark.parametrize("name", GROUPED)
def test_equal_scores_teach_nothing(name):
    rollout = judged([0.3] * 6, [0, 0, 0, 1, 1, 1], lengths=[1, 2, 3, 1, 4, 2], stats={"entropy": torch.rand(6, 4)})
    assert transports[name]()(rollout).advantages.eq(0).all()


@pytest.mark.parametrize("name", [n for n in GROUPED if n not in ("gtpo", "gpg")])
@given(seed=st.integers(0, 10**6), shift=st.integers(-4, 4))
def test_a_shift_of_all_scores_changes_nothing(name, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (10,), generator=generator).double()
    groups = [0] * 5 + [1] * 5
    t = transports[name]()
    assert_close(
        t(judged((scores + shift).tolist(), groups)).advantages,
        t(judged(scores.tolist(), groups)).advantages,
        atol=1e-5,
        rtol=0,
    )


def test_gpg_by_groups_does_not_depend_on_a_shift_and_by_nonzero_scores_does():
    a, b = judged([1.0, 0, 0, 0], [0, 0, 1, 1]), judged([2.0, 1, 1, 1], [0, 0, 1, 1])
    assert torch.equal(outcomes("gpg", a), outcomes("gpg", b))
    assert_close(outcomes("gpg", a, rescale="nonzero_scores"), torch.tensor([2.0, -2.0, 0, 0]))
    assert_close(outcomes("gpg", b, rescale="nonzero_scores"), torch.tensor([0.5, -0.5, 0, 0]))


def test_the_rescaling_counts_a_response_that_scores_its_group_s_mean():
    advantages, groups = torch.tensor([-1.0, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 1, 1])
    assert_close(informative_rescale(advantages, torch.zeros(5), groups), advantages * 5 / 3)
    assert torch.equal(informative_rescale(torch.zeros(5), torch.zeros(5), groups), torch.zeros(5))


@pytest.mark.parametrize("unit", ["tokens", "responses"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_whitened_over_its_unit(unit, ddof):
    mask = make_mask("1111", "1000", "1010", "0000")
    x = torch.randn(4, 1, generator=torch.Generator().manual_seed(0)).expand(4, 4)
    white = whiten(x.where(mask, NAN), mask, ddof=ddof, unit=unit, eps=1e-12)
    sample = white[mask] if unit == "tokens" else white[:3, 0]
    assert abs(sample.mean()) < 1e-6 and sample.std(correction=ddof) == pytest.approx(1, abs=1e-5)
    assert white[~mask].eq(0).all()


def test_one_response_has_no_deviation_over_responses():
    assert whiten(T([1, 2], [5, 5]), make_mask("11", "00"), unit="responses").eq(0).all()


# --- `like` ---------------------------------------------------------------------------------------
WITH_PRESETS = [name for name in transports.names() if getattr(transports[name], "presets", None)]


@pytest.mark.parametrize("name", WITH_PRESETS)
def test_a_preset_is_its_knobs(name):
    cls = transports[name]
    options = [x for option in get_args(cls.model_fields["like"].annotation) for x in get_args(option)]
    assert set(options) == set(cls.presets)
    for like, knobs in cls.presets.items():
        part = cls(like=like)
        assert {knob: getattr(part, knob) for knob in knobs} == knobs
        assert cls.model_validate({k: v for k, v in part.model_dump().items() if k != "use"}) == part
        assert cls(like=like, **knobs) == part  # said twice, it has to agree
        explicit = part.model_copy(update={"like": None})
        rollout = make_rollout(8, 6, statistics=["entropy", "collision"], greedy_scores=torch.rand(8)).replace(
            groups=torch.arange(8) // 8
        )
        assert torch.equal(part(rollout).advantages, explicit(rollout).advantages)  # nothing but data


def test_a_knob_that_contradicts_the_framework_is_refused():
    with pytest.raises(ValidationError, match=r"`like: trl` means eps: 0.0001, and eps is 0.001; leave out one of the two"):
        transports["grpo"](like="trl", eps=1e-3)
    with pytest.raises(ValidationError, match="'verl', 'trl', 'openrlhf' or 'nemo_rl'"):
        transports["grpo"](like="vrel")
    assert transports["grpo"](like="trl", std=False).std is False  # what the framework leaves open stays open
