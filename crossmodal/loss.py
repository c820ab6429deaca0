"""Contrastive losses over the pairs of all processes.

A process takes the mean over its own rows, each against the columns of all processes, which are
gathered with gradients. The mean of the processes' losses, weighted by their numbers of rows, is
the loss of the whole batch, and so is its gradient: it does not matter over how many processes, or
how evenly, a batch is spread.

Shapes: b rows of this process, N rows of all processes, e width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from vision.checks import check_choice
from zoo.layers.check import integer
from zoo.untraced import untraced

KINDS = ("infonce", "sigmoid")


def contrastive_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None = None,
    kind: str = "infonce",
    size: int | None = None,
    *,
    alone: bool = False,
) -> Tensor:
    """This process's share of the loss: the mean over its rows; 0 where none of them counts.

    Under several processes all must call it together, those without rows too. Similarities are
    computed in fp32, under autocast as well.

    Args:
        image: Unit vectors (b e); row i belongs to row i of `text`.
        text: Unit vectors (b e).
        scale: Factor on the similarities: 1 / temperature.
        bias: Added to them; with `sigmoid` only.
        kind: `infonce`, cross-entropy both ways (CLIP, arXiv 2103.00020), or `sigmoid`, a decision
            for each pair, summed over a row's columns (SigLIP, arXiv 2303.15343).
        size: How many of the rows count, the first ones; all where None.
        alone: Only this process's rows are compared, and others need not call: for evaluation.
    """
    check_choice("kind", kind, KINDS)
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(
            f"image {tuple(image.shape)} and text {tuple(text.shape)} must be pairs of vectors "
            "of one width: (b, e) each"
        )
    if bias is not None and kind != "sigmoid":
        raise ValueError("bias needs kind 'sigmoid': it changes nothing in a softmax over columns")
    with torch.autocast(image.device.type, enabled=False):
        share = (
            Share((len(image) if size is None else size,), 0) if alone else Share.of(image, size)
        )
        pairs = share.gather(torch.stack([precise(image), precise(text)], dim=1))  # N 2 e
        loss = _infonce if kind == "infonce" else _sigmoid
        return loss(pairs, share, scale, 0.0 if bias is None else bias) / max(1, share.size)


def _infonce(pairs: Tensor, share: Share, scale: Tensor | float, _bias: Any) -> Tensor:
    images, texts = pairs.unbind(1)
    target = torch.arange(share.start, share.stop, device=pairs.device)
    by_image, by_text = (
        F.cross_entropy(scale * own[share.start : share.stop] @ others.T, target, reduction="sum")
        for own, others in ((images, texts), (texts, images))
    )
    return (by_image + by_text) / 2


def _sigmoid(pairs: Tensor, share: Share, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    images, texts = pairs.unbind(1)
    logits = scale * images[share.start : share.stop] @ texts.T + bias
    belongs = torch.zeros_like(logits)
    belongs.diagonal(share.start).fill_(1)
    return -F.logsigmoid((2 * belongs - 1) * logits).sum()


def precise(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Share:
    """Which of the rows of all processes are this one's.

    Attributes:
        sizes: How many rows count, by process.
        rank: This process.
    """

    sizes: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, x: Tensor, size: int | None = None) -> Share:
        """The share of a process of which the first `size` rows of `x` count, or all.

        Raises:
            ValueError: `x` has fewer rows.
        """
        size = len(x) if size is None else integer("size", size, minimum=0)
        if size > len(x):
            raise ValueError(f"size ({size}) must be at most {len(x)}, the rows that there are")
        if not parallel():
            return cls((size,), 0)
        sizes = exchange([size], x.device)
        return cls(tuple(row[0] for row in sizes), dist.get_rank())

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """This process's first row among those of all."""
        return sum(self.sizes[: self.rank])

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def gather(self, x: Tensor) -> Tensor:
        """(b ...) -> (N ...): the rows that count, of all processes, with gradients.

        Rows must have one shape on all processes. A gradient is the sum of those of all processes.
        """
        x = x[: self.size]
        return x if len(self.sizes) == 1 else self._gather(x)

    @untraced
    def _gather(self, x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(max(self.sizes) - len(x), *x.shape[1:])])
        parts = _Gather.apply(padded, len(self.sizes), self.rank)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])


def gather_features(x: Tensor, size: int | None = None) -> Tensor:
    """(b ...) -> (N ...): the first `size` rows of each process, with gradients; see `Share`."""
    return Share.of(x, size).gather(x)


def parallel() -> bool:
    """Whether other processes hold rows of the batch."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@untraced
def exchange(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The `numbers` of every process, by process; each gives as many."""
    if not parallel():
        return [list(numbers)]
    own = torch.tensor(numbers, device=device)
    every = own.new_empty(dist.get_world_size(), len(numbers))
    dist.all_gather(list(every), own)
    return every.tolist()


class _Gather(torch.autograd.Function):
    """(m ...) -> (w m ...): a tensor of one shape from each of w processes.

    torch's own function with gradients is deprecated; its successor is a private module.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int, rank: int) -> Tensor:
        ctx.rank = rank
        every = x.new_empty(world, *x.shape)
        dist.all_gather(list(every), x.contiguous())
        return every

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()  # the caller's stays as it is
        dist.all_reduce(grad)
        return grad[ctx.rank], None, None
