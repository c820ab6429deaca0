"""Maps of attention against plain softmax, and the pictures of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor, nn

import zoo
from vision.inspection.overlay import attention_layer, attention_maps, draw_overlay, picture_names
from vision.predict import inputs_of
from zoo.diagnostics.plotting import WeightScale

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
        ("timm:resnet18", {}, r"timm:resnet18 has no attention .* such as timm:vit_tiny"),
        (
            "timm:swin_tiny_patch4_window7_224",
            {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 1)},
            r"layers.1.blocks.0.attn of timm:swin_tiny.* attends within windows",
        ),
        ("resnet_micro", {}, "resnet_micro has no attention that can be drawn"),
    ],
)
def test_models_without_attention_are_told(name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_layer(zoo.create_model(name, **options))


TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize("pool", ["token", "avg"])
@torch.no_grad()
def test_maps_of_a_vit_of_timm(pool: str) -> None:
    model: Any = zoo.create_model(
        "timm:vit_tiny_patch16_224", **TIMM, reg_tokens=2, global_pool=pool
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(2, 3, 32, 32)
    model.eval()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.norm1.register_forward_hook(lambda *given: seen.append(given[-1]))
    model(images)
    for layer, x in enumerate(seen[:2]):
        weights = weights_of(model.blocks[layer].attn, x).mean(1)
        rows = weights[:, 0] if pool == "token" else weights[:, 3:].mean(1)
        found = attention_maps(model, images, layer)
        torch.testing.assert_close(found, rows[:, 3:].reshape(2, 4, 4), atol=1e-6, rtol=1e-5)
    assert torch.equal(attention_maps(model, images), found)
    assert attention_layer(model) == "blocks.1.attn"
    with pytest.raises(ValueError, match=r"layer \(2\) must be from -2 to 1"):
        attention_layer(model, 2)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("torchvision:vit_b_16", r"encoder.layers.*self_attention"),
        ("timm:vit_base_patch16_siglip_224", "attn_pool"),
    ],
)
@pytest.mark.slow
def test_maps_of_other_libraries(name: str, layer: str) -> None:
    model: Any = zoo.create_model(name)
    assert re.fullmatch(layer, attention_layer(model))
    maps = attention_maps(model, torch.randn(1, 3, 224, 224))
    assert maps.shape == (1, 14, 14)
    assert 0 < maps.sum() < 1 + 1e-5


def test_even_weights_do_not_glare(tmp_path: Path) -> None:
    from matplotlib import colormaps

    even = torch.full((4, 4), 1 / 16)
    even[0, 0] *= 1.02
    scale = WeightScale(even)
    black = torch.zeros(1, 160, 160, dtype=torch.uint8)
    third = 0.6 * np.array(colormaps["inferno"](1 / 3)[:3])
    np.testing.assert_allclose(scale.over(black, even)[-1, -1], third, atol=0.02)
    peak = even.clone()
    peak[1, 1] = 0.9  # the highest weight ends the scale, as soon as it is far from even
    assert WeightScale.top_of(peak) == pytest.approx(0.9)
    assert WeightScale.top_of(peak / 10) == pytest.approx(0.09)  # whatever the patches get in all
    low, high = scale.colours.get_clim()
    assert (low, high) == pytest.approx((0, 3), rel=0.01)  # in even shares
    assert WeightScale(torch.zeros(2, 2)).colours.get_clim() == (0, 4)


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
