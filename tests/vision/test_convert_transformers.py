"""transformers' ViT and DINOv2, and DINOv2's own files, loaded into ours: equal tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer as Timm
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from vit_files import assert_round_trip, images, load

import zoo
from vision import VisionTransformer
from vision.convert_config import transformers_architecture
from vision.convert_transformers import (
    convert_dinov2,
    convert_transformers_dinov2,
    convert_transformers_vit,
    revert_dinov2,
    revert_transformers_dinov2,
    revert_transformers_vit,
)
from zoo.weights import Source, WeightsError, apply_source

SIZE: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 4.0}
SMALL: dict[str, Any] = {**SIZE, "img_size": 16, "patch_size": 4, "num_classes": 0}
VIT: dict[str, Any] = {**SMALL, "norm_eps": 1e-12}
DINOV2: dict[str, Any] = {**SMALL, "init_values": 1e-5}
OTHER_SIZES = [(24, 8), (8, 12), (32, 32)]
CONFIG: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def randomised(network: nn.Module) -> Any:
    """Away from initial values, most of which are 0 or 1; in evaluation mode."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return network.eval()


def vit(kind: str = "ViTModel", **options: Any) -> Any:
    config = transformers.ViTConfig(**{**CONFIG, "intermediate_size": 96, **options})
    return randomised(getattr(transformers, kind)(config))


def dinov2(registers: int = 0, kind: str = "Model", **options: Any) -> Any:
    if registers:
        options["num_register_tokens"] = registers
    family = "Dinov2WithRegisters" if registers else "Dinov2"
    config = getattr(transformers, f"{family}Config")(**CONFIG, **options)
    return randomised(getattr(transformers, f"{family}{kind}")(config))


def saved(network: Any, tmp_path: Any) -> dict[str, Tensor]:
    """The tensors of its file, whose names are not those of its modules."""
    network.save_pretrained(tmp_path / "theirs")
    return load_file(tmp_path / "theirs" / "model.safetensors")


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.05  # else anything is close
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


# --- ViT -------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["file", "modules", "prefix"])
@pytest.mark.parametrize("size", [(16, 16), *OTHER_SIZES])
def test_vit(names: str, size: tuple[int, int], tmp_path: Any) -> None:
    theirs = vit()
    state = theirs.state_dict() if names == "modules" else saved(theirs, tmp_path)
    if names == "prefix":
        state = {f"vit.{name}": value for name, value in state.items()}
    ours, report = load(tmp_path, state, **{**VIT, "img_size": size})
    x = images(*size)
    tokens = theirs(x, interpolate_pos_encoding=True).last_hidden_state
    assert_same(ours.forward_features(x), tokens)
    assert report.matched_fraction == 1
    assert "pooler" in ours.card.extra["left_out"][0]


def test_vit_with_a_classifier(tmp_path: Any) -> None:
    theirs = vit("ViTForImageClassification", num_labels=5)
    state = saved(theirs, tmp_path)
    ours, _ = load(tmp_path, state, **{**VIT, "num_classes": 5})
    assert_same(ours(images()), theirs(images()).logits)
    other, report = load(tmp_path, state, **{**VIT, "num_classes": 3, "in_chans": 1})
    assert report.reinitialized.keys() == {"head.weight", "head.bias"}
    grey = images(channels=1)
    tokens = theirs.vit(grey.expand(-1, 3, -1, -1)).last_hidden_state
    assert_same(other.forward_features(grey), tokens)
    average = {**VIT, "global_pool": "avg", "fc_norm": False}
    with pytest.raises(WeightsError, match="global_pool: 'token' there, 'avg' here"):
        load(tmp_path, state, **average)


def test_bare_vit_asks_for_its_epsilon(tmp_path: Any) -> None:
    with pytest.raises(WeightsError, match="norm_eps: 1e-12 there, 1e-06 here; build the model"):
        load(tmp_path, vit().state_dict(), **SMALL)


