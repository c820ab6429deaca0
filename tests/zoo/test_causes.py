"""Errors of loading name the cause and change nothing; layouts of other libraries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from tiny_vit import equal_state, make, randomized, saved, snapshot
from torch import nn

import zoo
from zoo import layouts, sources, weights
from zoo.card import ModelCard
from zoo.weights import WeightsError


def broken(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    half = len(state) // 2
    if kind == "nan":
        state["blocks.1.norm1.bias"][3] = torch.nan
    elif kind == "infinite":
        state["head.weight"][0, 0] = torch.inf
    elif kind == "half":
        return dict(list(state.items())[:half])
    elif kind == "optimizer":
        return {f"state.{k}.exp_avg": v for k, v in state.items()}
    elif kind == "lora":
        return {k.replace("weight", "lora_A.weight"): v for k, v in state.items()}
    elif kind == "prefix":
        return {f"backbone.{k}": v for k, v in state.items()}
    elif kind == "int8":
        state["blocks.0.mlp.fc1.weight"] = state["blocks.0.mlp.fc1.weight"].to(torch.int8)
    elif kind == "complex":
        return {k: v.to(torch.complex64) for k, v in state.items()}
    elif kind == "mask":
        state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"] > 0
    elif kind == "torchvision":
        return dict(torchvision.models.VisionTransformer(8, 2, 1, 2, 64, 64).state_dict())
    return state


CAUSES = {
    "nan": r"NaN or infinity.* in 1 tensors: blocks\.1\.norm1\.bias",
    "infinite": r"NaN or infinity.* in 1 tensors: head\.weight",
    "half": r"likely cause: .*lacks, 14 of its 32 tensors:.*not whole",
    "optimizer": r"is an optimizer's state",
    "lora": r"weights of an adapter such as LoRA \(.*lora_A",
    "prefix": r"keys carry the prefix 'backbone\.': load with part='backbone'",
    "int8": r"fc1\.weight: int8 in the source \(quantised\?\).*cause: the source is quantised",
    "complex": r"cls_token: complex64 in the source \(complex numbers\), torch\.float32 in the .*"
    r"27 more that do not fit.*likely cause: complex numbers are no weights of this model",
    "mask": r"cause: truth values are no weights of this model \(patch_embed\.proj\.weight\)",
    "torchvision": r"likely cause: the keys look like a library's ViT, which .*Sequential",
}


@pytest.mark.parametrize("kind", [kind for kind in CAUSES if kind != "torchvision"])
def test_causes_are_named_and_nothing_changes(kind: str, tmp_path: Path) -> None:
    source = saved(broken(snapshot(randomized()), kind), tmp_path)
    model = make()
    before, card = snapshot(model), model.card
    with pytest.raises(WeightsError, match=f"(?s){CAUSES[kind]}"):
        zoo.load_pretrained(model, source)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.card is card


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "norm after pooling": ({"global_pool": "avg"}, {}, "the pooling .*fc_norm"),
    "norm before pooling": ({}, {"global_pool": "avg"}, "the pooling .*fc_norm"),
    "attention pooling": ({"global_pool": "map"}, {}, "the pooling .*attn_pool"),
    "no attention pooling": ({}, {"global_pool": "map"}, "the pooling .*attn_pool"),
    "no class token": ({"class_token": False, "global_pool": "avg", "fc_norm": False}, {}, "class"),
    "registers": ({"reg_tokens": 2}, {}, "reg_tokens"),
    "layer scale": ({}, {"init_values": 0.1}, "init_values"),
    "qk_norm": ({"qk_norm": True}, {}, "qk_norm"),
    "no biases": ({"qkv_bias": False}, {}, "qkv_bias"),
    "pre_norm and pooling": ({"pre_norm": True}, {"global_pool": "map"}, "pre_norm; the pooling"),
    "position": ({"position": "none"}, {}, "position"),
    "relative position": ({}, {"position": "relative"}, "position"),
    "prior": ({"position": "prior"}, {}, "position"),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_option_that_a_bare_file_shows_is_named(kind: str, tmp_path: Path) -> None:
    there, here, said = OPTIONS[kind]
    source, model = saved(snapshot(randomized(**there)), tmp_path), make(**here)
    before = snapshot(model)
    with pytest.raises(WeightsError, match=f"with another option: .*{said}"):
        zoo.load_pretrained(model, source)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_optimizers_tensors_are_the_cause(tmp_path: Path) -> None:
    model = make()
    source = sources.Source("x", broken(snapshot(model), "optimizer"))
    with pytest.raises(WeightsError, match="likely cause: this is an optimizer checkpoint"):
        weights.apply_source(model, source)


def test_norms_folded_at_the_export_are_the_cause() -> None:
    state = snapshot(make())
    del state["norm.weight"], state["norm.bias"]
    source = sources.Source("x", state, config={"library": "onnx", "folded_norms": ["a", "b"]})
    with pytest.raises(WeightsError, match="cause: batch norm was folded into 2 convolutions"):
        weights.apply_source(make(), source)


def test_half_of_the_keys_is_refused_even_if_not_strict(tmp_path: Path) -> None:
    source = saved(broken(snapshot(randomized()), "half"), tmp_path)
    with pytest.raises(WeightsError, match="matches only"):
        zoo.load_pretrained(make(), source, strict=False)


def test_a_layout_that_does_not_fit_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(broken({}, "torchvision"), tmp_path)
    known = layouts.Layout(
        "a library's ViT",
        fits=lambda model: False,
        recognises=lambda source: "conv_proj.weight" in source.tensors,
        translate=lambda source, model: source,
    )
    monkeypatch.setattr(layouts, "_layouts", [known])
    with pytest.raises(WeightsError, match=f"(?s){CAUSES['torchvision']}"):
        zoo.load_pretrained(nn.Sequential(nn.Linear(2, 2)), source)


def test_weights_of_a_part_of_the_model_are_told_where_to_go(tmp_path: Path) -> None:
    source = saved({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path)
    with pytest.raises(WeightsError, match=r"the model's keys carry the prefix '0\.'.*'0'"):
        zoo.load_pretrained(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), source)


def test_a_layout_is_translated_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = randomized(), make()
    known = layouts.Layout(
        "the upside-down library",
        fits=lambda model: hasattr(model, "patch_embed"),
        recognises=lambda source: all(key.isupper() for key in source.tensors),
        translate=lambda source, model: replace(
            source,
            tensors={key.lower(): value for key, value in source.tensors.items()},
            card=ModelCard(None, {"norm_eps": 1e-6}, model.card.preprocessing),
        ),
    )
    monkeypatch.setattr(layouts, "_layouts", [known])
    tensors = {f"module.{key.upper()}": value for key, value in model.state_dict().items()}
    source = saved(tensors, tmp_path)
    report = zoo.load_pretrained(other, source)
    assert equal_state(other, model)
    assert report.layout == "the upside-down library"
    assert "(read as the upside-down library)" in str(report)
    with pytest.raises(WeightsError, match=r"norm_eps: 1e-06 there, 0\.001 here"):
        zoo.load_pretrained(make(norm_eps=1e-3), source)


def test_another_librarys_names_under_a_part_are_the_cause(tmp_path: Path) -> None:
    from vision.convert import revert_torchvision_vit

    theirs = revert_torchvision_vit(snapshot(randomized()))
    whole = {f"backbone.{key}": value for key, value in theirs.items()}
    source = saved({**whole, "decoder.weight": torch.ones(2)}, tmp_path)
    said = "under 'backbone' are the names of torchvision's ViT: load with part='backbone'"
    with pytest.raises(WeightsError, match=said):
        zoo.load_pretrained(make(), source)
    model = make(norm_eps=1e-6)
    assert zoo.load_pretrained(model, source, part="backbone").matched_fraction == 1


def test_sides_that_differ_in_nothing_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        zoo.load_pretrained(make(), saved(snapshot(randomized(embed_dim=32)), tmp_path))
    assert "only in the" not in str(caught.value)


@pytest.mark.parametrize("least", [-0.1, 1.5, float("nan")])
def test_a_part_that_cannot_match_is_refused(tmp_path: Path, least: float) -> None:
    source = saved(snapshot(randomized()), tmp_path)
    with pytest.raises(ValueError, match=rf"min_matched \({least}\) must lie in \[0, 1\]"):
        zoo.load_pretrained(make(), source, min_matched=least)


def test_a_part_of_a_file_of_the_network_alone(tmp_path: Path) -> None:
    source = saved(snapshot(randomized()), tmp_path)
    with pytest.raises(WeightsError, match=r"nothing under part 'backbone'.*leave part out"):
        zoo.load_pretrained(make(), source, part="backbone")
    assert zoo.load_pretrained(make(), source).loaded
