"""What no tensor shows and must agree all the same: options, settings, preprocessing."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

from zoo.card import ModelCard, Preprocessing
from zoo.merge import Merge, describe
from zoo.settings import differences, twin_of
from zoo.sources import Source, WeightsError, listed

# What a caller of `create_model` asks for without meaning to change a module of the host.
_OUTSIDE = {"num_classes", "in_chans", "img_size", "class_names", "insertions"}


def refuse_meta(merge: Merge) -> None:
    """Refuses a model without storage, into which copying would do nothing."""
    buffers = (b for module in merge.modules.values() for b in module.buffers(recurse=False))
    if any(value.is_meta for value in chain(merge.state.values(), buffers)):
        raise WeightsError(
            f"{describe(merge.model)} has tensors on the meta device, which hold no values: build "
            f"it outside of torch.device('meta'), or call model.to_empty(device='cpu') before "
            f"loading"
        )


class Doubts:
    """Differences between a source and a model that tensors cannot show.

    Args:
        allowed: Options that the caller asked to be other than the source's.
        strict: Whether another difference is an error, or a warning.

    Attributes:
        notes: What was found and let pass, in sentences.
    """

    def __init__(self, model: nn.Module, source: Source, allowed: set[str], strict: bool) -> None:
        self.model, self.source, self.strict = model, source, strict
        self.allowed = allowed
        self.notes: list[str] = []

    def compare_options(self) -> None:
        """Options of the two cards (norm eps, pooling, activation)."""
        card, theirs = getattr(self.model, "card", None), self.source.card
        if theirs is None or not isinstance(card, ModelCard):
            return
        allowed = self.allowed
        if "attention" in allowed and "attention" in theirs.differences(card):
            allowed = {*allowed, "attention_options"}  # they are another kind's
        wanted: list[str] = []
        unwanted: list[str] = []
        for name, (there, here) in theirs.differences(card).items():
            shown = f"{name}: {there!r} there, {here!r} here"
            (wanted if name in allowed else unwanted).append(shown)
        self.notes += [f"as asked for, {shown}" for shown in wanted]
        if unwanted:
            other = theirs.architecture
            named = f"it holds {other}; " if other and other != card.architecture else ""
            remedy = "build the model with the same options"
            if "attention" in theirs.differences(card) and "attention" not in allowed:
                remedy += (
                    f", or ask for another kind of attention on purpose, which keeps its own "
                    f"weights new: zoo.create_model({card.architecture!r}, "
                    f"attention={card.options.get('attention')!r}, "
                    f"pretrained={self.source.name!r})"
                )
            self._object(
                f"{self.source.name} was saved with other options than {describe(self.model)}: "
                f"{named}{'; '.join(unwanted)}",
                remedy,
            )

    def compare_settings(self, network: nn.Module | None) -> None:
        """Settings of modules (stride, padding, activation) of another library's network."""
        network = self._described() if network is None else network
        found = {} if network is None else differences(self.model, network)
        if not found:
            return
        shown = [f"{name or 'itself'}: {b} there, {a} here" for name, (a, b) in found.items()]
        text = (
            f"{self.source.name} has the tensors of {describe(self.model)} and other settings in "
            f"{len(found)} modules: {listed(shown, 4)}"
        )
        if self.allowed - _OUTSIDE:  # an option such as output_stride changes strides on purpose
            self._let_pass(f"{text}; options asked for: {listed(sorted(self.allowed))}")
        else:
            name = self.source.card.architecture if self.source.card else None
            name = name or self.source.name.partition("/")[0]
            self._object(text, f"zoo.create_model({name!r}) is the network they were trained in")

    def _described(self) -> nn.Module | None:
        """What the source's card describes, where a library's network is involved.

        Cards of these tell only the options that were given, so they cannot be compared as such.
        """
        theirs, own = self.source.card, getattr(self.model, "card", None)
        if theirs is None or not isinstance(own, ModelCard):
            return None
        names = {theirs.architecture, own.architecture}
        if None in names or not any(":" in str(name) for name in names):
            return None
        if len(names) == 1 and theirs.lasting_options() == own.lasting_options():
            return None
        from zoo.registry import create_model

        options = {k: v for k, v in theirs.options.items() if k != "insertions" and v is not None}
        try:
            with torch.device("meta"):
                return create_model(str(theirs.architecture), **options)
        except (ValueError, TypeError) as error:
            self._let_pass(
                f"{self.source.name} holds {theirs.architecture}, which cannot be built here "
                f"({error}): what its tensors do not show was not compared"
            )
            return None

    def warn_of_twin(self, given: Source) -> None:
        """A bare file cannot tell which of two networks with the same tensors it was trained as."""
        told = self.source.card or given.network or given.config  # a layout's card tells as well
        if told is not None and told != {}:
            return
        architecture = getattr(getattr(self.model, "card", None), "architecture", None)
        twin = twin_of(architecture) if architecture else None
        if twin is not None:
            other, how = twin
            self._let_pass(
                f"{given.name} cannot tell whether it was trained as {architecture} or as "
                f"{other}, which has the same tensors and computes other values ({how}); check "
                f"it on images that you know"
            )

    def _object(self, text: str, remedy: str) -> None:
        if self.strict:
            raise WeightsError(f"{text}; {remedy}, or load with strict=False")
        self._let_pass(text)

    def _let_pass(self, text: str) -> None:
        warnings.warn(text, stacklevel=5)
        self.notes.append(text)


def notes_of(model: nn.Module, given: Source, source: Source, merge: Merge) -> Iterator[str]:
    """What one should know about weights that fit."""
    card = getattr(model, "card", None)
    if isinstance(card, ModelCard):
        expected = source.card.preprocessing if source.card else card.preprocessing
        if given.card is None:
            expected = expected.adapted(card.preprocessing.size, card.preprocessing.in_chans)
            yield f"the source says nothing of preprocessing; assumed: {_said(expected)}"
        elif expected.size != card.preprocessing.size:
            there, here = _size(expected), _size(card.preprocessing)
            yield f"images of {there} there, of {here} here"
        named = source.card is not None and source.card.class_names is not None
        if card.class_names and not named and merge.head & merge.values.keys():
            yield "the source does not name its classes: taken to be the model's, in their order"
    if given.card is None and given.network is None and not given.config:
        yield (
            "a bare file does not tell activation, epsilon, heads and pooling: those of "
            + (describe(model) if source.card is None else "its library's usual models")
            + " are assumed"
        )
    for key, (rows, cols) in merge.assumed.items():
        if key in merge.values and len({*merge.grids[key]}) > 1:
            yield f"the source does not tell the grid of {key}: {rows}x{cols} is assumed"
    extra = source.card.extra if source.card else {}
    yield from (f"left out: {what}" for what in extra.get("left_out", ()))
    yield from extra.get("notes", ())
    yield from _casts(merge)
    frozen = [k for k, p in model.named_parameters() if not p.requires_grad and k in merge.values]
    if frozen:
        yield f"{len(frozen)} parameters took the source's values and stay frozen: {listed(frozen)}"


def _casts(merge: Merge) -> Iterator[str]:
    casts = Counter(
        (str(value.dtype), str(merge.state[key].dtype)) for key, value in merge.values.items()
    )
    for (old, new), count in casts.items():
        if old != new:
            yield f"{count} tensors cast from {old} to {new}"


def _said(pre: Preprocessing) -> str:
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (pre.mean, pre.std))
    return f"size {_size(pre)}, mean {mean}, std {std}, {pre.interpolation}, crop {pre.crop_pct:g}"


def _size(preprocessing: Preprocessing) -> str:
    return "x".join(map(str, preprocessing.size))
