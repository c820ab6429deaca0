"""Looks as tensors, for the small file that a watch writes at each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from zoo.diagnostics.looks import GateLook, LayerLook

PREFIXES = {"look": LayerLook, "gate": GateLook}


def pack(
    layers: Mapping[str, LayerLook] | None = None, gates: Mapping[str, GateLook] | None = None
) -> dict[str, Tensor]:
    """Fields of looks, named look/LAYER/FIELD and gate/LAYER/FIELD; numbers as tensors ()."""
    packed = {}
    for prefix, looks in (("look", layers or {}), ("gate", gates or {})):
        for layer, look in looks.items():
            for field in fields(look):
                value = getattr(look, field.name)
                if value is not None:
                    packed[f"{prefix}/{layer}/{field.name}"] = torch.as_tensor(value).contiguous()
    return packed


def unpack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, LayerLook], dict[str, GateLook]]:
    """What `pack` was given; tensors of other names are passed over."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {prefix: {} for prefix in PREFIXES}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition("/")
        layer, _, field = rest.rpartition("/")
        if prefix in found:
            found[prefix].setdefault(layer, {})[field] = tensor
    return (
        {layer: LayerLook(**_values(LayerLook, own)) for layer, own in found["look"].items()},
        {layer: GateLook(**_values(GateLook, own)) for layer, own in found["gate"].items()},
    )


def _values(look: type, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    kinds = {field.name: str(field.type) for field in fields(look)}
    return {
        name: tensors[name].item()
        if kind in ("bool", "int", "float")
        else tensors.get(name)  # None where it was
        for name, kind in kinds.items()
    }
