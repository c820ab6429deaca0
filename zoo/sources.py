"""Reading weights: from a name such as `file:PATH` to tensors and what is known about them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.card import CardError, ModelCard

TENSORS_FILE = "model.safetensors"
CARD_FILE = "model.json"
FORMAT = 1


class WeightsError(ValueError):
    """Weights that cannot be read, or do not belong to the model."""


@dataclass(frozen=True)
class Source:
    """Tensors with what is known about them.

    Attributes:
        name: What was asked for.
        tensors: By the names that the source gives them.
        card: Options, preprocessing and class names, as far as they are known.
        position_grids: Rows and columns of learned position embeddings.
        network: The other library's network that holds the tensors, whose settings can be compared.
        config: What another library's folder says of the model, from its config.json.
    """

    name: str
    tensors: dict[str, Tensor]
    card: ModelCard | None = None
    position_grids: dict[str, tuple[int, int]] = field(default_factory=dict)
    network: nn.Module | None = None
    config: dict[str, Any] = field(default_factory=dict)


def read_source(source: str) -> Source:
    """Reads `file:`, `local-dir:PATH`, `timm:`, `torchvision:NAME` or `open_clip:ARCH/TAG`."""
    prefix, colon, rest = source.partition(":")
    if not colon or prefix not in SOURCES:
        known = (
            "file:PATH, local-dir:PATH, timm:NAME[.TAG], torchvision:NAME[.WEIGHTS], "
            "open_clip:ARCH/TAG"
        )
        hint = ""
        if Path(source).expanduser().exists():
            kind = "local-dir" if Path(source).expanduser().is_dir() else "file"
            hint = f"; did you mean {kind}:{source}?"
        raise WeightsError(f"unknown source {source!r}; available: {known}{hint}")
    if not rest:
        raise WeightsError(f"source {source!r} lacks a path or a name after the colon")
    return SOURCES[prefix](rest)


def _read_local_dir(path: str) -> Source:
    from zoo.files import read_safetensors

    folder = Path(path).expanduser()
    data = _read_json(folder)
    position_grids = data.pop("position_grids", {})
    stored = data.pop("tensors", None)
    data.pop("versions", None)
    try:
        card = ModelCard.from_dict(data)
        grids = {key: (int(y), int(x)) for key, (y, x) in position_grids.items()}
        file, sha256 = stored["file"], stored["sha256"]
    except CardError as error:
        raise WeightsError(f"{folder / CARD_FILE}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{folder / CARD_FILE}: position_grids or tensors is not as save_pretrained writes it"
        ) from error
    tensors_file = folder / Path(file).name
    if not tensors_file.is_file():
        raise WeightsError(f"{tensors_file} is missing, which {folder / CARD_FILE} speaks of")
    if sha256_of(tensors_file) != sha256:
        raise WeightsError(
            f"{tensors_file} was cut short or changed after it was saved: its sha256 is not the "
            f"one in {folder / CARD_FILE}"
        )
    return Source(f"local-dir:{path}", read_safetensors(tensors_file), card, grids)


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CARD_FILE
    if not path.is_file():
        if not folder.is_dir():
            raise WeightsError(f"there is no folder {folder}")
        there = sorted(item.name for item in folder.iterdir())
        raise WeightsError(f"{path} is missing; the folder holds: {listed(there) or 'nothing'}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON (cut short?): {error}") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} must hold a table, not a {type(data).__name__}")
    version = data.pop("format", None)
    if version != FORMAT:
        raise WeightsError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    return data


def _read_file(path: str) -> Source:
    from zoo.files import read_file

    return read_file(path)


def _read_timm(name: str) -> Source:
    from zoo.hosts import read_timm

    return read_timm(name)


def _read_torchvision(name: str) -> Source:
    from zoo.hosts import read_torchvision

    return read_torchvision(name)


def _read_open_clip(name: str) -> Source:
    from zoo.hosts_open_clip import read_open_clip

    return read_open_clip(name)


SOURCES: dict[str, Callable[[str], Source]] = {
    "file": _read_file,
    "local-dir": _read_local_dir,
    "timm": _read_timm,
    "torchvision": _read_torchvision,
    "open_clip": _read_open_clip,
}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f", ... and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
