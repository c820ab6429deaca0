"""Fitting tensors into a model: what becomes of each key, decided before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from zoo.card import ModelCard
from zoo.layers import Core, resample_grid, resample_prior, resample_table
from zoo.sources import Source, listed

_PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor.

    Attributes:
        source: Where the weights came from.
        loaded: Keys whose values were taken as they are.
        resized: Position embeddings resampled to another grid, and from which to which.
        adapted: Keys taken in a changed form (stem for other channels, classifier rows by class
            name, a classifier left out), and how.
        reinitialized: Keys of the model that keep their initial values for a known reason.
        missing: Keys of the model that the source lacks, unexplained.
        unexpected: Keys of the source that the model lacks, or that do not fit, unexplained.
        matched_fraction: Part of the model's values that came from the source, those in
            `reinitialized` left out.
    """

    source: str
    loaded: tuple[str, ...]
    resized: dict[str, str]
    adapted: dict[str, str]
    reinitialized: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    matched_fraction: float

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {len(self.loaded)} tensors loaded, "
            f"{100 * self.matched_fraction:.1f} % of the values matched"
        ]
        for title in ("resized", "adapted", "reinitialized"):
            lines += [f"  {title} {key}: {how}" for key, how in getattr(self, title).items()]
        for title in ("missing", "unexpected"):
            keys = getattr(self, title)
            lines += [f"  {title}: {listed(keys)}"] if keys else []
        return "\n".join(lines)


