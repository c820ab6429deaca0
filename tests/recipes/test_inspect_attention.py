"""Runs of a folder, of files of pairs, and what the flags may not say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import crossmodal  # noqa: F401  its models are registered
import zoo
from crossmodal.data import load_pairs
from crossmodal.looks import Look, fixed_pairs, look_at
from crossmodal.tokenizer import Tokenizer
from recipes.inspect_attention import Config, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run folder of train_crossmodal.py --task caption --data strips:2, and other models."""
    root = tmp_path_factory.mktemp("runs")
    size = {"img_size": (8, 16), "in_chans": 1, "image_options": {"widths": [8, 8, 8]}}
    for name, model, options in (
        ("caption", "captioner_micro", {"dim": 16, "context_length": 24}),
        ("match", "matcher_micro", {"text_tower": "text_bag"}),
        ("contrastive", "dual_micro", {"text_tower": "text_bag"}),
    ):
        torch.manual_seed(0)
        made = zoo.create_model(model, **{**size, **options})
        zoo.save_pretrained(made, root / name / "model")
        record = {"options": {"data": "strips:2", "task": name, "languages": ["en"]}}
        (root / name / "config.json").write_text(json.dumps(record))
    return root


@pytest.fixture
def file(tmp_path) -> Path:
    """Three pairs, whose file tells no parts."""
    for name in "abc":
        Image.new("RGB", (20, 30), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    lines = [{"image": f"{name}.png", "caption": [f"image {name}", "other"]} for name in "abc"]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_run_is_drawn_on_its_own_validation_pairs_as_a_user_would(folder, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "recipes/inspect_attention.py", "--samples", "2"),
            *("--model", folder / "match", "--out", tmp_path / "out", "--no-smooth"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "val 0: " in done.stdout
    assert "val 500: " in done.stdout
    look = Look.load(tmp_path / "out" / "attention.safetensors")
    assert [" ".join(words) for words in look.words] == look.captions
    assert all(remark.startswith("log-odds ") for remark in look.remarks)
    with Image.open(tmp_path / "out" / "attention.png") as picture:
        assert picture.width > 300


def test_all_pairs_of_a_file_that_tells_no_parts(folder, file, tmp_path, capsys):
    for model in (str(folder / "caption"), f"local-dir:{folder / 'caption' / 'model'}"):
        look = main(Config(model, pairs=str(file), samples=3, out=str(tmp_path / "out")))
        assert look.captions == ["image a", "image b", "image c"]
        assert "train 2: image c (writes: " in capsys.readouterr().out


def test_captions_and_indices_of_ones_own(folder, tmp_path):
    model, out = str(folder / "match"), str(tmp_path / "out")
    look = main(Config(model, part="train", indices=(7,), captions=("a red heart",), out=out))
    assert look.words == [["a", "red", "heart"]]
    one = main(Config(model, indices=(7,), layer=1, head=2, out=out))
    made = zoo.create_model(f"local-dir:{folder / 'match' / 'model'}")
    batch = fixed_pairs(made, load_pairs("strips:2").val, [7])
    assert one.maps.equal(look_at(made, batch, layer=1, head=2).maps)
    assert not torch.allclose(one.maps, look_at(made, batch).maps)


def test_titles_are_the_captions_and_not_what_a_vocabulary_knows_of_them(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(Tokenizer, "decode", lambda self, tokens, *_: ["1 6"] * len(tokens))
    flags = {"indices": (7,), "out": str(tmp_path / "out")}
    look = main(Config(str(folder / "match"), captions=("picture 16 of cat",), **flags))
    assert look.captions == ["picture 16 of cat"]
    look = main(Config(str(folder / "match"), **flags))
    assert look.captions == [load_pairs("strips:2").val.captions[7][0]]


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        ("contrastive", {}, "DualEncoder has no attention .* --task match or caption"),
        ("missing", {}, "no such folder"),
        ("match/model", {}, "did you mean local-dir:"),
        ("match", {"pairs": "emojis"}, "did you mean emoji"),
        ("match", {"part": "test"}, r"part 'test' of strips:2 must be one of train, val"),
        ("match", {"samples": 1001}, r"samples \(1001\) must not exceed 1000"),
        ("match", {"indices": (0, 1000)}, r"indices \(\[1000\]\) must be some from 0 to 999"),
        ("match", {"written": True}, "written needs a model that writes"),
        ("caption", {"captions": ("a" * 23,)}, "has 25 tokens, .* reads 24: shorten it"),
    ],
)
def test_what_cannot_be_drawn_is_told(folder, tmp_path, run, flags, message):
    out = tmp_path / "out"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(Config(str(folder / run), out=str(out), **flags))
    assert not out.exists()


def test_a_model_without_a_run_needs_pairs_and_their_errors_pass(folder, file):
    model = f"local-dir:{folder / 'match' / 'model'}"
    with pytest.raises(ValueError, match="--pairs is needed with --model local-dir:"):
        main(Config(model))
    file.write_text(file.read_text().replace("b.png", "gone.png"))
    with pytest.raises(ValueError, match=r"pairs.jsonl line 2: no image .*gone.png"):
        main(Config(model, pairs=str(file)))


# The page


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A run folder of train_vit.py without captures."""
    root = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    names = [str(digit) for digit in range(10)]
    model = zoo.create_model("vit_micro_patch2_8", depth=2, class_names=names)
    zoo.save_pretrained(model, root / "run" / "model")
    record = {"options": {"data": "digits", "out": "run"}}
    (root / "run" / "config.json").write_text(json.dumps(record))
    return root / "run"


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, size in enumerate([(40, 30), (9, 9)]):
        Image.new("RGB", size, (90 * number, 0, 0)).save(folder / f"<b>{number}.png")
    return folder


def data_of(file: Path) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', file.read_text())
    return json.loads(found[1])


def test_images_of_other_sizes_by_a_folder(classifier, photos, tmp_path, capsys):
    file = main(Config(str(classifier), images=(str(photos),), out=str(tmp_path / "out")))
    assert file == tmp_path / "out" / "explorer.html"
    (model,) = data_of(file)["models"]
    assert [image["title"] for image in model["images"]] == ["<b>0.png", "<b>1.png"]
    assert all(image["remark"].startswith("predicts ") for image in model["images"])
    assert [layer["name"] for layer in model["layers"]] == [
        "blocks.0.attn",
        "blocks.1.attn",
        "rollout",
    ]
    assert "<b>0" not in file.read_text()
    assert "explorer.html (0." in capsys.readouterr().out


def test_a_run_is_explored_on_its_own_validation_images(classifier, tmp_path):
    file = main(Config(str(classifier), samples=3, out=str(tmp_path)))
    (model,) = data_of(file)["models"]
    assert [image["title"].split(":")[0] for image in model["images"]] == [
        "val 0",
        "val 120",
        "val 240",
    ]
    assert "Over the training" not in file.read_text()  # a run folder without captures


def test_a_run_is_the_place_for_what_is_written_of_it(classifier, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(classifier, tmp_path / "run")
    assert main(Config("run", samples=1)) == Path("run/inspect/explorer.html")
    other = main(Config("local-dir:run/model", images=(str(photos),)))
    assert other == Path("attention/explorer.html")


def test_a_run_beside_its_own_best_checkpoint(classifier, photos, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    weights = zoo.create_model(f"local-dir:{run / 'model'}").state_dict()
    position = {"epoch": 1, "step": 9, "update": 0, "best": 1.0, "best_epoch": 1}
    (run / "checkpoints").mkdir()
    state = {"model": weights, "ema": None, "position": position, "metrics": {}}
    torch.save(state, run / "checkpoints" / "best.pt")
    file = main(
        Config(str(run), compare=str(run), compare_checkpoint="best", images=(str(photos),))
    )
    assert [model["name"] for model in data_of(file)["models"]] == ["run", "run (best)"]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_what_is_missing_is_told_before_a_model_is_made(classifier, monkeypatch, missing):
    if missing == "jinja2":
        monkeypatch.setattr("recipes.inspect_attention.find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=rf"explorer.html needs {missing}: pip install"):
        main(Config(str(classifier), images=("gone.png",)))


def test_what_a_run_recorded_is_on_the_page(classifier, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    rows = [{"step": step, "attn/blocks.0.attn/entropy": 1 / step} for step in (10, 20)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    alarm = {"kind": "collapse", "step": 20, "layer": "blocks.0.attn", "head": None, "value": 1.0}
    alarm |= {"limit": 0.5, "message": "one key <i>", "causes": ["a"], "remedies": ["--b"]}
    (run / "alarms.jsonl").write_text(json.dumps(alarm))
    (run / "attention").mkdir()
    Image.new("RGB", (9, 9)).save(run / "attention" / "over_time.png")
    page = main(Config(str(run), samples=1, out=str(tmp_path / "out"))).read_text()
    assert "Over the training" in page
    assert "at step 20</span>:\none key &lt;i&gt;" in page
    assert 'alt="Maps of attention at several steps"' in page


def test_two_models_side_by_side(classifier, photos, tmp_path):
    torch.manual_seed(1)
    zoo.save_pretrained(zoo.create_model("vit_micro_patch4_32", depth=1), tmp_path / "other")
    flags = {"compare": f"local-dir:{tmp_path / 'other'}", "images": (str(photos / "*0.png"),)}
    file = main(Config(str(classifier), layers=("*.0.*",), out=str(tmp_path / "out"), **flags))
    first, second = data_of(file)["models"]
    assert (first["name"], second["name"]) == ("run", "other")
    assert [len(model["layers"]) for model in (first, second)] == [1, 1]
    assert second["layers"][0]["keys"]["grid"] == [8, 8]


def test_words_have_a_page_beside_the_picture(folder, photos, tmp_path):
    out = tmp_path / "out"
    model, other = str(folder / "match"), str(folder / "caption")
    images = (str(photos),)
    main(Config(model, compare=other, images=images, captions=("red heart",), out=str(out)))
    assert (out / "attention.png").exists()
    first, second = data_of(out / "explorer.html")["models"]
    assert first["layers"][0]["queries"]["names"] == [["red", "heart"]]
    assert [layer["name"] for layer in second["layers"]] == [
        "decoder.blocks.0.cross",
        "decoder.blocks.1.cross",
    ]
    main(Config(other, images=images, written=True, out=str(out)))


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("vit", {"layers": ("nothing*",)}, r"layers='nothing\*' matches no attention; there is"),
        ("vit", {"images": ("gone.png",)}, "there is no file or folder gone.png"),
        ("vit", {"images": ("broken.png",)}, r"broken\.png: UnidentifiedImageError"),
        ("vit", {"indices": (9999,)}, r"--indices \[9999\] must lie in 0 to 359"),
        ("vit", {"compare": "match"}, "must both be models of images, or both of text and image"),
        ("vit", {"max_mb": 0.1}, "0.0 MB are allowed: name fewer images or fewer layers"),
        ("cnn", {}, "has nothing to explore: no attention .* and no gates"),
        ("bare", {}, "--images is needed with --model local-dir:"),
        ("match", {"images": ("photos",)}, "--images needs --captions"),
        ("vit", {"compare_checkpoint": "best"}, "--compare-checkpoint best needs --compare"),
    ],
)
def test_what_cannot_be_explored_is_told(
    folder, classifier, photos, tmp_path, monkeypatch, model, flags, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"no image")
    zoo.save_pretrained(zoo.create_model("resnet_micro"), tmp_path / "cnn")
    models = {"vit": str(classifier), "match": str(folder / "match")}
    models |= {"cnn": "local-dir:cnn", "bare": f"local-dir:{classifier / 'model'}"}
    flags = {**flags, **({"compare": models["match"]} if "compare" in flags else {})}
    if model == "cnn":
        flags["images"] = ("photos",)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(Config(models[model], out="out", **flags))
    assert not (tmp_path / "out").exists()


def test_images_are_looked_for_before_a_model_is_made(classifier, monkeypatch):
    monkeypatch.setattr("zoo.run_folder.TrainedModel.create", lambda self: pytest.fail("made"))
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder gone\.png"):
        main(Config(str(classifier), images=("gone.png",)))
