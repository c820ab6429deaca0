"""Pairs that show which part of an image a model reads: handwritten digits in known places.

| spec | image | caption |
|---|---|---|
| `strips:N` | N digits in a row, 8 x 8N | their names from left to right: `three seven one` |
| `needle:N` | a row of N cells, one digit among noise, 8 x 8N | its name |

The digits are scikit-learn's real ones; the training and the validation images are made of
different ones. Noise is other digits with their pixels shuffled, so that no cell stands out by
its grey values. All is drawn from keys: the same spec gives the same pairs anywhere.

Shapes: n images, k cells, c y x channels, rows and columns of a cell.
"""

from __future__ import annotations

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from crossmodal.data import PairDataset, Pairs, counts
from crossmodal.rows import unlabelled
from vision.data import Split, load_dataset
from zoo.rng import generator

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SAMPLES = {"train": 4000, "val": 1000}
SIDE = 8


def load_probe(spec: str) -> PairDataset:
    """Makes the pairs of `strips:N` or `needle:N`; `needle` has classes and positions."""
    kind, _, number = spec.partition(":")
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ValueError(f"{spec!r} must be {kind}:N, N at least 1, such as {kind}:8")
    digits, k = load_dataset("digits"), int(number)
    make = strips if kind == "strips" else needle
    parts = {
        name: make(split, SAMPLES[name], k, generator(kind, k, name))
        for name, split in (("train", digits.train), ("val", digits.val))
    }
    names = WORDS if kind == "needle" else ()
    report = {**counts(parts), "skipped": 0}
    return PairDataset(
        spec, 1, parts["train"], parts["val"], report, class_names=names, size=(SIDE, SIDE * k)
    )


def strips(digits: Split, n: int, k: int, random: torch.Generator) -> Pairs:
    """Rows of `k` digits, each drawn from all, with their names in order."""
    drawn = torch.randint(len(digits), (n, k), generator=random)
    captions = tuple((" ".join(WORDS[d] for d in row),) for row in digits.targets[drawn].tolist())
    return Pairs(_row(_cells(digits, drawn), unlabelled(n)), captions)


def needle(digits: Split, n: int, k: int, random: torch.Generator) -> Pairs:
    """One digit among `k - 1` cells of noise, as often in each place."""
    drawn = torch.randint(len(digits), (n, k), generator=random)
    position = torch.arange(n)[torch.randperm(n, generator=random)] % k
    cells = _cells(digits, drawn)
    order = torch.rand(n, k, SIDE * SIDE, generator=random).argsort(-1)
    noise = cells.flatten(2).gather(2, order).unflatten(2, (SIDE, SIDE))
    here = torch.nn.functional.one_hot(position, k).bool()[..., None, None]  # n k 1 1
    targets = digits.targets[drawn[torch.arange(n), position]]
    captions = tuple((WORDS[digit],) for digit in targets.tolist())
    return Pairs(_row(torch.where(here, cells, noise), targets), captions, position)


def _cells(digits: Split, drawn: Tensor) -> Tensor:
    assert digits.pixels is not None
    return torch.from_numpy(digits.pixels)[drawn]  # n k y x


def _row(cells: Tensor, targets: Tensor) -> Split:
    pixels: np.ndarray = rearrange(cells, "n k y x -> n y (k x)").numpy()
    return Split(targets, 0.0, pixels=pixels)
