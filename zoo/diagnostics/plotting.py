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
SIDE = 160  # pixels to which small images are enlarged


def figure_class(file: Path) -> Any:
    """matplotlib's `Figure`, which draws with Agg whatever pyplot is set to.

    Raises:
        ImportError: it is missing; the message names the file that cannot be drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{file.name} needs matplotlib: pip install 'attention-zoo[plots]'"
        ) from error
    return Figure


def enlarged(image: Tensor) -> Tensor:
    """uint8 (c y x) -> [0, 1] (y x 3), each pixel of a small image as a square"""
    times = math.ceil(SIDE / max(image.shape[1:]))
    rgb = image.float().div(255).expand(3, -1, -1)
    return rgb.repeat_interleave(times, 1).repeat_interleave(times, 2).permute(1, 2, 0)


def blend(image: Tensor, weights: Tensor, scale: Any, smooth: bool = True) -> Any:
    """The image in grey, uint8 (c y x), under the colours of weights (rows columns) -> (y x 3)

    Small images come out enlarged by a whole number; `scale` is matplotlib's, number -> colour.
    """
    grey = enlarged(image).mean(-1, keepdim=True)
    mode = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest-exact"}
    at_pixels = F.interpolate(weights[None, None].float(), grey.shape[:2], **mode)[0, 0]
    colours = torch.from_numpy(scale.to_rgba(at_pixels.numpy())[..., :3])
    return (0.4 * grey + 0.6 * colours).numpy()
