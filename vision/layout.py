"""Which tensors of a pass are maps (b c y x), as convolutions and norms over channels tell.

Tensors that an elementwise step, a pooling or the like connects have one order of axes. Where a
convolution, a batch norm or a group norm reads or writes one of them, the channels of all are in
axis 1. Tokens and maps (b y x c) of transformers are connected to none of these: a permutation, a
new shape or a product of matrices connects nothing.

Shapes: b batch, c y x channels/rows/columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CHANNELS_IN_AXIS_1 = ("convolution", "batch_norm", "group_norm")
_KEEP_THE_AXES = (
    *("alias", "clone", "copy", "detach", "lift", "dropout", "layer_norm", "softmax"),
    *("cat", "chunk", "expand", "flip", "narrow", "roll", "slice", "split"),
    *("amax", "mean", "pad", "pool", "sum", "upsample"),
)


class Layouts(TorchDispatchMode):
    """Follows the tensors with four axes while it is entered; they are kept until it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._group: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}
        self._maps: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if any(word in name for word in _CHANNELS_IN_AXIS_1):
            self.mark(args[0])
            self.mark(output[0] if isinstance(output, list | tuple) else output)
        elif torch.Tag.pointwise in func.tags or any(word in name for word in _KEEP_THE_AXES):
            self._join([t for t in tree_leaves((args, kwargs, output)) if _has_four_axes(t)])
        return output

    def mark(self, value: Any) -> None:
        """Says that a value is a map, if it is a tensor with four axes."""
        if _has_four_axes(value):
            self._maps.add(self._of(value))

    def is_map(self, value: Any) -> bool:
        """Whether a value is known to be a map."""
        return _has_four_axes(value) and self._of(value) in self._maps

    def _of(self, tensor: Tensor) -> int:
        key = id(tensor)
        if key not in self._group:
            self._kept.append(tensor)
            self._group[key] = key
            self._members[key] = [key]
        return self._group[key]

    def _join(self, tensors: list[Tensor]) -> None:
        groups = list(dict.fromkeys(self._of(tensor) for tensor in tensors))
        for other in groups[1:]:
            moved = self._members.pop(other)
            self._members[groups[0]] += moved
            self._group.update(dict.fromkeys(moved, groups[0]))
            if other in self._maps:
                self._maps.add(groups[0])


def _has_four_axes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4
