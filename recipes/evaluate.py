"""Evaluates a trained classifier: accuracies with an interval, loss, a table by class.

Command:
    accelerate launch recipes/evaluate.py --model runs/NAME
    accelerate launch recipes/evaluate.py --model runs/NAME --checkpoint best
    accelerate launch recipes/evaluate.py --model local-dir:FOLDER --data folder:PATH --out r.json
    accelerate launch recipes/evaluate.py --model timm:resnet50 --data folder:IMAGENET
    accelerate launch recipes/evaluate.py --model timm:resnet50 --pretrained file:weights.pth \\
        --class-names imagenet-1k --data folder:PATH

The first two evaluate a run on its own data. Every image counts once, on any number of processes.
Classes are found by name: where data given by --data has some of those that the model knows, only
the outputs of these compete, and this is said.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import vision
from vision.class_names import (
    Matched,
    check_known,
    data_classes,
    match_classes,
    read_class_names,
)
from vision.data import ImageDataset
from vision.evaluate import class_rows, count, interval, metrics
from vision.predict import check_classifier, logits_of
from zoo import engine
from zoo.engine.tracking import write_json
from zoo.run_folder import find_trained


@dataclass(frozen=True)
class Config:
    """Evaluates a model on the validation images of a data set."""

    model: str
    """A run folder, local-dir:FOLDER as zoo.save_pretrained writes it, hf-hub:OWNER/REPO,
    timm:NAME, torchvision:NAME, or a model of zoo.list_models()."""
    pretrained: str | None = None
    """Other weights for a model that is named: file:, timm:, hf-hub:, ..., see
    zoo.load_pretrained."""
    checkpoint: str = "last"
    """Of a run folder: last, best, a step, or a file of its checkpoints/."""
    class_names: str | None = None
    """Names of the model's outputs, where its weights bring none: a text file, one a line, or a
    set of ImageNet: imagenet-1k, -12k, -21k-goog, -21k-miil, -22k or -22k-ms."""
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

    found = find_trained(config.model, config.pretrained, config.checkpoint)
    spec = config.data or found.flags.get("data")
    if spec is None:
        raise ValueError(f"--data is needed with --model {config.model}")
    accelerator = Accelerator()
    model: Any = found.create(accelerator.print).to(accelerator.device)
    check_classifier(model)
    if config.class_names:
        model.card = replace(model.card, class_names=read_class_names(config.class_names))
    there = data_classes(spec) if config.data else ()
    matched = match_classes(model.card.class_names or (), there)
    data = load(config, model, spec, matched, there)
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    val = vision.make_source(data.val, model.card.preprocessing, train=False)
    loader = engine.evaluation_loader(accelerator, val, config.batch_size, config.workers)
    names = matched.names if matched else data.class_names
    outputs = list(matched.outputs) if matched else slice(None)
    if len(names) < model.num_classes:
        accelerator.print(f"only the {len(names)} of {model.num_classes} classes in {spec} compete")

    def count_fn(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return count(logits_of(model, batch["images"])[:, outputs], batch["targets"])

    sums = engine.evaluate(accelerator, model, loader, count_fn)
    assert sums is not None  # nobody asked to stop
    rows = class_rows(sums, list(names))
    report = {
        "model": found.name,
        "pretrained": model.card.source,
        "checkpoint": None if found.checkpoint is None else str(found.checkpoint),
        "data": spec,
        "metrics": metrics(sums),
        "val/top1_interval": interval(int(sums["top1"]), int(sums["n"])),
        "classes": [asdict(row) for row in rows],
        "outputs": model.num_classes,
        "images": data.report,
    }
    if accelerator.is_main_process:
        show(report, rows)
        if config.out:
            write_json(Path(config.out), report)
    accelerator.end_training()
    return report


def load(
    config: Config, model: Any, spec: str, matched: Matched | None, there: tuple[str, ...]
) -> ImageDataset:
    """The validation images: of the data's classes where the model knows these, or of its own."""
    wanted = there if matched else model.card.class_names
    if config.data and not matched and wanted:
        check_known(wanted, spec, config.model)
    data = vision.load_dataset(
        spec, bad_images=config.bad_images, class_names=wanted, splits=("val",)
    )
    if not matched and model.num_classes != len(data.class_names):
        raise ValueError(
            f"--model {config.model} has {model.num_classes} outputs, {spec} "
            f"{len(data.class_names)} classes"
        )
    return data


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
    engine.cli(main, Config)
