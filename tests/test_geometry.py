"""Update geometry: clipping by hand, what masked positions may hold, aggregation and its split into micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_mask
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from cct.geometry import aggregate, aggregation_weights, correction_weights, geometries, kl_estimate, ppo_clip_loss

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_over_constant")
NAN, INF = float("nan"), float("inf")


def of_ratio(*ratios: float) -> torch.Tensor:
    return torch.tensor([ratios]).log()


def draw(seed: int, rows: int = 6, width: int = 5) -> tuple[torch.Tensor, ...]:
    """Log-probabilities (new, old, reference), advantages and a mask, [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    new, old, reference = (-torch.rand(rows, width, generator=generator) for _ in range(3))
    return (
        new,
        old,
        reference,
        torch.randn(rows, width, generator=generator),
        torch.rand(rows, width, generator=generator) < 0.6,
    )


# --- clipping -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient, clipped",  # gradient: with respect to the new log-probability
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.6, 0.0, 1),  # no more than 1 + 0.3
        (0.5, 2.0, -1.0, -1.0, 0),  # a good token that became rarer is pulled back
        (1.0, -2.0, 2.0, 2.0, 0),
        (0.95, -2.0, 1.9, 1.9, 0),
        (0.5, -2.0, 1.8, 0.0, 1),  # no less than 1 - 0.1
        (1.5, -2.0, 3.0, 3.0, 0),  # a bad token that became likelier is pushed back
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, gradient, clipped):
    logprobs = (of_ratio(ratio) - 1.0).requires_grad_()
    got, metrics = ppo_clip_loss(
        logprobs, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), make_mask("1"), clip_low=0.1, clip_high=0.3
    )
    got.sum().backward()
    assert got.item() == pytest.approx(loss, abs=1e-6) and logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert metrics["clip_fraction"].item() == clipped and metrics["ratio"].item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (2.0, -1.0, 2.0, 2.0),  # below the bound
        (5.0, -1.0, 3.0, 0.0),  # at most 3 |A|
        (5.0, 1.0, -1.2, 0.0),  # a good token is not concerned
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient):
    logprobs = of_ratio(ratio).requires_grad_()
    got, _ = ppo_clip_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), make_mask("1"), dual_clip=3.0)
    got.sum().backward()
    assert got.item() == pytest.approx(loss, abs=1e-5) and logprobs.grad.item() == pytest.approx(gradient, abs=1e-5)


def test_equal_logprobs_have_ratio_1_and_are_not_clipped():
    logprobs, _, _, advantages, mask = draw(0)
    loss, metrics = ppo_clip_loss(logprobs, logprobs.clone(), advantages, mask, clip_low=0.0, clip_high=0.0)
    assert metrics["ratio"].eq(1).all() and metrics["clip_fraction"].eq(0).all() and metrics["approx_kl"].eq(0).all()
    assert_close(loss, -advantages * mask)


def test_approx_kl_by_hand():
    mask = make_mask("11")
    _, metrics = ppo_clip_loss(of_ratio(2.0, 0.5), torch.zeros(1, 2), torch.ones(1, 2), mask)
    assert_close(metrics["approx_kl"], torch.tensor([[1 - math.log(2), math.log(2) - 0.5]]))
    _, metrics = ppo_clip_loss(of_ratio(1.1, 0.8), torch.zeros(1, 2), torch.zeros(1, 2), mask)
    assert metrics["clip_fraction"].eq(0).all() and metrics["approx_kl"].gt(0).all()


