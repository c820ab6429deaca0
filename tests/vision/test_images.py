"""Case D5: every kind of image file, by one set of rules."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from vision.images import MAX_PIXELS, ImageError, decode
from zoo.card import Preprocessing
from zoo.preprocess import resize_and_crop


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(rows: int = 48, cols: int = 40) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (rows, cols, 3), dtype=np.uint8)
    return Image.fromarray(values)


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG file from its raw rows, for kinds that Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def flat(data: bytes, channels: int = 3) -> list[int]:
    """The one colour of an evenly coloured image."""
    image = decode(data, channels)
    values = np.asarray(image).reshape(image.height * image.width, channels)
    assert (values == values[0]).all()
    return values[0].tolist()


def palette_image() -> Image.Image:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    return image


def test_rgb_and_grey_keep_their_pixels():
    image = photo()
    assert np.array_equal(np.asarray(decode(encode(image))), np.asarray(image))
    grey = image.convert("L")
    assert np.array_equal(np.asarray(decode(encode(grey), 1)), np.asarray(grey))
    assert np.array_equal(np.asarray(decode(encode(grey), 3)), np.dstack([np.asarray(grey)] * 3))
    assert np.array_equal(np.asarray(decode(encode(image), 1)), np.asarray(grey))


@pytest.mark.parametrize("alpha", [0, 51, 128, 255])
@pytest.mark.parametrize("colour", [(255, 0, 0), (10, 200, 90)])
def test_transparency_is_composited_on_white(colour, alpha):
    expected = [c * alpha / 255 + 255 * (1 - alpha / 255) for c in colour]
    rgba = Image.new("RGBA", (4, 3), (*colour, alpha))
    assert flat(encode(rgba)) == pytest.approx(expected, abs=1)
    la = Image.new("LA", (4, 3), (colour[1], alpha))
    assert flat(encode(la), 1) == pytest.approx(expected[1:2], abs=1)


INVISIBLE = {
    "palette, index": encode(palette_image(), transparency=1),
    "palette, table": encode(palette_image(), transparency=bytes([255, 0])),
    "gif": encode(palette_image(), "GIF", transparency=1),
    "grey key": encode(Image.new("L", (4, 3), 9), transparency=9),
    "rgb key": encode(Image.new("RGB", (4, 3), (9, 8, 7)), transparency=(9, 8, 7)),
    "1 bit key": encode(Image.new("1", (4, 3), 0), transparency=0),
    "16 bit key": encode(Image.fromarray(np.full((3, 4), 300, np.uint16)), transparency=300),
    "rgba": encode(Image.new("RGBA", (4, 3), (0, 0, 0, 0))),
    "16 bit rgba": png(1, 1, 16, 6, b"\0" + struct.pack(">4H", 60000, 30000, 400, 0)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", INVISIBLE)
def test_what_is_fully_transparent_is_white(kind, channels):
    assert flat(INVISIBLE[kind], channels) == [255] * channels


def test_a_16_bit_key_hides_its_value_and_no_neighbour():
    values = np.array([[300, 301, 299, 65535]], np.uint16)  # 299 to 301 are all 1 in 8 bit
    image = decode(encode(Image.fromarray(values), transparency=300), 1)
    assert np.asarray(image).tolist() == [[255, 1, 1, 255]]


def test_a_palette_without_transparency_gives_its_colours():
    assert flat(encode(palette_image())) == [200, 100, 50]


def test_cmyk_becomes_rgb():
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert flat(data) == pytest.approx([255, 0, 0], abs=3)


@pytest.mark.parametrize("mode", ["LAB", "YCbCr"])
def test_other_colour_spaces_have_both_forms(mode):
    data = encode(Image.new(mode, (4, 3)), "TIFF")
    assert decode(data, 1).mode == "L"
    assert decode(data, 3).mode == "RGB"


def pgm_16(values: np.ndarray) -> bytes:
    return (
        f"P5 {values.shape[1]} {values.shape[0]} 65535\n".encode() + values.astype(">u2").tobytes()
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PGM"])
def test_16_bit_grey_is_scaled_and_not_clipped(kind, channels):
    values = np.linspace(0, 65535, 24).round().astype(np.uint16).reshape(4, 6)
    data = pgm_16(values) if kind == "PGM" else encode(Image.fromarray(values), kind)
    pixels = np.asarray(decode(data, channels)).reshape(4, 6, channels)
    for channel in range(channels):
        assert np.abs(pixels[..., channel] - values / 257).max() <= 0.5
    assert len(np.unique(pixels)) == 24


def test_16_bit_colour_is_scaled_and_not_clipped():
    rows = b"\0" + struct.pack(">6H", 60000, 30000, 400, 0, 65535, 257)
    expected = np.array([60000, 30000, 400, 0, 65535, 257]) / 257
    pixels = np.asarray(decode(png(2, 1, 16, 2, rows))).reshape(6)
    assert np.abs(pixels - expected).max() <= 1


def test_one_bit_is_black_and_white():
    image = Image.fromarray(np.array([[True, False], [False, True]]))
    assert image.mode == "1"
    assert np.asarray(decode(encode(image), 1)).tolist() == [[255, 0], [0, 255]]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(orientation, kind, channels):
    """What a camera would store, by the eight definitions of the EXIF standard."""
    upright = np.zeros((32, 48), np.uint8)
    upright[:16, :16] = 255  # a white block at the top left, so that all eight differ
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif)
    image = decode(data, channels)
    assert image.getexif().get(0x0112, 1) == 1
    pixels = resize_and_crop(
        Preprocessing(size=(32, 48), mean=(0.5,) * channels, std=(0.5,) * channels)
    )(image).numpy()
    assert np.abs(pixels.astype(int) - upright).max() <= 2


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_frames_the_first_is_taken(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "lime")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    assert flat(data) == pytest.approx([255, 0, 0], abs=3)


BAD = {
    "floating point": encode(Image.new("F", (4, 3), 0.5), "TIFF"),
    "negative integers": encode(Image.new("I", (4, 3), -5), "TIFF"),
    "32 bit": encode(Image.new("I", (4, 3), 70000), "TIFF"),
    "empty": b"",
    "text": b"this is not an image\n" * 20,
    "header only": encode(photo(), "JPEG")[:20],
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_used_is_named(tmp_path, kind, channels):
    path = tmp_path / "culprit.jpg"
    path.write_bytes(BAD[kind])
    with pytest.raises(ImageError, match=r"culprit\.jpg"):
        decode(path, channels)
    with pytest.raises(ImageError, match=f"{len(BAD[kind])} bytes"):
        decode(BAD[kind], channels)


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    (tmp_path / "x.png").touch()
    with pytest.raises(ImageError, match="empty file"):
        decode(tmp_path / "x.png")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "nowhere.png", tmp_path):
        with pytest.raises(ImageError, match=path.name):
            decode(path)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_a_file_cut_short_is_refused_and_not_filled_up(kind, part):
    data = encode(photo(), kind)
    assert decode(data).size == (40, 48)
    with pytest.raises(ImageError):
        decode(data[: int(part * len(data))])


def test_a_decompression_bomb_is_refused_without_being_unpacked():
    for side in (9460, 30000):  # just above the limit, and above Pillow's own
        assert side**2 > MAX_PIXELS
        data = png(side, side, 8, 2, b"\0" * 100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ImageError, match="pixels"):
                decode(data)


def test_channels_other_than_1_and_3_are_refused():
    with pytest.raises(ValueError, match=r"channels \(4\)"):
        decode(encode(photo()), 4)
