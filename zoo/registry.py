"""The registry of models: `create_model`, `list_models`, `register_model`.

A model is registered by a function that builds it:

    @register_model(preprocessing=Preprocessing(size=(32, 32)))
    def vit_micro_patch4_32(**options: Any) -> VisionTransformer:
        return VisionTransformer(**{"img_size": 32, "patch_size": 4, **options})

Names read `family_variant_patch_size[.tag]`. Options not in the function's own signature are those
of the class it returns. Other packages add models through the entry-point group
`attention_zoo.models`: each entry names a module whose import registers them.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import logging
import os
import re
import threading
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from torch import nn

from zoo.card import ModelCard, Preprocessing
from zoo.hosts import HOSTS, find_host, homes_of
from zoo.layers.check import integer, is_integer
from zoo.layouts import find_architecture
from zoo.merge import ADAPTATIONS
from zoo.sources import CARD_FILE
from zoo.weights import Source, WeightsError, apply_source, read_source

ENTRY_POINTS = "attention_zoo.models"
FOLDERS = ("local-dir", "hf-hub")  # they bring both the model and its weights
_HOMES = ("vision", "crossmodal")  # importing these registers the zoo's own models

Builder = Callable[..., nn.Module]
_logger = logging.getLogger("zoo")
_B = TypeVar("_B", bound=Builder)
_Init = TypeVar("_Init", bound=Callable[..., None])
Edit = Callable[[nn.Module, Any], object]
_E = TypeVar("_E", bound=Edit)


@dataclass(frozen=True)
class Entry:
    """A registered model: its builder, and what its name alone says about it."""

    name: str
    builder: Builder
    preprocessing: Preprocessing
    weights: str | None

    def valid_options(self) -> tuple[str, ...] | None:
        """Names of the options that the builder takes; None where they cannot be known."""
        parameters = inspect.signature(self.builder).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if len(names) < len(parameters):
            returned = typing.get_type_hints(self.builder).get("return", nn.Module)
            inits = inspect.signature(returned.__init__).parameters.values()
            if any(p.kind is p.VAR_KEYWORD for p in inits):
                return None
            names += [p.name for p in inits if p.name not in ("self", *names)]
        return tuple(names)


_entries: dict[str, Entry] = {}
_edits: dict[str, Edit] = {}
_discovery = threading.RLock()
_discovered = False


@overload
def register_model(builder: _B) -> _B: ...
@overload
def register_model(
    *,
    name: str | None = None,
    preprocessing: Preprocessing | None = None,
    weights: str | None = None,
) -> Callable[[_B], _B]: ...
def register_model(
    builder: Builder | None = None,
    *,
    name: str | None = None,
    preprocessing: Preprocessing | None = None,
    weights: str | None = None,
) -> Any:
    """Registers a function `(**options) -> nn.Module` as a model.

    Args:
        builder: The function, where the decorator is used without arguments.
        name: Name of the model; the function's name by default.
        preprocessing: What the model expects at its default size and channels.
        weights: Source that `pretrained=True` stands for.

    Raises:
        ValueError: another function has the name.
    """

    def register(build: _B) -> _B:
        entry = Entry(
            name=name or build.__name__,
            builder=build,
            preprocessing=preprocessing or Preprocessing(),
            weights=weights,
        )
        known = _entries.get(entry.name)
        if known is not None and _home(known.builder) != _home(build):
            raise ValueError(
                f"model {entry.name!r} is registered twice: by {_home(known.builder)} "
                f"and by {_home(build)}"
            )
        _entries[entry.name] = entry
        return build

    return register if builder is None else register(builder)


def register_edit(option: str) -> Callable[[_E], _E]:
    """Decorates `edit(model, value)`, which changes a built model where `option` is given.

    So `create_model(name, option=value)` works for every model, hosts of other libraries too. The
    edit notes the option in the model's card, from which a saved model is made again.
    """

    def register(edit: _E) -> _E:
        _edits[option] = edit
        return edit

    return register


def _home(builder: Builder) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"


def records_options(init: _Init) -> _Init:
    """Decorates a model's `__init__`: `self.card` keeps every option, defaults included.

    The options must be JSON types, so that `save_pretrained` can store them.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        options = dict(list(bound.arguments.items())[1:])  # without self
        card = ModelCard(architecture=None, options=options, preprocessing=Preprocessing())
        init(self, *args, **kwargs)
        card = replace(card, preprocessing=_fit(card.preprocessing, card.options))
        self.card = card  # type: ignore[assignment]

    return cast(_Init, wrapper)


