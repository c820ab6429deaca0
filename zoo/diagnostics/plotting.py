"""The one place where matplotlib is asked for: it belongs to an extra.

Shapes: c y x channels, rows and columns.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

COLOURS = "inferno"  # of weights over an image
LEAST = 3  # times the mean: where a scale of weights ends at least
SIDE = 160  # pixels to which small images are enlarged


def figure_class(file: Path | str) -> Any:
    """matplotlib's `Figure`, which draws with Agg whatever pyplot is set to.

    Args:
        file: What is to be drawn; of a path its name is told.

    Raises:
        ImportError: it is missing; the message names the file that cannot be drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{file if isinstance(file, str) else file.name} needs matplotlib: "
            "pip install 'attention-zoo[plots]'"
        ) from error
    return Figure


def enlarged(image: Tensor) -> Tensor:
    """uint8 (c y x) -> [0, 1] (y x 3), each pixel of a small image as a square"""
    times = math.ceil(SIDE / max(image.shape[1:]))
    rgb = image.float().div(255).expand(3, -1, -1)
    return rgb.repeat_interleave(times, 1).repeat_interleave(times, 2).permute(1, 2, 0)


class WeightScale:
    """Colours for weights over an image, in units of the even share.

    The scale reaches at least `LEAST` times the mean, so that even weights are dark, not glaring.

    Args:
        weights: Of patches (... rows columns); 0, and less where a kind of attention has that, to
            the highest.
        top: The highest weight, where several pictures share a scale.
    """

    def __init__(self, weights: Tensor, top: float | None = None) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        self.patches = weights.shape[-2] * weights.shape[-1]
        top = self.top_of(weights) if top is None else top
        low = min(0.0, float(weights.min()))
        self.colours = ScalarMappable(
            Normalize(low * self.patches, (top or 1.0) * self.patches), COLOURS
        )

    @staticmethod
    def top_of(weights: Tensor) -> float:
        """Where the scale of these weights ends."""
        return max(float(weights.max()), LEAST * float(weights.mean()))

    def over(self, image: Tensor, weights: Tensor, smooth: bool = True) -> Any:
        """The image, uint8 (c y x), under the weights of its patches (rows columns) -> (y x 3)"""
        return blend(image, weights * self.patches, self.colours, smooth)

    def add_to(self, figure: Any, panels: Any, label: str, **options: Any) -> None:
        """Draws the scale beside panels; its `label` is followed by what the numbers mean."""
        bar = figure.colorbar(self.colours, ax=panels, **options)
        bar.ax.tick_params(labelsize=7)
        bar.set_label(f"{label}times its even share (1/{self.patches})", fontsize=7)


def blend(image: Tensor, weights: Tensor, scale: Any, smooth: bool = True) -> Any:
    """The image in grey, uint8 (c y x), under the colours of weights (rows columns) -> (y x 3)

    Small images come out enlarged by a whole number; `scale` is matplotlib's, number -> colour.
    """
    grey = enlarged(image).mean(-1, keepdim=True)
    mode = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest-exact"}
    at_pixels = F.interpolate(weights[None, None].float(), grey.shape[:2], **mode)[0, 0]
    colours = torch.from_numpy(scale.to_rgba(at_pixels.numpy())[..., :3])
    return (0.4 * grey + 0.6 * colours).numpy()
