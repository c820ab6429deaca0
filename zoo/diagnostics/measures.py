"""Measures of attention weights, as pure functions: how even, how far, on what, of what rank.

More of them are in `heads` (alike or not), `tokens` (what draws weight) and `flow` (over layers).
All take weights as `capture_attention` gives them: rows sum to 1, or to 0. `captured` says what
holds of all: float64 stays float64, a NaN gives NaN.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.diagnostics.captured import checked, visible_keys
from zoo.layers.check import fraction, integer
from zoo.layers.mask import MaskLike

Pair = Sequence[int]  # rows and columns


def entropy(weights: Tensor, *, normalized: bool = False, mask: MaskLike = None) -> Tensor:
    """Entropy of each query's weights in nats: (b h i j) -> (b h i).

    Between 0, all weight on one key, and ln j, all keys alike. 0 for a query without any weight.
    Watched over training in arXiv 2303.06296, where low entropy comes with unstable training.

    Args:
        weights: As `capture_attention` gives them: rows sum to 1, or to 0.
        normalized: Divides by the logarithm of the number of keys: from 0 to 1. Without a mask that
            number is all of j, so that samples of other lengths can be compared.
        mask: That of the attention. Each query's number of keys is then that of those it may see;
            one that may see a single key has 0.
    """
    weights = checked(weights)
    found = torch.special.entr(weights).sum(-1).clamp(min=0)  # rounding
    keys = visible_keys(weights, mask).sum(-1)  # b h i
    if not normalized:
        return found
    if weights.shape[-1] < 2:
        raise ValueError(f"weights {tuple(weights.shape)} need 2 keys or more to be normalised")
    return (found / keys.clamp(min=2).to(weights.dtype).log()).clamp(max=1)


def diagonal_share(weights: Tensor, width: int = 0) -> Tensor:
    """Share of weight at the query's own place and `width` to either side: (b h i j) -> (b h i).

    From 0 to 1; with width 0 what a token gives to itself. Heads that look at themselves or at a
    neighbour are a kind of their own in arXiv 1906.04341. Where i is not j, the last query is at
    the last key, as in causal masks; a query before the first key has no place.

    Args:
        weights: (b h i j).
        width: Tokens in the order of the sequence: neighbours in an image's row, not its columns.
    """
    weights, width = checked(weights), integer("width", width, minimum=0)
    i, j = weights.shape[-2:]
    places = torch.arange(i, device=weights.device)[:, None] + (j - i)
    band = (places - torch.arange(j, device=weights.device)).abs() <= width
    return (weights * (band & (places >= 0))).sum(-1)


def token_share(weights: Tensor, keys: int | Sequence[int] | Tensor) -> Tensor:
    """Share of each query's weight on the given keys, from 0 to 1: (b h i j) -> (b h i).

    Class token, registers, separators (arXiv 1906.04341), padding. An empty row gives 0.

    Args:
        weights: (b h i j).
        keys: Indices, from the end below 0, or a bool tensor (j) or (b j).
    """
    weights = checked(weights)
    return (weights * _chosen(keys, weights)[:, None, None]).sum(-1)


def _chosen(keys: int | Sequence[int] | Tensor, weights: Tensor) -> Tensor:
    """The keys as bool (b j) or (1 j)."""
    b, j = weights.shape[0], weights.shape[-1]
    found = torch.as_tensor(keys, device=weights.device)
    if found.dtype == torch.bool:
        if found.shape not in ((j,), (1, j), (b, j)):
            raise ValueError(f"keys {tuple(found.shape)} must be (j) = ({j},) or (b, j) = {(b, j)}")
        return found.reshape(-1, j)
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise TypeError(f"keys ({found.dtype}) must be indices or a bool tensor")
    if found.ndim > 1:
        raise ValueError(f"keys {tuple(found.shape)} must be one index or a list of them")
    found = found.reshape(-1).long()
    outside = found[(found < -j) | (found >= j)].tolist()
    if outside:
        raise ValueError(f"keys ({outside[:8]}) must lie in [{-j}, {j - 1}], as there are {j}")
    chosen = torch.zeros(1, j, dtype=torch.bool, device=weights.device)
    chosen[0, found] = True
    return chosen


def attention_distance(
    weights: Tensor,
    grid: Pair,
    *,
    num_prefix_tokens: int = 0,
    patch_size: int | Pair | None = None,
) -> Tensor:
    """Mean distance between a query's patch and those it looks at: (b h i j) -> (b h).

    "Mean attention distance" of ViT (arXiv 2010.11929, fig. 7, right): Euclidean,
    between centres, weighted by attention, mean over queries. From 0 to the grid's diagonal. Class
    tokens and registers are left out, and what a query gives to patches is scaled to sum to 1. A
    query that gives them nothing does not count; NaN where none is left.

    Args:
        weights: Self-attention over the prefix tokens and then the patches by rows, i = j.
        grid: Patches, rows and columns.
        num_prefix_tokens: Class tokens and registers before the patches.
        patch_size: In pixels, one number or rows and columns: the distance is then in pixels, and
            else in patches.
    """
    weights = checked(weights)
    rows, columns = pair("grid", grid)
    first = integer("num_prefix_tokens", num_prefix_tokens, minimum=0)
    tokens = first + rows * columns
    if weights.shape[-2:] != (tokens, tokens):
        raise ValueError(
            f"weights {tuple(weights.shape)} must be (b, h, {tokens}, {tokens}): grid "
            f"({rows}, {columns}) has {rows * columns} patches, after num_prefix_tokens ({first})"
        )
    step = (1, 1) if patch_size is None else pair("patch_size", patch_size)
    weights = weights[..., first:, first:]
    total = weights.sum(-1)
    found = (weights * _distances((rows, columns), step).to(weights)).sum(-1)
    looking = total != 0
    return (found / total.where(looking, total.new_ones(()))).sum(-1) / looking.sum(-1)


def _distances(grid: tuple[int, int], step: tuple[int, int]) -> Tensor:
    """Between the centres of patches, by rows: float64 (n n)."""
    y, x = (torch.arange(size).double() * length for size, length in zip(grid, step, strict=True))
    centres = torch.cartesian_prod(y, x)
    return (centres[:, None] - centres).norm(dim=-1)


def pair(name: str, value: int | Pair) -> tuple[int, int]:
    """Rows and columns, from both or from one number for both."""
    edges = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(edges) != 2:
        raise ValueError(f"{name} {value!r} must be two integers, rows and columns")
    return integer(name, edges[0]), integer(name, edges[1])


def attention_rank(weights: Tensor, energy: float = 0.99) -> Tensor:
    """How many singular values hold most of each matrix: (b h i j) -> (b h), integers.

    The fewest whose squares make up `energy` of the sum of all squares: 1 where all queries look
    alike, as stacks without skip connections come to (rank collapse, arXiv 2103.03404), up to the
    smaller of i and j. 0 where all rows are empty.

    Args:
        weights: (b h i j), without NaN.
        energy: Above 0, up to 1.
    """
    if not fraction("energy", energy):
        raise ValueError(f"energy ({energy}) must be above 0")
    squares = _squared_singular_values(weights)
    needed = squares.sum(-1, keepdim=True) * energy
    rounding = 1e-12 * squares[..., :1]  # a square is known to no more than its share of the first
    return ((squares.cumsum(-1) < needed - rounding).sum(-1) + 1) * (squares[..., 0] > 0)


def stable_rank(weights: Tensor) -> Tensor:
    """Sum of squared singular values over the largest: (b h i j) -> (b h).

    The rank without a threshold (arXiv 1501.01571): from 1, all queries look alike,
    to the smaller of i and j, each looks elsewhere. 0 where all rows are empty.
    """
    squares = _squared_singular_values(weights)
    largest = squares[..., 0]
    found = squares.sum(-1) / largest.where(largest > 0, 1)
    return found if weights.dtype == torch.float64 else found.float()


def _squared_singular_values(weights: Tensor) -> Tensor:
    """(b h i j) -> float64 (b h k), largest first, k the smaller of i and j"""
    weights = checked(weights, nan=False).double()
    weights = weights if weights.shape[-2] <= weights.shape[-1] else weights.mT
    # Eigenvalues of the product are the squares, and take less time than the values themselves.
    return torch.linalg.eigvalsh(weights @ weights.mT).clamp(min=0).flip(-1)
