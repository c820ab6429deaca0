"""Sparse kinds: each query sees near keys and a few far ones, computed by blocks.

No kind builds the (i j) matrix: queries are cut into blocks, the keys that a block may see are
laid side by side, and the attention core runs on the blocks. Time and memory grow with
i * (keys seen).

With queries and keys of different number, positions are those of the keys and the last query is
aligned with the last key, as causal masks are: query p stands at place p + (j - i).

Shapes: b batch, h heads, i/j query/key positions, n blocks, t tokens of a block, s keys laid out
for a block, e head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.layers import flex
from zoo.layers.attention import attend, explicit_now
from zoo.layers.check import integer, is_integer
from zoo.layers.core import Core
from zoo.layers.factory import register_attention
from zoo.layers.flex import Rule
from zoo.layers.mask import Mask
from zoo.layers.rope import check_grid
from zoo.layers.scores import as_autocast, attention_weights, score_range
from zoo.layers.tap import Tap
from zoo.rng import generator

_FARTHEST = 1024.0  # blocks between a block and one drawn at random, at most
_DRAWN = 64  # blocks whose random blocks are drawn together
_SMALLEST = 32  # tokens of a block of a sliding window: smaller ones cost more than they save


@dataclass(frozen=True)
class Layout:
    """Where the keys of each block come from.

    Attributes:
        size: Tokens of a block.
        first: Place of the first block's first token, at or before the first query's.
        blocks: Number of blocks.
        reach: How many blocks to the left and right are near.
        columns: Places that every block sees: (c,).
        far: Further places of each block, -1 for none: (n f).
        random: Numbers of further key blocks of each block, -1 for none: (n r).
        places: Place of each laid-out key, -1 for none: (n s).
        allowed: Which of them each query sees: (1 1 n t s); None: all.
    """

    size: int
    first: int
    blocks: int
    reach: int
    columns: Tensor
    far: Tensor | None
    random: Tensor | None
    places: Tensor
    allowed: Tensor | None


class Sparse(Core):
    """Blocks of queries and the keys they see; subclasses say which by `near` and `columns`.

    Args:
        num_global: The first tokens see all and are seen by all.
    """

    reach: ClassVar[int] = 0

    def __init__(self, num_heads: int, head_dim: int, size: int, num_global: int = 0) -> None:
        super().__init__(num_heads, head_dim)
        self.size, self.num_global = size, integer("num_global", num_global, minimum=0)
        self._layouts: dict[tuple[int, int, torch.device], Layout] = {}
        self._flex: dict[tuple[int, bool, torch.device], tuple[Rule, flex.Blocks]] = {}

    def offset(self) -> int:
        """Blocks start at multiples of the size, minus this."""
        return 0

    def near(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Which keys of the near blocks a query sees, by place; None: all."""
        return None

    def is_column(self, cols: Tensor, j: int) -> Tensor:
        """Which places, of j, all queries see."""
        return (cols >= 0) & (cols < self.num_global)

    def columns(self, j: int) -> Tensor:
        """These places: (c)."""
        places = torch.arange(j)
        return places[self.is_column(places, j)]

    def is_far(self, blocks: Tensor, cols: Tensor) -> Tensor | None:
        """Which single places the blocks of these numbers see beside; None: none."""
        return None

    def far(self, blocks: Tensor) -> Tensor | None:
        """These places, also such as no key stands at: (n) -> (n f)."""
        return None

    def random_blocks(self, keys: int) -> Tensor | None:
        """Numbers of the key blocks that each of `keys` blocks sees at random: (keys r)."""
        return None

    def sees(self, rows: Tensor, cols: Tensor, j: int) -> Tensor:
        """What the kind allows, by place: the meaning of its layout, as a mask (*P)."""
        return self.rule(j, cols.device)(rows, cols)

    def rule(self, j: int, device: torch.device) -> Rule:
        """The same as a function of places, of elementwise operations only."""
        random = self.random_blocks(self._count(j))
        table = None if random is None else random.to(device)

        def seen(rows: Tensor, cols: Tensor) -> Tensor:
            row_block, col_block = self._block(rows), self._block(cols)
            allowed = (row_block - col_block).abs() <= self.reach
            near = self.near(rows, cols)
            allowed = allowed if near is None else allowed & near
            allowed = allowed | self.is_column(cols, j)
            far = self.is_far(row_block, cols)
            allowed = allowed if far is None else allowed | far
            if table is not None:
                known = row_block.clamp(0, len(table) - 1)
                for number in range(table.shape[1]):
                    allowed = allowed | ((table[known, number] == col_block) & (row_block >= 0))
            return allowed | ((rows >= 0) & (rows < self.num_global))

        return seen

    def _block(self, places: Tensor) -> Tensor:
        return (places + self.offset()).div(self.size, rounding_mode="floor")

    def _count(self, j: int) -> int:
        return (j + self.offset() - 1) // self.size + 1

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        *,
        bias: Any = None,
        dropout_p: float = 0.0,
        tap: Tap | None = None,
    ) -> Tensor:
        if tap is not None:
            tap.record(lambda: self._seen_by(attention_weights, q, k, mask, bias))
            tap.show("logits", lambda: self._seen_by(score_range, q, k, mask, bias))
        if flex.serves(q, k, mask, bias, dropout_p) and not explicit_now():
            return flex.or_blocked(
                lambda: self._by_flex(q, k, v, mask),
                lambda: self._by_block_and_row(q, k, v, mask, bias, dropout_p),
            )
        return self._by_block_and_row(q, k, v, mask, bias, dropout_p)

    def _by_flex(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """The same by FlexAttention, where it `serves`."""
        q, k, v = as_autocast(q, k, v)
        n, causal = q.shape[-2], flex.is_causal(mask)
        known = self._flex.get((n, causal, q.device))
        if known is None:
            rule = self.rule(n, q.device)
            known = rule, flex.find_blocks(rule, n, causal, q.device)
            if len(self._flex) > 1:
                self._flex = {}
            self._flex[n, causal, q.device] = known
        return flex.attend_in_blocks(q, k, v, *known, mask)

    def _by_block_and_row(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Any,
        dropout_p: float,
    ) -> Tensor:
        """By blocks, and the queries that see all by themselves."""
        i, j = q.shape[-2], k.shape[-2]
        out = self._by_block(q, k, v, mask, bias, dropout_p)
        first, last = max(0, i - j), max(0, i - j + self.num_global)
        if first >= min(last, i):
            return out
        rows = torch.arange(first, min(last, i), device=q.device)
        seeing_all = _attend_at(q[:, :, first:last], k, v, rows, mask, bias, dropout_p, i, j)
        return torch.cat([out[:, :, :first], seeing_all, out[:, :, last:]], dim=2)

    def _seen_by(
        self,
        measure: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        mask: Mask | None,
        bias: Any,
    ) -> Tensor:
        """What `attention_weights` or `score_range` says of the pairs that the kind allows."""
        i, j = q.shape[-2], k.shape[-2]
        rows = torch.arange(i, device=q.device)[:, None] + (j - i)
        allowed = Mask.dense(self.sees(rows, torch.arange(j, device=q.device)[None], j)) & mask
        added = None if bias is None else bias.lower(i, j)
        return measure(q, k, allowed, bias=added)

    def _layout(self, i: int, j: int, device: torch.device) -> Layout:
        layout = self._layouts.get((i, j, device))
        if layout is None:
            with torch.inference_mode(False):  # usable under autograd whoever asked first
                layout = self._make_layout(i, j, device)
            if len(self._layouts) > 1:  # training's and evaluation's; others come and go
                self._layouts = {}
            self._layouts[i, j, device] = layout
        return layout

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make their own tables."""
        return {**self.__dict__, "_layouts": {}, "_flex": {}}

    def _make_layout(self, i: int, j: int, device: torch.device) -> Layout:
        size, offset = self.size, self.offset()
        start = (j - i + offset) // size  # number of the first query's block
        first = start * size - offset
        blocks = -(-(j - first) // size)
        numbers = torch.arange(blocks, device=device)[:, None]
        near = torch.arange((2 * self.reach + 1) * size, device=device) - self.reach * size
        near = first + numbers * size + near  # n s
        columns = self.columns(j).to(device)
        elsewhere = torch.isin(near, columns)
        is_far, far = self.is_far(start + numbers, near), self.far(start + numbers[:, 0])
        if is_far is not None:
            elsewhere = elsewhere | is_far
        places = [near.masked_fill(elsewhere | (near < 0) | (near >= j), -1)]
        places.append(columns.expand(blocks, -1))
        if far is not None:
            far = far.masked_fill((far < 0) | (far >= j) | torch.isin(far, columns), -1)
            far = far[:, (far >= 0).any(0)]  # what no block has costs nothing
            places.append(far)
        random = self._random(start, blocks, j, device)
        if random is not None:
            inner = torch.arange(size, device=device)
            drawn = random[..., None] * size - offset + inner  # n r t
            bad = (random < 0)[..., None] | torch.isin(drawn, columns) | (drawn < 0) | (drawn >= j)
            places.append(drawn.masked_fill(bad, -1).flatten(1))
        laid_out = torch.cat(places, 1)
        allowed = self._allowed(first + torch.arange(blocks * size, device=device), laid_out)
        return Layout(size, first, blocks, self.reach, columns, far, random, laid_out, allowed)

    def _allowed(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """By place: (n t) queries in a row, (n s) keys -> (1 1 n t s); None where all is seen."""
        rows, cols = rows.view(len(cols), -1, 1), cols[:, None]
        near_keys = (2 * self.reach + 1) * self.size
        near = self.near(rows, cols[..., :near_keys])
        allowed = cols >= 0
        if near is not None:
            allowed = allowed & F.pad(near, (0, cols.shape[-1] - near_keys), value=True)
        return None if bool(allowed.all()) else allowed[None, None]

    def _random(self, start: int, blocks: int, j: int, device: torch.device) -> Tensor | None:
        table = self.random_blocks(self._count(j))
        if table is None:
            return None
        before = table.new_full((max(0, -start), table.shape[1]), -1)
        return torch.cat([before, table[max(0, start) :]])[:blocks].to(device)

    def _by_block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Any,
        dropout_p: float,
    ) -> Tensor:
        i, j = q.shape[-2], k.shape[-2]
        layout = self._layout(i, j, q.device)
        front = (j - i) - layout.first  # places of the first block before the first query
        total = layout.blocks * layout.size
        blocks = F.pad(q, (0, 0, front, total - front - i)).unflatten(2, (layout.blocks, -1))
        keys, values = (_lay_out(x, layout) for x in (k, v))
        # As numbers of queries and keys, which masks and biases speak of.
        rows = (torch.arange(total, device=q.device) - front).clamp(0, i - 1)
        rows, cols = rows.view(layout.blocks, -1, 1), layout.places[:, None].clamp(min=0)
        allowed = layout.allowed
        if mask is not None:
            ruled = mask.at(rows, cols, i, j)
            allowed = ruled if allowed is None else allowed & ruled
        added = None if bias is None else bias.at(rows, cols, i, j)
        out = _attend_blocks(blocks, keys, values, allowed, added, dropout_p)
        return out.flatten(2, 3)[:, :, front : front + i]


def _lay_out(x: Tensor, layout: Layout) -> Tensor:
    """(b h j e) -> the keys, or values, of each block side by side: (b h n s e)."""
    size, reach, j = layout.size, layout.reach, x.shape[2]
    start = layout.first - reach * size
    end = start + (layout.blocks + 2 * reach) * size
    cut = F.pad(x, (0, 0, -start, end - j)).unflatten(2, (-1, size))
    parts = [cut[:, :, o : o + layout.blocks] for o in range(2 * reach + 1)]
    if len(layout.columns):
        shared = x[:, :, layout.columns] if len(layout.columns) < j else x
        parts.append(shared[:, :, None].expand(-1, -1, layout.blocks, -1, -1))
    if layout.far is not None:
        parts.append(x[:, :, layout.far.clamp(min=0)])
    if layout.random is not None:
        lead = -layout.first % size  # key block 0 may start before the first key
        aligned = F.pad(x, (0, 0, lead, -(j + lead) % size)).unflatten(2, (-1, size))
        parts.append(aligned[:, :, layout.random.clamp(min=0)].flatten(3, 4))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def _attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """(b h n t e), (b h n s e), (b h n s e) -> (b h n t e): the core, with blocks as its heads."""
    b, h, n = q.shape[:3]
    same = allowed is None or allowed.shape[:2] == (1, 1)
    if same and bias is None:  # batch and heads as the batch, so that one mask serves all
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = attend(q, k, v, None if allowed is None else allowed[0], dropout_p=dropout_p)
        return out.unflatten(0, (b, h))
    q, k, v = (x.flatten(1, 2) for x in (q, k, v))
    mask, added = (
        None if x is None else x.expand(-1, h, n, -1, -1).flatten(1, 2) for x in (allowed, bias)
    )
    return attend(q, k, v, mask, bias=added, dropout_p=dropout_p).unflatten(1, (h, n))


def _attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    mask: Mask | None,
    bias: Any,
    dropout_p: float,
    i: int,
    j: int,
) -> Tensor:
    """Exact attention of some queries, the `rows`, to all keys."""
    cols = torch.arange(j, device=q.device)[None]
    allowed = None if mask is None else mask.at(rows[:, None], cols, i, j)
    added = None if bias is None else bias.at(rows[:, None], cols, i, j)
    return attend(q, k, v, allowed, bias=added, dropout_p=dropout_p)


@register_attention("block")
class Block(Sparse):
    """Full attention inside blocks, and a few global tokens.

    Args:
        block_size: Tokens of a block.
        num_global: The first tokens see all and are seen by all.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, block_size: int = 128, num_global: int = 1
    ) -> None:
        super().__init__(num_heads, head_dim, integer("block_size", block_size), num_global)


