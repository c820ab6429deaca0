"""Why weights do not fit a model: both sides, and the likely cause."""

from __future__ import annotations

import re

from zoo.card import ModelCard
from zoo.keys import prefix_that_fits, take_part
from zoo.layouts import find_layout, layout_of
from zoo.merge import Merge, describe
from zoo.sources import listed

_OPTIMIZER = re.compile(r"(^|\.)(exp_avg(_sq)?|momentum_buffer|param_groups|max_exp_avg_sq)($|\.)")
_ADAPTER = re.compile(r"(^|[._])(lora|adapter|ia3|vera|dora)s?([._]|$)", re.IGNORECASE)


def explain(merge: Merge, what: str) -> str:
    """An error's text: what differs on either side, and why that may be."""
    report = merge.report()
    only_model = [key for key in report.missing if key not in merge.misfits]
    only_source = [key for key in report.unexpected if key not in merge.misfits]
    lines = [f"{merge.source.name} {what} {describe(merge.model)}:"]
    lines += [f"  {key}: {how}" for key, how in list(merge.misfits.items())[:5]]
    if len(merge.misfits) > 5:
        lines.append(f"  ... and {len(merge.misfits) - 5} more of another shape")
    lines.append(f"  only in the model ({len(only_model)}): {listed(only_model) or 'nothing'}")
    lines.append(f"  only in the source ({len(only_source)}): {listed(only_source) or 'nothing'}")
    lines.append(f"  likely cause: {_cause(merge, only_model, only_source)}")
    return "\n".join(lines)


def _cause(merge: Merge, only_model: list[str], only_source: list[str]) -> str:
    return (
        _other_thing(only_source)
        or _other_card(merge, only_source)
        or _other_names(merge, only_model, only_source)
        or _other_shape(merge)
        or _other_parts(merge, only_model, only_source)
    )


def _other_thing(only_source: list[str]) -> str | None:
    """Files that hold no weights of a whole model."""
    if any(_OPTIMIZER.search(key) for key in only_source):
        return "this is an optimizer checkpoint: save the model's state dict"
    if found := next((key for key in only_source if _ADAPTER.search(key)), None):
        return (
            f"these are the weights of an adapter such as LoRA ({found}): merge them into the "
            f"weights of the model that they belong to, and load those"
        )
    return None


def _other_card(merge: Merge, only_source: list[str]) -> str | None:
    card, own = merge.source.card, getattr(merge.model, "card", None)
    if card is None or not isinstance(own, ModelCard):
        return None
    if card.architecture and own.architecture and card.architecture != own.architecture:
        return f"the source is a {card.architecture}, the model a {own.architecture}"
    if only_source and (added := card.options.get("insertions")):
        return f"the source has insertions: create the model with insertions={added!r}"
    different = "; ".join(
        f"{name} is {theirs!r} there, {ours!r} here"
        for name, (theirs, ours) in card.differences(own).items()
    )
    return f"other options: {different}" if different else None


def _other_names(merge: Merge, only_model: list[str], only_source: list[str]) -> str | None:
    layout = layout_of(merge.source) if only_source else None
    if layout is not None and not layout.fits(merge.model):
        return f"the keys look like {layout.name}, which {describe(merge.model)} cannot take"
    for part in dict.fromkeys(key.partition(".")[0] for key in only_source if "." in key):
        inside = find_layout(take_part(merge.source, part), merge.model)
        if inside is not None:
            return f"under {part!r} are the names of {inside.name}: load with part={part!r}"
    for key in only_source:
        if prefix := prefix_that_fits(key, only_model):
            return f"the source's keys carry the prefix {prefix!r}: load with part={prefix[:-1]!r}"
    for key in only_model:
        if prefix := prefix_that_fits(key, only_source):
            return (
                f"the model's keys carry the prefix {prefix!r}: load into "
                f"model.get_submodule({prefix[:-1]!r})"
            )
    return None


def _other_shape(merge: Merge) -> str | None:
    if merge.stem in merge.misfits:
        return f"another patch size or width: {merge.stem} has another shape"
    if merge.misfits.keys() & merge.grids.keys():
        return "another number of prefix tokens, or a grid that is not square"
    if any("quantised" in how for how in merge.misfits.values()):
        return "the source is quantised: load the weights it was made from"
    if merge.misfits:
        return "the same architecture with another width, depth or head"
    return None


def _other_parts(merge: Merge, only_model: list[str], only_source: list[str]) -> str:
    if only_model and only_source:
        return "another architecture, or the same with modules named differently"
    if only_model:
        return (
            f"the model has parts that the source lacks, {len(only_model)} of its "
            f"{len(merge.state)} tensors: it is deeper or has other options, or the file is not "
            f"whole (one of several, or cut)"
        )
    return "the source has parts that the model lacks (deeper, or other options)"
