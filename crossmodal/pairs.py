"""Pairs listed in a file: `pairs:FILE`, one object a line (.jsonl) or a table (.csv, .tsv).

| column | content |
|---|---|
| `image` | path, from the folder of the file; absolute paths and `..` are followed |
| `caption` | text; in JSONL also a list of texts |
| `split` | optional: `train` or `val`, in every row |

Other columns are not looked at. Rows with the same image are one image with several captions.
A table's first line names its columns. Text is UTF-8.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from crossmodal.rows import Options, PairError, Row, RowError, Table, texts_of, unlabelled
from vision.data import Split

DELIMITERS = {".csv": ",", ".tsv": "\t"}
LINES = (".jsonl", ".ndjson")


def read(name: str, options: Options) -> Table:
    """Reads a file of pairs.

    Raises:
        FileNotFoundError: no such file.
        PairError: a kind of file that is not read, or columns that are not there.
    """
    file = Path(name).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no file {file} (looked for {file.resolve()})")
    kind = file.suffix.lower()
    if kind not in (*LINES, *DELIMITERS):
        raise PairError(f"{file} must be one of {', '.join([*LINES, *DELIMITERS])}")
    rows, problems = [], []
    # Bytes that are not UTF-8 become surrogates, so that their row can be named.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        records = _objects(text) if kind in LINES else _table(text, file, options)
        for line, record in records:
            where = f"{file} line {line}"
            try:
                rows.append(_row(record(), where, file.parent, options))
            except RowError as error:
                problems.append(f"{where}: {error}")
    return Table(rows, problems, _images)


def _images(paths: Sequence[Any]) -> Split:
    # Not flipped: captions may say left and right.
    return Split(unlabelled(len(paths)), 0.0, paths=tuple(paths))


# A record is parsed when called, so that what is wrong with it is that row's problem alone.
Record = Callable[[], dict[str, Any]]


def _objects(text: IO[str]) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            yield number, partial(_object, line)


def _object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        hint = "" if _is_utf8(line) else ", nor UTF-8; save the file as UTF-8"
        raise RowError(
            f"not JSON, one object a line: {error.msg} at column {error.colno}{hint}"
        ) from None
    except (ValueError, RecursionError) as error:  # endless digits, endless brackets
        raise RowError(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise RowError(f"must be an object, not {type(record).__name__}")
    return record


def _is_utf8(text: str) -> bool:
    """Whether no byte had to be replaced by a surrogate, nor is a zero as in UTF-16."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _table(text: IO[str], file: Path, options: Options) -> Iterator[tuple[int, Record]]:
    reader = csv.reader(text, delimiter=DELIMITERS[file.suffix.lower()], strict=True)
    line, names = 1, None
    try:
        for fields in reader:
            if names is None:
                names = [field.strip() for field in fields]
                _check_columns(names, file, options)
            elif fields:
                yield line, partial(_fields, names, fields)
            line = reader.line_num + 1  # a record may take several lines: the next one's first
    except csv.Error as error:
        raise PairError(
            f"{file} line {line}: {error}; a field that begins with a quote must end with one, "
            "and double those inside"
        ) from None
    if names is None:
        raise PairError(f"{file} is empty")


def _fields(names: list[str], fields: list[str]) -> dict[str, Any]:
    if len(fields) != len(names):
        raise RowError(
            f"{len(fields)} fields, but the first line names {len(names)} columns; "
            "put fields that contain the delimiter in quotes"
        )
    return dict(zip(names, fields, strict=True))


def _check_columns(names: list[str], file: Path, options: Options) -> None:
    missing = [x for x in (options.image_column, options.caption_column) if x not in names]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise PairError(f"{file} line 1: {twice[0]!a} names several columns; rename all but one")
    if missing:
        raise PairError(
            f"{file} line 1: no column {' and '.join(missing)}; it names {', '.join(names)!a} "
            "(--image-column and --caption-column name others)"
        )


def _row(record: dict[str, Any], where: str, folder: Path, options: Options) -> Row:
    for column in (options.image_column, options.caption_column):
        if column not in record:
            raise RowError(
                f"no {column} among {', '.join(map(ascii, record)) or 'no fields'} "
                "(--image-column and --caption-column name others)"
            )
    (name,) = texts_of(record[options.image_column], options.image_column, most=1)
    captions = texts_of(record[options.caption_column], options.caption_column)
    split = record.get("split", "")
    if "split" in record and split not in ("train", "val"):
        raise RowError(f"split {split!r} must be train or val, in every row")
    path = os.path.realpath(folder / name)  # or a link could put an image into both parts
    if not os.path.isfile(path):
        raise RowError(f"no image {path} (paths count from the folder of the file)")
    return Row(path, captions, os.path.normpath(name), where, split)
