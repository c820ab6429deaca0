"""Layers of parameters: our models', timm's by its own grouping, others' by names."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models import group_parameters
from torch import nn

import zoo
from zoo.depth import layer_indices
from zoo.freezing import parts


def of(layers: dict[str, int], start: str) -> set[int]:
    return {layer for key, layer in layers.items() if key.startswith(start)}


@pytest.mark.parametrize("name", ["vit_micro_patch4_32", "resnet20"])
def test_our_models_tell_themselves(name: str) -> None:
    model: Any = zoo.create_model(name)
    layers, last = layer_indices(model)
    assert layers == {n: model.layer_index(n) for n, _ in model.named_parameters()}
    assert last == model.num_layers == max(layers.values())


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "convnext_atto"])
def test_timm_models_have_the_layers_of_timm(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    layers, last = layer_indices(model)
    assert layers == group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    assert last == max(layers.values())


@pytest.mark.parametrize(
    ("name", "blocks", "expected"),
    [
        ("torchvision:resnet18", 4, {"conv1": 0, "bn1": 0, "layer1": 1, "layer4": 4, "fc": 5}),
        (
            *("torchvision:mobilenet_v3_small", 12),
            {"features.0.": 0, "features.1.": 1, "features.12": 12, "classifier": 13},
        ),
        (
            *("torchvision:vit_b_16", 12),
            {"conv_proj": 0, "class_token": 0, "encoder.layers.encoder_layer_3.": 4, "heads": 13},
        ),
        ("open_clip:RN50", 4, {"visual.conv3": 0, "visual.layer2": 2, "visual.attnpool": 5}),
        (
            *("open_clip:ViT-B-32", 12),
            {
                "visual.conv1": 0,
                "visual.positional_embedding": 0,
                "visual.transformer.resblocks.0.": 1,
                "visual.transformer.resblocks.11.": 12,
                "visual.proj": 13,
                "head": 13,
            },
        ),
    ],
)
def test_other_networks_are_counted_by_their_names(
    name: str, blocks: int, expected: dict[str, int]
) -> None:
    with torch.device("meta"):
        model = zoo.create_model(name, num_classes=3)
    layers, last = layer_indices(model)
    assert last == blocks + 1 == len(parts(model).blocks) + 1
    assert layers.keys() == {key for key, _ in model.named_parameters()}
    for start, layer in expected.items():
        assert of(layers, start) == {layer}, start


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "resnet_micro",
            {"slot_stem": 0, "layer2.0.slot_standard": 2, "slot_between_stages_2": 2},
        ),
        (
            "timm:mobilenetv3_small_050",
            {
                "blocks.1.slot_stem": 0,
                "blocks.1.1.slot_standard": 3,
                "blocks.1.slot_between_stages": 3,
                "blocks.3.slot_between_stages": 8,
            },
        ),
        (
            "torchvision:resnet18",
            {
                "layer1.slot_stem": 0,
                "layer2.1.slot_standard": 2,
                "layer3.slot_between_stages": 3,
            },
        ),
    ],
)
def test_inserted_modules_have_the_layer_of_their_block(name: str, expected: Any) -> None:
    plain = zoo.create_model(name, num_classes=3, img_size=32)
    sites = ["eca@stem", "eca@standard:stages=1,2", "eca@between_stages"]
    model = zoo.create_model(name, num_classes=3, img_size=32, insertions=sites)
    layers, last = layer_indices(model)
    for start, layer in expected.items():
        assert of(layers, f"{start}.") == {layer}, start
    host, same = layer_indices(plain)
    assert same == last
    assert host == {key: layers[key] for key in host}
    assert layers.keys() == {key for key, _ in model.named_parameters()}


def test_a_module_after_one_without_weights_has_the_layer_around_it() -> None:
    model = zoo.create_model("torchvision:resnet18", num_classes=3, img_size=32)
    before, last = layer_indices(model)
    slot = nn.Sequential(nn.Conv2d(64, 64, 1))
    slot.may_be_absent = True  # type: ignore[assignment]
    model.layer2[1].relu.add_module("slot_output", slot)
    layers, _ = layer_indices(model)
    assert layers == {**before, **dict.fromkeys(of_slot(model), 2)}
    model.relu.add_module("slot_output", slot)
    assert of(layer_indices(model)[0], "relu.") == {last}


def of_slot(model: nn.Module) -> list[str]:
    return [key for key, _ in model.named_parameters() if "slot_output" in key]


def test_networks_that_tell_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no layer_index\(name\) and num_layers"):
        layer_indices(nn.Linear(2, 2))
    towers = zoo.create_model("dual_micro", tokenizer="bytes")
    with pytest.raises(ValueError, match="DualEncoder has no layer_index"):
        layer_indices(towers)
