"""Strips and needles: captions read the digits, in their places, from images of one side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from einops import rearrange

from crossmodal.data import load_pairs
from crossmodal.probe import WORDS, needle, strips
from vision.data import load_dataset
from zoo.rng import generator

DIGITS = load_dataset("digits")


def cells(pairs) -> np.ndarray:
    return rearrange(pairs.images.pixels, "n y (k x) -> n k (y x)", x=8)


def words(split) -> dict[bytes, str]:
    """The name of each digit image."""
    names = (WORDS[target] for target in split.targets)
    return {pixels.tobytes(): name for pixels, name in zip(split.pixels, names, strict=True)}


def test_strips_show_digits_of_their_own_part_in_order():
    data = load_pairs("strips:3")
    assert (data.in_chans, data.size, data.class_names) == (1, (8, 24), ())
    assert (len(data.train), len(data.val)) == (4000, 1000)
    for pairs, split in ((data.train, DIGITS.train), (data.val, DIGITS.val)):
        known = words(split)
        read = [" ".join(known[cell.tobytes()] for cell in row) for row in cells(pairs)]
        assert [(text,) for text in read] == list(pairs.captions)
        counts = np.unique([text.split() for text in read], return_counts=True)[1]
        assert counts.min() > 0.8 * counts.mean()
    assert len(set(data.train.captions)) > 900


def test_needles_show_one_digit_of_their_own_part_at_their_position():
    data = load_pairs("needle:5")
    assert (data.in_chans, data.size, data.class_names) == (1, (8, 40), WORDS)
    for pairs, split in ((data.train, DIGITS.train), (data.val, DIGITS.val)):
        known, rows = words(split), cells(pairs)
        found = [[k for k in range(5) if row[k].tobytes() in known] for row in rows]
        assert [[p] for p in pairs.position.tolist()] == found
        at = rows[np.arange(len(rows)), pairs.position.numpy()]
        assert [(known[cell.tobytes()],) for cell in at] == list(pairs.captions)
        assert [(WORDS[t],) for t in pairs.images.targets.tolist()] == list(pairs.captions)
        assert torch.equal(torch.bincount(pairs.position), torch.full((5,), len(pairs) // 5))


def test_noise_has_the_grey_values_of_digits():
    pairs = load_pairs("needle:5").val
    values = {np.sort(pixels.ravel()).tobytes() for pixels in DIGITS.val.pixels}
    assert all(np.sort(cell).tobytes() in values for row in cells(pairs) for cell in row)


def test_the_same_key_gives_the_same_pairs():
    for make in (strips, needle):
        one, two, other = (make(DIGITS.val, 20, 4, generator("x", key)) for key in (0, 0, 1))
        assert np.array_equal(one.images.pixels, two.images.pixels)
        assert one.captions == two.captions
        assert not np.array_equal(one.images.pixels, other.images.pixels)
    torch.manual_seed(1)
    again = load_pairs("strips:2")
    torch.manual_seed(2)
    assert load_pairs("strips:2").train.captions == again.train.captions


@pytest.mark.parametrize("spec", ["strips:0", "needle:x", "strips:-1", "needle:1.5"])
def test_the_number_of_cells_must_be_a_number(spec):
    with pytest.raises(ValueError, match="N at least 1, such as"):
        load_pairs(spec)
