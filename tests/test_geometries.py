"""Geometries beyond PPO clip: losses and gradients by hand, reductions to one another, and what a split may not change."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_mask
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from cct.geometry import (
    aggregate,
    aggregation_weights,
    cispo_loss,
    clip_cov_loss,
    dis_loss,
    dppo_loss,
    geometries,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    kl_cov_loss,
    kl_estimate,
    kl_loss,
    mark_some_covariances,
    mark_top_covariances,
    policy_gradient_loss,
    ppo_clip_loss,
    sapo_loss,
    token_covariances,
    topr_loss,
    vespo_loss,
)

NAN, INF = float("nan"), float("inf")


def draw(seed: int, rows: int = 6, width: int = 5) -> tuple[torch.Tensor, ...]:
    """Log-probabilities (new, old, reference), advantages and a mask with a row of none, [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    new, old, reference = (-2 * torch.rand(rows, width, generator=generator) for _ in range(3))
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[-1] = False
    return new, old, reference, torch.randn(rows, width, generator=generator), mask


def of(new: list[float], old: list[float], advantages: list[float] | float) -> tuple[torch.Tensor, ...]:
    """One response by its probabilities."""
    advantages = [advantages] * len(new) if isinstance(advantages, float) else advantages
    logprobs = torch.tensor([new], dtype=torch.float64).log().requires_grad_()
    return logprobs, torch.tensor([old], dtype=torch.float64).log(), torch.tensor([advantages], dtype=torch.float64)


def check(function, new, old, advantages, loss, gradient, **knobs):
    """The sum over tokens is differentiated: the entries of `gradient` are d(sum of losses) / d(log-probability)."""
    logprobs, old_logprobs, advantages = of(new, old, advantages)
    got, metrics = function(logprobs, old_logprobs, advantages, torch.ones(logprobs.shape, dtype=torch.bool), **knobs)
    got.sum().backward()
    assert got[0].tolist() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)
    return metrics


# --- by hand --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "new, advantages, knobs, loss, gradient",  # old probabilities are 0.2 and 0.4
    [
        # ratios 2 and 0.5: s = 1; A is their mean, 2; each token's gradient is both losses' share, -2 * 1/2 * 2
        ([0.4, 0.2], [1.0, 3.0], {}, [-2.0, -2.0], [-2.0, -2.0]),
        # ratios 2 and 2: s = 2, bound 1.5
        ([0.4, 0.8], 1.0, {"clip_high": 0.5}, [-1.5, -1.5], [0.0, 0.0]),
        ([0.4, 0.8], -1.0, {"clip_high": 0.5}, [2.0, 2.0], [2.0, 2.0]),  # pushed back
        # ratios 0.5 and 0.5
        ([0.1, 0.2], -1.0, {"clip_low": 0.3}, [0.7, 0.7], [0.0, 0.0]),
        ([0.1, 0.2], 1.0, {"clip_low": 0.3}, [-0.5, -0.5], [-0.5, -0.5]),
    ],
)
def test_gspo(new, advantages, knobs, loss, gradient):
    check(gspo_loss, new, [0.2, 0.4], advantages, loss, gradient, **knobs)


@pytest.mark.parametrize(
    "new, advantages, knobs, loss, gradient",
    [
        ([0.4, 0.2], [1.0, 3.0], {}, [-1.0, -3.0], [-1.0, -3.0]),  # s = 1, each token its own advantage
        ([0.4, 0.8], [1.0, -1.0], {"clip_high": 0.5}, [-1.5, 2.0], [0.0, 2.0]),  # s = 2: only the good one is clipped
        ([0.1, 0.2], [1.0, -1.0], {"clip_low": 0.3}, [-0.5, 0.7], [-0.5, 0.0]),
    ],
)
def test_gspo_token(new, advantages, knobs, loss, gradient):
    check(gspo_token_loss, new, [0.2, 0.4], advantages, loss, gradient, **knobs)


