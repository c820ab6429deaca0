"""Convolutional networks of other libraries under timm's names.

- EfficientNet's port from TensorFlow (arXiv 1905.11946): `_conv_stem`, `_blocks.3._expand_conv`.
  Its weights were trained with TensorFlow's padding and `eps` 1e-3, which no tensor shows: in a
  network without them they load and give wrong classes, so that this is refused.
- PaddleClas' PP-LCNet (arXiv 2109.15099), exported to ONNX: layers numbered in the order in which
  they run. A dropout that scales its output after training, and not before, is part of the graph;
  the classifier takes over its factor.

Each map is a pure function with an inverse. Both take and give dicts of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.card import ModelCard, Preprocessing
from zoo.hosts import find_host
from zoo.layouts import Layout, register_layout
from zoo.sources import Source, WeightsError

StateDict = Mapping[str, Tensor]

# timm's module -> the port's; a block's within the block.
ENDS = {
    "conv_stem": "_conv_stem",
    "bn1": "_bn0",
    "conv_head": "_conv_head",
    "bn2": "_bn1",
    "classifier": "_fc",
}
SQUEEZE = {"se.conv_reduce": "_se_reduce", "se.conv_expand": "_se_expand"}
EXPANDING = {
    "conv_pw": "_expand_conv",
    "bn1": "_bn0",
    "conv_dw": "_depthwise_conv",
    "bn2": "_bn1",
    "conv_pwl": "_project_conv",
    "bn3": "_bn2",
    **SQUEEZE,
}
PLAIN = {  # the first stage
    "conv_dw": "_depthwise_conv",
    "bn1": "_bn1",
    "conv_pw": "_project_conv",
    "bn2": "_bn2",
    **SQUEEZE,
}
TENSORFLOW_EPS = 1e-3

PADDLE = {"weight": "w_0", "bias": "b_0", "running_mean": "w_1", "running_var": "w_2"}
PADDLE_DROPOUT = "helper.constant."  # beside integers for the graph's arithmetic on shapes
PADDLE_PREPROCESSING = Preprocessing(
    mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bilinear", crop_pct=0.875
)

_BLOCK = re.compile(r"(blocks\.(\d+)\.(\d+))\.(.+)\.\w+")
_LCNET_MODULE = re.compile(
    r"conv_stem|conv_head|bn1|blocks\.\d+\.\d+\.(?:conv_dw|conv_pw|bn\d|se\.conv_\w+)"
)
_PADDLE_NAME = re.compile(r"(?:conv2d|batch_norm2d|linear)_\d+\.[wb]_\d+")


# --- EfficientNet's port from TensorFlow -------------------------------------------------------


def convert_efficientnet(state_dict: StateDict, timm_keys: Iterable[str]) -> dict[str, Tensor]:
    """For timm's EfficientNet with the keys `timm_keys`, from its port's state dict."""
    modules = {theirs: ours for ours, theirs in efficientnet_modules(timm_keys).items()}
    return _renamed(state_dict, modules)


def revert_efficientnet(state_dict: StateDict) -> dict[str, Tensor]:
    """For the port, from the state dict of timm's EfficientNet."""
    return _renamed(state_dict, efficientnet_modules(state_dict))


def efficientnet_modules(timm_keys: Iterable[str]) -> dict[str, str]:
    """timm's modules -> the port's, which counts blocks through all stages."""
    blocks: dict[tuple[int, int], set[str]] = {}
    for match in filter(None, map(_BLOCK.fullmatch, timm_keys)):
        blocks.setdefault((int(match[2]), int(match[3])), set()).add(match[4])
    modules = dict(ENDS)
    for number, (stage, index) in enumerate(sorted(blocks)):
        parts = EXPANDING if "conv_pwl" in blocks[stage, index] else PLAIN
        for ours, theirs in parts.items():
            modules[f"blocks.{stage}.{index}.{ours}"] = f"_blocks.{number}.{theirs}"
    return modules


