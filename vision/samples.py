"""What a trained classifier makes of validation images, as files: a table by class, and samples.

`classes.csv` has a row for each class, in percent; `predictions.json` the surest mistakes and some
images that are recognised, with their PNGs beside it.

Shapes: b batch, k classes of highest probability, c y x channels, rows and columns.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vision.evaluate import class_rows
from vision.inspection.fixed_images import spread, undisturbed
from vision.predict import top_classes
from zoo.layers.check import integer

MOST = 10_000  # images that are looked at
SHOWN = 12  # images of each kind
SIDE = 128  # pixels of a PNG, at most
TOP = 3  # classes named of each image


@dataclass(frozen=True)
class ClassSummary:
    """One class of the table; shares in percent, None where undefined.

    Attributes:
        name: Of the class.
        n: Its images.
        precision, recall, f1: Of its predictions, of its images, and their harmonic mean.
        confused_with: The class that most of its images are taken for instead; "" for none.
        confused: How many of them.
    """

    name: str
    n: int
    precision: float | None
    recall: float | None
    f1: float | None
    confused_with: str
    confused: int


def write_samples(
    folder: Path,
    model: Any,
    source: Any,
    class_names: Sequence[str],
    *,
    batch_size: int = 128,
    workers: int = 0,
    most: int = MOST,
) -> None:
    """Writes classes.csv, predictions.json and PNGs into a folder; earlier ones are replaced.

    Args:
        folder: Made if need be.
        model: A classifier with a card, on any device; its mode and the random state stay.
        source: Validation images with their targets, see `vision.data.make_source`.
        class_names: One name a class.
        batch_size: Images a forward pass.
        workers: Processes that read images; 0 reads in this one.
        most: Images to look at, at even distances over all where there are more.
    """
    indices = spread(min(integer("most", most), len(source)), len(source))
    found = predictions(model, source, indices, batch_size, workers)
    fresh_folder(folder)
    table = class_table(found["targets"], found["indices"][:, 0], class_names)
    _write_table(folder / "classes.csv", table)
    right = found["indices"][:, 0] == found["targets"]
    chosen = {
        "wrong": _surest(found["probabilities"][:, 0], ~right),
        "right": _some(right),
    }
    rows = {
        kind: [
            _row(folder, f"{kind}{place:02d}.png", source, indices[i], found, i, class_names)
            for place, i in enumerate(places)
        ]
        for kind, places in chosen.items()
    }
    told = {"kind": "classes", "images": len(indices), "mistakes": int((~right).sum()), **rows}
    write_text(folder / "predictions.json", json.dumps(told, indent=1, ensure_ascii=False))


def predictions(
    model: Any, source: Any, indices: Sequence[int], batch_size: int = 128, workers: int = 0
) -> dict[str, Tensor]:
    """`targets` (b), `indices` and `probabilities` (b k) of some images, on the CPU."""
    device = next(model.parameters()).device
    keys: Any = [(0, index) for index in indices]
    loader: Any = DataLoader(
        source, batch_size, sampler=keys, num_workers=workers, collate_fn=_as_read
    )
    parts = []
    with undisturbed(model):
        for batch in loader:
            rows = top_classes(model, batch["images"].to(device), TOP)
            parts.append({name: value.cpu() for name, value in rows.items()})
            parts[-1]["targets"] = batch["targets"]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _as_read(batch: Any) -> Any:
    return batch


def class_table(
    targets: Tensor, predicted: Tensor, class_names: Sequence[str]
) -> list[ClassSummary]:
    """A row for each class, in their order.

    Args:
        targets, predicted: Class indices (b,).
        class_names: One name a class.
    """
    k = len(class_names)
    counts = torch.bincount(k * targets + predicted, minlength=k * k).view(k, k)
    sums = {
        "class_n": counts.sum(1),
        "class_hits": counts.diagonal(),
        "class_predicted": counts.sum(0),
    }
    mistakes = (counts - counts.diagonal().diag()).max(dim=1)
    return [
        ClassSummary(
            row.name,
            row.n,
            _defined(row.precision),
            _defined(row.recall),
            _f1(hits, row.n + predicted),
            class_names[other] if number else "",
            number,
        )
        for row, hits, predicted, number, other in zip(
            class_rows(sums, list(class_names)),
            sums["class_hits"].tolist(),
            sums["class_predicted"].tolist(),
            mistakes.values.tolist(),
            mistakes.indices.tolist(),
            strict=True,
        )
    ]


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _f1(hits: int, both: int) -> float | None:
    """From the right ones and the sum of images and predictions of a class."""
    return 100 * 2 * hits / both if both else None


def _write_table(path: Path, table: Sequence[ClassSummary]) -> None:
    names = list(ClassSummary.__dataclass_fields__)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in table:
            rounded = {
                n: round(v, 4) if isinstance(v, float) else v for n, v in asdict(row).items()
            }
            writer.writerow(rounded)


def _surest(probabilities: Tensor, wrong: Tensor) -> list[int]:
    """Of the mistakes, those of highest probability."""
    order = probabilities.masked_fill(~wrong, -1).argsort(descending=True, stable=True)
    return order[: min(SHOWN, int(wrong.sum()))].tolist()


def _some(right: Tensor) -> list[int]:
    """Some of those that are right, at even distances."""
    places = right.nonzero()[:, 0].tolist()
    return [places[i] for i in spread(min(SHOWN, len(places)), len(places))] if places else []


def _row(
    folder: Path,
    name: str,
    source: Any,
    index: int,
    found: dict[str, Tensor],
    place: int,
    class_names: Sequence[str],
) -> dict[str, Any]:
    pixels = source.__getitems__([(0, index)])["images"][0]
    save_thumbnail(folder / name, pixels)
    pairs = zip(
        found["indices"][place].tolist(), found["probabilities"][place].tolist(), strict=True
    )
    return {
        "image": name,
        "index": index,
        "truth": class_names[int(found["targets"][place])],
        "found": [[class_names[i], round(p, 4)] for i, p in pairs],
    }


def save_thumbnail(path: Path, pixels: Tensor, side: int = SIDE) -> None:
    """Writes uint8 pixels (c y x) as a PNG of at most `side` pixels a side."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    image.thumbnail((side, side))
    image.save(path, "PNG", optimize=True)


def fresh_folder(folder: Path) -> None:
    """Makes a folder of samples, or removes those of an earlier call from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.png", "classes.csv", "predictions.json"):
        for file in folder.glob(pattern):
            file.unlink()


def write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
