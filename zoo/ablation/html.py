"""report.html: question, verdicts, figures, tables, settings and commands in one file.

It loads nothing. Its figures are drawn by the template as SVG, and so follow the reader's colours
and width; effects.png is in it too, for copying. Everything is escaped.
"""

from __future__ import annotations

import base64
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.ablation.analysis import Report
from zoo.ablation.cells import cell_command
from zoo.ablation.forecast import difference_line
from zoo.ablation.page import PAGE
from zoo.ablation.plan import Plan, cells_of, flag_words
from zoo.ablation.results import Curve, environments, learning_curves, metric_values
from zoo.ablation.stats import Comparison
from zoo.ablation.tables import difference, number, p_value, table
from zoo.pages.charts import HEIGHT, WIDTH, Scale, polyline


def as_html(
    plan: Plan,
    found: Report,
    rows: list[dict[str, Any]],
    out: Path,
    picture: bytes | None,
    pictures: Mapping[str, bytes] | None = None,
) -> str:
    """The page.

    Args:
        plan: What was run.
        found: What came out.
        rows: Those of results.jsonl.
        out: The ablation's folder, for learning curves and versions.
        picture: A PNG to embed.
        pictures: More of them, by what they show.
    """
    from jinja2 import Environment, StrictUndefined

    pages = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["parts"] = _parts
    header, *body = table(plan, found)
    return pages.from_string(PAGE).render(
        question=plan.question or f"Which variant has the best {plan.metric}?",
        found=found,
        plan=plan,
        cells=(len(rows), len(plan.variants) * len(plan.seeds)),
        power=difference_line(plan, rows).capitalize(),
        verdicts={name: verdicts(each) for name, each in found.comparisons.items()},
        forests=[_forest(name, each, found) for name, each in found.comparisons.items() if each],
        header=header,
        body=body,
        seeds=_seeds(plan, found, rows),
        curves=_curves(plan, learning_curves(plan, out)),
        picture=None if picture is None else _embedded(picture),
        pictures={title: _embedded(each) for title, each in (pictures or {}).items()},
        flags={each.name: " ".join(flag_words(each.flags)) for each in plan.variants},
        shared=shlex.join(flag_words(plan.flags)),
        environment=environments(plan, out),
        commands=_commands(plan, out),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _embedded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _parts(name: str) -> list[str]:
    """Between them a long name may be broken."""
    return re.findall(r"[^@:,]*[@:,]|[^@:,]+", name)


def verdicts(comparisons: Iterable[Comparison]) -> dict[str, list[str]]:
    """Verdict -> the variants it is about; claims first."""
    groups: dict[str, list[str]] = {"better": [], "worse": []}
    for each in comparisons:
        groups.setdefault(each.verdict, []).append(each.variant)
    return {verdict: variants for verdict, variants in groups.items() if variants}


def _commands(plan: Plan, out: Path) -> dict[str, str]:
    cell = cells_of(plan, Path("DIR"))[0]
    return {
        "Continue; with another --out, reproduce everything": shlex.join(sys.orig_argv),
        "One cell alone": shlex.join(["python", *cell_command(plan, cell)[1:]]),
    }


def _seeds(plan: Plan, found: Report, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Variant -> its value with each seed."""
    values = metric_values(plan, rows)
    return {
        name: [number(values[name].get(seed), found.decimals) for seed in plan.seeds]
        for name in plan.names
    }


# Forest plots: horizontal places in percent of the drawing's width


def _forest(baseline: str, comparisons: Sequence[Comparison], found: Report) -> dict[str, Any]:
    shown = [each for each in comparisons if each.difference is not None]
    ends = [(each.low, each.high, *each.differences) for each in shown]
    scale = Scale.over([0.0, *(value for row in ends for value in row if value is not None)])
    return {
        "baseline": baseline,
        "zero": scale.at(0.0),
        "ticks": [(scale.at(tick), f"{tick:+.4g}" if tick else "0") for tick in scale.ticks()],
        "rows": [_forest_row(each, scale, found.decimals) for each in shown],
    }


def _forest_row(each: Comparison, scale: Scale, digits: int) -> dict[str, Any]:
    assert each.difference is not None
    interval = None
    if each.low is not None and each.high is not None:
        interval = (scale.at(each.low), scale.at(each.high))
    return {
        "variant": each.variant,
        "baseline": each.baseline,
        "style": each.verdict if each.verdict in ("better", "worse") else "open",
        "verdict": each.verdict,
        "p": p_value(each),
        "text": difference(each, digits),
        "mean": scale.at(each.difference),
        "interval": interval,
        "seeds": [scale.at(value) for value in each.differences if each.n > 1],
    }


# Learning curves: one panel a variant, all to the same scale


def _curves(plan: Plan, curves: dict[str, dict[int, Curve]]) -> dict[str, Any] | None:
    points = [point for each in curves.values() for curve in each.values() for point in curve]
    if not points:
        return None
    x, y = (Scale.over(values) for values in zip(*points, strict=True))
    means = {name: _mean_curve(list(each.values())) for name, each in curves.items()}
    reference = plan.baselines[0]
    return {
        "box": f"0 0 {WIDTH:g} {HEIGHT:g}",
        "epochs": [f"{bound(p[0] for p in points):g}" for bound in (min, max)],
        "range": [f"{bound(p[1] for p in points):.4g}" for bound in (min, max)],
        "reference": polyline(means.get(reference, []), x, y),
        "reference_name": reference,
        "panels": {
            name: {
                "seeds": [polyline(curve, x, y) for curve in curves[name].values()],
                "mean": polyline(means[name], x, y),
            }
            for name in plan.names
            if curves[name]
        },
    }


def _mean_curve(curves: list[Curve]) -> Curve:
    """Over the epochs that all seeds have."""
    tables = [dict(curve) for curve in curves]
    shared = [x for x in tables[0] if all(x in each for each in tables)] if tables else []
    return [(x, sum(each[x] for each in tables) / len(tables)) for x in shared]