def _renamed(state_dict: StateDict, modules: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under the new names of their modules; others keep theirs."""
    renamed = {}
    for name, tensor in state_dict.items():
        module, _, leaf = name.rpartition(".")
        renamed[f"{modules[module]}.{leaf}" if module in modules else name] = tensor
    return renamed


def _translate_efficientnet(source: Source, model: nn.Module) -> Source:
    name = _timm_name(model)
    right = name if name.startswith("tf_") else f"tf_{name}"
    _check_tensorflow(source, model, right)
    tensors = convert_efficientnet(source.tensors, model.state_dict())
    card = ModelCard(None, {}, find_host("timm", right).preprocessing, source=source.name)
    return replace(source, tensors=tensors, card=source.card or card)


def _check_tensorflow(source: Source, model: nn.Module, right: str) -> None:
    from timm.layers import Conv2dSame

    same = any(isinstance(module, Conv2dSame) for module in model.modules())
    eps = sorted({m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)})
    if same and eps == [TENSORFLOW_EPS]:
        return
    padding = "the same padding" if same else "another padding"
    raise WeightsError(
        f"{source.name} has the names of EfficientNet's TensorFlow port, trained with TensorFlow's "
        f"padding and batch norms of eps {TENSORFLOW_EPS}; timm:{_timm_name(model)} has {padding} "
        f"and eps {', '.join(map(str, eps))}, and would give wrong outputs: take timm:{right}"
    )


# --- PaddleClas' PP-LCNet ----------------------------------------------------------------------


def convert_lcnet(state_dict: StateDict, timm_state: StateDict) -> dict[str, Tensor]:
    """For timm's LCNet, from the constants of PaddleClas' ONNX.

    The exporter numbers its copies of tensors (`conv2d_5.w_0_deepcopy_25`), and names biases of
    convolutions after the operator that shapes them (`p2o.pd_op.reshape.0.0`), in their order.
    timm's head has a bias that PaddleClas' lacks, which is 0.

    Args:
        state_dict: PaddleClas' tensors.
        timm_state: The state dict to be loaded, for its names and shapes.
    """
    names = {theirs: ours for ours, theirs in lcnet_names(timm_state).items()}
    converted, factor = {}, torch.ones(())
    for name, tensor in _paddle_names(state_dict, list(names)).items():
        if not name.startswith(PADDLE_DROPOUT):
            converted[names.get(name, name)] = tensor
        elif tensor.is_floating_point():
            factor = factor * tensor.reshape(())
    if "classifier.weight" in converted:
        converted["classifier.weight"] = converted["classifier.weight"].T * factor
    if "conv_head.bias" not in converted and "conv_head.bias" in timm_state:
        converted["conv_head.bias"] = torch.zeros_like(timm_state["conv_head.bias"])
    return converted


def revert_lcnet(state_dict: StateDict) -> dict[str, Tensor]:
    """PaddleClas' tensors, from the state dict of timm's LCNet; its dropout's factor is 1 then."""
    names = lcnet_names(state_dict)
    reverted = {names[name]: tensor for name, tensor in state_dict.items() if name in names}
    return {k: v.T if k == "linear_0.w_0" else v for k, v in reverted.items()}


def lcnet_names(timm_state: StateDict) -> dict[str, str]:
    """timm's tensors -> PaddleClas', which counts convolutions and norms as they run."""
    known = [key for key in timm_state if _LCNET_MODULE.fullmatch(key.rpartition(".")[0])]
    norms = [key.rpartition(".")[0] for key in known if key.endswith("running_mean")]
    convs = [key.rpartition(".")[0] for key in known if timm_state[key].ndim == 4]
    modules = {name: f"batch_norm2d_{number}" for number, name in enumerate(norms)}
    modules |= {name: f"conv2d_{number}" for number, name in enumerate(convs)}
    modules["classifier"] = "linear_0"
    names = [*known, "classifier.weight", "classifier.bias"]
    parts = [(name, *name.rsplit(".", 1)) for name in names]
    return {n: f"{modules[module]}.{PADDLE[leaf]}" for n, module, leaf in parts if leaf in PADDLE}


def _paddle_names(state_dict: StateDict, wanted: list[str]) -> dict[str, Tensor]:
    """PaddleClas' tensors without what the exporter made of their names."""
    plain = {re.sub(r"_deepcopy_\d+$", "", name): value for name, value in state_dict.items()}
    biases = [n for n in wanted if n.startswith("conv2d") and n.endswith("b_0") and n not in plain]
    for number, name in enumerate(biases):
        shaped = plain.pop(f"p2o.pd_op.reshape.{number}.0", None)
        if shaped is not None:
            plain[name] = shaped.flatten()
    return plain


def _translate_lcnet(source: Source, model: nn.Module) -> Source:
    tensors = convert_lcnet(source.tensors, model.state_dict())
    card = ModelCard(None, {}, PADDLE_PREPROCESSING, source=source.name)
    return replace(source, tensors=tensors, card=source.card or card)


# --- registration ------------------------------------------------------------------------------


def _timm_name(model: nn.Module) -> str:
    """timm's name of a network; "" for those of others."""
    config: Any = getattr(model, "pretrained_cfg", None)
    return str(config.get("architecture", "")) if isinstance(config, dict) else ""


def _is_efficientnet(model: nn.Module) -> bool:
    return type(model).__name__ == "EfficientNet" and "efficientnet" in _timm_name(model)


register_layout(
    Layout(
        name="EfficientNet's TensorFlow port",
        fits=_is_efficientnet,
        recognises=lambda source: {"_conv_stem.weight", "_bn0.weight"} <= source.tensors.keys(),
        translate=_translate_efficientnet,
    )
)
register_layout(
    Layout(
        name="PaddleClas' PP-LCNet",
        fits=lambda model: _timm_name(model).startswith("lcnet"),
        recognises=lambda source: any(map(_PADDLE_NAME.match, source.tensors)),
        translate=_translate_lcnet,
    )
)