@register_attention("window")
class Window(Sparse):
    """Full attention inside windows of a sequence or, with `grid`, of an image (Swin, 2103.14030).

    Args:
        window: Tokens of a window, or its rows and columns; one number does for both on a grid.
        shift: Moves the windows by half a window, or by so many tokens (rows, columns), so that
            layers in turn connect neighbours. Windows are cut at the borders, not wrapped around.
        grid: Rows and columns of the patches, which follow the prefix tokens.
        num_global: Prefix tokens, such as the class token: they see all and are seen by all.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int | Sequence[int] = 7,
        shift: bool | int | Sequence[int] = False,
        grid: Sequence[int] | None = None,
        num_global: int = 0,
    ) -> None:
        self.grid = None if grid is None else check_grid(grid)
        self.window = _window(window, self.grid)
        self.shift = _shift(shift, self.window)
        if self.grid is not None:
            self.unsteady = "its windows are cut from a whole grid; leave grid out for a sequence"
        super().__init__(num_heads, head_dim, math.prod(self.window), num_global)
        self._windows: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def offset(self) -> int:
        return self.shift[0] if self.grid is None else 0

    def rule(self, j: int, device: torch.device) -> Rule:
        if self.grid is None:
            return super().rule(j, device)
        self._check_length(j)

        def seen(rows: Tensor, cols: Tensor) -> Tensor:
            same = self._number(rows) == self._number(cols)
            return same | (cols < self.num_global) | (rows < self.num_global)

        return seen

    def _number(self, places: Tensor) -> Tensor:
        """Which window of the grid a token lies in."""
        assert self.grid is not None
        patch = places - self.num_global
        row, col = patch.div(self.grid[1], rounding_mode="floor"), patch % self.grid[1]
        per_row = self.grid[1] // self.window[1] + 2
        return (row + self.shift[0]) // self.window[0] * per_row + (
            col + self.shift[1]
        ) // self.window[1]

    def _check_length(self, *lengths: int) -> None:
        assert self.grid is not None
        expected = self.num_global + math.prod(self.grid)
        if any(length != expected for length in lengths):
            raise ValueError(
                f"window attention on a grid of {self.grid} with {self.num_global} global tokens "
                f"takes {expected} queries and keys, got {' and '.join(map(str, lengths))}"
            )

    def _by_block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Any,
        dropout_p: float,
    ) -> Tensor:
        if self.grid is None:
            return super()._by_block(q, k, v, mask, bias, dropout_p)
        i, j = q.shape[-2], k.shape[-2]
        self._check_length(i, j)
        table, inverse = self._table(q.device)
        blocks, keys, values = (x[:, :, table.clamp(min=0)] for x in (q, k, v))
        places = table  # n s
        if self.num_global:
            keys, values = (
                torch.cat([x[:, :, : self.num_global, None].transpose(2, 3).expand(
                    -1, -1, len(table), -1, -1), near], 3)
                for x, near in ((k, keys), (v, values))
            )  # fmt: skip
            prefix = torch.arange(self.num_global, device=q.device).expand(len(table), -1)
            places = torch.cat([prefix, table], 1)
        whole = table.numel() == j - self.num_global  # no window is cut at a border
        allowed = None if whole else (places >= 0)[None, None, :, None]
        rows, cols = table.clamp(min=0)[..., None], places.clamp(min=0)[:, None]
        if mask is not None:
            ruled = mask.at(rows, cols, i, j)
            allowed = ruled if allowed is None else allowed & ruled
        added = None if bias is None else bias.at(rows, cols, i, j)
        out = _attend_blocks(blocks, keys, values, allowed, added, dropout_p).flatten(2, 3)
        prefix_rows = out.new_zeros(*out.shape[:2], self.num_global, out.shape[-1])
        return torch.cat([prefix_rows, out[:, :, inverse]], 2)

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens of each window, -1 for none (n t); place of each patch in that table."""
        if device not in self._windows:
            with torch.inference_mode(False):  # usable under autograd whoever asked first
                self._windows[device] = self._make_table(device)
        return self._windows[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_windows": {}}

    def _make_table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.grid is not None
        axes = [
            torch.arange(-shift, -(-(size + shift) // side) * side - shift).unflatten(0, (-1, side))
            for size, side, shift in zip(self.grid, self.window, self.shift, strict=True)
        ]
        row, col = axes[0][:, None, :, None], axes[1][None, :, None, :]
        inside = (row >= 0) & (row < self.grid[0]) & (col >= 0) & (col < self.grid[1])
        table = (self.num_global + row * self.grid[1] + col).masked_fill(~inside, -1)
        table = table.flatten(2).flatten(0, 1)
        inverse = table.flatten().argsort()[-math.prod(self.grid) :]
        return table.to(device), inverse.to(device)


def _window(window: int | Sequence[int], grid: tuple[int, int] | None) -> tuple[int, ...]:
    """The sides of a window: one number, or (rows, columns) on a grid."""
    axes = 1 if grid is None else 2
    sides = tuple(window) if isinstance(window, Sequence) else (window,)
    if len(sides) == 1:
        sides *= axes
    if len(sides) != axes or not all(is_integer(side) and side >= 1 for side in sides):
        raise ValueError(
            f"window {window!r} must be an integer of at least 1, or (rows, columns) of them on "
            f"a grid; grid is {grid}"
        )
    if grid is not None and any(w > g for w, g in zip(sides, grid, strict=True)):
        raise ValueError(f"window {sides} must fit into the grid {grid}")
    return tuple(int(side) for side in sides)


def _shift(shift: bool | int | Sequence[int], window: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(shift, bool):
        return tuple(side // 2 if shift else 0 for side in window)
    shifts = tuple(shift) if isinstance(shift, Sequence) else (shift,) * len(window)
    if len(shifts) != len(window) or any(
        not is_integer(s) or not 0 <= s < w for s, w in zip(shifts, window, strict=True)
    ):
        raise ValueError(
            f"shift {shift!r} must be True, False, or integers in [0, window) on each axis of "
            f"window {window}"
        )
    return tuple(int(s) for s in shifts)


class Sliding(Sparse):
    """Each query sees the keys at most `radius` places away."""

    reach = 1

    def __init__(self, num_heads: int, head_dim: int, window: int, num_global: int = 0) -> None:
        self.radius = integer("window", window) // 2
        super().__init__(num_heads, head_dim, max(_SMALLEST, self.radius), num_global)

    def near(self, rows: Tensor, cols: Tensor) -> Tensor:
        return (rows - cols).abs() <= self.radius


@register_attention("longformer")
class Longformer(Sliding):
    """A sliding window and global tokens (arXiv 2004.05150), global ones with the same projections.

    Args:
        window: Each query sees itself and window // 2 keys to either side.
        num_global: The first tokens see all and are seen by all.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, window: int = 256, num_global: int = 1
    ) -> None:
        super().__init__(num_heads, head_dim, window, num_global)


@register_attention("strided")
class Strided(Sliding):
    """The nearest keys and, farther out, every stride-th (Sparse Transformer, 1904.10509).

    Args:
        window: Each query sees itself and window // 2 keys to either side.
        stride: Interval of the far keys, which stand at places stride - 1, 2 stride - 1, ...
        num_far: Far keys of a query, half of them to either side, so that cost is linear in the
            length; fewer near the ends.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int = 128,
        stride: int = 64,
        num_far: int = 64,
    ) -> None:
        super().__init__(num_heads, head_dim, window)
        self.stride, self.num_far = integer("stride", stride), integer("num_far", num_far)

    def is_far(self, blocks: Tensor, cols: Tensor) -> Tensor:
        number = cols.div(self.stride, rounding_mode="floor") - self._first_far(blocks)
        at_interval = (cols >= 0) & ((cols + 1) % self.stride == 0)
        return at_interval & (number >= 0) & (number < self.num_far)

    def far(self, blocks: Tensor) -> Tensor:
        numbers = self._first_far(blocks)[:, None] + torch.arange(
            self.num_far, device=blocks.device
        )
        return (numbers + 1) * self.stride - 1

    def _first_far(self, blocks: Tensor) -> Tensor:
        """Number, from 0, of the first far key of each block."""
        middle = blocks * self.size - self.offset() + self.size // 2
        return middle.div(self.stride, rounding_mode="floor") - self.num_far // 2


@register_attention("bigbird")
class BigBird(Sparse):
    """Neighbouring blocks, random blocks and global tokens (arXiv 2007.14062).

    Args:
        block_size: Tokens of a block; a query sees its own block and the one to either side.
        num_random: Further blocks, near ones more often than far ones; fewer near the ends.
        num_global: The first tokens see all and are seen by all.
        seed: Of the random blocks.
    """

    reach = 1

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        block_size: int = 64,
        num_random: int = 3,
        num_global: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, head_dim, integer("block_size", block_size), num_global)
        self.num_random = integer("num_random", num_random, minimum=0)
        self.seed = integer("seed", seed, minimum=None)

    def random_blocks(self, keys: int) -> Tensor | None:
        """Blocks beyond the neighbours, without repetition; -1 where a drawn one does not exist.

        The distance is drawn for each block by itself, even on a logarithmic scale, so that the
        blocks of a sequence stay the same when another follows them.
        """
        if not self.num_random or keys <= self.reach + 1:
            return None
        table = torch.cat([self._drawn(part) for part in range(-(-keys // _DRAWN))])[:keys]
        return table.masked_fill(table >= keys, -1)

    def _drawn(self, part: int) -> Tensor:
        """Of the blocks part * _DRAWN, ...: (_DRAWN r), whether or not they exist."""
        rng = generator(self.seed, "bigbird", part)
        tries = 8 * self.num_random
        exponents, sides = torch.rand(2, _DRAWN, tries, generator=rng)
        far = (self.reach + _FARTHEST**exponents).long()
        block = part * _DRAWN + torch.arange(_DRAWN)[:, None]
        drawn = block + far * torch.where(sides < 0.5, -1, 1)
        earlier = (drawn[:, :, None] == drawn[:, None]).tril(-1).any(-1)
        order = (earlier | (drawn < 0)).int().argsort(dim=1, stable=True)[:, : self.num_random]
        refused = (earlier | (drawn < 0)).gather(1, order)
        return drawn.gather(1, order).masked_fill(refused, -1)
