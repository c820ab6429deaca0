"""Fitting tensors into a model: what becomes of each key, decided before anything changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.card import ModelCard
from zoo.layers import Core, resample_grid, resample_table
from zoo.report import LoadReport
from zoo.sources import Source

# Differences that loading understands, each of which can be switched off.
ADAPTATIONS = ("positions", "stem", "head", "class_names", "attention", "insertions")
_TABLE = "relative_position_bias_table"


class Merge:
    """Decides for each key of the model and of the source what becomes of it.

    Args:
        adapt: Those of `ADAPTATIONS` that may be made; any other that is needed is in `refused`.
        antialias: Whether positions are resampled with it.

    Attributes:
        values: Key of the model -> the tensor to copy there.
        misfits: Keys that both have and that cannot be taken, and why.
        of_another_kind: Those of `misfits` whose numbers are of another kind, and which.
        assumed: Keys of positions whose grid the source does not tell -> what it was taken for.
        refused: Keys that only an adaptation that is off could take: which, and what it would do.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        adapt: Iterable[str] = ADAPTATIONS,
        antialias: bool = True,
    ) -> None:
        self.model, self.source = model, source
        self.adapt, self.antialias = frozenset(adapt), antialias
        self.state = dict(model.state_dict())
        self.modules = dict(model.named_modules())  # walked once, which takes its time
        self.tensors = source.tensors
        self.grids, self.lengths = position_grids(model), position_lengths(self.modules)
        self.values: dict[str, Tensor] = {}
        self.assumed: dict[str, tuple[int, int]] = {}
        self.resized: dict[str, str] = {}
        self.adapted: dict[str, str] = {}
        self.reinitialized: dict[str, str] = {}
        self.misfits: dict[str, str] = {}
        self.of_another_kind: dict[str, str] = {}
        self.refused: dict[str, tuple[str, str]] = {}
        self.stem = _key_of_stem(model)
        self.heads = _names_of_heads(model, self.modules)
        self.head = _keys_of(self.heads, self.modules)
        self.untrained = self._of_other_attention()
        self.added = self._added()
        self.tied = _tied(self.state)
        self.matched = 0
        for key in self.state:
            self._decide(key)
        self._drop_head()

    def _of_other_attention(self) -> set[str]:
        """Weights that a kind of attention adds, where the source has another kind."""
        cores = tuple(f"{n}." for n, m in self.modules.items() if isinstance(m, Core))
        own = {key for key in self.state if key.startswith(cores)}
        theirs, ours = self.source.card, getattr(self.model, "card", None)
        if theirs is not None and isinstance(ours, ModelCard):
            same = "attention" not in theirs.differences(ours)
        else:
            same = any(key in self.tensors for key in own)
        return set() if same else own

    def _added(self) -> set[str]:
        """Weights of modules that were put into the model, where the source has none of them."""
        added: set[str] = set()
        if self.source.card is not None and self.source.card.options.get("insertions"):
            return added  # they must agree
        for name, module in self.modules.items():
            if getattr(module, "may_be_absent", False):
                own = {key for key in self.state if key.startswith(f"{name}.")}
                added |= own if not own & self.tensors.keys() else set()
        return added

    def _decide(self, key: str) -> None:
        wanted, value = self.state[key], self.tensors.get(key)
        if value is None:
            self._absent(key)
        elif wanted.is_floating_point() and not value.is_floating_point():
            dtype, kind = str(value.dtype).removeprefix("torch."), _kind_of_numbers(value)
            self.of_another_kind[key] = kind
            self.misfits[key] = f"{dtype} in the source ({kind}), {wanted.dtype} in the model"
        elif key in self.grids and value.ndim == wanted.ndim:
            self._positions(key, value)
        elif key in self.lengths and _same_but(value, wanted, wanted.ndim - 2):
            self._sequence(key, value)
        elif key in self.head:
            self._classifier(key, value)
        elif value.shape == wanted.shape:
            self._take(key, value)
        elif key == self.stem and _same_but(value, wanted, 1):
            old, new = value.shape[1], wanted.shape[1]
            how = f"{old} input channels -> {new}"
            if self._may("stem", key, how):
                self._take(key, adapt_channels(value, new))
                self.adapted[key] = how
        else:
            self.misfits[key] = self._shapes(key, value)

    def _absent(self, key: str) -> None:
        if key in self.head and not any(k in self.tensors for k in self.head):
            self._leave("head", key, "the source has no classifier")
        elif key in self.untrained:
            self._leave("attention", key, "the source has another kind of attention")
        elif key in self.added:
            self._leave("insertions", key, "the source has no such insertion")
        elif twin := next((k for k in self.tied.get(key, ()) if k in self.tensors), None):
            self._take(key, self.tensors[twin])  # a file may hold a shared tensor once
        elif key.endswith(".num_batches_tracked"):  # torch takes such old files as well
            self.reinitialized[key] = "the source does not count batches"

    def _may(self, adaptation: str, key: str, how: str) -> bool:
        """Whether an adaptation is on; noted where it would be needed and is not."""
        if adaptation not in self.adapt:
            self.refused[key] = (adaptation, how)
        return adaptation in self.adapt

    def _leave(self, adaptation: str, key: str, why: str) -> None:
        if self._may(adaptation, key, why):
            self.reinitialized[key] = why

    def _take(self, key: str, value: Tensor) -> None:
        twin = next((k for k in self.tied.get(key, ()) if k in self.values), None)
        if twin is not None and not torch.equal(self.values[twin], value):
            self.misfits[key] = f"differs from {twin}, with which it is one tensor in the model"
            return
        self.values[key] = value
        self.matched += self.state[key].numel()

    def _shapes(self, key: str, value: Tensor) -> str:
        return f"{_shape(value)} in the source, {_shape(self.state[key])} in the model"

    def _positions(self, key: str, value: Tensor) -> None:
        """Learned positions (1 n d) or (n d), or a table of relative ones (entries h)."""
        wanted, new_grid = self.state[key], self.grids[key]
        old_grid = self.source.position_grids.get(key)
        if old_grid is None:
            old_grid = new_grid if value.shape == wanted.shape else self._square(key, value)
            self.assumed[key] = old_grid
        try:
            resized = self._resampled(key, value, old_grid, new_grid)
        except ValueError:
            resized = value
        if resized.shape != wanted.shape:
            self.misfits[key] = self._misfit_of_grid(key, value, old_grid)
        elif old_grid == new_grid:
            self._take(key, resized)
        elif self._may("positions", key, how := f"grid {_grid(old_grid)} -> {_grid(new_grid)}"):
            self._take(key, resized)
            self.resized[key] = how

    def _sequence(self, key: str, value: Tensor) -> None:
        """Learned positions (1 n d) or (n d) of a sequence."""
        old, new = value.shape[-2], self.state[key].shape[-2]
        if old == new:
            self._take(key, value)
        elif self._may("positions", key, how := f"{old} tokens -> {new}, linearly"):
            self._take(key, resample_sequence(value, new))
            self.resized[key] = how

    def _prefix(self, key: str) -> int:
        """Positions of the model that are not the grid's."""
        return self.state[key].shape[-2] - math.prod(self.grids[key])

    def _square(self, key: str, value: Tensor) -> tuple[int, int]:
        """The square grid that a tensor of a bare file may have."""
        if key.endswith(_TABLE):  # of (2 side - 1)^2 offsets, and perhaps 3 of prefix tokens
            offsets = next((n for n in (len(value), len(value) - 3) if _is_square(n)), 0)
            return ((math.isqrt(offsets) + 1) // 2,) * 2
        return (math.isqrt(max(0, value.shape[-2] - self._prefix(key))),) * 2

    def _resampled(
        self, key: str, value: Tensor, old: tuple[int, int], new: tuple[int, int]
    ) -> Tensor:
        if key.endswith(_TABLE):
            return resample_table(value, old, new)
        batched = value if value.ndim == 3 else value[None]
        resized = resample_grid(
            batched, old, new, num_prefix_tokens=self._prefix(key), antialias=self.antialias
        )
        return resized if value.ndim == 3 else resized[0]

    def _misfit_of_grid(self, key: str, value: Tensor, old_grid: tuple[int, int]) -> str:
        if value.shape[-1] != self.state[key].shape[-1]:  # another width, whatever the grid
            return self._shapes(key, value)
        known = key in self.source.position_grids
        unknown = "unknown and not square (a folder of save_pretrained knows it)"
        prefix = "" if key.endswith(_TABLE) else f"{self._prefix(key)} prefix positions and "
        return (
            f"{self._shapes(key, value)}, which has {prefix}a grid of {_grid(self.grids[key])}; "
            f"the source's grid is {_grid(old_grid) if known else unknown}"
        )

    def _classifier(self, key: str, value: Tensor) -> None:
        wanted = self.state[key]
        if not _same_but(value, wanted, 0):
            self.misfits[key] = self._shapes(key, value)
            return
        old, new = _class_names(self.source.card), _class_names(getattr(self.model, "card", None))
        named = old is not None and new is not None
        if named and old != new and len(old or ()) == len(value) and len(new or ()) == len(wanted):
            self._rows_by_name(key, value, old or (), new or ())
        elif value.shape == wanted.shape:
            self._take(key, value)
        else:
            self._leave("head", key, f"{len(value)} classes in the source, {len(wanted)} here")

    def _rows_by_name(
        self, key: str, value: Tensor, old: tuple[str, ...], new: tuple[str, ...]
    ) -> None:
        shared = [name for name in new if name in old]
        if not shared:
            self._leave("class_names", key, "no class name in common")
            return
        how = f"rows of {len(shared)} of {len(new)} classes, by name"
        if self._may("class_names", key, how):
            rows = self.state[key].detach().clone()
            rows[[new.index(n) for n in shared]] = value[[old.index(n) for n in shared]].to(rows)
            self._take(key, rows)
            self.adapted[key] = how

    def _drop_head(self) -> None:
        """A source's classifier is left out on purpose where the model has none."""
        if self.head:
            return
        prefixes = tuple(f"{name}." for name in self.heads if name)
        how = "left out: the model has no classifier"
        for key in self.tensors:
            if key.startswith(prefixes) and key not in self.state and self._may("head", key, how):
                self.adapted[key] = how

    def report(self, layout: str | None = None, notes: Iterable[str] = ()) -> LoadReport:
        changed = {*self.resized, *self.adapted}
        explained = {*self.values, *self.reinitialized}
        counted = sum(v.numel() for k, v in self.state.items() if k not in self.reinitialized)
        return LoadReport(
            source=self.source.name,
            loaded=tuple(key for key in self.values if key not in changed),
            resized=self.resized,
            adapted=self.adapted,
            reinitialized=self.reinitialized,
            missing=tuple(k for k in self.state if k not in explained),
            unexpected=tuple(k for k in self.tensors if k not in explained | changed),
            matched_fraction=self.matched / max(1, counted),
            layout=layout,
            notes=tuple(notes),
        )


def adapt_channels(weight: Tensor, in_chans: int) -> Tensor:
    """A convolution's weight (out, in, ...) for another number of input channels.

    The channels are repeated in turn and scaled by old / new; what that leaves over is shared out
    evenly. So an image whose channels are equal gives the same response as before, and one channel
    gets the sum. In fp32; an equal number returns the weight itself.
    """
    old = weight.shape[1]
    if old == in_chans:
        return weight
    full = weight.float()
    turns = [channel % old for channel in range(in_chans)]
    repeated = full[:, turns] * (old / in_chans)
    rest = full.sum(1, keepdim=True) - repeated.sum(1, keepdim=True)
    return (repeated + rest / in_chans).to(weight.dtype)


def resample_sequence(positions: Tensor, length: int) -> Tensor:
    """(... n d) -> (... length d), linearly between the nearest positions, as open_clip does.

    In fp32; an equal length returns the positions themselves.
    """
    if positions.shape[-2] == length:
        return positions
    flat = positions.float().reshape(-1, *positions.shape[-2:]).transpose(1, 2)
    resampled = F.interpolate(flat, size=length, mode="linear", align_corners=False)
    resampled = resampled.transpose(1, 2).to(positions.dtype)
    return resampled.reshape(*positions.shape[:-2], *resampled.shape[1:])


def _kind_of_numbers(value: Tensor) -> str:
    """What numbers are that are not floating-point ones."""
    if value.is_complex():
        return "complex numbers"
    return "truth values" if value.dtype == torch.bool else "quantised?"


def position_grids(model: nn.Module) -> dict[str, tuple[int, int]]:
    grids = getattr(model, "position_grids", None)
    return dict(grids()) if callable(grids) else {}


def position_lengths(modules: Mapping[str, nn.Module]) -> set[str]:
    """Keys of learned positions of sequences, of all parts of a model."""
    return {
        f"{name}.{key}" if name else key
        for name, module in modules.items()
        if callable(tell := getattr(module, "position_lengths", None))
        for key in tell()
    }


def _key_of_stem(model: nn.Module) -> str | None:
    name = getattr(model, "first_conv", None)
    return f"{name}.weight" if isinstance(name, str) else None


def head_keys(model: nn.Module) -> set[str]:
    """Keys of the classifier, or of several where a network has more than one."""
    modules = dict(model.named_modules())
    return _keys_of(_names_of_heads(model, modules), modules)


def _keys_of(names: Iterable[str], modules: Mapping[str, nn.Module]) -> set[str]:
    return {f"{name}.{key}" for name in names for key in modules[name].state_dict()}


def _names_of_heads(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    get_classifier = getattr(model, "get_classifier", None)
    heads = get_classifier() if callable(get_classifier) else ()
    heads = heads if isinstance(heads, tuple | list) else (heads,)
    return [name for name, module in modules.items() if any(module is h for h in heads)]


def _class_names(card: ModelCard | None) -> tuple[str, ...] | None:
    return card.class_names if isinstance(card, ModelCard) else None


def _tied(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Keys that are one tensor of the model under several names -> the other names."""
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for key, value in state.items():
        if value.numel():
            groups.setdefault((value.data_ptr(), value.shape), []).append(key)
    return {k: [o for o in group if o != k] for group in groups.values() for k in group}


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _same_but(one: Tensor, other: Tensor, dim: int) -> bool:
    """Equal shapes, dimension `dim` left out."""
    return one.ndim == other.ndim and all(
        a == b for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if d != dim
    )


def describe(model: nn.Module) -> str:
    card = getattr(model, "card", None)
    name = card.architecture if isinstance(card, ModelCard) else None
    return name or type(model).__name__


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
