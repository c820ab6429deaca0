"""Rotary positions: queries and keys turned by angles that grow with their place.

Shapes: b batch, h heads, i/j query/key positions, n tokens, e head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.layers.check import integer, is_integer, positive


class Rope(nn.Module):
    """Rotary positions (RoFormer, arXiv 2104.09864), axial on a grid (arXiv 2403.13298).

    Interleaved pairs: channels `2c` and `2c + 1` form a plane, and the token at place p is turned
    there by `p / temperature^(2c / e)`. A score then depends on the distance of its two tokens
    alone. On a grid the first half of the channels is turned by the row and the second half by
    the column, each like a head of width e / 2.

    Prefix tokens (class, registers) are not turned; the places count from the first token behind
    them. Queries and keys of different number are aligned at the last token (bottom right, as
    causal masks are); a grid needs all tokens of both.

    Angles are float64, their cosines and sines fp32 (float64 for float64 queries), whatever the
    dtype of the model or an active autocast. There are no parameters and no state-dict keys.

    Args:
        grid: (rows, columns), row by row; by default one dimension of any length.
        temperature: By default 10000 in one dimension and 100 on a grid.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        _check_width(integer("head_dim", head_dim, minimum=None), grid)
        if temperature is None:
            temperature = 10000.0 if grid is None else 100.0
        self.head_dim = head_dim
        self.grid = None if grid is None else check_grid(grid)
        self.num_prefix_tokens = check_prefix(num_prefix_tokens)
        self.temperature = positive("temperature", temperature)
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Another number of (rows, columns); there are no weights to resample."""
        if self.grid is None:
            raise ValueError(f"grid ({grid}) needs a Rope made with one; this has one dimension")
        self.grid = check_grid(grid)
        self._tables = {}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(b h i e), (b h j e) -> (b h i e), (b h j e)"""
        self._check("q", q)
        self._check("k", k)
        n = max(q.shape[2], k.shape[2])
        return self._rotate(q, n), self._rotate(k, n)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, grid={self.grid}, "
            f"num_prefix_tokens={self.num_prefix_tokens}, temperature={self.temperature}"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make their own tables."""
        return {**self.__dict__, "_tables": {}}

    def _rotate(self, x: Tensor, n: int) -> Tensor:
        """The tokens of `x` as the last ones of `n`; fp32 inside, since the table is."""
        cos, sin = self._table(x, n)[:, n - x.shape[2] : n].unbind()
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def _table(self, x: Tensor, n: int) -> Tensor:
        """Cosines and sines for at least `n` tokens: (2 n e/2)"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Kept for plain tensors only: a traced or fake one must not leave the trace.
        if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter):
            return self._make_table(n, x.device, dtype)
        table = self._tables.get((x.device, dtype))
        if table is None or table.shape[1] < n:
            capacity = 1 << max(n - 1, 0).bit_length()  # few tables while a sequence grows
            with torch.inference_mode(False):  # usable under autograd whoever asked first
                table = self._make_table(capacity, x.device, dtype)
            self._tables[x.device, dtype] = table
        return table

    def _make_table(self, n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        angle = self._angles(n, device)
        return torch.stack([angle.cos(), angle.sin()]).to(dtype)

    def _angles(self, n: int, device: torch.device) -> Tensor:
        """Of each token in each plane: (n e/2), float64; a grid has its own n."""
        if self.grid is None:
            place = torch.arange(n, dtype=torch.float64, device=device) - self.num_prefix_tokens
            return self._axis(place.clamp(min=0), self.head_dim)
        y, x = (torch.arange(size, dtype=torch.float64, device=device) for size in self.grid)
        y, x = y.repeat_interleave(self.grid[1]), x.repeat(self.grid[0])
        angle = torch.cat([self._axis(axis, self.head_dim // 2) for axis in (y, x)], dim=-1)
        return F.pad(angle, (0, 0, self.num_prefix_tokens, 0))

    def _axis(self, place: Tensor, width: int) -> Tensor:
        """(n) -> (n width/2)"""
        exponent = torch.arange(0, width, 2, dtype=torch.float64, device=place.device) / width
        return place[:, None] / self.temperature**exponent

    def _check(self, name: str, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            raise ValueError(f"{name} must be (b, h, n, {self.head_dim}), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if self.grid is not None:
            check_tokens(name, x.shape[2], self.num_prefix_tokens, self.grid)


def check_grid(grid: Sequence[int]) -> tuple[int, int]:
    """`grid` as a tuple; refused unless it is (rows, columns), both at least 1."""
    pair = isinstance(grid, (tuple, list)) and len(grid) == 2
    if not pair or not all(is_integer(side) and side >= 1 for side in grid):
        raise ValueError(f"grid ({grid!r}) must be (rows, columns), both integers of at least 1")
    return int(grid[0]), int(grid[1])


def check_prefix(num_prefix_tokens: int) -> int:
    """`num_prefix_tokens`; refused if negative."""
    return integer("num_prefix_tokens", num_prefix_tokens, minimum=0)


def check_tokens(name: str, n: int, num_prefix_tokens: int, size: tuple[int, ...]) -> None:
    """`n`, the number of tokens in `name`, must be that of the prefix plus a grid or length."""
    expected = num_prefix_tokens + math.prod(size)
    if n != expected:
        kind, value = ("grid", size) if len(size) == 2 else ("length", size[0])
        raise ValueError(
            f"{name} has {n} tokens, but num_prefix_tokens ({num_prefix_tokens}) and "
            f"{kind} {value} make {expected}"
        )


def _check_width(head_dim: int, grid: tuple[int, int] | None) -> None:
    if grid is None and (head_dim < 2 or head_dim % 2):
        raise ValueError(f"head_dim ({head_dim}) must be even: channels are turned in pairs")
    if grid is not None and (head_dim < 4 or head_dim % 4):
        raise ValueError(
            f"head_dim ({head_dim}) must be divisible by 4 with a grid: rows and columns get a "
            "half each, and channels are turned in pairs"
        )
