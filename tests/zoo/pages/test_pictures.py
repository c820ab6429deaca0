"""Pictures come out as they were, or smaller."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.pages.pictures import WIDEST, embedded


def opened(data: str) -> Image.Image:
    head, _, text = data.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_small_pictures_stay_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 6), "red").save(path)
    found = embedded(path)
    assert found is not None
    assert base64.b64decode(found.data.partition(",")[2]) == path.read_bytes()
    assert (found.width, found.height, found.pixelated, found.wide) == (8, 6, True, False)


@pytest.mark.parametrize("size", [(900, 700), (2 * WIDEST, 100)])
def test_large_pictures_are_shrunk_to_fit(tmp_path: Path, size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    found = embedded(tmp_path / "a.png", 60_000)
    assert found is not None
    image = opened(found.data)
    assert image.size == (found.width, found.height)
    assert len(found.data) < 4 / 3 * 60_000 + 100
    assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.1)
    assert np.asarray(image.convert("L")).mean() == pytest.approx(noise.mean(), abs=5)


def test_other_formats_become_png(tmp_path: Path) -> None:
    Image.new("RGB", (70, 70), "blue").save(tmp_path / "a.jpg")
    found = embedded(tmp_path / "a.jpg")
    assert found is not None
    assert opened(found.data).format == "PNG"


def test_what_is_no_picture_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n cut short")
    assert embedded(tmp_path / "a.png") is None
    assert embedded(tmp_path / "none.png") is None
