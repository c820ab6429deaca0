"""Folders of models: ours, those of timm, transformers and open_clip, or one file of weights.

What a folder's JSON says decides which library saved it and so which file holds the weights.
safetensors come before torch files. Every file name that JSON tells must be a plain name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.card import CardError, ModelCard
from zoo.files import read_file, read_safetensors
from zoo.folder_cards import describe_open_clip, describe_timm, describe_transformers
from zoo.sources import (
    CARD_FILE,
    FORMAT,
    TENSORS_FILE,
    Source,
    WeightsError,
    listed,
    read_json,
    sha256_of,
)

INDEX = ".index.json"  # after a file's name: which tensor is in which of its shards
_PLAIN = re.compile(r"\w[\w.-]*")
_KINDS = ((".safetensors",), (".bin", ".pth", ".pt"), (".npz",), (".onnx",))  # best first


@dataclass(frozen=True)
class _Library:
    """How a library lays out a model's folder.

    Attributes:
        name: Of the library.
        config: The file that describes the model.
        has: A key of that file.
        lacks: A key that only another library's file of the same name has.
        stems: Names of its weight files, without suffix.
        describe: What the file says, as a source without tensors.
    """

    name: str
    config: str
    has: str
    lacks: str
    stems: tuple[str, ...]
    describe: Callable[[Path, dict[str, Any], str], Source]

    def files(self) -> list[str]:
        """Weight files, best first; of each, the index of its shards after itself."""
        named = [f"{stem}{kind}" for kind in (".safetensors", ".bin") for stem in self.stems]
        return [f"{name}{end}" for name in named for end in ("", INDEX)]


_LIBRARIES = (
    _Library(
        "timm",
        "config.json",
        "architecture",
        "model_type",
        ("model", "pytorch_model"),
        describe_timm,
    ),
    _Library(
        "open_clip",
        "open_clip_config.json",
        "model_cfg",
        "",
        ("open_clip_model", "open_clip_pytorch_model"),
        describe_open_clip,
    ),
    _Library(
        "transformers",
        "config.json",
        "model_type",
        "",
        ("model", "pytorch_model"),
        describe_transformers,
    ),
)
# What tells about weights; files of other names are never asked of a hub.
TOLD_BY = (
    CARD_FILE,
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "open_clip_config.json",
    "README.md",
    *dict.fromkeys(x for library in _LIBRARIES for x in library.files() if x.endswith(INDEX)),
)


def read_folder(folder: Path, name: str) -> Source:
    """Reads the weights in a folder, with all that its files say about them.

    Args:
        folder: What `save_pretrained` wrote, here or in timm, transformers or open_clip; or any
            folder with one file of weights.
        name: Of the source.

    Raises:
        WeightsError: the folder holds no weights, several that it does not tell apart, or files
            that contradict each other.
    """
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {folder}")
    if (folder / CARD_FILE).is_file():
        return _read_ours(folder, name)
    library, config = _library(folder)
    file, others = _weight_file(folder, library)
    if others:  # the same weights twice, for all that the folder says
        name = f"{name} ({file}, not {listed(others)})"
    if library is None:
        return _read_weights(folder / file, name)
    told = library.describe(folder, config, name)
    tensors = _read_weights(folder / file, name).tensors
    return replace(told, tensors=tensors, config={"library": library.name, **config, **told.config})


def weight_files(folder: Path) -> Iterator[list[str]]:
    """Files in which weights may be, for a folder that has its JSON only; the best choice first."""
    if (folder / CARD_FILE).is_file():
        yield [TENSORS_FILE]
        return
    for library, _ in list(_matching(folder)) or [(library, {}) for library in _LIBRARIES]:
        for file in library.files():
            if not file.endswith(INDEX):
                yield [file]
            elif (folder / file).is_file():
                yield sorted(set(_weight_map(folder / file).values()))


def _read_ours(folder: Path, name: str) -> Source:
    """What `zoo.save_pretrained` wrote."""
    path = folder / CARD_FILE
    data = read_json(path)
    version = data.pop("format", None)
    if version != FORMAT:
        raise WeightsError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    position_grids = data.pop("position_grids", {})
    stored = data.pop("tensors", None)
    data.pop("versions", None)
    try:
        card = ModelCard.from_dict(data)
        grids = {key: (int(y), int(x)) for key, (y, x) in position_grids.items()}
        file, sha256 = stored["file"], stored["sha256"]
    except CardError as error:
        raise WeightsError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{path}: position_grids or tensors is not as save_pretrained writes it"
        ) from error
    tensors_file = _beside(path, file)
    if sha256_of(tensors_file) != sha256:
        raise WeightsError(
            f"{tensors_file} was cut short or changed after it was saved: its sha256 is not the "
            f"one in {path}"
        )
    return Source(name, read_safetensors(tensors_file), card, grids)


def _library(folder: Path) -> tuple[_Library | None, dict[str, Any]]:
    """The library that saved the folder; where two did, the first that has weights there."""
    found = list(_matching(folder))
    for library, config in found:
        if any((folder / file).is_file() for file in library.files()):
            return library, config
    return found[0] if found else (None, {})


def _matching(folder: Path) -> Iterator[tuple[_Library, dict[str, Any]]]:
    for library in _LIBRARIES:
        if (folder / library.config).is_file():
            config = read_json(folder / library.config)
            if library.has in config and library.lacks not in config:
                yield library, config


def _weight_file(folder: Path, library: _Library | None) -> tuple[str, list[str]]:
    """The file to read, or the index of its shards, and those passed over for it."""
    if library is not None:
        named = [file for file in library.files() if (folder / file).is_file()]
        if named:
            return named[0], named[1:]
    kinds = list(_lone_files(folder))
    if not kinds:
        there = listed(sorted(item.name for item in folder.iterdir())) or "nothing"
        suffixes = ", ".join(suffix for kind in _KINDS for suffix in kind)
        raise WeightsError(
            f"{folder / CARD_FILE} is missing; the folder holds: {there}; besides those of "
            f"zoo.save_pretrained, folders of timm, transformers and open_clip can be read, and "
            f"any with one file of weights ({suffixes})"
        )
    (file, *more), *others = kinds
    if more:
        raise WeightsError(
            f"{folder} holds several files of weights: {listed([file, *more])}; name one as "
            f"file:{folder / file}"
        )
    return file, [name for names in others for name in names]


def _lone_files(folder: Path) -> Iterator[list[str]]:
    """Files of weights by kind, best first; shards are part of their index."""
    names = sorted(x.name for x in folder.iterdir() if x.is_file() and not x.name.startswith("."))
    indices = [name for name in names if name.endswith(INDEX)]
    shards = {file for index in indices for file in _weight_map(folder / index).values()}
    for kinds in _KINDS:
        found = [x for x in names if x.removesuffix(INDEX).endswith(kinds) and x not in shards]
        if found:
            yield found


def _read_weights(path: Path, name: str) -> Source:
    """Tensors of one file, or of all shards of an index."""
    if path.name.endswith(INDEX):
        return Source(name, _read_shards(path))
    found = read_file(str(path))
    inside = found.name.removeprefix(f"file:{path}")  # what they were nested under
    return replace(found, name=name + inside)


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Each shard must hold exactly the tensors that the index says, so each counts once."""
    wanted: dict[str, set[str]] = {}
    for key, file in _weight_map(index).items():
        wanted.setdefault(file, set()).add(key)
    tensors: dict[str, Tensor] = {}
    for file, keys in wanted.items():
        path = _beside(index, file)
        found = read_file(str(path)).tensors
        if found.keys() != keys:
            missing, more = sorted(keys - found.keys()), sorted(found.keys() - keys)
            raise WeightsError(
                f"{path} and {index.name} disagree: the file lacks {listed(missing) or 'nothing'}; "
                f"the index has elsewhere or lacks {listed(more) or 'nothing'}"
            )
        tensors |= found
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, of an index of shards."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise WeightsError(f"{index} has no weight_map of tensors to files")
    kind = Path(index.name.removesuffix(INDEX)).suffix
    for file in weight_map.values():
        _check_plain(file, index)
        if not file.endswith(kind):
            raise WeightsError(f"{index} speaks of {file!r}, which is no {kind} file")
    return dict(weight_map)


def _beside(path: Path, file: object) -> Path:
    """A file in the folder of the JSON file that speaks of it."""
    found = path.with_name(_check_plain(file, path))
    if not found.is_file():
        raise WeightsError(f"{found} is missing, which {path} speaks of")
    return found


def _check_plain(file: object, told_by: Path) -> str:
    # The name is checked, not where it leads: files of the hub's cache are links out of their
    # folder, into ../../blobs. JSON can make no links, so a plain name is what the user put there.
    if not isinstance(file, str) or not _PLAIN.fullmatch(file):
        raise WeightsError(
            f"{told_by} speaks of {file!r}; a file's name must be plain: letters, digits and _ . - "
            "only, no folder"
        )
    return file
