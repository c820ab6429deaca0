"""Runs of a folder, of files of pairs, and what the flags may not say."""

from __future__ import annotations

import json
import os
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
