"""From an image file to 8-bit grey or RGB, by rules that hold in training, evaluation and use.

| in the file | rule |
|---|---|
| EXIF orientation | the image is turned upright |
| transparency (RGBA, LA, palette or colour key) | composited on white |
| palette, CMYK, YCbCr, LAB, HSV, 1 bit | converted to RGB or grey |
| 16-bit grey | scaled to 8 bit, not clipped |
| animation, several pages | the first frame |
| floating point | refused: its range is not known |
| empty, cut short, no image, over `MAX_PIXELS` | refused, with the name of the file |
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

MAX_PIXELS = 89_478_485  # Pillow's own limit, beyond which it warns of a decompression bomb
MODES = {1: "L", 3: "RGB"}


class ImageError(ValueError):
    """An image file that cannot be used; the message names it."""


def decode(source: str | Path | bytes, channels: int = 3) -> Image.Image:
    """Reads a whole image as mode L (`channels` 1) or RGB (3).

    Raises:
        ImageError: the file is unreadable, or of a kind refused above.
    """
    if channels not in MODES:
        raise ValueError(f"channels ({channels}) must be 1 or 3")
    name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(
                    f"{name}: {image.width}x{image.height} pixels are more than {MAX_PIXELS}"
                )
            image.load()
            return _to_mode(ImageOps.exif_transpose(image), MODES[channels], name)
    except ImageError:
        raise
    except Exception as error:  # decoders raise many kinds for damaged files
        reason = "empty file" if _size(source) == 0 else f"{type(error).__name__}: {error}"
        raise ImageError(f"{name}: {reason}") from error


def _size(source: str | Path | bytes) -> int:
    if isinstance(source, bytes):
        return len(source)
    path = Path(source)
    return path.stat().st_size if path.exists() else -1


def _to_mode(image: Image.Image, mode: str, name: str) -> Image.Image:
    if image.mode == "F":
        raise ImageError(f"{name}: floating-point pixels have no known range; store 8 or 16 bit")
    if image.mode.startswith("I"):
        key = image.info.get("transparency")
        values = np.asarray(image)
        image = _from_16_bit(values, name)
        if isinstance(key, int):  # before scaling, where no other value can become the key's
            opaque = np.where(values == key, 0, 255).astype(np.uint8)
            image.putalpha(Image.fromarray(opaque))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    if image.mode in ("CMYK", "LAB", "HSV", "YCbCr", "P"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _from_16_bit(values: np.ndarray, name: str) -> Image.Image:
    values = values.astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ImageError(
            f"{name}: integer pixels from {values.min()} to {values.max()} are not 16 bit"
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))
