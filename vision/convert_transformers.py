"""ViT, DeiT and DINOv2 as the library transformers names them, and DINOv2's own files.

transformers keeps queries, keys and values apart, and wraps a model with a head (`vit.`,
`dinov2.`). Its files have the names of version 4, its modules since version 5 others; both are
understood, files are written. Its positions are resampled without antialiasing (DINOv2 with
registers: with), so the cards say `antialias`. The original DINOv2 passes a scale factor of
(side + 0.1) / 37 instead of the new size, which shifts its positions a little; transformers and we
pass the size.

Shapes: n positions of the grid, r registers, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision.convert import (
    CLASS_TOKEN,
    IMAGENET_MEAN,
    IMAGENET_STD,
    KeyMap,
    StateDict,
    is_vit,
    refuse,
    stack,
    translated,
    unstack,
)
from vision.vit import VisionTransformer
from zoo.card import Preprocessing
from zoo.layouts import Layout, register_layout
from zoo.sources import Source, WeightsError

PREFIXES = ("vit.", "deit.", "dinov2_with_registers.", "dinov2.")
_ENDS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
}
_ATTENTION = {
    "attention.attention.query": "attn.q",
    "attention.attention.key": "attn.k",
    "attention.attention.value": "attn.v",
    "attention.output.dense": "attn.proj",
}
_ATTENTION_5 = {f"attention.{part}_proj": f"attn.{part}" for part in "qkv"} | {
    "attention.o_proj": "attn.proj"
}
_QUERY_BIASES = ("attention.query.bias", "attention.q_proj.bias", "attn.qkv.bias")
_VIT = {"layernorm_before": "norm1", "layernorm_after": "norm2"}
_VIT_MLP = {"intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"}
_MLP = {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
_DINOV2 = {
    "norm1": "norm1",
    "norm2": "norm2",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}


def _layers(layer: str, *names: Mapping[str, str]) -> dict[str, str]:
    return {f"{layer}.*.{k}": f"blocks.*.{ours}" for table in names for k, ours in table.items()}


VIT = KeyMap(
    {
        **_ENDS,
        **_layers("encoder.layer", _ATTENTION, _VIT, _VIT_MLP),
        **_layers("layers", _ATTENTION_5, _VIT, _MLP),
    }
)
DINOV2 = KeyMap(
    {
        **_ENDS,
        "embeddings.register_tokens": "reg_token",
        **_layers("encoder.layer", _ATTENTION, _ATTENTION_5, _DINOV2, _MLP),
    }
)
LACKS = {
    "distillation_token": "a distillation token (DeiT's distilled models)",
    "mlp.gate_proj": "a SwiGLU",
    "mlp.weights_in": "a SwiGLU",
    "mlp.w12": "a SwiGLU",
}
MASK_TOKEN = "the mask token, which only training with masks needs"
POOLER = "the pooler, a layer that no classifier of transformers reads"
CLASSIFIER = (
    "the classifier, which reads the class token and the mean of the patches side by side: "
    "VisionTransformer pools one of them"
)
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def convert_transformers_vit(state_dict: StateDict) -> dict[str, Tensor]:
    """For `VisionTransformer`, from transformers' `ViTModel` or `ViTForImageClassification`."""
    ours = stack(VIT.convert(_without_prefix(state_dict)))
    return {k: v for k, v in ours.items() if not k.startswith("pooler.")}


def revert_transformers_vit(state_dict: StateDict) -> dict[str, Tensor]:
    """For transformers' `ViTModel` (no classifier), with the names of its files."""
    return VIT.revert(unstack(state_dict))


def convert_transformers_dinov2(
    state_dict: StateDict, no_embed_class: bool = False
) -> dict[str, Tensor]:
    """For `VisionTransformer`, from transformers' `Dinov2Model`, with registers or without.

    Args:
        state_dict: Theirs; its classifier, if any, is left out.
        no_embed_class: The model's: whether its positions are those of the grid alone.
    """
    ours = stack(DINOV2.convert(_without_prefix(state_dict)))
    left_out = ("embeddings.mask_token", "head.weight", "head.bias")
    return _place_positions({k: v for k, v in ours.items() if k not in left_out}, no_embed_class)


