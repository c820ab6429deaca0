"""Position biases: what is added to attention scores, for any pairs of queries and keys.

A bias is evaluated only where it is asked for, so that sparse attention never builds (i j).

Shapes: h heads, i/j query/key positions, n tokens, y x rows and columns, *P any shape of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from zoo.layers.check import flag, integer, is_integer
from zoo.layers.position import resample_1d, resample_grid
from zoo.layers.rope import check_grid, check_prefix, check_tokens

Size: TypeAlias = int | tuple[int, int]  # a length, or the rows and columns of a grid


class PositionBias(nn.Module):
    """Added to the scores of heads, before the softmax; a subclass defines `_values`."""

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        """The bias of queries `rows` on keys `cols`: (1 h *P), in the parameters' dtype.

        Args:
            rows: Integers in [0, i), of a shape that broadcasts with that of `cols` to *P.
            cols: Integers in [0, j).
            i: The number of all queries.
            j: The number of all keys.
        """
        self._check_counts(i, j)
        _check_positions("rows", rows, i)
        _check_positions("cols", cols, j)
        return self._values(rows.long(), cols.long(), i, j)

    def lower(self, i: int, j: int) -> Tensor:
        """The bias of all pairs: (1 h i j)"""
        self._check_counts(i, j)
        device = next(self.parameters()).device
        rows, cols = torch.arange(i, device=device), torch.arange(j, device=device)
        return self._values(rows[:, None], cols[None], i, j)

    def _check_counts(self, i: int, j: int) -> None:
        """Refuses numbers of queries and keys that the bias has no values for."""

    def _values(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        raise NotImplementedError


class RelativeBias1d(PositionBias):
    """T5's bias by distance (arXiv 1910.10683), for any length.

    Half of the buckets are for one distance each, the others widen logarithmically up to
    `max_distance`; everything beyond shares the last. The last query is aligned with the last
    key. The parameter's name is that in T5's attention, so that its weights fit.

    Args:
        bidirectional: Half of the buckets for keys behind the query, half for those before it;
            otherwise all keys behind it (not seen under a causal mask) share the bucket of 0.
    """

    buckets: Tensor

    def __init__(
        self,
        num_heads: int,
        max_distance: int = 128,
        num_buckets: int = 32,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        integer("num_heads", num_heads)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.buckets_per_side = _buckets_per_side(num_buckets, max_distance, bidirectional)
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        nn.init.trunc_normal_(self.relative_attention_bias.weight, std=0.02)
        self.register_buffer("buckets", self._make_buckets(), persistent=False)

    def bucket(self, distance: Tensor) -> Tensor:
        """The entry for each key position minus query position, of the same shape."""
        if not self.bidirectional:
            return self._side(-distance.clamp(max=0))
        return self._side(distance.abs()) + (distance > 0) * self.buckets_per_side

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RelativeBias1d:
        """Buckets are made anew on each move: `to_empty` would leave them without values."""
        super()._apply(fn, recurse)
        self.buckets = self._make_buckets()
        return self

    def _make_buckets(self) -> Tensor:
        """On the CPU first: another device's log() may round an edge to the other bucket."""
        buckets = _buckets(self.buckets_per_side, self.max_distance)
        return buckets.to(self.relative_attention_bias.weight.device)

    def _side(self, distance: Tensor) -> Tensor:
        return self.buckets[distance.clamp(max=self.max_distance)]

    def _values(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        return _look_up(self.relative_attention_bias.weight, self.bucket(cols - (rows + j - i)))


class RelativeBiasGrid(PositionBias):
    """One value per head and offset in rows and columns (Swin, arXiv 2103.14030).

    Entries are row by row, from offset (1 - y, 1 - x) to (y - 1, x - 1), query minus key, as in
    timm. With prefix tokens three more follow (BEiT, arXiv 2106.08254): prefix to grid, grid to
    prefix and prefix to prefix, the query named first.

    Args:
        grid: (rows, columns), row by row; the tokens are the prefix and then the grid's.
    """

    def __init__(self, num_heads: int, grid: tuple[int, int], num_prefix_tokens: int = 0) -> None:
        super().__init__()
        integer("num_heads", num_heads)
        self.grid = check_grid(grid)
        self.num_prefix_tokens = check_prefix(num_prefix_tokens)
        entries = _num_offsets(self.grid) + (3 if num_prefix_tokens else 0)
        self.relative_position_bias_table = nn.Parameter(torch.empty(entries, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def _check_counts(self, i: int, j: int) -> None:
        check_tokens("i", i, self.num_prefix_tokens, self.grid)
        check_tokens("j", j, self.num_prefix_tokens, self.grid)

    def _values(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        return _look_up(self.relative_position_bias_table, self._index(rows, cols))

    def _index(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Entries of the table; an index is linear in the offsets, so a difference of places."""
        y, x = self.grid
        prefix = self.num_prefix_tokens
        stride = 2 * x - 1
        center = (y - 1) * stride + x - 1
        index = _place(rows - prefix, x, stride) - _place(cols - prefix, x, stride) + center
        if not prefix:
            return index
        extra = _num_offsets(self.grid)
        from_prefix, to_prefix = rows < prefix, cols < prefix
        index = torch.where(from_prefix, extra, index)
        return torch.where(to_prefix, extra + 1 + from_prefix.long(), index)


class PriorBias(PositionBias):
    """A learnable bias towards given places: one value per head and key, for every query.

    Args:
        size: The number of keys, or (rows, columns) of their grid; without the prefix.
        places: (n,) positive weights of all keys, prefix included; the bias starts as their
            logarithm in every head, so that equal scores attend in proportion to them. By
            default it starts at zero.
    """

    def __init__(
        self,
        num_heads: int,
        size: Size,
        num_prefix_tokens: int = 0,
        *,
        places: Tensor | None = None,
    ) -> None:
        super().__init__()
        integer("num_heads", num_heads)
        self.size = _check_size(size)
        self.num_prefix_tokens = check_prefix(num_prefix_tokens)
        n = num_prefix_tokens + math.prod(self.size)
        self.prior = nn.Parameter(torch.zeros(n, num_heads))
        if places is not None:
            _check_places(places, n)
            with torch.no_grad():
                self.prior.copy_(places.double().log()[:, None])

    def _check_counts(self, i: int, j: int) -> None:
        check_tokens("j", j, self.num_prefix_tokens, self.size)

    def _values(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        shape = torch.broadcast_shapes(rows.shape, cols.shape)
        cols = cols[(None,) * (len(shape) - cols.ndim)]
        return _look_up(self.prior, cols).expand(1, -1, *shape)


def resample_table(table: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """A `RelativeBiasGrid` table for another grid: (entries h) -> (entries' h).

    Bicubic in fp32, returned in the dtype of `table`. The three entries of prefix tokens stay as
    they are, and everything does where the grids are equal.
    """
    old_grid, new_grid = check_grid(old_grid), check_grid(new_grid)
    entries = _num_offsets(old_grid)
    if table.ndim != 2 or table.shape[0] not in (entries, entries + 3):
        raise ValueError(
            f"table must be ({entries}, h), or ({entries + 3}, h) with prefix tokens, for a grid "
            f"of {old_grid}, got {tuple(table.shape)}"
        )
    old, new = _offsets(old_grid), _offsets(new_grid)
    resampled = resample_grid(table[None, :entries], old, new, num_prefix_tokens=0, antialias=False)
    return torch.cat([resampled[0], table[entries:]])


def resample_prior(
    prior: Tensor, old_size: Size, new_size: Size, *, num_prefix_tokens: int = 0
) -> Tensor:
    """A `PriorBias` for another length (linear) or grid (bicubic): (n h) -> (n' h).

    In fp32, returned in the dtype of `prior`. Sizes are without the prefix tokens, whose values
    stay as they are.
    """
    old, new = _check_size(old_size), _check_size(new_size)
    if len(old) != len(new):
        raise ValueError(f"old_size ({old_size}) and new_size ({new_size}) must be of one kind")
    if prior.ndim != 2:
        raise ValueError(f"prior must be (n, h), got {tuple(prior.shape)}")
    check_tokens("prior", prior.shape[0], num_prefix_tokens, old)
    if len(old) == 1:
        length = num_prefix_tokens + new[0]
        return resample_1d(prior[None], length, num_prefix_tokens=num_prefix_tokens)[0]
    old_grid, new_grid = (old[0], old[1]), (new[0], new[1])
    return resample_grid(prior[None], old_grid, new_grid, num_prefix_tokens=num_prefix_tokens)[0]


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """(entries h), *P -> (1 h *P)

    By `index_select` on the transpose: contiguous, and twice as fast as `table[index]`, backward
    included. At least fp32 inside: the gradient of an entry is a sum over many pairs.
    """
    wide = table.t().to(torch.promote_types(table.dtype, torch.float32))
    values = wide.index_select(1, index.flatten()).to(table.dtype)
    return values.view(1, table.shape[1], *index.shape)


def _buckets(per_side: int, max_distance: int) -> Tensor:
    """The bucket of each distance from 0 to `max_distance`, by T5's formula in fp32."""
    exact = per_side // 2
    distance = torch.arange(max_distance + 1, device="cpu")
    scale = math.log(max_distance / exact)
    ratio = distance.clamp(min=exact).float() / exact
    wide = exact + (ratio.log() / scale * (per_side - exact)).long()
    return torch.where(distance < exact, distance, wide.clamp(max=per_side - 1))


def _place(token: Tensor, x: int, stride: int) -> Tensor:
    """Where a token of a grid with `x` columns is in one whose rows are `stride` apart."""
    return token.div(x, rounding_mode="floor") * stride + token % x


def _offsets(grid: tuple[int, int]) -> tuple[int, int]:
    return 2 * grid[0] - 1, 2 * grid[1] - 1


def _num_offsets(grid: tuple[int, int]) -> int:
    return math.prod(_offsets(grid))


def _buckets_per_side(num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    integer("num_buckets", num_buckets, minimum=None)
    integer("max_distance", max_distance, minimum=None)
    sides = 2 if bidirectional else 1
    per_side = num_buckets // sides
    if per_side < 2 or num_buckets % sides:
        legal = "even and at least 4 (bidirectional)" if bidirectional else "at least 2"
        raise ValueError(f"num_buckets ({num_buckets}) must be {legal}")
    if max_distance <= per_side // 2:
        raise ValueError(
            f"max_distance ({max_distance}) must exceed {per_side // 2}, the distances that have "
            f"a bucket each with num_buckets ({num_buckets})"
        )
    return per_side


def _check_size(size: Size) -> tuple[int, ...]:
    if isinstance(size, (tuple, list)):
        return check_grid(size)
    if not is_integer(size) or size < 1:
        raise ValueError(f"size ({size!r}) must be at least 1, or (rows, columns)")
    return (int(size),)


def _check_places(places: Tensor, n: int) -> None:
    if places.shape != (n,):
        raise ValueError(f"places must be ({n},), prefix included, got {tuple(places.shape)}")
    if not bool(((places > 0) & (places < math.inf)).all()):
        raise ValueError(
            f"places must be positive and finite, got {places.min():g} to {places.max():g}"
        )


def _check_positions(name: str, positions: Tensor, size: int) -> None:
    """On the CPU a ValueError; on CUDA an assertion that does not wait for the device."""
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {positions.dtype}")
    if positions.device.type not in ("cpu", "cuda"):
        return
    message = f"{name} must lie in [0, {size})"
    inside = ((positions >= 0) & (positions < size)).all()
    if positions.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(inside, message)
    elif not inside:
        raise ValueError(f"{message}, got {positions.min()} to {positions.max()}")
