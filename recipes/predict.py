"""What a classifier sees in images: the most probable classes, and where it looks.

Command:
    python recipes/predict.py IMAGE... --model SOURCE
    python recipes/predict.py photos/ 'more/*.jpg' --model runs/NAME --out predictions.csv
    python recipes/predict.py photos/ --model runs/NAME --checkpoint best
    python recipes/predict.py cat.jpg --model timm:tf_efficientnet_lite0 \\
        --pretrained file:weights.pth --class-names imagenet-1k
    accelerate launch --mixed_precision bf16 recipes/predict.py photos/ --model timm:resnet50
    python recipes/predict.py photos/ --model runs/NAME --overlay overlays

An IMAGE is a file, a folder (its own images, not those of folders in it) or a wildcard. They are
decoded, resized and cropped as the model's card says; the file of numbers has a row an image.

Expected: a table within seconds; the fourth names "Egyptian cat", "tabby" or "tiger cat" for a cat.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import Tensor, nn

from vision.class_names import read_class_names
from vision.inspection.overlay import attention_layer, attention_maps, draw_overlay, picture_names
from vision.predict import (
    Prediction,
    check_classifier,
    find_images,
    image_source,
    inputs_of,
    named,
    readable,
    top_classes,
)
from zoo import engine
from zoo.diagnostics.plotting import figure_class
from zoo.engine.tracking import write_json
from zoo.imagenet import SUBSETS
from zoo.run_folder import find_trained

SHOWN = 50  # images in the printed table


@dataclass(frozen=True)
class Config:
    """Names the most probable classes of images."""

    images: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders, wildcards."""
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
    top_k: int = 5
    """Classes an image; all where the model has fewer."""
    out: str | None = None
    """A file for the predictions: .csv or .json."""
    overlay: str | None = None
    """A folder for a picture of each image under the attention of a Vision Transformer: ours,
    timm's, torchvision's, open_clip's."""
    layer: int | None = None
    """Of its layers with attention, from 0, or from the end below 0; by default what the classifier
    reads from."""
    batch_size: int = 32
    """Images per process and forward pass."""
    workers: int = 0
    """Processes that read images; 0 reads in this process."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Unreadable files: stop and name them, or skip and tell them."""


def main(config: Config) -> list[Prediction]:
    from accelerate import Accelerator

    check(config)
    accelerator = Accelerator()
    paths = readable(find_images(config.images), config.bad_images)
    model: Any = find_trained(config.model, config.pretrained, config.checkpoint).create(
        accelerator.print
    )
    model.to(accelerator.device)
    check_classifier(model)
    if config.class_names:
        model.card = replace(model.card, class_names=read_class_names(config.class_names))
    layer = attention_layer(model, config.layer) if config.overlay else ""
    source = image_source(model, paths)
    loader = engine.evaluation_loader(accelerator, source, config.batch_size, config.workers)

    def top_fn(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        return top_classes(model, batch["images"], config.top_k)

    rows = engine.collect(accelerator, model, loader, top_fn)
    assert rows is not None  # nobody asked to stop
    predictions = named(paths, rows, model.card.class_names)
    if accelerator.is_main_process:
        show(predictions)
        if model.card.class_names is None:
            print(f"these weights bring no names of classes: {hint(model.num_classes)}")
        if config.out:
            write(predictions, Path(config.out))
    if config.overlay:
        places = range(accelerator.process_index, len(paths), accelerator.num_processes)
        overlays(config, model, source, predictions, layer, places)
    accelerator.end_training()
    return predictions


def check(config: Config) -> None:
    """Refuses flags before anything is read."""
    if config.out and Path(config.out).suffix not in (".csv", ".json"):
        raise ValueError(f"--out {config.out} must end in .csv or .json")
    if config.layer is not None and not config.overlay:
        raise ValueError(f"--layer {config.layer} is for pictures: give --overlay FOLDER as well")
    if config.overlay:
        figure_class(f"--overlay {config.overlay}")


def overlays(
    config: Config,
    model: Any,
    source: Any,
    predictions: Sequence[Prediction],
    layer: str,
    places: Sequence[int],
) -> None:
    """Draws the images at these places under the model's attention."""
    folder = Path(str(config.overlay))
    folder.mkdir(parents=True, exist_ok=True)
    names = picture_names(prediction.path for prediction in predictions)
    device = next(model.parameters()).device
    for place in places:
        pixels = source.__getitems__([(0, place)])["images"]
        images = inputs_of(model, pixels.to(device))
        weights = attention_maps(model, images, config.layer)[0]
        name, probability = predictions[place].classes[0]
        title = f"{predictions[place].path.name}: {name} {100 * probability:.1f} %"
        draw_overlay(folder / names[place], pixels[0], weights, title, layer)


def hint(classes: int) -> str:
    """How numbered classes get names."""
    sets = [name for name, count in SUBSETS.items() if count == classes]
    return f"give them by --class-names {' or '.join([*sets, 'FILE'])}"


def write(predictions: Sequence[Prediction], file: Path) -> None:
    """One row an image: CSV with columns class_1, probability_1, ..., or a JSON list."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        rows = [
            {
                "image": str(prediction.path),
                "classes": [{"name": name, "probability": p} for name, p in prediction.classes],
            }
            for prediction in predictions
        ]
        write_json(file, rows)
        return
    ranks = range(1, 1 + len(predictions[0].classes))
    with file.open("w", newline="", encoding="utf-8") as opened:
        table = csv.writer(opened)
        table.writerow(
            ["image", *(f"{what}_{n}" for n in ranks for what in ("class", "probability"))]
        )
        for path, classes in predictions:
            table.writerow([path, *(value for pair in classes for value in pair)])


def show(predictions: Sequence[Prediction]) -> None:
    """Prints a table of the first images."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "class")
    table.add_column("%", justify="right")
    for path, classes in predictions[:SHOWN]:
        for rank, (name, probability) in enumerate(classes):
            last = rank == len(classes) - 1
            first = escape(str(path)) if rank == 0 else ""
            table.add_row(first, escape(name), f"{100 * probability:.1f}", end_section=last)
    Console().print(table)
    if len(predictions) > SHOWN:
        print(f"... and {len(predictions) - SHOWN} more images; --out keeps all")


if __name__ == "__main__":
    engine.cli(main, Config)
