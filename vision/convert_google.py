"""The original ViT checkpoints (`.npz`, arXiv 2010.11929 and 2106.10270), and big_vision's.

Flax keeps dense kernels as (in out), those of attention by head, convolutions as (y x in out).
big_vision (SigLIP, arXiv 2303.15343) numbers its modules otherwise, may stack all blocks in one
tensor, and has no position for the class token.

Shapes: h heads, e width of a head, d width, l blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vision.convert import CLASS_TOKEN, KeyMap, StateDict, is_vit, stack, translated, unstack
from zoo.layouts import Layout, register_layout
from zoo.sources import Source

PREFIXES = ("opt/target/", "params/img/", "params/")
_BLOCK, _POOL = "Transformer.encoderblock_*", "MAPHead_0"


def _block(attention: str, norm2: str, mlp: str) -> dict[str, str]:
    parts = {"query": "q", "key": "k", "value": "v", "out": "proj"}
    return {
        f"{_BLOCK}.LayerNorm_0": "blocks.*.norm1",
        **{f"{_BLOCK}.{attention}.{k}": f"blocks.*.attn.{ours}" for k, ours in parts.items()},
        f"{_BLOCK}.{norm2}": "blocks.*.norm2",
        f"{_BLOCK}.{mlp}.Dense_0": "blocks.*.mlp.fc1",
        f"{_BLOCK}.{mlp}.Dense_1": "blocks.*.mlp.fc2",
    }


_ENDS = {
    "embedding": "patch_embed.proj",
    "cls": "cls_token",
    "Transformer.encoder_norm": "norm",
    "head": "head",
}
GOOGLE = KeyMap(
    {
        **_ENDS,
        "Transformer.posembed_input.pos_embedding": "pos_embed",
        **_block("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    }
)
BIG_VISION = KeyMap(
    {
        **_ENDS,
        "pos_embedding": "pos_embed",
        **_block("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
        f"{_POOL}.probe": "attn_pool.latent",
        f"{_POOL}.MultiHeadDotProductAttention_0.query": "attn_pool.q",
        f"{_POOL}.MultiHeadDotProductAttention_0.key": "attn_pool.k",
        f"{_POOL}.MultiHeadDotProductAttention_0.value": "attn_pool.v",
        f"{_POOL}.MultiHeadDotProductAttention_0.out": "attn_pool.proj",
        f"{_POOL}.LayerNorm_0": "attn_pool.norm",
        f"{_POOL}.MlpBlock_0.Dense_0": "attn_pool.mlp.fc1",
        f"{_POOL}.MlpBlock_0.Dense_1": "attn_pool.mlp.fc2",
    }
)
NOTE = (
    "trained with JAX's gelu, the tanh approximation: act='gelu_tanh' follows it exactly, timm "
    "runs these weights with act='gelu'"
)


def convert_google(state_dict: StateDict) -> dict[str, Tensor]:
    """For `VisionTransformer`, from the arrays of an `.npz`, original or big_vision's."""
    state = _unstacked_blocks(_without_prefix(state_dict))
    names = BIG_VISION if "pos_embedding" in state else GOOGLE
    dotted = {}
    for name, value in state.items():
        *module, leaf = name.split("/")
        if leaf in ("kernel", "scale"):
            leaf = "weight"
        dotted[".".join([*module, leaf])] = _ours(name, value)
    # The pooling's query is a parameter: its projection stays apart.
    return stack(stack(names.convert(dotted)), "kv", "attn_pool")


def revert_google(state_dict: StateDict, num_heads: int) -> dict[str, Tensor]:
    """The arrays of an original `.npz`, from the state dict of ours with a class token."""
    theirs = {}
    for name, value in GOOGLE.revert(unstack(state_dict)).items():
        *module, leaf = name.split(".")
        if leaf == "weight":
            leaf = "scale" if "norm" in module[-1].lower() else "kernel"
        key = "/".join([*module, leaf])
        theirs[key] = _theirs(key, value, num_heads)
    return theirs


def _ours(name: str, value: Tensor) -> Tensor:
    """An array of Flax in the shape that torch gives it."""
    if name == "embedding/kernel":
        return rearrange(value, "y x c d -> d c y x")
    if name.endswith(("query/kernel", "key/kernel", "value/kernel")):
        return rearrange(value, "d h e -> (h e) d")
    if name.endswith("out/kernel"):
        return rearrange(value, "h e d -> d (h e)")
    if name.endswith(("query/bias", "key/bias", "value/bias")):
        return value.flatten()
    if name == "pos_embedding" and value.ndim == 2:
        return value[None]
    return value.T if name.endswith("kernel") and value.ndim == 2 else value


def _theirs(name: str, value: Tensor, num_heads: int) -> Tensor:
    if name == "embedding/kernel":
        return rearrange(value, "d c y x -> y x c d")
    if name.endswith(("query/kernel", "key/kernel", "value/kernel")):
        return rearrange(value, "(h e) d -> d h e", h=num_heads)
    if name.endswith("out/kernel"):
        return rearrange(value, "d (h e) -> h e d", h=num_heads)
    if name.endswith(("query/bias", "key/bias", "value/bias")):
        return rearrange(value, "(h e) -> h e", h=num_heads)
    return value.T if name.endswith("kernel") else value


def _without_prefix(state: StateDict) -> dict[str, Tensor]:
    prefix = next((p for p in PREFIXES if f"{p}embedding/kernel" in state), "")
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _unstacked_blocks(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """big_vision's scan over blocks keeps them in one tensor (l ...) each."""
    apart: dict[str, Tensor] = {}
    for name, value in state.items():
        if "/encoderblock/" not in name:
            apart[name] = value
            continue
        for index, layer in enumerate(torch.unbind(value)):
            apart[name.replace("/encoderblock/", f"/encoderblock_{index}/")] = layer
    return apart


def _translate(source: Source, model: nn.Module) -> Source:
    plain, tensors = _without_prefix(source.tensors), convert_google(source.tensors)
    beside, left_out = len(source.tensors) - len(plain), []
    if beside:
        left_out.append(f"{beside} arrays beside the image model")
    hidden = [name for name in tensors if name.startswith("pre_logits.")]
    if hidden and not getattr(model, "num_classes", 0):  # it belongs to the classifier
        tensors = {name: value for name, value in tensors.items() if name not in hidden}
        left_out.append("pre_logits, a hidden layer before the classifier")
    state = _unstacked_blocks(plain)
    queries = next(value for name, value in state.items() if name.endswith("/query/kernel"))
    return translated(
        source,
        model,
        tensors,
        {**_options(state), "num_heads": queries.shape[1]},
        left_out=left_out,
        notes=[NOTE],
    )


def _options(state: dict[str, Tensor]) -> dict[str, Any]:
    class_token, pooled = "cls" in state, any(name.startswith(_POOL) for name in state)
    return {
        **CLASS_TOKEN,
        "norm_eps": 1e-6,
        "class_token": class_token,
        "no_embed_class": class_token and "pos_embedding" in state,
        "global_pool": "map" if pooled else "token" if class_token else "avg",
    }


def _recognises(source: Source) -> bool:
    state = _without_prefix(source.tensors)
    return "embedding/kernel" in state and "Transformer/encoder_norm/scale" in state


register_layout(
    Layout(name="Google's ViT", fits=is_vit, recognises=_recognises, translate=_translate)
)
