"""What the finished cells say: table.csv, table.md, effects.png, and the text of `--plan`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from zoo.ablation.figure import forest_plot
from zoo.ablation.plan import Plan, flag_words
from zoo.ablation.results import collect, metric_values, seconds_left, write_results
from zoo.ablation.stats import (
    Comparison,
    Summary,
    compare,
    pooled_sd,
    smallest_difference,
    summarise,
)
from zoo.engine.checkpoint import write_atomically

Extra = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Report:
    """The numbers behind the tables.

    Attributes:
        summaries: One for each variant.
        comparisons: Baseline -> one for each other variant.
        caption: What the numbers are, on what data, from how many seeds.
        extra: Variant -> column -> value, as passed in.
    """

    summaries: list[Summary]
    comparisons: dict[str, list[Comparison]]
    caption: str
    extra: Extra

    @property
    def columns(self) -> list[str]:
        """Names of the extra columns."""
        return list(dict.fromkeys(name for each in self.extra.values() for name in each))


def report(plan: Plan, out: str | Path, extra: Extra | None = None) -> Report:
    """Writes results.jsonl, table.csv, table.md and effects.png from the cells finished so far.

    Args:
        plan: Its metric and baselines decide what is compared.
        out: The folder of `run_cells`.
        extra: More columns, variant -> column -> value: parameters, FLOPs, speed, memory.

    Raises:
        ValueError: no cell has finished, one lacks the metric, or `extra` names another variant.
        ImportError: matplotlib is missing; the tables are written all the same.
    """
    out = Path(out)
    _check_extra(plan, extra or {})
    rows = write_results(plan, out) if out.is_dir() else []
    if not rows:
        raise ValueError(f"no cell in {out} has finished: run_cells trains them")
    found = _analyse(plan, rows, extra or {})
    _write(out / "table.csv", _csv(plan, found))
    _write(out / "table.md", _markdown(plan, found))
    _draw(plan, found, _setting(rows), out / "effects.png")
    return found


def describe(plan: Plan, out: str | Path, workers: int = 2) -> str:
    """What running the plan means: cells, those finished, time, what its seeds can show."""
    rows = collect(plan, out)
    done = [row["variant"] for row in rows]
    count = len(plan.variants) * len(plan.seeds)
    lines = [
        f"{count} cells in {out}: {len(plan.variants)} variants, {len(plan.seeds)} seeds "
        f"({', '.join(map(str, plan.seeds))}), each a run of",
        f"  {plan.recipe} {' '.join(flag_words(plan.flags))}".rstrip(),
        *_variant_lines(plan, done),
        _time_line(plan, rows, count, workers),
        _difference_line(plan, rows),
    ]
    return "\n".join(lines)


def _variant_lines(plan: Plan, done: Sequence[str]) -> list[str]:
    names = [name + " (baseline)" * (name in plan.baselines) for name in plan.names]
    wide = max(map(len, names))
    return [
        f"  {name:{wide}}  {done.count(variant.name)} of {len(plan.seeds)} finished  "
        f"{' '.join(flag_words(variant.flags))}".rstrip()
        for name, variant in zip(names, plan.variants, strict=True)
    ]


def _time_line(plan: Plan, rows: list[dict[str, Any]], count: int, workers: int) -> str:
    left = seconds_left(plan, rows)
    if len(rows) == count:
        return "time: all cells have finished"
    if left is None:
        return "time: known when the first cell has finished"
    time = timedelta(seconds=round(left / workers))
    return f"time: about {time} for what is left ({count - len(rows)} cells, {workers} at once)"


def _difference_line(plan: Plan, rows: list[dict[str, Any]]) -> str:
    """The smallest difference that is shown with a chance of 80 %."""
    n, others = len(plan.seeds), len(plan.variants) - 1
    if n < 2:
        return "smallest difference shown: none, one seed gives no verdict"
    values = metric_values(plan, rows)
    sd = pooled_sd(compare(values, plan.baselines[0]))
    factor = smallest_difference(1.0, n, alpha=0.05 / others)
    size = f"{factor:.2f} times the standard deviation of the paired differences"
    if sd is not None:
        size = f"{factor * sd:.2g} in {plan.metric} ({size}, so far {sd:.2g})"
    return (
        f"smallest difference shown at n = {n} with a chance of 80 %, when {others} are compared: "
        f"{size}"
    )


def _analyse(plan: Plan, rows: list[dict[str, Any]], extra: Extra) -> Report:
    values = metric_values(plan, rows)
    return Report(
        summaries=[summarise(name, values[name].values()) for name in plan.names],
        comparisons={
            name: compare(values, name, higher_is_better=plan.higher_is_better)
            for name in plan.baselines
        },
        caption=_caption(plan, rows),
        extra=extra,
    )


def _check_extra(plan: Plan, extra: Extra) -> None:
    unknown = [name for name in extra if name not in plan.names]
    if unknown:
        raise ValueError(
            f"extra ({', '.join(unknown)}) must be about variants: {', '.join(plan.names)}"
        )


def _caption(plan: Plan, rows: list[dict[str, Any]]) -> str:
    others = len(plan.variants) - 1
    return (
        f"{plan.metric} ({'higher' if plan.higher_is_better else 'lower'} is better), "
        f"{_setting(rows)}; mean with 95 % t-interval, sd over seeds. Differences are paired by "
        "seed, with their own 95 % t-interval; p by paired t-test, corrected (Holm) for the "
        f"{others} variant{'s' * (others > 1)} compared with that baseline; verdict at 5 % of it."
    )


def _setting(rows: list[dict[str, Any]]) -> str:
    """Data, epochs and n of the finished cells."""
    data, epochs = (_distinct(row[name] for row in rows) for name in ("data", "epochs"))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["variant"]] = counts.get(row["variant"], 0) + 1
    low, high = min(counts.values()), max(counts.values())
    n = str(low) if low == high else f"{low} to {high}"
    return f"{data}, {epochs} epochs, n = {n} seed{'s' * (high > 1)}"


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _csv(plan: Plan, found: Report) -> str:
    """Full precision, one row for each variant; empty where there is no number."""
    kinds = ("n", "difference", "low", "high", "p", "p_holm", "verdict")
    header = ["variant", "n", "mean", "sd", "low", "high"]
    header += [f"vs {name}: {kind}" for name in plan.baselines for kind in kinds]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*header, *found.columns])
    for each in found.summaries:
        row: list[object] = [each.variant, each.n, each.mean, each.sd, each.low, each.high]
        for name in plan.baselines:
            comparison = _find(found.comparisons[name], each.variant)
            row += [getattr(comparison, kind, None) for kind in kinds]
        writer.writerow([*row, *_extra_values(found, each.variant)])
    return text.getvalue()


def _markdown(plan: Plan, found: Report) -> str:
    """Rounded and aligned, under a caption."""
    digits = _decimals(found)
    header = ["variant", "n", "mean (95 % interval)", "sd"]
    for name in plan.baselines:
        header += [f"vs {name} (95 % interval)", "p (Holm)", "verdict"]
    rows = []
    for each in found.summaries:
        row = [each.variant, str(each.n), _spread(each.mean, each.low, each.high, digits)]
        row.append(_number(each.sd, digits))
        for name in plan.baselines:
            row += _compared(_find(found.comparisons[name], each.variant), digits)
        rows.append([*row, *map(_extra_text, _extra_values(found, each.variant))])
    left = {0, *(i for i, name in enumerate(header) if name == "verdict")}
    return f"{found.caption}\n\n{_aligned([[*header, *found.columns], *rows], left)}\n"


def _draw(plan: Plan, found: Report, setting: str, path: Path) -> None:
    """The differences to the first baseline."""
    baseline, digits = plan.baselines[0], _decimals(found)
    forest_plot(
        found.comparisons[baseline],
        path,
        title=f"Difference in {plan.metric} to {baseline}\n{setting}",
        plan=plan,
        numbers=lambda each: _spread(each.difference, each.low, each.high, digits, sign="+"),
    )


def _compared(comparison: Comparison | None, digits: int) -> list[str]:
    if comparison is None:
        return ["baseline", "", ""]
    c = comparison
    p = "-" if c.p_holm is None else "< 0.001" if c.p_holm < 0.001 else f"{c.p_holm:.3f}"
    return [_spread(c.difference, c.low, c.high, digits, sign="+"), p, c.verdict]


def _spread(
    value: float | None, low: float | None, high: float | None, digits: int, sign: str = ""
) -> str:
    """A number with its interval, if it has one."""
    text = _number(value, digits, sign)
    if low is None:
        return text
    return f"{text} ({_number(low, digits, sign)} to {_number(high, digits, sign)})"


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign or '-'}.{digits}f}"


def _decimals(found: Report) -> int:
    """Decimals that give the largest standard deviation two significant digits."""
    largest = max((each.sd or 0.0 for each in found.summaries), default=0.0)
    return min(8, max(0, 1 - math.floor(math.log10(largest)))) if largest else 2


def _extra_values(found: Report, variant: str) -> list[object]:
    return [found.extra.get(variant, {}).get(name) for name in found.columns]


def _extra_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _find(comparisons: list[Comparison], variant: str) -> Comparison | None:
    return next((each for each in comparisons if each.variant == variant), None)


def _aligned(rows: list[list[str]], left: set[int]) -> str:
    """A Markdown table whose columns line up in the source too."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def line(row: list[str]) -> str:
        cells = (
            f"{cell:<{w}}" if i in left else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    return "\n".join(map(line, [rows[0], rule, *rows[1:]]))


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
