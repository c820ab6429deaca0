"""Image data sets, checked before training, and the sources that training reads batches from.

A source fetches whole batches by (epoch, sample) keys, as unnormalised pixels. Small images live in
memory and are augmented by batch; others are decoded one by one, in worker processes if asked.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vision.augment import Augment, BatchAffine, sample_transform
from vision.images import MODES, ImageError, decode
from zoo.card import Preprocessing
from zoo.preprocess import resize_and_crop
from zoo.rng import seeded

Key = tuple[int, int]  # epoch, sample index
SPECS = ("digits", "emoji", "folder:PATH")
EXTENSIONS = [
    ".png",
    ".jpg",
    ".jpeg",
    ".jfif",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".jp2",
    ".avif",
]


@dataclass(frozen=True)
class Split:
    """Images with a class index each: files, or pixels in memory."""

    targets: Tensor  # n
    hflip: float
    paths: tuple[str, ...] = ()
    pixels: np.ndarray | None = None  # n y x, or n y x c with RGB; uint8

    def __len__(self) -> int:
        return len(self.targets)

    def image(self, index: int, channels: int) -> Image.Image:
        """One image in mode L or RGB."""
        if self.pixels is None:
            return decode(self.paths[index], channels)
        return Image.fromarray(self.pixels[index]).convert(MODES[channels])

    def subset(self, indices: Sequence[int]) -> Split:
        """Some of the images, in this order."""
        chosen = list(indices)
        return replace(
            self,
            targets=self.targets[chosen],
            paths=tuple(self.paths[index] for index in chosen if self.paths),
            pixels=None if self.pixels is None else self.pixels[chosen],
        )


def typical_size(split: Split, samples: int = 32) -> tuple[int, int]:
    """Rows and columns of the image of median area, of up to `samples` spread over the split.

    Of files only the headers are read; (0, 0) without images.
    """
    if not len(split):
        return 0, 0
    if split.pixels is not None:
        return split.pixels.shape[1], split.pixels.shape[2]
    sizes = []
    for index in range(0, len(split), -(-len(split) // samples)):
        with Image.open(split.paths[index]) as image:
            sizes.append((image.height, image.width))
    return sorted(sizes, key=math.prod)[len(sizes) // 2]


@dataclass(frozen=True)
class ImageDataset:
    """A data set for classification.

    Attributes:
        name: Its spec.
        class_names: In the order of the class indices, which come from the training images.
        in_chans: Channels of the images.
        train, val: The two parts; one that was not asked for is empty.
        report: Counts: images of each part, `skipped` files and the first of their names, classes
            without validation images.
    """

    name: str
    class_names: tuple[str, ...]
    in_chans: int
    train: Split
    val: Split
    report: dict[str, Any] = field(default_factory=dict)


def load_dataset(
    spec: str,
    *,
    bad_images: str = "stop",
    class_names: Sequence[str] | None = None,
    splits: Sequence[str] = ("train", "val"),
) -> ImageDataset:
    """Opens a data set and checks every image of it.

    Args:
        spec: `digits` (scikit-learn's 1,797 real 8x8 images, a fixed stratified fifth for
            validation), `emoji` (1,636 colour drawings of 32x32 in 8 categories, on white; a fixed
            fifth of each for validation, no base name in both parts), or `folder:PATH`
            (PATH/train/CLASS/..., PATH/val/CLASS/...; files of other kinds than `EXTENSIONS` are
            not looked at).
        bad_images: Unreadable files: `stop` names them, `skip` leaves them out and counts them.
        class_names: Classes of a trained model, in its order; those of the training part otherwise.
        splits: Parts to open.

    Raises:
        ValueError: unknown spec, classes that do not fit, an empty class, unreadable files.
        FileNotFoundError: no such folder, or no train or val in it.
    """
    if bad_images not in ("stop", "skip"):
        raise ValueError(f"bad_images {bad_images!r} must be 'stop' or 'skip'")
    kind, _, path = spec.partition(":")
    if spec == "digits":
        return _digits(class_names)
    if spec == "emoji":
        return _emoji(class_names)
    if kind == "folder" and path:
        return _folder(spec, Path(path).expanduser(), bad_images, class_names, tuple(splits))
    near = difflib.get_close_matches(kind, ["digits", "emoji", "folder"], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if kind == "folder":
        hint = "; the path is missing"
    if Path(spec).is_dir():
        hint = f"; did you mean folder:{spec}?"
    raise ValueError(f"unknown data {spec!r}: valid are {', '.join(SPECS)}{hint}")


def _digits(class_names: Sequence[str] | None) -> ImageDataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    names = tuple(str(name) for name in data.target_names)
    _same_classes("digits", class_names, names)
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    rows = np.arange(len(pixels))
    train, val = train_test_split(rows, test_size=0.2, stratify=data.target, random_state=0)
    targets = torch.from_numpy(data.target.astype(np.int64))
    first, second = (Split(targets[part], 0.0, pixels=pixels[part]) for part in (train, val))
    report = {"train": len(train), "val": len(val), "skipped": 0}
    return ImageDataset("digits", names, 1, first, second, report)


def _emoji(class_names: Sequence[str] | None) -> ImageDataset:
    from vision.emoji import CATEGORIES, load_emoji

    _same_classes("emoji", class_names, CATEGORIES)
    emoji = load_emoji()
    index = {name: target for target, name in enumerate(CATEGORIES)}
    targets = np.array([index.get(category, -1) for category in emoji.categories])
    val = emoji.held_out()
    pixels, known = emoji.on(), targets >= 0
    # Not flipped: letters, digits, arrows and pointing hands would become other signs.
    first, second = (
        Split(torch.from_numpy(targets[part]), 0.0, pixels=pixels[part])
        for part in (known & ~val, known & val)
    )
    report = {"train": len(first), "val": len(second), "skipped": 0}
    return ImageDataset("emoji", CATEGORIES, 3, first, second, report)


def _same_classes(spec: str, wanted: Sequence[str] | None, names: Sequence[str]) -> None:
    if wanted is not None and list(wanted) != list(names):
        raise ValueError(
            f"the model knows the classes {_some(wanted)}, but {spec} has {_some(names)}"
        )


def _folder(
    spec: str, root: Path, bad: str, class_names: Sequence[str] | None, splits: tuple[str, ...]
) -> ImageDataset:
    needed = splits if class_names is not None else tuple({"train", *splits})
    _check_root(root, needed)
    names = tuple(class_names) if class_names is not None else _classes(root / "train")
    files = {split: _files(root / split, names) for split in splits}
    skipped: list[str] = []
    for split, found in files.items():
        if not found:
            raise ValueError(f"{root / split} holds no images ({', '.join(EXTENSIONS)})")
        if split == "train":
            _check_classes(root / split, names, found, "has no images")
    errors = unreadable([path for found in files.values() for path, _ in found])
    if errors and bad == "stop":
        raise ImageError(told_unreadable(errors, " (--bad-images skip leaves them out)"))
    if errors:
        skipped = list(errors)
        print(f"warning: {len(skipped)} unreadable image files are left out", file=sys.stderr)
        files = {s: [f for f in found if f[0] not in errors] for s, found in files.items()}
        for split, found in files.items():
            if not found:
                raise ImageError(f"{root / split} has no readable image")
        if "train" in files:
            _check_classes(root / "train", names, files["train"], "has no readable image")
    missing = _without_images(names, files["val"]) if "val" in files else []
    if missing:
        print(f"warning: no validation images of {_some(missing)}", file=sys.stderr)
    parts = {split: _split(found) for split, found in files.items()}
    report = {
        **{split: len(part) for split, part in parts.items()},
        "skipped": len(skipped),
        "skipped_files": skipped[:10],
        "classes_without_val_images": missing,
    }
    empty = _split([])
    return ImageDataset(spec, names, 3, parts.get("train", empty), parts.get("val", empty), report)


def _split(files: list[tuple[str, int]]) -> Split:
    targets = torch.tensor([target for _, target in files], dtype=torch.int64)
    return Split(targets, hflip=0.5, paths=tuple(path for path, _ in files))


def _check_root(root: Path, splits: Iterable[str]) -> None:
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root} (looked in {root.resolve()})")
    for split in sorted(splits):
        if not (root / split).is_dir():
            there = _some(sorted(path.name for path in root.iterdir())) or "nothing"
            raise FileNotFoundError(f"{root} needs folders train and val; it holds: {there}")


def _classes(folder: Path) -> tuple[str, ...]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} holds no class folders")
    return tuple(names)


def _files(folder: Path, names: Sequence[str]) -> list[tuple[str, int]]:
    """Image files with their class index, in a fixed order."""
    extra = sorted(set(_classes(folder)) - set(names))
    if extra:
        raise ValueError(
            f"{folder} has classes that the training images lack: {_some(extra)}; "
            f"training has {_some(names)}"
        )
    found = []
    for index, name in enumerate(names):
        for root, folders, files in os.walk(folder / name, followlinks=True):
            above = os.path.realpath(root)
            folders[:] = sorted(
                sub
                for sub in folders
                if not sub.startswith(".")
                and not (above + os.sep).startswith(os.path.realpath(f"{root}/{sub}") + os.sep)
            )
            found += [
                (os.path.join(root, file), index)
                for file in sorted(files)
                if os.path.splitext(file)[1].lower() in EXTENSIONS and not file.startswith(".")
            ]
    return found


def _check_classes(
    folder: Path, names: Sequence[str], files: list[tuple[str, int]], complaint: str
) -> None:
    missing = _without_images(names, files)
    if missing:
        raise ValueError(f"{folder}: class {_some(missing)} {complaint}")


def _without_images(names: Sequence[str], files: list[tuple[str, int]]) -> list[str]:
    present = {index for _, index in files}
    return [name for index, name in enumerate(names) if index not in present]


def unreadable(paths: Sequence[str]) -> dict[str, str]:
    """Files that do not decode, with the reason; each is decoded once, in threads."""

    def check(path: str) -> str | None:
        try:
            decode(path)
        except ImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        found = zip(paths, pool.map(check, paths), strict=True)
        return {path: reason for path, reason in found if reason is not None}


def told_unreadable(errors: Mapping[str, str], remedy: str = "") -> str:
    """How many files of `unreadable` there are, and the first ten reasons."""
    reasons = [*list(errors.values())[:10], *(["..."] if len(errors) > 10 else [])]
    return "\n  ".join([f"{len(errors)} unreadable image files{remedy}:", *reasons])


def _some(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")


def make_source(
    split: Split,
    preprocessing: Preprocessing,
    *,
    train: bool,
    augment: Augment | None = None,
    seed: int = 0,
    in_memory: bool | None = None,
) -> MemorySource | FileSource:
    """A source of batches for a loader.

    Args:
        split: The images.
        preprocessing: The model's; decides size and channels.
        train: Whether images are augmented.
        augment: How; the default `Augment` where None. Unused without `train`.
        seed: Keys every random number, with epoch and sample.
        in_memory: By default whether images at the model's size are small (64 pixels a side, 1 GiB
            in all).
    """
    if preprocessing.in_chans not in MODES:
        raise ValueError(f"images have 1 or 3 channels, the model takes {preprocessing.in_chans}")
    if in_memory is None:
        rows, cols = preprocessing.size
        size = len(split) * preprocessing.in_chans * rows * cols
        in_memory = max(rows, cols) <= 64 and size <= 2**30
    kind = MemorySource if in_memory else FileSource
    return kind(split, preprocessing, (augment or Augment()) if train else None, seed)


class MemorySource:
    """Images decoded once to the model's size; augmented by batch."""

    at_once = 512  # samples

    def __init__(
        self, split: Split, preprocessing: Preprocessing, augment: Augment | None, seed: int
    ) -> None:
        self.targets, self.seed = split.targets, seed
        resize = resize_and_crop(preprocessing)

        def read(index: int) -> Tensor:
            return resize(split.image(index, preprocessing.in_chans))

        with ThreadPoolExecutor() as pool:
            images = list(pool.map(read, range(len(split))))
        shape = (0, preprocessing.in_chans, *preprocessing.size)
        self.images = torch.stack(images) if images else torch.empty(shape, dtype=torch.uint8)
        hflip = _hflip(augment, split)
        self.single = sample_transform(augment, preprocessing, hflip, in_memory=True)
        self.batched = None
        if augment is not None and (
            hflip or (augment.spatial in ("auto", "affine") and augment.moves)
        ):
            self.batched = BatchAffine(augment, hflip, len(split), seed)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, keys: list[Key]) -> dict[str, Tensor]:
        """Keys -> images (b c y x) uint8, or float32 in [0, 1]; targets, ids (b,)."""
        ids = torch.tensor([index for _, index in keys])
        images = self.images[ids]
        if self.single is not None:
            images = torch.stack(
                [
                    _seeded(self.single, x, self.seed, key)
                    for x, key in zip(images, keys, strict=True)
                ]
            )
        if self.batched is not None:
            images = self.batched(images, [int(epoch) for epoch, _ in keys], ids)
        return {"images": images, "targets": self.targets[ids], "ids": ids}


