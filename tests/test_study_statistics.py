"""The statistics of a study: numbers computed by hand, and SciPy and statsmodels by another way."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cct.tools.study.statistics import (
    area_under_curve,
    estimate,
    final_mean,
    fisher,
    greatest_drop,
    holm,
    interaction,
    paired_difference,
    why_unstable,
)
from cct.training.evaluation import pass_at_k

T_4 = 2.7764451051977987  # 97.5% quantile of Student's t with 4 degrees of freedom, from a table


# --- intervals --------------------------------------------------------------------------------
def test_a_mean_and_its_interval_by_hand():
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), standard error sqrt(0.5)
    assert (found.mean, found.n) == (3.0, 5)
    assert found.low == pytest.approx(3 - T_4 * math.sqrt(0.5)) and found.high == pytest.approx(3 + T_4 * math.sqrt(0.5))
    assert found.p == pytest.approx(2 * stats.t.sf(3 / math.sqrt(0.5), 4))


def test_too_few_values_have_no_interval():
    assert estimate([0.5]).mean == 0.5 and math.isnan(estimate([0.5]).low) and math.isnan(estimate([0.5]).p)
    assert math.isnan(estimate([]).mean) and estimate([]).n == 0


@pytest.mark.parametrize(("values", "p"), [([0.7, 0.7, 0.7], 0.0), ([0.0, 0.0], 1.0), ([0.1 + 0.2, 0.3], 0.0)])
def test_values_that_are_the_same_but_for_rounding(values, p):
    found = estimate(values)
    assert found.low == found.mean == found.high == pytest.approx(values[0]) and found.p == p


def test_differences_are_taken_within_seeds():
    a, b = {0: 0.9, 1: 0.5, 2: 0.7}, {2: 0.6, 0: 0.8, 1: 0.4, 3: 0.0}
    found = paired_difference(a, b)  # 0.1 at each seed, though the means are far from sure
    assert found.n == 3 and found.mean == pytest.approx(0.1) and found.high - found.low < 1e-9
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6))
    found, oracle = paired_difference(dict(enumerate(x)), dict(enumerate(y))), stats.ttest_rel(x, y)
    assert found.p == pytest.approx(oracle.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(oracle.confidence_interval(0.95)))


def test_an_interaction_is_what_a_repeated_measures_anova_finds():
    pandas, anova = pytest.importorskip("pandas"), pytest.importorskip("statsmodels.stats.anova")
    rng = np.random.default_rng(1)
    y = rng.normal(size=(2, 2, 5)) + rng.normal(size=5)  # transport, critic, seed: seeds are easy or hard for all
    y[1, 1] += 1.0
    found = interaction(*(dict(enumerate(y[i, j])) for i, j in [(0, 0), (0, 1), (1, 0), (1, 1)]))
    assert found.mean == pytest.approx(float((y[1, 1] - y[1, 0] - y[0, 1] + y[0, 0]).mean()))
    rows = [{"t": i, "c": j, "seed": s, "y": y[i, j, s]} for i in range(2) for j in range(2) for s in range(5)]
    table = anova.AnovaRM(pandas.DataFrame(rows), "y", "seed", within=["t", "c"]).fit().anova_table
    assert found.p == pytest.approx(table.loc["t:c", "Pr > F"])


def test_an_interaction_by_hand():
    a, b, c, d = {0: 1.0, 1: 1.0}, {0: 2.0, 1: 3.0}, {0: 2.0, 1: 2.0}, {0: 5.0, 1: 7.0, 9: 0.0}
    found = interaction(a, b, c, d)  # (3 - 1), (5 - 2)
    assert (found.mean, found.n) == (2.5, 2)


# --- families of tests ------------------------------------------------------------------------
def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3p, then max(2p), then max(p)
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0]) and holm([]) == []


def test_a_test_that_tells_nothing_does_not_count_in_its_family():
    adjusted = holm([0.01, math.nan, 0.04])
    assert adjusted[0] == pytest.approx(0.02) and math.isnan(adjusted[1]) and adjusted[2] == pytest.approx(0.04)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_p_value_and_bonferroni_s(p_values):
    for p, adjusted in zip(p_values, holm(p_values), strict=True):
        assert p - 1e-12 <= adjusted <= min(1.0, p * len(p_values)) + 1e-12


def test_fisher_by_hand():
    # 10 of 12 against 3 of 12: hypergeometric tables as improbable as this one, by counting
    total, margin = math.comb(24, 12), 13
    weights = {k: math.comb(margin, k) * math.comb(24 - margin, 12 - k) / total for k in range(1, 13)}
    expected = sum(weight for weight in weights.values() if weight <= weights[10] * (1 + 1e-9))
    assert fisher(10, 12, 3, 12) == pytest.approx(expected) == pytest.approx(0.0123, abs=1e-4)
    assert fisher(5, 12, 5, 12) == pytest.approx(1.0)


# --- learning curves --------------------------------------------------------------------------
def test_final_mean_and_area():
    assert final_mean([0.1, 0.5, 0.7, 0.9], 2) == pytest.approx(0.8)
    assert math.isnan(final_mean([0.9], 2))
    assert area_under_curve([0, 10, 30], [0.0, 1.0, 0.5]) == pytest.approx((5 + 15) / 30)  # uneven steps
    assert area_under_curve([0, 7], [0.4, 0.4]) == pytest.approx(0.4) and math.isnan(area_under_curve([0], [0.4]))


def test_a_fall_is_from_the_best_before_it():
    assert greatest_drop([0.2, 0.6, 0.5, 0.9, 0.65]) == pytest.approx(0.25)
    assert greatest_drop([0.1, 0.2, 0.3]) == 0.0 == greatest_drop([])


def test_the_rule_for_stable():
    assert why_unstable([0.2, 0.9, 0.85], [0.01, 0.05], True, 0.1, 0.05) == []
    assert why_unstable([0.2, 0.9, 0.75, 0.9], [0.01, 0.06], False, 0.1, 0.05) == [
        "failed, or NaN",
        "accuracy fell by 0.150",
        "approx_kl 0.06",
    ]


# --- pass@k -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("right", "samples"), [(0, 5), (1, 5), (3, 5), (5, 5), (2, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(right, samples):
    responses = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = list(combinations(responses, k))
        assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_as_many_samples():
    with pytest.raises(ValueError, match="pass@6 of 5 samples"):
        pass_at_k(1, 5, 6)
