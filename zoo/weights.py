"""Weights on disk and into models: `save_pretrained`, `load_pretrained`.

Nothing is loaded by guess. Every tensor of the source and of the model is accounted for in a
`LoadReport`; some differences are understood and adapted (`zoo.merge.ADAPTATIONS`: the position
grid, the number of input channels, the number of classes, their names, the kind of attention,
inserted modules), any other is an error that shows both sides. What no tensor shows, such as the
activation, must agree as well. A model takes part by

- `first_conv`: name of the module that reads the image's channels,
- `get_classifier()`: the classifier module,
- `position_grids()`: `{key: (rows, columns)}` of its learned position embeddings (1, n, d), whose
  last rows * columns positions are the grid,
- `card`: its `ModelCard`.

Each is optional; without it the difference it explains is an error.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import agreement
from zoo.card import ModelCard, plain
from zoo.causes import explain
from zoo.copying import copy_all, refuse_infinite
from zoo.keys import clean_source, take_part
from zoo.layers.check import fraction
from zoo.layouts import find_layout
from zoo.merge import ADAPTATIONS, Merge, describe, position_grids
from zoo.report import LoadReport
from zoo.sources import (
    CARD_FILE,
    FORMAT,
    TENSORS_FILE,
    Source,
    WeightsError,
    listed,
    read_source,
    sha256_of,
)
from zoo.wrappers import unwrap

__all__ = [
    "LoadReport",
    "Source",
    "WeightsError",
    "apply_source",
    "load_pretrained",
    "read_source",
    "save_pretrained",
    "unwrap",
]


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Writes `model.safetensors` and `model.json`, from which the same model can be made again.

    The folder appears, or replaces an older one, as a whole: a process killed at any moment leaves
    the old folder or the new one. Wrappers (DDP, torch.compile, an averaged model) are taken off.

    Raises:
        WeightsError: the model was not made by `zoo.create_model`, or `folder` holds other files.
    """
    model = unwrap(model)
    card = card_of(model)
    if card is None or card.architecture is None:
        raise WeightsError(
            f"{type(model).__name__} does not know its registered name, so it could not be made "
            f"again; build it with zoo.create_model (zoo.register_model adds your own)"
        )
    folder = Path(folder).expanduser()
    _refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        _write_model(model, card, temporary)
        _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def card_of(model: nn.Module) -> ModelCard | None:
    """A model's card as it is now; None without one."""
    card = getattr(model, "card", None)
    if not isinstance(card, ModelCard):
        return None
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int) and card.options.get("num_classes", classes) != classes:
        return card.with_options(num_classes=classes)  # a timm network with another classifier
    return card


