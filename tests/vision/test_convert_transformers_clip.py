"""transformers' CLIP, its visual tower loaded into ours: equal embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from vit_files import assert_round_trip, images, load

import zoo
from vision import VisionTransformer
from vision.convert_config import transformers_architecture
from vision.convert_transformers_clip import convert_transformers_clip, revert_transformers_clip
from zoo.weights import Source, WeightsError, apply_source

TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
}
OURS: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 2,
    "pre_norm": True,
    "norm_eps": 1e-5,
    "act": "quick_gelu",
    "num_classes": 10,
}
QUICK = "vit_base_patch32_clip_quickgelu_224"


def config(**vision: Any) -> Any:
    text = {**TOWER, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {"image_size": 16, "patch_size": 4, "projection_dim": 10}
    return transformers.CLIPConfig(
        text_config=text, vision_config={**TOWER, **sizes, **vision}, projection_dim=10
    )


def clip(kind: str = "CLIPModel", **vision: Any) -> Any:
    whole = kind in ("CLIPModel", "CLIPForImageClassification")
    wanted = config(**vision)
    torch.manual_seed(0)
    network = getattr(transformers, kind)(wanted if whole else wanted.vision_config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return network.eval()


def embedded(theirs: Any, x: Tensor) -> Tensor:
    """Images in the space that they share with texts, at any size."""
    pooled = theirs.vision_model(x, interpolate_pos_encoding=True).pooler_output
    return theirs.visual_projection(pooled)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.05  # else anything is close
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["CLIPModel", "CLIPVisionModelWithProjection"])
@pytest.mark.parametrize("size", [(16, 16), (24, 8), (8, 12), (32, 32)])
@pytest.mark.filterwarnings("ignore:.*cannot tell whether")
def test_embeddings_at_any_size(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    theirs = clip(kind)
    ours, report = load(tmp_path, theirs.state_dict(), **{**OURS, "img_size": size})
    assert_same(ours(images(*size)), embedded(theirs, images(*size)))
    assert report.matched_fraction == 1
    assert report.layout == "transformers' CLIP visual tower"
    text = [name for name in theirs.state_dict() if name.startswith(("text_", "logit_scale"))]
    assert ours.card.extra.get("left_out", []) == (
        [f"{len(text)} tensors of the text part"] if text else []
    )
    assert any("activation" in note for note in ours.card.extra["notes"])


def test_tower_without_a_projection(tmp_path: Path) -> None:
    theirs = clip("CLIPVisionModel")
    ours, report = load(tmp_path, theirs.state_dict(), **OURS)
    assert report.reinitialized.keys() == {"head.weight", "head.bias"}
    assert_same(ours.forward_head(ours.forward_features(images()), True), theirs(images())[1])
    theirs = clip()
    ours, report = load(tmp_path, theirs.state_dict(), **{**OURS, "num_classes": 0})
    assert report.adapted.keys() == {"head.weight", "head.bias"}
    assert_same(ours(images()), theirs.vision_model(images()).pooler_output)


def test_files_of_older_versions_hold_numbers_of_positions(tmp_path: Path) -> None:
    state = dict(clip().state_dict())
    for tower in ("vision", "text"):
        state[f"{tower}_model.embeddings.position_ids"] = torch.arange(17)[None]
    _, report = load(tmp_path, state, **OURS)
    assert not report.unexpected


@pytest.mark.parametrize("kind", ["CLIPModel", "CLIPVisionModelWithProjection", "CLIPVisionModel"])
@pytest.mark.parametrize("there", [{}, {"hidden_act": "gelu", "layer_norm_eps": 1e-6}], ids=str)
def test_a_folder_is_a_model(kind: str, there: dict[str, Any], tmp_path: Path) -> None:
    theirs = clip(kind, **there)
    theirs.save_pretrained(tmp_path / "theirs")
    ours: Any = zoo.create_model(f"local-dir:{tmp_path / 'theirs'}").eval()
    assert ours.card.options["act"] == there.get("hidden_act", "quick_gelu")
    x = images()
    wanted = theirs(x).pooler_output if kind == "CLIPVisionModel" else embedded(theirs, x)
    assert_same(ours(x), wanted)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, "act: 'quick_gelu' there, 'gelu' here"),
        ({"hidden_act": "gelu", "num_attention_heads": 4}, "num_heads: 4 there, 2 here"),
        ({"hidden_act": "gelu", "layer_norm_eps": 1e-6}, "norm_eps: 1e-06 there, 1e-05 here"),
    ],
    ids=str,
)
def test_config_of_a_folder_tells_options(there: Any, said: str, tmp_path: Path) -> None:
    """Also what config.json leaves out, as that of openai/clip-vit-base-patch32 does."""
    folder = tmp_path / "theirs"
    clip(**there).save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text())
    if not there:
        del table["vision_config"]["hidden_act"], table["text_config"]["hidden_act"]
    (folder / "config.json").write_text(json.dumps(table))
    model = VisionTransformer(**{**OURS, "act": "gelu"})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=said):
        zoo.load_pretrained(model, f"local-dir:{folder}")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not there:
        tower = zoo.create_model("text_micro", embed_dim=24, num_heads=2, mlp_ratio=4.0)
        with pytest.raises(WeightsError, match="act: 'quick_gelu' there, 'gelu' here"):
            zoo.load_pretrained(tower, f"local-dir:{folder}")


def test_a_grid_that_is_not_square_is_known_from_the_config() -> None:
    theirs = clip()
    state = dict(theirs.state_dict())
    name = "vision_model.embeddings.position_embedding.weight"
    state[name] = torch.randn(1 + 2 * 6, 24)
    table = {"library": "transformers", "vision_config": {**TOWER, "image_size": (8, 24)}}
    table["vision_config"]["patch_size"] = 4
    model = VisionTransformer(**OURS)
    report = apply_source(model, Source("x", state, config=table))
    assert report.resized == {"pos_embed": "grid 2x6 -> 4x4"}


def test_a_classifier_is_left_out_and_said(tmp_path: Path) -> None:
    theirs = clip("CLIPForImageClassification")
    theirs.save_pretrained(tmp_path / "theirs")
    ours: Any = zoo.create_model(f"local-dir:{tmp_path / 'theirs'}", num_classes=2).eval()
    assert ours.load_report.reinitialized.keys() == {"head.weight", "head.bias"}
    assert any("before the last norm" in what for what in ours.card.extra["left_out"])
    pooled = ours.forward_head(ours.forward_features(images()), pre_logits=True)
    assert_same(pooled, theirs.vision_model(images()).pooler_output)


def test_foreign_activation_is_named() -> None:
    table = {"library": "transformers", "vision_config": {"hidden_act": "relu"}}
    with pytest.raises(WeightsError, match="hidden_act 'relu' is none of"):
        apply_source(VisionTransformer(**OURS), Source("x", clip().state_dict(), config=table))


@pytest.mark.parametrize("kind", ["CLIPModel", "CLIPVisionModelWithProjection"])
def test_round_trip(kind: str, tmp_path: Path) -> None:
    theirs = clip(kind)
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    visual = {n: v for n, v in state.items() if n.startswith(("vision_model.", "visual_"))}
    ours = convert_transformers_clip(state)
    assert_round_trip(visual, revert_transformers_clip(ours))
    assert_round_trip(ours, convert_transformers_clip(revert_transformers_clip(ours)))
    with pytest.raises(ValueError, match=r"head\.bias must be zero"):
        revert_transformers_clip({**ours, "head.bias": torch.ones(10)})


@pytest.mark.parametrize(
    ("given", "name", "classes"),
    [
        ({"model_type": "clip", "vision_config": {}}, QUICK, 512),
        ({"model_type": "clip_vision_model"}, QUICK, 512),
        ({"model_type": "clip_vision_model", "architectures": ["CLIPVisionModel"]}, QUICK, 0),
        (
            {"model_type": "clip", "vision_config": {"hidden_act": "gelu", "patch_size": 16}},
            "vit_base_patch16_clip_224",
            512,
        ),
        (
            {
                "model_type": "clip",
                "projection_dim": 768,
                "vision_config": {
                    "hidden_size": 1024,
                    "intermediate_size": 4096,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 16,
                    "patch_size": 14,
                    "image_size": 336,
                },
            },
            "vit_large_patch14_clip_quickgelu_336",
            768,
        ),
    ],
    ids=str,
)
def test_registered_names_of_configs(given: dict[str, Any], name: str, classes: int) -> None:
    found, options = transformers_architecture(given) or ("", {})
    assert found == name
    with torch.device("meta"):
        model: Any = zoo.create_model(found, **options)
        plain: Any = zoo.create_model(found, num_classes=classes)
    assert model.num_classes == classes
    assert model.card.differences(plain.card) == {}
    assert model.card.preprocessing == plain.card.preprocessing
