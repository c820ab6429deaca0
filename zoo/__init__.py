"""Attention Zoo: what every model and every run needs, knowing no modality.

import zoo

model = zoo.create_model("vit_tiny_patch16_224", num_classes=10)
transform = zoo.transforms(model)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.card import ModelCard, Preprocessing
    from zoo.diagnostics.capture import capture_attention
    from zoo.export import export_onnx, export_program
    from zoo.preprocess import transforms
    from zoo.push import push_to_hub
    from zoo.registry import create_model, list_models, register_model
    from zoo.weights import LoadReport, load_pretrained, save_pretrained

__all__ = [
    "LoadReport",
    "ModelCard",
    "Preprocessing",
    "capture_attention",
    "create_model",
    "export_onnx",
    "export_program",
    "list_models",
    "load_pretrained",
    "push_to_hub",
    "register_model",
    "replace_attention",
    "save_pretrained",
    "transforms",
]

# Imported when first asked for, so that `import zoo` costs next to nothing.
_HOMES = {
    "ModelCard": "zoo.card",
    "Preprocessing": "zoo.card",
    "capture_attention": "zoo.diagnostics.capture",
    "export_onnx": "zoo.export",
    "export_program": "zoo.export",
    "transforms": "zoo.preprocess",
    "push_to_hub": "zoo.push",
    "create_model": "zoo.registry",
    "list_models": "zoo.registry",
    "register_model": "zoo.registry",
    "replace_attention": "zoo.surgery",
    "LoadReport": "zoo.weights",
    "load_pretrained": "zoo.weights",
    "save_pretrained": "zoo.weights",
}
# `zoo.layers` works after `import zoo`.
_PARTS = ("ablation", "diagnostics", "engine", "layers", "pages", "penalties")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"zoo.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
