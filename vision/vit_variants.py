"""The registered Vision Transformers: under timm's names, where timm has them, with its options."""

from __future__ import annotations

from typing import Any

from vision.vit import VisionTransformer
from zoo.card import Preprocessing
from zoo.registry import register_model

SIZES: dict[str, dict[str, Any]] = {
    "micro": {
        "embed_dim": 64,
        "depth": 4,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "class_token": False,
        "global_pool": "avg",
        "num_classes": 10,
    },
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}
_DINOV2: dict[str, Any] = {"patch_size": 14, "img_size": 518, "num_classes": 0, "init_values": 1e-5}
_REG4: dict[str, Any] = {**_DINOV2, "reg_tokens": 4, "no_embed_class": True}
_SIGLIP: dict[str, Any] = {"num_classes": 0, "class_token": False, "global_pool": "map"}
_CLIP: dict[str, Any] = {"pre_norm": True, "norm_eps": 1e-5}
_QUICK: dict[str, Any] = {**_CLIP, "act": "quick_gelu"}  # what OpenAI's own weights need

# timm's for the names it has too: the weights expect them.
_AUGREG = Preprocessing((224, 224), crop_pct=0.9)
_AUGREG_384 = Preprocessing((384, 384))
_IMAGENET = Preprocessing((518, 518), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_OPENAI = Preprocessing((224, 224), OPENAI_MEAN, OPENAI_STD)
_OPENAI_B32 = Preprocessing((224, 224), OPENAI_MEAN, OPENAI_STD, crop_pct=0.9)
_OPENAI_B16 = Preprocessing((224, 224), OPENAI_MEAN, OPENAI_STD, crop_pct=0.95)
_OPENAI_336 = Preprocessing((336, 336), OPENAI_MEAN, OPENAI_STD)
_LAION_L14 = Preprocessing((224, 224))  # LAION-2B's own
_LAION_336 = Preprocessing((336, 336), crop_mode="squash")


def _vit(size: str, options: dict[str, Any], **variant: Any) -> VisionTransformer:
    return VisionTransformer(**{**SIZES[size], **variant, **options})


@register_model(preprocessing=Preprocessing((8, 8)))
def vit_micro_patch2_8(**options: Any) -> VisionTransformer:
    """For 8x8 images: 16 patches."""
    return _vit("micro", options, patch_size=2, img_size=8)


@register_model(preprocessing=Preprocessing((32, 32)))
def vit_micro_patch4_32(**options: Any) -> VisionTransformer:
    """For 32x32 images: 64 patches."""
    return _vit("micro", options, patch_size=4, img_size=32)


@register_model(preprocessing=_AUGREG)
def vit_tiny_patch14_224(**options: Any) -> VisionTransformer:
    """ViT-Ti/14 at 224."""
    return _vit("tiny", options, patch_size=14)


@register_model(preprocessing=_AUGREG)
def vit_tiny_patch16_224(**options: Any) -> VisionTransformer:
    """ViT-Ti/16 at 224."""
    return _vit("tiny", options, patch_size=16)


@register_model(preprocessing=_AUGREG)
def vit_tiny_patch32_224(**options: Any) -> VisionTransformer:
    """ViT-Ti/32 at 224."""
    return _vit("tiny", options, patch_size=32)


@register_model(preprocessing=_AUGREG)
def vit_small_patch14_224(**options: Any) -> VisionTransformer:
    """ViT-S/14 at 224."""
    return _vit("small", options, patch_size=14)


@register_model(preprocessing=_AUGREG)
def vit_small_patch16_224(**options: Any) -> VisionTransformer:
    """ViT-S/16 at 224."""
    return _vit("small", options, patch_size=16)


@register_model(preprocessing=_AUGREG)
def vit_small_patch32_224(**options: Any) -> VisionTransformer:
    """ViT-S/32 at 224."""
    return _vit("small", options, patch_size=32)


@register_model(preprocessing=_AUGREG)
def vit_base_patch14_224(**options: Any) -> VisionTransformer:
    """ViT-B/14 at 224."""
    return _vit("base", options, patch_size=14)


@register_model(preprocessing=_AUGREG)
def vit_base_patch16_224(**options: Any) -> VisionTransformer:
    """ViT-B/16 at 224."""
    return _vit("base", options, patch_size=16)


@register_model(preprocessing=_AUGREG)
def vit_base_patch32_224(**options: Any) -> VisionTransformer:
    """ViT-B/32 at 224."""
    return _vit("base", options, patch_size=32)


@register_model(preprocessing=_AUGREG)
def vit_large_patch14_224(**options: Any) -> VisionTransformer:
    """ViT-L/14 at 224."""
    return _vit("large", options, patch_size=14)


@register_model(preprocessing=_AUGREG)
def vit_large_patch16_224(**options: Any) -> VisionTransformer:
    """ViT-L/16 at 224."""
    return _vit("large", options, patch_size=16)


@register_model(preprocessing=_AUGREG)
def vit_large_patch32_224(**options: Any) -> VisionTransformer:
    """ViT-L/32 at 224; no classifier by default, as in timm, which has no weights for it."""
    return _vit("large", options, patch_size=32, num_classes=0)


@register_model(preprocessing=_AUGREG_384)
def vit_tiny_patch16_384(**options: Any) -> VisionTransformer:
    """ViT-Ti/16 at 384."""
    return _vit("tiny", options, patch_size=16, img_size=384)


@register_model(preprocessing=_AUGREG_384)
def vit_small_patch16_384(**options: Any) -> VisionTransformer:
    """ViT-S/16 at 384."""
    return _vit("small", options, patch_size=16, img_size=384)


@register_model(preprocessing=_AUGREG_384)
def vit_base_patch16_384(**options: Any) -> VisionTransformer:
    """ViT-B/16 at 384."""
    return _vit("base", options, patch_size=16, img_size=384)


@register_model(preprocessing=_AUGREG_384)
def vit_base_patch32_384(**options: Any) -> VisionTransformer:
    """ViT-B/32 at 384."""
    return _vit("base", options, patch_size=32, img_size=384)


@register_model(preprocessing=_AUGREG_384)
def vit_large_patch16_384(**options: Any) -> VisionTransformer:
    """ViT-L/16 at 384."""
    return _vit("large", options, patch_size=16, img_size=384)


@register_model(preprocessing=_IMAGENET)
def vit_small_patch14_dinov2(**options: Any) -> VisionTransformer:
    """ViT-S/14 of DINOv2 (arXiv 2304.07193)."""
    return _vit("small", options, **_DINOV2)


@register_model(preprocessing=_IMAGENET)
def vit_base_patch14_dinov2(**options: Any) -> VisionTransformer:
    """ViT-B/14 of DINOv2 (arXiv 2304.07193)."""
    return _vit("base", options, **_DINOV2)


@register_model(preprocessing=_IMAGENET)
def vit_large_patch14_dinov2(**options: Any) -> VisionTransformer:
    """ViT-L/14 of DINOv2 (arXiv 2304.07193)."""
    return _vit("large", options, **_DINOV2)


@register_model(preprocessing=_IMAGENET)
def vit_small_patch14_reg4_dinov2(**options: Any) -> VisionTransformer:
    """ViT-S/14 of DINOv2 with registers (arXiv 2309.16588)."""
    return _vit("small", options, **_REG4)


@register_model(preprocessing=_IMAGENET)
def vit_base_patch14_reg4_dinov2(**options: Any) -> VisionTransformer:
    """ViT-B/14 of DINOv2 with registers (arXiv 2309.16588)."""
    return _vit("base", options, **_REG4)


@register_model(preprocessing=_IMAGENET)
def vit_large_patch14_reg4_dinov2(**options: Any) -> VisionTransformer:
    """ViT-L/14 of DINOv2 with registers (arXiv 2309.16588)."""
    return _vit("large", options, **_REG4)


@register_model(preprocessing=_AUGREG)
def vit_base_patch16_siglip_224(**options: Any) -> VisionTransformer:
    """ViT-B/16 of SigLIP (arXiv 2303.15343)."""
    return _vit("base", options, **_SIGLIP)


@register_model(preprocessing=_AUGREG)
def vit_large_patch16_siglip_224(**options: Any) -> VisionTransformer:
    """ViT-L/16 of SigLIP (arXiv 2303.15343)."""
    return _vit("large", options, **_SIGLIP)


@register_model(preprocessing=_OPENAI_B32)
def vit_base_patch32_clip_224(**options: Any) -> VisionTransformer:
    """ViT-B/32 of CLIP (arXiv 2103.00020), with GELU as open_clip trains it."""
    return _vit("base", options, patch_size=32, **_CLIP)


@register_model(preprocessing=_OPENAI_B16)
def vit_base_patch16_clip_224(**options: Any) -> VisionTransformer:
    """ViT-B/16 of CLIP, with GELU."""
    return _vit("base", options, **_CLIP)


@register_model(preprocessing=_LAION_L14)
def vit_large_patch14_clip_224(**options: Any) -> VisionTransformer:
    """ViT-L/14 of CLIP, with GELU."""
    return _vit("large", options, patch_size=14, **_CLIP)


@register_model(preprocessing=_LAION_336)
def vit_large_patch14_clip_336(**options: Any) -> VisionTransformer:
    """ViT-L/14 of CLIP at 336, with GELU."""
    return _vit("large", options, patch_size=14, img_size=336, **_CLIP)


@register_model(preprocessing=_OPENAI_B32)
def vit_base_patch32_clip_quickgelu_224(**options: Any) -> VisionTransformer:
    """ViT-B/32 of CLIP with OpenAI's activation; its head is the projection (512)."""
    return _vit("base", options, patch_size=32, num_classes=512, **_QUICK)


@register_model(preprocessing=_OPENAI)
def vit_base_patch16_clip_quickgelu_224(**options: Any) -> VisionTransformer:
    """ViT-B/16 of CLIP with OpenAI's activation; its head is the projection (512)."""
    return _vit("base", options, num_classes=512, **_QUICK)


@register_model(preprocessing=_OPENAI)
def vit_large_patch14_clip_quickgelu_224(**options: Any) -> VisionTransformer:
    """ViT-L/14 of CLIP with OpenAI's activation; its head is the projection (768)."""
    return _vit("large", options, patch_size=14, num_classes=768, **_QUICK)


@register_model(preprocessing=_OPENAI_336)
def vit_large_patch14_clip_quickgelu_336(**options: Any) -> VisionTransformer:
    """ViT-L/14 of CLIP at 336 with OpenAI's activation; its head is the projection (768)."""
    return _vit("large", options, patch_size=14, img_size=336, num_classes=768, **_QUICK)
