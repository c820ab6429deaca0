"""From an image to a model's input, by the model's own `Preprocessing`.

Two halves, so that a loader can do the first on the CPU and the second by batch on the device:
`resize_and_crop` (image -> uint8 tensor) and `normalize` (uint8 or [0, 1] -> float32).

Shapes: c channels, y rows, x columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.card import Preprocessing

if TYPE_CHECKING:
    from torchvision.transforms import v2

_PIL_MODES = {1: "L", 3: "RGB"}
_EXIF_ORIENTATION = 0x0112


def build_transform(preprocessing: Preprocessing) -> v2.Compose:
    """The evaluation transform: PIL image or uint8 (c y x) -> normalised float32 (c y x)."""
    from torchvision.transforms import v2

    return v2.Compose([ResizeAndCrop(preprocessing), Normalize(preprocessing)])


def transforms(model: nn.Module) -> v2.Compose:
    """A model's evaluation transform, from its card."""
    card = getattr(model, "card", None)
    if card is None:
        raise TypeError(
            f"{type(model).__name__} has no card; models made by zoo.create_model have one"
        )
    return build_transform(card.preprocessing)


def resize_and_crop(preprocessing: Preprocessing) -> Callable[[Any], Tensor]:
    """PIL image or uint8 (c y x) -> uint8 (c y x) of exactly `preprocessing.size`; picklable."""
    return ResizeAndCrop(preprocessing)


def normalize(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """(... c y x) uint8 in 0..255, or float in [0, 1] -> float32, mean 0 and deviation 1.

    Works on any device; the constants are made once a device.
    """
    channels = images.shape[-3] if images.ndim >= 3 else None
    if channels != preprocessing.in_chans:
        raise ValueError(
            f"images have shape {tuple(images.shape)}, but the preprocessing is for "
            f"(..., {preprocessing.in_chans}, rows, columns): one mean a channel"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be uint8 or floating point, not {images.dtype}")
    top = 255 if images.dtype == torch.uint8 else 1
    scale, shift = _constants(preprocessing, images.device, top)
    return torch.addcmul(shift, images.float(), scale)


@lru_cache(maxsize=64)
def _constants(pre: Preprocessing, device: torch.device, top: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # usable under autograd whoever asked first
        mean = torch.tensor(pre.mean, dtype=torch.float64)[:, None, None]
        std = torch.tensor(pre.std, dtype=torch.float64)[:, None, None]
        scale, shift = 1 / (std * top), -mean / std
        return scale.float().to(device), shift.float().to(device)


class Normalize(nn.Module):
    """`normalize` as a transform."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.preprocessing = preprocessing

    def forward(self, images: Tensor) -> Tensor:
        return normalize(images, self.preprocessing)

    def extra_repr(self) -> str:
        return f"mean={self.preprocessing.mean}, std={self.preprocessing.std}"


class ResizeAndCrop(nn.Module):
    """PIL image or uint8 (c y x) -> uint8 (c y x) of exactly `preprocessing.size`.

    Sizes are timm's: the target divided by `crop_pct`, rounded down, then cropped in the middle.
    PIL images are turned by their EXIF orientation; grey becomes RGB and the reverse where the
    model wants it. Other modes (palette, alpha, CMYK, 16 bit) need `vision.decode` first, so that
    one set of rules holds in training and in use.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.preprocessing = preprocessing

    def forward(self, image: Any) -> Tensor:
        from torchvision.transforms.v2 import functional as F

        pre = self.preprocessing
        if isinstance(image, Tensor):
            _check_tensor(image, pre.in_chans)
            size = (image.shape[-2], image.shape[-1])
        else:
            image = _upright(image, pre.in_chans)
            size = (image.height, image.width)
        resized = resized_size(size, pre)
        if resized != size:
            mode = F.InterpolationMode(pre.interpolation)
            image = F.resize(image, list(resized), interpolation=mode, antialias=True)
        if pre.crop_mode == "border":
            image = F.pad(image, _border(resized, pre.size), fill=_fill(pre))
        if resized != pre.size:
            image = F.center_crop(image, list(pre.size))
        return image if isinstance(image, Tensor) else F.pil_to_tensor(image)

    def extra_repr(self) -> str:
        pre = self.preprocessing
        return f"size={pre.size}, {pre.interpolation}, {pre.crop_mode}, crop_pct={pre.crop_pct}"


def resized_size(size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """Rows and columns to resize an image of `size` to, before the crop."""
    rows, cols = size
    target_rows, target_cols = (
        math.floor(edge / preprocessing.crop_pct) for edge in preprocessing.size
    )
    if preprocessing.crop_mode == "squash":
        return target_rows, target_cols
    by_row, by_col = rows / target_rows, cols / target_cols
    if preprocessing.crop_mode == "border":
        ratio = max(by_row, by_col)
        return max(1, round(rows / ratio)), max(1, round(cols / ratio))
    if target_rows == target_cols:  # torchvision's rule for a short edge: the long one rounds down
        short = min(rows, cols)
        return int(target_rows * rows / short), int(target_cols * cols / short)
    ratio = min(by_row, by_col)
    return round(rows / ratio), round(cols / ratio)


def _border(resized: tuple[int, int], size: tuple[int, int]) -> list[int]:
    """Left, top, right, bottom padding that brings `resized` to at least `size`."""
    rows, cols = (max(0, want - have) for want, have in zip(size, resized, strict=True))
    return [cols // 2, rows // 2, cols - cols // 2, rows - rows // 2]


def _fill(preprocessing: Preprocessing) -> list[float]:
    return [float(round(255 * mean)) for mean in preprocessing.mean]


def _check_tensor(image: Tensor, in_chans: int) -> None:
    if image.dtype != torch.uint8:
        raise TypeError(f"an image tensor must be uint8 in 0..255, not {image.dtype}")
    if image.ndim < 3 or image.shape[-3] != in_chans:
        raise ValueError(
            f"the image has shape {tuple(image.shape)}; the model takes {in_chans} channels: "
            f"(..., {in_chans}, rows, columns)"
        )


def _upright(image: Any, in_chans: int) -> Any:
    """A PIL image in the mode for `in_chans` channels, turned as its EXIF orientation says."""
    mode = _PIL_MODES.get(in_chans)
    if mode is None:
        raise ValueError(f"a PIL image cannot have {in_chans} channels; pass a uint8 tensor")
    if getattr(image, "mode", None) not in _PIL_MODES.values():
        what = f"a PIL image of mode {image.mode}" if hasattr(image, "mode") else repr(type(image))
        raise TypeError(
            f"expected a PIL image of mode L or RGB, or a uint8 tensor, not {what}; "
            f"vision.decode(file, channels={in_chans}) brings any image file to mode {mode}"
        )
    if image.getexif().get(_EXIF_ORIENTATION, 1) != 1:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
    return image if image.mode == mode else image.convert(mode)
