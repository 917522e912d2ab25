"""Credit against the truth: pure functions of arrays with one entry per position, and intervals of what they return.

The truth is Q(s, a) - V(s) by continuations, so it is itself an estimate. It comes in two independent halves, from which
follows how much of it is noise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Score = Callable[["Array", "Truth"], float]

LEVEL = 0.95  # of intervals
SURE = 0.01  # p-value below which an advantage counts as different from 0
RESAMPLES = 1000


def branched_advantage(after: Sequence[float], before: Sequence[float], chose: Sequence[bool]) -> tuple[float, float]:
    """Q(s, a) - V(s) from returns of continuations, and the p-value of its being 0.

    after: returns of continuations that follow the token, its own reward included. before: of those that start one token
    earlier; chose: whether these emitted the token too, and so say something about Q as well.

    With Q the mean over all that hold the token and W the mean over those that do not, the advantage is their difference
    times the share of the latter: E[share (Q - W)] = (1 - p)(Q - W) = Q - V. A token that every continuation emits has
    exactly 0, where the difference of two means would have their noise. The p-value is of Student's t-test between both.
    """
    other = np.asarray([x for x, same in zip(before, chose, strict=True) if not same], dtype=float)
    with_it = np.asarray([*after, *(x for x, same in zip(before, chose, strict=True) if same)], dtype=float)
    if not len(other):
        return 0.0, 1.0
    advantage = len(other) / len(before) * (with_it.mean() - other.mean())
    if with_it.mean() == other.mean():
        return float(advantage), 1.0
    deviations = [x.std(ddof=1) if len(x) > 1 else 0.0 for x in (with_it, other)]
    with np.errstate(divide="ignore"):  # neither varies: surely different
        found = stats.ttest_ind_from_stats(with_it.mean(), deviations[0], len(with_it), other.mean(), deviations[1], len(other))
    return float(advantage), float(found.pvalue)


@dataclass(frozen=True)
class Truth:
    """The advantage at each position by branching, and which positions are dependent."""

    advantage: Array  # [N]
    halves: tuple[Array, Array]  # [N] each, from one half of the continuations and from the other
    p: Array  # [N] p-values of its being 0
    cluster: NDArray[np.int64]  # [N] positions that are not independent of each other share a number

    @property
    def sure(self) -> NDArray[np.bool_]:
        return self.p < SURE

    def take(self, index: NDArray[np.int64]) -> Truth:
        one, two = self.halves
        return Truth(self.advantage[index], (one[index], two[index]), self.p[index], self.cluster[index])


def correlation(x: Array, y: Array) -> float:
    """Spearman's rank correlation; NaN if one of the two does not vary."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])


def rank_correlation(credit: Array, truth: Truth) -> float:
    """Spearman's, of credit with the measured advantage."""
    return correlation(credit, truth.advantage)


def sign_agreement(credit: Array, truth: Truth) -> float:
    """Share of equal signs where the advantage differs significantly from 0; NaN if it does nowhere. Credit of 0 agrees with no
    sign."""
    sure = truth.sure
    return float((np.sign(credit[sure]) == np.sign(truth.advantage[sure])).mean()) if sure.any() else math.nan


def true_variance(truth: Truth) -> float:
    """Variance of the true advantage over positions, without the noise of its estimate: the halves' covariance."""
    return float(np.cov(*truth.halves)[0, 1])


def scale(credit: Array, truth: Truth) -> float:
    """The factor s for which credit is s times the advantage, plus a constant, plus noise; 1 for an unbiased estimator.

    The slope of credit on the true advantage, cov(credit, A) / var(A), where var(A) is free of the estimate's noise, which
    would flatten it. NaN where the advantage cannot be told from noise.
    """
    variance = true_variance(truth)
    return float(np.cov(credit, truth.advantage)[0, 1] / variance) if variance > 0 else math.nan


def bias(credit: Array, truth: Truth) -> float:
    """Mean of credit / scale - advantage, in units of reward; NaN where the scale is not positive."""
    factor = scale(credit, truth)
    return float((credit / factor - truth.advantage).mean()) if factor > 0 else math.nan


def variance(credit: Array, truth: Truth) -> float:
    """Variance of credit / scale around the true advantage, in units of reward squared; infinite where the scale is not
    positive, as no multiple of the credit then is the advantage and noise."""
    factor = scale(credit, truth)
    return float(credit.var(ddof=1) / factor**2 - true_variance(truth)) if factor > 0 else math.inf


def split_half(credit: Array, truth: Truth) -> float:
    """Rank correlation of the two halves of the truth with each other; `credit` plays no part."""
    return correlation(*truth.halves)


def ceiling(credit: Array, truth: Truth) -> float:
    """The rank correlation that exact knowledge of the advantage would reach with this truth, about: sqrt(2 r / (1 + r)) of
    the halves' correlation r (Spearman and Brown); `credit` plays no part. 0 where r is negative."""
    r = split_half(credit, truth)
    return math.sqrt(2 * max(r, 0.0) / (1 + max(r, 0.0))) if math.isfinite(r) else math.nan


SCORES: dict[str, Score] = {
    "rank_correlation": rank_correlation,
    "sign_agreement": sign_agreement,
    "scale": scale,
    "bias": bias,
    "variance": variance,
}


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; NaN where there is none."""

    value: float
    low: float
    high: float


def with_interval(score: Score, credit: Array, truth: Truth, *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """A score, and its percentile interval under a bootstrap that draws clusters with replacement."""
    numbers = np.unique(truth.cluster)
    members = [np.flatnonzero(truth.cluster == number) for number in numbers]

    def of_drawn(drawn: NDArray[np.int64]) -> float:
        index = np.concatenate([members[number] for number in drawn])
        return score(credit[index], truth.take(index))

    value = score(credit, truth)
    if len(numbers) < 2:
        return Estimate(value, math.nan, math.nan)
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # of a distribution that is a point or reaches infinity
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (np.arange(len(numbers)),),
            of_drawn,
            n_resamples=resamples,
            vectorized=False,
            method="percentile",
            confidence_level=LEVEL,
            rng=np.random.default_rng(seed),
        )
    distribution = np.sort(found.bootstrap_distribution)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(distribution, ends, method="inverted_cdf") if not np.isnan(distribution).any() else [math.nan] * 2
    return Estimate(value, float(low), float(high))


def difference(credit: Array, other: Array, truth: Truth, *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Rank correlation of `credit` less that of `other`, at the same positions."""

    def paired(both: Array, truth: Truth) -> float:
        return correlation(both[:, 0], truth.advantage) - correlation(both[:, 1], truth.advantage)

    return with_interval(paired, np.stack([credit, other], 1), truth, seed=seed, resamples=resamples)