@pytest.mark.parametrize(
    ("there", "option", "said"),
    [
        ({"layer_norm_eps": 1e-5}, {"norm_eps": 1e-5}, "norm_eps: 1e-05 there, 1e-12 here"),
        ({"hidden_act": "gelu_new"}, {"act": "gelu_tanh"}, "act: 'gelu_tanh' there"),
        ({"hidden_act": "quick_gelu"}, {"act": "quick_gelu"}, "act: 'quick_gelu' there"),
        ({"num_attention_heads": 4}, {"num_heads": 4}, "num_heads: 4 there, 2 here"),
    ],
    ids=str,
)
def test_config_of_a_folder_tells_options(
    there: dict[str, Any], option: dict[str, Any], said: str, tmp_path: Any
) -> None:
    theirs = vit(**there)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(WeightsError, match=said):
        zoo.load_pretrained(VisionTransformer(**VIT), f"local-dir:{tmp_path / 'theirs'}")
    ours = VisionTransformer(**{**VIT, **option}).eval()
    zoo.load_pretrained(ours, f"local-dir:{tmp_path / 'theirs'}")
    assert_same(ours.forward_features(images()), theirs(images()).last_hidden_state)


def test_foreign_activation_is_named() -> None:
    source = Source("x", vit().state_dict(), config={"hidden_act": "relu"})
    with pytest.raises(WeightsError, match=r"hidden_act 'relu' is none of.*known: gelu"):
        apply_source(VisionTransformer(**VIT), source)


@pytest.mark.parametrize("kind", [vit, dinov2])
def test_projections_without_biases(kind: Any, tmp_path: Any) -> None:
    theirs, options = kind(qkv_bias=False), VIT if kind is vit else DINOV2
    theirs.save_pretrained(tmp_path / "theirs")
    source = f"local-dir:{tmp_path / 'theirs'}"
    with pytest.raises(WeightsError, match="qkv_bias: False there, True here"):
        zoo.load_pretrained(VisionTransformer(**options), source)
    ours, _ = load(tmp_path, theirs.state_dict(), **options, qkv_bias=False)
    assert_same(ours.forward_features(images()), theirs(images()).last_hidden_state)
    again = zoo.create_model(source).eval()
    assert again.card.options["qkv_bias"] is False
    assert_same(again.forward_features(images()), theirs(images()).last_hidden_state)
    with pytest.raises(WeightsError, match="qkv_bias: True there, False here"):
        load(tmp_path, kind().state_dict(), **options, qkv_bias=False)


def test_distilled_vit_is_refused(tmp_path: Any) -> None:
    config = transformers.DeiTConfig(**CONFIG, intermediate_size=96)
    state = transformers.DeiTForImageClassification(config).state_dict()
    with pytest.raises(WeightsError, match="a distillation token"):
        load(tmp_path, state, **VIT)


def test_grid_that_is_not_square_is_known_from_the_config(tmp_path: Any) -> None:
    theirs = vit(image_size=(16, 24))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = VisionTransformer(**{**VIT, "img_size": (16, 24)}).eval()
    zoo.load_pretrained(ours, f"local-dir:{tmp_path / 'theirs'}")
    x = images(16, 24)
    assert_same(ours.forward_features(x), theirs(x).last_hidden_state)
    ours = VisionTransformer(**{**VIT, "img_size": (8, 8)})
    report = zoo.load_pretrained(ours, f"local-dir:{tmp_path / 'theirs'}")
    assert report.resized == {"pos_embed": "grid 4x6 -> 2x2"}


@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification"])
def test_vit_round_trip(kind: str, tmp_path: Any) -> None:
    state = saved(vit(kind), tmp_path)
    bare = {name.removeprefix("vit."): value for name, value in state.items()}
    bare = {name: value for name, value in bare.items() if not name.startswith("pooler.")}
    assert_round_trip(bare, revert_transformers_vit(convert_transformers_vit(state)))


