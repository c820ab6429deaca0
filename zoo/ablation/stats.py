"""What a handful of seeds can say: intervals, paired differences, corrected p-values, power.

Two cases need care. **One seed** gives numbers, and nothing else. **No spread** (all values, or all
paired differences, equal up to rounding) leaves a t-test without an estimate of the noise: its
p-value would be 0 or undefined, and its interval a point, though equal differences happen by chance
where a metric moves in steps, such as 1 of 360 images. Such values get no interval. Differences
that are all zero get p = 1; those that are all equal otherwise get the p-value of the sign test,
2^(1 - n), which needs nothing but their signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.95
ROUNDING = 1e-9  # relative to the values; what differs by less is equal
Interval = tuple[float | None, float | None]
Pair = tuple[str, str]  # variant, baseline


@dataclass(frozen=True)
class Summary:
    """A variant's values: `low` and `high` bound the 95 % t-interval of the mean."""

    variant: str
    n: int
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A variant against a baseline, on the seeds that both have.

    Attributes:
        variant, baseline: Their names.
        n: Pairs.
        differences: Variant minus baseline, by seed.
        difference: Their mean.
        low, high: Its 95 % t-interval, for this comparison alone.
        p: Of the paired t-test.
        p_holm: The same, corrected for all comparisons made together.
        verdict: better, worse, or that nothing is shown; by `p_holm`.
    """

    variant: str
    baseline: str
    n: int
    differences: tuple[float, ...] = ()
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    verdict: str = ""


def summarise(variant: str, values: Iterable[float]) -> Summary:
    """Mean, standard deviation (n - 1) and interval of a variant's values."""
    import numpy as np
    from scipy import stats

    x = np.asarray(list(values), dtype=float)
    if not len(x):
        return Summary(variant, 0)
    mean = float(x.mean())
    if len(x) == 1:
        return Summary(variant, 1, mean)
    if _constant(x, x):
        return Summary(variant, len(x), mean, 0.0)
    low, high = stats.t.interval(LEVEL, len(x) - 1, loc=mean, scale=stats.sem(x))
    return Summary(variant, len(x), mean, float(x.std(ddof=1)), float(low), float(high))


def compare(
    values: Mapping[str, Mapping[int, float]],
    baseline: str,
    *,
    alpha: float = 0.05,
    higher_is_better: bool = True,
) -> list[Comparison]:
    """Compares every other variant with one baseline; see `compare_pairs`."""
    pairs = [(name, baseline) for name in values if name != baseline]
    return compare_pairs(values, pairs, alpha=alpha, higher_is_better=higher_is_better)


def compare_pairs(
    values: Mapping[str, Mapping[int, float]],
    pairs: Sequence[Pair],
    *,
    alpha: float = 0.05,
    higher_is_better: bool = True,
) -> list[Comparison]:
    """Compares variants with their baselines, seed by seed, all of them as one family.

    Args:
        values: Variant -> seed -> value.
        pairs: A variant and a baseline each. A pair and its mirror image count once.
        alpha: Chance of any false claim in the list returned, at most.
        higher_is_better: Which sign of a difference is `better`.
    """
    found = [_pair(name, values[name], base, values[base]) for name, base in pairs]
    tested = {frozenset((c.variant, c.baseline)): c.p for c in found if c.p is not None}
    p_holm = dict(zip(tested, holm(list(tested.values())), strict=True))
    found = [replace(c, p_holm=p_holm.get(frozenset((c.variant, c.baseline)))) for c in found]
    return [replace(each, verdict=_verdict(each, alpha, higher_is_better)) for each in found]


def _pair(
    variant: str, values: Mapping[int, float], baseline: str, others: Mapping[int, float]
) -> Comparison:
    import numpy as np

    seeds = [seed for seed in values if seed in others]
    if not seeds:
        return Comparison(variant, baseline, 0)
    x, y = np.array([(values[seed], others[seed]) for seed in seeds], dtype=float).T
    (low, high), p = _paired_t(x, y)
    differences = tuple(float(d) for d in x - y)
    mean = float(np.mean(differences))
    return Comparison(variant, baseline, len(seeds), differences, mean, low, high, p)


def _paired_t(x: object, y: object) -> tuple[Interval, float | None]:
    """Interval and p-value of the mean difference; the module says what no spread gives."""
    import numpy as np
    from scipy import stats

    one, two = np.asarray(x), np.asarray(y)
    n, scale = len(one), np.concatenate([one, two])
    if n == 1:
        return (None, None), None
    if _constant(one - two, scale):
        zero = _constant(np.append(one - two, 0.0), scale)
        return (None, None), 1.0 if zero else float(stats.binomtest(n, n).pvalue)
    test = stats.ttest_rel(one, two)
    low, high = test.confidence_interval(LEVEL)
    return (float(low), float(high)), float(test.pvalue)


def _constant(values: object, scale: object) -> bool:
    import numpy as np

    return bool(np.ptp(np.asarray(values)) <= ROUNDING * np.abs(np.asarray(scale)).max())


def _verdict(comparison: Comparison, alpha: float, higher_is_better: bool) -> str:
    n, p = comparison.n, comparison.p_holm
    if n == 0:
        return "no common seed: no verdict"
    if n == 1:
        return "one seed: no verdict"
    if p is None or p >= alpha:
        return f"no difference shown at n = {n}"
    return "better" if ((comparison.difference or 0) > 0) == higher_is_better else "worse"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the smallest p-value times m, the next times m - 1, and so on.

    A corrected value is never below that of a smaller p-value, nor above 1.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def smallest_difference(sd: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true difference that a paired t-test of n seeds shows with this power.

    Args:
        sd: Standard deviation of the paired differences.
        n: Pairs.
        alpha: Two-sided level; divided by the number of comparisons, it is on the safe side of
            Holm's correction.
        power: Chance that the difference is shown.
    """
    from scipy import optimize

    if n < 2 or sd < 0 or not 0 < alpha < power < 1:
        raise ValueError(
            f"n ({n}) must be at least 2, sd ({sd}) not negative, and alpha ({alpha}) and power "
            f"({power}) such that 0 < alpha < power < 1"
        )
    high = 1.0
    while _power(high, n, alpha) < power:
        high *= 2
    effect = optimize.brentq(lambda d: _power(d, n, alpha) - power, 0.0, high)
    return sd * float(effect)


def _power(effect: float, n: int, alpha: float) -> float:
    """Chance that a paired t-test shows a difference of `effect` standard deviations.

    In its own direction: the other tail is negligible, and NaN in scipy for large effects.
    """
    from scipy import stats

    return float(stats.nct.sf(stats.t.isf(alpha / 2, n - 1), n - 1, effect * math.sqrt(n)))


def pooled_sd(comparisons: Iterable[Comparison]) -> float | None:
    """Standard deviation of paired differences over the comparisons that have an interval."""
    import numpy as np

    used = [comparison.differences for comparison in comparisons if comparison.low is not None]
    if not used:
        return None
    squares = sum((len(d) - 1) * float(np.var(d, ddof=1)) for d in used)
    return math.sqrt(squares / sum(len(d) - 1 for d in used))
