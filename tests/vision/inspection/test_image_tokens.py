"""Which tokens are patches: against what each library's own model puts through its attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import vision  # noqa: F401  its models are registered
import zoo
from vision.inspection.image_tokens import ImageTokens, image_tokens
from zoo.diagnostics import capture_attention


def keys_of(model: nn.Module, size: tuple[int, int]) -> list[int]:
    """The number of keys of each layer on an image of this size."""
    with torch.no_grad(), capture_attention(model.eval()) as records:
        model(torch.zeros(1, 3, *size))
    return [maps[0].shape[-1] for maps in records.values()]


def transformers_vit(name: str, patch: int, **options: int) -> nn.Module:
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        **small, intermediate_size=16, image_size=32, patch_size=patch, **options
    )
    return getattr(transformers, f"{name}Model")(config)


def open_clip_tower() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(32, 16, 16, 1, 2, 2.0, output_dim=8)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 1, 2, 16, 32)


timm_vit = partial(
    zoo.create_model,
    "timm:vit_tiny_patch16_224",
    depth=1,
    embed_dim=16,
    num_heads=2,
    dynamic_img_size=True,
)
ours = partial(zoo.create_model, "vit_micro_patch4_32", depth=1)


@pytest.mark.parametrize(
    ("make", "size", "grid", "names"),
    [
        (ours, (32, 32), (8, 8), ()),
        (partial(ours, img_size=(8, 16)), (8, 16), (2, 4), ()),
        (
            partial(ours, class_token=True, global_pool="token", reg_tokens=2),
            (32, 32),
            (8, 8),
            ("class", "register 1", "register 2"),
        ),
        (timm_vit, (64, 32), (4, 2), ("class",)),
        (partial(timm_vit, reg_tokens=1), (32, 64), (2, 4), ("class", "register")),
        (torchvision_vit, (32, 32), (4, 4), ("class",)),
        (open_clip_tower, (32, 32), (2, 2), ("class",)),
        (partial(transformers_vit, "ViT", 8), (32, 32), (4, 4), ("class",)),
        (partial(transformers_vit, "DeiT", 8), (32, 32), (4, 4), ("class", "distillation")),
        (
            partial(transformers_vit, "Dinov2WithRegisters", 4, num_register_tokens=3),
            (32, 16),
            (8, 4),
            ("class", "register 1", "register 2", "register 3"),
        ),
    ],
)
def test_all_keys_of_every_library_are_told_apart(make, size, grid, names):
    model = make()
    for keys in keys_of(model, size):
        assert image_tokens(model, size, keys) == ImageTokens(grid, len(names), 0, names)
    wrapped = nn.Sequential(model)
    assert image_tokens(wrapped, size, keys).grid == grid
    assert keys == len(names) + grid[0] * grid[1]


def test_pooling_reads_patches_alone():
    model = ours(class_token=True, global_pool="map")
    blocks, pool = keys_of(model, (32, 32))
    assert image_tokens(model, 32, blocks) == ImageTokens((8, 8), 1, 0, ("class",))
    assert image_tokens(model, 32, pool) == ImageTokens((8, 8), 0, 0)


def test_keys_that_torch_adds_stand_last():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(3, 8, 4, 4)
            self.attn = nn.MultiheadAttention(
                8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True
            )

        def forward(self, x):
            x = self.cut(x).flatten(2).mT
            return self.attn(x, x, x)[0]

    model = Model()
    (keys,) = keys_of(model, (8, 12))
    assert image_tokens(model, (8, 12), keys) == ImageTokens((2, 3), 0, 2)


@pytest.mark.parametrize(
    ("make", "size", "tokens", "message"),
    [
        (ours, 32, 77, r"num_tokens \(77\) .* vit_micro_patch4_32: .* 32x32 has 8x8 = 64, with 0"),
        (ours, 2, 1, r"2x2 has 0x0 = 0"),
        (ours, (32, 32, 3), 64, "image_size must be"),
        (ours, 32, 0, "num_tokens"),
        (partial(nn.Linear, 3, 3), 32, 64, "Linear cuts no image into patches"),
        (partial(zoo.create_model, "timm:resnet18"), 32, 64, "timm:resnet18 cuts no image"),
    ],
)
def test_other_tokens_are_refused(make, size, tokens, message):
    with pytest.raises(ValueError, match=message):
        image_tokens(make(), size, tokens)


def test_windows_are_no_patches_of_the_image():
    model = zoo.create_model("timm:swin_tiny_patch4_window7_224", depths=(1, 1), embed_dim=24)
    for keys in keys_of(model, (224, 224)):
        with pytest.raises(ValueError, match=r"num_tokens \(49\) are not the patches"):
            image_tokens(model, 224, keys)
