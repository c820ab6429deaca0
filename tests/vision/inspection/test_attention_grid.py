"""Pictures of maps: each where it belongs, its colours as the scale says, nothing cut off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from vision.inspection.attention_grid import TIMES, draw_grid, draw_over_time, layer_labels, over
from vision.inspection.sheet import (
    PAPER,
    Sheet,
    coloured,
    fitted,
    shortened,
    text_width,
    wrapped,
)

GREY_SHARE = 0.25  # of the image in what is drawn


def pixels(images=2, size=(8, 8)):
    return torch.full((images, 1, *size), 255, dtype=torch.uint8)


def drawn(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def colour_of(times: float) -> np.ndarray:
    """What a patch with so many times its even share looks like on a white image."""
    low, high = map(math.log, TIMES)
    place = min(max((math.log(times) - low) / (high - low), 0), 1)
    return GREY_SHARE * 255 + (1 - GREY_SHARE) * coloured(torch.tensor(place)).numpy()


@pytest.mark.parametrize("times", [0.01, 0.25, 1.0, 3.0, 16.0, 50.0])
def test_a_colour_tells_how_many_times_its_even_share_a_patch_gets(times):
    maps = torch.full((1, 1, 2, 3), times / 6)
    found = over(pixels(1), maps, (20, 30))[0, 0]
    assert found.shape == (20, 30, 3)
    assert (found[0] == PAPER[0]).all(), "framed"
    np.testing.assert_allclose(found[10, 15], colour_of(times), atol=1)


def test_every_map_stands_in_its_row_and_column(tmp_path):
    """Each image, layer and head has a share of its own, found again at the place of its cell."""
    shares = torch.logspace(math.log10(0.3), math.log10(14), 8).view(2, 2, 2)  # b l h
    even = torch.ones(2, 2) / 4
    maps = {f"blocks.{n}.attn": shares[:, n, :, None, None] * even for n in range(2)}
    draw_grid(tmp_path / "grid.png", pixels(), maps, title="a title")
    picture, places = drawn(tmp_path / "grid.png"), []
    for share in shares.flatten().tolist():
        near = np.abs(picture - colour_of(share)).max(-1) < 12
        assert near.sum() > 5000
        places.append([np.median(axis) for axis in np.nonzero(near)])
    places = np.array(places).reshape(2, 2, 2, 2)
    assert (np.diff(places[..., 0], axis=1) > 50).all(), "layers go down"
    assert (np.diff(places[..., 1], axis=2) > 50).all(), "heads go to the right"
    assert np.ptp(places[..., 0], axis=2).max() < 3
    assert np.ptp(places[..., 1], axis=1).max() < 3
    assert np.abs(places[0] - places[1]).max() > 100, "images stand apart"


def test_layers_may_differ_in_heads_and_grid(tmp_path):
    maps = {"a.attn": torch.full((1, 4, 2, 2), 0.25), "b.attn": torch.full((1, 1, 1, 3), 1 / 3)}
    draw_grid(tmp_path / "grid.png", pixels(1, (30, 60)), maps, title="t", names=["one"])
    picture = drawn(tmp_path / "grid.png")
    even = np.abs(picture - colour_of(1)).max(-1) < 10
    rows = np.nonzero(even.sum(1) > 60)[0]
    first, last = even[rows[0] + 5], even[rows[-1] - 5]
    assert first.sum() == pytest.approx(4 * last.sum(), rel=0.1)


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (12, 3), (3, 16)])
def test_nothing_is_cut_off(tmp_path, images, layers, heads):
    maps = {
        f"encoder.layer_{n}.self": torch.full((images, heads, 2, 2), 0.25) for n in range(layers)
    }
    names = [f"image {n}\n{'a long name of a class ' * 9}" for n in range(images)]
    path = tmp_path / "grid.png"
    draw_grid(path, pixels(images), maps, title="step 1: where " + "tokens " * 9, names=names)
    picture = drawn(path)
    edge = np.concatenate([picture[:, :4], picture[:, -4:]], 1)
    assert (edge > 240).all(), "no letter reaches the sides"
    assert (picture[-4:] > 240).all()
    assert (picture < 100).any()


def test_over_time_has_a_column_for_each_step(tmp_path):
    steps = {step: {"a": torch.full((3, 2, 2), 0.25), "b": torch.full((3, 2, 2), share / 4)}
             for step, share in ((10, 0.3), (20, 4.0), (30, 15.0))}  # fmt: skip
    path = tmp_path / "time.png"
    draw_over_time(path, pixels(1)[0], steps, title="t", name="one")
    picture, middles = drawn(path), []
    for share in (0.3, 4.0, 15.0):
        near = np.abs(picture - colour_of(share)).max(-1) < 10
        middles.append(np.median(np.nonzero(near)[1]))
    assert middles == sorted(middles)
    assert min(np.diff(middles)) > 50


@pytest.mark.parametrize(
    ("layers", "labels", "pattern"),
    [
        (["blocks.0.attn", "blocks.11.attn"], ["0", "11"], "blocks.*.attn"),
        (["blocks.10.attn", "blocks.11.attn"], ["10", "11"], "blocks.*.attn"),
        (["e.layer_0.self", "e.layer_1.self"], ["0", "1"], "e.layer_*.self"),
        (["blocks.0.attn", "attn_pool"], ["blocks.0.attn", "attn_pool"], ""),
        (["attn"], ["attn"], ""),
    ],
)
def test_labels_are_what_tells_layers_apart(layers, labels, pattern):
    assert layer_labels(layers) == (labels, pattern)


def test_an_image_is_fitted_in_whole_squares_or_by_area():
    small = torch.tensor([[[0, 255], [255, 0]]], dtype=torch.uint8)
    assert fitted(small, (6, 6))[:, :, 0].unique().tolist() == [0, 255]
    checks = small.repeat(1, 20, 20)
    grey = fitted(checks, (4, 4))
    assert grey.float().mean() == pytest.approx(127.5, abs=1)
    assert grey.float().std() < 1


def test_texts_are_cut_to_their_room():
    assert shortened("word", 500) == "word"
    cut = shortened("a very long text", 50)
    assert cut.endswith("…")
    assert text_width(cut) <= 50
    assert shortened("word", 3) == ""


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_texts_are_broken_at_spaces(most):
    text = "class Smileys & Emotion found Travel & Places"
    lines = wrapped(text, 120, most)
    assert len(lines) <= most
    assert all(text_width(line) <= 120 for line in lines)
    whole = " ".join(lines)
    assert whole == text if most == 9 else text.startswith(whole.rstrip("…"))


@pytest.mark.parametrize("heads", [1, 3])
def test_what_was_found_stands_beside_its_image(tmp_path, monkeypatch, heads):
    written = []
    monkeypatch.setattr(Sheet, "write", lambda self, text, *place, **how: written.append(text))
    maps = {"a.attn": torch.full((2, heads, 2, 2), 0.25)}
    names = [f"image {n}\nclass Smileys & Emotion, found Travel & Places" for n in range(2)]
    draw_grid(tmp_path / "grid.png", pixels(2), maps, title="t", names=names)
    text = " ".join(written)
    assert text.count("class Smileys & Emotion") == 2
    assert text.count("found Travel & Places") == 2


def test_without_matplotlib_the_error_names_the_file(tmp_path, monkeypatch):
    def missing(file):
        raise ImportError(f"{file.name} needs matplotlib")

    monkeypatch.setattr("vision.inspection.sheet.figure_class", missing)
    with pytest.raises(ImportError, match=r"x\.png needs"):
        Sheet(9, 9, tmp_path / "x.png")