# --- DINOv2 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("size", [(16, 16), *OTHER_SIZES])
def test_dinov2(registers: int, no_embed_class: bool, size: tuple[int, int], tmp_path: Any) -> None:
    """transformers resamples by itself: without antialiasing, but with registers with it."""
    theirs = dinov2(registers)
    options = {"reg_tokens": registers, "no_embed_class": no_embed_class, "img_size": size}
    ours, report = load(tmp_path, saved(theirs, tmp_path), **{**DINOV2, **options})
    x = images(*size)
    assert_same(ours.forward_features(x), theirs(x).last_hidden_state)
    assert_same(ours(x), theirs(x).pooler_output)
    assert report.matched_fraction == 1
    assert "mask token" in ours.card.extra["left_out"][0]
    assert ours.card.extra.get("antialias", True) == (registers > 0)
    assert ours.card.preprocessing.mean == (0.485, 0.456, 0.406)


def test_antialias_is_the_callers_to_choose(tmp_path: Any) -> None:
    torch.save(dinov2().state_dict(), tmp_path / "weights.pt")
    found = []
    for antialias in (None, False, True):
        model = VisionTransformer(**{**DINOV2, "img_size": 8})
        zoo.load_pretrained(model, f"file:{tmp_path / 'weights.pt'}", antialias=antialias)
        found.append(model.pos_embed)
    assert torch.equal(found[0], found[1])
    assert (found[1] - found[2]).abs().max() > 0.01


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_inside_another_network(registers: int, tmp_path: Any) -> None:
    """As exported with a decoder: no mask token, a prefix, positions of the exported size."""
    theirs = dinov2(registers)
    state = {f"backbone.{name}": value for name, value in theirs.state_dict().items()}
    del state["backbone.embeddings.mask_token"]
    state["decoder.weight"] = torch.zeros(3)
    torch.save(state, tmp_path / "weights.pt")
    options = {**DINOV2, "reg_tokens": registers, "no_embed_class": registers > 0}
    ours = VisionTransformer(**options, global_pool="").eval()
    zoo.load_pretrained(ours, f"file:{tmp_path / 'weights.pt'}", part="backbone")
    assert_same(ours(images()), theirs(images()).last_hidden_state)


def test_dinov2_grid_told_by_the_source() -> None:
    theirs = dinov2()
    state = dict(theirs.state_dict())
    position = state["embeddings.position_embeddings"]
    state["embeddings.position_embeddings"] = torch.cat([position[:, :1], position[:, 5:]], 1)
    grids = {"embeddings.position_embeddings": (3, 4)}
    model = VisionTransformer(**{**DINOV2, "img_size": (16, 16)})
    report = apply_source(model, Source("x", state, None, grids))
    assert report.resized == {"pos_embed": "grid 3x4 -> 4x4"}


def test_dinov2_classifier_is_left_out_and_said(tmp_path: Any) -> None:
    theirs = dinov2(kind="ForImageClassification", num_labels=5)
    ours, report = load(tmp_path, saved(theirs, tmp_path), **{**DINOV2, "num_classes": 5})
    assert report.reinitialized.keys() == {"head.weight", "head.bias"}
    assert any("side by side" in what for what in ours.card.extra["left_out"])
    tokens = theirs.dinov2(images()).last_hidden_state
    assert_same(ours.forward_features(images()), tokens)


@pytest.mark.parametrize("names", ["file", "modules"])
def test_swiglu_is_refused(names: str, tmp_path: Any) -> None:
    theirs = dinov2(use_swiglu_ffn=True)
    state = theirs.state_dict() if names == "modules" else saved(theirs, tmp_path)
    with pytest.raises(WeightsError, match="a SwiGLU"):
        load(tmp_path, state, **DINOV2)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"reg_tokens": 2}, "reg_tokens: 0 there, 2 here"),
        ({"norm_eps": 1e-5}, "norm_eps: 1e-06 there, 1e-05 here"),
        ({"act": "gelu_tanh"}, "act: 'gelu' there"),
        ({"init_values": None}, "ls1.gamma"),
    ],
    ids=str,
)
def test_dinov2_refuses_other_variants(option: Any, said: str, tmp_path: Any) -> None:
    with pytest.raises(WeightsError, match=said):
        load(tmp_path, dinov2().state_dict(), **{**DINOV2, **option})


