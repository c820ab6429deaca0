"""Pictures of `crossmodal.looks`: an image, and over it the weights of each word.

Shapes: b batch, w words, c channels, y x rows and columns.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zoo.diagnostics.plotting import WeightScale, enlarged, figure_class

if TYPE_CHECKING:
    from crossmodal.looks import Look

PANEL = 1.5  # inches, of a square one; others have its area
PER_LINE = 8  # words; of wide images fewer


def draw(look: Look, path: Path, *, smooth: bool = True, one_scale: bool = False) -> None:
    """Draws a row for each pair: the image, then the image under each word's weights, as a PNG.

    Args:
        look: What to draw.
        path: The PNG.
        smooth: Weights between the centres of cells are interpolated; else cells are squares.
        one_scale: One scale of colours for all rows, instead of one for each.

    Raises:
        ImportError: matplotlib is missing.
    """
    wide = math.sqrt(look.pixels.shape[3] / look.pixels.shape[2])
    per_line = max(2, round(PER_LINE / max(1, wide)))
    lines = [max(1, math.ceil(len(words) / per_line)) for words in look.words]
    columns = 1 + min(per_line, max([1, *map(len, look.words)]))
    size = (PANEL * wide * columns + 1, (PANEL / wide + 0.6) * sum(lines))
    figure = figure_class(path)(figsize=size, layout="constrained")
    panels = figure.subplots(sum(lines), columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    top = WeightScale.top_of(look.maps) if one_scale and look.maps.numel() else None
    for row, count in enumerate(lines):
        start = sum(lines[:row])
        _row(figure, panels[start : start + count], look, row, smooth, top)
    figure.savefig(path, dpi=120)


def _row(figure: Any, panels: Any, look: Look, row: int, smooth: bool, top: float | None) -> None:
    """One pair in its lines of panels (lines columns)."""
    image, words = look.pixels[row], look.words[row]
    maps = look.maps[row, : len(words)]
    _image(panels[0, 0], image, look.captions[row], look.remarks[row])
    if not words:
        return
    scale = WeightScale(maps, top)
    for axes, word, weights in zip(panels[:, 1:].flat, words, maps, strict=False):
        axes.imshow(scale.over(image, weights, smooth))
        axes.set_title(_cut(word, 16), fontsize=9, parse_math=False)
    scale.add_to(figure, panels.ravel().tolist(), "", fraction=0.05, aspect=12)


def _image(axes: Any, image: Tensor, caption: str, remark: str) -> None:
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.imshow(enlarged(image).numpy())
    axes.set_title(
        textwrap.fill(_cut(caption, 80), 20), fontsize=9, weight="bold", parse_math=False
    )
    axes.set_xlabel(textwrap.fill(_cut(remark, 96), 24), fontsize=7, parse_math=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
