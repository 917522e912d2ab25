"""Transport against hand-computed numbers, a definition written as a loop, and its own invariances."""

from __future__ import annotations

import pytest
import torch
from conftest import make_mask, make_rollout
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from cct.transport import explained_variance, explained_variance_within, gated_gae, group_advantage, scan, transports, whiten

GAPS = ("carry", "decay", "cut")
NAN, INF = float("nan"), float("inf")


def T(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


# --- oracles --------------------------------------------------------------------------------------
def loop(rewards, values, gamma, lam, lam_value, after) -> tuple[list[float], list[float]]:
    """The definition over a response without gaps, plain floats; `after`: V behind the last token."""
    advantages, targets = [], []
    next_advantage, next_value, next_target = 0.0, after, after
    for r, v, g, lt, lv in reversed(list(zip(rewards, values, gamma, lam, lam_value, strict=True))):
        next_target = r + g * ((1 - lv) * next_value + lv * next_target)
        next_advantage = r + g * next_value - v + g * lt * next_advantage
        next_value = v
        advantages.append(next_advantage)
        targets.append(next_target)
    return advantages[::-1], targets[::-1]


def reference(rewards, values, mask, gamma, lam, lam_value, bootstrap, gap) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_gae` row by row: each way to treat a gap is another list of steps for `loop`. Knobs [B, T], result float64."""
    advantages, targets = torch.zeros(2, *mask.shape, dtype=torch.float64)
    rewards, values = rewards.where(mask, 0.0), values.where(mask, 0.0)
    for row in range(len(mask)):
        steps = mask[row].nonzero().flatten().tolist()
        if not steps:
            continue
        if gap == "carry":
            pieces = [steps]
        elif gap == "decay":
            pieces = [list(range(steps[0], steps[-1] + 1))]
        else:
            pieces = [[]]
            for t in steps:
                pieces = [*pieces[:-1], [*pieces[-1], t]] if t - 1 in pieces[-1] else [*pieces, [t]]
        for piece in filter(None, pieces):
            after = bootstrap[row].item() if piece[-1] == steps[-1] else 0.0
            result = loop(*(x[row, piece].tolist() for x in (rewards, values, gamma, lam, lam_value)), after)
            advantages[row, piece], targets[row, piece] = torch.tensor(result, dtype=torch.float64)
    return advantages.where(mask, 0.0), targets.where(mask, 0.0)


def draw(seed: int, rows: int, length: int, dtype=torch.float32):
    """Random rewards, values, mask, gamma, lam, lam_value (all [B, T]) and bootstrap [B]."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=dtype)

    return (
        rand(rows, length) - 0.5,
        rand(rows, length),
        rand(rows, length) < 0.7,
        *(0.5 + rand(rows, length) / 2 for _ in range(3)),
        rand(rows),
    )


# --- numbers by hand ------------------------------------------------------------------------------
GOLDEN_MASK = make_mask("11001100")
GOLDEN_REWARDS = T([0, 0, 0, 0, 0, 1, 0, 0])
GOLDEN_VALUES = T([0.5, 0.4, 9, 9, 0.3, 0.2, 9, 9])


@pytest.mark.parametrize(
    "gap, expected",
    [
        ("carry", [0.0028, 0.1983, 0, 0, 0.456, 0.8, 0, 0]),
        ("decay", [-0.2047, -0.0898, 0, 0, 0.456, 0.8, 0, 0]),
        ("cut", [-0.428, -0.4, 0, 0, 0.456, 0.8, 0, 0]),
    ],
)
def test_golden_case_with_a_gap(gap, expected):
    advantages, _ = gated_gae(GOLDEN_REWARDS, GOLDEN_VALUES, GOLDEN_MASK, gamma=0.9, lam=0.8, gap=gap)
    assert_close(advantages, T(expected), atol=1e-4, rtol=0)


def test_targets_by_hand():
    rewards, values, gamma = T([0, 1, 2]), T([0.5, 0.25, 1]), T([0.5, 1, 0.1])
    ones = make_mask("111")

    def targets(lam_value):
        return gated_gae(rewards, values, ones, gamma=gamma, lam=0.3, lam_value=lam_value, bootstrap=torch.tensor([10.0]))[1]

    assert_close(targets(1.0), T([2.0, 4, 3]))  # 2 + .1*10 = 3;  1 + 1*3 = 4;  0 + .5*4 = 2
    assert_close(targets(0.0), T([0.125, 2, 3]))  # one step ahead only: 3;  1 + 1*1 = 2;  .5*.25
    assert_close(targets(0.5), T([0.8125, 3, 3]))  # 3;  1 + (1 + 3)/2 = 3;  .5*(.25 + 3)/2


def test_advantages_by_hand_with_a_discount_per_token():
    advantages, _ = gated_gae(T([0, 1, 2]), T([0.5, 0.25, 1]), make_mask("111"), gamma=T([0.5, 1, 0.1]), lam=0.5)
    assert_close(advantages, T([0.1875, 2.25, 1]))  # 2-1;  1+1-.25 + .5*1;  .125-.5 + .25*2.25


def test_monte_carlo_return():
    rewards = T([1, 0, 2, 0, 4])
    zeros, ones = torch.zeros(1, 5), make_mask("11111")
    advantages, targets = gated_gae(rewards, zeros, ones, gamma=1.0, lam=1.0)
    assert torch.equal(advantages, T([7, 6, 6, 4, 4])) and torch.equal(targets, advantages)


def test_advantage_with_lam_1_is_the_return_minus_the_value():
    rewards, values, _, gamma, *_ = draw(0, 3, 20)
    ones = torch.ones(3, 20, dtype=torch.bool)
    advantages, targets = gated_gae(rewards, values, ones, gamma=gamma, lam=1.0)
    returns, _ = gated_gae(rewards, torch.zeros(3, 20), ones, gamma=gamma, lam=1.0)
    assert_close(targets, returns)
    assert_close(advantages, returns - values)


def test_a_critic_that_fits_the_target_has_no_advantage_left():
    """Kernel consistency: values equal to their own targets leave every delta at 0, gates below 1 included."""
    rewards, _, mask, gamma, *_ = draw(1, 4, 30)
    values = gated_gae(rewards, torch.zeros(4, 30), mask, gamma=gamma, lam=1.0)[1]
    advantages, targets = gated_gae(rewards, values, mask, gamma=gamma, lam=0.7, lam_value=0.3)
    assert_close(advantages, torch.zeros(4, 30), atol=1e-5, rtol=0)
    assert_close(targets, values, atol=1e-5, rtol=0)


# --- the scan -------------------------------------------------------------------------------------
def test_scan_by_hand():
    a, b = T([1, 2, 3], [0, 0, 1]), T([0.5, -1, 9], [0, 2, 9])
    assert torch.equal(scan(a, b), T([0.5, -1, 3], [0, 2, 1]))  # 3; 2 - 3; 1 - 0.5.  1; 2 * 1; 0
    assert torch.equal(scan(a, b, torch.tensor([1.0, -1.0])), T([-4.0, -10, 12], [0, -16, -8]))  # 3 + 9; 2 - 12; 1 - 5


@pytest.mark.parametrize("rows, length", [(1, 1), (3, 2), (2, 3), (1, 1023), (5, 1024), (300, 1025), (2, 200_001)])
def test_scan_in_float32_is_exact_to_rounding_at_any_length(rows, length):
    generator = torch.Generator().manual_seed(length)
    a, b = torch.rand(rows, length, generator=generator) - 0.5, 1 - 0.02 * torch.rand(rows, length, generator=generator)
    b[:, ::7] *= -1
    b[:, 5::11] = 0
    b[:, length // 2 :] = 1  # sums without end
    end = torch.rand(rows, generator=generator)
    exact, after = torch.empty(rows, length, dtype=torch.float64), end.double()
    for t in reversed(range(length)):
        exact[:, t] = after = a[:, t].double() + b[:, t].double() * after
    assert_close(scan(a, b, end).double(), exact, atol=2e-5, rtol=2e-6)


class Count(TorchDispatchMode):
    """Operations run while it is open that are more than a view: on a GPU each is a launch."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("gap", GAPS)
def test_operations_grow_with_the_logarithm_of_the_length(gap):
    def operations(length):
        rewards, values, mask, *_, bootstrap = draw(0, 2, length)
        with Count() as scanning:
            scan(rewards, values)
        with Count() as whole:
            gated_gae(rewards, values, mask, gamma=values, lam=0.9, lam_value=values, bootstrap=bootstrap, gap=gap)
        return scanning.operations, whole.operations

    (scan_short, whole_short), (scan_long, whole_long) = operations(2**7), operations(2**13)
    assert scan_long - scan_short == 4 * 6  # four operations for each doubling
    # The trace of a float, which goes on with the bootstrap, that of a tensor, and one that fills gaps.
    assert whole_long - whole_short == 6 * (5 + 4 + (5 if gap == "carry" else 0))


# --- oracles --------------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(
    "rows, length", [(1, 1), (2, 63), (2, 64), (2, 65), (3, 130), (1, 1000), (300, 7), (256, 70), (255, 65)]
)
def test_equals_the_definition_as_a_loop(rows, length, gap):
    rewards, values, mask, gamma, lam, lam_value, bootstrap = draw(length, rows, length)
    step = torch.where(mask, torch.arange(length), 0).cummax(1).values  # knobs in a gap: those of the step before it
    gamma, lam, lam_value = (knob.gather(1, step) for knob in (gamma, lam, lam_value))
    got = gated_gae(rewards, values, mask, gamma=gamma, lam=lam, lam_value=lam_value, bootstrap=bootstrap, gap=gap)
    want = reference(rewards.double(), values.double(), mask, gamma.double(), lam.double(), lam_value.double(), bootstrap, gap)
    for result, expected in zip(got, want, strict=True):
        assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    length=st.integers(1, 90),
    gap=st.sampled_from(GAPS),
    lam_value=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_equals_the_definition_for_any_mask(seed, rows, length, gap, lam_value):
    rewards, values, mask, *_, bootstrap = draw(seed, rows, length, torch.float64)

    def whole(knob):
        return torch.full_like(values, knob)

    got = gated_gae(rewards, values, mask, gamma=0.9, lam=0.8, lam_value=lam_value, bootstrap=bootstrap, gap=gap)
    want = reference(rewards, values, mask, whole(0.9), whole(0.8), whole(lam_value), bootstrap, gap)
    assert_close(got, want, atol=1e-12, rtol=1e-12)


# --- scan -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rows, length", [(1, 1), (1, 63), (3, 64), (3, 65), (2, 128), (2, 129), (1, 1000), (255, 65), (256, 65), (300, 3), (512, 1)]
)
def test_scan_equals_a_loop(rows, length):
    generator = torch.Generator().manual_seed(length)
    a = torch.randn(rows, length, generator=generator)
    b = torch.rand(rows, length, generator=generator) * 2 - 1
    b[torch.rand(rows, length, generator=generator) < 0.1] = 0.0  # credit stops here
    expected, following = torch.zeros(rows, length, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for t in reversed(range(length)):
        following = expected[:, t] = a[:, t].double() + b[:, t].double() * following
    assert_close(scan(a, b).double(), expected, atol=1e-5, rtol=1e-5)
    assert_close(scan(a.double(), b.double()), expected, atol=1e-12, rtol=1e-12)


def test_scan_of_nothing():
    assert scan(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)
    assert scan(torch.zeros(3, 0), torch.zeros(3, 0)).shape == (3, 0)


def test_scan_stops_exactly_at_zero():
    a = torch.ones(2, 200)
    b = torch.ones(2, 200)
    b[:, 150] = 0.0
    assert scan(a, b)[:, 150].eq(1.0).all() and scan(a, b)[:, 0].eq(151.0).all() and scan(a, b)[:, 151].eq(49.0).all()


# --- invariances ----------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("noise", [NAN, INF, -INF, 1e30, -3.0])
@pytest.mark.parametrize("length", [9, 130])
def test_whatever_stands_at_a_masked_position_changes_nothing(gap, noise, length):
    rewards, values, mask, _, _, _, bootstrap = draw(3, 4, length)

    def run(r, v):
        return gated_gae(r, v, mask, gamma=0.9, lam=0.8, lam_value=0.5, bootstrap=bootstrap, gap=gap)

    clean, noisy = run(rewards, values), run(rewards.where(mask, noise), values.where(mask, noise))
    for a, b in zip(clean, noisy, strict=True):
        assert torch.equal(a, b) and a[~mask].eq(0).all()


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("noise", [NAN, INF, 1e30, 0.0, -3.0])
def test_gates_at_masked_positions_change_nothing(gap, noise):
    rewards, values, mask, gamma, lam, lam_value, bootstrap = draw(4, 4, 40)

    def run(*knobs):
        return gated_gae(rewards, values, mask, gamma=knobs[0], lam=knobs[1], lam_value=knobs[2], bootstrap=bootstrap, gap=gap)

    clean, noisy = run(gamma, lam, lam_value), run(*(x.where(mask, noise) for x in (gamma, lam, lam_value)))
    for a, b in zip(clean, noisy, strict=True):
        assert torch.equal(a, b)


@given(seed=st.integers(0, 10**6), length=st.integers(1, 40))
def test_a_gap_equals_the_response_without_it(seed, length):
    rewards, values, mask, gamma, lam, lam_value, bootstrap = draw(seed, 1, length, torch.float64)
    mask[0, seed % length] = True

    def shut(x):
        return x[mask].unsqueeze(0)

    with_gap = gated_gae(rewards, values, mask, gamma=gamma, lam=lam, lam_value=lam_value, bootstrap=bootstrap)
    without = gated_gae(
        shut(rewards),
        shut(values),
        shut(mask),
        gamma=shut(gamma),
        lam=shut(lam),
        lam_value=shut(lam_value),
        bootstrap=bootstrap,
    )
    for a, b in zip(with_gap, without, strict=True):  # sums are taken in another order
        assert_close(shut(a), b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("left, right", [(0, 5), (5, 0), (3, 70), (100, 0)])
def test_padding_changes_nothing(gap, left, right):
    rewards, values, mask, *_, bootstrap = draw(5, 3, 30)

    def pad(x, value):
        return torch.nn.functional.pad(x, (left, right), value=value)

    def run(r, v, m):
        return gated_gae(r, v, m, gamma=0.95, lam=0.9, bootstrap=bootstrap, gap=gap)

    for short, long in zip(run(rewards, values, mask), run(pad(rewards, 7.0), pad(values, 8.0), pad(mask, False)), strict=True):
        assert_close(long, pad(short, 0.0), atol=1e-6, rtol=1e-6)


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 6), length=st.sampled_from([1, 20, 90]))
def test_rows_do_not_know_each_other(seed, rows, length):
    rewards, values, mask, gamma, lam, lam_value, bootstrap = draw(seed, rows, length)

    def run(i):
        return gated_gae(
            rewards[i], values[i], mask[i], gamma=gamma[i], lam=lam[i], lam_value=lam_value[i], bootstrap=bootstrap[i]
        )

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for whole, permuted in zip(run(slice(None)), run(order), strict=True):
        assert torch.equal(whole[order], permuted)


@pytest.mark.parametrize("gap", GAPS)
def test_credit_flows_backwards_only(gap):
    rewards, values, _, gamma, lam, *_ = draw(6, 2, 100)
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[:, 40:45] = False

    def run(r, v, g):
        return gated_gae(r, v, mask, gamma=g, lam=lam, gap=gap)

    clean = run(rewards, values, gamma)
    earlier = torch.arange(100) < 60
    changed = run(rewards + earlier, values + earlier, gamma * (1 - 0.5 * earlier))
    for a, b in zip(clean, changed, strict=True):
        assert torch.equal(a[:, 60:], b[:, 60:]) and not torch.equal(a[:, :60], b[:, :60])


def test_a_response_cut_by_the_length_limit_bootstraps_and_another_does_not():
    zeros, mask = torch.zeros(3, 4), make_mask("1111", "1100", "1111")
    advantages, targets = gated_gae(zeros, zeros, mask, gamma=0.5, lam=1.0, bootstrap=torch.tensor([8.0, 8.0, 0.0]))
    assert torch.equal(advantages, T([0.5, 1, 2, 4], [2, 4, 0, 0], [0, 0, 0, 0])) and torch.equal(targets, advantages)


def test_without_bootstrap_the_value_after_the_last_token_is_zero():
    rewards, values, mask, *_ = draw(7, 3, 12)

    def run(bootstrap):
        return gated_gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)[0]

    assert torch.equal(run(None), run(torch.zeros(3)))


def test_a_response_without_tokens_gets_nothing():
    mask = make_mask("000", "101")
    bootstrap = torch.tensor([NAN, 0.0])
    for x in gated_gae(torch.ones(2, 3), torch.ones(2, 3), mask, gamma=0.9, lam=0.8, bootstrap=bootstrap):
        assert x[0].eq(0).all() and x.isfinite().all()


@pytest.mark.parametrize("rows, width", [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("gap", GAPS)
def test_an_empty_batch_is_no_error(rows, width, gap):
    empty = torch.zeros(rows, width)
    for bootstrap in (None, torch.zeros(rows)):
        for x in gated_gae(empty, empty, empty.bool(), gamma=0.9, lam=0.8, bootstrap=bootstrap, gap=gap):
            assert x.shape == (rows, width)
    assert whiten(empty, empty.bool()).shape == (rows, width)
    assert group_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("length", [12, 100])
def test_precisions(dtype, tolerance, length):
    inputs = draw(8, 3, length, torch.float64)
    rewards, values, mask, gamma, lam, lam_value, bootstrap = (x if x.dtype == torch.bool else x.to(dtype) for x in inputs)
    advantages, targets = gated_gae(rewards, values, mask, gamma=gamma, lam=lam, lam_value=lam_value, bootstrap=bootstrap)
    expected = reference(*inputs, "carry")
    assert advantages.dtype == targets.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert_close(advantages.double(), expected[0], atol=tolerance, rtol=tolerance)
    assert_close(targets.double(), expected[1], atol=tolerance, rtol=tolerance)


def test_neither_advantages_nor_targets_carry_a_gradient():
    values, gamma = torch.rand(2, 5, requires_grad=True), torch.rand(2, 5, requires_grad=True)
    advantages, targets = gated_gae(torch.rand(2, 5), values, torch.ones(2, 5, dtype=torch.bool), gamma=gamma, lam=0.9)
    assert not advantages.requires_grad and not targets.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        {"values": torch.zeros(2, 4)},
        {"mask": torch.ones(2, 4, dtype=torch.bool)},
        {"rewards": torch.zeros(3)},
        {"gamma": torch.ones(2, 1)},
        {"gamma": torch.ones(3)},
        {"lam": torch.ones(3, 2)},
        {"lam_value": torch.ones(2)},
        {"bootstrap": torch.zeros(3)},
        {"bootstrap": torch.zeros(2, 1)},
        {"gap": "skip"},
    ],
    ids=lambda change: "-".join(change),
)
def test_wrong_shapes_and_names_are_refused(change):
    right = {
        "rewards": torch.zeros(2, 3),
        "values": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "gamma": 0.9,
        "lam": 0.9,
    }
    with pytest.raises(ValueError):
        gated_gae(**(right | change))


# --- GAE and Comp-GAE -----------------------------------------------------------------------------
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("whitened", [True, False])
def test_a_constant_gate_makes_comp_gae_gae(gap, whitened):
    rollout = make_rollout(8, 70)
    knobs = {"lam": 0.9, "lam_value": 0.5, "gap": gap, "whiten": whitened}
    gae = transports["gae"](gamma=0.97, **knobs)(rollout)
    comp = transports["comp_gae"].model_validate({"gate": {"use": "constant", "gamma": 0.97}, **knobs})(rollout)
    assert_close(comp.advantages, gae.advantages)
    assert_close(comp.value_targets, gae.value_targets)
    assert gae.gate is None and comp.gate is not None and comp.gate.eq(0.97).all()


def test_gae_does_what_its_knobs_say():
    rollout = make_rollout(4, 12, seed=2)
    credit = transports["gae"](gamma=0.9, lam=0.7, lam_value=0.4, gap="cut", whiten=False)(rollout)
    expected = gated_gae(
        rollout.rewards, rollout.values, rollout.mask, gamma=0.9, lam=0.7, lam_value=0.4, bootstrap=rollout.bootstrap, gap="cut"
    )
    assert torch.equal(credit.advantages, expected[0]) and torch.equal(credit.value_targets, expected[1])
    whitened = transports["gae"](gamma=0.9, lam=0.7, lam_value=0.4, gap="cut", whiten=True)(rollout)
    assert torch.equal(whitened.advantages, whiten(expected[0], rollout.mask)) and torch.equal(
        whitened.value_targets, expected[1]
    )


# --- whitening and explained variance -------------------------------------------------------------
@pytest.mark.parametrize("noise", [0.0, 100.0, NAN, INF])
def test_whitening_does_not_know_padding(noise):
    assert_close(whiten(T([1, 3, noise], [noise, noise, noise]), make_mask("110", "000")), T([-1, 1, 0], [0, 0, 0]))


def test_whitened_tokens_have_mean_0_and_deviation_1():
    x, mask = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3 + 7, draw(0, 5, 40)[2]
    white = whiten(x, mask)
    assert (
        white[mask].mean().abs() < 1e-5
        and white[mask].std(correction=0) == pytest.approx(1, abs=1e-5)
        and white[~mask].eq(0).all()
    )
    assert_close(whiten(x * 1e-3 - 5e-3, mask), white, atol=1e-3, rtol=0)


def test_whitening_one_token_or_none():
    assert torch.equal(whiten(T([5, 9]), make_mask("10")), T([0, 0]))
    assert torch.equal(whiten(T([5, 9]), make_mask("00")), T([0, 0]))


@pytest.mark.parametrize("value", [0.1, 1 / 3, -123.456, 1e-4])
@pytest.mark.parametrize("count", [2, 7, 1001, 300_003])
def test_whitening_a_constant_gives_exactly_nothing(value, count):
    assert torch.equal(whiten(torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool)), torch.zeros(1, count))


def test_explained_variance_by_hand():
    mask = make_mask("1100", "1100")
    returns, variance = T([0, 2, 50, NAN], [0, 2, 60, NAN]), lambda values: explained_variance(values, returns, mask)
    assert variance(returns) == 1.0
    assert variance(torch.full((2, 4), 0.7)) == pytest.approx(0.0)
    assert variance(T([0, 1, NAN, 3], [0, 1, 7, 8])) == pytest.approx(0.75)  # what is left: 0 1 0 1, variance 1/4 of 1
    assert variance(T([2, 0, NAN, 3], [2, 0, 7, 8])) == pytest.approx(-3.0)  # what is left: -2 2 -2 2
    assert variance(returns + 5) == pytest.approx(1.0)  # a constant offset is not variance


def test_explained_variance_within_groups_by_hand():
    """Group 7: returns 1 1 0 0 and values .8 .6 .4 .2, both about 1/2; what is left is .2 .4 -.4 -.2, variance .1 of .25."""
    mask, groups = make_mask("101", "110", "111", "100", "100"), torch.tensor([7, 7, 2, 9, 9])
    returns = T([1, NAN, 1], [0, 0, NAN], [9, -9, 4], [1, INF, NAN], [1, 0, 0])  # the third is alone; the last two are equal
    values = T([0.8, INF, 0.6], [0.4, 0.2, NAN], [-3, 5, 5], [0.7, 0, 0], [0.7, 0, NAN])

    def within(values, returns=returns, groups=groups):
        return explained_variance_within(values, returns, mask, groups)

    assert within(values) == pytest.approx(0.6)
    assert within(values + T([3], [3], [3], [-1], [-1])) == pytest.approx(0.6)  # a prompt's level counts neither way
    assert within(T([0.5] * 3, [0.5] * 3, [0] * 3, [1] * 3, [1] * 3)) == pytest.approx(0.0)  # knows the prompt alone
    assert within(returns) == 1.0
    assert within(values, groups=torch.arange(5)) == 0.0  # no two responses to a prompt
    assert within(values, groups=torch.tensor([7, 7, 7, 9, 9])) != pytest.approx(0.6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("count", [1, 6, 7, 11, 100])
def test_returns_that_do_not_vary_explain_nothing(value, count):
    values = torch.rand(1, count, generator=torch.Generator().manual_seed(0))
    assert explained_variance(values, torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool)) == 0.0


def test_rounding_of_a_group_s_mean_is_no_variance_within_groups():
    groups = torch.arange(20) // 2
    returns = (0.1 + groups / 7).unsqueeze(1).expand(20, 11)
    values = torch.rand(20, 11, generator=torch.Generator().manual_seed(0))
    assert explained_variance_within(values, returns, torch.ones(20, 11, dtype=torch.bool), groups) == 0.0
