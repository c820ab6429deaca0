"""table.csv and table.md, and numbers as text."""

from __future__ import annotations

import csv
import io

from zoo.ablation.analysis import Report
from zoo.ablation.plan import Plan
from zoo.ablation.stats import Comparison

KINDS = ("n", "difference", "low", "high", "p", "p_holm", "verdict")


def as_csv(plan: Plan, found: Report) -> str:
    """Full precision, one row for each variant; empty where there is no number."""
    header = ["variant", "n", "mean", "sd", "low", "high"]
    header += [f"vs {name}: {kind}" for name in plan.baselines for kind in KINDS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*header, *found.columns])
    for each in found.summaries:
        row: list[object] = [each.variant, each.n, each.mean, each.sd, each.low, each.high]
        for name in plan.baselines:
            comparison = found.comparison(name, each.variant)
            row += [getattr(comparison, kind, None) for kind in KINDS]
        writer.writerow([*row, *found.extra_values(each.variant)])
    return text.getvalue()


def as_markdown(plan: Plan, found: Report) -> str:
    """Rounded and aligned, under a caption."""
    header, *rows = table(plan, found)
    left = {0, *(i for i, name in enumerate(header) if name == "verdict")}
    return f"{found.caption}\n\n{_aligned([header, *rows], left)}\n"


def table(plan: Plan, found: Report) -> list[list[str]]:
    """The rounded table: names of the columns, then one row for each variant."""
    digits = found.decimals
    header = ["variant", "n", "mean (95 % interval)", "sd"]
    for name in plan.baselines:
        header += [f"vs {name} (95 % interval)", "p (Holm)", "verdict"]
    rows = [[*header, *found.columns]]
    for each in found.summaries:
        row = [each.variant, str(each.n), spread(each.mean, each.low, each.high, digits)]
        row.append(number(each.sd, digits))
        for name in plan.baselines:
            row += _compared(found.comparison(name, each.variant), digits)
        rows.append([*row, *map(_extra_text, found.extra_values(each.variant))])
    return rows


def _compared(comparison: Comparison | None, digits: int) -> list[str]:
    if comparison is None:
        return ["baseline", "", ""]
    return [difference(comparison, digits), p_value(comparison), comparison.verdict]


def difference(comparison: Comparison, digits: int) -> str:
    """The mean difference with its interval."""
    return spread(comparison.difference, comparison.low, comparison.high, digits, sign="+")


def p_value(comparison: Comparison) -> str:
    """The corrected one."""
    p = comparison.p_holm
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def spread(
    value: float | None, low: float | None, high: float | None, digits: int, sign: str = ""
) -> str:
    """A number with its interval, if it has one."""
    text = number(value, digits, sign)
    if low is None:
        return text
    return f"{text} ({number(low, digits, sign)} to {number(high, digits, sign)})"


def number(value: float | None, digits: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign or '-'}.{digits}f}"


def _extra_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)


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
