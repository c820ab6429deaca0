"""Folders of timm, transformers and open_clip, saved by these; and folders that mean harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
import transformers
from open_clip.push_to_hf_hub import save_config_for_hf
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from torch import nn

import zoo
from zoo.folder_cards import class_names, license_of, transformers_preprocessing
from zoo.folders import TOLD_BY, read_folder, weight_files
from zoo.preprocess import build_transform
from zoo.sources import read_json, read_source
from zoo.weights import WeightsError

NAME = "vit_micro_patch2_8"
VISION = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": [32, 64]}
TEXT = {"layers": 1, "width": 16, "heads": 2, "vocab_size": 10, "context_length": 8}


def read(folder: Path) -> zoo.weights.Source:
    return read_source(f"local-dir:{folder}")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def write_json(path: Path, **table: Any) -> Path:
    path.write_text(json.dumps(table))
    return path


# --- timm ---------------------------------------------------------------------------------------


def test_a_timm_folder_is_made_again(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet10t", num_classes=3, in_chans=1, global_pool="max").eval()
    labels = {"label_names": ["cat", "dog", "hen"]}
    save_for_hf(theirs, str(tmp_path), labels, safe_serialization=True)
    model: Any = zoo.create_model(f"local-dir:{tmp_path}").eval()
    x = torch.randn(2, 1, 64, 64)
    assert torch.equal(model(x), theirs(x))
    config = theirs.pretrained_cfg
    assert model.card.architecture == "timm:resnet10t"
    assert model.card.class_names == ("cat", "dog", "hen")
    assert model.card.license == config["license"] == "apache-2.0"
    assert model.card.preprocessing.size == tuple(config["input_size"][1:])
    assert model.card.preprocessing.crop_pct == config["crop_pct"]
    assert model.card.preprocessing.in_chans == 1
    again: Any = zoo.create_model(f"local-dir:{zoo.save_pretrained(model, tmp_path / 'ours')}")
    assert torch.equal(again.eval()(x), theirs(x))


def test_settings_of_a_timm_folder_must_agree(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet10t", num_classes=3, global_pool="max")
    save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    with pytest.raises(WeightsError, match=r"other settings .*global_pool"):
        zoo.load_pretrained(
            zoo.create_model("timm:resnet10t", num_classes=3), f"local-dir:{tmp_path}"
        )


def test_b1_the_grid_of_a_timm_folder_is_known(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=(32, 64), depth=1, num_classes=0)
    save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    source = read(tmp_path)
    assert source.position_grids == {"pos_embed": (2, 4)}
    assert source.config["library"] == "timm"
    size = {"img_size": (64, 32), "num_classes": 0, "depth": 1}
    model: Any = zoo.create_model("vit_tiny_patch16_224", **size)
    report = zoo.load_pretrained(model, f"local-dir:{tmp_path}")
    assert report.resized == {"pos_embed": "grid 2x4 -> 4x2"}
    expected = resample_abs_pos_embed(theirs.pos_embed, (4, 2), (2, 4))
    torch.testing.assert_close(model.pos_embed, expected)


def test_timm_before_model_args_was_flat(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet10t", num_classes=2).eval()
    flat = {k: v for k, v in theirs.pretrained_cfg.items() if k in ("input_size", "mean", "std")}
    flat |= {"architecture": "resnet10t", "num_classes": 2, "labels": ["cat", "dog"]}
    write_json(tmp_path / "config.json", **flat, interpolation="bilinear", crop_pct=0.9)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    model: Any = zoo.create_model(f"local-dir:{tmp_path}").eval()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(x), theirs(x))
    assert model.card.class_names == ("cat", "dog")
    assert model.card.preprocessing.interpolation == "bilinear"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": "resnet10"}, r"timm has no model 'resnet10'; nearest: .*resnet10t"),
        ({"architecture": "resnet10t", "model_args": {"foo": 1}}, r"timm cannot make resnet10t.*"),
        (
            {"architecture": "resnet10t", "model_args": {"checkpoint_path": "/etc/passwd"}},
            r"timm:resnet10t has no option 'checkpoint_path'",
        ),
        (
            {"architecture": "resnet10t", "pretrained_cfg": {"interpolation": "lanczos"}},
            r"config\.json: interpolation must be one of .*'lanczos'",
        ),
        ({"architecture": "resnet10t", "pretrained_cfg": {"mean": 0.5}}, r"config\.json: .*float"),
        ({"architecture": ["resnet10t"]}, r"timm has no model"),
    ],
)
def test_a_timm_folder_that_timm_does_not_know(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sizes = {"input_size": [3, 64, 64], "mean": [0.5] * 3, "std": [0.5] * 3}
    config["pretrained_cfg"] = {**sizes, **config.get("pretrained_cfg", {})}
    write_json(tmp_path / "config.json", **config)
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=message):
        read(tmp_path)


# --- transformers -------------------------------------------------------------------------------


@pytest.fixture
def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=16,
        id2label={0: "cat", 1: "crane", 2: "crane"},
        label2id={"cat": 0, "crane": 1},
    )
    return transformers.ViTForImageClassification(config)


def test_a_transformers_folder(vit: Any, tmp_path: Path) -> None:
    vit.save_pretrained(tmp_path)
    source = read(tmp_path)
    assert source.tensors.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert source.card is None  # nothing says how images are prepared
    assert source.config["library"] == "transformers"
    assert source.config["model_type"] == "vit"
    assert source.config["preprocessor"] == {}
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A ViT\n")
    source = read(tmp_path)
    assert source.config["preprocessor"]["size"] == size
    assert source.card is not None
    assert source.card.architecture is None
    assert source.card.license == "mit"
    assert source.card.class_names == ("cat", "crane (1)", "crane (2)")
    assert source.card.preprocessing.size == (32, 32)
    assert source.card.preprocessing.crop_mode == "squash"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_put_together(vit: Any, kind: str, tmp_path: Path) -> None:
    vit.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("model-*"))) > 1
    whole = vit.state_dict() if kind == "bin" else read(tmp_path).tensors
    if kind == "bin":
        halves = [dict(list(whole.items())[part::2]) for part in (0, 1)]
        for number, half in enumerate(halves):
            torch.save(half, tmp_path / f"pytorch_model-{number}.bin")
        weight_map = {k: f"pytorch_model-{n}.bin" for n, half in enumerate(halves) for k in half}
        write_json(tmp_path / "pytorch_model.bin.index.json", weight_map=weight_map)
        for file in tmp_path.glob("model*"):
            file.unlink()
    found = read(tmp_path)
    assert found.name == f"local-dir:{tmp_path}"
    assert equal(found.tensors, whole)
    peer = transformers.ViTForImageClassification(vit.config)
    if kind == "safetensors":
        peer = transformers.ViTForImageClassification.from_pretrained(tmp_path)
        assert sum(v.numel() for v in found.tensors.values()) == peer.num_parameters()


PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {}),
    ("ViT", {"size": {"height": 48, "width": 64}}),
    ("ViT", {"do_rescale": False}),
    ("ViT", {"rescale_factor": 1 / 127.5, "do_normalize": False}),
    ("DeiT", {}),
    ("Beit", {"do_center_crop": True, "size": {"height": 230, "width": 230}}),
    ("CLIP", {}),
    ("CLIP", {"size": {"shortest_edge": 232}, "crop_size": {"height": 96, "width": 96}}),
    ("Bit", {"size": {"shortest_edge": 256}}),
    ("Siglip", {}),
    ("ConvNext", {"size": {"shortest_edge": 224}}),
    ("ConvNext", {"size": {"shortest_edge": 384}}),
    ("MobileNetV2", {}),
]


@pytest.mark.parametrize(("kind", "options"), PROCESSORS, ids=str)
def test_preprocessing_equals_that_of_transformers(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    processor = getattr(transformers, f"{kind}ImageProcessor")(**options)
    processor.save_pretrained(tmp_path)
    preprocessing = transformers_preprocessing(read_json(tmp_path / "preprocessor_config.json"), "")
    image = torch.randint(0, 256, (3, 300, 400), dtype=torch.uint8)
    expected = processor(images=image, return_tensors="pt").pixel_values[0]
    ours = build_transform(preprocessing)(image)
    assert ours.shape == expected.shape
    top = 255 if options.get("do_rescale") is False else 1
    torch.testing.assert_close(ours / top, expected.float() / top, rtol=1e-4, atol=1e-4)


def test_nearest_is_pillows() -> None:
    processor = transformers.ViTImageProcessorPil(resample=0)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = processor(images=image, return_tensors="pt").pixel_values[0]
    preprocessing = transformers_preprocessing(processor.to_dict(), "vit")
    torch.testing.assert_close(build_transform(preprocessing)(image), expected)


STATISTICS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}


def test_old_tables_of_transformers() -> None:
    old = {**STATISTICS, "size": 224, "feature_extractor_type": "CLIPFeatureExtractor"}
    clip = transformers_preprocessing({**old, "crop_size": 224}, "clip")
    assert (clip.size, clip.crop_pct, clip.crop_mode) == ((224, 224), 1.0, "center")
    vit = transformers_preprocessing({**STATISTICS, "size": 224}, "vit")
    assert (vit.size, vit.crop_mode) == ((224, 224), "squash")
    small = transformers_preprocessing({**STATISTICS, "size": 224}, "convnext")
    assert (small.size, small.crop_pct) == ((224, 224), 0.875)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"image_processor_type": "LevitImageProcessor"}, r"'LevitImageProcessor' is unknown; kn"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order=true is a step that a card"),
        ({"do_resize": False}, "do_resize=false gives images of any size"),
        ({"resample": 1}, r"resample \(1\) must be one of 0 \(nearest\)"),
        ({"size": None}, "size is missing"),
        ({"size": {"shortest_edge": 224}}, "shortest_edge.* in a way a card cannot express"),
        ({"size": {"longest_edge": 9, "shortest_edge": 8}}, "a way a card cannot express"),
        ({"image_std": [0.5, 0.5, 0]}, "std must be positive"),
        ({"image_mean": 0.5}, "float"),
        ({"size": 3.5}, "size must be a number or a table of numbers, not 3.5"),
        ({"size": {"height": "32", "width": 32}}, "size must be a number or a table of numbers"),
        ({"do_center_crop": True, "crop_size": [32, 32]}, "crop_size must be a number or a table"),
        ({"rescale_factor": 0}, "division by zero"),
    ],
)
def test_preprocessing_that_a_card_cannot_express(
    table: dict[str, Any], message: str, vit: Any, tmp_path: Path
) -> None:
    vit.save_pretrained(tmp_path)
    size = {"height": 32, "width": 32}
    write_json(tmp_path / "preprocessor_config.json", **{**STATISTICS, "size": size, **table})
    with pytest.raises(WeightsError, match=rf"preprocessor_config\.json: .*{message}.*file:"):
        read(tmp_path)


def test_the_image_processor_inside_of_clips(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", model_type="clip")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    told = {**STATISTICS, "size": {"shortest_edge": 32}, "crop_size": 32}
    write_json(tmp_path / "processor_config.json", image_processor=told)
    card = read(tmp_path).card
    assert card is not None
    assert card.preprocessing.size == (32, 32)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["a", "b"], ("a", "b")),
        ({"1": "b", "0": "a"}, ("a", "b")),
        ({0: "a", 1: "b"}, ("a", "b")),
        (["a", "b", "a"], None),  # not two
        ({"0": "a", "2": "b"}, None),
        (["LABEL_0", "LABEL_1"], None),
        ([1, 2], None),
        ("ab", None),
        (None, None),
    ],
)
def test_class_names(labels: object, names: tuple[str, ...] | None) -> None:
    assert class_names(labels, 2) == names


def test_license_is_that_of_the_readme(tmp_path: Path) -> None:
    assert license_of(tmp_path) is None
    for text, licence in (
        ("---\nlicense: apache-2.0\ntags:\n- vision\n---\n# Text\n", "apache-2.0"),
        ("---\nlicense: [mit, gpl-3.0]\n---\n", None),
        ("---\n: [\n---\n", None),
        ("# No head\n", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert license_of(tmp_path) == licence


# --- open_clip ----------------------------------------------------------------------------------


def save_open_clip(folder: Path, vision: dict[str, Any], quick_gelu: bool = True) -> Any:
    config = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": TEXT, "quick_gelu": quick_gelu}
    clip: Any = open_clip.CLIP(**config)
    with torch.no_grad():
        for parameter in clip.parameters():
            parameter.normal_(std=0.1)
    open_clip.set_model_preprocess_cfg(
        clip, {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash"}
    )
    save_config_for_hf(clip, folder / "open_clip_config.json", config)
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    return clip.eval()


@pytest.mark.parametrize(
    "vision",
    [
        VISION,
        {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16, "image_size": 64},
        {"timm_model_name": "vit_tiny_patch16_224", "image_size": 224, "timm_proj": "mlp"},
    ],
    ids=["vit", "resnet", "timm"],
)
def test_the_visual_tower_of_an_open_clip_folder(vision: dict[str, Any], tmp_path: Path) -> None:
    theirs = save_open_clip(tmp_path, vision)
    model: Any = zoo.create_model(f"local-dir:{tmp_path}").eval()
    size = vision["image_size"]
    rows, cols = size if isinstance(size, list) else (size, size)
    x = torch.randn(2, 3, rows, cols)
    assert torch.equal(model(x), theirs.encode_image(x))
    assert model.card.options["quick_gelu"] is True
    assert model.card.preprocessing.size == (rows, cols)
    assert model.card.preprocessing.crop_mode == "squash"
    assert model.card.preprocessing.mean == (0.5,) * 3
    ours = zoo.save_pretrained(model, tmp_path / "ours")
    assert torch.equal(zoo.create_model(f"local-dir:{ours}").eval()(x), model(x))


def test_b1_the_grid_of_an_open_clip_folder_is_known(tmp_path: Path) -> None:
    save_open_clip(tmp_path, VISION)
    assert read(tmp_path).position_grids == {"visual.positional_embedding": (4, 8)}
    model = zoo.create_model(f"local-dir:{tmp_path}", img_size=(64, 32))
    report = zoo.load_pretrained(model, f"local-dir:{tmp_path}")
    assert report.resized == {"visual.positional_embedding": "grid 4x8 -> 8x4"}


def test_f4_another_activation_than_the_folders_is_an_error(tmp_path: Path) -> None:
    save_open_clip(tmp_path, VISION)
    options = {key: value for key, value in VISION.items() if key != "image_size"}
    for arch, fits in (("ViT-B-32", False), ("ViT-B-32-quickgelu", True)):
        model = zoo.create_model(f"open_clip:{arch}", embed_dim=24, img_size=(32, 64), **options)
        if fits:
            zoo.load_pretrained(model, f"local-dir:{tmp_path}")
            continue
        with pytest.raises(WeightsError, match=r"quick_gelu: True there, False here"):
            zoo.load_pretrained(model, f"local-dir:{tmp_path}")


def test_an_open_clip_architecture_is_recognised(tmp_path: Path) -> None:
    for arch in ("ViT-B-32-quickgelu", "RN50", "ViT-B-16-SigLIP"):
        table = {"model_cfg": open_clip.get_model_config(arch), "preprocess_cfg": {}}
        write_json(tmp_path / "open_clip_config.json", **table)
        save_file({"visual.x": torch.ones(1)}, tmp_path / "open_clip_model.safetensors")
        card = read(tmp_path).card
        assert card is not None
        assert card.architecture is not None
        found = open_clip.get_model_config(card.architecture.partition(":")[2])
        assert found["vision_cfg"] == table["model_cfg"]["vision_cfg"]
        assert found.get("quick_gelu") == table["model_cfg"].get("quick_gelu")


def test_an_open_clip_folder_that_open_clip_does_not_know(tmp_path: Path) -> None:
    write_json(tmp_path / "open_clip_config.json", model_cfg={"vision_cfg": {"layers": 1}})
    save_file({"x": torch.ones(1)}, tmp_path / "open_clip_model.safetensors")
    with pytest.raises(WeightsError, match=r"open_clip cannot make a tower of it: KeyError"):
        read(tmp_path)


# --- which file ---------------------------------------------------------------------------------


def test_safetensors_are_preferred_and_the_name_says_so(tmp_path: Path) -> None:
    model = zoo.create_model(NAME, depth=1)
    write_json(tmp_path / "config.json", model_type="ours")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    source = read(tmp_path)
    assert source.name == f"local-dir:{tmp_path} (model.safetensors, not pytorch_model.bin)"
    assert equal(source.tensors, model.state_dict())


def test_f1_a_lone_file_with_prefixes(tmp_path: Path) -> None:
    model = zoo.create_model(NAME, depth=1)
    state = {f"module._orig_mod.{key}": value for key, value in model.state_dict().items()}
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    torch.save({"epoch": 3, "model": {"state_dict": state}}, tmp_path / "last.pth")
    other = zoo.create_model(NAME, depth=1)
    report = zoo.load_pretrained(other, f"local-dir:{tmp_path}")
    assert report.source == f"local-dir:{tmp_path} (model.state_dict)"
    assert equal(dict(other.state_dict()), model.state_dict())


def test_several_files_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"several files.*: a\.safetensors, b\.safetensors; na"):
        read(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(WeightsError, match=r"holds: notes\.txt; besides .*timm, transformers"):
        read(tmp_path)
    with pytest.raises(WeightsError, match="there is no folder"):
        read_folder(tmp_path / "none", "local-dir:none")


def test_weight_files_follow_the_json(tmp_path: Path) -> None:
    save_open_clip(tmp_path, VISION)
    assert next(weight_files(tmp_path)) == ["open_clip_model.safetensors"]
    write_json(tmp_path / "config.json", architecture="resnet10t")
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", weight_map=index)
    files = list(weight_files(tmp_path))
    assert files[0] == ["model.safetensors"]
    assert files[1] == sorted(index.values())
    for name in (*TOLD_BY, *chain(*files)):
        assert name.endswith((".json", ".md", ".safetensors", ".bin"))


# --- harm ---------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for key in "ab":
        save_file({key: torch.ones(2)}, folder / f"{key}.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    return folder


def index_of(folder: Path, **files: object) -> None:
    write_json(folder / "model.safetensors.index.json", weight_map=files)


OUTSIDE = ["../outside.safetensors", "..", "a/../a.safetensors", "/etc/passwd", "C:a.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, "..\\outside.safetensors", ".hidden", "*", "", 3, None])
def test_names_of_shards_must_be_plain(name: object, sharded: Path) -> None:
    index_of(sharded, a=name, b="b.safetensors")
    with pytest.raises(WeightsError, match=r"index\.json speaks of .*; a file's name must be plai"):
        read(sharded)


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_file_of_a_card_must_be_plain(name: str, tmp_path: Path) -> None:
    folder = zoo.save_pretrained(zoo.create_model(NAME, depth=1), tmp_path / "model")
    shutil.copy(folder / "model.safetensors", tmp_path / "outside.safetensors")
    table = json.loads((folder / "model.json").read_text())
    table["tensors"]["file"] = name
    write_json(folder / "model.json", **table)
    with pytest.raises(
        WeightsError, match=r"model\.json speaks of .*; a file's name must be plain"
    ):
        read(folder)


def test_a_link_that_the_user_made_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    folder = zoo.save_pretrained(zoo.create_model(NAME, depth=1), tmp_path / "model")
    for file in list(folder.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    assert read(folder).card is not None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"},
            r"c\.safetensors is missing, which .*index",
        ),
        ({"a": "a.safetensors", "c": "b.safetensors"}, r"the file lacks c; .*elsewhere or lacks b"),
        ({"a": "a.safetensors"}, None),
        ({"a": "a.pkl"}, r"speaks of 'a\.pkl', which is no \.safetensors file"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_must_agree_with_its_shards(
    files: dict[str, str], message: str | None, sharded: Path
) -> None:
    index_of(sharded, **files)
    if message is None:  # the other file is none of its shards: which one is meant?
        message = r"several files of weights: b\.safetensors, model\.safetensors\.index\.json"
    with pytest.raises(WeightsError, match=message):
        read(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, sharded / "b.safetensors")
    index_of(sharded, a="a.safetensors", b="b.safetensors")
    with pytest.raises(WeightsError, match=r"b\.safetensors and .*disagree.*elsewhere or lacks a"):
        read(sharded)
    text = '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "a": "b.safetensors"}}'
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="key 'a' is there twice"):
        read(sharded)


@pytest.mark.parametrize("text", ['{"model_type": "vit"', "[" * 100_000, "[1]", "\x00"])
def test_json_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"config\.json (is not valid JSON|must hold a table)"):
        read(tmp_path)


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("sharded_too", [False, True])
def test_f2_a_pickle_with_code_is_refused(sharded_too: bool, tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder.mkdir()
    state = {"weight": torch.ones(2), "harm": Harm(marker)}
    name = "part.bin" if sharded_too else "pytorch_model.bin"
    torch.save(state, folder / name)
    if sharded_too:
        write_json(folder / "pytorch_model.bin.index.json", weight_map={"weight": "part.bin"})
    model: nn.Module = zoo.create_model(NAME, depth=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"holds a Python object"):
        zoo.load_pretrained(model, f"local-dir:{folder}")
    assert not marker.exists()
    assert equal(before, dict(model.state_dict()))
    torch.load(folder / name, weights_only=False)
    assert marker.exists()  # the file would have done it


def test_a_changed_file_of_ours_is_refused(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(zoo.create_model(NAME, depth=1), tmp_path / "model")
    save_file(zoo.create_model(NAME, depth=1).state_dict(), folder / "model.safetensors")
    with pytest.raises(WeightsError, match="its sha256 is not the one in"):
        read(folder)


def test_unknown_sources_list_all() -> None:
    with pytest.raises(WeightsError, match=r"available: file:PATH.*hf-hub:OWNER/REPO\[@REV\]"):
        read_source("keras:vit")
    with pytest.raises(WeightsError, match=r"did you mean url:https://host/x\?"):
        read_source("https://host/x")
    with pytest.raises(WeightsError, match=r"did you mean local-dir:/tmp\?"):
        read_source("/tmp")
    with pytest.raises(WeightsError, match="'url:' lacks a path or a name after the colon"):
        read_source("url:")
