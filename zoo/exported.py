"""Files that `zoo.export` wrote: the card inside, and a function that runs one.

Shapes: b batch, c y x channels, rows and columns of an image, k outputs.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.card import CardError, ModelCard
from zoo.sources import CARD_FILE, FORMAT

if TYPE_CHECKING:
    import onnx

ONNX, PROGRAM = ".onnx", ".pt2"
INPUT = "images"  # the name of an ONNX file's input
_LARGEST_CARD = 1 << 24  # bytes; a card is far smaller


def card_of_export(path: str | os.PathLike[str]) -> ModelCard:
    """The card inside a file that `export_onnx` or `export_program` wrote; nothing is executed.

    Raises:
        CardError: it is no such file, or has no card.
        ImportError: onnx is missing, which reads `.onnx`.
    """
    path = _file(path)
    text = _onnx_text(path) if path.suffix == ONNX else _program_text(path)
    if text is None:
        raise CardError(f"{path} has no card: zoo.export did not write it")
    return _card(text, path)


def card_of_onnx(model: onnx.ModelProto, path: Path) -> ModelCard | None:
    """The card inside an ONNX model that was read from `path`; None where it is no export of ours.

    Raises:
        CardError: the card is damaged.
    """
    text = _card_text(model)
    return None if text is None else _card(text, path)


def _card(text: str, path: Path) -> ModelCard:
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise CardError(f"its format is not {FORMAT}, which this version reads")
        return ModelCard.from_dict(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CardError(f"{path}: the card inside cannot be read: {error}") from error


def open_export(path: str | os.PathLike[str]) -> Callable[[Tensor], Tensor]:
    """A function (b c y x) -> (b k) that runs the file on the CPU: onnxruntime's, or torch's.

    `torch.export.load` unpickles parts of a `.pt2` file: open only files that you trust.

    Raises:
        CardError: it is no such file.
        ImportError: onnxruntime is missing, which runs `.onnx`.
    """
    path = _file(path)
    if path.suffix == PROGRAM:
        return torch.export.load(path).module()
    require("onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (outputs,) = session.run(None, {INPUT: images.numpy()})
        return torch.from_numpy(outputs)

    return run


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path).expanduser()
    if path.suffix not in (ONNX, PROGRAM):
        raise CardError(f"{path} must end with {ONNX} or {PROGRAM}")
    if not path.is_file():
        raise CardError(f"there is no file {path}")
    return path


def _onnx_text(path: Path) -> str | None:
    require("onnx")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise CardError(f"{path} is not an ONNX file: {error}") from error
    return _card_text(model)


def _card_text(model: onnx.ModelProto) -> str | None:
    return next((entry.value for entry in model.metadata_props if entry.key == CARD_FILE), None)


def _program_text(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            found = [n for n in archive.namelist() if n.endswith(f"/extra/{CARD_FILE}")]
            if not found:
                return None
            if archive.getinfo(found[0]).file_size > _LARGEST_CARD:
                raise CardError(f"{path}: {found[0]} is too large for a card")
            return archive.read(found[0]).decode()
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise CardError(f"{path} is not a program of torch.export: {error}") from error


def require(*packages: str) -> None:
    """Raises an error that names the extra which brings what is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(
            f"ONNX needs {', '.join(missing)}, which an extra brings: "
            f'pip install "attention-zoo[onnx]"'
        )
