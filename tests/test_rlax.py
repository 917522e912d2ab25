"""Traces against rlax, a second oracle beside torchrl (test_traces).

rlax has no Retrace target and no n-step return of a transport here, and clips V-trace's trace at 1.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from test_traces import TOLERANCE, Batch
from torch.testing import assert_close

from cct.transport import gated_gae, retrace, token_returns, vtrace

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "jax.core", DeprecationWarning)  # of tensorflow_probability, which rlax imports
    jax = pytest.importorskip("jax", reason="the extra `.[dev]` brings it")
    rlax = pytest.importorskip("rlax", reason="the extra `.[dev]` brings it")


class Trajectory:
    """A batch's responses one after the other, as rlax takes them: at the end of each the discount is 0, and what the value
    after it is worth stands in the reward."""

    def __init__(self, batch: Batch, gamma: torch.Tensor | None = None):
        self.batch = batch
        gamma = batch.gamma if gamma is None else gamma
        last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
        rewards = torch.where(last, batch.rewards + gamma * batch.bootstrap.unsqueeze(1), batch.rewards)
        self.rewards, self.gamma = self.array(rewards), self.array(gamma.masked_fill(last, 0.0))
        self.values, self.lam, self.ratio = (self.array(x) for x in (batch.values, batch.lam, batch.log_ratio.exp()))
        self.after = jax.numpy.append(self.values[1:], 0.0)

    def array(self, x: torch.Tensor):
        return jax.numpy.asarray(x[self.batch.mask].numpy())

    def is_at(self, ours: torch.Tensor, theirs) -> None:
        """Theirs, [tokens of the batch], is ours [B, T] at every token of every response."""
        assert theirs.dtype == str(ours.dtype).removeprefix("torch.")
        tolerance = TOLERANCE[ours.dtype]
        assert_close(ours[self.batch.mask], torch.from_numpy(theirs.__array__().copy()), atol=tolerance, rtol=tolerance)


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    with jax.enable_x64(request.param == torch.float64):  # within one test: it is a setting of the process
        yield request.param


@pytest.fixture(params=(0, 2, 4))
def batch(request, dtype) -> Batch:
    """Five responses, three of them cut by the length limit; rewards, values, ratios, gamma and lambda are random per token."""
    return Batch(request.param, dtype)


def gae(x: Trajectory):
    return rlax.truncated_generalized_advantage_estimation(x.rewards, x.gamma, x.lam, jax.numpy.append(x.values, 0.0))


def test_gae(batch):
    x = Trajectory(batch)
    x.is_at(batch.ours(batch.gamma, batch.lam)[0], gae(x))


def test_gae_where_responses_have_gaps(batch):
    """rlax's trajectories have none: a response with a gap is held against the one without it."""
    batch.mask = batch.mask & (torch.arange(batch.mask.shape[1]) % 7 != 3)
    x = Trajectory(batch)
    x.is_at(batch.ours(batch.gamma, batch.lam)[0], gae(x))


def test_lambda_returns_and_td0(batch):
    x = Trajectory(batch)
    x.is_at(batch.ours(batch.gamma, batch.lam)[1], rlax.lambda_returns(x.rewards, x.gamma, x.after, x.lam))
    x.is_at(batch.ours(batch.gamma, 0.0)[1], rlax.lambda_returns(x.rewards, x.gamma, x.after, 0 * x.lam))


def test_discounted_returns_with_and_without_a_value_after_the_end(batch):
    x = Trajectory(batch)
    x.is_at(batch.ours(batch.gamma, 1.0)[1], rlax.discounted_returns(x.rewards, x.gamma, x.after))
    batch.bootstrap = torch.zeros_like(batch.bootstrap)
    x = Trajectory(batch, torch.full_like(batch.gamma, 0.9))
    x.is_at(token_returns(batch.rewards, batch.mask, gamma=0.9), rlax.discounted_returns(x.rewards, x.gamma, x.after))


@pytest.mark.parametrize("rho_bar", [0.7, 1.0, 1.3])
def test_vtrace(batch, rho_bar):
    """Targets with lambda per token. rlax mixes V into the advantage below lambda 1, so that is compared at 1."""
    x, inputs = Trajectory(batch), (batch.rewards, batch.values, batch.mask, batch.log_ratio)

    def theirs(lam):
        return rlax.vtrace_td_error_and_advantage(
            x.values, x.after, x.rewards, x.gamma, x.ratio, lam, clip_rho_threshold=rho_bar, clip_pg_rho_threshold=rho_bar
        )

    def ours(lam):
        return vtrace(*inputs, gamma=batch.gamma, lam=lam, rho_bar=rho_bar, bootstrap=batch.bootstrap)

    x.is_at(ours(batch.lam)[1], theirs(x.lam).errors + x.values)
    whole = theirs(x.lam**0)
    x.is_at(ours(1.0)[1], whole.errors + x.values)
    x.is_at(ours(1.0)[0], whole.pg_advantage)


@pytest.mark.parametrize("c_bar", [0.8, 1.0, 1.2])
def test_retrace(batch, c_bar):
    """With V in place of Q, as here."""
    x, inputs = Trajectory(batch), (batch.rewards, batch.values, batch.mask, batch.log_ratio)
    ours = retrace(*inputs, gamma=batch.gamma, lam=batch.lam, c_bar=c_bar, bootstrap=batch.bootstrap)[0]
    cut = (x.lam * jax.numpy.minimum(c_bar, x.ratio))[1:]
    x.is_at(ours, rlax.general_off_policy_returns_from_q_and_v(x.values[1:], x.after, x.rewards, x.gamma, cut) - x.values)


def test_the_comparison_is_able_to_fail(batch):
    """One token's gamma, changed by a millionth, is more than the tolerance of float64."""
    x, gamma = Trajectory(batch), batch.gamma.clone()
    gamma[0, 50] *= 1 + (1e-6 if gamma.dtype == torch.float64 else 1e-2)
    ours = gated_gae(batch.rewards, batch.values, batch.mask, gamma=gamma, lam=batch.lam, bootstrap=batch.bootstrap)[0]
    with pytest.raises(AssertionError):
        x.is_at(ours, gae(x))
