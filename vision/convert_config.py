"""Which of our models a folder of the library transformers holds, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision.convert_transformers import activation, as_pair
from vision.convert_transformers_clip import vision_config
from vision.vit_variants import SIZES
from zoo.layouts import register_architecture
from zoo.registry import list_models
from zoo.sources import WeightsError

DEFAULT_LABELS = 2  # transformers leaves what equals its defaults out of config.json


def transformers_architecture(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """A registered name and options for what a config.json of transformers describes.

    Sizes without a name of their own are a `vit_base_patch16_224` with other options.

    Args:
        config: With `model_type` vit, dinov2, dinov2_with_registers, clip or clip_vision_model,
            of which the visual tower is meant; None for others.

    Raises:
        WeightsError: it has parts that `VisionTransformer` lacks.
    """
    kind = config.get("model_type")
    if kind in ("clip", "clip_vision_model"):
        return _clip(config)
    if kind not in ("vit", "dinov2", "dinov2_with_registers"):
        return None
    if config.get("use_swiglu_ffn"):
        raise WeightsError(f"this {kind} has a SwiGLU, which VisionTransformer lacks")
    options = _geometry(config)
    if kind == "vit":
        name = "vit_{size}_patch{patch}_{img}"
        classifies = any("ForImageClassification" in n for n in config.get("architectures") or ())
        labels = len(config.get("id2label", ())) or config.get("num_labels", DEFAULT_LABELS)
        options["num_classes"] = labels if classifies else 0
    else:
        registers = config.get("num_register_tokens", 4) if kind != "dinov2" else 0
        name = "vit_{size}_patch{patch}_" + (f"reg{registers}_dinov2" if registers else "dinov2")
        options |= {"num_classes": 0, "init_values": config.get("layerscale_value", 1.0)}
        options |= {"reg_tokens": registers, "no_embed_class": registers > 0}
    return _registered(name, options), options


def _clip(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The visual tower of CLIP, its projection as the head where the folder holds that."""
    tower = vision_config({"library": "transformers", **config})
    options = _geometry({**tower, "model_type": "clip_vision_model"})
    bare = {"CLIPVisionModel", "CLIPForImageClassification"} & {
        *(config.get("architectures") or ())
    }
    width = 0 if bare else config.get("projection_dim", 512)
    options |= {"pre_norm": True, "num_classes": width}
    quick = "quickgelu_" if options["act"] == "quick_gelu" else ""
    name = f"vit_{{size}}_patch{{patch}}_clip_{quick}{{img}}"
    return _registered(name, options, f"vit_base_patch16_clip_{quick}224"), options


def _geometry(config: Mapping[str, Any]) -> dict[str, Any]:
    width, kind = config.get("hidden_size", 768), config["model_type"]
    dinov2 = kind.startswith("dinov2")
    hidden = config.get("intermediate_size", 3072) / width
    return {
        "img_size": as_pair(config.get("image_size", 224)),
        "patch_size": as_pair(config.get("patch_size", 14 if kind == "dinov2" else 16)),
        "in_chans": config.get("num_channels", 3),
        "embed_dim": width,
        "depth": config.get("num_hidden_layers", 12),
        "num_heads": config.get("num_attention_heads", 12),
        "mlp_ratio": float(config.get("mlp_ratio", 4) if dinov2 else hidden),
        "qkv_bias": config.get("qkv_bias", True),
        "norm_eps": float(config.get("layer_norm_eps", 1e-6 if dinov2 else 1e-12)),
        "act": activation("config.json", config),
        "class_token": True,
        "global_pool": "token",
    }


def _registered(
    name: str, options: Mapping[str, Any], otherwise: str = "vit_base_patch16_224"
) -> str:
    for size, known in SIZES.items():
        if all(options[key] == known[key] for key in ("embed_dim", "depth", "num_heads")):
            name = name.format(
                size=size, patch=options["patch_size"][0], img=options["img_size"][0]
            )
    return name if name in list_models("vit_*") else otherwise


register_architecture("transformers", transformers_architecture)
