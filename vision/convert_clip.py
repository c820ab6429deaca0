"""Visual towers of CLIP (arXiv 2103.00020), from OpenAI's and open_clip's state dicts.

The projection into the space of images and texts becomes our head, with a bias of zeros, as in
timm. Positions, block structure and norms are ours with `pre_norm`.

Shapes: n tokens, d width, p width of the space.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from vision.convert import (
    CLASS_TOKEN,
    KeyMap,
    StateDict,
    activation_name,
    is_vit,
    network_of,
    norm_eps,
    refuse,
    translated,
)
from vision.vit_variants import OPENAI_MEAN, OPENAI_STD
from zoo.card import Preprocessing
from zoo.layouts import Layout, register_layout
from zoo.sources import Source

_LAYER = "transformer.resblocks.*"
CLIP = KeyMap(
    {
        "conv1": "patch_embed.proj",
        "class_embedding": "cls_token",
        "positional_embedding": "pos_embed",
        "ln_pre": "norm_pre",
        f"{_LAYER}.ln_1": "blocks.*.norm1",
        f"{_LAYER}.attn.in_proj_weight": "blocks.*.attn.qkv.weight",
        f"{_LAYER}.attn.in_proj_bias": "blocks.*.attn.qkv.bias",
        f"{_LAYER}.attn.ln_q": "blocks.*.attn.q_norm",
        f"{_LAYER}.attn.ln_k": "blocks.*.attn.k_norm",
        f"{_LAYER}.attn.out_proj": "blocks.*.attn.proj",
        f"{_LAYER}.ls_1": "blocks.*.ls1",
        f"{_LAYER}.ln_2": "blocks.*.norm2",
        f"{_LAYER}.mlp.c_fc": "blocks.*.mlp.fc1",
        f"{_LAYER}.mlp.c_proj": "blocks.*.mlp.fc2",
        f"{_LAYER}.ls_2": "blocks.*.ls2",
        "ln_post": "norm",
        "proj": "head.weight",
    }
)
CLIP_LACKS = {"attn_pool": "attentional pooling with projections of its own"}
# Beside the visual tower; the last three are in OpenAI's own files.
TEXT_PART = re.compile(
    r"(text|text_decoder|transformer|token_embedding|ln_final|text_projection)\..+|"
    r"text_projection|positional_embedding|attn_mask|logit_scale|logit_bias|"
    r"input_resolution|context_length|vocab_size"
)
NOTE = (
    "the file does not tell which activation it was trained with: OpenAI's weights (and a few of "
    "open_clip's) need act='quick_gelu', models named *_clip_quickgelu_*; others act='gelu'"
)
PREPROCESSING = Preprocessing(mean=OPENAI_MEAN, std=OPENAI_STD)


def convert_clip_visual(state_dict: StateDict) -> dict[str, Tensor]:
    """For `VisionTransformer`, from a visual tower with or without its prefix `visual.`"""
    visual, rest = _split(state_dict)
    ours = CLIP.convert(visual)
    if "cls_token" in ours:
        ours["cls_token"] = ours["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in ours:
        ours["pos_embed"] = ours["pos_embed"][None]
    if "head.weight" in ours:
        ours["head.weight"] = ours["head.weight"].T
        ours["head.bias"] = ours["head.weight"].new_zeros(len(ours["head.weight"]))
    if "norm_pre.weight" not in ours and "patch_embed.proj.weight" in ours:
        weight = ours["patch_embed.proj.weight"]  # a tower without that norm has no bias either
        ours["patch_embed.proj.bias"] = weight.new_zeros(len(weight))
    return {**ours, **{k: v for k, v in rest.items() if not TEXT_PART.fullmatch(k)}}


def revert_clip_visual(state_dict: StateDict) -> dict[str, Tensor]:
    """For open_clip's `VisionTransformer`, from ours with `pre_norm` and a head without bias.

    Raises:
        ValueError: the head has a bias, for which CLIP has no place.
    """
    ours = dict(state_dict)
    bias = ours.pop("head.bias", torch.zeros(1))
    if bias.any():
        raise ValueError("head.bias must be zero: the projection of CLIP has none")
    theirs = CLIP.revert(ours)
    theirs["class_embedding"] = theirs["class_embedding"].flatten()
    theirs["positional_embedding"] = theirs["positional_embedding"][0]
    if "proj" in theirs:
        theirs["proj"] = theirs["proj"].T
    return theirs


def _split(state_dict: StateDict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The visual tower without its prefix, and what is beside it."""
    prefix = "visual."
    visual = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    if not visual:
        return dict(state_dict), {}
    return visual, {k: v for k, v in state_dict.items() if not k.startswith(prefix)}


def _recognises(source: Source) -> bool:
    visual, _ = _split(source.tensors)
    return {"conv1.weight", "class_embedding", "positional_embedding"} <= visual.keys()


def _translate(source: Source, model: nn.Module) -> Source:
    refuse(source, CLIP_LACKS)
    visual, rest = _split(source.tensors)
    text = [name for name in rest if TEXT_PART.fullmatch(name)]
    tensors = convert_clip_visual(source.tensors)
    options: dict[str, Any] = {
        **CLASS_TOKEN,
        "pre_norm": "ln_pre.weight" in visual,
        "qk_norm": any(".attn.ln_q" in name for name in visual),
        "norm_eps": 1e-5,
    }
    known = _of_network(source, tensors)
    grids = {name.removeprefix("visual."): grid for name, grid in source.position_grids.items()}
    return translated(
        source,
        model,
        tensors,
        {**options, "global_pool": "token", **known},
        preprocessing=PREPROCESSING,
        grids=CLIP.convert(grids),
        left_out=[f"{len(text)} tensors of the text part"] if text else [],
        notes=[] if "act" in known else [NOTE],
    )


def _of_network(source: Source, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Options of open_clip's network; a mean that is normalised after pooling renames its norm."""
    network = network_of(source, "open_clip.transformer")
    if network is None:
        return {}
    block, average = network.transformer.resblocks[0], network.pool_type == "avg"
    if average and network.final_ln_after_pool:
        for leaf in ("weight", "bias"):
            tensors[f"fc_norm.{leaf}"] = tensors.pop(f"norm.{leaf}")
    return {
        "global_pool": {"tok": "token", "avg": "avg", "none": ""}[network.pool_type],
        "num_heads": block.attn.num_heads,
        "act": activation_name(source.name, block.mlp.gelu),
        "norm_eps": norm_eps(source.name, network),
    }


register_layout(
    Layout(name="CLIP's visual tower", fits=is_vit, recognises=_recognises, translate=_translate)
)
