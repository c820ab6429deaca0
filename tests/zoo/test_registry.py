"""The registry, and a sweep over every model it holds."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo import layouts, registry, sources
from zoo.card import ModelCard, Preprocessing
from zoo.weights import WeightsError

PAIRS = ("text_*", "dual_*", "matcher_*", "captioner_*")  # these do not classify images
ALL = zoo.list_models(exclude=PAIRS)
VITS = zoo.list_models("vit_*")
SMALL: dict[str, Any] = {"embed_dim": 32, "num_heads": 2, "depth": 2}


def patch_of(name: str) -> int:
    return int(name.split("patch")[1].split("_")[0])


def small(name: str, grid: tuple[int, int] = (2, 3), **options: Any) -> nn.Module:
    """The variant with all it has but its width and depth, on a small image."""
    patch = patch_of(name)
    size = (grid[0] * patch, grid[1] * patch)
    return zoo.create_model(name, img_size=size, **{**SMALL, **options})


def images(model: nn.Module, batch: int = 2) -> torch.Tensor:
    pre = model.card.preprocessing
    return torch.randn(batch, pre.in_chans, *pre.size)


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry._discover()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("name", ALL)
def test_full_size_on_paper(name: str) -> None:
    """Shapes at full size, without memory or arithmetic."""
    with torch.device("meta"):
        model = zoo.create_model(name)
        pre = model.card.preprocessing
        assert pre.in_chans == 3
        out = model(torch.empty(2, 3, *pre.size))
    assert out.shape == (2, model.num_classes or model.num_features)
    assert model.card.architecture == name


@pytest.mark.parametrize("name", VITS)
def test_sweep(name: str) -> None:
    model = small(name, num_classes=5).eval()
    x = images(model)
    features = model.forward_features(x)
    logits = model(x)
    assert logits.shape == (2, 5)
    torch.testing.assert_close(model.forward_head(features), logits)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    torch.testing.assert_close(model.get_classifier()(pooled), logits)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    assert model.num_classes == model.card.options["num_classes"] == 7


@pytest.mark.parametrize("name", VITS)
def test_sweep_grey_without_classifier(name: str) -> None:
    model = small(name, num_classes=0, in_chans=1)
    assert model.num_classes == 0
    assert isinstance(model.get_classifier(), nn.Identity)
    assert model.card.preprocessing.in_chans == 1
    assert model(images(model)).shape == (2, model.num_features)


@pytest.mark.parametrize("name", VITS)
def test_sweep_save_and_load(name: str, tmp_path: Path) -> None:
    """Round trip, and from a grid of 8x16 (128x256 at patch 16) to 14x14 and 10x6 (case B1)."""
    model = small(name, (8, 16), num_classes=3, class_names=["a", "b", "c"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    zoo.save_pretrained(model, tmp_path / "model")
    again = zoo.create_model(f"local-dir:{tmp_path / 'model'}")
    assert again.card.to_dict() == {
        **model.card.to_dict(),
        "source": f"local-dir:{tmp_path / 'model'}",
    }
    if patch_of(name) <= 16:
        x = images(model, 1)
        assert torch.equal(model.eval()(x), again.eval()(x))
    for grid in ((14, 14), (10, 6)):
        size = (grid[0] * patch_of(name), grid[1] * patch_of(name))
        other = zoo.create_model(f"local-dir:{tmp_path / 'model'}", img_size=size)
        assert other.card.preprocessing.size == size
        assert other.patch_embed.grid_size == grid
        assert torch.equal(other.head.weight, model.head.weight)
        assert other.card.class_names == ("a", "b", "c")


def test_names_read_family_variant_patch_size() -> None:
    assert {f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")} <= set(ALL)
    assert all("_patch" in name for name in VITS)
    assert {"resnet_micro", "resnet20", "resnet50"} <= set(ALL)


def test_list_filters_and_order() -> None:
    tiny = zoo.list_models("vit_tiny_*")
    assert tiny == sorted(tiny, key=lambda name: (patch_of(name), name))
    assert zoo.list_models("vit_tiny_*", exclude="*_384") == [n for n in tiny if "_384" not in n]
    both = zoo.list_models(["vit_tiny_patch16*", "*_dinov2"], exclude=["*large*", "*reg4*"])
    assert "vit_tiny_patch16_224" in both
    assert "vit_base_patch14_dinov2" in both
    assert not [name for name in both if "large" in name or "reg4" in name]
    assert zoo.list_models("densenet*") == []
    assert registry._natural("a_patch4_32") < registry._natural("a_patch16_8")


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'vit_tiny_patch16_223'; nearest: vit_tiny_patch16_224"):
        zoo.create_model("vit_tiny_patch16_223")


def test_unknown_option_names_the_valid_ones() -> None:
    with pytest.raises(TypeError, match=r"no option 'dpeth'; nearest: depth; valid: img_size,"):
        zoo.create_model("vit_micro_patch2_8", dpeth=3)


def test_unknown_attention_and_position() -> None:
    with pytest.raises(ValueError, match=r"'fulll'.*'full'"):
        zoo.create_model("vit_micro_patch2_8", attention="fulll")
    with pytest.raises(ValueError, match=r"position 'learnt'.*nearest: 'learned'"):
        zoo.create_model("vit_micro_patch2_8", position="learnt")


@pytest.mark.parametrize("prefix", ["keras", "hub"])
def test_unknown_prefix(prefix: str) -> None:
    with pytest.raises(ValueError, match=f"unknown prefix '{prefix}:'.*known: local-dir:"):
        zoo.create_model(f"{prefix}:resnet50")


def test_pretrained_without_weights() -> None:
    with pytest.raises(ValueError, match="vit_micro_patch2_8 has no weights of its own"):
        zoo.create_model("vit_micro_patch2_8", pretrained=True)
    with pytest.raises(ValueError, match="unknown source 'keras:vit'"):
        zoo.create_model("vit_micro_patch2_8", pretrained="keras:vit")


def test_pretrained_source_and_own_weights(clean_registry: None, tmp_path: Path) -> None:
    model = zoo.create_model("vit_micro_patch2_8")
    folder = zoo.save_pretrained(model, tmp_path / "model")
    again = zoo.create_model("vit_micro_patch2_8", pretrained=f"local-dir:{folder}")
    assert torch.equal(again.head.weight, model.head.weight)

    @zoo.register_model(weights=f"local-dir:{folder}", preprocessing=Preprocessing((8, 8)))
    def vit_mine_patch2_8(**options: Any) -> Any:
        return zoo.create_model("vit_micro_patch2_8", **options)

    assert zoo.list_models(pretrained=True) == ["vit_mine_patch2_8"]
    mine = zoo.create_model("vit_mine_patch2_8", pretrained=True)
    assert torch.equal(mine.head.weight, model.head.weight)


def test_a_model_keeps_the_report_of_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh: Any = zoo.create_model("vit_micro_patch2_8")
    assert fresh.load_report is None
    source = f"local-dir:{zoo.save_pretrained(fresh, tmp_path / 'model')}"
    with caplog.at_level("INFO", logger="zoo"):
        model: Any = zoo.create_model("vit_micro_patch2_8", pretrained=source, in_chans=1)
    assert isinstance(model.load_report, zoo.LoadReport)
    assert model.load_report.adapted == {"patch_embed.proj.weight": "3 input channels -> 1"}
    assert str(model.load_report) in caplog.text
    again: Any = zoo.create_model(source, img_size=16)
    assert again.load_report.resized == {"pos_embed": "grid 4x4 -> 8x8"}
    assert copy.deepcopy(again).load_report == again.load_report
    assert "load_report" not in again.state_dict()
    zoo.save_pretrained(again, tmp_path / "again")


def test_create_model_passes_on_how_weights_are_loaded(tmp_path: Path) -> None:
    trained: Any = zoo.create_model("vit_micro_patch2_8")
    state = {f"backbone.{key}": value for key, value in trained.state_dict().items()}
    torch.save({**state, "decoder.weight": torch.ones(2)}, tmp_path / "x.pt")
    create = partial(zoo.create_model, "vit_micro_patch2_8", pretrained=f"file:{tmp_path / 'x.pt'}")
    with pytest.raises(WeightsError, match="load with part='backbone'"):
        create()
    assert torch.equal(create(part="backbone").head.weight, trained.head.weight)
    with pytest.raises(WeightsError, match="adding 'positions' to adapt"):
        create(part="backbone", img_size=16, adapt=("stem",))
    with pytest.raises(ValueError, match="adapt: unknown 'stems'; it may hold positions, stem"):
        create(part="backbone", adapt="stems")
    sharp, smooth = (create(part="backbone", img_size=4, antialias=x) for x in (False, True))
    assert not torch.equal(sharp.pos_embed, smooth.pos_embed)


@pytest.mark.parametrize("kind", ["window", "linformer"])  # without weights of its own, and with
def test_another_attention_can_be_refused(kind: str, tmp_path: Path) -> None:
    model: Any = zoo.create_model("vit_micro_patch2_8")
    source = f"local-dir:{zoo.save_pretrained(model, tmp_path / 'model')}"
    for name, given in ((source, {}), ("vit_micro_patch2_8", {"pretrained": source})):
        changed: Any = zoo.create_model(name, attention=kind, **given)
        assert any(f"attention: 'full' there, '{kind}'" in n for n in changed.load_report.notes)
        with pytest.raises(WeightsError, match=f"attention: 'full' there, '{kind}' here"):
            zoo.create_model(name, attention=kind, adapt=("stem", "head"), **given)


def test_rows_of_classes_without_names_are_told(tmp_path: Path) -> None:
    model = zoo.create_model("vit_micro_patch2_8", num_classes=2)
    source = f"local-dir:{zoo.save_pretrained(model, tmp_path / 'model')}"
    named: Any = zoo.create_model("vit_micro_patch2_8", class_names=["a", "b"], pretrained=source)
    assert "the source does not name its classes" in named.load_report.notes[0]
    other: Any = zoo.create_model(
        "vit_micro_patch2_8", class_names=["a", "b", "c"], pretrained=source
    )
    assert other.load_report.notes == ()


@pytest.mark.parametrize("given", [{"part": "x"}, {"adapt": ()}, {"antialias": False}], ids=str)
def test_how_weights_are_loaded_needs_weights(given: dict[str, Any], tmp_path: Path) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=rf"{name} \(.*\) says how .* pretrained is False"):
        zoo.create_model("vit_micro_patch2_8", **given)
    folder = zoo.save_pretrained(zoo.create_model("vit_micro_patch2_8"), tmp_path / "model")
    if name == "part":
        with pytest.raises(ValueError, match=r"part \('x'\) is of another model .*create_model"):
            zoo.create_model(f"local-dir:{folder}", **given)
    else:
        zoo.create_model(f"local-dir:{folder}", **given)
        with pytest.raises(WeightsError, match="adding 'positions' to adapt"):
            zoo.create_model(f"local-dir:{folder}", img_size=16, adapt=())


def test_asked_for_options_may_differ_from_the_source(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(zoo.create_model("vit_micro_patch2_8"), tmp_path / "model")
    for name in (f"local-dir:{folder}", "vit_micro_patch2_8"):
        source = False if ":" in name else f"local-dir:{folder}"
        model = zoo.create_model(name, pretrained=source, norm_eps=1e-3, drop_path_rate=0.1)
        assert model.fc_norm.eps == model.blocks[0].norm1.eps == 1e-3
    with pytest.raises(ValueError, match="brings its own weights"):
        zoo.create_model(f"local-dir:{folder}", pretrained="file:x")


def test_class_names_set_the_classes() -> None:
    model = zoo.create_model("vit_micro_patch2_8", class_names=["cat", "dog"])
    assert model.num_classes == 2
    assert model.card.class_names == ("cat", "dog")
    model.reset_classifier(3)
    assert model.card.class_names is None
    with pytest.raises(ValueError, match="2 names, but num_classes is 3"):
        zoo.create_model("vit_micro_patch2_8", num_classes=3, class_names=["cat", "dog"])


def test_card_keeps_every_option_in_json() -> None:
    card = zoo.create_model("vit_micro_patch2_8", img_size=(8, 16), in_chans=2).card
    assert card.options["img_size"] == [8, 16]
    assert card.options["norm_eps"] == 1e-6
    assert card.preprocessing.size == (8, 16)
    assert card.preprocessing.in_chans == 2
    json.dumps(card.to_dict())


def test_duplicate_names_both_modules(clean_registry: None) -> None:
    def vit_micro_patch2_8(**options: Any) -> nn.Module:
        return nn.Identity()

    with pytest.raises(ValueError, match=r"twice: by vision\.vit\w*\.vit_mic.* and by .*test_reg"):
        zoo.register_model(vit_micro_patch2_8)


def test_own_model_with_named_options(clean_registry: None) -> None:
    @zoo.register_model
    def net_plain(num_classes: int = 10, width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(width, num_classes))

    model = zoo.create_model("net_plain", num_classes=3)
    assert model(torch.zeros(1, 4)).shape == (1, 3)
    assert model.card.options == {"num_classes": 3}
    with pytest.raises(TypeError, match="no option 'img_size'; valid: num_classes, width"):
        zoo.create_model("net_plain", img_size=32)


def test_broken_plug_in_is_a_warning_and_good_ones_load(
    clean_registry: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "good_zoo.py").write_text(
        "import torch, zoo\n"
        "@zoo.register_model\n"
        "def good_net(num_classes: int = 2) -> torch.nn.Module:\n"
        "    return torch.nn.Linear(1, num_classes)\n"
    )
    (tmp_path / "broken_zoo.py").write_text("raise RuntimeError('oops')\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint(name, f"{name}_zoo", registry.ENTRY_POINTS) for name in ("broken", "good")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    monkeypatch.setattr(registry, "_discovered", False)
    with pytest.warns(UserWarning, match=r"'broken' \(broken_zoo\).*RuntimeError: oops"):
        assert "good_net" in zoo.list_models()
    assert isinstance(zoo.create_model("good_net"), nn.Linear)
    sys.modules.pop("good_zoo")


# --- folders of other libraries ---------------------------------------------------------------


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


def folder_of(model: Any, config: dict[str, Any], **card: Any) -> sources.Source:
    known = ModelCard(**{"architecture": None, "options": {}, **card}) if card else None
    return sources.Source("local-dir:folder", model.state_dict(), known, {}, config=config)


@pytest.mark.parametrize("prefix", ["local-dir", "hf-hub"])
def test_folders_that_name_a_network_are_models(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: Any = zoo.create_model("timm:resnet10t", num_classes=3)
    pre = replace(theirs.card.preprocessing, mean=(0.1, 0.2, 0.3))
    source = folder_of(
        theirs,
        {"library": "timm"},
        architecture="timm:resnet10t",
        options={"num_classes": 3},
        preprocessing=pre,
        class_names=("x", "y", "z"),
    )
    monkeypatch.setattr(registry, "read_source", lambda name: source)
    model: Any = zoo.create_model(f"{prefix}:owner/repo")
    assert_equal(model, theirs)
    assert model.card.class_names == ("x", "y", "z")
    assert model.card.preprocessing.mean == (0.1, 0.2, 0.3)
    assert zoo.create_model(f"{prefix}:owner/repo", num_classes=5).num_classes == 5
    with pytest.raises(ValueError, match=f"{prefix}:owner/repo brings its own weights"):
        zoo.create_model(f"{prefix}:owner/repo", pretrained="file:x.pt")


def test_a_layout_finds_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = zoo.create_model("vit_micro_patch2_8", depth=2)
    source = folder_of(theirs, {"library": "upside", "depth": 2})

    def find(config: Any) -> tuple[str, dict[str, Any]] | None:
        return ("vit_micro_patch2_8", {"depth": 2}) if "depth" in config else None

    monkeypatch.setattr(layouts, "_architectures", {})
    layouts.register_architecture("upside", lambda config: None)
    layouts.register_architecture("upside", find)
    monkeypatch.setattr(registry, "read_source", lambda name: source)
    assert_equal(zoo.create_model("local-dir:folder"), theirs)
    assert layouts.find_architecture({"library": "other", "depth": 2}) is None
    unknown = replace(source, config={"library": "upside", "architectures": ["UpModel"]})
    monkeypatch.setattr(registry, "read_source", lambda name: unknown)
    with pytest.raises(
        WeightsError,
        match=r"holds a upside model \(\['UpModel'\]\).*create_model\(NAME, pretrained='local-dir",
    ):
        zoo.create_model("local-dir:folder")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("efficientnet_b0", "did you mean timm:efficientnet_b0 or torchvision:efficientnet_b0?"),
        ("resnet26d", "did you mean timm:resnet26d?"),
        ("ViT-B-32", "did you mean open_clip:ViT-B-32?"),
        ("my_model", "did you mean local-dir:my_model?"),
        ("./my_model", "did you mean local-dir:my_model?"),
        ("runs/mine", "did you mean local-dir:runs/mine/model?"),
        ("runs/gone", "there is no folder "),
        ("x.pth", "pretrained='file:x.pth'"),
        ("file:x.pth", "pretrained='file:x.pth'"),
        ("file:gone.pth", "pretrained='file:gone.pth'"),
        ("no_such_model_at_all", "other libraries' have a prefix: timm:NAME"),
    ],
)
def test_a_slip_in_a_name_is_told_with_what_was_meant(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zoo.save_pretrained(zoo.create_model("vit_micro_patch2_8", depth=1), "my_model")
    zoo.save_pretrained(zoo.create_model("vit_micro_patch2_8", depth=1), "runs/mine/model")
    Path("x.pth").touch()
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        zoo.create_model(name)
    for meant in re.findall(r"local-dir:[\w/]+", str(error.value)) if "did you" in told else ():
        assert isinstance(zoo.create_model(meant), nn.Module)


def test_a_run_folder_is_not_its_model(tmp_path: Path) -> None:
    zoo.save_pretrained(zoo.create_model("vit_micro_patch2_8", depth=1), tmp_path / "run/model")
    meant = f"local-dir:{tmp_path / 'run/model'}"
    for create in (
        lambda: zoo.create_model(f"local-dir:{tmp_path / 'run'}"),
        lambda: zoo.create_model("vit_micro_patch2_8", pretrained=f"local-dir:{tmp_path / 'run'}"),
    ):
        with pytest.raises(WeightsError, match=re.escape(f"did you mean {meant}?")):
            create()


@pytest.mark.parametrize("name", ["vit_micro_patch2_8", "timm:resnet10t", "torchvision:resnet18"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_classes", "ten"),
        ("num_classes", 2.0),
        ("in_chans", "3"),
        ("img_size", "a"),
        ("img_size", (8, 8.0)),
        ("img_size", (8, 8, 8)),
    ],
)
def test_sizes_that_are_no_numbers(name: str, option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{option} ({value!r}) must be an integer")):
        zoo.create_model(name, **{option: value})


def test_another_kind_of_attention_can_be_asked_for(tmp_path: Path) -> None:
    source = (
        f"local-dir:{zoo.save_pretrained(zoo.create_model('vit_micro_patch2_8'), tmp_path / 'm')}"
    )
    with pytest.raises(WeightsError, match="attention='linear', pretrained=") as error:
        zoo.load_pretrained(zoo.create_model("vit_micro_patch2_8", attention="linear"), source)
    advised = re.search(r"zoo\.create_model\(.*?\)", str(error.value))
    assert advised is not None
    model = eval(advised[0], {"zoo": zoo})
    assert model.card.options["attention"] == "linear"
    assert model.load_report.loaded
