"""What a classifier sees in image files: finding the files, class names with probabilities.

Shapes: b batch, k classes of highest probability, c y x channels, rows and columns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vision.data import EXTENSIONS, Split, make_source, told_unreadable, unreadable
from vision.images import ImageError
from zoo.layers.check import integer
from zoo.merge import describe
from zoo.preprocess import normalize
from zoo.surgery import evaluating


class Prediction(NamedTuple):
    """What a classifier sees in one image.

    Attributes:
        path: The file.
        classes: Names and probabilities, the highest first.
    """

    path: Path
    classes: tuple[tuple[str, float], ...]


def find_images(patterns: Iterable[str | Path]) -> list[Path]:
    """Image files, each once, in natural order (2.jpg before 10.jpg).

    A file is taken whatever its suffix is. Of a folder its own images are taken, not those of
    folders in it, and of a wildcard (`shots/*.png`; `shots/**/*.jpg` for all levels) what has one
    of `vision.data.EXTENSIONS`. Hidden files are left out.

    Raises:
        FileNotFoundError: a pattern finds nothing.
    """
    found: dict[Path, Path] = {}  # by where it really is
    for pattern in patterns:
        for path in _matches(str(pattern)):
            found.setdefault(path.resolve(), path)
    if not found:
        raise FileNotFoundError("no images were given: name files, folders or wildcards")
    return sorted(found.values(), key=_natural)


def _matches(pattern: str) -> list[Path]:
    place = Path(pattern).expanduser()
    if place.is_file():
        return [place]
    inside = place.iterdir() if place.is_dir() else map(Path, glob(str(place), recursive=True))
    paths = [path for path in inside if _is_image(path)]
    if paths:
        return paths
    if place.is_dir():
        kinds = ", ".join(EXTENSIONS)
        raise FileNotFoundError(
            f"folder {pattern} holds no images ({kinds}); for those of its folders: '{place}/**/*'"
        )
    kind = "no image matches" if set(pattern) & set("*?[") else "there is no file or folder"
    raise FileNotFoundError(f"{kind} {pattern} (looked from {Path.cwd()})")


def _is_image(path: Path) -> bool:
    hidden = path.name.startswith(".")
    return path.suffix.lower() in EXTENSIONS and not hidden and path.is_file()


def _natural(path: Path) -> list[tuple[str, int]]:
    """Words and numbers in turn, numbers by their value."""
    return [
        (word.lower(), int(number or -1)) for word, number in re.findall(r"(\D*)(\d*)", str(path))
    ]


def readable(paths: Sequence[Path], bad_images: str = "stop") -> list[Path]:
    """The files that decode, by the rules of training: `vision.images`.

    Raises:
        ImageError: there are others and `bad_images` is `stop`, which names them, or none is left.
    """
    if bad_images not in ("stop", "skip"):
        raise ValueError(f"bad_images {bad_images!r} must be 'stop' or 'skip'")
    errors = unreadable([str(path) for path in paths])
    if errors and (bad_images == "stop" or len(errors) == len(paths)):
        remedy = " (--bad-images skip leaves them out)" if bad_images == "stop" else ""
        raise ImageError(told_unreadable(errors, remedy))
    if errors:
        print(f"warning: left out: {told_unreadable(errors)}", file=sys.stderr)
    return [path for path in paths if str(path) not in errors]


def image_source(model: Any, paths: Sequence[Path]) -> Any:
    """A source of the model's input pixels (b c y x), uint8, for a loader; see `vision.data`."""
    split = Split(torch.zeros(len(paths), dtype=torch.int64), 0.0, tuple(map(str, paths)))
    return make_source(split, model.card.preprocessing, train=False, in_memory=False)


def inputs_of(model: Any, pixels: Tensor) -> Tensor:
    """What the model takes (b c y x), in its dtype, from pixels as a source gives them."""
    images = normalize(pixels, model.card.preprocessing)
    return images.to(next(model.parameters()).dtype)


def logits_of(model: Any, pixels: Tensor) -> Tensor:
    """Outputs (b classes) for pixels as a source gives them (b c y x)."""
    return model(inputs_of(model, pixels))


def check_classifier(model: nn.Module) -> None:
    """Refuses a model whose outputs are no classes."""
    classes = getattr(model, "num_classes", None)
    if not classes or getattr(model, "global_pool", None) == "":
        what = "an output a token" if classes else "no classifier"
        raise ValueError(
            f"{describe(model)} has {what}: predictions need a model with num_classes of at least "
            "1 and trained weights for them"
        )


def top_classes(model: Any, pixels: Tensor, top_k: int = 5) -> dict[str, Tensor]:
    """The classes of highest probability.

    Args:
        model: A classifier with a card.
        pixels: As a source gives them (b c y x).
        top_k: How many; all where the model has fewer.

    Returns:
        `probabilities` (softmax over all classes, fp32) and `indices`, both (b k).
    """
    probabilities = logits_of(model, pixels).float().softmax(-1)
    k = min(integer("top_k", top_k, minimum=1), probabilities.shape[-1])
    values, indices = probabilities.topk(k, dim=-1)
    return {"probabilities": values, "indices": indices}


def named(
    paths: Sequence[Path], rows: dict[str, Tensor], names: Sequence[str] | None
) -> list[Prediction]:
    """Rows of `top_classes` for these files, by class names; "class 3" where there are none."""
    return [
        Prediction(
            path,
            tuple(
                (f"class {index}" if names is None else names[index], value)
                for index, value in zip(indices, values, strict=True)
            ),
        )
        for path, indices, values in zip(
            paths, rows["indices"].tolist(), rows["probabilities"].tolist(), strict=True
        )
    ]


@torch.no_grad()
def predict(
    model: Any,
    images: Iterable[str | Path],
    top_k: int = 5,
    *,
    batch_size: int = 32,
    bad_images: str = "stop",
) -> list[Prediction]:
    """What a model with a card sees in image files, with the preprocessing of its card.

    Args:
        model: A classifier; it computes on its device.
        images: Files, folders, wildcards: see `find_images`.
        top_k: Classes an image; all where the model has fewer.
        batch_size: Images a forward pass.
        bad_images: Unreadable files: `stop` names them, `skip` leaves them out.

    Raises:
        ValueError: the model has no classifier.
        FileNotFoundError: nothing is found.
        ImageError: a file cannot be read.
    """
    check_classifier(model)
    paths = readable(find_images(images), bad_images)
    source, device = image_source(model, paths), next(model.parameters()).device
    parts = []
    with evaluating(model):
        for start in range(0, len(paths), batch_size):
            keys = [(0, index) for index in range(start, min(start + batch_size, len(paths)))]
            pixels = source.__getitems__(keys)["images"].to(device)
            parts.append(top_classes(model, pixels, top_k))
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return named(paths, rows, model.card.class_names)
