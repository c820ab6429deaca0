"""What the explorer shows, against the captured weights and the measures themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vision  # noqa: F401  its models are registered
import zoo
from vision.inspection.explorer import ROLLOUT, explore
from vision.inspection.explorer_panel import classified, health, measures, of_run, panel_of
from vision.predict import inputs_of
from zoo.card import ModelCard, Preprocessing
from zoo.diagnostics import capture_attention, entropy, head_similarity, rollout
from zoo.diagnostics.capture import attention_of
from zoo.pages.explorer_pack import Side, decode

ours = partial(
    zoo.create_model, "vit_micro_patch4_32", depth=2, class_token=True, global_pool="token"
)


def pixels_for(model: nn.Module, count: int = 2) -> Tensor:
    rows, columns = model.card.preprocessing.size
    channels = model.card.preprocessing.in_chans
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, rows, columns), generator=generator).byte()


def captured(model: nn.Module, pixels: Tensor) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad(), capture_attention(model) as records:
        model(inputs_of(model, pixels))
    return {name: maps[0] for name, maps in records.items()}


def test_maps_numbers_and_rollout_are_those_of_the_captured_weights() -> None:
    torch.manual_seed(0)
    model = ours(reg_tokens=1)
    pixels = pixels_for(model)
    weights = captured(model, pixels)
    model.train()
    found = explore(model, pixels)
    assert model.training
    assert [maps.name for maps in found.maps] == [*weights, ROLLOUT]
    sides = Side([("class", "register")] * 2, (8, 8), 2)
    for maps in found.maps[:-1]:
        assert (maps.queries, maps.keys) == (sides, sides)
        torch.testing.assert_close(decode(maps.codes), weights[maps.name], atol=1e-3, rtol=0)
        look = found.looks[maps.name]
        expected = entropy(weights[maps.name].double(), normalized=True).mean((0, 2))
        torch.testing.assert_close(look.entropy.double(), expected, atol=1e-6, rtol=0)
        similar = head_similarity(weights[maps.name].double(), "cosine")
        torch.testing.assert_close(look.similarity.double(), similar, atol=1e-6, rtol=0)
        share = weights[maps.name][..., :2].sum(-1).mean((0, 2))
        torch.testing.assert_close(found.shares[maps.name], share)
    flow = rollout(list(weights.values()))
    torch.testing.assert_close(decode(found.maps[-1].codes)[:, 0], flow, atol=2e-3, rtol=0)
    assert all(look.distance.isfinite().all() for look in found.looks.values())


def test_pooling_by_a_query_is_shown_without_its_own_place() -> None:
    model = ours(global_pool="map", class_token=False)
    *_, pool, flow = explore(model, pixels_for(model)).maps
    assert (pool.name, flow.name) == ("attn_pool", ROLLOUT)
    assert pool.queries == Side([("query",)] * 2, None, 1)
    assert pool.keys == Side([()] * 2, (8, 8), 0)


def test_chosen_layers_only() -> None:
    model = ours()
    found = explore(model, pixels_for(model, 1), ["*.1.*"])
    assert [maps.name for maps in found.maps] == ["blocks.1.attn"]
    with pytest.raises(ValueError, match=r"layers='x\*' matches no attention; there is .*blocks.0"):
        explore(model, pixels_for(model, 1), "x*")


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 2, 2, 16, 32)
    model.card = ModelCard(None, {}, Preprocessing(size=(32, 32)))
    return model


timm_vit = partial(zoo.create_model, "timm:vit_tiny_patch16_224", depth=2, embed_dim=16)


@pytest.mark.parametrize("make", [partial(timm_vit, num_heads=2), torchvision_vit])
def test_models_of_other_libraries(make) -> None:
    model = make()
    pixels = pixels_for(model, 1)
    found = explore(model, pixels)
    for layer, weights in captured(model, pixels).items():
        maps = next(each for each in found.maps if each.name == layer)
        torch.testing.assert_close(decode(maps.codes), weights, atol=1e-3, rtol=0)
        assert maps.keys.names[0] == ("class",)


@pytest.mark.parametrize("kind", zoo.layers.list_attention())
def test_every_kind_of_attention_is_explored_or_refused_with_a_reason(kind: str) -> None:
    model = ours(attention=kind)
    if not attention_of(model):
        with pytest.raises(ValueError, match="nothing to explore"):
            explore(model, pixels_for(model, 1))
        return
    found = explore(model, pixels_for(model, 1))
    assert {maps.name for maps in found.maps} - {ROLLOUT} | set(found.left_out) == {
        "blocks.0.attn",
        "blocks.1.attn",
    }


def test_layers_without_maps_keep_their_numbers_and_a_reason() -> None:
    model = zoo.create_model("timm:swin_tiny_patch4_window7_224", depths=(1, 1), embed_dim=24)
    found = explore(model, pixels_for(model, 1))
    assert not found.maps
    assert "within 64 windows" in found.left_out["layers.0.blocks.0.attn"]
    assert len(health(found)) == 2
    mixed = ours(attention="linformer", attention_options={"rank": 8})
    panel = panel_of(explore(mixed, pixels_for(mixed, 1)), [], {})
    assert "No maps of blocks.0.attn, blocks.1.attn: num_tokens (8) are not" in panel.notes[0]


def test_gates_of_a_cnn_are_seen() -> None:
    model = zoo.create_model("timm:efficientnet_b0").eval()
    pixels = pixels_for(model)
    found = explore(model, pixels)
    assert not found.maps
    with torch.no_grad(), zoo.diagnostics.capture_gates(model) as records:
        model(inputs_of(model, pixels))
    assert list(found.gates) == list(records)
    for name, gates in found.gates.items():
        torch.testing.assert_close(gates.values, records[name][0].flatten(1), atol=1e-5, rtol=1e-4)
        assert gates.limits == (0.0, 1.0)


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:mixer_s32_224"])
def test_a_model_without_attention_is_refused(name: str) -> None:
    model = zoo.create_model(name)
    with pytest.raises(ValueError, match=r"has nothing to explore: no attention .* and no gates"):
        explore(model, pixels_for(model, 1))


def test_even_attention_of_a_trained_model_is_an_alarm(tmp_path: Path) -> None:
    model = ours()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
    found = explore(model, pixels_for(model, 1))
    assert {alarm.kind for alarm in found.alarms} == {"uniform"}
    assert panel_of(found, [], {}).alarms[0]["step"] is None
    assert panel_of(found, [], {}).alarms[0]["remedies"]
    without_run = of_run(panel_of(found, [], {}), tmp_path).alarms
    assert [alarm["message"] for alarm in without_run] == [each.message for each in found.alarms]
    assert not any(alarm["remedies"] for alarm in without_run)


def test_measures_have_a_number_for_each_head() -> None:
    model = ours()
    found = explore(model, pixels_for(model))
    for measure in measures(found):
        assert list(measure.values) == list(found.looks)
        assert {values.shape for values in measure.values.values()} == {(4,)}
    alike = next(each for each in measures(found) if each.title == "Likeness")
    similarity = found.looks["blocks.0.attn"].similarity
    mean = (similarity[1, 0] + similarity[1, 2] + similarity[1, 3]) / 3
    torch.testing.assert_close(alike.values["blocks.0.attn"][1], mean)


def test_what_a_classifier_says() -> None:
    model = ours(num_classes=3)
    assert classified(model, pixels_for(model)) == ["", ""]
    named = zoo.create_model("vit_micro_patch4_32", depth=1, class_names=["a", "b", "<c>"])
    said = classified(named, pixels_for(named))
    logits = named.eval()(inputs_of(named, pixels_for(named)))
    best = ["a", "b", "<c>"][int(logits[0].argmax())]
    assert said[0].startswith(f"predicts {best} (")


def test_weights_in_bf16_are_explored_too() -> None:
    model = ours().to(torch.bfloat16)
    found = explore(model, pixels_for(model, 1))
    assert len(found.maps) == 3
