"""Evaluates a trained classifier: accuracies with an interval, loss, a table by class.

Command:
    accelerate launch recipes/evaluate.py --model runs/NAME
    accelerate launch recipes/evaluate.py --model local-dir:FOLDER --data folder:PATH --out r.json

The first evaluates a run on its own data. Every image counts once, on any number of processes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import Tensor, nn

import vision
import zoo
from vision.evaluate import class_rows, count, interval, metrics
from zoo import engine
from zoo.engine.tracking import write_json
from zoo.preprocess import normalize


@dataclass(frozen=True)
class Config:
    """Evaluates a model on the validation images of a data set."""

    model: str
    """A run folder, or local-dir:FOLDER as zoo.save_pretrained writes it."""
    data: str | None = None
    """digits, emoji or folder:PATH; by default the data of the run."""
    batch_size: int = 128
    """Images per process and forward pass."""
    workers: int = 0
    """Processes that read images; 0 reads in this process."""
    out: str | None = None
    """A JSON file for the numbers."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Unreadable files: stop and name them, or skip and count them."""


def main(config: Config) -> dict[str, Any]:
    from accelerate import Accelerator

    source, data_spec = resolve(config)
    accelerator = Accelerator()
    model: Any = zoo.create_model(source).to(accelerator.device)
    data = vision.load_dataset(
        data_spec,
        bad_images=config.bad_images,
        class_names=model.card.class_names,
        splits=("val",),
    )
    if model.num_classes != len(data.class_names):
        raise ValueError(
            f"{source} has {model.num_classes} outputs, {data_spec} {len(data.class_names)} classes"
        )
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    preprocessing = model.card.preprocessing
    val = vision.make_source(data.val, preprocessing, train=False, augment=None, seed=0)
    loader = engine.evaluation_loader(accelerator, val, config.batch_size, config.workers)

    def count_fn(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return count(model(normalize(batch["images"], preprocessing)), batch["targets"])

    sums = engine.evaluate(accelerator, model, loader, count_fn)
    assert sums is not None  # nobody asked to stop
    rows = class_rows(sums, list(data.class_names))
    report = {
        "model": source,
        "data": data_spec,
        "metrics": metrics(sums),
        "val/top1_interval": interval(int(sums["top1"]), int(sums["n"])),
        "classes": [asdict(row) for row in rows],
        "images": data.report,
    }
    if accelerator.is_main_process:
        show(report, rows)
        if config.out:
            write_json(Path(config.out), report)
    accelerator.end_training()
    return report


def resolve(config: Config) -> tuple[str, str]:
    """The model source and the data set that the flags mean."""
    if config.model.startswith("local-dir:"):
        if config.data is None:
            raise ValueError(f"--data is needed with --model {config.model}")
        return config.model, config.data
    folder = Path(config.model)
    if not (folder / "model" / "model.json").exists():
        state = "no such folder" if not folder.is_dir() else "it has no model/model.json"
        if (folder / "model.json").exists():
            state = f"did you mean local-dir:{folder}?"
        raise FileNotFoundError(
            f"--model {config.model} is neither local-dir:FOLDER nor a run folder with a trained "
            f"model: {state}"
        )
    options = json.loads((folder / "config.json").read_text())["options"]
    return f"local-dir:{folder / 'model'}", config.data or options["data"]


def show(report: dict[str, Any], rows: list[Any]) -> None:
    """Prints the numbers and the table by class."""
    from rich.console import Console
    from rich.table import Table

    low, high = report["val/top1_interval"]
    table = Table(title=f"{report['model']} on {report['data']}")
    for column in ("class", "images", "recall %", "precision %"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for row in rows:
        numbers = ("-" if math.isnan(x) else f"{x:.1f}" for x in (row.recall, row.precision))
        table.add_row(row.name, str(row.n), *numbers)
    Console().print(table)
    for name, value in report["metrics"].items():
        extra = f"  (95 % interval {low:.2f} to {high:.2f})" if name == "val/top1" else ""
        print(f"{name:10} {value:.4g}{extra}")


if __name__ == "__main__":
    main(tyro.cli(Config))
