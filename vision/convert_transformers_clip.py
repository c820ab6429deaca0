"""CLIP's visual tower as the library transformers names it (arXiv 2103.00020).

A whole CLIP model will do: what belongs to its texts is left out, and the card says so. The
projection into the space of images and texts becomes our head, with a bias of zeros. A config.json
may leave out what equals the library's defaults, such as QuickGELU. Positions are resampled without
antialiasing, as in transformers.

Shapes: n tokens, d width, p width of the space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vision.convert import CLASS_TOKEN, KeyMap, StateDict, is_vit, stack, translated, unstack
from vision.convert_clip import NOTE
from vision.convert_clip import PREPROCESSING as CLIP_PREPROCESSING
from vision.convert_transformers import activation, known_grids
from zoo.layouts import Layout, register_layout
from zoo.sources import Source

PREFIX = "vision_model."
_LAYER = "encoder.layers.*"
CLIP = KeyMap(
    {
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding.weight": "pos_embed",
        "embeddings.patch_embedding": "patch_embed.proj",
        "pre_layrnorm": "norm_pre",  # so it is written there
        f"{_LAYER}.layer_norm1": "blocks.*.norm1",
        **{f"{_LAYER}.self_attn.{part}_proj": f"blocks.*.attn.{part}" for part in "qkv"},
        f"{_LAYER}.self_attn.out_proj": "blocks.*.attn.proj",
        f"{_LAYER}.layer_norm2": "blocks.*.norm2",
        f"{_LAYER}.mlp.fc1": "blocks.*.mlp.fc1",
        f"{_LAYER}.mlp.fc2": "blocks.*.mlp.fc2",
        "post_layernorm": "norm",
        "visual_projection.weight": "head.weight",
    }
)
DEFAULTS: dict[str, Any] = {
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
CLASSIFIER = (
    "the classifier, which reads the mean of the patches before the last norm: VisionTransformer "
    "normalises what it pools"
)
_TEXT = ("text_model.", "text_projection.", "logit_scale")


def convert_transformers_clip(state_dict: StateDict) -> dict[str, Tensor]:
    """For `VisionTransformer`, from `CLIPModel`, `CLIPVisionModel` or one with its projection.

    A classifier (`CLIPForImageClassification`) is left out.
    """
    visual = {
        name.removeprefix(PREFIX): value
        for name, value in state_dict.items()
        if not name.startswith((*_TEXT, "classifier.")) and not name.endswith(".position_ids")
    }
    ours = stack(CLIP.convert(visual))
    if "cls_token" in ours:
        ours["cls_token"] = ours["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in ours:
        ours["pos_embed"] = ours["pos_embed"][None]
    if "head.weight" in ours:
        ours["head.bias"] = ours["head.weight"].new_zeros(len(ours["head.weight"]))
    return ours


def revert_transformers_clip(state_dict: StateDict) -> dict[str, Tensor]:
    """For `CLIPVisionModelWithProjection`, from ours with `pre_norm` and a head without bias.

    Raises:
        ValueError: the head has a bias, for which CLIP has no place.
    """
    ours = dict(state_dict)
    bias = ours.pop("head.bias", None)
    if bias is not None and bias.any():
        raise ValueError("head.bias must be zero: the projection of CLIP has none")
    theirs = CLIP.revert(unstack(ours))
    theirs["embeddings.class_embedding"] = theirs["embeddings.class_embedding"].flatten()
    position = "embeddings.position_embedding.weight"
    theirs[position] = theirs[position][0]
    projection = theirs.pop("visual_projection.weight", None)
    theirs = {f"{PREFIX}{name}": value for name, value in theirs.items()}
    return theirs if projection is None else {**theirs, "visual_projection.weight": projection}


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the visual tower, defaults included; empty without one."""
    if config.get("library") != "transformers":
        return {}
    told = config.get("vision_config") or {}
    return {**DEFAULTS, **(told if "vision_config" in config else config)}


def _recognises(source: Source) -> bool:
    names = {name.removeprefix(PREFIX) for name in source.tensors}
    return {"embeddings.class_embedding", "embeddings.patch_embedding.weight"} <= names


def _translate(source: Source, model: nn.Module) -> Source:
    tensors = convert_transformers_clip(source.tensors)
    config = vision_config(source.config)
    options = {**CLASS_TOKEN, "pre_norm": True, "global_pool": "token", "norm_eps": 1e-5}
    if config:
        options["act"] = activation(source.name, config)
        options["norm_eps"] = float(config["layer_norm_eps"])
        options["num_heads"] = config["num_attention_heads"]
    text = sum(name.startswith(_TEXT) for name in source.tensors)
    left_out = [f"{text} tensors of the text part"] if text else []
    left_out += [CLASSIFIER] if "classifier.weight" in source.tensors else []
    grids = {name.removeprefix(PREFIX): grid for name, grid in source.position_grids.items()}
    told = replace(source, config=config, position_grids=grids)
    return translated(
        source,
        model,
        tensors,
        options,
        preprocessing=CLIP_PREPROCESSING,
        grids=known_grids(told, CLIP, tensors, prefix=1),
        left_out=left_out,
        notes=[] if config else [NOTE],
        antialias=False,
    )


register_layout(
    Layout(
        name="transformers' CLIP visual tower",
        fits=is_vit,
        recognises=_recognises,
        translate=_translate,
    )
)