@given(seed=st.integers(0, 10**6), clip_low=st.floats(0, 1), clip_high=st.floats(0, 3))
def test_clipping_is_pessimistic(seed, clip_low, clip_high):
    new, old, _, advantages, mask = draw(seed)
    loss, _ = ppo_clip_loss(3 * new, 3 * old, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    plain = -(3 * (new - old)).exp() * advantages
    assert (loss >= plain - 1e-5)[mask].all() and loss[~mask].eq(0).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("apart", [200.0, -200.0, INF, -INF])
def test_ratios_beyond_all_bounds_stay_finite(sign, apart):
    logprobs = torch.zeros(1, 1, requires_grad=True)
    loss, metrics = ppo_clip_loss(logprobs, torch.full((1, 1), -apart), torch.full((1, 1), sign), make_mask("1"))
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all() and all(x.isfinite().all() for x in metrics.values())


# --- masked positions -----------------------------------------------------------------------------
@pytest.mark.parametrize("noise", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("knobs", [{}, {"dual_clip": 3.0}, {"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_estimator": "k2"}])
def test_whatever_stands_at_a_masked_position_changes_neither_loss_nor_gradient(noise, aggregation, knobs):
    new, old, reference, advantages, mask = draw(1)
    geometry = geometries["ppo_clip"](aggregation=aggregation, **knobs)

    def run(hide):
        logprobs = hide(new).requires_grad_()
        loss, metrics = geometry(logprobs, hide(old), hide(advantages), mask, hide(reference))
        aggregate(loss, mask, aggregation).backward()
        return loss.detach(), logprobs.grad, *metrics.values()

    for clean, noisy in zip(run(torch.clone), run(lambda x: x.where(mask, noise)), strict=True):
        assert torch.equal(clean, noisy)
    loss, gradient = run(lambda x: x.where(mask, noise))[:2]
    assert loss[~mask].eq(0).all() and gradient[~mask].eq(0).all() and gradient[mask].ne(0).any()


def test_aggregate_ignores_what_is_masked():
    assert aggregate(torch.tensor([[1.0, NAN], [INF, 3.0]]), make_mask("10", "01")) == 2.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_tokens_has_loss_0(aggregation):
    loss = torch.full((2, 3), NAN, requires_grad=True)
    total = aggregate(loss, make_mask("000", "000"), aggregation)
    total.backward()
    assert total == 0 and loss.grad.eq(0).all()


# --- aggregation ----------------------------------------------------------------------------------
LOSS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
LOSS_MASK = make_mask("1111", "1000", "0000")


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token_mean", 20 / 5),
        ("sequence_mean", (2.5 + 10) / 2),  # the response without tokens does not count
        ("sequence_sum_over_constant", (10 + 10) / (2 * 8)),
    ],
)
def test_aggregation_by_hand(aggregation, expected):
    assert aggregate(LOSS, LOSS_MASK, aggregation, constant=8).item() == pytest.approx(expected)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="sequence_mean"):
        aggregate(LOSS, LOSS_MASK, "mean")
    with pytest.raises(ValueError, match="k3"):
        kl_estimate(LOSS, LOSS, LOSS_MASK, "k4")


@given(
    seed=st.integers(0, 10**6),
    aggregation=st.sampled_from(AGGREGATIONS),
    sizes=st.sampled_from([(6,), (3, 3), (1, 5), (2, 2, 2), (1,) * 6]),
)
def test_the_split_into_micro_batches_never_changes_the_gradient(seed, aggregation, sizes):
    new, old, _, advantages, mask = draw(seed)
    weights = aggregation_weights(mask, aggregation, constant=7)

    def gradient(sizes):
        logprobs = new.clone().requires_grad_()
        for new_part, *parts in zip(*(x.split(sizes) for x in (logprobs, old, advantages, mask, weights)), strict=True):
            (ppo_clip_loss(new_part, *parts[:3])[0] * parts[3]).sum().backward()
        return logprobs.grad

    whole = new.clone().requires_grad_()
    aggregate(ppo_clip_loss(whole, old, advantages, mask)[0], mask, aggregation, constant=7).backward()
    assert_close(gradient(list(sizes)), whole.grad)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_padding_changes_no_loss(aggregation):
    *_, advantages, mask = draw(2)
    wider = [torch.nn.functional.pad(advantages, (0, 9), value=NAN), torch.nn.functional.pad(mask, (0, 9))]
    assert_close(aggregate(*wider, aggregation), aggregate(advantages, mask, aggregation))


# --- KL -------------------------------------------------------------------------------------------
def test_kl_estimators_by_hand():
    d, mask = torch.tensor([[0.5, -1.0, NAN]]), make_mask("110")

    def estimate(name):
        return kl_estimate(d, torch.zeros(1, 3), mask, name)

    assert_close(estimate("k1"), torch.tensor([[0.5, -1.0, 0.0]]))
    assert_close(estimate("k2"), torch.tensor([[0.125, 0.5, 0.0]]))
    assert_close(estimate("k3"), torch.tensor([[math.exp(-0.5) - 0.5, math.e - 2, 0.0]]))


def test_k1_and_k3_are_unbiased():
    policy = torch.tensor([0.5, 0.3, 0.2])
    reference = torch.tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / reference).log()).sum()
    for name in ("k1", "k3"):
        per_token = kl_estimate(policy.log().view(1, 3), reference.log().view(1, 3), make_mask("111"), name)
        assert_close((policy * per_token).sum(), exact)


def test_the_kl_is_added_with_its_coefficient():
    new, old, reference, advantages, mask = draw(3)
    plain, _ = geometries["ppo_clip"]()(new, old, advantages, mask, None)
    for name in ("k1", "k2", "k3"):
        loss, metrics = geometries["ppo_clip"](kl_coef=0.3, kl_estimator=name)(new, old, advantages, mask, reference)
        kl = kl_estimate(new, reference, mask, name)
        assert_close(loss, plain + 0.3 * kl)
        assert torch.equal(metrics["reference_kl"], kl)


def test_a_reference_is_needed_only_with_a_kl():
    assert geometries["ppo_clip"]().needs == set() and geometries["ppo_clip"](kl_coef=0.1).needs == {"reference"}


def test_metrics_carry_no_gradient():
    new, old, reference, advantages, mask = draw(4)
    _, metrics = geometries["ppo_clip"](kl_coef=0.1)(new.requires_grad_(), old, advantages, mask, reference)
    assert not any(x.requires_grad for x in metrics.values())


