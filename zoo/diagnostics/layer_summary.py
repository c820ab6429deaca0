"""The few numbers on a layer's attention that a training log keeps.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from torch import Tensor

from zoo.diagnostics.looks import look_at_layer
from zoo.diagnostics.measures import Pair
from zoo.layers.mask import MaskLike


def summary(
    weights: Tensor,
    *,
    mask: MaskLike = None,
    grid: Pair | None = None,
    num_prefix_tokens: int = 0,
    patch_size: int | Pair | None = None,
    logits: Tensor | None = None,
) -> dict[str, float]:
    """Numbers on one layer's weights (b h i j): `LayerLook.numbers` of a look at it.

    Args:
        weights: As `capture_attention` gives them.
        mask: That of the attention, for the number of keys each query may see.
        grid: As `num_prefix_tokens` and `patch_size`, for `attention_distance`.
        logits: Least and largest score of each query (b h i 2), where known.
    """
    look = look_at_layer(
        weights,
        mask=mask,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        patch_size=patch_size,
        logits=logits,
    )
    return look.numbers()
