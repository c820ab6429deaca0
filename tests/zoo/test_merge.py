"""A part of a larger model, adaptations one by one, and what a report notes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from tiny_vit import equal_state, make, randomized, saved, snapshot
from torch import nn

import zoo
from zoo import sources, weights
from zoo.weights import WeightsError


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("part", ["backbone", "student.backbone", "backbone."])
def test_a_part_is_taken(part: str, wrapped: str, tmp_path: Path) -> None:
    model = randomized()
    prefix = wrapped + part.rstrip(".") + "."
    tensors = {prefix + key: value for key, value in model.state_dict().items()}
    source = saved({**tensors, f"{wrapped}decoder.weight": torch.ones(3)}, tmp_path)
    other = make()
    assert zoo.load_pretrained(other, source, part=part).matched_fraction == 1
    assert equal_state(other, model)
    with pytest.raises(WeightsError, match=r"nothing under part 'encoder'.*start with .*decoder"):
        zoo.load_pretrained(other, source, part="encoder")


def test_a_part_of_a_saved_model_knows_its_grid(tmp_path: Path) -> None:
    name = "vit_micro_patch4_32"
    dual: Any = zoo.create_model("dual_micro", image_tower=name, img_size=(32, 48))
    source = f"local-dir:{zoo.save_pretrained(dual, tmp_path / 'dual')}"
    trunk = dual.image_tower.trunk
    other: Any = zoo.create_model(name, num_classes=0)
    report = zoo.load_pretrained(other, source, part="image_tower.trunk")
    (how,) = report.resized.values()
    assert how == "grid 8x12 -> 8x8"
    assert torch.equal(other.blocks[0].attn.qkv.weight, trunk.blocks[0].attn.qkv.weight)


SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "positions": ({"img_size": 8}, {"img_size": 16}, "pos_embed: grid 4x4 -> 8x8"),
    "stem": ({}, {"in_chans": 4}, "patch_embed.proj.weight: 3 input channels -> 4"),
    "head": ({"num_classes": 5}, {"num_classes": 3}, "5 classes in the source, 3 here"),
    "class_names": (
        {"class_names": ["a", "b"]},
        {"class_names": ["b", "a"]},
        "rows of 2 of 2 classes, by name",
    ),
    "attention": ({}, {"attention": "linformer"}, "the source has another kind of attention"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_each_adaptation_can_be_switched_off(name: str, tmp_path: Path) -> None:
    theirs, ours, how = SWITCHES[name]
    source = sources.read_source(
        f"local-dir:{zoo.save_pretrained(randomized(**theirs), tmp_path / 'm')}"
    )
    model = make(**ours)
    before = snapshot(model)
    others = [other for other in weights.ADAPTATIONS if other != name]
    for strict in (True, False):
        with pytest.raises(WeightsError, match=rf"{how}.*by adding '{name}' to adapt"):
            weights.apply_source(model, source, allowed=ours, adapt=others, strict=strict)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = weights.apply_source(model, source, allowed=ours, adapt=[name])
    assert how.partition(": ")[2] or how in str(report)
    assert {**report.resized, **report.adapted, **report.reinitialized}


def test_insertions_can_be_switched_off(tmp_path: Path) -> None:
    source = saved(zoo.create_model("resnet_micro").state_dict(), tmp_path)
    model = zoo.create_model("resnet_micro", insertions=["se@standard"])
    with pytest.raises(WeightsError, match=r"no such insertion.*by adding 'insertions' to adapt"):
        zoo.load_pretrained(model, source, adapt=("positions", "stem", "head"))
    assert zoo.load_pretrained(model, source, adapt="insertions").reinitialized


@pytest.mark.parametrize("adapt", ["headd", ("head", "stems")])
def test_unknown_adaptations_are_refused(adapt: Any, tmp_path: Path) -> None:
    source = saved(make().state_dict(), tmp_path)
    with pytest.raises(ValueError, match=r"adapt: unknown '(headd|stems)'; it may hold positions"):
        zoo.load_pretrained(make(), source, adapt=adapt)


@pytest.mark.parametrize("told", [None, True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_antialias_follows_the_source_or_the_caller(told: Any, asked: Any) -> None:
    model, other = randomized(img_size=16), make(img_size=8)
    extra = {} if told is None else {"antialias": told}
    card = replace(model.card, extra=extra)
    source = sources.Source("x", model.state_dict(), card, model.position_grids())
    weights.apply_source(other, source, antialias=asked)
    used = asked if asked is not None else told is not False
    expected = resample_abs_pos_embed(
        model.pos_embed, (4, 4), (8, 8), num_prefix_tokens=1, antialias=used
    )
    torch.testing.assert_close(other.pos_embed, expected)


def test_a_bare_table_of_relative_positions_is_taken_as_square(tmp_path: Path) -> None:
    relative: dict[str, Any] = {"position": "relative"}
    model = randomized(**relative)
    report = zoo.load_pretrained(make(**relative, img_size=12), saved(model.state_dict(), tmp_path))
    assert set(report.resized.values()) == {"grid 4x4 -> 6x6"}
    assert len(report.resized) == 2


def test_two_classifiers_are_two_heads(tmp_path: Path) -> None:
    source = saved(timm.create_model("deit_tiny_distilled_patch16_224").state_dict(), tmp_path)
    model = zoo.create_model("timm:deit_tiny_distilled_patch16_224", num_classes=3)
    report = zoo.load_pretrained(model, source)
    assert {"head.weight", "head_dist.weight"} <= set(report.reinitialized)
    model = zoo.create_model("timm:deit_tiny_distilled_patch16_224", num_classes=0)
    assert {"head.bias", "head_dist.bias"} <= set(zoo.load_pretrained(model, source).adapted)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


def test_a_shared_tensor_may_stand_once_but_not_twice_and_differ(tmp_path: Path) -> None:
    model, value = Tied(), torch.randn(5, 3)
    for key in ("embed.weight", "out.weight"):
        report = zoo.load_pretrained(model, saved({key: value}, tmp_path))
        assert torch.equal(model.embed.weight, value)
        assert report.matched_fraction == 1
    both = saved({"embed.weight": value, "out.weight": value + 1}, tmp_path)
    with pytest.raises(WeightsError, match=r"differs from embed\.weight, with which it is one"):
        zoo.load_pretrained(model, both)
    assert torch.equal(model.embed.weight, value)


# --- dtype, device, frozen parts, notes -------------------------------------------------------


def test_casts_are_noted(tmp_path: Path) -> None:
    model, other = randomized(), make().to(torch.bfloat16)
    report = zoo.load_pretrained(other, saved(model.state_dict(), tmp_path))
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert torch.equal(other.head.weight, model.head.weight.to(torch.bfloat16))
    count = len(model.state_dict())
    assert f"{count} tensors cast from torch.float32 to torch.bfloat16" in report.notes


def test_a_model_without_storage_is_refused(tmp_path: Path) -> None:
    source = saved(randomized().state_dict(), tmp_path)
    with pytest.raises(WeightsError, match=r"meta device.*to_empty\(device='cpu'\) before"):
        zoo.load_pretrained(make().to("meta"), source)


def test_a_buffer_without_storage_that_is_not_saved_is_refused(tmp_path: Path) -> None:
    model = randomized()
    source = saved(model.state_dict(), tmp_path)
    model.register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(WeightsError, match="meta device"):
        zoo.load_pretrained(model, source)


def test_frozen_parts_take_values_and_stay_frozen(tmp_path: Path) -> None:
    model, other = randomized(), make()
    other.blocks[0].requires_grad_(False)
    report = zoo.load_pretrained(other, saved(model.state_dict(), tmp_path))
    assert equal_state(other, model)
    assert all(p.requires_grad != n.startswith("blocks.0.") for n, p in other.named_parameters())
    assert any(note.startswith("12 parameters took the source's values and stay frozen")
               for note in report.notes)  # fmt: skip


def test_notes_tell_of_preprocessing(tmp_path: Path) -> None:
    report = zoo.load_pretrained(make(), saved(randomized().state_dict(), tmp_path))
    note, untold = report.notes
    assert untold == (
        "a bare file does not tell activation, epsilon, heads and pooling: those of "
        "vit_micro_patch2_8 are assumed"
    )
    assert note == (
        "the source says nothing of preprocessing; assumed: size 8x8, mean 0.5, 0.5, 0.5, "
        "std 0.5, 0.5, 0.5, bicubic, crop 1"
    )
    folder = zoo.save_pretrained(randomized(), tmp_path / "m")
    report = zoo.load_pretrained(make(img_size=(8, 12)), f"local-dir:{folder}")
    assert report.notes == ("images of 8x8 there, of 8x12 here",)
    assert zoo.load_pretrained(make(), f"local-dir:{folder}").notes == ()


def test_options_asked_for_are_noted(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(randomized(), tmp_path / "m")
    source = sources.read_source(f"local-dir:{folder}")
    report = weights.apply_source(make(act="gelu_tanh"), source, allowed=["act"])
    assert report.notes == ("as asked for, act: 'gelu' there, 'gelu_tanh' here",)


def test_a_bare_file_says_what_is_assumed(tmp_path: Path) -> None:
    model = randomized(img_size=(8, 16))
    report = zoo.load_pretrained(make(img_size=(16, 8)), saved(snapshot(model), tmp_path))
    assert any("grid of pos_embed: 8x4 is assumed" in note for note in report.notes)
    assert any("does not tell activation" in note for note in report.notes)
    folder = zoo.save_pretrained(model, tmp_path / "model")
    report = zoo.load_pretrained(make(img_size=(16, 8)), f"local-dir:{folder}")
    assert report.resized
    assert not any("assumed" in note for note in report.notes)


def test_another_width_is_not_taken_for_another_grid(tmp_path: Path) -> None:
    source = saved(snapshot(randomized(embed_dim=32)), tmp_path)
    with pytest.raises(WeightsError) as caught:
        zoo.load_pretrained(make(), source)
    assert "pos_embed: (1, 17, 32) in the source, (1, 17, 64) in the model\n" in str(caught.value)
    assert "not square" not in str(caught.value).partition("likely cause")[0]


@pytest.mark.parametrize(("size", "noted"), [((8, 12), True), ((16, 16), False), ((8, 8), False)])
def test_the_grid_that_is_assumed_is_the_sources(
    tmp_path: Path, size: tuple[int, int], noted: bool
) -> None:
    """The note and the line of what was resized name one grid."""
    source = saved(snapshot(randomized()), tmp_path)
    report = zoo.load_pretrained(make(img_size=size), source)
    assumed = [note for note in report.notes if "grid of pos_embed" in note]
    assert len(assumed) == int(noted)
    for note in assumed:
        assert "4x4 is assumed" in note
        assert report.resized["pos_embed"].startswith("grid 4x4 -> ")
