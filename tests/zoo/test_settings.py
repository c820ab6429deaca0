"""Settings without tensors: what differs between networks, and what that means for loading."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.layers import Conv2dSame, GELUTanh, SelectAdaptivePool2d, Swish
from torch import nn

import zoo
from zoo.settings import differences, twin_of
from zoo.sources import Source
from zoo.weights import WeightsError, apply_source

TWIN, OTHER = "mobilenetv3_small_100", "tf_mobilenetv3_small_100"


def pair(one: nn.Module, other: nn.Module) -> dict[str, tuple[str, str]]:
    return differences(nn.ModuleDict({"x": one}), nn.ModuleDict({"x": other}))


@pytest.mark.parametrize(
    ("one", "other", "here", "there"),
    [
        (nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 4, 3, 1), "stride (2, 2)", "stride (1, 1)"),
        (nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1), "padding (0, 0)", "padding (1, 1)"),
        (nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, dilation=2), "dilation (1, 1)", "dilation (2, 2)"),
        (nn.Conv2d(4, 4, 3), Conv2dSame(4, 4, 3), "kind Conv2d", "kind Conv2dSame"),
        (nn.Conv1d(4, 2, 1), nn.Conv1d(4, 2, 1, groups=2), "groups 1", "groups 2"),
        (nn.BatchNorm2d(3), nn.BatchNorm2d(3, eps=1e-3), "eps 1e-05", "eps 0.001"),
        (nn.LayerNorm(3), nn.LayerNorm(3, eps=1e-6), "eps 1e-05", "eps 1e-06"),
        (nn.GroupNorm(2, 4), nn.GroupNorm(4, 4), "num_groups 2", "num_groups 4"),
        (nn.GELU(), nn.GELU("tanh"), "'none'", "'tanh'"),
        (nn.GELU(), nn.ReLU(), "activation GELU", "activation ReLU"),
        (nn.ReLU(), nn.Identity(), "activation ReLU()", "activation Identity()"),
        (nn.LeakyReLU(), nn.LeakyReLU(0.2), "slope=0.01", "slope=0.2"),
        (nn.MaxPool2d(2), nn.AvgPool2d(2), "MaxPool2d", "AvgPool2d"),
        (nn.MaxPool2d(2), nn.MaxPool2d(3, 2), "kernel_size=2", "kernel_size=3"),
        (nn.AvgPool2d(2), nn.AvgPool2d(2, ceil_mode=True), "mode=False", "mode=True"),
        (SelectAdaptivePool2d(1, "avg"), SelectAdaptivePool2d(1, "max"), "type avg", "type max"),
        (nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4), "num_heads 2", "num_heads 4"),
    ],
)
def test_differences_are_found(one: nn.Module, other: nn.Module, here: str, there: str) -> None:
    found = pair(one, other)["x"]
    assert here in found[0]
    assert there in found[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1)),
        (nn.Conv2d(4, 4, 5, padding="valid"), nn.Conv2d(4, 4, 5)),
        (nn.ReLU(inplace=True), nn.ReLU()),
        (nn.SiLU(), Swish()),
        (nn.GELU("tanh"), GELUTanh()),
        (nn.BatchNorm2d(3, momentum=0.01), nn.BatchNorm2d(3)),
        (nn.Dropout(0.1), nn.Dropout(0.5)),
        (nn.Dropout(0.1), nn.Identity()),
        (nn.MaxPool2d(2), nn.MaxPool2d((2, 2), 2)),
        (nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1))),
        (nn.Linear(2, 2), nn.Conv2d(2, 2, 1)),  # tensors tell these apart
    ],
)
def test_what_computes_the_same_is_no_difference(one: nn.Module, other: nn.Module) -> None:
    assert pair(one, other) == {}


def test_only_common_names_are_compared() -> None:
    assert differences(nn.Sequential(nn.ReLU()), nn.ModuleDict({"a": nn.GELU()})) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("resnet50", "tf_efficientnet_b0", "mobilenetv3_large_100", "convnext_tiny", "nfnet_f0"),
        *("swin_tiny_patch4_window7_224", "levit_128", "deit_tiny_distilled_patch16_224"),
        *("maxvit_tiny_tf_224", "beit_base_patch16_224", "hrnet_w18_small", "tf_mixnet_s"),
    ],
)
def test_a_network_of_timm_equals_itself(name: str) -> None:
    with torch.device("meta"):
        assert differences(timm.create_model(name), timm.create_model(name)) == {}


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16", "convnext_tiny"])
def test_a_network_of_torchvision_equals_itself(name: str) -> None:
    build = torchvision.models.get_model
    with torch.device("meta"):
        assert differences(build(name), build(name)) == {}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_our_resnets_equal_those_of_both_libraries(name: str) -> None:
    with torch.device("meta"):
        ours = zoo.create_model(name)
        assert differences(ours, timm.create_model(name)) == {}
        assert differences(ours, torchvision.models.get_model(name)) == {}


@pytest.mark.parametrize("name", [n for n in zoo.list_models("vit_*") if timm.is_model(n)])
def test_our_vits_equal_timms(name: str) -> None:
    with torch.device("meta"):
        ours, theirs = zoo.create_model(name), timm.create_model(name)
    assert differences(ours, theirs) == {}
    theirs.blocks[1].mlp.act = nn.ReLU()
    assert list(differences(ours, theirs)) == ["blocks.1.mlp.act"]


# --- what that means for loading --------------------------------------------------------------


def source_of(name: str) -> Source:
    network: Any = timm.create_model(name)
    return Source(f"timm:{name}", network.state_dict(), None, network=network)


def test_another_networks_settings_are_refused() -> None:
    model: Any = zoo.create_model(f"timm:{TWIN}")
    before = model.conv_stem.weight.clone()
    with pytest.raises(
        WeightsError,
        match=rf"timm:{OTHER} has the tensors of timm:{TWIN} and other settings in \d+ modules: "
        rf"conv_stem: kind Conv2dSame.* there, kind Conv2d.* here.*create_model\('timm:{OTHER}'\)",
    ):
        apply_source(model, source_of(OTHER))
    assert torch.equal(model.conv_stem.weight, before)
    with pytest.warns(UserWarning, match="other settings in"):
        report = apply_source(model, source_of(OTHER), strict=False)
    assert "other settings in" in report.notes[-1]


def test_the_same_settings_pass_in_silence() -> None:
    model = zoo.create_model(f"timm:{TWIN}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = apply_source(model, source_of(TWIN))
    assert report.matched_fraction == 1


def test_settings_that_were_asked_for_pass_loudly() -> None:
    model = zoo.create_model("timm:resnet10t", output_stride=16)
    with pytest.raises(WeightsError, match="other settings"):
        apply_source(model, source_of("resnet10t"))
    with pytest.warns(UserWarning, match=r"stride \(2, 2\).*asked for: output_stride"):
        apply_source(model, source_of("resnet10t"), allowed=["output_stride"])


def test_a_bare_file_cannot_tell_twins_apart(tmp_path: Path) -> None:
    for name in (TWIN, OTHER):
        model = zoo.create_model(f"timm:{name}")
        save_file(model.state_dict(), tmp_path / "x.safetensors")
        twin = OTHER if name == TWIN else TWIN
        with pytest.warns(UserWarning, match=f"trained as timm:{name} or as timm:{twin}"):
            report = zoo.load_pretrained(model, f"file:{tmp_path / 'x.safetensors'}")
        assert any(f"timm:{twin}" in note for note in report.notes)


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ((f"timm:{OTHER}", {}), (f"timm:{TWIN}", {}), "kind Conv2dSame.* there"),
        (("timm:resnet10t", {"act_layer": "silu"}), ("timm:resnet10t", {}), "SiLU.* there"),
        (("timm:resnet10t", {}), ("timm:resnet10t", {"act_layer": "silu"}), "ReLU.* there"),
        (("resnet18", {}), ("timm:resnet18", {"act_layer": "silu"}), "ReLU.* there"),
        (("timm:resnet18", {"act_layer": "silu"}), ("resnet18", {}), "SiLU.* there"),
    ],
    ids=str,
)
def test_saved_networks_of_a_library_are_compared(
    there: Any, here: Any, said: str, tmp_path: Path
) -> None:
    """Their cards tell the options that were given, and no others."""
    source = f"local-dir:{tmp_path / 'm'}"
    zoo.save_pretrained(zoo.create_model(there[0], num_classes=3, **there[1]), source[10:])
    model = zoo.create_model(here[0], num_classes=3, **here[1])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=f"other settings in .*{said}"):
        zoo.load_pretrained(model, source)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.load_pretrained(zoo.create_model(there[0], num_classes=3, **there[1]), source)
        zoo.create_model(source)


def test_pooling_without_weights_is_compared(tmp_path: Path) -> None:
    small = {"depth": 1, "num_classes": 3, "img_size": 32, "embed_dim": 24, "num_heads": 2}
    average = {"global_pool": "avg", "fc_norm": False}
    name = "vit_tiny_patch16_224"
    theirs = timm.create_model(name, **small, **average)
    timm.models.save_for_hf(theirs, tmp_path / "timm", model_args={**small, **average})
    zoo.save_pretrained(zoo.create_model(f"timm:{name}", **small, **average), tmp_path / "ours")
    for folder in ("timm", "ours"):
        source = f"local-dir:{tmp_path / folder}"
        with pytest.raises(WeightsError, match="global_pool avg there, global_pool token"):
            zoo.load_pretrained(zoo.create_model(f"timm:{name}", **small), source)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zoo.load_pretrained(zoo.create_model(f"timm:{name}", **small, **average), source)


def test_a_saved_network_that_is_gone_is_said(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(zoo.create_model("timm:resnet10t", num_classes=3), tmp_path / "m")
    card = folder / "model.json"
    card.write_text(card.read_text().replace("timm:resnet10t", "timm:resnet10gone"))
    model = zoo.create_model("timm:resnet10t", num_classes=3)
    with pytest.warns(UserWarning, match="resnet10gone, which cannot be built here .*not compared"):
        report = zoo.load_pretrained(model, f"local-dir:{folder}")
    assert "was not compared" in report.notes[-1]


def test_twins_are_found_by_their_settings() -> None:
    assert twin_of("timm:resnet10t") is None
    assert twin_of("vit_tiny_patch16_224") is None
    assert twin_of("torchvision:resnet18") is None
    twin, how = twin_of(f"timm:{OTHER}.in1k") or ("", "")
    assert twin == f"timm:{TWIN}"
    assert "padding" in how
    twin, how = twin_of("open_clip:ViT-B-32") or ("", "")
    assert twin == "open_clip:ViT-B-32-quickgelu"
    assert "QuickGELU" in how


@pytest.mark.parametrize("act", ["gelu", "silu", "leaky_relu"])
def test_activations_under_other_names_must_agree(act: str, tmp_path: Path) -> None:
    theirs = timm.create_model("resnet18", num_classes=4, act_layer=act)
    options = {"act_layer": act, "num_classes": 4}
    timm.models.save_for_hf(theirs, tmp_path / "theirs", model_args=options)
    ours = zoo.create_model("resnet18", num_classes=4)
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    with pytest.raises(WeightsError, match="other settings in 1 modules: activations"):
        zoo.load_pretrained(ours, f"local-dir:{tmp_path / 'theirs'}")
    assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())


def test_the_same_activation_under_another_name_is_no_difference(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet18", num_classes=4).eval()
    timm.models.save_for_hf(theirs, tmp_path / "theirs", model_args={"num_classes": 4})
    ours = zoo.create_model("resnet18", num_classes=4).eval()
    zoo.load_pretrained(ours, f"local-dir:{tmp_path / 'theirs'}")
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("library", ["", "timm:"])
def test_quick_gelu_is_a_twin(library: str, tmp_path: Path) -> None:
    name, quick = "vit_base_patch16_clip_224", "vit_base_patch16_clip_quickgelu_224"
    assert (twin_of(library + name) or ("",))[0] == library + quick
    assert (twin_of(library + quick) or ("",))[0] == library + name
    small = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8, "num_classes": 5}
    build = timm.create_model(quick, img_size=32, **small)
    save_file(build.state_dict(), tmp_path / "quick.safetensors")
    model = zoo.create_model(library + name, img_size=32, **small)
    with pytest.warns(UserWarning, match=f"or as {library}{quick}"):
        zoo.load_pretrained(model, f"file:{tmp_path / 'quick.safetensors'}")
