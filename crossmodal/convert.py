"""open_clip's state dicts under our names: its text tower, attentional pooler and blocks.

Pure functions from one dict of tensors to another, which then loads strictly. A tensor that has no
place with us is an error that names it, never left out in silence. `crossmodal.text_layouts` makes
sources of `zoo.load_pretrained` of them.

Shapes: d width, p width of the space that text and images share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

StateDict = Mapping[str, Tensor]

MLP = {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
BLOCK = {  # open_clip's module, or tensor -> ours, in zoo.layers.Block
    "ln_1": "norm1",
    "attn.in_proj_weight": "attn.qkv.weight",
    "attn.in_proj_bias": "attn.qkv.bias",
    "attn.ln_q": "attn.q_norm",
    "attn.ln_k": "attn.k_norm",
    "attn.out_proj": "attn.proj",
    "ls_1": "ls1",
    "ln_2": "norm2",
    "ls_2": "ls2",
    **MLP,
}
ATTENTION = {"attn.q": "attn.q", "attn.kv": "attn.kv", "attn.out_proj": "attn.proj"}
CROSS_BLOCK = {"ln_1": "norm_q", "ln_1_kv": "norm_kv", "ln_2": "norm_mlp", **ATTENTION, **MLP}
POOLER = {"query": "query", "ln_q": "norm_q", "ln_k": "norm_kv", **ATTENTION}
TOWER = {"token_embedding": "token_embed", "positional_embedding": "pos_embed", "ln_final": "norm"}
BESIDE = ("visual", "text_projection", "logit_scale", "logit_bias", "attn_mask")  # the text tower
LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)")


def convert_text_tower(state_dict: StateDict) -> dict[str, Tensor]:
    """For `TextTower`, from open_clip's `TextTransformer` or a whole CLIP model's state dict.

    The tower ends with its pooled token; what follows is in `convert_text_projection`.
    """
    rest, layers = {}, dict[str, dict[str, Tensor]]()
    for name, tensor in _text_part(state_dict).items():
        layer = LAYER.fullmatch(name)
        if layer:
            layers.setdefault(layer[1], {})[layer[2]] = tensor
        elif name.split(".")[0] not in BESIDE:
            rest[name] = tensor
    _require(rest, "token_embedding.weight", "positional_embedding")
    ours = _renamed(rest, TOWER, "TextTower")
    ours["pos_embed"] = ours["pos_embed"][None]
    for index, block in layers.items():
        ours |= {f"blocks.{index}.{name}": value for name, value in convert_block(block).items()}
    return ours


def revert_text_tower(state_dict: StateDict) -> dict[str, Tensor]:
    """For open_clip's `TextTransformer`, from `TextTower` with learned positions and no head."""
    _require(state_dict, "token_embed.weight", "pos_embed")
    layer = re.compile(r"blocks\.(\d+)\.(.+)")
    blocks = {ours: theirs for theirs, ours in BLOCK.items()}
    rest, theirs = {}, {}
    for name, tensor in state_dict.items():
        if match := layer.fullmatch(name):
            ((inner, _),) = _renamed({match[2]: tensor}, blocks, "open_clip's block").items()
            theirs[f"transformer.resblocks.{match[1]}.{inner}"] = tensor
        else:
            rest[name] = tensor
    tower = {ours: theirs for theirs, ours in TOWER.items()}
    theirs |= _renamed(rest, tower, "open_clip's text tower")
    return theirs | {"positional_embedding": theirs["positional_embedding"][0]}


def convert_text_projection(state_dict: StateDict) -> dict[str, Tensor]:
    """For the `nn.Linear` from the tower's width to the shared one: weight (p d), maybe a bias."""
    state = _text_part(state_dict)
    if "text_projection" in state:
        return {"weight": state["text_projection"].T.contiguous()}
    _require(state, "text_projection.weight")
    names = [name for name in ("weight", "bias") if f"text_projection.{name}" in state]
    return {name: state[f"text_projection.{name}"] for name in names}


def convert_block(state_dict: StateDict) -> dict[str, Tensor]:
    """For `zoo.layers.Block`, from open_clip's `ResidualAttentionBlock`."""
    return _renamed(state_dict, BLOCK, "Block")


def convert_coca_block(state_dict: StateDict) -> dict[str, Tensor]:
    """For an ungated `CrossBlock`, from a `ResidualAttentionBlock` with `is_cross_attention`."""
    _require(state_dict, "ln_1_kv.weight")
    return _renamed(_split_projection(state_dict), CROSS_BLOCK, "CrossBlock")


def convert_pooler(state_dict: StateDict) -> dict[str, Tensor]:
    """For `TokenPool`, from open_clip's `AttentionalPooler`."""
    _require(state_dict, "query", "ln_k.weight")
    return _renamed(_split_projection(state_dict), POOLER, "TokenPool")


def _text_part(state_dict: StateDict) -> dict[str, Tensor]:
    """`CLIP` has its text tower at the top, `CustomTextCLIP` and CoCa theirs under `text.`"""
    text = {k.removeprefix("text."): v for k, v in state_dict.items() if k.startswith("text.")}
    return text or dict(state_dict)


def _split_projection(state_dict: StateDict) -> dict[str, Tensor]:
    """torch's stacked projections as ours: queries by themselves, keys over values."""
    state = dict(state_dict)
    _require(state, "attn.in_proj_bias")
    if "attn.in_proj_weight" in state:
        q, k, v = state.pop("attn.in_proj_weight").chunk(3)
    else:  # a context of another width
        _require(state, *(f"attn.{part}_proj_weight" for part in "qkv"))
        q, k, v = (state.pop(f"attn.{part}_proj_weight") for part in "qkv")
    q_bias, k_bias, v_bias = state.pop("attn.in_proj_bias").chunk(3)
    return {
        **state,
        "attn.q.weight": q,
        "attn.q.bias": q_bias,
        "attn.kv.weight": torch.cat([k, v]),
        "attn.kv.bias": torch.cat([k_bias, v_bias]),
    }


def _renamed(state: StateDict, names: Mapping[str, str], ours: str) -> dict[str, Tensor]:
    """Modules (what their tensors begin with) and tensors by their new names."""
    renamed, unknown = {}, []
    for name, tensor in state.items():
        module, _, last = name.rpartition(".")
        if name in names:
            renamed[names[name]] = tensor
        elif module in names:
            renamed[f"{names[module]}.{last}"] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"{ours} has no place for {_few(unknown)}")
    return renamed


def _require(state: StateDict, *names: str) -> None:
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"state_dict has no {_few(missing)}; it has {_few(state)}")


def _few(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(names[:6]) or "nothing") + rest
