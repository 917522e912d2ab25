"""The statistics of a study, as functions of numbers. Tests and distributions are SciPy's, Holm's correction statsmodels'.

A seed is the unit of replication: what is compared within seeds is first subtracted within each, then tested as one sample.
Intervals are two-sided Student t intervals over seeds. Needs the extra `.[study]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95  # of every interval
SAME = 1e-12  # relative spread below which values are the same but for rounding


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    low: float
    high: float
    n: int
    p: float
    """Two-sided, of a mean of 0."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values with its t interval and the one-sample t test; NaN where fewer than two do not tell.

    Values that are all the same have an interval of no width, and p is 1 where that value is 0 and 0 elsewhere.
    """
    from scipy import stats

    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return Estimate(mean, math.nan, math.nan, n, math.nan)
    if max(values) - min(values) <= SAME * max(map(abs, values)):
        return Estimate(values[0], values[0], values[0], n, float(values[0] == 0))
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(LEVEL)
    return Estimate(mean, float(interval.low), float(interval.high), n, float(test.pvalue))


def paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> Estimate:
    """a - b within each seed that both have; values by seed."""
    return estimate([a[seed] - b[seed] for seed in a if seed in b])


def interaction(a: Mapping[int, float], b: Mapping[int, float], c: Mapping[int, float], d: Mapping[int, float]) -> Estimate:
    """(d - c) - (b - a) within each seed that all four have: the interaction of a 2x2 design, paired by seed."""
    return estimate([(d[seed] - c[seed]) - (b[seed] - a[seed]) for seed in a if seed in b and seed in c and seed in d])


def share_of(part: Mapping[int, float], whole: Mapping[int, float]) -> Estimate:
    """Mean of `part` over mean of `whole`, within each seed that both have, with Fieller's interval (1954).

    The interval holds the ratios r for which part - r whole, tested as one sample, may have a mean of 0; where the whole may be
    0 itself it has no ends (NaN). p: of part having a mean of 0.
    """
    from scipy import stats

    pairs = [(part[seed], whole[seed]) for seed in part if seed in whole]
    n, p = len(pairs), estimate([x for x, _ in pairs]).p
    x, y = (math.fsum(values) / n if n else math.nan for values in (zip(*pairs, strict=True) if pairs else ((), ())))
    ratio = x / y if y else math.nan
    if n < 2:
        return Estimate(ratio, math.nan, math.nan, n, p)
    within = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) ** 2 / (n * (n - 1))
    xx, xy, yy = (
        within * math.fsum(products)
        for products in zip(*(((a - x) ** 2, (a - x) * (b - y), (b - y) ** 2) for a, b in pairs), strict=True)
    )
    a, b, c = y * y - yy, x * y - xy, x * x - xx
    if a <= SAME * y * y:
        return Estimate(ratio, math.nan, math.nan, n, p)
    half = math.sqrt(max(0.0, b * b - a * c))
    return Estimate(ratio, (b - half) / a, (b + half) / a, n, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family of tests (Holm 1979); NaN stays NaN and does not count as a test."""
    from statsmodels.stats.multitest import multipletests

    told = [p for p in p_values if not math.isnan(p)]
    adjusted = iter(multipletests(told, method="holm")[1].tolist() if told else [])
    return [math.nan if math.isnan(p) else next(adjusted) for p in p_values]


def final_mean(values: Sequence[float], last: int) -> float:
    """Mean of the last evaluations, as many as asked for; NaN if there are fewer."""
    return math.fsum(values[-last:]) / last if len(values) >= last else math.nan


def area_under_curve(iterations: Sequence[float], values: Sequence[float]) -> float:
    """Area under a learning curve by trapezoids, divided by its span: the mean along the run. NaN for fewer than two points."""
    from scipy.integrate import trapezoid

    if len(values) < 2:
        return math.nan
    return float(trapezoid(values, iterations)) / (iterations[-1] - iterations[0])


def greatest_drop(values: Sequence[float]) -> float:
    """The largest fall of a value below the best one before it; 0 if there is none."""
    best, drop = -math.inf, 0.0
    for value in values:
        best = max(best, value)
        drop = max(drop, best - value)
    return drop


def why_unstable(accuracies: Sequence[float], kls: Sequence[float], finite: bool, max_drop: float, max_kl: float) -> list[str]:
    """How a run breaks the rule for stability, in words; empty if it is stable.

    accuracies: of every evaluation, in order. kls: approx_kl of every iteration. finite: whether the run came to its end
    and every number that it wrote is finite.
    """
    found = [] if finite else ["failed, or NaN"]
    if (drop := greatest_drop(accuracies)) > max_drop:
        found.append(f"accuracy fell by {drop:.3f}")
    if kls and (kl := max(kls)) > max_kl:
        found.append(f"approx_kl {kl:.3g}")
    return found


def fisher(stable_a: int, of_a: int, stable_b: int, of_b: int) -> float:
    """Two-sided p of Fisher's exact test that two arms are stable equally often."""
    from scipy import stats

    return float(stats.fisher_exact([[stable_a, of_a - stable_a], [stable_b, of_b - stable_b]])[1])