class FileSource:
    """Images decoded and augmented one by one, each time they are asked for."""

    def __init__(
        self, split: Split, preprocessing: Preprocessing, augment: Augment | None, seed: int
    ) -> None:
        self.split, self.seed, self.channels = split, seed, preprocessing.in_chans
        self.targets = split.targets
        self.random = augment is not None
        hflip = _hflip(augment, split)
        self.transform: Any = sample_transform(augment, preprocessing, hflip, in_memory=False)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, keys: list[Key]) -> dict[str, Tensor]:
        """Keys -> images (b c y x) uint8; targets, ids (b,)."""
        images = []
        for key in keys:
            image = self.split.image(key[1], self.channels)
            images.append(
                _seeded(self.transform, image, self.seed, key)
                if self.random
                else self.transform(image)
            )
        ids = torch.tensor([index for _, index in keys])
        return {"images": torch.stack(images), "targets": self.targets[ids], "ids": ids}


def _hflip(augment: Augment | None, split: Split) -> float:
    if augment is None:
        return 0.0
    return split.hflip if augment.hflip is None else augment.hflip


def _seeded(transform: Any, image: Any, seed: int, key: Key) -> Tensor:
    # Plain integers: numpy's hash to other seeds.
    with seeded(seed, "sample", int(key[0]), int(key[1])):
        return transform(image)