class Merge:
    """Decides for each key of the model and of the source what becomes of it."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.model, self.source = model, source
        self.state = dict(model.state_dict())
        self.tensors = _clean_keys(source.tensors, self.state)
        self.grids = position_grids(model)
        self.values: dict[str, Tensor] = {}
        self.resized: dict[str, str] = {}
        self.adapted: dict[str, str] = {}
        self.reinitialized: dict[str, str] = {}
        self.misfits: dict[str, str] = {}
        self.stem = _key_of_stem(model)
        self.head = head_keys(model)
        self.untrained = self._of_another_kind()
        self.added = self._added()
        self.matched = 0
        for key in self.state:
            self._decide(key)
        self._drop_head()

    def _of_another_kind(self) -> set[str]:
        """Weights that a kind of attention adds, where the source has another kind."""
        cores = [name for name, m in self.model.named_modules() if isinstance(m, Core)]
        own = {key for key in self.state if any(key.startswith(f"{name}.") for name in cores)}
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
        for name, module in self.model.named_modules():
            if getattr(module, "may_be_absent", False):
                own = {key for key in self.state if key.startswith(f"{name}.")}
                added |= own if not own & self.tensors.keys() else set()
        return added

    def _decide(self, key: str) -> None:
        wanted, value = self.state[key], self.tensors.get(key)
        if value is None:
            if key in self.head and not any(k in self.tensors for k in self.head):
                self.reinitialized[key] = "the source has no classifier"
            elif key in self.untrained:
                self.reinitialized[key] = "the source has another kind of attention"
            elif key in self.added:
                self.reinitialized[key] = "the source has no such insertion"
            elif key.endswith(".num_batches_tracked"):  # torch takes such old files as well
                self.reinitialized[key] = "the source does not count batches"
        elif key in self.grids and value.ndim == 3:
            self._positions(key, value)
        elif key in self.grids and value.ndim == 2:
            self._position_bias(key, value)
        elif key in self.head:
            self._classifier(key, value)
        elif value.shape == wanted.shape:
            self._take(key, value)
        elif key == self.stem and _same_but(value, wanted, 1):
            old, new = value.shape[1], wanted.shape[1]
            self._take(key, adapt_channels(value, new))
            self.adapted[key] = f"{old} input channels -> {new}"
        else:
            self.misfits[key] = f"{_shape(value)} in the source, {_shape(wanted)} in the model"

    def _take(self, key: str, value: Tensor) -> None:
        self.values[key] = value
        self.matched += self.state[key].numel()

    def _positions(self, key: str, value: Tensor) -> None:
        wanted, new_grid = self.state[key], self.grids[key]
        prefix = wanted.shape[1] - math.prod(new_grid)
        old_grid = self.source.position_grids.get(key)
        if old_grid is None:
            if value.shape == wanted.shape:
                old_grid = new_grid
            else:
                side = math.isqrt(max(0, value.shape[1] - prefix))
                old_grid = (side, side)
        if value.shape[1] - prefix != math.prod(old_grid) or value.shape[2] != wanted.shape[2]:
            self.misfits[key] = (
                f"{_shape(value)} in the source, {_shape(wanted)} in the model, which has {prefix} "
                f"prefix positions and a grid of {_grid(new_grid)}; the source's grid is "
                + (
                    _grid(old_grid)
                    if key in self.source.position_grids
                    else "unknown and not square (a folder of save_pretrained knows it)"
                )
            )
            return
        resized = resample_grid(value, old_grid, new_grid, num_prefix_tokens=prefix)
        self._take(key, resized)
        if old_grid != new_grid:
            self.resized[key] = f"grid {_grid(old_grid)} -> {_grid(new_grid)}"

    def _position_bias(self, key: str, value: Tensor) -> None:
        wanted, new_grid = self.state[key], self.grids[key]
        old_grid = self.source.position_grids.get(key, new_grid)
        try:
            if key.endswith("relative_position_bias_table"):
                resized = resample_table(value, old_grid, new_grid)
            else:
                prefix = wanted.shape[0] - math.prod(new_grid)
                resized = resample_prior(value, old_grid, new_grid, num_prefix_tokens=prefix)
        except ValueError:
            resized = value
        if resized.shape != wanted.shape:
            self.misfits[key] = (
                f"{_shape(value)} in the source, {_shape(wanted)} in the model, with a grid of "
                f"{_grid(old_grid)} there and {_grid(new_grid)} here"
            )
            return
        self._take(key, resized)
        if old_grid != new_grid:
            self.resized[key] = f"grid {_grid(old_grid)} -> {_grid(new_grid)}"

    def _classifier(self, key: str, value: Tensor) -> None:
        wanted = self.state[key]
        if not _same_but(value, wanted, 0):
            self.misfits[key] = f"{_shape(value)} in the source, {_shape(wanted)} in the model"
            return
        old, new = _class_names(self.source.card), _class_names(getattr(self.model, "card", None))
        named = old is not None and new is not None
        if named and old != new and len(old or ()) == len(value) and len(new or ()) == len(wanted):
            self._rows_by_name(key, value, old or (), new or ())
        elif value.shape == wanted.shape:
            self._take(key, value)
        else:
            self.reinitialized[key] = f"{len(value)} classes in the source, {len(wanted)} here"

    def _rows_by_name(
        self, key: str, value: Tensor, old: tuple[str, ...], new: tuple[str, ...]
    ) -> None:
        shared = [name for name in new if name in old]
        if not shared:
            self.reinitialized[key] = "no class name in common"
            return
        rows = self.state[key].detach().clone()
        rows[[new.index(n) for n in shared]] = value[[old.index(n) for n in shared]].to(rows)
        self._take(key, rows)
        self.adapted[key] = f"rows of {len(shared)} of {len(new)} classes, by name"

    def _drop_head(self) -> None:
        """A source's classifier is left out on purpose where the model has none."""
        if self.head:
            return
        prefix = _name_of_head(self.model)
        for key in self.tensors:
            if prefix and key.startswith(f"{prefix}.") and key not in self.state:
                self.adapted[key] = "left out: the model has no classifier"

    def report(self) -> LoadReport:
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
        )

    def explain(self, what: str) -> str:
        report = self.report()
        only_model = [key for key in report.missing if key not in self.misfits]
        only_source = [key for key in report.unexpected if key not in self.misfits]
        lines = [f"{self.source.name} {what} {describe(self.model)}:"]
        lines += [f"  {key}: {how}" for key, how in list(self.misfits.items())[:5]]
        if len(self.misfits) > 5:
            lines.append(f"  ... and {len(self.misfits) - 5} more of another shape")
        lines.append(f"  only in the model ({len(only_model)}): {listed(only_model) or 'nothing'}")
        lines.append(
            f"  only in the source ({len(only_source)}): {listed(only_source) or 'nothing'}"
        )
        lines.append(f"  likely cause: {self._cause(only_model, only_source)}")
        return "\n".join(lines)

    def _other_options(self) -> str:
        card = getattr(self.model, "card", None)
        if self.source.card is None or not isinstance(card, ModelCard):
            return ""
        return "; ".join(
            f"{name} is {theirs!r} there, {ours!r} here"
            for name, (theirs, ours) in self.source.card.differences(card).items()
        )

    def _cause(self, only_model: list[str], only_source: list[str]) -> str:
        theirs = self.source.card.architecture if self.source.card else None
        ours = getattr(getattr(self.model, "card", None), "architecture", None)
        if theirs and ours and theirs != ours:
            return f"the source is a {theirs}, the model a {ours}"
        added = self.source.card.options.get("insertions") if self.source.card else None
        if added and only_source:
            return f"the source has insertions: create the model with insertions={added!r}"
        if different := self._other_options():
            return f"other options: {different}"
        for key in only_source:
            if prefix := _prefix_that_fits(key, only_model):
                return f"the source's keys carry the prefix {prefix!r}"
        stem = self.stem
        if stem in self.misfits:
            return f"another patch size or width: {stem} has another shape"
        if set(self.misfits) & set(self.grids):
            return "another number of prefix tokens, or a grid that is not square"
        if self.misfits:
            return "the same architecture with another width, depth or head"
        if only_model and only_source:
            return "another architecture, or the same with modules named differently"
        return (
            "the model has parts that the source lacks"
            if only_model
            else "the source has parts that the model lacks (deeper, or other options)"
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


def _clean_keys(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys without what DDP, torch.compile and averaging put in front, in any order."""
    tensors = dict(tensors)
    if "n_averaged" in tensors and "n_averaged" not in state:
        del tensors["n_averaged"]
    while tensors:
        prefix = next((p for p in _PREFIXES if all(k.startswith(p) for k in tensors)), None)
        if prefix is None or any(key.startswith(prefix) for key in state):
            break
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    # A compiled part of a model has it in the middle.
    return {key.replace("_orig_mod.", ""): value for key, value in tensors.items()}


def position_grids(model: nn.Module) -> dict[str, tuple[int, int]]:
    grids = getattr(model, "position_grids", None)
    return dict(grids()) if callable(grids) else {}


def _key_of_stem(model: nn.Module) -> str | None:
    name = getattr(model, "first_conv", None)
    return f"{name}.weight" if isinstance(name, str) else None


def _name_of_head(model: nn.Module) -> str | None:
    get_classifier = getattr(model, "get_classifier", None)
    head = get_classifier() if callable(get_classifier) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def head_keys(model: nn.Module) -> set[str]:
    name = _name_of_head(model)
    if not name:
        return set()
    return {f"{name}.{key}" for key in model.get_submodule(name).state_dict()}


def _class_names(card: ModelCard | None) -> tuple[str, ...] | None:
    return card.class_names if isinstance(card, ModelCard) else None


def _same_but(one: Tensor, other: Tensor, dim: int) -> bool:
    """Equal shapes, dimension `dim` left out."""
    return one.ndim == other.ndim and all(
        a == b for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if d != dim
    )


def _prefix_that_fits(key: str, keys: list[str]) -> str | None:
    match = next((k for k in keys if key.endswith(f".{k}")), None)
    return key.removesuffix(match) if match else None


def describe(model: nn.Module) -> str:
    card = getattr(model, "card", None)
    name = card.architecture if isinstance(card, ModelCard) else None
    return name or type(model).__name__


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
