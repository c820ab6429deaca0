"""The curves of a run's report: what metrics.jsonl holds, in charts of what belongs together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zoo.pages.charts import Chart, Curve, chart
from zoo.pages.run_record import RunRecord

MOST_LAYERS = 12  # of a chart
TRAINING = {
    "train/lr": "learning rate",
    "train/grad_norm": "gradient norm",
    "train/samples_per_second": "samples per second",
}


def training_curves(record: RunRecord) -> list[Chart]:
    """Loss, validation metrics, the best's first, and what training was like."""
    series = record.series
    groups: dict[str, dict[str, Curve]] = {"loss": {}}
    groups["loss"]["train"] = series.get("train/loss") or series.get("train/epoch_loss") or []
    validated = [name for name in series if name.startswith("val/") and name != "val/n"]
    first = _place(record.best_metric or "")[0]
    for name in sorted(validated, key=lambda name: _place(name)[0] != first):
        title, line = _place(name)
        groups.setdefault(title, {})[line] = series[name]
    for name, curve in series.items():
        if name.startswith("train/") and name not in ("train/loss", "train/epoch_loss"):
            title = TRAINING.get(name, name)
            groups[title] = {title: curve}
    return _drawn(groups, record)


def _place(name: str) -> tuple[str, str]:
    """The chart of a validation metric, and its name there.

    >>> _place("val/loss"), _place("val/train_chrf"), _place("val/top5")
    (('loss', 'val'), ('val/chrf', 'train'), ('val/topK', 'K = 5'))
    """
    if found := re.fullmatch(r"(.*?)(\d+)", name):
        return f"{found[1]}K", f"K = {found[2]}"
    if name == "val/loss":
        return "loss", "val"
    own = name.removeprefix("val/train_")
    return (f"val/{own}", "train") if own != name else (name, "val")


def _drawn(
    groups: Mapping[str, Mapping[str, Curve]], record: RunRecord, ordered: bool = False
) -> list[Chart]:
    until = float(record.rows[-1]["step"]) if record.rows else 0.0
    charts = (chart(name, lines, ordered=ordered, until=until) for name, lines in groups.items())
    return [each for each in charts if each is not None]


def attention_curves(record: RunRecord) -> dict[str, list[Chart]]:
    """attn/LAYER/NAME and the like: a chart for each name, a line for each layer."""
    groups: dict[str, dict[str, dict[str, Curve]]] = {}
    for key, curve in record.series.items():
        prefix, _, rest = key.partition("/")
        layer, _, name = rest.rpartition("/")
        if layer and prefix not in ("train", "val"):
            groups.setdefault(prefix, {}).setdefault(name, {})[layer] = curve
    return {
        prefix: _drawn({name: _some(lines) for name, lines in names.items()}, record, ordered=True)
        for prefix, names in groups.items()
    }


def _some(lines: Mapping[str, Curve]) -> dict[str, Curve]:
    """At most `MOST_LAYERS` of the layers, at even distances, the first and the last always."""
    names = list(lines)
    if len(names) <= MOST_LAYERS:
        return dict(lines)
    places = {round(i * (len(names) - 1) / (MOST_LAYERS - 1)) for i in range(MOST_LAYERS)}
    return {names[place]: lines[names[place]] for place in sorted(places)}
