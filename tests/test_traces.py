"""Traces against torchrl, numbers by hand, and each other."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_mask, make_rollout
from torch.testing import assert_close
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    td0_return_estimate,
    td1_return_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)

from cct.transport import gated_gae, length_adaptive_lambda, retrace, transports, vtrace

GAPS = ("carry", "decay", "cut")
NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def T(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


class Batch:
    """Responses of several lengths, without gaps, and the same as one stream of torchrl's."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, width: int = 90):
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape):
            return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

        lengths = torch.tensor([width, 1, 17, width, 2]) - seed % 2 * torch.tensor([7, 0, 3, 0, 1])
        self.mask = torch.arange(width) < lengths.unsqueeze(1)
        self.rewards, self.values, self.log_ratio = rand(5, width) - 0.5, rand(5, width), rand(5, width) - 0.5
        self.gamma, self.lam = 0.5 + rand(5, width) / 2, 0.5 + rand(5, width) / 2
        self.truncated = torch.tensor([True, False, True, False, True])
        after = rand(5)
        self.bootstrap = after * self.truncated
        self.last = torch.arange(width) == lengths.unsqueeze(1) - 1
        following = torch.cat([self.values[:, 1:], torch.zeros(5, 1, dtype=dtype)], 1)
        self.next_values = torch.where(self.last, after.unsqueeze(1), following)  # not 0 where it ended by itself

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.mask].view(1, -1, 1)

    @property
    def ends(self) -> dict[str, torch.Tensor]:
        return {"done": self.stream(self.last), "terminated": self.stream(self.last & ~self.truncated.unsqueeze(1))}

    def theirs(self, function, *knobs, **more) -> torch.Tensor:
        return function(*knobs, self.stream(self.next_values), self.stream(self.rewards), **self.ends, **more)

    def ours(self, gamma, lam) -> tuple[torch.Tensor, torch.Tensor]:
        return gated_gae(self.rewards, self.values, self.mask, gamma=gamma, lam=lam, lam_value=lam, bootstrap=self.bootstrap)