def revert_transformers_dinov2(
    state_dict: StateDict, no_embed_class: bool = False
) -> dict[str, Tensor]:
    """For transformers' `Dinov2Model` or `Dinov2WithRegistersModel`; the mask token is missing."""
    return DINOV2.revert(unstack(_replace_positions(dict(state_dict), no_embed_class)))


def convert_dinov2(state_dict: StateDict, no_embed_class: bool = False) -> dict[str, Tensor]:
    """For `VisionTransformer`, from DINOv2's own files (arXiv 2304.07193, 2309.16588)."""
    ours = {k: v for k, v in state_dict.items() if k != "mask_token"}
    if "register_tokens" in ours:
        ours["reg_token"] = ours.pop("register_tokens")
    return _place_positions(ours, no_embed_class)


def revert_dinov2(state_dict: StateDict, no_embed_class: bool = False) -> dict[str, Tensor]:
    """For DINOv2's own module; the mask token is missing."""
    theirs = _replace_positions(dict(state_dict), no_embed_class)
    if "reg_token" in theirs:
        theirs["register_tokens"] = theirs.pop("reg_token")
    return theirs


def _place_positions(ours: dict[str, Tensor], no_embed_class: bool) -> dict[str, Tensor]:
    """DINOv2's positions (1 (1 + n) d), none for registers, as those of a `VisionTransformer`.

    What the class token gets added is part of the token, or registers get zeros added.
    """
    if "pos_embed" not in ours or "cls_token" not in ours:
        return ours
    position = ours["pos_embed"]
    if no_embed_class:
        added = {"cls_token": ours["cls_token"] + position[:, :1], "pos_embed": position[:, 1:]}
        return {**ours, **added}
    if "reg_token" in ours:
        zeros = torch.zeros_like(ours["reg_token"])
        position = torch.cat([position[:, :1], zeros, position[:, 1:]], dim=1)
    return {**ours, "pos_embed": position}


def _replace_positions(ours: dict[str, Tensor], no_embed_class: bool) -> dict[str, Tensor]:
    """The inverse: a class token that has taken its position up gets zeros."""
    position = ours["pos_embed"]
    registers = ours["reg_token"].shape[1] if "reg_token" in ours else 0
    if no_embed_class:
        position = torch.cat([torch.zeros_like(position[:, :1]), position], dim=1)
    elif registers:
        added = position[:, 1 : 1 + registers]
        if added.any():
            raise ValueError("pos_embed adds to the registers, which DINOv2 cannot")
        position = torch.cat([position[:, :1], position[:, 1 + registers :]], dim=1)
    return {**ours, "pos_embed": position}


def _without_prefix(state: Mapping[str, Any]) -> dict[str, Any]:
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in state)), "")
    return {name.removeprefix(prefix): value for name, value in state.items()}


# --- layouts -------------------------------------------------------------------------------------


def _options(source: Source, eps: float) -> dict[str, Any]:
    """What the source's config.json says, or else the library's defaults; biases as they are."""
    config = source.config
    options = {
        **CLASS_TOKEN,
        "qkv_bias": any(name.endswith(_QUERY_BIASES) for name in source.tensors),
        "norm_eps": float(config.get("layer_norm_eps", eps)),
        "act": activation(source.name, config),
    }
    if "num_attention_heads" in config:
        options["num_heads"] = config["num_attention_heads"]
    return options