def _write_model(model: nn.Module, card: ModelCard, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors_file = folder / TENSORS_FILE
    save_file(_separate(model.state_dict()), tensors_file, metadata={"format": "pt"})
    data = {
        "format": FORMAT,
        **card.to_dict(),
        "position_grids": plain(position_grids(model), "position_grids"),
        "tensors": {"file": TENSORS_FILE, "sha256": sha256_of(tensors_file)},
        "versions": _versions(),
    }
    (folder / CARD_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    for path in (tensors_file, folder / CARD_FILE, folder):
        _fsync(path)


def _separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU tensors that share no memory, as safetensors wants them."""
    seen: set[int] = set()
    separate = {}
    for key, value in state.items():
        value = value.detach().cpu().contiguous()
        if value.data_ptr() in seen:
            value = value.clone()
        seen.add(value.data_ptr())
        separate[key] = value
    return separate


def _refuse_foreign(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise WeightsError(f"{folder} is in the way: save_pretrained writes a folder")
    if folder.is_dir():
        foreign = sorted(
            p.name for p in folder.iterdir() if p.name not in (TENSORS_FILE, CARD_FILE)
        )
        if foreign:
            raise WeightsError(
                f"{folder} holds other files ({listed(foreign)}), which replacing it would lose; "
                f"choose another folder"
            )


def _put_in_place(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        os.replace(temporary, folder)
    elif not _exchange(temporary, folder):
        old = temporary.with_name(temporary.name + ".old")
        os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    _fsync(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two paths in one step, where the system can (Linux: renameat2)."""
    import ctypes

    at_cwd, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("attention-zoo", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def load_pretrained(
    model: nn.Module,
    source: str,
    *,
    strict: bool = True,
    min_matched: float = 0.95,
    part: str | None = None,
    adapt: Iterable[str] = ADAPTATIONS,
    antialias: bool | None = None,
) -> LoadReport:
    """Loads weights into a model, adapted where the difference is understood.

    - Position embeddings are resampled from the source's grid (known from `model.json`; in a bare
      file taken as square).
    - The stem takes another number of channels so that a grey image gives the same response.
    - A classifier for other classes keeps its initial values; where both sides know their class
      names, rows of shared names are taken over.
    - Weights of another kind of attention, and of modules inserted into the model, keep theirs.

    The model's card takes over the source's preprocessing, licence and (with its classifier) class
    names. Dtype, device and `requires_grad` of the model stay. On an error nothing of the model has
    changed.

    Args:
        model: The model; wrappers are taken off.
        source: `file:PATH`, `local-dir:PATH`, `hf-hub:OWNER/REPO[@REV]`, `url:...#sha256=HEX`,
            `timm:NAME`, `torchvision:NAME` or `open_clip:ARCH/TAG`.
        strict: Whether an unexplained difference is an error; if not, one of tensors is listed, one
            of settings is a warning.
        min_matched: Least part, in [0, 1], of the model's values that must come from the source.
        part: Name in the source under which the model's tensors stand, where the source is a
            larger one: "backbone" for the keys backbone.blocks.0... of a detector. Left out for a
            file of the network alone.
        adapt: Which differences may be adapted, of `zoo.merge.ADAPTATIONS`; any other is an error.
        antialias: Whether positions are resampled with it; None follows the source's own rule,
            which is True but for families such as DINOv2.

    Raises:
        WeightsError: the source cannot be read, or does not belong to the model.
        ValueError: `min_matched` or `adapt` is not legal.
    """
    return apply_source(
        model,
        read_source(source),
        strict=strict,
        min_matched=min_matched,
        part=part,
        adapt=adapt,
        antialias=antialias,
    )


def apply_source(
    model: nn.Module,
    source: Source,
    *,
    allowed: Iterable[str] = (),
    strict: bool = True,
    min_matched: float = 0.95,
    part: str | None = None,
    adapt: Iterable[str] = ADAPTATIONS,
    antialias: bool | None = None,
) -> LoadReport:
    """`load_pretrained` from a source already read.

    Args:
        allowed: Options in which the model may differ from the source on purpose.
    """
    model, adapt = unwrap(model), _known(adapt)
    min_matched = fraction("min_matched", min_matched)
    given = _own_part(model, source, part)
    layout = find_layout(given, model)
    source = given if layout is None else layout.translate(given, model)
    doubts = agreement.Doubts(model, source, set(allowed), strict)
    doubts.compare_options()
    merge = Merge(model, source, adapt, _antialias(source, antialias))
    agreement.refuse_meta(merge)
    _check_fit(merge, strict, min_matched)
    doubts.compare_settings(given.network)
    refuse_infinite(source.name, merge.state, merge.values)
    doubts.warn_of_twin(source)
    notes = [*agreement.notes_of(model, given, source, merge), *doubts.notes]
    report = merge.report(layout.name if layout else None, notes)
    card = _new_card(model, source, merge)
    copy_all(merge.state, merge.values)
    if card is not None:
        model.card = card  # type: ignore[assignment]
    return report


def _known(adapt: Iterable[str]) -> tuple[str, ...]:
    names = (adapt,) if isinstance(adapt, str) else tuple(adapt)
    for name in names:
        if name not in ADAPTATIONS:
            raise ValueError(f"adapt: unknown {name!r}; it may hold {', '.join(ADAPTATIONS)}")
    return names


def _own_part(model: nn.Module, source: Source, part: str | None) -> Source:
    source = clean_source(source, model)
    return source if part is None else clean_source(take_part(source, part), model)


def _antialias(source: Source, asked: bool | None) -> bool:
    if asked is not None:
        return asked
    return bool(source.card is None or source.card.extra.get("antialias", True))


def _check_fit(merge: Merge, strict: bool, min_matched: float) -> None:
    if merge.refused:
        shown = [f"{key}: {how} (adapt {name!r})" for key, (name, how) in merge.refused.items()]
        needed = sorted({name for name, _ in merge.refused.values()})
        raise WeightsError(
            f"{merge.source.name} fits {describe(merge.model)} only if adapted: "
            f"{listed(shown, 3)}; allow it by adding {', '.join(map(repr, needed))} to adapt"
        )
    report = merge.report()
    if strict and (report.missing or report.unexpected):
        raise WeightsError(explain(merge, "does not fit"))
    if report.matched_fraction < min_matched:
        part = f"{100 * report.matched_fraction:.1f} %"
        raise WeightsError(explain(merge, f"matches only {part} of the values of"))


def _new_card(model: nn.Module, source: Source, merge: Merge) -> ModelCard | None:
    card = getattr(model, "card", None)
    if not isinstance(card, ModelCard):
        return None
    changes: dict[str, Any] = {"source": source.name}
    if source.card is not None:
        changes["license"] = source.card.license
        changes["extra"] = source.card.extra
        changes["preprocessing"] = source.card.preprocessing.adapted(
            size=card.preprocessing.size, in_chans=card.preprocessing.in_chans
        )
        if card.class_names is None and _has_classes(merge, source.card.class_names):
            changes["class_names"] = source.card.class_names
    return replace(card, **changes)


def _has_classes(merge: Merge, names: tuple[str, ...] | None) -> bool:
    """Whether the classifier is the source's, row by row the named classes."""
    taken = {key for key in merge.values if key not in merge.adapted}
    return (
        names is not None
        and bool(merge.head)
        and merge.head <= taken
        and all(len(merge.values[key]) == len(names) for key in merge.head)
    )
