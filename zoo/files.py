"""Reading files of weights: safetensors, and what torch.save wrote, without running its code."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.sources import Source, WeightsError, listed

# Where training scripts keep the state dict, best first; an average is what was evaluated.
_WRAPPERS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema",
    "state_dict", "model_state_dict", "model", "module",
)  # fmt: skip


def read_file(path: str) -> Source:
    file = Path(path).expanduser()
    if not file.is_file():
        kind = "a folder (use local-dir:)" if file.is_dir() else "missing"
        raise WeightsError(f"{file} is {kind}")
    with file.open("rb") as opened:
        is_safetensors = opened.read(9)[8:] == b"{" or file.suffix == ".safetensors"
    name = f"file:{path}"
    if is_safetensors:
        return Source(name, read_safetensors(file))
    data = read_torch(file)
    tensors, inside = _state_dict(data, file)
    # Checkpoints of our training runs tell the grids of their positions.
    told = data.get("position_grids", {}) if inside else {}
    grids = {key: (int(y), int(x)) for key, (y, x) in told.items()}
    return Source(f"{name} ({inside})" if inside else name, tensors, None, grids)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise WeightsError(f"{path} was cut short or is no safetensors file: {error}") from error


def read_torch(path: Path) -> Any:
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
