"""Exports a trained image classifier: ONNX, or a program of torch.export.

Command:
    python recipes/export.py --model runs/NAME --out model.onnx
    python recipes/export.py --model runs/NAME --checkpoint best --out best.onnx
    python recipes/export.py --model local-dir:FOLDER --out model.pt2
    python recipes/export.py --model timm:resnet50 --out resnet50.onnx

ONNX needs `pip install -e ".[onnx]"`. The file holds the model's card (preprocessing, class names):
`zoo.exported.card_of_export(FILE)`. It is written only if its outputs are the model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine import cli
from zoo.export import ExportReport, export_onnx, export_program
from zoo.exported import ONNX, PROGRAM, open_export, require
from zoo.run_folder import find_trained


@dataclass(frozen=True)
class Config:
    """Writes a model as one file that runs without this project."""

    model: str
    """A run folder, local-dir:FOLDER as zoo.save_pretrained writes it, hf-hub:OWNER/REPO,
    timm:NAME, torchvision:NAME, or a model of zoo.list_models()."""
    out: str
    """The file: FILE.onnx, or FILE.pt2 for a program of torch.export."""
    pretrained: str | None = None
    """Other weights for a model that is named: file:, timm:, hf-hub:, ..., see
    zoo.load_pretrained."""
    checkpoint: str = "last"
    """Of a run folder: last, best, a step, or a file of its checkpoints/."""
    opset: int | None = None
    """Version of ONNX's operators; by default the one that torch recommends."""
    static_batch: bool = False
    """One image at a time, instead of any number."""


def main(config: Config) -> ExportReport:
    kind = Path(config.out).suffix
    if kind not in (ONNX, PROGRAM):
        raise ValueError(f"--out {config.out} must end with {ONNX} or {PROGRAM}")
    if kind == PROGRAM and config.opset is not None:
        raise ValueError(f"--opset {config.opset} is for {ONNX} only, not for --out {config.out}")
    if kind == ONNX:
        require("onnx", "onnxscript", "onnxruntime")  # before a model is made for nothing
    model = find_trained(config.model, config.pretrained, config.checkpoint).create().eval()
    dynamic: Any = {"dynamic_batch": not config.static_batch}
    if kind == ONNX:
        report = export_onnx(model, config.out, opset=config.opset, **dynamic)
    else:
        report = export_program(model, config.out, **dynamic)
    print(report)
    show_times(model, report.path)
    return report


def show_times(model: nn.Module, file: Path) -> None:
    """Prints how long one image takes: for information, medians on a machine as it is."""
    preprocessing: Any = model.card.preprocessing  # type: ignore[union-attr]
    dtype = next(model.parameters()).dtype
    image = torch.zeros(1, preprocessing.in_chans, *preprocessing.size, dtype=dtype)
    with torch.no_grad():
        eager, exported = milliseconds(model, image), milliseconds(open_export(file), image)
    print(f"  one image: {eager:.2f} ms by the model, {exported:.2f} ms by {file.name}")


def milliseconds(run: Callable[[Tensor], Tensor], image: Tensor, repeats: int = 9) -> float:
    run(image)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(image)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


if __name__ == "__main__":
    cli(main, Config)
