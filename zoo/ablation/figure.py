"""effects.png: paired differences to baselines as forest plots."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.ablation.analysis import Report
from zoo.ablation.plan import Plan
from zoo.ablation.stats import Comparison
from zoo.ablation.tables import difference
from zoo.diagnostics.plotting import figure_class
from zoo.engine.checkpoint import write_atomically

# Verdict -> colour (Okabe and Ito's, told apart by the colour-blind), marker, word.
STYLES = {
    "better": ("#0072B2", "^", "better"),
    "worse": ("#D55E00", "v", "worse"),
    "": ("#595959", "o", "no difference shown"),
}


def forest_plot(plan: Plan, found: Report, baselines: Sequence[str], path: Path) -> None:
    """Draws a panel for each baseline, and in it a row for each comparison with a difference.

    Raises:
        ImportError: matplotlib is missing.
    """
    panels = [
        [each for each in found.comparisons[name] if each.difference is not None]
        for name in baselines
    ]
    rows = [max(1, len(drawn)) for drawn in panels]
    height = 1.4 + 0.5 * len(panels) + 0.5 * sum(rows)
    figure = figure_class(path)(figsize=(9, height), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    for axes, name, drawn in zip(grid, baselines, panels, strict=True):
        _panel(axes, drawn, found.decimals)
        axes.set_xlabel(_direction(plan, name))
        axes.tick_params(labelbottom=True)
    to = baselines[0] if len(panels) == 1 else " and to ".join(baselines)
    figure.suptitle(f"Difference in {plan.metric} to {to}\n{found.setting}", fontsize=11, wrap=True)
    _legend(figure, [each for drawn in panels for each in drawn])
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _panel(axes: Any, drawn: list[Comparison], digits: int) -> None:
    axes.axvline(0, color="black", linewidth=1, zorder=1)
    for y, comparison in enumerate(drawn):
        _row(axes, y, comparison)
    _label(axes, drawn, digits)


def _direction(plan: Plan, baseline: str) -> str:
    ends = ("worse", "better") if plan.higher_is_better else ("better", "worse")
    return f"← {ends[0]}    {plan.metric}, variant minus {baseline}    {ends[1]} →"


def _style(comparison: Comparison) -> tuple[str, str, str]:
    return STYLES.get(comparison.verdict, STYLES[""])


def _row(axes: Any, y: int, comparison: Comparison) -> None:
    """Seeds as small dots, their mean as a marker, the interval as a bar."""
    colour, marker, _ = _style(comparison)
    if comparison.low is not None:
        ends = [comparison.low, comparison.high]
        axes.plot(ends, [y, y], color=colour, linewidth=2.2, solid_capstyle="butt", zorder=2)
    seeds = comparison.differences if comparison.n > 1 else ()
    axes.scatter(seeds, [y + 0.22] * len(seeds), s=10, color=colour, alpha=0.6, linewidths=0)
    axes.scatter([comparison.difference], [y], s=55, color=colour, marker=marker, zorder=3)


def _label(axes: Any, drawn: list[Comparison], digits: int) -> None:
    """Names on the left, numbers on the right, first variant on top."""
    rows = range(len(drawn))
    names = [textwrap.fill(each.variant, 36) for each in drawn]
    axes.set_yticks(rows, names)
    axes.set_ylim(max(1, len(drawn)) - 0.5, -0.5)
    right = axes.secondary_yaxis("right")
    right.set_yticks(rows, [difference(each, digits) for each in drawn])
    for side in (axes, right):
        side.tick_params(axis="y", length=0)
    for edge in ("left", "right", "top"):
        axes.spines[edge].set_visible(False)
    right.spines["right"].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(figure: Any, drawn: list[Comparison]) -> None:
    """Only what occurs in the plot."""
    from matplotlib.lines import Line2D

    handles = {
        style: Line2D([], [], color=style[0], marker=style[1], linewidth=2.2, label=style[2])
        for style in map(_style, drawn)
    }
    dots = Line2D([], [], color="#595959", marker=".", linewidth=0, label="one seed's pair")
    figure.legend(
        handles=[*handles.values(), dots],
        loc="outside lower center",
        ncols=len(handles) + 1,
        frameon=False,
        title="mean of paired differences with 95 % t-interval; verdict after Holm's correction",
        title_fontsize=9,
        fontsize=9,
    )