def test_gmpo():
    # log-ratios log 2 and -log 2, the first capped at 0.4: mean (0.4 - 0.6931) / 2
    mean = math.exp((0.4 - math.log(2)) / 2)
    metrics = check(gmpo_loss, [0.4, 0.2], [0.2, 0.4], 2.0, [-2 * mean] * 2, [0.0, -2 * mean])
    assert metrics["clip_fraction"].tolist() == [[1, 0]]
    # A < 0: capped below instead, the second at -0.4
    mean = math.exp((math.log(2) - 0.4) / 2)
    check(gmpo_loss, [0.4, 0.2], [0.2, 0.4], -2.0, [2 * mean] * 2, [2 * mean, 0.0])


def test_policy_gradient():
    check(policy_gradient_loss, [0.5, 0.2], [0.1, 0.9], [2.0, -3.0], [2 * math.log(2), -3 * math.log(5)], [-2.0, 3.0])


@pytest.mark.parametrize(
    "new, weight, cut",  # the old probability is 0.1
    [(0.1, 1.0, 0), (0.3, 3.0, 0), (0.9, 4.0, 1), (0.05, 0.5, 0), (0.01, 0.25, 1)],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo(new, weight, cut, advantage):
    metrics = check(
        cispo_loss, [new], [0.1], advantage, [-weight * advantage * math.log(new)], [-weight * advantage],
        clip_low=0.75, clip_high=3.0,
    )  # fmt: skip
    assert metrics["clip_fraction"].item() == cut


def test_cispo_has_no_lower_bound_unless_asked():
    check(cispo_loss, [1e-4], [0.1], 1.0, [1e-3 * 4 * math.log(10)], [-1e-3])


def test_sapo():
    check(sapo_loss, [0.3], [0.3], 1.0, [-2.0], [-1.0])
    check(sapo_loss, [0.3], [0.3], -1.0, [2 / 1.05], [1.0])
    p = 1 / (1 + math.exp(-2))  # tau 2, ratio 2
    check(sapo_loss, [0.6], [0.3], 3.0, [-4 / 2 * p * 3], [-2 * 3 * 4 * p * (1 - p)], tau_positive=2.0)
    p = 1 / (1 + math.exp(0.5))  # tau 1, ratio 0.5
    check(sapo_loss, [0.2], [0.4], -1.0, [4 * p], [0.5 * 4 * p * (1 - p)], tau_negative=1.0)


def test_topr():
    logs = [math.log(x) for x in (0.4, 0.1)]
    # ratios 2 and 0.125, together 0.25
    check(topr_loss, [0.4, 0.1], [0.2, 0.8], 2.0, [-2 * x for x in logs], [-2.0, -2.0])
    check(topr_loss, [0.4, 0.1], [0.2, 0.8], -2.0, [0.5 * x for x in logs], [0.5, 0.5])
    check(topr_loss, [0.4, 0.1], [0.2, 0.8], -2.0, [2 * logs[0], 0.25 * logs[1]], [2.0, 0.25], level="token")
    check(topr_loss, [0.4, 0.1], [0.2, 0.8], -2.0, [4 * logs[0], 0.25 * logs[1]], [4.0, 0.25], level="token", bound=3.0)
    # ratios 2 and 2: a response that has become likelier is bounded by 1
    check(topr_loss, [0.4, 0.8], [0.2, 0.4], -1.0, [math.log(0.4), math.log(0.8)], [1.0, 1.0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    "new, old, weight",
    [
        (0.6, 0.15, 4.0),
        (0.7, 0.1, 0.0),  # 7 is above 6
        (0.3, 0.4, 0.75),
        (0.2, 0.4, 0.0),  # 0.5 is below 0.7
    ],
)
def test_dis_drops_a_token_on_either_side_whatever_its_advantage(new, old, weight, advantage):
    gradient = -weight * advantage
    metrics = check(dis_loss, [new], [old], advantage, [gradient * math.log(new)], [gradient])
    assert metrics["clip_fraction"].item() == (weight == 0)


def test_vespo():
    logs = [math.log(x) for x in (0.4, 0.1)]
    good, bad = 0.25**2 * math.exp(3 * 0.75), 0.25**3 * math.exp(2 * 0.75)  # ratios 2 and 0.125, W = 0.25
    check(vespo_loss, [0.4, 0.1], [0.2, 0.8], 2.0, [-2 * good * x for x in logs], [-2 * good] * 2)
    check(vespo_loss, [0.4, 0.1], [0.2, 0.8], -1.0, [bad * x for x in logs], [bad] * 2)
    other = 4 * math.exp(-3)  # ratios 2 and 2, W = 4, with k 1 and lambda 1
    check(
        vespo_loss, [0.4, 0.8], [0.2, 0.4], -1.0, [other * math.log(x) for x in (0.4, 0.8)], [other] * 2,
        power_negative=1.0, decay_negative=1.0,
    )  # fmt: skip


def test_luspo_is_gspo_times_the_length_of_each_response():
    """s = 2 in both, bound 1.0025; a response of two tokens and one of one: (2 * 1 * 1.0025 + 1 * 3 * 1.0025) / 2."""
    old = torch.tensor([[0.2, 0.4], [0.3, 0.5]]).log()
    advantages, mask = torch.tensor([[1.0, 1.0], [3.0, 9.0]]), make_mask("11", "10")
    geometry = geometries["luspo"]()
    loss, _ = geometry(old + math.log(2), old, advantages, mask, None)
    total = aggregate(loss, mask, geometry.aggregation, constant=geometry.constant)
    assert total.item() == pytest.approx(-(2 * 1.0025 + 3 * 1.0025) / 2)


@pytest.mark.parametrize(
    "new, old, advantage, gradient",
    [
        (0.6, 0.5, 1.0, -1.2),  # 0.1 is within the bound of 0.15
        (0.7, 0.5, 1.0, 0.0),  # 0.2 is not
        (0.7, 0.5, -1.0, 1.4),  # but pushes back
        (0.3, 0.5, -1.0, 0.0),
        (0.3, 0.5, 1.0, -0.6),
        (0.01, 0.001, 1.0, -10.0),  # ten times likelier, and still rare
        (0.1, 0.001, 1.0, -20.0),  # the weight is bounded
    ],
)
def test_dppo_tv(new, old, advantage, gradient):
    metrics = check(dppo_loss, [new], [old], advantage, [gradient * math.log(new)], [gradient])
    assert metrics["clip_fraction"].item() == (gradient == 0)


def test_dppo_kl():
    divergence = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    for bound, gradient in ((divergence + 1e-4, -1.4), (divergence - 1e-4, 0.0)):
        check(dppo_loss, [0.7], [0.5], 1.0, [gradient * math.log(0.7)], [gradient], divergence="kl", bound=bound)
    check(dppo_loss, [0.7], [0.5], -1.0, [1.4 * math.log(0.7)], [1.4], divergence="kl", bound=divergence - 1e-4)
    assert geometries["dppo"](divergence="kl").surrogate(*of([0.7], [0.5], 1.0), make_mask("1"), None)[0].item() == 0
    assert geometries["dppo"](divergence="kl").surrogate(*of([0.6], [0.5], 1.0), make_mask("1"), None)[0].item() != 0


def test_covariances():
    logprobs = torch.tensor([[-1.0, -3.0, NAN], [-2.0, NAN, NAN]])
    advantages = torch.tensor([[3.0, -1.0, NAN], [-2.0, NAN, NAN]])  # means -2 and 0
    got = token_covariances(logprobs, advantages, make_mask("110", "100"))
    assert_close(got, torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))


def test_the_highest_covariances_are_marked():
    logprobs = torch.tensor([[-1.0, -3.0, NAN], [-2.0, -2.0, NAN]])
    advantages = torch.tensor([[3.0, -1.0, NAN], [-2.0, 0.0, NAN]])  # covariances 3, 1, 0, 0
    mask = make_mask("110", "110")

    def marked(share: float) -> list[bool]:
        return mark_top_covariances(logprobs, advantages, mask, share=share).flatten().tolist()

    assert marked(1e-4) == marked(0.25) == [True, False, False, False, False, False]
    assert marked(0.5) == marked(1.0) == [True, True, False, False, False, False]  # not where it is 0
    assert not mark_top_covariances(logprobs, advantages, mask & False, share=1.0).any()


def test_some_covariances_in_the_range_are_marked():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = (torch.randn(20, 50, generator=generator) for _ in range(2))
    mask = torch.rand(20, 50, generator=generator) < 0.8
    covariance = token_covariances(logprobs, advantages, mask)

    def marked(share=0.02, low=0.5, high=2.0, seed=0):
        return mark_some_covariances(logprobs, advantages, mask, share=share, low=low, high=high, seed=seed)

    assert marked().sum() == int(0.02 * int(mask.sum())) and marked(share=1e-6).sum() == 1
    assert covariance[marked()].min() >= 0.5 and covariance[marked()].max() <= 2.0
    assert torch.equal(marked(), marked()) and not torch.equal(marked(), marked(seed=1))
    everything = mask & (covariance >= 0.5) & (covariance <= 2.0)
    assert torch.equal(marked(share=1.0), everything)
    assert marked(low=100.0, high=200.0).sum() == 0


def test_clip_cov_takes_the_gradient_of_what_is_marked():
    def run(logprobs, old, advantages, mask):
        return clip_cov_loss(logprobs, old, advantages, mask, make_mask("10"), clip_high=0.3)

    check(run, [0.22, 0.22], [0.2, 0.2], 1.0, [-1.1, -1.1], [0.0, -1.1])
    check(run, [0.4, 0.4], [0.2, 0.2], 1.0, [-1.3, -1.3], [0.0, 0.0])


def test_kl_cov_lets_what_is_marked_pay():
    def run(logprobs, old, advantages, mask):
        return kl_cov_loss(logprobs, old, advantages, mask, make_mask("101"), coef=0.5)

    check(
        run, [0.4, 0.4, 0.1], [0.2, 0.2, 0.2], 1.0, [-2 + 0.5 * math.log(2), -2.0, -0.5 + 0.5 * math.log(2)], [-1.5, -2, -1.0]
    )


# --- reductions -----------------------------------------------------------------------------------
def both(one, other, rows=draw(0)):  # noqa: B008
    """Loss and gradient of two functions of the same tensors."""
    results = []
    for function in (one, other):
        logprobs = rows[0].clone().requires_grad_()
        loss = function(logprobs, rows[1], rows[3], rows[4])[0]
        loss.sum().backward()
        results.append((loss.detach(), logprobs.grad))
    return zip(*results, strict=True)


def test_responses_of_one_token_make_gspo_and_its_token_form_ppo():
    new, old, reference, advantages, _ = draw(1, rows=40, width=1)
    rows = (new, old, reference, advantages, torch.ones(40, 1, dtype=torch.bool))
    knobs = {"clip_low": 0.2, "clip_high": 0.3}
    for function in (gspo_loss, gspo_token_loss):
        for a, b in both(lambda *x, f=function: f(*x, **knobs), lambda *x: ppo_clip_loss(*x, **knobs), rows):
            assert_close(a, b)


def test_responses_of_one_token_make_gmpo_ppo_with_bounds_of_the_logarithm():
    new, old, reference, advantages, _ = draw(1, rows=40, width=1)
    rows = (new, old, reference, advantages, torch.ones(40, 1, dtype=torch.bool))
    clip = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    for a, b in both(gmpo_loss, lambda *x: ppo_clip_loss(*x, **clip), rows):
        assert_close(a, b)


def test_equal_advantages_give_gspo_s_gradient_to_its_token_form():
    new, old, reference, advantages, mask = draw(2)
    rows = (new, old, reference, advantages[:, :1].expand_as(new), mask)
    weights = aggregation_weights(mask, "sequence_mean")
    weigh = lambda function: lambda *x: (function(*x, clip_low=0.3, clip_high=0.3)[0] * weights, None)  # noqa: E731
    for a, b in both(weigh(gspo_loss), weigh(gspo_token_loss), rows):
        assert_close(a.sum(1), b.sum(1))


def test_dis_and_vespo_reduce_to_cispo():
    """Inside its range DIS weighs by the ratio, as CISPO without a bound; so does VESPO of one token with k 1, lambda 0."""
    new, old, _, advantages, mask = draw(3, width=1)
    wide = geometries["cispo"](clip_low=1.0, clip_high=100.0)(new, old, advantages, mask, None)[0]
    assert_close(geometries["dis"](clip_low=1.0, clip_high=100.0)(new, old, advantages, mask, None)[0], wide)
    flat = {"power_positive": 1.0, "power_negative": 1.0, "decay_positive": 0.0, "decay_negative": 0.0}
    assert_close(geometries["vespo"](**flat)(new, old, advantages, mask, None)[0], wide)


def test_cispo_between_its_bounds_is_the_importance_weighted_policy_gradient():
    new, old, _, advantages, mask = draw(3)
    ratio, logprobs = (new - old).exp(), new.clone().requires_grad_()
    loss, metrics = cispo_loss(logprobs, old, advantages, mask, clip_high=1000.0)
    loss.sum().backward()
    assert_close(logprobs.grad, (-ratio * advantages).masked_fill(~mask, 0.0))
    assert metrics["clip_fraction"].eq(0).all()


ON_POLICY = [
    (name, {})
    for name in (
        "ppo_clip",
        "gspo_token",
        "policy_gradient",
        "cispo",
        "sapo",
        "topr",
        "dppo",
        "clip_cov",
        "kl_cov",
        "dis",
        "vespo",
    )
] + [("topr", {"level": "token"}), ("dppo", {"divergence": "kl"})]


@pytest.mark.parametrize("name, knobs", ON_POLICY)
def test_before_the_policy_moves_each_of_grain_token_is_the_policy_gradient(name, knobs):
    new, _, _, advantages, mask = draw(4)
    geometry, logprobs = geometries[name](**knobs), new.clone().requires_grad_()
    assert geometry.grain == "token"
    loss, metrics = geometry(logprobs, new, advantages, mask, None)
    loss.sum().backward()
    assert_close(logprobs.grad, -advantages.masked_fill(~mask, 0.0))
    assert metrics["ratio"].eq(1).all() and metrics["clip_fraction"].eq(0).all()


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_before_the_policy_moves_each_of_grain_sequence_is_the_policy_gradient_of_the_mean_advantage(name):
    new, _, _, advantages, mask = draw(4)
    logprobs = new.clone().requires_grad_()
    loss, _ = geometries[name]()(logprobs, new, advantages, mask, None)
    loss.sum().backward()
    mean = advantages.masked_fill(~mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    assert geometries[name].grain == "sequence"
    assert_close(logprobs.grad, (-mean).expand_as(new).masked_fill(~mask, 0.0))


# --- of every geometry ----------------------------------------------------------------------------
EVERY = [(name, {}) for name in geometries.names()] + [
    ("topr", {"level": "token"}),
    ("dppo", {"divergence": "kl"}),
    ("clip_cov", {"share": 0.3, "covariance_low": 0.0}),
    ("kl_cov", {"share": 0.3}),
    ("gspo", {"kl_coef": 0.1, "kl_estimator": "k1", "kl_gradient": "k2"}),
    ("cispo", {"kl_coef": 0.1, "kl_gradient": "importance"}),
]
every = pytest.mark.parametrize("name, knobs", EVERY, ids=[" ".join([n, *map(str, k.values())]) for n, k in EVERY])


def marks(geometry, old, advantages, mask):
    chosen = geometry.mark(old, advantages, mask, 7)
    return () if chosen is None else (chosen,)


@every
@pytest.mark.parametrize("noise", [NAN, INF, -INF, 1e30])
def test_whatever_stands_at_a_masked_position_changes_neither_loss_nor_gradient(name, knobs, noise):
    new, old, reference, advantages, mask = draw(1)
    geometry = geometries[name](**knobs)

    def run(hide):
        logprobs = hide(new).requires_grad_()
        chosen = marks(geometry, hide(old), hide(advantages), mask)
        loss, metrics = geometry(logprobs, hide(old), hide(advantages), mask, hide(reference), *chosen)
        aggregate(loss, mask, geometry.aggregation).backward()
        assert not any(x.requires_grad for x in metrics.values())
        return loss.detach(), logprobs.grad, *metrics.values(), *chosen

    hidden = run(lambda x: x.where(mask, noise))
    for clean, noisy in zip(run(torch.clone), hidden, strict=True):
        assert torch.equal(clean, noisy)
    loss, gradient = hidden[:2]
    assert loss[~mask].eq(0).all() and gradient[~mask].eq(0).all() and gradient[mask].ne(0).any()


@every
@given(seed=st.integers(0, 10**6), sizes=st.sampled_from([(6,), (3, 3), (1, 5), (2, 2, 2), (1,) * 6]))
def test_the_split_into_micro_batches_never_changes_the_gradient(name, knobs, seed, sizes):
    new, old, reference, advantages, mask = draw(seed)
    geometry = geometries[name](**knobs)
    weights = aggregation_weights(mask, geometry.aggregation)
    parts = (old, advantages, mask, reference, *marks(geometry, old, advantages, mask))

    def gradient(sizes):
        logprobs = new.clone().requires_grad_()
        for own, weight, *rest in zip(*(x.split(sizes) for x in (logprobs, weights, *parts)), strict=True):
            (geometry(own, *rest)[0] * weight).sum().backward()
        return logprobs.grad

    assert_close(gradient(list(sizes)), gradient([6]))


@every
@pytest.mark.parametrize("apart", [200.0, -200.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_policy_far_away_stays_finite(name, knobs, apart, sign):
    logprobs = torch.full((2, 3), min(0.0, apart), requires_grad=True)
    old, mask = torch.full((2, 3), min(0.0, -apart)), make_mask("111", "100")
    loss, metrics = geometries[name](**knobs)(logprobs, old, torch.full((2, 3), sign), mask, old)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all() and all(x.isfinite().all() for x in metrics.values())


@every
def test_padding_and_other_responses_change_nothing(name, knobs):
    new, old, reference, advantages, mask = draw(5)
    geometry = geometries[name](**knobs)
    loss, _ = geometry(new, old, advantages, mask, reference)
    wider = [torch.nn.functional.pad(x, (0, 4), value=NAN) for x in (new, old, advantages, reference)]
    padded, _ = geometry(*wider[:3], torch.nn.functional.pad(mask, (0, 4)), wider[3])
    assert_close(padded[:, :5], loss)
    alone, _ = geometry(new[2:3], old[2:3], advantages[2:3], mask[2:3], reference[2:3])
    assert_close(alone, loss[2:3])


@pytest.mark.parametrize(
    "name, knobs",
    [
        ("gspo", {"clip_low": 0.1, "clip_high": 0.5}),
        ("gspo_token", {"clip_low": 0.1, "clip_high": 0.5}),
        ("gmpo", {"clip_low": 0.1, "clip_high": 0.5}),
        ("cispo", {"clip_low": 0.1, "clip_high": 0.5}),
        ("sapo", {"tau_positive": 3.0, "tau_negative": 4.0}),
        ("topr", {"level": "token", "bound": 0.7}),
        ("dppo", {"divergence": "kl", "bound": 0.01, "ratio_bound": 1.5}),
        ("clip_cov", {"clip_low": 0.1, "clip_high": 0.5}),
        ("kl_cov", {"coef": 3.0}),
        ("luspo", {"clip_low": 0.1, "clip_high": 0.5}),
        ("dis", {"clip_low": 0.1, "clip_high": 0.5}),
        ("vespo", {"power_positive": 1.0, "decay_positive": 1.0, "power_negative": 1.0, "decay_negative": 1.0}),
    ],
)
def test_the_component_hands_every_knob_on(name, knobs):
    """Each knob, changed alone, changes the loss."""
    new, old, _, advantages, mask = draw(6, rows=30)
    marked = (mask & (torch.arange(5) % 2 == 0),) if name == "kl_cov" else ()

    def loss(**knobs):
        return geometries[name](**knobs)(new, old, advantages, mask, None, *marked)[0]

    for knob, value in knobs.items():
        others = {"divergence": "kl"} if knob == "bound" and name == "dppo" else {}
        assert not torch.equal(loss(**others), loss(**others, **{knob: value})), knob


def test_the_range_of_covariances_is_in_order():
    with pytest.raises(ValueError, match="covariance_low"):
        geometries["clip_cov"](covariance_low=2.0, covariance_high=1.0)


# --- KL -------------------------------------------------------------------------------------------
POLICY, OLD, REFERENCE = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.2, 0.2, 0.6]))


def mean_gradient(estimator: str, gradient: str, sampled: torch.Tensor) -> torch.Tensor:
    """Gradient with respect to the logits of the mean over tokens drawn from `sampled`."""
    logits = POLICY.log().requires_grad_()
    logprobs, mask = logits.log_softmax(0).view(1, 3), make_mask("111")
    per_token = kl_loss(logprobs, sampled.log().view(1, 3), REFERENCE.log().view(1, 3), mask, estimator, gradient)
    (sampled * per_token).sum().backward()
    return logits.grad


def exact_gradient(reverse: bool = True) -> torch.Tensor:
    logits = POLICY.log().requires_grad_()
    p = logits.softmax(0)
    (p * (p / REFERENCE).log() if reverse else REFERENCE * (REFERENCE / p).log()).sum().backward()
    return logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_on_policy_the_gradient_of_k2_is_that_of_the_kl_whatever_the_estimator(estimator):
    assert_close(mean_gradient(estimator, "k2", POLICY), exact_gradient())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("sampled", [POLICY, OLD])
def test_with_importance_the_gradient_is_that_of_the_kl_off_policy_too(estimator, sampled):
    assert_close(mean_gradient(estimator, "importance", sampled), exact_gradient())


def test_the_plain_gradients_are_what_the_help_says():
    assert_close(mean_gradient("k1", "plain", POLICY), torch.zeros(3, dtype=torch.float64))
    assert_close(mean_gradient("k2", "plain", POLICY), exact_gradient())
    assert_close(mean_gradient("k3", "plain", POLICY), exact_gradient(reverse=False))


def test_the_gradient_changes_no_value_on_policy():
    new, _, reference, _, mask = draw(7)
    for estimator in ("k1", "k2", "k3"):
        for gradient in ("plain", "k2", "importance"):
            assert_close(kl_loss(new, new, reference, mask, estimator, gradient), kl_estimate(new, reference, mask, estimator))
    with pytest.raises(ValueError, match="importance"):
        kl_loss(new, new, reference, mask, "k1", "k4")


def test_every_geometry_takes_the_kl_and_the_reference_it_needs():
    new, old, reference, advantages, mask = draw(8)
    for name in geometries.names():
        plain, _ = geometries[name]()(new, old, advantages, mask, reference)
        geometry = geometries[name](kl_coef=0.3, kl_gradient="importance")
        loss, metrics = geometry(new, old, advantages, mask, reference)
        assert_close(loss, plain + 0.3 * kl_loss(new, old, reference, mask, "k3", "importance"))
        assert torch.equal(metrics["reference_kl"], kl_estimate(new, reference, mask, "k3"))
        assert geometry.needs == geometries[name](kl_in_reward=0.3).needs == {"reference"}
