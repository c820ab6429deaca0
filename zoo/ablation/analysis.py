"""From rows to means, differences and what they say in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.ablation.plan import Plan
from zoo.ablation.results import metric_values
from zoo.ablation.stats import Comparison, Summary, compare_pairs, summarise

Extra = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Report:
    """The numbers behind tables and figures.

    Attributes:
        summaries: One for each variant.
        comparisons: Baseline -> one for each variant that is compared with it.
        caption: What the numbers are, on what data, from how many seeds.
        setting: Data, epochs and seeds.
        extra: Variant -> column -> value, as passed in.
    """

    summaries: list[Summary]
    comparisons: dict[str, list[Comparison]]
    caption: str
    setting: str
    extra: Extra

    @property
    def columns(self) -> list[str]:
        """Names of the extra columns."""
        return list(dict.fromkeys(name for each in self.extra.values() for name in each))

    @property
    def decimals(self) -> int:
        """Decimals that give the largest standard deviation two significant digits."""
        largest = max((each.sd or 0.0 for each in self.summaries), default=0.0)
        return min(8, max(0, 1 - math.floor(math.log10(largest)))) if largest else 2

    def comparison(self, baseline: str, variant: str) -> Comparison | None:
        """The one of a variant, or None where it is not compared with that baseline."""
        found = self.comparisons[baseline]
        return next((each for each in found if each.variant == variant), None)

    def extra_values(self, variant: str) -> list[object]:
        """A variant's values in the extra columns."""
        return [self.extra.get(variant, {}).get(name) for name in self.columns]


def analyse(plan: Plan, rows: list[dict[str, Any]], extra: Extra, note: str = "") -> Report:
    """The comparisons with all baselines are one family: Holm's correction is over all of them."""
    values = metric_values(plan, rows)
    setting = _setting(rows)
    return Report(
        summaries=[summarise(name, values[name].values()) for name in plan.names],
        comparisons=compare_all(plan, values),
        caption=f"{_caption(plan, setting)} {note}".rstrip(),
        setting=setting,
        extra=extra,
    )


def compare_all(
    plan: Plan, values: Mapping[str, Mapping[int, float]]
) -> dict[str, list[Comparison]]:
    """By baseline, every comparison of the plan."""
    pairs = plan.pairs()
    flat = [pair for each in pairs.values() for pair in each]
    found = iter(compare_pairs(values, flat, higher_is_better=plan.higher_is_better))
    return {baseline: [next(found) for _ in each] for baseline, each in pairs.items()}


def _caption(plan: Plan, setting: str) -> str:
    many = plan.comparisons
    return (
        f"{plan.metric} ({'higher' if plan.higher_is_better else 'lower'} is better), "
        f"{setting}; mean with 95 % t-interval, sd over seeds. Differences are paired by "
        "seed, with their own 95 % t-interval; p by paired t-test, corrected (Holm) for "
        f"{'all ' * (many > 1)}{many} comparison{'s' * (many > 1)}; verdict at 5 % of it."
    )


def _setting(rows: list[dict[str, Any]]) -> str:
    data, epochs = (_distinct(row[name] for row in rows) for name in ("data", "epochs"))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["variant"]] = counts.get(row["variant"], 0) + 1
    low, high = min(counts.values()), max(counts.values())
    n = str(low) if low == high else f"{low} to {high}"
    return f"{data}, {epochs} epochs, n = {n} seed{'s' * (high > 1)}"


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))
