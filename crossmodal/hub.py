"""Pairs through Hugging Face's `datasets`: `hf:NAME`, with the extra `streaming`.

NAME is what `datasets.load_dataset` takes (a name on the hub, or a folder such as images with a
`metadata.jsonl`), or a folder that `save_to_disk` wrote. Each row is an image and its caption or
list of captions: `image` and `caption`, or the columns that are named instead.

Training reads the split `train`, validation the first there is of `validation`, `val`, `test`.
A single split is divided. Rows are not compared: keep all captions of an image in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from crossmodal.rows import Options, PairError, Row, RowError, Table, texts_of, unlabelled
from vision.data import Split
from vision.images import ImageError, decode

HELD_OUT = ("validation", "val", "test")


@dataclass(frozen=True)
class TableImages(Split):
    """Images of tables, each read when asked for by the table's name and the row."""

    tables: dict[str, Any] | None = None
    column: str = "image"
    rows: tuple[tuple[str, str, int], ...] = ()

    def image(self, index: int, channels: int) -> Image.Image:
        """One image in mode L or RGB."""
        assert self.tables is not None
        name, split, row = self.rows[index]
        cell = self.tables[split][row][self.column]
        source = cell.get("bytes") or cell.get("path") if cell else None
        try:
            return decode(source or b"", channels)
        except ImageError as error:
            raise ImageError(f"{name} {split}[{row}]: {error}") from error


def read(name: str, options: Options) -> Table:
    """Reads the captions of a data set, and leaves its images where they are.

    Raises:
        ImportError: `datasets` is not installed.
        PairError: columns or splits that are not there.
    """
    tables = _tables(name, options)
    rows, problems = [], []
    for label, split in _splits(name, tables).items():
        for index, value in enumerate(tables[split].select_columns(options.caption_column)):
            where = f"hf:{name} split {split} row {index}"
            try:
                captions = texts_of(value[options.caption_column], options.caption_column)
            except RowError as error:
                problems.append(f"{where}: {error}")
            else:
                rows.append(Row((name, split, index), captions, f"{split}/{index}", where, label))
    return Table(rows, problems, partial(_images, tables, options.image_column))


def _images(tables: dict[str, Any], column: str, rows: Sequence[Any]) -> Split:
    return TableImages(unlabelled(len(rows)), 0.0, tables=tables, column=column, rows=tuple(rows))


def _tables(name: str, options: Options) -> dict[str, Any]:
    """Splits by name, with images undecoded, so that `vision.images` decodes them."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("hf: needs datasets: pip install 'attention-zoo[streaming]'") from error
    folder = Path(name).expanduser()
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            found: Any = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder) if folder.is_dir() else name)
    except Exception as error:  # of many kinds, by what is read and from where
        reason = error.__cause__ or error
        raise PairError(
            f"hf:{name} cannot be read by datasets: {type(reason).__name__}: {reason}; "
            f"look at it with datasets.load_dataset({name!r})"
        ) from error
    tables = dict(found) if isinstance(found, dict) else {"all": found}
    for split, table in tables.items():
        for column in (options.image_column, options.caption_column):
            if column not in table.column_names:
                raise PairError(
                    f"hf:{name} split {split} has no column {column}; it has "
                    f"{', '.join(table.column_names)} "
                    "(--image-column and --caption-column name others)"
                )
        kind = table.features[options.image_column]
        if not isinstance(kind, datasets.Image):
            raise PairError(f"hf:{name} column {options.image_column} holds {kind}, not images")
        tables[split] = table.cast_column(options.image_column, datasets.Image(decode=False))
    return tables


def _splits(name: str, tables: dict[str, Any]) -> dict[str, str]:
    """Names of the splits that are read, by the part they are for."""
    if len(tables) == 1:
        return {"": next(iter(tables))}
    held = next((split for split in HELD_OUT if split in tables), None)
    if "train" not in tables or held is None:
        raise PairError(
            f"hf:{name} has the splits {', '.join(tables)}; needed are train and one of "
            f"{', '.join(HELD_OUT)}, or a single one"
        )
    return {"train": "train", "val": held}
