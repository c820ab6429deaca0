"""Masks with one meaning: bool, True = may attend, broadcastable to (b h i j).

A `Mask` is a rule that becomes a tensor only when the numbers of queries and keys are known, so
that rules combine by `&` and `|` first and are filled in once, inside the attention core.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


class Mask:
    """A rule about which query may attend to which key; see the static methods for the kinds.

    >>> mask = Mask.causal() & Mask.padding([2, 3])
    >>> mask.lower(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    """

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        """The rule for chosen pairs of `i` queries and `j` keys.

        `rows` (queries) and `cols` (keys) are positions of one shape *P, or broadcast to it; the
        answer is bool, broadcastable to (b h *P). So sparse kinds never build (i j).
        """
        raise NotImplementedError

    def lower(self, i: int, j: int, device: torch.device | str | None = None) -> Tensor:
        """The rule for `i` queries and `j` keys: bool, four axes, broadcastable to (b h i j)."""
        rows, cols = torch.arange(i, device=device), torch.arange(j, device=device)
        return self.at(rows[:, None], cols[None], i, j)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Refuses a rule that does not fit scores of `shape`, (b, h, i, j)."""

    def rules(self) -> list[Mask]:
        """The rules that must all hold."""
        return [self]

    @property
    def kind(self) -> str:
        """padding, causal, segment or dense: what an attention kind says it supports."""
        return type(self).__name__.lower()

    def __and__(self, other: MaskLike) -> Mask:
        """May attend where both rules allow it; None allows everything."""
        rule = Mask.of(other)
        return self if rule is None else Both(self, rule)

    def __or__(self, other: Mask | Tensor) -> Mask:
        """May attend where either rule allows it."""
        rule = Mask.of(other)
        if rule is None:
            raise TypeError("mask | None allows everything: pass no mask instead")
        return Either(self, rule)

    def __rand__(self, other: Tensor) -> Mask:
        return self & other

    def __ror__(self, other: Tensor) -> Mask:
        return self | other

    @staticmethod
    def padding(lengths: Tensor | Sequence[int]) -> Mask:
        """Keys at or beyond a sample's length are forbidden; `lengths` is (b,)."""
        return Padding(_integers("lengths", lengths, "b"))

    @staticmethod
    def causal() -> Mask:
        """No query sees a later key; the last query is aligned with the last key (bottom right)."""
        return Causal()

    @staticmethod
    def segment(ids_q: Tensor, ids_k: Tensor | None = None) -> Mask:
        """Only the same segment: `ids_q` (b i) equals `ids_k` (b j), by default `ids_q` itself."""
        ids_q = _integers("ids_q", ids_q, "b i")
        return Segment(ids_q, ids_q if ids_k is None else _integers("ids_k", ids_k, "b j"))

    @staticmethod
    def dense(allowed: Tensor) -> Mask:
        """An arbitrary bool tensor, True = may attend, broadcastable to (b h i j)."""
        return Dense(_boolean(allowed))

    @staticmethod
    def of(mask: MaskLike) -> Mask | None:
        """None, a `Mask` or a bool tensor as a `Mask`; anything else is refused."""
        return mask if mask is None or isinstance(mask, Mask) else Dense(_boolean(mask))


MaskLike: TypeAlias = Mask | Tensor | None


# Compared by identity: the fields are tensors, whose == is elementwise.
@dataclass(frozen=True, eq=False)
class Padding(Mask):
    lengths: Tensor  # b

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        return cols < _leading(self.lengths.to(cols.device), cols)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        _check_sizes((len(self.lengths), 1, 1, shape[3]), shape)
        if self.lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = self.lengths[(self.lengths < 0) | (self.lengths > shape[3])].tolist()
            if wrong:
                raise ValueError(f"lengths ({wrong[:8]}) must lie in [0, {shape[3]}], all the keys")


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        return (cols <= rows + (j - i))[None, None]


@dataclass(frozen=True, eq=False)
class Segment(Mask):
    ids_q: Tensor  # b i
    ids_k: Tensor  # b j

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        if (self.ids_q.shape[1], self.ids_k.shape[1]) != (i, j):
            raise ValueError(
                f"segment mask has ids_q {tuple(self.ids_q.shape)} and ids_k "
                f"{tuple(self.ids_k.shape)}, but there are {i} queries and {j} keys"
            )
        same = self.ids_q.to(rows.device)[:, rows] == self.ids_k.to(cols.device)[:, cols]
        return same[:, None]

    def check(self, shape: tuple[int, int, int, int]) -> None:
        for name, ids, n in (("ids_q", self.ids_q, shape[2]), ("ids_k", self.ids_k, shape[3])):
            if ids.shape[0] not in (1, shape[0]) or ids.shape[1] != n:
                raise ValueError(
                    f"segment mask has {name} {tuple(ids.shape)}, which must be ({shape[0]}, {n}) "
                    f"for scores (b, h, i, j) = {shape}"
                )


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    allowed: Tensor  # broadcastable to b h i j

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        allowed = self.lower(i, j, rows.device)
        if allowed.shape[2] not in (1, i) or allowed.shape[3] not in (1, j):
            raise ValueError(
                f"mask {tuple(self.allowed.shape)} does not broadcast to (b, h, i, j) = "
                f"(b, h, {i}, {j}); a padding mask is (b, 1, 1, j)"
            )
        rows, cols = (
            positions if size > 1 else torch.zeros_like(positions)
            for positions, size in zip((rows, cols), allowed.shape[2:], strict=True)
        )
        return allowed[:, :, rows, cols]

    def check(self, shape: tuple[int, int, int, int]) -> None:
        _check_sizes(tuple(self.allowed.shape), shape)

    def lower(self, i: int, j: int, device: torch.device | str | None = None) -> Tensor:
        missing = 4 - self.allowed.ndim
        return self.allowed.to(device)[(None,) * missing]

    @property
    def kind(self) -> str:
        """A tensor that says the same for all heads and queries is a padding mask."""
        shared = self.lower(1, 1).shape[1:3] == (1, 1)
        return "padding" if shared else "dense"


@dataclass(frozen=True, eq=False)
class Both(Mask):
    left: Mask
    right: Mask

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        return self.left.at(rows, cols, i, j) & self.right.at(rows, cols, i, j)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        self.left.check(shape)
        self.right.check(shape)

    def lower(self, i: int, j: int, device: torch.device | str | None = None) -> Tensor:
        return self.left.lower(i, j, device) & self.right.lower(i, j, device)

    def rules(self) -> list[Mask]:
        return [*self.left.rules(), *self.right.rules()]


@dataclass(frozen=True, eq=False)
class Either(Mask):
    left: Mask
    right: Mask

    def at(self, rows: Tensor, cols: Tensor, i: int, j: int) -> Tensor:
        return self.left.at(rows, cols, i, j) | self.right.at(rows, cols, i, j)

    def check(self, shape: tuple[int, int, int, int]) -> None:
        self.left.check(shape)
        self.right.check(shape)

    def lower(self, i: int, j: int, device: torch.device | str | None = None) -> Tensor:
        return self.left.lower(i, j, device) | self.right.lower(i, j, device)

    @property
    def kind(self) -> str:
        return "dense"


def keys_and_causal(
    mask: Mask | None, b: int, j: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Padding and causal rules apart: keys that may be seen (b|1 j), None for all; causal or not.

    For kernels that never see pairs. Other rules are refused before (`Core.check_mask`).
    """
    keys, causal = None, False
    for rule in [] if mask is None else mask.rules():
        if isinstance(rule, Causal):
            causal = True
        else:
            seen = rule.lower(1, j, device)
            check_broadcast(seen, (b, 1, 1, j))
            seen = seen[:, 0, 0].expand(-1, j)
            keys = seen if keys is None else keys & seen
    return keys, causal


def check_broadcast(allowed: Tensor, shape: tuple[int, ...]) -> None:
    """Refuses a mask that does not broadcast to the scores."""
    if allowed.ndim != len(shape):
        raise ValueError(f"mask must have {len(shape)} axes, got {tuple(allowed.shape)}")
    _check_sizes(tuple(allowed.shape), shape)


def _check_sizes(mask: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Sizes are compared from the last axis; a mask may lack the first ones."""
    if any(size not in (1, full) for size, full in zip(mask[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"mask {mask} does not broadcast to (b, h, i, j) = {tuple(shape)}; "
            "a padding mask is (b, 1, 1, j)"
        )


def _leading(values: Tensor, positions: Tensor) -> Tensor:
    """(b) -> (b 1 1 ... 1), to broadcast against (b h *P)."""
    return values.view(-1, 1, *(1 for _ in positions.shape))


def _boolean(mask: object) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool tensor, a Mask or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be bool with True = may attend, got {mask.dtype}; "
            "an additive mask (0 or -inf) becomes one by `mask == 0`"
        )
    if mask.ndim > 4:
        raise ValueError(f"mask must have at most 4 axes (b, h, i, j), got {tuple(mask.shape)}")
    return mask


def _integers(name: str, values: Tensor | Sequence[int], axes: str) -> Tensor:
    if not isinstance(values, (Tensor, Sequence)):
        raise TypeError(f"{name} ({values!r}) must be a tensor or a list of integers ({axes})")
    tensor = torch.as_tensor(values, dtype=None if len(values) else torch.long)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
    if tensor.ndim != len(axes.split()):
        raise ValueError(f"{name} must be ({axes}), got shape {tuple(tensor.shape)}")
    return tensor
