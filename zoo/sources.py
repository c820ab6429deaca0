"""Reading weights: from a name such as `file:PATH` to tensors and what is known about them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.card import ModelCard

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
        network: The other library's network that the tensors belong to, whose settings can be
            compared; perhaps on the meta device.
        config: What another library's folder says of the model, from its config.json.
    """

    name: str
    tensors: dict[str, Tensor]
    card: ModelCard | None = None
    position_grids: dict[str, tuple[int, int]] = field(default_factory=dict)
    network: nn.Module | None = None
    config: dict[str, Any] = field(default_factory=dict)


def read_source(source: str) -> Source:
    """Reads what `source` names.

    - `file:PATH`, `local-dir:PATH`
    - `hf-hub:OWNER/REPO[@REV]`, `url:ADDRESS#sha256=HEX`
    - `timm:NAME[.TAG]`, `torchvision:NAME[.WEIGHTS]`, `open_clip:ARCH/TAG`

    Raises:
        WeightsError: there is no such source, or it cannot be read.
    """
    prefix, colon, rest = source.partition(":")
    if not colon or prefix not in SOURCES:
        hint = ""
        near = get_close_matches(prefix.lower().replace("-", "_"), _FOLDED)
        if source and Path(source).expanduser().exists():
            kind = "local-dir" if Path(source).expanduser().is_dir() else "file"
            hint = f"; did you mean {kind}:{source}?"
        elif prefix in ("http", "https"):
            hint = f"; did you mean url:{source}?"
        elif colon and near:  # Timm:, open-clip:, hf_hub:
            hint = f"; did you mean {_FOLDED[near[0]]}:{rest}?"
        raise WeightsError(f"unknown source {source!r}; available: {', '.join(_FORMS)}{hint}")
    if not rest:
        raise WeightsError(f"source {source!r} lacks a path or a name after the colon")
    return SOURCES[prefix](rest)


def _read_file(path: str) -> Source:
    from zoo.files import read_file

    return read_file(path)


def _read_local_dir(path: str) -> Source:
    from zoo.folders import read_folder

    folder = Path(path).expanduser()
    try:
        return read_folder(folder, f"local-dir:{path}")
    except WeightsError as error:
        if (folder / "model" / CARD_FILE).is_file():
            raise WeightsError(f"{error}; did you mean local-dir:{folder / 'model'}?") from error
        raise


def _read_hub(name: str) -> Source:
    from zoo.downloads import read_hub

    return read_hub(name)


def _read_url(url: str) -> Source:
    from zoo.downloads import read_url

    return read_url(url)


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
    "hf-hub": _read_hub,
    "url": _read_url,
    "timm": _read_timm,
    "torchvision": _read_torchvision,
    "open_clip": _read_open_clip,
}
_FOLDED = {prefix.replace("-", "_"): prefix for prefix in SOURCES}
_FORMS = (
    "file:PATH",
    "local-dir:PATH",
    "timm:NAME[.TAG]",
    "torchvision:NAME[.WEIGHTS]",
    "open_clip:ARCH/TAG",
    "hf-hub:OWNER/REPO[@REV]",
    "url:ADDRESS#sha256=HEX",
)


def read_json(path: Path) -> dict[str, Any]:
    """A table of JSON; one that names a key twice is refused, as it says two things."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_table)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON (cut short?): {error}") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} must hold a table, not a {type(data).__name__}")
    return data


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return table


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
