"""CLIP's text tower as a source for `TextTower`: open_clip's and OpenAI's names, and transformers'.

A whole CLIP model will do: what belongs to its images, and the projection behind the tower, is left
out, and the card says so. For another `context_length` loading resamples positions linearly, as
open_clip does, unless told not to; a shorter caption needs no other length. No tensor tells the
activation, the number of heads and what stands at padding; they come from the source's network or
config, where it has one.

Shapes: d width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from crossmodal.convert import StateDict, convert_text_tower
from crossmodal.text import ACTIVATIONS, TextTower
from vision.convert import KeyMap, activation_name, stack, unstack
from zoo.card import ModelCard
from zoo.layouts import Layout, register_layout
from zoo.sources import Source, WeightsError

CLIP: dict[str, Any] = {  # what all text towers of CLIP have in common (arXiv 2103.00020)
    "position": "learned",
    "attention": "full",
    "norm_eps": 1e-5,
    "causal": True,
    "pool": "last",
}
NOTE = (
    "the file does not tell which activation it was trained with: OpenAI's weights (and a few of "
    "open_clip's) need act='quick_gelu', others act='gelu'"
)
POOLS = ("argmax", "eos")  # open_clip's names for the end token

_LAYER = "encoder.layers.*"
TRANSFORMERS = KeyMap(
    {
        "embeddings.token_embedding": "token_embed",
        "embeddings.position_embedding.weight": "pos_embed",
        f"{_LAYER}.layer_norm1": "blocks.*.norm1",
        **{f"{_LAYER}.self_attn.{part}_proj": f"blocks.*.attn.{part}" for part in "qkv"},
        f"{_LAYER}.self_attn.out_proj": "blocks.*.attn.proj",
        f"{_LAYER}.layer_norm2": "blocks.*.norm2",
        f"{_LAYER}.mlp.fc1": "blocks.*.mlp.fc1",
        f"{_LAYER}.mlp.fc2": "blocks.*.mlp.fc2",
        "final_layer_norm": "norm",
    }
)
DEFAULTS = {"num_attention_heads": 8, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
BESIDE = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")


def convert_transformers_text(state_dict: StateDict) -> dict[str, Tensor]:
    """For `TextTower`, from transformers' `CLIPTextModel` or `CLIPModel`."""
    text = {
        name.removeprefix("text_model."): tensor
        for name, tensor in state_dict.items()
        if not name.startswith(BESIDE) and not name.endswith("position_ids")
    }
    ours = stack(TRANSFORMERS.convert(text))
    return ours | {"pos_embed": ours["pos_embed"][None]}


def revert_transformers_text(state_dict: StateDict) -> dict[str, Tensor]:
    """For transformers' `CLIPTextModel`, from `TextTower` with learned positions and no head."""
    ours = unstack(state_dict)
    return TRANSFORMERS.revert(ours | {"pos_embed": ours["pos_embed"][0]})


# --- layouts -----------------------------------------------------------------------------------


def _translate_open_clip(source: Source, model: nn.Module) -> Source:
    known = {**_of_config(source), **_of_network(source)}
    _refuse_others(source, known)
    try:
        tensors = convert_text_tower(source.tensors)
    except ValueError as error:
        raise WeightsError(f"{source.name}: {error}") from error
    ours = ("act", "num_heads", "norm_eps", "causal")
    options = {name: known[name] for name in ours if name in known}
    return _translated(source, model, tensors, options)


def _translate_transformers(source: Source, model: nn.Module) -> Source:
    tensors = convert_transformers_text(source.tensors)
    config = source.config.get("text_config", source.config)
    if source.config.get("library") == "transformers":  # which leaves out what equals its defaults
        config = {**DEFAULTS, **config}
    names = {"num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps", "act": "hidden_act"}
    options = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    if options.get("act", "gelu") not in ACTIVATIONS:
        raise WeightsError(
            f"{source.name} has the activation {options['act']!r}; TextTower has "
            f"{', '.join(ACTIVATIONS)}"
        )
    return _translated(source, model, tensors, options)