def test_the_component_hands_its_knobs_on():
    new, old, _, advantages, mask = draw(5)
    got, _ = geometries["ppo_clip"](clip_low=0.05, clip_high=0.5, dual_clip=1.5)(3 * new, 3 * old, advantages, mask, None)
    assert torch.equal(got, ppo_clip_loss(3 * new, 3 * old, advantages, mask, clip_low=0.05, clip_high=0.5, dual_clip=1.5)[0])


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [
        ("none", "token", [1.0, 1.0, 1.0]),
        ("truncate", "token", [2.0, 0.25, 1.0]),  # 4, 1/4 and 1 capped at 2
        ("mask", "token", [0.0, 0.0, 1.0]),  # outside [1/2, 2]
        ("truncate", "sequence", [1.0, 1.0, 1.0]),  # 4 * 1/4 * 1
    ],
)
def test_correction_weights_by_hand(kind, level, expected):
    rollout = torch.tensor([[-3.0, -1.0, -2.0, float("nan")]])
    logprobs = rollout + torch.tensor([[4.0, 0.25, 1.0, 1.0]]).log()
    mask = torch.tensor([[True, True, True, False]])
    raw, used = correction_weights(logprobs, rollout, mask, kind, level, 2.0)
    torch.testing.assert_close(used[mask], torch.tensor(expected))
    torch.testing.assert_close(raw[mask], torch.tensor([4.0, 0.25, 1.0] if level == "token" else [1.0] * 3))
    assert bool(raw.isfinite().all() and used.isfinite().all())


def test_the_bounds_of_a_mask_need_not_be_reciprocal():
    weights = torch.tensor([[4.0, 0.6, 0.4, 6.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, used = correction_weights(weights.log(), torch.zeros(1, 4), mask, "mask", "token", 5.0, 0.5)
    torch.testing.assert_close(used, torch.tensor([[4.0, 0.6, 0.0, 0.0]]))
    _, used = correction_weights(weights.log(), torch.zeros(1, 4), mask, "mask", "token", 5.0)
    torch.testing.assert_close(used, torch.tensor([[4.0, 0.6, 0.4, 0.0]]))  # 1 / 5 below


def test_a_response_far_from_the_trainers_policy_is_left_out_as_a_whole():
    mask = torch.ones(2, 3, dtype=torch.bool)
    logprobs = torch.tensor([[0.3, 0.3, 0.3], [0.3, 0.0, 0.0]])  # products e^0.9 and e^0.3
    _, used = correction_weights(logprobs, torch.zeros(2, 3), mask, "mask", "sequence", 2.0)
    torch.testing.assert_close(used, torch.tensor([[0.0] * 3, [math.exp(0.3)] * 3]))


@pytest.mark.parametrize("name", geometries.names())
def test_a_correction_weighs_the_policy_s_term_and_not_the_kl_of_the_loss(name):
    """d = log 2 at the first token, 0 at the others: k3 = 1/2 - 1 + log 2, times 1/2."""
    new, old, _, advantages, _ = draw(5, rows=2, width=3)
    mask, correction = make_mask("111", "110"), torch.tensor([[0.0, 2.0, 0.5], [1.5, 0.0, 7.0]])
    reference = new - torch.tensor([math.log(2), 0.0, 0.0])
    plain, _ = geometries[name]()(new, old, advantages, mask, None)
    loss, metrics = geometries[name](kl_coef=0.5)(new, old, advantages, mask, reference, correction=correction)
    kl = torch.tensor([math.log(2) - 0.5, 0.0, 0.0]).expand(2, 3)
    assert_close(loss, plain * correction + 0.5 * kl)
    assert_close(metrics["reference_kl"], kl, atol=1e-6, rtol=1e-6)


def test_an_episode_of_several_rows_counts_once_by_hand():
    # Episode 5 has rows 0 and 2 with 3 + 1 tokens, episode 9 has row 1 with 2; row 3 is dropped, an episode of its own.
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]]).bool()
    episodes = torch.tensor([5, 9, 5, 7])
    of_rows = torch.tensor([1 / 8, 1 / 4, 1 / 8, 0])
    assert_close(aggregation_weights(mask, "sequence_mean", episodes=episodes), of_rows.unsqueeze(1) * mask)
    constant = aggregation_weights(mask, "sequence_sum_over_constant", constant=10, episodes=episodes)
    assert_close(constant, mask / 20)
    assert_close(aggregation_weights(mask, "token_mean", episodes=episodes), mask / 6)
    assert_close(aggregation_weights(mask, "sequence_mean").sum(1), torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_that_are_episodes_are_weighed_as_without_episodes(aggregation):
    mask = draw(3)[4]
    assert torch.equal(
        aggregation_weights(mask, aggregation, constant=7, episodes=torch.arange(len(mask)).flip(0)),
        aggregation_weights(mask, aggregation, constant=7),
    )
