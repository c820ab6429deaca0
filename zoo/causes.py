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

_POOLING = "the pooling (global_pool, fc_norm: the norm comes before it or after)"
_BROUGHT_BY = {  # names of parts, timm's and ours -> the option that brings them
    re.compile(part): option
    for part, option in {
        r"^fc_norm\.": _POOLING,
        r"^attn_pool\.": "the pooling (global_pool='map' has weights, attn_pool)",
        r"^cls_token$": "class_token",
        r"^reg_token$": "reg_tokens",
        r"^norm_pre\.|^patch_embed\.proj\.bias$": "pre_norm",
        r"\.ls[12]\.gamma$": "init_values (LayerScale)",
        r"\.attn\.[qk]_norm\.": "qk_norm",
        r"\.attn\.qkv\.bias$": "qkv_bias",
        r"^pos_embed$|\.relative_position_bias_table$|\.attn\.bias\.": "position",
    }.items()
}

# Parts of other libraries' networks that have as many entries as the image has patches.
_SIZED = re.compile(r"pos_emb|position|rel_pos|attention_bias|mlp_tokens|linear_tokens")


def explain(merge: Merge, what: str) -> str:
    """An error's text: what differs on either side, and why that may be."""
    report = merge.report()
    only_model = [key for key in report.missing if key not in merge.misfits]
    only_source = [key for key in report.unexpected if key not in merge.misfits]
    lines = [f"{merge.source.name} {what} {describe(merge.model)}:"]
    lines += [f"  {key}: {how}" for key, how in list(merge.misfits.items())[:5]]
    if len(merge.misfits) > 5:
        lines.append(f"  ... and {len(merge.misfits) - 5} more that do not fit")
    for side, keys in (("model", only_model), ("source", only_source)):
        if keys:
            lines.append(f"  only in the {side} ({len(keys)}): {listed(keys)}")
    lines.append(f"  likely cause: {_cause(merge, only_model, only_source)}")
    return "\n".join(lines)


def _cause(merge: Merge, only_model: list[str], only_source: list[str]) -> str:
    return (
        _other_thing(only_source)
        or _other_card(merge, only_source)
        or _other_numbers(merge)
        or _other_options(merge, only_model, only_source)
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


def _other_numbers(merge: Merge) -> str | None:
    kinds = set(merge.of_another_kind.values())
    if "quantised?" in kinds:
        return "the source is quantised: load the weights it was made from"
    if kinds:
        found = listed(sorted(merge.of_another_kind), 3)
        return (
            f"{' and '.join(sorted(kinds))} are no weights of this model ({found}): it is another "
            f"architecture's file, or something else than the state dict was saved"
        )
    return None


def _other_options(merge: Merge, only_model: list[str], only_source: list[str]) -> str | None:
    """Parts that an option brings, where all that differs is of such parts."""
    differing = [*only_model, *only_source]
    if not differing or merge.misfits.keys() - merge.grids.keys():
        return None
    after_pool = any(key.startswith("fc_norm.") for key in differing)
    options: dict[str, None] = {}
    for key in differing:
        option = next((name for part, name in _BROUGHT_BY.items() if part.search(key)), None)
        if after_pool and key.startswith("norm."):  # before it, on the other side
            option = _POOLING
        if option is None:
            return None
        options[option] = None
    return f"the same architecture with another option: {'; '.join(options)}"


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
    if merge.misfits and all(_SIZED.search(key) for key in merge.misfits):
        return (
            f"weights for images of another size, and {next(iter(merge.misfits))} cannot be "
            f"resampled: create the model with the img_size of the weights"
        )
    if merge.misfits:
        return "the same architecture with another width, depth or head"
    return None


def _other_parts(merge: Merge, only_model: list[str], only_source: list[str]) -> str:
    if only_model and only_source:
        return "another architecture, or the same with modules named differently"
    norms = merge.source.config.get("folded_norms")
    if only_model and norms:
        return (
            f"batch norm was folded into {len(norms)} convolutions when the file was exported: "
            f"load the weights that it was made from, or run it as it is (zoo.exported.open_export)"
        )
    if only_model:
        return (
            f"the model has parts that the source lacks, {len(only_model)} of its "
            f"{len(merge.state)} tensors: it is deeper or has other options, or the file is not "
            f"whole (one of several, or cut)"
        )
    return "the source has parts that the model lacks (deeper, or other options)"
