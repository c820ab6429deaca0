"""timm's Vision Transformers: named as ours, but what their tensors do not show must agree as well.

The source knows its network, of the library or as a folder's config.json describes it. From there
its activation, epsilon, pooling, heads and prefix tokens go into the card; parts that our model
lacks are errors that name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from vision.convert import (
    SOFTMAX,
    StateDict,
    activation_name,
    is_vit,
    network_of,
    norm_eps,
    translated,
)
from vision.convert_clip import TEXT_PART
from vision.vit import POOLS
from zoo.layouts import Layout, register_layout
from zoo.sources import Source, WeightsError

_MODULE = "timm.models.vision_transformer"
NOTE = "the file does not tell the activation, the epsilon of the norms and the pooling"
TRUNK, PROJECTION = "visual.trunk.", "visual.head.proj.weight"


def timm_options(network: Any, name: str = "the network") -> dict[str, Any]:
    """The options of our model that equal those of timm's `VisionTransformer`.

    Raises:
        WeightsError: it has parts that ours lacks.
    """
    found = list(_parts_we_lack(network))
    if found:
        raise WeightsError(f"{name} has {', '.join(found)}, which VisionTransformer lacks")
    block = network.blocks[0]
    return {
        **SOFTMAX,
        "act": activation_name(name, block.mlp.act),
        "norm_eps": norm_eps(name, network),
        "pre_norm": not isinstance(network.norm_pre, nn.Identity),
        "global_pool": network.global_pool,
        "class_token": network.has_class_token,
        "reg_tokens": network.num_reg_tokens,
        "no_embed_class": network.no_embed_class,
        "qkv_bias": block.attn.qkv.bias is not None,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "num_heads": block.attn.num_heads,
        "position": "none" if network.pos_embed is None else "learned",
    }


def _parts_we_lack(network: Any) -> Iterator[str]:
    """Names of modules and options of timm's that our model does not have."""
    block = network.blocks[0]
    modules = {"PatchEmbed": network.patch_embed, "Block": block}
    modules |= {"Attention": getattr(block, "attn", None), "Mlp": getattr(block, "mlp", None)}
    found = {known: type(m).__name__ for known, m in modules.items() if type(m).__name__ != known}
    if found:  # what they hold cannot be compared
        yield from (f"a {other} in place of {known}" for known, other in found.items())
        return
    norms = {"scale_attn_norm": block.attn, "scale_mlp_norm": block.mlp}
    lacked = {
        "a distillation token (dist_token)": hasattr(network, "dist_token"),
        f"global_pool {network.global_pool!r}": network.global_pool not in POOLS,
        "pool_include_prefix": getattr(network, "pool_include_prefix", False),
        "no final norm (final_norm=False)": _absent(network.norm, network.fc_norm),
        "a norm of the patches (embed_norm_layer)": not _absent(network.patch_embed.norm),
        **{name: not _absent(getattr(m, "norm", nn.Identity())) for name, m in norms.items()},
        "proj_bias=False": block.attn.proj.bias is None,
    }
    yield from (what for what, is_there in lacked.items() if is_there)


def _absent(*modules: nn.Module) -> bool:
    return all(isinstance(module, nn.Identity) for module in modules)


def convert_open_clip_trunk(state_dict: StateDict) -> dict[str, Tensor]:
    """For `VisionTransformer`, from a tower of open_clip's that is timm's, as SigLIP's are.

    A projection after it becomes the head, with a bias of zeros.
    """
    ours: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        if name == PROJECTION:
            ours |= {"head.weight": value, "head.bias": value.new_zeros(len(value))}
        elif name.startswith("visual.") or not TEXT_PART.fullmatch(name):
            ours[name.removeprefix(TRUNK)] = value
    return ours


def revert_open_clip_trunk(state_dict: StateDict) -> dict[str, Tensor]:
    """For a tower of open_clip's without a projection of its own."""
    return {f"{TRUNK}{name}": value for name, value in state_dict.items()}


def _is_trunk(source: Source) -> bool:
    return any(name.startswith(TRUNK) for name in source.tensors)


def _translate(source: Source, model: nn.Module) -> Source:
    network = network_of(source, _MODULE)
    tensors, text = source.tensors, 0
    if _is_trunk(source):
        tensors = convert_open_clip_trunk(tensors)
        text = sum(TEXT_PART.fullmatch(name) is not None for name in source.tensors)
    return translated(
        source,
        model,
        tensors,
        {} if network is None else timm_options(network, source.name),
        grids={name.removeprefix(TRUNK): grid for name, grid in source.position_grids.items()}
        or _grids(network, tensors),
        left_out=[f"{text} tensors of the text part"] if text else [],
        notes=[NOTE] if network is None else [],
    )


def _grids(network: Any, tensors: StateDict) -> dict[str, tuple[int, int]]:
    """The network's grid, where the tensors have as many positions."""
    here, theirs = tensors.get("pos_embed"), getattr(network, "pos_embed", None)
    if here is None or theirs is None or here.shape != theirs.shape:
        return {}
    return {"pos_embed": tuple(network.patch_embed.grid_size)}


register_layout(
    Layout(
        name="timm's ViT",
        fits=is_vit,
        recognises=lambda source: _is_trunk(source) or network_of(source, _MODULE) is not None,
        translate=_translate,
    )
)
