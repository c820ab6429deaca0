"""What a report says of a run in words and numbers: its headline, its metrics, its classes."""

from __future__ import annotations

import re
from typing import Any

from zoo.pages.charts import number
from zoo.pages.run_record import RunRecord, validation

PERCENT = re.compile(r"top\d+$|recall@|accuracy$")  # names of metrics in per cent
DONE = "completed"


def title(record: RunRecord) -> str:
    model, data = (record.summary.get(n) or record.options.get(n) for n in ("model", "data"))
    return f"{model or 'A model'} on {data or 'unknown data'}"


def status(record: RunRecord) -> tuple[str, str]:
    """How the run ended, and the style of the word."""
    status = str(record.summary.get("status") or "not finished")
    asked = status == "interrupted" or status.startswith("stopped")
    return status, "better" if status == DONE else "open" if asked else "worse"


def facts(record: RunRecord) -> list[tuple[str, str, str]]:
    """Name, value and remark of what a reader wants first."""
    summary = record.summary
    found = [_result(record)] if record.best_metric else []
    if "epochs" in summary:
        remark = f"of {record.options['epochs']}" if "epochs" in record.options else ""
        steps = f"{summary.get('steps', 0):,} updates"
        found.append(("epochs", str(summary["epochs"]), f"{remark}, {steps}".strip(", ")))
    if "params" in summary:
        learning = summary.get("trainable_params") or summary["params"]
        remark = "all learn" if learning == summary["params"] else f"{_short(learning)} learn"
        found.append(("parameters", _short(summary["params"]), remark))
    if "wall_seconds" in summary:
        speed = f"{summary.get('samples_per_second') or 0:,.0f} samples/s"
        found.append(("time", _duration(summary["wall_seconds"]), speed))
    if "seed" in summary:
        found.append(("seed", str(summary["seed"]), ""))
    return found


def _result(record: RunRecord) -> tuple[str, str, str]:
    best, metric = record.summary["best"], record.best_metric
    assert metric is not None
    value, epoch = best[metric], best.get("epoch")
    if value is None:
        return metric, "-", "never evaluated"
    unit = " %" if PERCENT.search(metric) else ""
    last = (record.summary.get("metrics") or {}).get(metric)
    if epoch == record.summary.get("epochs"):
        remark = f"after epoch {epoch}, the best"
    else:
        remark = f"best, after epoch {epoch}; last {shown(last)}{unit}"
    return metric, f"{shown(value)}{unit}", remark


def interval(record: RunRecord) -> tuple[float, float] | None:
    """Wilson's 95 % interval of the last val/top1, in per cent."""
    metrics = record.summary.get("metrics") or {}
    top1, n = metrics.get("val/top1"), metrics.get("val/n")
    if top1 is None or not n:
        return None
    from scipy.stats import binomtest

    found = binomtest(round(top1 * n / 100), int(n)).proportion_ci(0.95, method="wilson")
    return 100 * float(found.low), 100 * float(found.high)


def _short(count: float) -> str:
    """
    >>> _short(136010), _short(85_800_000), _short(12)
    ('136 k', '85.8 M', '12')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _duration(seconds: float) -> str:
    """
    >>> _duration(12.34), _duration(200), _duration(4000)
    ('12 s', '3 min 20 s', '1 h 6 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def metrics(record: RunRecord) -> dict[str, Any]:
    """Validation metrics: after the last epoch, and after the best where it is another one."""
    last = record.summary.get("metrics") or {}
    if not last:
        evaluated = [row for row in record.rows if validation(row)]
        last = validation(evaluated[-1]) if evaluated else {}
    epoch = (record.summary.get("best") or {}).get("epoch")
    best = record.metrics_of(epoch) if epoch != record.summary.get("epochs") else {}
    return {"last": last, "best": best, "epoch": epoch, "interval": interval(record)}


def classes(record: RunRecord) -> list[dict[str, Any]]:
    """The class table, with numbers as numbers."""
    shares = ("precision", "recall", "f1")
    return [
        {**row, **{name: float(row[name]) if row.get(name) else None for name in shares}}
        for row in record.classes
    ]


def shown(value: Any) -> str:
    """A number as a reader takes it in; "-" for none."""
    return number(float(value)) if isinstance(value, int | float) else "-"
