"""Mixup and CutMix by torchvision, with the same result for any number of processes."""

from __future__ import annotations

from typing import Any

import torch

from zoo.rng import seeded

_BLOCK = 64  # micro-batches whose random numbers are drawn together


class Mixing:
    """Mixes each image of a batch, and its target, with the one before it.

    Mixup (arXiv 1710.09412) blends two images by a weight from Beta(alpha, alpha); CutMix
    (1905.04899) pastes a box of one into the other. With both, each batch draws one of the two. The
    draw depends on (seed, epoch, micro-batch) only. Batches come with one more sample in front, the
    neighbour that belongs to the process before (`Loader(lead=True)`), which is dropped after
    mixing: the pairs are the same whether one process or several share the batch. Batches of odd
    size, and of one, are fine.

    Args:
        num_classes: Length of the target vectors.
        mixup, cutmix: alpha of the Beta distribution; 0 turns it off.
        seed: Keys the draws.
    """

    def __init__(self, num_classes: int, mixup: float = 0.0, cutmix: float = 0.0, seed: int = 0):
        if min(mixup, cutmix) < 0:
            raise ValueError(f"mixup ({mixup}) and cutmix ({cutmix}) must not be negative")
        self.seed, self.active = seed, mixup > 0 or cutmix > 0
        self._drawn: tuple[Any, list[tuple[Any, dict[str, Any]]]] = (None, [])
        if self.active:
            from torchvision.transforms import v2

            self._kinds = [
                kind(alpha=alpha, num_classes=num_classes)
                for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix))
                if alpha > 0
            ]

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, epoch: int, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixes images (1 + b, c, y, x) and targets (1 + b,) to (b, c, y, x) and (b, num_classes).

        When inactive both come back as they are: there is no sample in front then.
        """
        if not self.active:
            return images, targets
        kind, drawn = self._draw(images, epoch, index)
        params = {**drawn, "labels": targets, "batch_size": len(images)}
        return kind.transform(images, params)[1:], kind.transform(targets, params)[1:]

    def _draw(self, images: torch.Tensor, epoch: int, index: int) -> tuple[Any, dict[str, Any]]:
        """Which transform, and its random numbers, for micro-batch `index` of `epoch`."""
        block = (epoch, index // _BLOCK, images.shape[-2:])
        if self._drawn[0] != block:
            with seeded(self.seed, "mixing", *block[:2]):
                picks = torch.randint(len(self._kinds), (_BLOCK,)).tolist()
                draws = [
                    (self._kinds[pick], self._kinds[pick].make_params([images])) for pick in picks
                ]
            self._drawn = (block, draws)
        return self._drawn[1][index % _BLOCK]
