"""Networks of other libraries by name, with a card. Hubs cannot be reached here."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import skimage.data
import timm
import torch
import torchvision
from open_clip.model import CLIP, CLIPVisionCfg, _build_vision_tower, resize_pos_embed
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import ImageNetInfo, create_transform, resolve_data_config
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor

import zoo
from zoo import hosts
from zoo.card import CROP_MODES
from zoo.preprocess import build_transform

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


@pytest.mark.parametrize("size", [64, 160])
def test_a_vit_of_torchvision_takes_another_size(size: int, tmp_path: Path) -> None:
    from timm.layers import resample_abs_pos_embed

    trained: Any = zoo.create_model("torchvision:vit_b_32", num_classes=3)
    nn.init.normal_(trained.encoder.pos_embedding)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    source = f"file:{tmp_path / 'trained.pt'}"
    model: Any = zoo.create_model(
        "torchvision:vit_b_32", num_classes=3, img_size=size, pretrained=source
    )
    grid = size // 32
    assert model.load_report.resized == {"encoder.pos_embedding": f"grid 7x7 -> {grid}x{grid}"}
    torch.testing.assert_close(
        model.encoder.pos_embedding.data,
        resample_abs_pos_embed(trained.encoder.pos_embedding.data, [grid, grid], [7, 7]),
    )
    assert model(torch.randn(1, 3, size, size)).shape == (1, 3)


def test_positions_that_cannot_be_resampled_are_the_cause(tmp_path: Path) -> None:
    trained = zoo.create_model("timm:levit_128s", num_classes=3)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    model = zoo.create_model("timm:levit_128s", num_classes=3, img_size=96)
    said = "(?s)likely cause: weights for images of another size, and .*attention_biases cannot"
    with pytest.raises(zoo.weights.WeightsError, match=said):
        zoo.load_pretrained(model, f"file:{tmp_path / 'trained.pt'}")


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
        ("timm:resnet18.v9", r"timm:resnet18 has no weights 'v9'; it has a1_in1k, "),
        ("timm:ResNet18", "timm has no model 'ResNet18'; nearest: resnet18"),
        ("timm:NOPE", r"timm has no model 'NOPE'; timm.list_models\(\) lists all \d+"),
        ("torchvision:NOPE", r"torchvision has no model 'NOPE'; torchvision\.models\.list_models"),
        ("open_clip:vit-b-32", "open_clip has no model 'vit-b-32'; nearest: ViT-B-32"),
        ("timm:", "timm has no model ''"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.create_model(name)
    if not name.endswith(":"):  # read_source says that
        with pytest.raises(zoo.weights.WeightsError, match=message):
            zoo.load_pretrained(nn.Linear(1, 1), name)


def test_a_network_without_weights_says_so() -> None:
    with pytest.raises(zoo.weights.WeightsError, match="timm has no weights for resnet50t"):
        zoo.load_pretrained(nn.Linear(1, 1), "timm:resnet50t")


@pytest.mark.parametrize("source", ["timm:resnet18", "torchvision:resnet18"])
def test_offline_says_what_to_do(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **options: Any) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", offline)
    said = f"{source} cannot be had: OSError: no route to host; load it once .* take file:PATH"
    with pytest.raises(zoo.weights.WeightsError, match=said):
        zoo.load_pretrained(nn.Linear(1, 1), source)


def test_every_preprocessing_of_timm_has_a_card() -> None:
    """VOLO's largest were evaluated with a crop of more than the image."""
    larger = set()
    for name in timm.list_pretrained():
        preprocessing = hosts._as_preprocessing(timm.get_pretrained_cfg(name))
        if preprocessing.crop_pct > 1:
            larger.add(name.partition(".")[0])
    assert {"volo_d4_448", "volo_d5_448", "volo_d5_512"} <= larger


@pytest.mark.parametrize("size", [(64, 64), (48, 64)])
@pytest.mark.parametrize("mode", CROP_MODES)
def test_a_crop_of_more_than_the_image_equals_timms(mode: str, size: tuple[int, int]) -> None:
    config = timm.get_pretrained_cfg("volo_d5_512")
    pre = replace(hosts._as_preprocessing(config), size=size, crop_mode=mode)
    theirs = create_transform(
        (3, *size),
        mean=pre.mean,
        std=pre.std,
        interpolation=pre.interpolation,
        crop_pct=config.crop_pct,
        crop_mode=mode,
    )
    for rows, cols in ((50, 70), (200, 90), (64, 64), (30, 20)):
        image = Image.fromarray(skimage.data.chelsea()[:rows, :cols])
        torch.testing.assert_close(build_transform(pre)(image), theirs(image), atol=1e-5, rtol=0)


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


# --- cards of trained weights ----------------------------------------------------------------


