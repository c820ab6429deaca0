"""What running a plan means, before it runs: cells, time, and what its seeds can show."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from zoo.ablation.analysis import compare_all
from zoo.ablation.plan import Plan, flag_words
from zoo.ablation.results import collect, metric_values, seconds_left
from zoo.ablation.stats import pooled_sd, smallest_difference

PERCENT = re.compile(r"/top\d+$")  # metrics that lie between 0 and 100


def describe(
    plan: Plan,
    out: str | Path,
    workers: int = 2,
    estimate: Callable[[], float] | None = None,
) -> str:
    """The text of `--plan`.

    Args:
        plan: What would run.
        out: Its folder.
        workers: Cells at once.
        estimate: Gives the seconds of a cell, see `seconds_of_cell`; asked before the first cell
            has finished.
    """
    rows = collect(plan, out)
    done = [row["variant"] for row in rows]
    count = len(plan.variants) * len(plan.seeds)
    lines = [
        f"{count} cells in {out}: {len(plan.variants)} variants, {len(plan.seeds)} seeds "
        f"({', '.join(map(str, plan.seeds))}), each a run of",
        f"  {plan.recipe} {' '.join(flag_words(plan.flags))}".rstrip(),
        *_variant_lines(plan, done),
        _time_line(plan, rows, workers, estimate),
        difference_line(plan, rows),
    ]
    return "\n".join(lines)


def _variant_lines(plan: Plan, done: Sequence[str]) -> list[str]:
    baselines = {own for pairs in plan.pairs().values() for _, own in pairs}
    names = [name + " (baseline)" * (name in baselines) for name in plan.names]
    wide = max(map(len, names))
    return [
        f"  {name:{wide}}  {done.count(variant.name)} of {len(plan.seeds)} finished  "
        f"{' '.join(flag_words(variant.flags))}".rstrip()
        for name, variant in zip(names, plan.variants, strict=True)
    ]


def _time_line(
    plan: Plan, rows: list[dict[str, Any]], workers: int, estimate: Callable[[], float] | None
) -> str:
    left, source = seconds_left(plan, rows), ""
    todo = len(plan.variants) * len(plan.seeds) - len(rows)
    if not todo:
        return "time: all cells have finished"
    if left is None and estimate is not None:
        left, source = todo * estimate(), "; from a timed step"
    if left is None:
        return "time: known when the first cell has finished"
    whole = timedelta(seconds=round(left / workers))
    return f"time: about {whole} for what is left ({todo} cells, {workers} at once{source})"


def seconds_of_cell(step: Callable[[], object], steps: float) -> float:
    """Seconds of a cell from a timed step, and the time that this process took to get here.

    Args:
        step: Trains on one batch.
        steps: How many of them a cell takes, evaluation included.
    """
    started = time.process_time()  # imports and data: a cell has to load them too
    step()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return started + steps * min(times)


def difference_line(plan: Plan, rows: list[dict[str, Any]]) -> str:
    """The smallest difference that is shown with a chance of 80 %."""
    n, many = len(plan.seeds), plan.comparisons
    if n < 2:
        return "smallest difference shown: none, one seed gives no verdict"
    found = compare_all(plan, metric_values(plan, rows))
    sd = pooled_sd(each for comparisons in found.values() for each in comparisons)
    factor = smallest_difference(1.0, n, alpha=0.05 / many)
    size = f"{factor:.2f} times the standard deviation of the paired differences"
    if sd is not None:
        size = _in_metric(plan, factor * sd, f"{size}, so far {sd:.2g}")
    return (
        f"smallest difference shown at n = {n} with a chance of 80 %, when {many} are tested: "
        f"{size}"
    )


def _in_metric(plan: Plan, least: float, why: str) -> str:
    shown = f"{least:.2g}" if least < 100 else f"{least:,.0f}"
    if least > 100 and PERCENT.search(plan.metric):
        n = f"n = {len(plan.seeds)} is too small to show any"
        return f"none, {n}: it would take {shown} points of {plan.metric} ({why})"
    return f"{shown} in {plan.metric} ({why})"