def create_model(
    name: str,
    pretrained: bool | str = False,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    attention: str | None = None,
    position: str | None = None,
    class_names: Sequence[str] | None = None,
    part: str | None = None,
    adapt: Iterable[str] = ADAPTATIONS,
    antialias: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Builds a model by name.

    Where weights were loaded, `model.load_report` tells what became of each tensor (a
    `LoadReport`; else it is None), and the logger `zoo` says it at level INFO.

    Args:
        name: A registered name (see `list_models`), `timm:NAME`, `torchvision:NAME` or
            `open_clip:ARCH` (its visual tower) for a network of these libraries, or
            `local-dir:FOLDER` or `hf-hub:OWNER/REPO[@REV]` for what `save_pretrained` wrote, and
            for folders of timm, transformers and open_clip that hold a model known here.
        pretrained: False, True for the model's own weights, or a source of `load_pretrained`.
        num_classes: Outputs of the classifier; 0 leaves it out and returns pooled features.
        in_chans: Channels of the images; 3 by default.
        img_size: Side, or rows and columns, of the images.
        attention: Attention kind, one of `zoo.layers.list_attention()`.
        position: Position embedding, one of the model's.
        class_names: One name an output; sets `num_classes` where that is not given.
        part: Name in the source under which this model stands, where the source is a larger one:
            "backbone" for the keys backbone.blocks.0... of a detector, "visual" for the image tower
            of a CLIP. None, the default, takes the source as a whole; names that a wrapper put in
            front (module., _orig_mod.) need none.
        adapt, antialias: How weights are loaded, see `load_pretrained`.
        **options: Any other option of the model; a wrong one is refused with the valid ones.

    Returns:
        The model, in training mode, with its `card`.
    """
    if class_names is not None and num_classes is None:
        num_classes = len(class_names)
    named = {
        "num_classes": num_classes,
        "in_chans": in_chans,
        "img_size": img_size,
        "attention": attention,
        "position": position,
    }
    _check_sizes(num_classes, in_chans, img_size)
    options = {**{k: v for k, v in named.items() if v is not None}, **options}
    adapt = (adapt,) if isinstance(adapt, str) else tuple(adapt)
    loading = {"part": part, "adapt": adapt, "antialias": antialias}
    if name.partition(":")[0] in FOLDERS:
        return _from_folder(name, pretrained, class_names, options, loading)
    entry = _find(name)
    if not pretrained:
        _refuse_loading(loading)
    model = _build(entry, options, class_names)
    if pretrained:
        source = read_source(_own_weights(entry) if pretrained is True else pretrained)
        _load(model, source, options, loading)
    return model


def _check_sizes(num_classes: Any, in_chans: Any, img_size: Any) -> None:
    """Refuses what is no number before a library's code fails at it."""
    for name, value in (("num_classes", num_classes), ("in_chans", in_chans)):
        if value is not None:
            integer(name, value, minimum=None)  # what is too small, the models say
    sides = img_size if isinstance(img_size, tuple | list) else (img_size,)
    whole = len(sides) == (2 if sides is img_size else 1) and all(map(is_integer, sides))
    if img_size is not None and not whole:
        raise TypeError(
            f"img_size ({img_size!r}) must be an integer, or two of them (rows, columns)"
        )


def _load(
    model: nn.Module, source: Source, options: Mapping[str, Any], loading: Mapping[str, Any]
) -> None:
    """Loads weights; what the caller asked for may differ from the source."""
    adapted = "attention" in loading["adapt"]
    allowed = [name for name in options if name != "attention" or adapted]
    report = apply_source(model, source, allowed=allowed, **loading)
    model.load_report = report  # type: ignore[assignment]
    _logger.info("%s", report)


def _refuse_loading(loading: Mapping[str, Any]) -> None:
    """Refuses what only weights could heed, where none are asked for."""
    given = {name: value for name, value in loading.items() if value not in (None, ADAPTATIONS)}
    for name, value in given.items():
        raise ValueError(
            f"{name} ({value!r}) says how weights are loaded, but pretrained is False: give "
            f"pretrained=SOURCE as well"
        )


def list_models(
    filter: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    pretrained: bool = False,
) -> list[str]:
    """Names of the registered models, in natural order (patch 4 before patch 16).

    Args:
        filter: Wildcard or wildcards, at least one of which must match.
        exclude: Wildcard or wildcards, none of which may match.
        pretrained: Only models with weights of their own.
    """
    _discover()
    wanted, unwanted = _patterns(filter), _patterns(exclude)
    names = [
        name
        for name, entry in _entries.items()
        if any(fnmatchcase(name, pattern) for pattern in wanted)
        and not any(fnmatchcase(name, pattern) for pattern in unwanted)
        and (entry.weights is not None or not pretrained)
    ]
    return sorted(names, key=_natural)


def _patterns(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _discover() -> None:
    """Imports what registers models, once."""
    global _discovered
    with _discovery:
        if _discovered:
            return
        for home in _HOMES:
            importlib.import_module(home)
        _load_entry_points()
        _discovered = True


def _load_entry_points() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # a broken package must not take the zoo down
            warnings.warn(
                f"the models of entry point {point.name!r} ({point.value}) are left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def _find(name: str) -> Entry:
    _discover()
    if name in _entries:
        return _entries[name]
    prefix, colon, rest = name.partition(":")
    if hint := _hint_of_path(name):
        raise ValueError(f"unknown model {name!r}; {hint}")
    if colon and prefix in HOSTS:
        host = find_host(prefix, rest)
        return Entry(name, host.build, host.preprocessing, host.weights)
    if colon:
        known = ", ".join(f"{host}:" for host in (*FOLDERS, *HOSTS))
        raise ValueError(
            f"unknown prefix {prefix + ':'!r} in model name {name!r}; known: {known}, or a name of "
            "zoo.list_models() without a prefix"
        )
    found = homes_of(name)
    hint = f"did you mean {' or '.join(found)}? " if found else _nearest(name, _entries)
    raise ValueError(
        f"unknown model {name!r}; {hint}zoo.list_models() lists all {len(_entries)} of the zoo; "
        f"other libraries' have a prefix: {', '.join(f'{host}:NAME' for host in HOSTS)}"
    )


def _hint_of_path(name: str) -> str:
    """What is meant by a path, or by a source of weights, where a model's name belongs."""
    path, prefix = Path(name).expanduser(), name.partition(":")[0]
    if path.is_dir():
        folder = path / "model" if (path / "model" / CARD_FILE).is_file() else path
        return f"{name} is a folder: did you mean local-dir:{folder}?"
    weights = f"file:{name}" if path.is_file() else name
    if path.is_file() or prefix in ("file", "url"):
        return (
            f"{weights} is a source of weights: name the model that they belong to, and give them "
            f"as pretrained={weights!r} (--model NAME --pretrained {weights})"
        )
    if prefix == name and (os.sep in name or name.startswith(".")):
        return f"there is no folder {path.absolute()}; local-dir:FOLDER takes a saved model"
    return ""


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"nearest: {', '.join(near)}; " if near else ""


def _build(
    entry: Entry, options: Mapping[str, Any], class_names: Sequence[str] | None = None
) -> nn.Module:
    valid = entry.valid_options()
    edits = {name: value for name, value in options.items() if name in _edits and value}
    options = {name: value for name, value in options.items() if name not in _edits}
    for option in options:
        if valid is not None and option not in valid:
            raise TypeError(
                f"{entry.name} has no option {option!r}; {_nearest(option, valid)}"
                f"valid: {', '.join([*valid, *_edits])}"
            )
    model = entry.builder(**options)
    card = getattr(model, "card", None)
    resolved = card.options if isinstance(card, ModelCard) else dict(options)
    model.card = ModelCard(  # type: ignore[assignment]
        architecture=entry.name,
        options=resolved,
        preprocessing=_fit(entry.preprocessing, resolved),
        class_names=None if class_names is None else tuple(class_names),
    )
    model.load_report = None  # type: ignore[assignment]
    for name, value in edits.items():
        _edits[name](model, value)
    return model


def _fit(preprocessing: Preprocessing, options: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing for the size and the channels that the options ask for."""
    size = options.get("img_size")
    return preprocessing.adapted(
        size=(size, size) if isinstance(size, int) else size, in_chans=options.get("in_chans")
    )


def _own_weights(entry: Entry) -> str:
    if entry.weights is None:
        raise ValueError(
            f"{entry.name} has no weights of its own; pass a source, "
            f"pretrained='local-dir:FOLDER' or 'file:PATH', "
            f"or see zoo.list_models(pretrained=True)"
        )
    return entry.weights


def _from_folder(
    name: str,
    pretrained: bool | str,
    class_names: Sequence[str] | None,
    options: dict[str, Any],
    loading: Mapping[str, Any],
) -> nn.Module:
    if isinstance(pretrained, str):
        raise ValueError(f"{name} brings its own weights; drop pretrained")
    if loading["part"] is not None:
        raise ValueError(
            f"part ({loading['part']!r}) is of another model than {name} describes: name it, "
            f"zoo.create_model(NAME, pretrained={name!r}, part={loading['part']!r})"
        )
    source = read_source(name)
    architecture, stored = _architecture_of(source)
    if options.get("attention", stored.get("attention")) != stored.get("attention"):
        stored.pop("attention_options", None)  # they are another kind's
    try:
        model = _build(_find(architecture), {**stored, **options}, class_names)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name.partition(':')[2]}: {error}") from error
    dtype = _dtype(source)
    if dtype is not None:
        model.to(dtype)
    _load(model, source, options, loading)
    return model


def _architecture_of(source: Source) -> tuple[str, dict[str, Any]]:
    """Name and options of the model that a folder holds."""
    if source.card is not None and source.card.architecture is not None:
        return source.card.architecture, dict(source.card.options)
    _discover()
    if (found := find_architecture(source.config)) is not None:
        return found
    kind = source.config.get("architectures") or source.config.get("architecture")
    holds = f"a {source.config.get('library')} model ({kind})" if source.config else "weights only"
    raise WeightsError(
        f"{source.name} does not say which model of zoo.list_models() it holds: it holds {holds}; "
        f"name the model: zoo.create_model(NAME, pretrained={source.name!r})"
    )


def _dtype(source: Source) -> Any:
    """The floating dtype of the stored tensors, where they share one."""
    dtypes = {t.dtype for t in source.tensors.values() if t.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None
