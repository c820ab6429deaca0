"""Positions: sine-cosine tables, and resampling of learned ones to another grid or length.

Shapes: n tokens, d width, y x rows and columns.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F


def sincos_1d(n: int, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """The sinusoidal table of arXiv 1706.03762: (n d), fp32.

    `table[p, 2c] = sin(p / temperature^(2c / dim))`, and the cosine in channel `2c + 1`.
    """
    if dim % 2:
        raise ValueError(f"dim ({dim}) must be even: each frequency has a sine and a cosine")
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angle = torch.arange(n, dtype=torch.float64)[:, None] / temperature**exponent
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


def sincos_2d(grid: tuple[int, int], dim: int, *, temperature: float = 10000.0) -> Tensor:
    """A table for a grid of (rows, columns), row by row: ((y x) d), fp32.

    The first half of the channels is `sincos_1d` of the row, the second half of the column.
    """
    if dim % 4:
        raise ValueError(
            f"dim ({dim}) must be divisible by 4: rows and columns get a half each, "
            "and each frequency a sine and a cosine"
        )
    rows, cols = (sincos_1d(size, dim // 2, temperature=temperature) for size in grid)
    y, x = grid
    table = torch.cat([rows[:, None].expand(-1, x, -1), cols[None].expand(y, -1, -1)], dim=-1)
    return table.flatten(0, 1)


def resample_grid(
    pos: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    num_prefix_tokens: int,
    antialias: bool = True,
    mode: str = "bicubic",
) -> Tensor:
    """Learned positions for another grid: (1 (prefix + y x) d) -> (1 (prefix + y' x') d).

    Grids are (rows, columns). Positions of prefix tokens (class, registers) stay as they are, and
    everything does where the grids are equal. Interpolated in fp32, returned in the dtype of `pos`.
    """
    _check_length(pos, num_prefix_tokens, old_grid)
    if tuple(old_grid) == tuple(new_grid):
        return pos
    prefix, grid = pos[:, :num_prefix_tokens], pos[:, num_prefix_tokens:]
    grid = rearrange(grid.float(), "1 (y x) d -> 1 d y x", y=old_grid[0])
    grid = F.interpolate(grid, size=tuple(new_grid), mode=mode, antialias=antialias)
    return torch.cat([prefix, rearrange(grid, "1 d y x -> 1 (y x) d").to(pos.dtype)], dim=1)


def resample_1d(pos: Tensor, length: int, *, num_prefix_tokens: int = 0) -> Tensor:
    """Learned positions for another length, by linear interpolation: (1 n d) -> (1 length d).

    The first and the last position keep their values; both lengths include the prefix tokens.
    """
    if pos.shape[1] == length:
        return pos
    if length <= num_prefix_tokens:
        raise ValueError(f"length ({length}) must exceed num_prefix_tokens ({num_prefix_tokens})")
    _check_length(pos, num_prefix_tokens, (pos.shape[1] - num_prefix_tokens,))
    prefix, rest = pos[:, :num_prefix_tokens], pos[:, num_prefix_tokens:]
    rest = rearrange(rest.float(), "1 n d -> 1 d n")
    rest = F.interpolate(rest, length - num_prefix_tokens, mode="linear", align_corners=True)
    return torch.cat([prefix, rearrange(rest, "1 d n -> 1 n d").to(pos.dtype)], dim=1)


def _check_length(pos: Tensor, num_prefix_tokens: int, grid: tuple[int, ...]) -> None:
    expected = num_prefix_tokens + math.prod(grid)
    if pos.ndim != 3 or pos.shape[:2] != (1, expected) or min(grid) < 1:
        raise ValueError(
            f"pos must be (1, {expected}, d) for {num_prefix_tokens} prefix tokens and a grid of "
            f"{tuple(grid)}, got {tuple(pos.shape)}"
        )