@pytest.fixture
def timm_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights stand for those that timm would download."""
    original = timm.create_model

    def create(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        return original(name, **options)

    monkeypatch.setattr(timm, "create_model", create)


def test_weights_of_timm_bring_names_licence_and_origin(timm_weights: None) -> None:
    model: Any = zoo.create_model("timm:mobilenetv3_small_050", pretrained=True)
    info = ImageNetInfo("imagenet-1k")
    names = [description.split(",")[0] for description in info.label_descriptions()]
    same = [a == b for a, b in zip(model.card.class_names, names, strict=True)]
    assert sum(same) == 998  # all but the second crane and the second maillot
    assert model.card.license == timm.get_pretrained_cfg("mobilenetv3_small_050").license
    assert model.card.extra["weights"] == "mobilenetv3_small_050.lamb_in1k"
    assert model.card.extra["url"] == "https://huggingface.co/timm/mobilenetv3_small_050.lamb_in1k"


def test_names_come_with_the_outputs_that_they_name(timm_weights: None) -> None:
    assert zoo.create_model("timm:mobilenetv3_small_050").card.class_names is None
    other: Any = zoo.create_model("timm:mobilenetv3_small_050", pretrained=True, num_classes=7)
    assert other.card.class_names is None
    torch.manual_seed(0)
    known: Any = zoo.create_model(
        "timm:mobilenetv3_small_050", class_names=["tabby", "my cat", "daisy"]
    )
    before = known.classifier.weight[1].clone()
    report = zoo.load_pretrained(known, "timm:mobilenetv3_small_050")
    assert "2 of 3 classes, by name" in report.adapted["classifier.weight"]
    assert torch.equal(known.classifier.weight[1], before)
    assert known.card.class_names == ("tabby", "my cat", "daisy")


def test_a_host_has_as_many_outputs_as_its_weights() -> None:
    with torch.device("meta"):
        assert zoo.create_model("timm:vit_small_patch14_dinov2").num_classes == 0
        assert zoo.create_model("timm:mixer_b16_224.miil_in21k").num_classes == 11221
        assert zoo.create_model("timm:vit_small_patch14_dinov2", num_classes=3).num_classes == 3


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("convnext_tiny.fb_in22k", 21841),
        ("convnext_tiny.in12k", 11821),
        ("mixer_b16_224.goog_in21k", 21843),
        ("mixer_b16_224.miil_in21k", 11221),
        ("resmlp_12_224.fb_dino", None),  # 1,000 outputs of no classes
        ("mvitv2_base_cls.fb_inw21k", None),  # timm does not know their names
        ("vit_small_patch14_dinov2.lvd142m", None),
        ("resnet50_clip.openai", None),
    ],
)
def test_classes_of_other_sets(name: str, count: int | None) -> None:
    names = hosts._timm_classes(timm.get_pretrained_cfg(name))
    assert (None if names is None else len(names)) == count


def test_every_configuration_of_timm_converts() -> None:
    converted = 0
    for name in timm.list_models(pretrained=True, include_tags=True):
        config = timm.get_pretrained_cfg(name)
        if config.crop_pct <= 1:  # VOLO's 1.15 pads
            card = hosts.timm_card(f"timm:{name}", config)
            assert card.class_names is None or len(card.class_names) == config.num_classes
            converted += 1
    assert converted > 1500


def test_weights_of_torchvision_bring_names_licence_and_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        shapes = torchvision.models.squeezenet1_1().state_dict()
    tensors = {key: torch.zeros(value.shape) for key, value in shapes.items()}
    weights = torchvision.models.SqueezeNet1_1_Weights
    monkeypatch.setattr(weights, "get_state_dict", lambda self, **options: tensors)
    model: Any = zoo.create_model("torchvision:squeezenet1_1", pretrained=True)
    assert list(model.card.class_names) == weights.DEFAULT.meta["categories"]
    assert model.card.extra["url"] == weights.DEFAULT.url
    assert model.card.license is None  # torchvision states none
    swag = torchvision.models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1
    assert "SWAG" in str(hosts._torchvision_card("torchvision:vit_b_16", swag).license)
    features = torchvision.models.VGG16_Weights.IMAGENET1K_FEATURES  # no classes
    assert hosts._torchvision_card("torchvision:vgg16", features).class_names is None


# --- their evaluation transforms on photos ---------------------------------------------------


@pytest.fixture(scope="module")
def photos() -> list[Image.Image]:
    """Wide, tall, and of one colour channel in the file."""
    cat = Image.fromarray(skimage.data.chelsea())
    flower = Image.fromarray(load_sample_image("flower.jpg"))
    return [cat, cat.transpose(Image.Transpose.ROTATE_90), flower, flower.convert("L")]


@pytest.mark.parametrize(
    "name",
    [
        "tf_efficientnet_lite0",  # 0.875, bicubic
        "vit_tiny_patch16_224",  # 0.9
        "convnext_tiny.fb_in22k_ft_in1k_384",  # 1.0, squash
        "resnet50.tv_in1k",  # bilinear
        "inception_v3.tf_in1k",  # 299
        "xcit_nano_12_p8_384.fb_dist_in1k",  # 1.0, center
    ],
)
def test_transform_equals_timms(name: str, photos: list[Image.Image]) -> None:
    pretrained = timm.get_pretrained_cfg(name).to_dict()
    theirs = create_transform(**resolve_data_config(pretrained_cfg=pretrained))
    ours = build_transform(hosts.find_host("timm", name).preprocessing)
    for photo in photos:
        torch.testing.assert_close(ours(photo), theirs(photo.convert("RGB")), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "resnet50.IMAGENET1K_V1",  # 224 of 256
        "resnet50.IMAGENET1K_V2",  # 224 of 232
        "vit_b_16.IMAGENET1K_SWAG_E2E_V1",  # bicubic, 384 of 384
        "efficientnet_b1.IMAGENET1K_V1",  # 240 of 256
        "inception_v3",  # 299 of 342
        "swin_t",  # 224 of 232, bicubic
    ],
)
def test_transform_equals_torchvisions(name: str, photos: list[Image.Image]) -> None:
    architecture, _, tag = name.partition(".")
    found: Any = torchvision.models.get_model_weights(architecture)
    theirs = (found[tag] if tag else found.DEFAULT).transforms()
    ours = build_transform(hosts.find_host("torchvision", name).preprocessing)
    for photo in photos:
        torch.testing.assert_close(ours(photo), theirs(photo.convert("RGB")), atol=1e-5, rtol=0)


def test_transform_of_a_host_and_of_tensors(photos: list[Image.Image]) -> None:
    model: Any = zoo.create_model("torchvision:squeezenet1_1")
    theirs = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    tensor = pil_to_tensor(photos[0])
    one_level = 1 / 255 / min(model.card.preprocessing.std)
    # Its older resize works in floating point and rounds; ours has a kernel for 8 bit.
    torch.testing.assert_close(
        zoo.transforms(model)(tensor), theirs(tensor), atol=one_level + 1e-5, rtol=0
    )


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained", "pretrained_cfg", "cache_dir"])
def test_a_folder_cannot_make_timm_load_another_file(option: str, tmp_path: Path) -> None:
    zoo.save_pretrained(zoo.create_model("timm:resnet10t"), tmp_path / "model")
    card = json.loads((tmp_path / "model/model.json").read_text())
    card["options"][option] = str(tmp_path / "other.pth")
    (tmp_path / "model/model.json").write_text(json.dumps(card))
    with pytest.raises(TypeError, match=f"resnet10t has no option '{option}'"):
        zoo.create_model(f"local-dir:{tmp_path / 'model'}")


SMALL_TIMM = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "num_classes": 4}


def test_positions_of_a_timm_host_follow_the_image_size(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=64, **SMALL_TIMM).eval()
    args = {"img_size": 64, **SMALL_TIMM}
    timm.models.save_for_hf(theirs, tmp_path / "theirs", model_args=args)
    source = f"local-dir:{tmp_path / 'theirs'}"
    expected = timm.create_model("vit_tiny_patch16_224", img_size=(96, 48), **SMALL_TIMM).eval()
    expected.load_state_dict(checkpoint_filter_fn(dict(theirs.state_dict()), expected))
    x = torch.randn(2, 3, 96, 48)
    for ours in (
        zoo.create_model(source, img_size=(96, 48)),
        zoo.create_model(
            "timm:vit_tiny_patch16_224", pretrained=source, img_size=(96, 48), **SMALL_TIMM
        ),
    ):
        torch.testing.assert_close(ours.eval()(x), expected(x), atol=1e-5, rtol=1e-4)
    copied = copy.deepcopy(ours)
    zoo.save_pretrained(copied, tmp_path / "ours")
    again = zoo.create_model(f"local-dir:{tmp_path / 'ours'}").eval()
    assert torch.equal(again(x), ours(x))


def test_a_timm_folder_of_dynamic_size_opens_at_its_own(tmp_path: Path) -> None:
    args = {"img_size": 32, "dynamic_img_size": True, **SMALL_TIMM}
    theirs = timm.create_model("vit_tiny_patch16_224", **args).eval()
    timm.models.save_for_hf(theirs, tmp_path / "theirs", model_args=args)
    ours = zoo.create_model(f"local-dir:{tmp_path / 'theirs'}").eval()
    assert ours.card.preprocessing.size == (32, 32)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["timm:resnet10t", "timm:vit_tiny_patch16_224"])
def test_an_unknown_option_of_timm_is_told_with_those_there_are(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} has no option 'img_sz'; nearest: img_size") as e:
        zoo.create_model(name, img_sz=3)
    assert "valid: img_size, " in str(e.value)
    assert "drop_rate" in str(e.value)


def test_homes_of_a_name() -> None:
    assert hosts.homes_of("resnet18") == ["timm:resnet18", "torchvision:resnet18"]
    assert hosts.homes_of("ViT-B-32") == ["open_clip:ViT-B-32"]
    assert hosts.homes_of("resnet18.a1_in1k") == ["timm:resnet18.a1_in1k"]
    assert hosts.homes_of("no_such_model") == []
