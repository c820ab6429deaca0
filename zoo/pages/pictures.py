"""Pictures inside a page: as data, and not larger than a page can bear."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = 400_000  # of a large picture
WIDEST = 1600  # pixels
SMALLEST = 0.3  # to which a picture is shrunk
PIXELATED = 64  # pixels a side, below which an image is enlarged as squares


@dataclass(frozen=True)
class Picture:
    """A picture to embed.

    Attributes:
        data: Its address, with all of it.
        width, height: In pixels.
    """

    data: str
    width: int
    height: int

    @property
    def wide(self) -> bool:
        return self.width > 1.4 * self.height

    @property
    def pixelated(self) -> bool:
        return max(self.width, self.height) < PIXELATED


def embedded(path: Path, most: int = BYTES) -> Picture | None:
    """A picture as data of at most about `most` bytes, shrunk if need be; None if it cannot be read

    Args:
        path: Of a file that Pillow reads.
        most: Bytes before they are written as text, which takes a third more.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            data, size = path.read_bytes(), opened.size
            if len(data) > most or opened.format != "PNG" or max(size) > WIDEST:
                data, size = _shrunk(opened.convert("RGB"), most)
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError):
        return None
    text = base64.b64encode(data).decode()
    return Picture(f"data:image/png;base64,{text}", *size)


def _shrunk(image: Any, most: int) -> tuple[bytes, tuple[int, int]]:
    """A PNG with 256 colours, smaller and smaller until it fits."""
    from PIL import Image

    factor = min(1.0, WIDEST / image.width)
    while True:
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        smaller = image if size == image.size else image.resize(size)
        file = io.BytesIO()
        smaller.quantize(256, Image.Quantize.FASTOCTREE).save(file, "PNG")
        if file.tell() <= most or factor < SMALLEST * min(1.0, WIDEST / image.width):
            return file.getvalue(), size
        factor *= max(0.5, min(0.9, (most / file.tell()) ** 0.5))
