"""Writes what the finished cells say: table.csv, table.md, effects.png and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zoo.ablation.analysis import Extra, Report, analyse
from zoo.ablation.figure import forest_plot
from zoo.ablation.html import as_html
from zoo.ablation.plan import Plan
from zoo.ablation.results import write_results
from zoo.ablation.tables import as_csv, as_markdown
from zoo.engine.checkpoint import write_atomically


def report(
    plan: Plan,
    out: str | Path,
    extra: Extra | None = None,
    figure: Sequence[str] | None = None,
    note: str = "",
    pictures: Mapping[str, Path] | None = None,
) -> Report:
    """Writes results.jsonl, tables, effects.png and report.html from the cells finished so far.

    Args:
        plan: Its metric and baselines decide what is compared.
        out: The folder of `run_cells`.
        extra: More columns, variant -> column -> value: parameters, FLOPs, speed, memory.
        figure: Baselines to which effects.png shows the differences; the first by default.
        note: What the extra columns are, for the caption of the tables.
        pictures: More PNG files for report.html, by what they show.

    Raises:
        ValueError: no cell has finished, one lacks the metric, or `extra` names another variant.
        ImportError: matplotlib is missing; all but effects.png is written all the same.
    """
    out = Path(out)
    _check_names("extra", list(extra or {}), plan.names)
    _check_names("figure", figure or [], plan.baselines)
    rows = write_results(plan, out) if out.is_dir() else []
    if not rows:
        raise ValueError(f"no cell in {out} has finished: run_cells trains them")
    found = analyse(plan, rows, extra or {}, note)
    _write(out / "table.csv", as_csv(plan, found))
    _write(out / "table.md", as_markdown(plan, found))
    picture = None
    try:
        forest_plot(plan, found, figure or plan.baselines[:1], out / "effects.png")
        picture = (out / "effects.png").read_bytes()
    finally:
        more = {title: path.read_bytes() for title, path in (pictures or {}).items()}
        _write(out / "report.html", as_html(plan, found, rows, out, picture, more))
    return found


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{what} ({', '.join(unknown)}) must be among {', '.join(known)}")


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