# --- torchrl; rlax is in test_rlax ----------------------------------------------------------------
@each_dtype
@pytest.mark.parametrize("per_token_lam", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_torchrl(seed, per_token_lam, dtype):
    batch = Batch(seed, dtype)
    lam = batch.lam if per_token_lam else 0.95
    knobs = (batch.stream(batch.gamma), batch.stream(lam) if per_token_lam else lam, batch.stream(batch.values))
    expected = batch.theirs(generalized_advantage_estimate, *knobs)
    for ours, theirs in zip(batch.ours(batch.gamma, lam), expected, strict=True):
        assert_close(batch.stream(ours), theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize("seed", range(3))
def test_td0_equals_torchrl(seed, dtype):
    batch = Batch(seed, dtype)
    advantages, targets = batch.ours(batch.gamma, 0.0)
    expected = batch.theirs(td0_return_estimate, batch.stream(batch.gamma))
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert_close(batch.stream(targets), expected, **close)
    assert_close(batch.stream(advantages), expected - batch.stream(batch.values), **close)


@each_dtype
@pytest.mark.parametrize("seed", range(3))
def test_monte_carlo_with_a_bootstrap_equals_torchrl(seed, dtype):
    batch = Batch(seed, dtype)
    targets = batch.ours(batch.gamma, 1.0)[1]
    expected = batch.theirs(td1_return_estimate, batch.stream(batch.gamma))
    assert_close(batch.stream(targets), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize("seed", range(3))
def test_td_lambda_equals_torchrl(seed, dtype):
    batch = Batch(seed, dtype)
    advantages, targets = batch.ours(batch.gamma, batch.lam)
    expected = batch.theirs(td_lambda_return_estimate, batch.stream(batch.gamma), batch.stream(batch.lam))
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert_close(batch.stream(targets), expected, **close)
    assert_close(batch.stream(advantages), expected - batch.stream(batch.values), **close)


@each_dtype
@pytest.mark.parametrize("rho_bar, c_bar", [(1.0, 1.0), (1.3, 0.8), (100.0, 100.0), (0.7, 1.2)])
def test_vtrace_equals_torchrl(rho_bar, c_bar, dtype):
    batch = Batch(4, dtype)
    got = vtrace(
        batch.rewards,
        batch.values,
        batch.mask,
        batch.log_ratio,
        gamma=batch.gamma,
        rho_bar=rho_bar,
        c_bar=c_bar,
        bootstrap=batch.bootstrap,
    )
    expected = vtrace_advantage_estimate(
        batch.stream(batch.gamma),
        batch.stream(batch.log_ratio),
        torch.zeros_like(batch.stream(batch.log_ratio)),
        batch.stream(batch.values),
        batch.stream(batch.next_values),
        batch.stream(batch.rewards),
        **batch.ends,
        rho_thresh=torch.tensor(rho_bar, dtype=dtype),
        c_thresh=torch.tensor(c_bar, dtype=dtype),
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(batch.stream(ours), theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# --- numbers by hand ------------------------------------------------------------------------------
HAND = {"gamma": 0.5, "lam": 0.5}
HAND_INPUTS = (T([0, 0, 2]), T([1, 2, 4]), make_mask("111"), T([2.0, 0.5, 0.25]).log())


def test_vtrace_by_hand():
    # ratios 2 0.5 0.25, clipped 1 0.5 0.25; r + gV' - V = 0, 0, -2; delta = 0, 0, -0.5
    # v - V: -0.5;  0 + .5*.25*-.5 = -0.0625;  0 + .5*.5*-.0625 = -0.015625
    # A: .25*(2 - 4) = -0.5;  .5*(0 + .5*3.5 - 2) = -0.125;  1*(0 + .5*1.9375 - 1) = -0.03125
    advantages, targets = vtrace(*HAND_INPUTS, **HAND)
    assert_close(targets, T([1 - 0.015625, 2 - 0.0625, 3.5]))
    assert_close(advantages, T([-0.03125, -0.125, -0.5]))


def test_retrace_by_hand():
    # c (at the following token) = .5 * (., .5, .25); A: -2;  0 + .5*.125*-2 = -0.125;  0 + .5*.25*-.125 = -0.015625
    advantages, targets = retrace(*HAND_INPUTS, **HAND)
    assert_close(advantages, T([-0.015625, -0.125, -2]))
    assert_close(targets, T([1 - 0.015625, 2 - 0.0625, 4 - 0.5]))


def test_clipping_bounds_by_hand():
    zeros, one = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    inputs = (torch.ones(1, 1), zeros, one, T([math.log(10.0)]))
    assert vtrace(*inputs, gamma=1.0)[0].item() == 1.0
    assert vtrace(*inputs, gamma=1.0, rho_bar=4.0)[0].item() == pytest.approx(4)
    assert retrace(*inputs, gamma=1.0)[0].item() == 1.0  # a token's own ratio is no part of its Q
    assert retrace(*inputs, gamma=1.0, c_bar=4.0)[1].item() == pytest.approx(4)


def test_length_adaptive_lambda_by_hand():
    lam = length_adaptive_lambda(make_mask("1111", "1100", "0000"), 0.5)
    assert_close(lam, T([0.5] * 4, [0.0] * 4, [0.0] * 4))  # 1 - 1/2;  1 - 1/1;  below 1
    long = length_adaptive_lambda(torch.ones(1, 400, dtype=torch.bool), 0.05)
    assert_close(long, torch.full((1, 400), 0.95))


# --- reductions -----------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", GAPS)
def test_off_policy_traces_with_ratio_1_are_gae(gap):
    rollout = make_rollout(5, 80, seed=3)
    inputs = (rollout.rewards, rollout.values, rollout.mask)
    zeros, knobs = torch.zeros_like(rollout.rewards), {"gamma": 0.9, "bootstrap": rollout.bootstrap, "gap": gap}
    assert_close(vtrace(*inputs, zeros, **knobs), gated_gae(*inputs, lam=1.0, **knobs))
    assert_close(retrace(*inputs, zeros, lam=0.7, **knobs), gated_gae(*inputs, lam=0.7, lam_value=0.7, **knobs))
    assert_close(vtrace(*inputs, zeros, lam=0.7, **knobs)[1], gated_gae(*inputs, lam=0.7, lam_value=0.7, **knobs)[1])


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("bar", [0.8, 1.0, 5.0])
def test_retrace_s_value_target_is_vtrace_s(gap, bar):
    rollout = make_rollout(5, 80, seed=4)
    inputs = (rollout.rewards, rollout.values, rollout.mask, rollout.logprobs - rollout.rollout_logprobs)
    knobs = {"gamma": 0.9, "bootstrap": rollout.bootstrap, "gap": gap, "c_bar": bar}
    assert_close(retrace(*inputs, **knobs)[1], vtrace(*inputs, rho_bar=bar, **knobs)[1])


def credit(name, rollout, **knobs):
    return transports[name](**({"whiten": False} | knobs))(rollout)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("whiten", [True, False])
def test_what_each_component_reduces_to(gap, whiten):
    rollout = make_rollout(6, 70)
    ended = rollout.replace(bootstrap=torch.zeros(6), truncated=torch.zeros(6, dtype=torch.bool))
    common = {"gamma": 0.9, "gap": gap, "whiten": whiten}

    def same(a, b):
        assert_close(a.advantages, b.advantages, atol=1e-5, rtol=1e-5)
        assert_close(a.value_targets, b.value_targets, atol=1e-5, rtol=1e-5)

    same(credit("td_lambda", ended, lam=1.0, **common), credit("monte_carlo", ended, **common))
    same(credit("td_lambda", rollout, lam=0.0, **common), credit("td0", rollout, **common))
    same(credit("td_lambda", rollout, lam=0.8, **common), credit("gae", rollout, lam=0.8, lam_value=0.8, **common))
    on_policy = rollout.replace(rollout_logprobs=rollout.logprobs)
    same(credit("vtrace", on_policy, **common), credit("gae", rollout, **common))
    same(credit("retrace", on_policy, lam=0.8, **common), credit("gae", rollout, lam=0.8, lam_value=0.8, **common))


def test_monte_carlo_without_a_critic_is_the_return_and_needs_none():
    rollout = make_rollout(4, 20)
    with_values = credit("monte_carlo", rollout, gamma=0.9)
    without = credit("monte_carlo", rollout.replace(values=None, bootstrap=None), gamma=0.9, baseline=False)
    assert torch.equal(without.advantages, with_values.value_targets) and without.value_targets is None
    assert transports["monte_carlo"](baseline=False).needs == frozenset() and transports["monte_carlo"]().needs == {"values"}


def test_length_adaptive_gae_is_gae_at_the_response_s_own_lambda():
    rollout = make_rollout(5, 60, seed=2)
    got = credit("length_adaptive_gae", rollout, alpha=0.2, gamma=0.97, lam_value=0.9)
    for row, tokens in enumerate(rollout.mask.sum(1).tolist()):
        lam = max(0.0, 1 - 1 / (0.2 * tokens))
        alone = credit("gae", rollout, gamma=0.97, lam=lam, lam_value=0.9)
        assert_close(got.advantages[row], alone.advantages[row])
        assert_close(got.value_targets[row], alone.value_targets[row])


def test_off_policy_traces_say_so_where_the_engine_s_logprobs_are_missing():
    for name in ("vtrace", "retrace"):
        with pytest.raises(ValueError, match="engine"):
            credit(name, make_rollout(rollout_logprobs=None))


def test_an_unlikely_token_cuts_the_trace():
    """Under Retrace and V-trace nothing of what follows a token that the trainer would never emit reaches those before it."""
    rollout = make_rollout(mask=make_mask("11111111"))
    ratio = torch.zeros(1, 8)
    ratio[0, 4] = -1e4
    for name in ("vtrace", "retrace"):
        cut = rollout.replace(logprobs=rollout.rollout_logprobs + ratio)
        other = cut.replace(rewards=cut.rewards + T([0, 0, 0, 0, 0, 0, 0, 5]))
        a, b = credit(name, cut).advantages[0], credit(name, other).advantages[0]
        assert torch.equal(a[:4], b[:4]) and not torch.equal(a[5:], b[5:])
