"""Reading weights: from a name such as `file:PATH` to tensors and what is known about them."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.card import CardError, ModelCard

TENSORS_FILE = "model.safetensors"
CARD_FILE = "model.json"
FORMAT = 1

# Where training scripts keep the state dict, best first; an average is what was evaluated.
_WRAPPERS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema",
    "state_dict", "model_state_dict", "model", "module",
)  # fmt: skip


class WeightsError(ValueError):
    """Weights that cannot be read, or do not belong to the model."""


@dataclass(frozen=True)
class Source:
    """Tensors with what is known about them."""

    name: str
    tensors: dict[str, Tensor]
    card: ModelCard | None = None
    position_grids: dict[str, tuple[int, int]] = field(default_factory=dict)


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
    return Source(f"local-dir:{path}", _read_safetensors(tensors_file), card, grids)


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
    file = Path(path).expanduser()
    if not file.is_file():
        kind = "a folder (use local-dir:)" if file.is_dir() else "missing"
        raise WeightsError(f"{file} is {kind}")
    with file.open("rb") as opened:
        is_safetensors = opened.read(9)[8:] == b"{" or file.suffix == ".safetensors"
    name = f"file:{path}"
    if is_safetensors:
        return Source(name, _read_safetensors(file))
    data = _read_torch(file)
    tensors, inside = _state_dict(data, file)
    # Checkpoints of our training runs tell the grids of their positions.
    told = data.get("position_grids", {}) if inside else {}
    grids = {key: (int(y), int(x)) for key, (y, x) in told.items()}
    return Source(f"{name} ({inside})" if inside else name, tensors, None, grids)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise WeightsError(f"{path} was cut short or is no safetensors file: {error}") from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise WeightsError(f"{path} was cut short or is no file of torch.save") from error
        raise WeightsError(
            f"{path} holds a Python object ({found[1]}), and loading objects can run any code; "
            f"save only tensors: torch.save(model.state_dict(), path)"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        raise WeightsError(
            f"{path} was cut short or is no file of torch.save: {type(error).__name__}: {error}"
        ) from error


def _state_dict(data: Any, path: Path) -> tuple[dict[str, Tensor], str]:
    """The state dict inside `data`, and the names it was nested under."""
    inside: list[str] = []
    while isinstance(data, Mapping) and not _holds_tensors(data):
        wrapper = next((name for name in _WRAPPERS if isinstance(data.get(name), Mapping)), None)
        if wrapper is None:
            break
        inside.append(wrapper)
        data = data[wrapper]
    if not isinstance(data, Mapping) or not _holds_tensors(data):
        keys = f"keys {listed([str(key) for key in data])}" if isinstance(data, Mapping) else ""
        raise WeightsError(
            f"{path} holds no state dict: {type(data).__name__} {keys}; looked under "
            f"{', '.join(_WRAPPERS)}"
        )
    others = [str(key) for key, value in data.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(f"{path}: {listed(others)} of the state dict are no tensors")
    return {str(key): value for key, value in data.items()}, ".".join(inside)


def _holds_tensors(data: Mapping[Any, Any]) -> bool:
    """True where tensors outnumber tables: averaged models keep a counter beside their table."""
    tensors = sum(isinstance(value, Tensor) for value in data.values())
    return tensors > sum(isinstance(value, Mapping) for value in data.values())


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
