"""What a tower makes of its input.

Shapes: b batch, n tokens, d width of a token, p width of the pooled vector.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Encoded(NamedTuple):
    """An image or a text as a tower gives it.

    Attributes:
        tokens: One vector for each patch, cell or word (b n d).
        pooled: One vector for all of them (b p).
        mask: True where a token counts (b n); None where all do.
    """

    tokens: Tensor
    pooled: Tensor
    mask: Tensor | None = None