@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_round_trips(registers: int, no_embed_class: bool) -> None:
    """From ours and back: a class token that has taken up its position stays as it is."""
    options = {"reg_tokens": registers, "no_embed_class": no_embed_class}
    ours = randomised(VisionTransformer(**{**DINOV2, **options})).state_dict()
    if registers and not no_embed_class:
        with pytest.raises(ValueError, match="adds to the registers"):
            revert_dinov2(ours)
        ours["pos_embed"][:, 1 : 1 + registers] = 0
    theirs = revert_transformers_dinov2(ours, no_embed_class)
    assert_round_trip(ours, convert_transformers_dinov2(theirs, no_embed_class))
    own = revert_dinov2(ours, no_embed_class)
    assert_round_trip(ours, convert_dinov2(own, no_embed_class))
    if registers == 0 and not no_embed_class:  # nothing is added up: theirs and back as well
        state = {**dinov2().state_dict()}
        file = revert_transformers_dinov2(convert_transformers_dinov2(state))
        assert_round_trip(file, revert_transformers_dinov2(convert_transformers_dinov2(file)))


@pytest.mark.parametrize("size", [(16, 16), (24, 8)])
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2s_own_files(registers: int, size: tuple[int, int], tmp_path: Any) -> None:
    """timm reads them too; it resamples with antialiasing where it is not told otherwise."""
    ours = randomised(VisionTransformer(**{**DINOV2, "reg_tokens": registers})).state_dict()
    ours["pos_embed"][:, 1 : 1 + registers] = 0
    state = {**revert_dinov2(ours), "mask_token": torch.zeros(1, 24)}
    options = {"reg_tokens": registers, "no_embed_class": registers > 0, "img_size": size}
    model, _ = load(tmp_path, state, **{**DINOV2, **options})
    theirs = Timm(**{**DINOV2, **options}).eval()
    theirs.load_state_dict(checkpoint_filter_fn(dict(state), theirs, antialias=registers > 0))
    assert_same(model(images(*size)), theirs(images(*size)))
    assert "mask token" in model.card.extra["left_out"][0]


# --- config.json -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.ViTConfig(), "vit_base_patch16_224"),
        (transformers.ViTConfig(image_size=384), "vit_base_patch16_384"),
        (transformers.ViTConfig(patch_size=32), "vit_base_patch32_224"),
        (
            transformers.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768),
            "vit_tiny_patch16_224",
        ),
        (transformers.Dinov2Config(image_size=518), "vit_base_patch14_dinov2"),
        (
            transformers.Dinov2WithRegistersConfig(
                image_size=518, patch_size=14, hidden_size=384, num_attention_heads=6
            ),
            "vit_small_patch14_reg4_dinov2",
        ),
        (transformers.ViTConfig(hidden_size=48), "vit_base_patch16_224"),
        (transformers.BertConfig(), None),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_registered_names_of_configs(config: Any, name: str | None) -> None:
    found = transformers_architecture(config.to_diff_dict() | {"model_type": config.model_type})
    assert (found and found[0]) == name
    if found:
        with torch.device("meta"):
            model = zoo.create_model(found[0], **found[1])
        assert model.embed_dim == config.hidden_size
        assert model.card.options["norm_eps"] == config.layer_norm_eps
        assert model.patch_embed.img_size == (config.image_size, config.image_size)


def test_swiglu_in_a_config_is_refused() -> None:
    with pytest.raises(WeightsError, match="SwiGLU"):
        transformers_architecture({"model_type": "dinov2", "use_swiglu_ffn": True})


@pytest.mark.parametrize("classes", [2, 5])
def test_models_from_folders(classes: int, tmp_path: Any) -> None:
    theirs = vit("ViTForImageClassification", num_labels=classes)
    theirs.save_pretrained(tmp_path / "vit")
    ours = zoo.create_model(f"local-dir:{tmp_path / 'vit'}").eval()
    assert_same(ours(images()), theirs(images()).logits)
    for registers in (0, 4):
        backbone = dinov2(registers)
        backbone.save_pretrained(tmp_path / f"dinov2_{registers}")
        ours = zoo.create_model(f"local-dir:{tmp_path / f'dinov2_{registers}'}").eval()
        tokens = ours.forward_features(images())
        assert_same(tokens, backbone(images()).last_hidden_state)
