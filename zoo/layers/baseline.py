"""Attention without learned weights: what every claim about attention is compared with.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.layers.attention import attend
from zoo.layers.core import Core
from zoo.layers.factory import register_attention
from zoo.layers.mask import Mask, check_broadcast, keys_and_causal
from zoo.layers.scores import attention_weights
from zoo.layers.tap import Tap


@register_attention("identity")
class Identity(Core):
    """Each query takes the value at its own place: no token sees another.

    With queries and keys of different number the last query is aligned with the last key; places
    without a key give zeros.
    """

    biases = False
    drops = False
    scores = False
    tempers = ""

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
        i, j = q.shape[-2], k.shape[-2]
        rows = torch.arange(i, device=q.device)
        own = F.pad(v, (0, 0, i - j, 0))  # crops where there are more keys than queries
        seen = (rows >= i - j)[None, None]
        if mask is not None:
            ruled = mask.at(rows, (rows + (j - i)).clamp(0, max(0, j - 1)), i, j)
            check_broadcast(ruled, q.shape[:3])
            seen = seen & ruled
        if tap is not None:
            tap.record(lambda: self._weights(seen, q, j))
        return own.masked_fill(~seen[..., None], 0)

    def sees(self, rows: Tensor, cols: Tensor, j: int) -> Tensor:
        return rows == cols

    @staticmethod
    def _weights(seen: Tensor, q: Tensor, j: int) -> Tensor:
        i = q.shape[-2]
        diagonal = torch.ones(i, j, device=q.device).tril(j - i).triu(j - i)
        return diagonal * seen[..., None].expand(*q.shape[:2], -1, -1)


@register_attention("mean")
class Mean(Core):
    """Every query gets the mean of the values it may see, in linear time: average pooling."""

    masks: ClassVar[tuple[str, ...]] = ("padding", "causal")
    reason: ClassVar[str] = "it sums the values once and never looks at pairs"
    biases = False
    drops = False
    scores = False
    tempers = ""

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
        i, j = q.shape[-2], k.shape[-2]
        if tap is not None:
            tap.record(lambda: attention_weights(torch.zeros_like(q), torch.zeros_like(k), mask))
        keys, causal = keys_and_causal(mask, len(v), j, v.device)
        seen = v.new_ones(len(v), 1, j, 1, dtype=torch.promote_types(v.dtype, torch.float32))
        if keys is not None:
            seen = seen * keys[:, None, :, None]
        values = v.to(seen.dtype).masked_fill(seen == 0, 0)
        if causal:
            total, count = (
                F.pad(x.cumsum(2)[:, :, -i:], (0, 0, max(0, i - j), 0)) for x in (values, seen)
            )
        else:
            total, count = values.sum(2, keepdim=True), seen.sum(2, keepdim=True)
        return (total / count.clamp(min=1)).to(v.dtype).expand(-1, -1, i, -1)


@register_attention("uniform")
class Uniform(Core):
    """Exact attention whose scores are all equal: the mean, under any mask, in quadratic time."""

    biases = False
    tempers = ""

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
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        return attend(q, k, v, mask, dropout_p=dropout_p, tap=tap)
