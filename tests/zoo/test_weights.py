"""Saving and loading: cases B1, B3, B6, B7, F1, F2 of the cases file, and files that are broken."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from tiny_vit import NAME, equal_state, make, randomized, snapshot
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zoo
from zoo import report, sources, weights
from zoo.merge import adapt_channels
from zoo.weights import WeightsError

# --- the position grid ------------------------------------------------------------------------


def test_b1_grid_is_known_not_guessed(tmp_path: Path) -> None:
    model = randomized(img_size=(8, 16), class_token=False, global_pool="avg")
    folder = zoo.save_pretrained(model, tmp_path / "model")
    source = f"local-dir:{folder}"
    for size in ((14, 14), (16, 8), (20, 12), (8, 16)):  # (16, 8): as many positions, turned
        other = zoo.create_model(source, img_size=size)
        expected = resample_abs_pos_embed(
            model.pos_embed, other.patch_embed.grid_size, (4, 8), num_prefix_tokens=0
        )
        torch.testing.assert_close(other.pos_embed, expected)
        report = zoo.load_pretrained(other, source)
        assert ("pos_embed" in report.resized) == (size != (8, 16))
        assert report.matched_fraction == 1
    assert torch.equal(other.pos_embed, model.pos_embed)
    turned = zoo.load_pretrained(
        make(img_size=(16, 8), class_token=False, global_pool="avg"), source
    )
    assert turned.resized == {"pos_embed": "grid 4x8 -> 8x4"}


@pytest.mark.parametrize("size", [(8, 8), (16, 8)])
@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize(("class_token", "reg_tokens"), [(False, 0), (True, 0), (True, 4)])
def test_b3_only_the_grid_is_resized(
    class_token: bool, reg_tokens: int, no_embed_class: bool, size: tuple[int, int], tmp_path: Path
) -> None:
    model = randomized(
        img_size=(8, 12),
        class_token=class_token,
        reg_tokens=reg_tokens,
        no_embed_class=no_embed_class,
        global_pool="avg",
    )
    folder = zoo.save_pretrained(model, tmp_path / "model")
    other = zoo.create_model(f"local-dir:{folder}", img_size=size)
    prefix = 0 if no_embed_class else class_token + reg_tokens
    assert torch.equal(other.pos_embed[:, :prefix], model.pos_embed[:, :prefix])
    grid = resample_abs_pos_embed(
        model.pos_embed[:, prefix:], other.patch_embed.grid_size, (4, 6), num_prefix_tokens=0
    )
    torch.testing.assert_close(other.pos_embed[:, prefix:], grid)
    for key in ("cls_token", "reg_token"):
        if (token := getattr(model, key)) is not None:
            assert torch.equal(getattr(other, key), token)
            x = torch.randn(1, 3, *size)
            before = other.eval()(x)
            with torch.no_grad():
                getattr(other, key).neg_()
            assert not torch.allclose(before, other(x))  # the token is used


def test_bare_file_square_or_refused(tmp_path: Path) -> None:
    square, oblong = randomized(img_size=8), randomized(img_size=(8, 14))
    for name, model in (("square", square), ("oblong", oblong)):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    other = make(img_size=(8, 12))
    report = zoo.load_pretrained(other, f"file:{tmp_path / 'square.safetensors'}")
    assert report.resized == {"pos_embed": "grid 4x4 -> 4x6"}
    before = snapshot(other)
    with pytest.raises(WeightsError, match=r"pos_embed: \(1, 29, 64\).*grid of 4x6.*not square"):
        zoo.load_pretrained(other, f"file:{tmp_path / 'oblong.safetensors'}")
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_sincos_follows_the_size(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(randomized(position="sincos"), tmp_path / "model")
    other = zoo.create_model(f"local-dir:{folder}", img_size=(16, 12))
    assert torch.equal(other.pos_embed, make(position="sincos", img_size=(16, 12)).pos_embed)
    assert "pos_embed" not in load_file(folder / "model.safetensors")


# --- the classifier -------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["token", "avg", "map", ""])
def test_b6_classes_come_and_go_in_bf16(pool: str) -> None:
    model = make(global_pool=pool, num_classes=6).to(torch.bfloat16).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    shape = model(x).shape
    model.reset_classifier(0)
    assert model(x).shape == (*shape[:-1], model.num_features)
    assert model.num_classes == 0
    model.reset_classifier(6)
    out = model(x)
    assert (out.shape, out.dtype) == (shape, torch.bfloat16)
    assert model.num_classes == model.get_classifier().out_features == 6
    assert not model.get_classifier().training
    assert {p.device for p in model.parameters()} == {model.head.weight.device}


def test_b6_reset_classifier_on_meta_keeps_the_device() -> None:
    model = make().to("meta")
    model.reset_classifier(4)
    assert model.head.weight.device.type == "meta"


def test_bf16_is_kept_on_disk(tmp_path: Path) -> None:
    model = randomized(depth=1).to(torch.bfloat16).eval()
    again = zoo.create_model(f"local-dir:{zoo.save_pretrained(model, tmp_path / 'm')}").eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    assert torch.equal(model(x), again(x))


def test_other_class_count_keeps_its_initial_head(tmp_path: Path) -> None:
    source = f"local-dir:{zoo.save_pretrained(randomized(num_classes=5), tmp_path / 'model')}"
    model = make(num_classes=3)
    before = model.head.weight.clone()
    report = zoo.load_pretrained(model, source)
    assert set(report.reinitialized) == {"head.weight", "head.bias"}
    assert torch.equal(model.head.weight, before)
    assert report.matched_fraction == 1  # of what the source could give
    report = zoo.load_pretrained(make(num_classes=0), source)
    assert set(report.adapted) == {"head.weight", "head.bias"}
    headless = zoo.save_pretrained(randomized(num_classes=0), tmp_path / "headless")
    report = zoo.load_pretrained(make(num_classes=5), f"local-dir:{headless}")
    assert set(report.reinitialized) == {"head.weight", "head.bias"}
    assert "head.weight  the source has no classifier" in str(report)


@pytest.mark.parametrize(
    "names", [["dog", "cow", "cat"], ["cat", "dog"], ["dog", "cat", "fox", "cow"]]
)
def test_rows_follow_the_class_names(names: list[str], tmp_path: Path) -> None:
    old = ["cat", "dog", "fox"]
    model = randomized(class_names=old)
    source = f"local-dir:{zoo.save_pretrained(model, tmp_path / 'model')}"
    other = make(class_names=names)
    before = other.head.weight.clone()
    report = zoo.load_pretrained(other, source)
    assert set(report.adapted) == {"head.weight", "head.bias"}
    for row, name in enumerate(names):
        expected = model.head.weight[old.index(name)] if name in old else before[row]
        assert torch.equal(other.head.weight[row], expected)
    assert other.card.class_names == tuple(names)


def test_no_shared_class_name_takes_no_row(tmp_path: Path) -> None:
    source = f"local-dir:{zoo.save_pretrained(randomized(class_names=['a', 'b']), tmp_path / 'm')}"
    model = make(class_names=["c", "d"])
    before = model.head.weight.clone()
    assert "head.weight" in zoo.load_pretrained(model, source).reinitialized
    assert torch.equal(model.head.weight, before)


# --- the stem ---------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [1, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 6])
def test_b7_response_scale_is_kept(old: int, new: int) -> None:
    weight = torch.randn(16, old, 2, 2)
    adapted = adapt_channels(weight, new)
    assert adapted.shape == (16, new, 2, 2)
    grey = torch.randn(8, 1, 2, 2)
    response = nn.functional.conv2d(grey.expand(-1, old, -1, -1), weight)
    torch.testing.assert_close(
        nn.functional.conv2d(grey.expand(-1, new, -1, -1), adapted), response, atol=1e-4, rtol=1e-4
    )
    if new == 1:
        torch.testing.assert_close(adapted, weight.sum(1, keepdim=True))
    if new % old == 0:  # every channel alike
        torch.testing.assert_close(adapted, weight.repeat(1, new // old, 1, 1) * old / new)
    if new == old:
        assert adapted is weight


def test_b7_channels_through_a_folder(tmp_path: Path) -> None:
    rgb = randomized(in_chans=3)
    source = f"local-dir:{zoo.save_pretrained(rgb, tmp_path / 'rgb')}"
    for in_chans in (1, 2, 4, 6):
        model = make(in_chans=in_chans)
        report = zoo.load_pretrained(model, source)
        assert report.adapted == {"patch_embed.proj.weight": f"3 input channels -> {in_chans}"}
        assert model.card.preprocessing.in_chans == in_chans
    four = zoo.create_model(source, in_chans=4)
    saved = f"local-dir:{zoo.save_pretrained(four, tmp_path / 'four')}"
    again = make(in_chans=4)
    assert not zoo.load_pretrained(again, saved).adapted
    assert equal_state(again, four)
    grey = zoo.create_model(saved, in_chans=1)
    torch.testing.assert_close(
        grey.patch_embed.proj.weight, rgb.patch_embed.proj.weight.sum(1, keepdim=True)
    )


# --- files from elsewhere ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "nest", [(), ("model",), ("state_dict",), ("ema",), ("model", "state_dict")]
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_f1_wrapped_keys_load(prefix: str, nest: tuple[str, ...], tmp_path: Path) -> None:
    model, other = randomized(), make()
    data: Any = {prefix + key: value for key, value in model.state_dict().items()}
    for name in reversed(nest):
        data = {name: data, "epoch": 3, "optimizer": {"lr": 0.1}}
    torch.save(data, tmp_path / "model.pt")
    report = zoo.load_pretrained(other, f"file:{tmp_path / 'model.pt'}")
    assert equal_state(other, model)
    assert (report.missing, report.unexpected, report.matched_fraction) == ((), (), 1.0)


def test_f1_wrapped_models(tmp_path: Path) -> None:
    model = randomized()
    averaged = AveragedModel(model)
    torch.save({"ema": averaged.state_dict()}, tmp_path / "ema.pt")
    other = make()
    zoo.load_pretrained(other, f"file:{tmp_path / 'ema.pt'}")
    assert equal_state(other, model)
    compiled = torch.compile(model)
    saved = zoo.save_pretrained(compiled, tmp_path / "compiled")
    assert equal_state(zoo.create_model(f"local-dir:{saved}"), model)
    model.blocks[1].compile()
    model.blocks[0] = torch.compile(model.blocks[0])
    torch.save(model.state_dict(), tmp_path / "partly.pt")
    zoo.load_pretrained(make(), f"file:{tmp_path / 'partly.pt'}")
    assert equal_state(zoo.create_model(f"local-dir:{zoo.save_pretrained(averaged, saved)}"), other)


def test_the_average_is_preferred_and_said(tmp_path: Path) -> None:
    last, average, other = randomized(), randomized(), make()
    torch.save({"model": last.state_dict(), "ema": average.state_dict()}, tmp_path / "both.pt")
    report = zoo.load_pretrained(other, f"file:{tmp_path / 'both.pt'}")
    assert equal_state(other, average)
    assert report.source.endswith("both.pt (ema)")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize(
    ("thing", "name"),
    [(argparse.Namespace(lr=1), "argparse.Namespace"), (Evil(), r"posix\.mkdir|nt\.mkdir")],
)
def test_f2_objects_are_refused_and_named(
    thing: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": make().state_dict(), "args": thing}, "model.pt")
    with pytest.raises(WeightsError, match=rf"model\.pt holds a Python object \(({name})\)"):
        zoo.load_pretrained(make(), "file:model.pt")
    assert not Path("was-run").exists()


def test_f2_own_files_hold_tensors_and_plain_types(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(make(), tmp_path / "model")
    assert sorted(os.listdir(folder)) == ["model.json", "model.safetensors"]
    data = json.loads((folder / "model.json").read_text())
    assert data["architecture"] == NAME
    assert data["options"]["norm_eps"] == 1e-6
    assert data["position_grids"] == {"pos_embed": [4, 4]}
    assert set(load_file(folder / "model.safetensors")) == set(make().state_dict())


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "legacy.pt", "folder"])
def test_files_cut_short_are_named(kind: str, keep: int, tmp_path: Path) -> None:
    model = make()
    path, source = tmp_path / f"model.{kind}", f"file:{tmp_path}/model.{kind}"
    if kind == "folder":
        path = zoo.save_pretrained(model, tmp_path / "m") / "model.safetensors"
        source = f"local-dir:{tmp_path / 'm'}"
    elif kind == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=kind == "pt")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=rf"{path.name} was cut short"):
        zoo.load_pretrained(model, source)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:50], r"model\.json is not valid JSON \(cut short\?\)"),
        (lambda text: "[]", r"model\.json must hold a table"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "has format 9"),
        (
            lambda text: text.replace('"std"', '"dev"'),
            r"model\.json: Preprocessing has no field 'dev'",
        ),
        (lambda text: text.replace('"sha256"', '"md5"'), "not as save_pretrained writes it"),
        (lambda text: text.replace(NAME, "vit_gone"), "unknown model 'vit_gone'"),
        (lambda text: text.replace('"norm_eps"', '"eps"'), "has no option 'eps'"),
    ],
)
def test_broken_cards_are_named(change: Any, said: str, tmp_path: Path) -> None:
    folder = zoo.save_pretrained(make(), tmp_path / "model")
    card = folder / "model.json"
    card.write_text(change(card.read_text()))
    with pytest.raises((WeightsError, ValueError, TypeError), match=said) as error:
        zoo.create_model(f"local-dir:{folder}")
    assert str(folder) in str(error.value)


def test_changed_tensors_are_noticed(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(make(), tmp_path / "model")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"model\.safetensors.*sha256"):
        zoo.create_model(f"local-dir:{folder}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere", r"unknown source 'nowhere'; available: file:PATH, local-dir:PATH, timm:NAME"),
        ("hub:me/x", "unknown source 'hub:me/x'"),
        ("{}", r"did you mean local-dir:"),
        ("file:", "lacks a path"),
        ("file:/no/file.pt", r"/no/file\.pt is missing"),
        ("file:{}", "is a folder"),
        ("local-dir:/no/folder", "there is no folder /no/folder"),
        ("local-dir:{}", r"model\.json is missing; the folder holds: other\.txt"),
    ],
)
def test_wrong_sources_are_explained(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "other.txt").touch()
    with pytest.raises(WeightsError, match=said):
        zoo.load_pretrained(make(), source.format(tmp_path))


def test_files_without_tensors_are_explained(tmp_path: Path) -> None:
    torch.save({"step": 3, "lr": {"x": 1}}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match=r"a\.pt holds no state dict: dict keys step, lr"):
        zoo.load_pretrained(make(), f"file:{tmp_path / 'a.pt'}")
    torch.save({**make().state_dict(), "step": 3}, tmp_path / "b.pt")
    with pytest.raises(WeightsError, match=r"b\.pt: step of the state dict are no tensors"):
        zoo.load_pretrained(make(), f"file:{tmp_path / 'b.pt'}")


# --- what does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 3}, r"only in the source \(12\): blocks\.2.*the source has parts"),
        ({"depth": 1}, r"only in the model \(12\): blocks\.1.*the model has parts"),
        ({"embed_dim": 32}, r"32.*64.*likely cause"),
        ({"patch_size": 4}, "another patch size or width"),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, "cls_token"),
        ({"init_values": 1e-5}, r"ls1\.gamma"),
    ],
)
def test_misfits_show_both_sides(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_file(randomized(**options).state_dict(), tmp_path / "x.safetensors")
    model = make()
    before = snapshot(model)
    with pytest.raises(WeightsError, match=rf"(?s)does not fit {NAME}.*{said}"):
        zoo.load_pretrained(model, f"file:{tmp_path / 'x.safetensors'}")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("option", [{"position": "sincos"}, {"qk_norm": True}, {"depth": 1}])
def test_another_option_is_named_as_the_cause(tmp_path: Path, option: dict[str, Any]) -> None:
    zoo.save_pretrained(make(), tmp_path / "m")
    (name,) = option
    with pytest.raises(WeightsError, match=f"other options: {name} is .* there"):
        zoo.create_model(
            NAME,
            pretrained=f"local-dir:{tmp_path / 'm'}",
            **{"depth": 2, "class_token": True, "global_pool": "token", **option},
        )


def test_prefix_of_a_larger_model_is_the_cause(tmp_path: Path) -> None:
    tensors = {f"visual.{key}": value for key, value in make().state_dict().items()}
    save_file(tensors, tmp_path / "clip.safetensors")
    with pytest.raises(WeightsError, match=r"keys carry the prefix 'visual\.'"):
        zoo.load_pretrained(make(), f"file:{tmp_path / 'clip.safetensors'}")


def test_not_strict_still_wants_most_of_the_model(tmp_path: Path) -> None:
    state = make().state_dict()
    del state["norm.bias"]
    save_file({**state, "extra": torch.ones(2)}, tmp_path / "x.safetensors")
    source = f"file:{tmp_path / 'x.safetensors'}"
    report = zoo.load_pretrained(make(), source, strict=False)
    assert (report.missing, report.unexpected) == (("norm.bias",), ("extra",))
    assert 0.99 < report.matched_fraction < 1
    with pytest.raises(WeightsError, match="matches only"):
        zoo.load_pretrained(make(depth=8), source, strict=False)


@pytest.mark.parametrize(
    "options", [{"norm_eps": 1e-3}, {"global_pool": "", "fc_norm": False}, {"act": "gelu_tanh"}]
)
def test_options_without_tensors_must_agree(options: dict[str, Any], tmp_path: Path) -> None:
    source = f"local-dir:{zoo.save_pretrained(make(**options), tmp_path / 'model')}"
    name = next(iter(options))
    with pytest.raises(
        WeightsError, match=rf"other options than {NAME}: {name}: .* there, .* here"
    ):
        zoo.load_pretrained(make(), source)
    with pytest.warns(UserWarning, match=f"other options than {NAME}: {name}"):
        report = zoo.load_pretrained(make(), source, strict=False)
    assert report.matched_fraction == 1
    assert f"{name}: " in report.notes[-1]
    zoo.load_pretrained(make(**options, drop_path_rate=0.2), source)


def test_reset_pooling_is_saved(tmp_path: Path) -> None:
    model = randomized(num_classes=4).eval()
    model.reset_classifier(3, global_pool="avg")
    again = zoo.create_model(f"local-dir:{zoo.save_pretrained(model, tmp_path / 'm')}").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(x), again(x))
    model.reset_classifier(5, global_pool="token")
    assert model.card.options == make(num_classes=5).card.options


# --- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_as_a_whole(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(weights, "_exchange", lambda one, other: False)
    first, second = randomized(), randomized()
    folder = zoo.save_pretrained(first, tmp_path / "deep" / "model")
    assert zoo.save_pretrained(second, folder) == folder
    assert equal_state(zoo.create_model(f"local-dir:{folder}"), second)
    assert os.listdir(folder.parent) == ["model"]


@pytest.mark.parametrize("where", ["sha256_of", "_put_in_place", "_fsync"])
def test_a_failed_save_leaves_the_old_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomized()
    folder = zoo.save_pretrained(model, tmp_path / "model")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(weights, where, fail)
        with pytest.raises(OSError, match="no space left"):
            zoo.save_pretrained(randomized(), folder)
    assert equal_state(zoo.create_model(f"local-dir:{folder}"), model)
    assert os.listdir(tmp_path) == ["model"]


def test_a_kill_while_saving_leaves_a_whole_model(tmp_path: Path) -> None:
    """Saved over and over, killed in the middle: what stands there loads and its hash is right."""
    code = (
        "import sys, zoo\n"
        f"model = zoo.create_model({NAME!r}, depth=2)\n"
        "while True:\n"
        f"    zoo.save_pretrained(model, {str(tmp_path / 'model')!r})\n"
        "    print('saved', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(20):
            assert process.stdout.readline() == b"saved\n"
        process.kill()
    zoo.create_model(f"local-dir:{tmp_path / 'model'}")


def test_other_files_are_never_lost(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(WeightsError, match=r"holds other files \(thesis\.tex\)"):
        zoo.save_pretrained(make(), tmp_path)
    with pytest.raises(WeightsError, match=r"thesis\.tex is in the way"):
        zoo.save_pretrained(make(), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_model_built_by_hand_is_refused(tmp_path: Path) -> None:
    from vision import VisionTransformer

    for model in (VisionTransformer(8, 2, embed_dim=8, depth=1, num_heads=1), nn.Linear(1, 1)):
        with pytest.raises(WeightsError, match=r"build it with zoo\.create_model"):
            zoo.save_pretrained(model, tmp_path / "model")


def test_tied_tensors_are_saved(tmp_path: Path) -> None:
    model = randomized()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    folder = zoo.save_pretrained(model, tmp_path / "model")
    assert equal_state(zoo.create_model(f"local-dir:{folder}"), model)


def test_reading_names_are_exported() -> None:
    assert weights.read_source is sources.read_source
    assert weights.LoadReport is report.LoadReport
    assert {"file", "local-dir", "timm", "torchvision", "open_clip"} <= set(sources.SOURCES)


def test_a_training_checkpoint_tells_its_grid(tmp_path):
    """Case B1 for a bare file: 4x16 and 8x8 have equally many positions."""
    wide = zoo.create_model("vit_micro_patch4_32", img_size=(16, 64))
    state = {"model": wide.state_dict(), "position_grids": {"pos_embed": [4, 16]}}
    torch.save(state, tmp_path / "step.pt")
    report = zoo.load_pretrained(
        zoo.create_model("vit_micro_patch4_32"), f"file:{tmp_path}/step.pt"
    )
    assert report.resized == {"pos_embed": "grid 4x16 -> 8x8"}
