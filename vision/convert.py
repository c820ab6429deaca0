"""Vision Transformers of other libraries under our names: what all share, and torchvision's.

Each map is a pure function from one state dict to another, and has an inverse. A name that has no
place with us stays as it is, so that loading shows it instead of losing it. What a library does not
keep in its tensors (activation, epsilon of the norms, pooling, heads) goes into the options of a
card, which loading compares with the model's: no shape tells them, and a wrong one computes wrong
values in silence.

Further layouts are in `vision.convert_clip`, `convert_google`, `convert_timm` and
`convert_transformers`.

Shapes: h heads, e width of a head, d width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision.vit import VisionTransformer
from zoo.card import ModelCard, Preprocessing
from zoo.layouts import Layout, register_layout
from zoo.sources import Source, WeightsError, listed

StateDict = Mapping[str, Tensor]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SOFTMAX: dict[str, Any] = {"attention": "full", "temperature": 1.0}
CLASS_TOKEN: dict[str, Any] = {  # of a plain ViT (arXiv 2010.11929)
    **SOFTMAX,
    "pre_norm": False,
    "class_token": True,
    "reg_tokens": 0,
    "no_embed_class": False,
    "qkv_bias": True,
    "qk_norm": False,
    "position": "learned",
}
_SIZES = ("num_classes", "in_chans", "img_size")


class KeyMap:
    """Names of two libraries for the same modules and tensors, `*` for the number of a block.

    Args:
        names: Theirs -> ours. Several of theirs may mean one of ours; the first is written.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        back: dict[str, str] = {}
        for theirs, ours in names.items():
            back.setdefault(ours, theirs)
        self._convert = [(_pattern(theirs), ours) for theirs, ours in names.items()]
        self._revert = [(_pattern(ours), theirs) for ours, theirs in back.items()]

    def convert(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Values under our names."""
        return {_renamed(name, self._convert): value for name, value in state.items()}

    def revert(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Values under their names."""
        return {_renamed(name, self._revert): value for name, value in state.items()}


def _pattern(name: str) -> re.Pattern[str]:
    """A module or tensor by name, and what one more component adds to it."""
    number = re.escape(name).replace(r"\*", r"(?P<number>\d+)")
    return re.compile(rf"{number}(?P<rest>\.[^.]+)?")


def _renamed(name: str, names: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in names:
        if match := pattern.fullmatch(name):
            parts = match.groupdict()
            return new.replace("*", parts.get("number", "")) + (parts["rest"] or "")
    return name


def stack(state: StateDict, parts: str = "qkv", module: str = "attn") -> dict[str, Tensor]:
    """Projections apart (`attn.q.weight`, ...) as one, rows of the queries first (`attn.qkv`)."""
    stacked = dict(state)
    first = re.compile(rf"((?:.+\.)?{module}\.){parts[0]}\.(weight|bias)")
    for match in filter(None, map(first.fullmatch, state)):
        names = [f"{match[1]}{part}.{match[2]}" for part in parts]
        if all(name in state for name in names):
            together = torch.cat([stacked.pop(name) for name in names])
            stacked[f"{match[1]}{parts}.{match[2]}"] = together
    return stacked


def unstack(state: StateDict, parts: str = "qkv") -> dict[str, Tensor]:
    """The inverse of `stack`."""
    apart: dict[str, Tensor] = {}
    for name, value in state.items():
        module, leaf = name.rsplit(".", 1) if "." in name else ("", name)
        if module.rpartition(".")[2] == parts:
            before = module.removesuffix(parts)
            for part, rows in zip(parts, value.chunk(len(parts)), strict=True):
                apart[f"{before}{part}.{leaf}"] = rows
        else:
            apart[name] = value
    return apart


def translated(
    source: Source,
    model: nn.Module,
    tensors: dict[str, Tensor],
    options: Mapping[str, Any],
    *,
    preprocessing: Preprocessing | None = None,
    grids: Mapping[str, tuple[int, int]] | None = None,
    left_out: Iterable[str] = (),
    notes: Iterable[str] = (),
    antialias: bool = True,
) -> Source:
    """A source under our names.

    Args:
        source: Under theirs. Of its card's options only sizes stay: others bear its own names.
        model: Whose preprocessing stays where neither the source nor its layout knows any.
        tensors: Under our names.
        options: What the layout implies, as our options.
        preprocessing: What it implies, where the source does not say.
        grids: Rows and columns of position embeddings, by our names.
        left_out: What of the source was left out on purpose, and why.
        notes: What cannot be known of it.
        antialias: Whether its positions are resampled with it.
    """
    card = source.card
    if card is None:
        own: Any = getattr(model, "card", None)
        preprocessing = preprocessing or (own.preprocessing if own else Preprocessing())
        card = ModelCard(None, {}, preprocessing, source=source.name)
    said = {"left_out": list(left_out), "notes": list(notes)}
    extra: dict[str, Any] = {name: lines for name, lines in said.items() if lines}
    if not antialias:
        extra["antialias"] = False
    sizes = {name: value for name, value in card.options.items() if name in _SIZES}
    card = replace(card, options={**options, **sizes}, extra={**extra, **card.extra})
    return replace(source, tensors=tensors, card=card, position_grids=dict(grids or {}))


def refuse(source: Source, parts: Mapping[str, str]) -> None:
    """An error where names hold one of these parts, each given with what it is."""
    for part, what in parts.items():
        found = [name for name in source.tensors if part in name]
        if found:
            raise WeightsError(
                f"{source.name} has {what} ({listed(found, 3)}), which VisionTransformer lacks"
            )


def is_vit(model: nn.Module) -> bool:
    return isinstance(model, VisionTransformer)


def network_of(source: Source, module: str, name: str = "VisionTransformer") -> Any:
    """The part of the source's network that has this class, or a descendant's; None without."""
    for part in source.network.modules() if source.network is not None else ():
        if any((k.__module__, k.__name__) == (module, name) for k in type(part).__mro__):
            return part
    return None


def activation_name(source: str, module: nn.Module) -> str:
    """One of our activations, from another library's module."""
    if "quick" in type(module).__name__.lower():
        return "quick_gelu"
    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    kind = type(module).__name__
    names = {"GELU": "gelu", "GELUTanh": "gelu_tanh"}
    if kind not in names:
        raise WeightsError(
            f"{source} has the activation {kind}, which VisionTransformer lacks; it has gelu, "
            f"gelu_tanh and quick_gelu"
        )
    return names[kind]


def norm_eps(source: str, network: nn.Module) -> float:
    """The epsilon that all norms of a network share."""
    norms = {type(m).__name__: m for m in network.modules() if "Norm" in type(m).__name__}
    others = [name for name, m in norms.items() if not isinstance(m, nn.LayerNorm)]
    if others:
        raise WeightsError(f"{source} has {listed(others)}; VisionTransformer has LayerNorm")
    eps = sorted({m.eps for m in network.modules() if isinstance(m, nn.LayerNorm)})
    if len(eps) != 1:
        raise WeightsError(
            f"{source} has norms of eps {', '.join(map(str, eps))}; VisionTransformer has one "
            f"norm_eps for all"
        )
    return eps[0]


# --- torchvision ---------------------------------------------------------------------------------

_LAYER = "encoder.layers.encoder_layer_*"
TORCHVISION = KeyMap(
    {
        "conv_proj": "patch_embed.proj",
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        f"{_LAYER}.ln_1": "blocks.*.norm1",
        f"{_LAYER}.self_attention.in_proj_weight": "blocks.*.attn.qkv.weight",
        f"{_LAYER}.self_attention.in_proj_bias": "blocks.*.attn.qkv.bias",
        f"{_LAYER}.self_attention.out_proj": "blocks.*.attn.proj",
        f"{_LAYER}.ln_2": "blocks.*.norm2",
        f"{_LAYER}.mlp.0": "blocks.*.mlp.fc1",
        f"{_LAYER}.mlp.3": "blocks.*.mlp.fc2",
        f"{_LAYER}.mlp.linear_1": "blocks.*.mlp.fc1",  # before torchvision 0.14
        f"{_LAYER}.mlp.linear_2": "blocks.*.mlp.fc2",
        "encoder.ln": "norm",
        "heads.head": "head",
    }
)
TORCHVISION_LACKS = {
    "heads.pre_logits": "a hidden layer in its head",
    "conv_proj.conv_": "a stem of several convolutions",
}
_TORCHVISION_CARD = Preprocessing(
    mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bilinear", crop_pct=0.875
)


def convert_torchvision_vit(state_dict: StateDict) -> dict[str, Tensor]:
    """For `VisionTransformer`, from torchvision's; both stack queries over keys over values."""
    return TORCHVISION.convert(state_dict)


def revert_torchvision_vit(state_dict: StateDict) -> dict[str, Tensor]:
    """For torchvision's `VisionTransformer`, from the state dict of ours."""
    return TORCHVISION.revert(state_dict)


def _translate_torchvision(source: Source, model: nn.Module) -> Source:
    refuse(source, TORCHVISION_LACKS)
    options = {**CLASS_TOKEN, "global_pool": "token", "act": "gelu", "norm_eps": 1e-6}
    network = network_of(source, "torchvision.models.vision_transformer")
    if network is not None:
        options["norm_eps"] = norm_eps(source.name, network)
        options["num_heads"] = network.encoder.layers[0].num_heads
    return translated(
        source,
        model,
        convert_torchvision_vit(source.tensors),
        options,
        preprocessing=_TORCHVISION_CARD,
        grids=TORCHVISION.convert(source.position_grids),
    )


register_layout(
    Layout(
        name="torchvision's ViT",
        fits=is_vit,
        recognises=lambda source: {"class_token", "encoder.pos_embedding"} <= source.tensors.keys(),
        translate=_translate_torchvision,
    )
)
