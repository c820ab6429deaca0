"""What is kept of tokens already read, so that the next one costs a single step.

Nothing here is changed in place: a step from one state can be taken twice, or by several
continuations of it.

Shapes: b batch, h heads of keys and values, j key positions, e head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


class KeyValues(NamedTuple):
    """Projected keys and values of one attention module.

    Made by `SelfAttention.extend` and `CrossAttention.project`. Keys are normalised where the
    module does so, and not yet rotated: rotary positions are theirs in the whole sequence.

    Attributes:
        keys: (b h j e)
        values: (b h j e)
        prepared: Whether the keys are what `Core.prepare` made of them.
    """

    keys: Tensor
    values: Tensor
    prepared: bool = False

    @property
    def length(self) -> int:
        """The number of positions, j."""
        return self.keys.shape[2]

    def append(self, later: KeyValues) -> KeyValues:
        """These positions, then the later ones."""
        for old, new in zip(self[:2], later[:2], strict=True):
            if (*old.shape[:2], old.shape[3]) != (*new.shape[:2], new.shape[3]):
                raise ValueError(
                    f"past {tuple(old.shape)} and the tokens after it {tuple(new.shape)} must "
                    "agree in batch, heads and head width"
                )
        keys = torch.cat([self.keys, later.keys], dim=2)
        return KeyValues(keys, torch.cat([self.values, later.values], dim=2), self.prepared)


def reorder(state: State, index: Tensor) -> State:
    """Takes samples of a state: `index` (n) may repeat some and leave others out.

    A state is a tensor (b ...), or a tuple, named or not, of states; anything else is kept.
    """
    if isinstance(state, Tensor):
        return state.index_select(0, index)  # type: ignore[return-value]
    if not isinstance(state, tuple):
        return state
    parts: list[Any] = [reorder(part, index) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)  # type: ignore
