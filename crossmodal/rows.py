"""From the rows of files, shards or tables to the two parts of a data set.

Whatever the source, the same is asked of a row: an image that opens, captions that say something,
and that no image stands in both parts. Bad rows are named all at once, before training.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vision.data import Split
from vision.images import ImageError
from zoo.rng import derive_seed

HOMES = {"pairs": "crossmodal.pairs", "wds": "crossmodal.shards", "hf": "crossmodal.hub"}
MOST = 10  # bad rows named in one message


class PairError(ValueError):
    """Rows, a file or a shard that cannot be used; the message names them."""


class RowError(ValueError):
    """What is wrong with one row; the message does not name the row."""


@dataclass(frozen=True)
class Options:
    """How rows are read: the arguments of `load_pairs` of the same names."""

    val: str | None = None
    val_share: float = 0.1
    bad_rows: str = "stop"
    check_images: bool = True
    image_column: str = "image"
    caption_column: str = "caption"


@dataclass(frozen=True)
class Row:
    """An image and its captions.

    Attributes:
        image: What the table opens; rows with the same are one.
        captions: At least one.
        key: Decides, by its hash, on which side of a division the image comes.
        where: Names the row in messages.
        split: `train`, `val`, or empty where the data does not tell.
    """

    image: Hashable
    captions: tuple[str, ...]
    key: str
    where: str
    split: str = ""


@dataclass(frozen=True)
class Table:
    """What a reader found: rows, what is wrong with others, and how images are opened."""

    rows: list[Row]
    problems: list[str]
    images: Callable[[Sequence[Any]], Split]


Part = tuple[Split, tuple[tuple[str, ...], ...]]


def open_rows(spec: str, options: Options) -> tuple[Part, Part, list[str]]:
    """Reads a spec -> images and captions of training and validation, and the rows left out."""
    table, skipped = _read(spec, options)
    if options.val is None:
        train, val = divide(table.rows, options.val_share)
        return _part(table, train), _part(table, val), skipped
    other, more = _read(options.val, options)
    # Of two sources that tell their parts apart themselves, each gives the one it is named for.
    train = [row for row in table.rows if row.split != "val"]
    val = [row for row in other.rows if row.split != "train"]
    seen = {row.image: row for row in train}
    both = [row for row in val if row.image in seen]
    if both:
        first = both[0]
        raise PairError(
            f"{len(both)} validation images are training images too: {first.where} is "
            f"{seen[first.image].where}"
        )
    return _part(table, train), _part(other, val), skipped + more


def divide(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Training and validation rows: as the data says, else `share` of them by their keys' hash.

    Between 0 and 1, a share gives each side a row if there are two.
    """
    if any(row.split for row in rows):
        return [row for row in rows if row.split != "val"], [r for r in rows if r.split == "val"]
    number = round(share * len(rows))
    if 0 < share < 1 and len(rows) > 1:
        number = min(max(number, 1), len(rows) - 1)
    order = sorted(range(len(rows)), key=lambda i: derive_seed("val", rows[i].key))
    held = set(order[:number])
    train = [row for i, row in enumerate(rows) if i not in held]
    return train, [row for i, row in enumerate(rows) if i in held]


def texts_of(value: object, name: str, most: int | None = None) -> tuple[str, ...]:
    """A text, or a list of up to `most`, without repeats and space around.

    Raises:
        RowError: none, too many, an empty one, or one that is not UTF-8.
    """
    texts: list[str] = []
    values = value if isinstance(value, list | tuple) else [value]
    if not values or len(values) > (most or len(values)):
        raise RowError(f"{name} lists {len(values)} texts, not {most or 'one or more'}")
    for text in values:
        if not isinstance(text, str):
            raise RowError(f"{name} must be text, not {text!r}")
        if not text.strip():
            raise RowError(f"{name} is empty")
        if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RowError(f"{name} {text!a} is not UTF-8; save the file as UTF-8")
        texts.append(text.strip())
    return tuple(dict.fromkeys(texts))


def unlabelled(number: int) -> Tensor:
    """Targets of images without classes."""
    return torch.zeros(number, dtype=torch.int64)


def _part(table: Table, rows: Sequence[Row]) -> Part:
    return table.images([row.image for row in rows]), tuple(row.captions for row in rows)


def _read(spec: str, options: Options) -> tuple[Table, list[str]]:
    """The usable rows of a spec, one an image, and the others as messages."""
    table = _reader(spec)(spec.partition(":")[2], options)
    rows, conflicts = _merge(table.rows)
    rows, untold = _told(rows)
    rows, broken = _opening(rows, table) if options.check_images else (rows, [])
    problems = [*table.problems, *conflicts, *untold, *broken]
    if problems and options.bad_rows == "stop":
        shown = problems[:MOST] + (["..."] if len(problems) > MOST else [])
        raise PairError(
            f"{len(problems)} rows of {spec} cannot be used (--bad-rows skip leaves them out):\n  "
            + "\n  ".join(shown)
        )
    if problems:
        print(f"warning: {len(problems)} rows of {spec} are left out", file=sys.stderr)
    if not rows:
        raise PairError(f"{spec} holds no {'usable ' if problems else ''}pair")
    return replace(table, rows=rows), problems


def _reader(spec: str) -> Callable[[str, Options], Table]:
    kind, _, rest = spec.partition(":")
    if kind not in HOMES or not rest:
        raise ValueError(f"val {spec!r} must be pairs:FILE, wds:PATTERN or hf:NAME")
    return importlib.import_module(HOMES[kind]).read


def _merge(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Rows of one image become one with all captions, where the first of them stood."""
    merged: dict[Hashable, Row] = {}
    problems = []
    for row in rows:
        first = merged.setdefault(row.image, row)
        if first.split != row.split:
            problems.append(
                f"{row.where}: the image is in split {row.split!r}, but in {first.split!r} at "
                f"{first.where}; all its captions must be in one"
            )
        elif first is not row:
            captions = tuple(dict.fromkeys(first.captions + row.captions))
            merged[row.image] = replace(first, captions=captions)
    return list(merged.values()), problems


def _told(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Those that name their split where any does, and what is wrong with the others."""
    first = next((row for row in rows if row.split), None)
    if first is None:
        return rows, []
    return [row for row in rows if row.split], [
        f"{row.where}: no split, but {first.where} has one; it must be in every row or in none"
        for row in rows
        if not row.split
    ]


def _opening(rows: Sequence[Row], table: Table) -> tuple[list[Row], list[str]]:
    """Rows whose image decodes, and what is wrong with the others; in threads."""
    images = table.images([row.image for row in rows])

    def problem(index: int) -> str | None:
        try:
            images.image(index, 3)
        except ImageError as error:
            return f"{rows[index].where}: {error}"
        return None

    def problems(start: int) -> list[str | None]:
        return [problem(index) for index in range(len(rows))[start : start + 256]]

    with ThreadPoolExecutor() as pool:  # by blocks: millions of futures would fill the memory
        found = list(chain.from_iterable(pool.map(problems, range(0, len(rows), 256))))
    good = [row for row, bad in zip(rows, found, strict=True) if bad is None]
    return good, [bad for bad in found if bad is not None]
