"""A picture of many small ones with labels, made in a few calls of Pillow.

matplotlib gives the colours and the font; its own panels would take seconds where this takes a
tenth of one.

Shapes: c y x channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.diagnostics.plotting import COLOURS, figure_class

PAPER, INK, GREY = (255, 255, 255), (20, 20, 20), (105, 105, 105)
SIZES = {"small": 11, "normal": 13, "title": 15}  # pixels of letters
BAR = (220, 12)  # pixels of a scale of colours


@lru_cache(maxsize=1)
def colour_table() -> Tensor:
    """The colours from least to most: uint8 (256 3)."""
    from matplotlib import colormaps

    rgb = colormaps[COLOURS](range(256), bytes=True)[:, :3]
    return torch.from_numpy(rgb.copy())


def coloured(shares: Tensor) -> Tensor:
    """Numbers from 0 to 1 (...) -> uint8 (... 3); those outside, and NaN, as the nearest end."""
    index = shares.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().long()
    return colour_table()[index]


def fitted(image: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (c y x), grey or colour, at another size: (y x 3), small ones in whole squares."""
    rgb = image[None].float().expand(-1, 3, -1, -1)
    smaller = image.shape[1] > size[0]
    found = F.interpolate(rgb, size, mode="area" if smaller else "nearest-exact")
    return found[0].round().to(torch.uint8).permute(1, 2, 0)


@lru_cache(maxsize=8)
def _font(size: int) -> Any:
    import matplotlib
    from PIL import ImageFont

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(str(file), size)


def text_width(text: str, size: str = "small") -> int:
    """Pixels that a text takes."""
    return round(_font(SIZES[size]).getlength(text))


def shortened(text: str, width: int, size: str = "small") -> str:
    """The text, or as much of it as fits into so many pixels."""
    if text_width(text, size) <= width:
        return text
    kept = len(text)
    while kept and text_width(text[:kept] + "…", size) > width:
        kept -= 1
    return text[:kept].rstrip() + "…" if kept else ""


def wrapped(text: str, width: int, most: int, size: str = "small") -> list[str]:
    """The text on at most so many lines of such a width, broken at spaces; the last shortened."""
    lines: list[str] = []
    words = text.split()
    while words and len(lines) < most - 1:
        taken = next(
            (n for n in range(len(words), 1, -1) if text_width(" ".join(words[:n]), size) <= width),
            1,
        )
        lines.append(shortened(" ".join(words[:taken]), width, size))
        words = words[taken:]
    return [*lines, shortened(" ".join(words), width, size)] if words else lines


class Sheet:
    """White paper for pictures and words; places are (left, top) in pixels.

    Args:
        width, height: In pixels.
        file: That it is for.

    Raises:
        ImportError: matplotlib is missing; the message names the file.
    """

    def __init__(self, width: int, height: int, file: Path) -> None:
        figure_class(file)
        from PIL import Image, ImageDraw

        self.file = file
        self.image = Image.new("RGB", (width, height), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def put(self, rgb: Tensor, left: int, top: int) -> None:
        """uint8 (y x 3)"""
        from PIL import Image

        self.image.paste(Image.fromarray(rgb.contiguous().numpy()), (left, top))

    def write(
        self,
        text: str,
        left: int,
        top: int,
        size: str = "small",
        *,
        anchor: str = "la",
        colour: tuple[int, int, int] = INK,
    ) -> None:
        """One line; `anchor` as Pillow has it, such as "mm" for the middle."""
        self.pen.text((left, top), text, fill=colour, font=_font(SIZES[size]), anchor=anchor)

    def scale(self, left: int, top: int, ticks: Sequence[tuple[float, str]], told: str) -> None:
        """The colours with numbers under them, at places from 0 to 1, and what they mean."""
        width, height = BAR
        self.put(coloured(torch.linspace(0, 1, width)).expand(height, -1, -1), left, top)
        for place, text in ticks:
            x = left + round(place * (width - 1))
            self.pen.line((x, top + height, x, top + height + 3), fill=INK)
            self.write(text, x, top + height + 4, anchor="ma")
        self.write(told, left + width + 22, top - 1)

    def save(self) -> None:
        """As a PNG of 256 colours, which is a third as large and written three times as fast."""
        from PIL import Image

        few = self.image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(self.file, compress_level=4)