def _translated(
    source: Source, model: Any, tensors: dict[str, Tensor], options: Mapping[str, Any]
) -> Source:
    """A source under our names. Its card's options and preprocessing are those of the images."""
    notes = [] if "act" in options else [NOTE]
    images = [name for name in source.tensors if name.startswith(("visual", "vision_model."))]
    left_out = [f"{len(images)} tensors of the images' tower"] if images else []
    if any("text_projection" in name for name in source.tensors):
        left_out.append("the projection behind the text tower")
    card = ModelCard(
        None,
        {**CLIP, **_sizes(tensors), **options},
        model.card.preprocessing,
        license=source.card.license if source.card else None,
        source=source.name,
        extra={k: v for k, v in (("left_out", left_out), ("notes", notes)) if v},
    )
    return replace(source, tensors=tensors, card=card, position_grids={}, network=None)


def _sizes(tensors: StateDict) -> dict[str, Any]:
    """Options that the shapes tell."""
    width = tensors["token_embed.weight"].shape[1]
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    hidden = tensors.get("blocks.0.mlp.fc1.weight")
    sizes = {} if hidden is None else {"mlp_ratio": len(hidden) / width}
    qk_norm = "blocks.0.attn.q_norm.weight" in tensors
    return {"embed_dim": width, "depth": len(blocks), "qk_norm": qk_norm, **sizes}


def _of_network(source: Source) -> dict[str, Any]:
    """What open_clip's modules tell: `CLIP` holds its text tower's parts itself."""
    text: Any = getattr(source.network, "text", source.network)
    if not hasattr(text, "token_embedding"):
        return {}
    block = text.transformer.resblocks[0]
    return {
        "act": activation_name(source.name, block.mlp.gelu),
        "num_heads": block.attn.num_heads,
        "norm_eps": text.ln_final.eps,
        "causal": text.attn_mask is not None,
        "pool": getattr(text, "pool_type", getattr(text, "text_pool_type", "argmax")),
        "padding": bool(getattr(text, "use_pad_mask", False)),
    }


def _of_config(source: Source) -> dict[str, Any]:
    """The same of open_clip's table in a folder, defaults included."""
    table = source.config.get("model_cfg", {})
    if not isinstance(table, Mapping) or "text_cfg" not in table:
        return {}
    from open_clip.model import CLIPTextCfg

    names = ("heads", "no_causal_mask", "pool_type")
    text = {name: table["text_cfg"].get(name, getattr(CLIPTextCfg, name)) for name in names}
    return {
        "act": "quick_gelu" if table.get("quick_gelu") else "gelu",
        "num_heads": text["heads"],
        "causal": not text["no_causal_mask"],
        "pool": text["pool_type"],
        "padding": False,
    }


def _refuse_others(source: Source, known: Mapping[str, Any]) -> None:
    """Towers in which padding counts, or another token than the end token is pooled."""
    why = ""
    if not known.get("causal", True) and not known["padding"]:
        why = "lets tokens see the padding behind a caption"
    elif known.get("pool", "argmax") not in POOLS:
        why = f"pools by {known['pool']!r}"
    elif not known and any(name.endswith("text_projection.bias") for name in source.tensors):
        why = "ends with a bias, as those of SigLIP do, whose tokens see the padding"
    if why:
        raise WeightsError(
            f"{source.name}: its text tower {why}, unlike CLIP's, which TextTower follows; take "
            f"crossmodal.text_tower('open_clip:ARCH', pretrained='open_clip:ARCH/TAG')"
        )


def _is_open_clip(source: Source) -> bool:
    names = {name.removeprefix("text.") for name in source.tensors}
    return {"token_embedding.weight", "positional_embedding", "ln_final.weight"} <= names


def _is_transformers(source: Source) -> bool:
    names = {name.removeprefix("text_model.") for name in source.tensors}
    return {"embeddings.token_embedding.weight", "final_layer_norm.weight"} <= names


register_layout(
    Layout(
        name="open_clip's text tower",
        fits=lambda model: isinstance(model, TextTower),
        recognises=_is_open_clip,
        translate=_translate_open_clip,
    )
)
register_layout(
    Layout(
        name="transformers' CLIP text tower",
        fits=lambda model: isinstance(model, TextTower),
        recognises=_is_transformers,
        translate=_translate_transformers,
    )
)
