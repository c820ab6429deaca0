"""Pixels: Vision Transformers, CNNs, channel attention, image data, augmentation and evaluation.

Importing this package registers its models. The data side is imported when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vision import (  # noqa: F401  they register models, and layouts of weights
    convert,
    convert_clip,
    convert_cnn,
    convert_config,
    convert_google,
    convert_timm,
    convert_transformers,
    vit_variants,
)
from vision.channel_attention import (
    ChannelAttention,
    create_channel_attention,
    list_channel_attention,
    register_channel_attention,
)
from vision.insertion import Insertion, insert, insertion_sites, remove_insertions
from vision.resnet import ResNet
from vision.timm_models import register_with_timm
from vision.vit import VisionTransformer

if TYPE_CHECKING:
    from vision.augment import Augment
    from vision.data import load_dataset, make_source
    from vision.images import decode

__all__ = [
    "Augment",
    "ChannelAttention",
    "Insertion",
    "ResNet",
    "VisionTransformer",
    "create_channel_attention",
    "decode",
    "insert",
    "insertion_sites",
    "list_channel_attention",
    "load_dataset",
    "make_source",
    "register_channel_attention",
    "remove_insertions",
]

_HOMES = {
    "Augment": "vision.augment",
    "decode": "vision.images",
    "load_dataset": "vision.data",
    "make_source": "vision.data",
}

register_with_timm()  # of all models above; where timm is not imported, once it is


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vision' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
