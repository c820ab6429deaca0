"""Networks of other libraries by name, with a card. Hubs cannot be reached here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import torchvision
from open_clip.model import CLIP, CLIPVisionCfg, _build_vision_tower, resize_pos_embed
from torch import nn

import zoo
from zoo import hosts

NAMES = ["timm:resnet18", "timm:mobilenetv3_small_050", "torchvision:resnet18"]


@pytest.mark.parametrize("name", NAMES)
def test_is_the_librarys_own_network(name: str) -> None:
    library, _, own = name.partition(":")
    model = zoo.create_model(name, num_classes=5)
    if library == "timm":
        peer = timm.create_model(own, num_classes=5)
    else:
        peer = torchvision.models.get_model(own, num_classes=5)
    peer.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.eval()(x), peer.eval()(x))
    assert isinstance(model, type(peer))
    assert model.num_classes == 5
    assert len(model.get_classifier().weight) == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_host_is_made_again(name: str, tmp_path: Path) -> None:
    model = zoo.create_model(name, in_chans=1, img_size=32, class_names=["cat", "dog"]).eval()
    zoo.save_pretrained(model, tmp_path / "model")
    again: Any = zoo.create_model(f"local-dir:{tmp_path / 'model'}").eval()
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(model(x), again(x))
    assert again.card.class_names == ("cat", "dog")
    assert (again.card.preprocessing.size, again.card.preprocessing.in_chans) == ((32, 32), 1)


def test_preprocessing_is_the_weights_own() -> None:
    model: Any = zoo.create_model("timm:tf_efficientnet_lite0")
    config = timm.get_pretrained_cfg("tf_efficientnet_lite0")
    assert model.card.preprocessing.mean == tuple(config.mean) == (0.5, 0.5, 0.5)
    assert model.card.preprocessing.crop_pct == config.crop_pct
    model = zoo.create_model("torchvision:resnet50")
    expected = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
    assert model.card.preprocessing.size == (expected.crop_size[0],) * 2
    assert model.card.preprocessing.crop_pct == expected.crop_size[0] / expected.resize_size[0]
    first = zoo.create_model("torchvision:resnet50.IMAGENET1K_V1")
    assert first.card.preprocessing.crop_pct == 224 / 256


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18"])
def test_weights_of_another_class_count_and_channels(name: str, tmp_path: Path) -> None:
    trained: Any = zoo.create_model(name)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    model: Any = zoo.create_model(name, num_classes=3, in_chans=1)
    report = zoo.load_pretrained(model, f"file:{tmp_path / 'trained.pt'}")
    assert report.adapted["conv1.weight"] == "3 input channels -> 1"
    assert set(report.reinitialized) == {"fc.weight", "fc.bias"}
    x = torch.rand(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            model.conv1(x), trained.conv1(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5
        )


def test_trained_weights_come_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = torchvision.models.resnet18()
    monkeypatch.setattr(
        torchvision.models.ResNet18_Weights,
        "get_state_dict",
        lambda self, **options: trained.state_dict(),
    )
    model = zoo.create_model("torchvision:resnet18", pretrained=True, num_classes=7)
    assert torch.equal(model.layer1[0].conv1.weight, trained.layer1[0].conv1.weight)
    assert model.fc.out_features == 7
    assert model.card.source == "torchvision:resnet18"


def test_timm_is_asked_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = timm.create_model("resnet18")

    def create(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        return trained if pretrained else original(name, **options)

    original = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    model = zoo.create_model("timm:resnet18", pretrained=True, in_chans=1)
    assert torch.equal(model.fc.weight, trained.fc.weight)
    torch.testing.assert_close(model.conv1.weight, trained.conv1.weight.sum(1, keepdim=True))
    assert model.card.source == "timm:resnet18"


def test_weights_that_cannot_be_had_are_an_error_that_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*args: Any, **options: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", offline)
    with pytest.raises(zoo.weights.WeightsError, match=r"torchvision:resnet18.*no route to host"):
        zoo.create_model("torchvision:resnet18", pretrained=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet19", "timm has no model 'resnet19'; nearest: .*resnet18"),
        ("torchvision:resnet19", "torchvision has no model 'resnet19'; nearest: .*resnet18"),
        ("torchvision:resnet18.V9", "no weights 'V9'; it has IMAGENET1K_V1"),
        ("timm:resnet18.v9", r"timm:resnet18.v9: .*tag"),
        ("timm:", "timm has no model ''"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.create_model(name)


def test_an_option_that_the_host_lacks_is_named() -> None:
    with pytest.raises(TypeError, match=r"timm:resnet18.*atention"):
        zoo.create_model("timm:resnet18", atention=3)
    with pytest.raises(TypeError, match=r"torchvision:resnet18.*atention"):
        zoo.create_model("torchvision:resnet18", atention=3)


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_0", "densenet121", "vgg11_bn"])
def test_ends_of_torchvision_networks_are_found(name: str) -> None:
    model: Any = zoo.create_model(f"torchvision:{name}", num_classes=3, in_chans=1)
    head = model.get_submodule(model.classifier_name)
    assert 3 in (getattr(head, "out_features", None), getattr(head, "out_channels", None))
    assert model.eval()(torch.randn(1, 1, 64, 64)).shape == (1, 3)
    assert set(hosts.HOSTS) == {"timm", "torchvision", "open_clip"}


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:resnet18", "torchvision:vgg11"])
def test_another_classifier_is_saved(name: str, tmp_path: Path) -> None:
    model: Any = zoo.create_model(name, num_classes=4, img_size=64)
    model.reset_classifier(7)
    again = zoo.create_model(f"local-dir:{zoo.save_pretrained(model, tmp_path / 'model')}")
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(again.eval()(x), model.eval()(x))
    assert model.eval()(x).shape == (1, 7)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "mobilenet_v3_small"])
def test_no_classes_gives_features(name: str) -> None:
    model: Any = zoo.create_model(f"torchvision:{name}", num_classes=0).eval()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, model.num_features)
    with pytest.raises(ValueError, match=r"num_classes \(-1\) must not be negative"):
        zoo.create_model(f"torchvision:{name}", num_classes=-1)


def test_torchvision_options_that_no_one_reads_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no option 'foo'; valid: .*dropout"):
        zoo.create_model("torchvision:mobilenet_v3_small", foo=3)
    assert zoo.create_model("torchvision:mobilenet_v3_small", dropout=0.5).classifier[2].p == 0.5


# --- open_clip -------------------------------------------------------------------------------

TINY = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
TINY_RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("ViT-B-32", TINY),
        ("ViT-B-32-quickgelu", TINY),
        ("coca_ViT-B-32", {**TINY, "attn_pooler_heads": 2}),
        ("RN50", TINY_RESNET),
        ("convnext_tiny", {"timm_model_name": "resnet10t"}),
    ],
)
def test_is_open_clips_own_tower(arch: str, options: Any) -> None:
    model: Any = zoo.create_model(f"open_clip:{arch}", img_size=64, embed_dim=24, **options).eval()
    table = open_clip.get_model_config(arch)
    config = {**table["vision_cfg"], "image_size": 64, "output_tokens": False, **options}
    peer = _build_vision_tower(24, CLIPVisionCfg(**config), table.get("quick_gelu", False)).eval()
    peer.load_state_dict(model.visual.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), peer(x))
    assert model.num_features == 24
    assert model(x).shape == (2, 24)


@pytest.mark.parametrize(("arch", "options"), [("ViT-B-32", TINY), ("RN50", TINY_RESNET)])
def test_a_saved_open_clip_tower_is_made_again(arch: str, options: Any, tmp_path: Path) -> None:
    model: Any = zoo.create_model(
        f"open_clip:{arch}", img_size=64, in_chans=1, class_names=["cat", "dog"], **options
    ).eval()
    again: Any = zoo.create_model(f"local-dir:{zoo.save_pretrained(model, tmp_path / 'model')}")
    x = torch.randn(2, 1, 64, 64)
    assert torch.equal(model(x), again.eval()(x))
    assert model(x).shape == (2, 2)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    assert model.card.options["num_classes"] == 3
    assert model.get_classifier().out_features == 3
    with pytest.raises(ValueError, match=r"num_classes \(-1\) must not be negative"):
        model.reset_classifier(-1)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> CLIP:
    """Stands for what open_clip would load; its towers are small."""
    text = {"layers": 1, "width": 16, "heads": 2, "vocab_size": 10}
    model = CLIP(24, {**TINY, "image_size": 64}, text)
    monkeypatch.setattr(open_clip, "create_model", lambda arch, pretrained: model)
    return model


def test_trained_weights_of_open_clip(trained: CLIP) -> None:
    source = "open_clip:ViT-B-32/laion2b_s34b_b79k"
    model: Any = zoo.create_model(
        "open_clip:ViT-B-32", pretrained=source, img_size=64, num_classes=5, embed_dim=24, **TINY
    ).eval()
    x = torch.randn(2, 3, 64, 64)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    assert torch.equal(features, trained.eval().encode_image(x))
    assert model.card.source == source
    assert model.card.preprocessing.mean == open_clip.OPENAI_DATASET_MEAN


def test_positions_of_open_clip_are_resampled_as_there(trained: CLIP) -> None:
    nn.init.normal_(trained.visual.positional_embedding)
    model: Any = zoo.create_model("open_clip:ViT-B-32", img_size=96, embed_dim=24, **TINY)
    report = zoo.load_pretrained(model, "open_clip:ViT-B-32/laion2b_s34b_b79k")
    assert report.resized == {"visual.positional_embedding": "grid 8x8 -> 12x12"}
    state = {"visual.positional_embedding": trained.visual.positional_embedding.detach()}
    resize_pos_embed(state, model)
    torch.testing.assert_close(
        model.visual.positional_embedding.detach(), state["visual.positional_embedding"]
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("open_clip:ViT-B-32/laion9b", r"ViT-B-32 has no weights 'laion9b'; name one .*openai"),
        ("open_clip:ViT-B-32", r"ViT-B-32 has several weights; name one .*laion2b_s34b_b79k"),
        ("open_clip:ViT-S-16", r"open_clip has no weights for ViT-S-16"),
        ("open_clip:ViT-B-32/openai", r"with QuickGELU.* not .*take ViT-B-32-quickgelu/openai"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", r"cannot be had: OSError: no route"),
    ],
)
def test_weights_of_open_clip_that_cannot_be_had(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: Any, **options: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(open_clip, "create_model", offline)
    arch = name.partition("/")[0]
    with pytest.raises(zoo.weights.WeightsError, match=message):
        zoo.create_model(arch, pretrained=name, **TINY)


def test_preprocessing_of_open_clip_is_that_of_its_weights() -> None:
    options = {"timm_model_name": "vit_tiny_patch16_224", "img_size": 32}
    model: Any = zoo.create_model("open_clip:ViT-B-16-SigLIP", **options)
    assert model.card.preprocessing.mean == (0.5, 0.5, 0.5)
    assert model.card.preprocessing.crop_mode == "squash"
    with pytest.raises(
        TypeError, match=r"open_clip:ViT-B-32 has no option 'widht'; valid: .*width"
    ):
        zoo.create_model("open_clip:ViT-B-32", widht=3)
