"""Maps of attention against plain softmax, and the pictures of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor, nn

import zoo
from vision.overlay import attention_layer, attention_maps, draw_overlay, picture_names
from vision.predict import inputs_of

SIZE = (8, 12)  # a grid of 4 x 6


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    model = zoo.create_model("vit_micro_patch2_8", img_size=SIZE, num_classes=3, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def weights_of(attn: Any, x: Tensor) -> Tensor:
    """Attention of plain projections: (b n d) -> (b h i j)."""
    q, k, _ = rearrange(attn.qkv(x), "b n (t h e) -> t b h n e", t=3, h=attn.num_heads)
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)


def tokens_before(model: Any, images: Tensor, block: int) -> Tensor:
    x = model._embed(images)
    for layer in model.blocks[:block]:
        x = layer(x)
    return x


@pytest.mark.parametrize("layer", [None, 1, -1])
@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "token", "class_token": True, "reg_tokens": 2},
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "avg", "class_token": True},
    ],
    ids=["class token", "mean", "mean beside a class token"],
)
@torch.no_grad()
def test_maps_are_the_rows_that_the_classifier_reads(options: Any, layer: int | None) -> None:
    model, images = small(**options), torch.randn(2, 3, *SIZE)
    index = {None: len(model.blocks) - 1, -1: len(model.blocks) - 1}.get(layer, layer)
    block = model.blocks[index]
    weights = weights_of(block.attn, block.norm1(tokens_before(model, images, index))).mean(1)
    prefix = model.num_prefix_tokens
    rows = weights[:, 0] if options["global_pool"] == "token" else weights[:, prefix:].mean(1)
    expected = rows[:, prefix:].reshape(2, 4, 6)
    found = attention_maps(model, images, layer)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert found.sum((1, 2)).max() < 1 + 1e-5


@torch.no_grad()
def test_maps_of_attention_pooling() -> None:
    model, images = small(global_pool="map", class_token=True), torch.randn(2, 3, *SIZE)
    pool, grid = model.attn_pool, model.forward_features(images)[:, 1:]
    q = rearrange(pool.q(pool.latent), "b n (h e) -> b h n e", h=pool.num_heads)
    k, _ = rearrange(pool.kv(grid), "b n (t h e) -> t b h n e", t=2, h=pool.num_heads)
    expected = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1).mean(1)[:, 0]
    assert attention_layer(model) == "attn_pool"
    torch.testing.assert_close(attention_maps(model, images), expected.reshape(2, 4, 6))
    assert attention_layer(model, 0) == "blocks.0.attn"


def test_other_kinds_and_training_mode() -> None:
    model = small(attention="window", drop_rate=0.5).train()
    model.blocks[0].eval()
    images = torch.randn(2, 3, *SIZE)
    assert torch.equal(attention_maps(model, images), attention_maps(model, images))
    assert model.training
    assert not model.blocks[0].training


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("timm:resnet18", {}, r"timm:resnet18 has no attention .* pretrained='timm:vit_tiny"),
        (
            "timm:vit_tiny_patch16_224.augreg_in21k",
            {"img_size": 32},
            r"zoo.create_model\('vit_tiny_patch16_224', pretrained='timm:vit_tiny_patch16_224'\)",
        ),
        ("resnet_micro", {}, "resnet_micro has no attention that can be drawn"),
    ],
)
def test_models_without_attention_are_told(name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_layer(zoo.create_model(name, **options))


def test_layers_and_kinds_that_cannot_be_drawn() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"layer \(4\) must be from -4 to 3"):
        attention_layer(model, len(model.blocks))
    with pytest.raises(ValueError, match="'linformer', which mixes the patches"):
        attention_layer(small(attention="linformer"))
    pooled = small(attention="linformer", global_pool="map", class_token=False)
    assert attention_layer(pooled) == "attn_pool"  # reads the patches themselves
    pooled.blocks[1].attn = nn.Identity()
    with pytest.raises(ValueError, match=r"blocks.1.attn is a Identity, which shows no weights"):
        attention_layer(pooled, 1)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_picture_is_bright_where_the_model_looks(tmp_path: Path, smooth: bool) -> None:
    weights = torch.zeros(2, 4)
    weights[1, 3] = 1.0
    pixels = torch.full((1, 100, 200), 90, dtype=torch.uint8)
    file = tmp_path / "picture.png"
    draw_overlay(file, pixels, weights, "cat $5 10 %", "blocks.3.attn", smooth=smooth)
    with Image.open(file) as opened:
        picture = np.asarray(opened.convert("L"), dtype=float)
    height, width = picture.shape
    assert width > 1.5 * height  # two wide images beside each other
    half = picture[:, width // 2 : int(0.86 * width)]  # between the image and the scale
    dark, bright = half[int(0.3 * height), : half.shape[1] // 3], half[int(0.68 * height), -30:]
    assert bright.mean() > dark.mean() + 60


def test_pictures_of_files_of_one_name() -> None:
    paths = [Path(name) for name in ("a/cat.jpg", "b/cat.png", "cat-2.jpg", "dog.jpg")]
    assert picture_names(paths) == ["cat.png", "cat-2.png", "cat-2-2.png", "dog.png"]


def test_maps_of_a_model_in_bf16() -> None:
    model = zoo.create_model("vit_micro_patch4_32", num_classes=3).bfloat16()
    pixels = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8)
    images = inputs_of(model, pixels)
    assert images.dtype is torch.bfloat16
    maps = attention_maps(model, images)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(1), atol=0.02, rtol=0)
