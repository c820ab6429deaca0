"""Augmentation whose every random number depends on (seed, epoch, sample) and nothing else.

So a sample looks the same in any batch, worker, process or resumed run of a seed.

Shapes: b batch, c y x channels, rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.card import Preprocessing
from zoo.preprocess import resize_and_crop
from zoo.rng import generator

SPATIAL = ("auto", "none", "affine", "crop")
POLICIES = ("none", "randaugment", "trivialaugment")


@dataclass(frozen=True)
class Augment:
    """What is done to training images.

    Attributes:
        spatial: `affine` (small rotations, shifts and scales), `crop` (random resized crops),
            `none`, or `auto`: affine for data in memory, else crop.
        hflip: Chance of a horizontal flip; None takes the data set's.
        degrees: Largest rotation either way.
        translate: Largest shift as a part of the side.
        scale: Range of the zoom.
        shear: Largest shear either way, in degrees.
        crop_scale: Range of the area of a random resized crop.
        policy: `randaugment` (arXiv 1909.13719) or `trivialaugment` (2103.10158) per image;
            the latter shifts by up to 32 pixels, which empties smaller images.
    """

    spatial: str = "auto"
    hflip: float | None = None
    degrees: float = 10.0
    translate: float = 0.1
    scale: tuple[float, float] = (0.9, 1.1)
    shear: float = 0.0
    crop_scale: tuple[float, float] = (0.35, 1.0)
    policy: str = "none"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("spatial", self.spatial, SPATIAL),
            ("policy", self.policy, POLICIES),
        ):
            if value not in choices:
                raise ValueError(f"{name} {value!r} must be one of {', '.join(choices)}")
        if self.hflip is not None and not 0 <= self.hflip <= 1:
            raise ValueError(f"hflip ({self.hflip}) must be a probability, or None")
        if not (0 <= self.degrees <= 180 and 0 <= self.translate <= 1 and 0 <= self.shear < 90):
            raise ValueError(
                f"degrees ({self.degrees}), translate ({self.translate}), shear ({self.shear}) "
                "must lie in [0, 180], [0, 1], [0, 90)"
            )
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale {self.scale} must be a positive range (low, high)")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale {self.crop_scale} must be a range within (0, 1]")

    @property
    def moves(self) -> bool:
        """Whether the affine map can be other than the identity or a flip."""
        return self.scale != (1, 1) or any((self.degrees, self.translate, self.shear))


class BatchAffine:
    """One random affine map per sample, for a whole batch in one resampling.

    The numbers of an epoch are drawn at once, a row a sample, and looked up by sample.
    """

    def __init__(self, augment: Augment, hflip: float, num_samples: int, seed: int) -> None:
        self.augment, self.hflip = augment, hflip
        self.num_samples, self.seed = num_samples, seed
        self.affine = augment.spatial in ("auto", "affine") and augment.moves
        self._epoch = -1
        self._centres = self._maps = self._flip = torch.empty(0)

    def __call__(self, images: Tensor, epochs: Sequence[int], ids: Tensor) -> Tensor:
        """uint8 (b c y x) of samples `ids` -> float32 in [0, 1]; uint8 if only flipped."""
        if len(set(epochs)) > 1:
            parts = zip(images.split(1), epochs, ids.split(1), strict=True)
            return torch.cat([self(image, [epoch], i) for image, epoch, i in parts])
        self._prepare(epochs[0], images.shape[-2:])
        if not self.affine:
            flip = self._flip[ids][:, None, None, None]
            return torch.where(flip, images.flip(-1), images)
        grid = (self._centres @ self._maps[ids]).unflatten(1, images.shape[-2:])  # b y x 2
        return F.grid_sample(images.float().div_(255), grid, align_corners=False)

    def _of_epoch(self, epoch: int) -> Tensor:
        """Uniform numbers of an epoch: (samples, 7)."""
        return torch.rand(self.num_samples, 7, generator=generator(self.seed, "affine", epoch))

    def _prepare(self, epoch: int, size: torch.Size) -> None:
        if epoch == self._epoch:
            return
        draws = self._of_epoch(epoch)
        self._flip = draws[:, 6] < self.hflip
        theta = affine_matrices(self.augment, draws, self._flip, size)
        self._maps = theta.transpose(1, 2).contiguous()  # samples 3 2
        # Of every pixel (x, y, 1) in [-1, 1]; F.affine_grid makes them anew for each batch.
        y, x = ((2 * torch.arange(n) + 1) / n - 1 for n in size)
        y, x = torch.meshgrid(y, x, indexing="ij")
        self._centres = torch.stack([x, y, torch.ones_like(x)], -1).flatten(0, 1)
        self._epoch = epoch


def affine_matrices(
    augment: Augment, draws: Tensor, flip: Tensor, size: tuple[int, int] | torch.Size
) -> Tensor:
    """Maps from output to input positions in [-1, 1], as `affine_grid` takes them: (b 2 3).

    Args:
        draws: Uniform numbers in [0, 1): (b, at least 6).
        flip: Which samples to mirror: (b,).
        size: Rows and columns; rotations are made in pixels, not in the stretched square.
    """
    signed = 2 * draws - 1
    angle = signed[:, 0] * math.radians(augment.degrees)
    low, high = (math.log(s) for s in augment.scale)
    zoom = torch.exp(low + (high - low) * draws[:, 1])
    shear = torch.tan(signed[:, 2] * math.radians(augment.shear))
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    aspect = size[1] / size[0]
    mirror = torch.where(flip, -1.0, 1.0)
    top = [
        cos * mirror,
        (cos * shear - sin) / aspect * mirror,
        2 * augment.translate * signed[:, 3],
    ]
    bottom = [sin * aspect, sin * shear + cos, 2 * augment.translate * signed[:, 4]]
    return torch.stack([torch.stack(top, 1), torch.stack(bottom, 1)], 1)


def sample_transform(
    augment: Augment | None, preprocessing: Preprocessing, hflip: float, *, in_memory: bool
) -> nn.Module | None:
    """torchvision's transforms for one image -> uint8 (c y x) of the model's size.

    In memory the image is such a tensor already, and None says that nothing is left to do to it
    alone: `BatchAffine` does the rest.
    """
    from torchvision.transforms import v2

    if augment is None:
        return None if in_memory else resize_and_crop(preprocessing)  # type: ignore[return-value]
    steps: list[Any] = []
    size = list(preprocessing.size)
    crop = augment.spatial == "crop" or (augment.spatial == "auto" and not in_memory)
    if crop:
        mode = v2.InterpolationMode(preprocessing.interpolation)
        steps += [v2.RandomResizedCrop(size, augment.crop_scale, interpolation=mode), v2.ToImage()]
    elif not in_memory:
        steps.append(resize_and_crop(preprocessing))
        if augment.spatial == "affine":
            steps.append(
                v2.RandomAffine(
                    augment.degrees,
                    (augment.translate, augment.translate),
                    augment.scale,
                    (-augment.shear, augment.shear) if augment.shear else None,
                    interpolation=v2.InterpolationMode.BILINEAR,
                )
            )
    if not in_memory and hflip:
        steps.append(v2.RandomHorizontalFlip(hflip))
    if augment.policy != "none":
        steps.append(
            v2.RandAugment() if augment.policy == "randaugment" else v2.TrivialAugmentWide()
        )
    if not steps:
        return None
    return v2.Compose([*steps, v2.ToPureTensor()])