def activation(name: str, config: Mapping[str, Any]) -> str:
    """One of our activations, from `hidden_act` of a config.json that `name` is about."""
    act = config.get("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        raise WeightsError(
            f"{name}: hidden_act {act!r} is none of VisionTransformer's activations; "
            f"known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[act]


def known_grids(
    source: Source, names: KeyMap, tensors: Mapping[str, Tensor], prefix: int
) -> dict[str, tuple[int, int]]:
    """The grid that the source tells, or its config.json if it has as many positions."""
    if told := names.convert(_without_prefix(source.position_grids)):
        return told
    size, patch = source.config.get("image_size"), source.config.get("patch_size")
    if size is None or patch is None or "pos_embed" not in tensors:
        return {}
    (rows, cols), (high, wide) = as_pair(size), as_pair(patch)
    grid = rows // high, cols // wide
    return {"pos_embed": grid} if tensors["pos_embed"].shape[1] == prefix + math.prod(grid) else {}


def as_pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _recognises(source: Source, layer_part: str) -> bool:
    names = _without_prefix(source.tensors)
    return "embeddings.patch_embeddings.projection.weight" in names and any(
        name.endswith(layer_part) for name in names
    )


def _translate_vit(source: Source, model: nn.Module) -> Source:
    refuse(source, LACKS)
    tensors = convert_transformers_vit(source.tensors)
    options = _options(source, eps=1e-12)
    if "head.weight" in tensors:
        options["global_pool"] = "token"
    pooler = "pooler.dense.weight" in _without_prefix(source.tensors)
    return translated(
        source,
        model,
        tensors,
        options,
        grids=known_grids(source, VIT, tensors, prefix=1),
        left_out=[POOLER] if pooler else [],
        antialias=False,
    )


def _translate_dinov2(source: Source, model: nn.Module) -> Source:
    named = _without_prefix(source.tensors)
    left_out = [CLASSIFIER] if "classifier.weight" in named else []
    left_out += [MASK_TOKEN] if "embeddings.mask_token" in named else []
    grids = DINOV2.convert(_without_prefix(source.position_grids))
    return _dinov2(source, model, convert_transformers_dinov2, left_out, grids)


def _translate_own(source: Source, model: nn.Module) -> Source:
    left_out = [MASK_TOKEN] if "mask_token" in source.tensors else []
    return _dinov2(source, model, convert_dinov2, left_out, source.position_grids)


def _dinov2(
    source: Source,
    model: nn.Module,
    convert: Callable[[StateDict, bool], dict[str, Tensor]],
    left_out: list[str],
    grids: Mapping[str, tuple[int, int]],
) -> Source:
    refuse(source, LACKS)
    no_embed_class = isinstance(model, VisionTransformer) and model.no_embed_class
    tensors = convert(source.tensors, no_embed_class)
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    options = {**_options(source, eps=1e-6), "reg_tokens": registers}
    del options["no_embed_class"]  # converted to what the model has
    return translated(
        source,
        model,
        tensors,
        options,
        preprocessing=_imagenet(model),
        grids=grids or known_grids(source, DINOV2, tensors, 0 if no_embed_class else 1 + registers),
        left_out=left_out,
        antialias=registers > 0,
    )


def _imagenet(model: nn.Module) -> Preprocessing:
    """The model's preprocessing, with the mean and the deviation that DINOv2 was trained with."""
    card = getattr(model, "card", None)
    known = card.preprocessing.adapted(in_chans=3) if card is not None else Preprocessing()
    return replace(known, mean=IMAGENET_MEAN, std=IMAGENET_STD)


# --- registration --------------------------------------------------------------------------------

register_layout(
    Layout(
        name="transformers' DINOv2",
        fits=is_vit,
        recognises=lambda source: _recognises(source, ".layer_scale1.lambda1"),
        translate=_translate_dinov2,
    )
)
register_layout(
    Layout(
        name="transformers' ViT",
        fits=is_vit,
        recognises=lambda source: _recognises(source, ".layernorm_before.weight"),
        translate=_translate_vit,
    )
)
register_layout(
    Layout(
        name="DINOv2's own",
        fits=is_vit,
        recognises=lambda source: (
            {"mask_token", "cls_token", "pos_embed", "blocks.0.norm1.weight"}
            <= source.tensors.keys()
        ),
        translate=_translate_own,
    )
)
