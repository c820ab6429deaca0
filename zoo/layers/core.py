"""What happens between the projections: the cores of the exact attention kinds.

A kind of attention is a `Core`; the projections around it (`multihead`) are the same for all, so
that the weights of one kind load into another.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.layers.attention import attend, attend_scores
from zoo.layers.check import integer
from zoo.layers.mask import Mask, MaskLike
from zoo.layers.scores import blank_unseen
from zoo.layers.tap import Tap

ALL_MASKS = ("padding", "causal", "segment", "dense")


class Core(nn.Module):
    """Mixes values: called as `core(q, k, v, mask, bias=..., dropout_p=..., tap=...)`.

    Subclasses implement `forward`, (b h i e), (b h j e), (b h j e) -> (b h i e), and say in
    `masks` which rules they can follow and in `biases` whether a position bias can be added.
    """

    masks: ClassVar[tuple[str, ...]] = ALL_MASKS
    reason: ClassVar[str] = ""  # why other masks are not possible
    biases: bool = True
    drops: bool = True  # whether there are weights that dropout can act on
    scores: bool = True  # whether weights are a softmax of scores, whose range a tap can show
    # What a temperature divides: "queries", "scores" (forward then takes them as `scale`), or "".
    tempers: str = "queries"
    # Why a token's output may change with the tokens behind it, even under a causal mask.
    unsteady: str = ""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = integer("num_heads", num_heads)
        self.head_dim = integer("head_dim", head_dim)

    def check_mask(self, mask: Mask | None) -> None:
        """Refuses rules that the kind cannot follow.

        Raises:
            ValueError: with the reason and the kinds that can.
        """
        for rule in [] if mask is None else mask.rules():
            if rule.kind not in self.masks:
                from zoo.layers.factory import kinds_with_mask

                raise ValueError(
                    f"attention kind {self.kind!r} cannot follow a {rule.kind} mask: "
                    f"{self.reason or 'it does not say so in masks'}. "
                    f"It supports {', '.join(self.masks) or 'no mask'}; "
                    f"kinds that support {rule.kind}: {', '.join(kinds_with_mask(rule.kind))}"
                )

    def check_bias(self) -> None:
        """Refuses a position bias where there are no scores to add it to.

        Raises:
            ValueError: with the kinds that have scores.
        """
        if not self.biases:
            from zoo.layers.factory import kinds_with_bias

            raise ValueError(
                f"attention kind {self.kind!r} has no scores to add a bias to (positions relative "
                f"and prior); kinds that have: {', '.join(kinds_with_bias())}"
            )

    def check_growing(self) -> None:
        """Refuses a sequence that is read token by token: each output would have to be final.

        Raises:
            ValueError: with the reason.
        """
        self.check_mask(Mask.causal())
        if self.unsteady:
            raise ValueError(
                f"attention kind {self.kind!r} cannot read a sequence token by token: "
                f"{self.unsteady}"
            )

    def prepare(self, k: Tensor) -> Tensor | None:
        """What scores need of the keys (b h j e) before any query is known; None: the keys.

        Where keys are kept, it is computed once and given in their place, with `prepared=True`.
        """
        return None

    def sees(self, rows: Tensor, cols: Tensor, j: int) -> Tensor | None:
        """Which keys, by place of j, a query can see at all under no mask; None: every one."""
        return None

    @property
    def kind(self) -> str:
        return getattr(type(self), "registered_name", type(self).__name__)

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
        raise NotImplementedError


class Full(Core):
    """Scaled dot product with all keys (arXiv 1706.03762)."""

    scaled: ClassVar[bool] = True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike = None,
        *,
        bias: Any = None,
        dropout_p: float = 0.0,
        tap: Tap | None = None,
    ) -> Tensor:
        added = None if bias is None else bias.lower(q.shape[-2], k.shape[-2])
        scale = None if self.scaled else 1.0
        return attend(q, k, v, mask, bias=added, scale=scale, dropout_p=dropout_p, tap=tap)


class Dot(Full):
    """Unscaled dot product (Luong, arXiv 1508.04025): saturates the softmax of wide heads."""

    scaled = False


class Additive(Core):
    """v^T tanh(W_q q + W_k k) (Bahdanau, arXiv 1409.0473), one small network for all heads.

    Holds a hidden vector a pair; queries are taken in chunks, computed again in the backward pass.

    Args:
        hidden_dim: Width of the network; by default the head's.
        chunk_bytes: Bound on the hidden vectors held at once (in an exported graph, by sample).
    """

    tempers = "scores"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        hidden_dim: int | None = None,
        chunk_bytes: int = 1 << 26,
    ) -> None:
        super().__init__(num_heads, head_dim)
        hidden_dim = head_dim if hidden_dim is None else integer("hidden_dim", hidden_dim)
        self.chunk_bytes = integer("chunk_bytes", chunk_bytes)
        self.query = nn.Linear(head_dim, hidden_dim)
        self.key = nn.Linear(head_dim, hidden_dim, bias=False)
        self.score = nn.Linear(hidden_dim, 1, bias=False)

    def prepare(self, k: Tensor) -> Tensor:
        return self.key(k)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike = None,
        *,
        bias: Any = None,
        dropout_p: float = 0.0,
        tap: Tap | None = None,
        scale: Tensor | float = 1.0,
        prepared: bool = False,
    ) -> Tensor:
        q, k = blank_unseen(q, k, mask)
        hidden_q, hidden_k = self.query(q), k if prepared else self.key(k)
        chunks = hidden_q.split(self._queries_at_once(hidden_k), dim=2)
        if len(chunks) > 1 and torch.is_grad_enabled():
            parts = [checkpoint(self._scores, c, hidden_k, use_reentrant=False) for c in chunks]
        else:
            parts = [self._scores(chunk, hidden_k) for chunk in chunks]
        scores = torch.cat(parts, dim=2) * scale
        if bias is not None:
            scores = scores + bias.lower(q.shape[-2], k.shape[-2])
        return attend_scores(scores, v, mask, dropout_p=dropout_p, tap=tap)

    def _queries_at_once(self, hidden_k: Tensor) -> int:
        """How many of them `chunk_bytes` holds; in an exported graph, whose batch may vary, of one
        sample."""
        samples, *rest = hidden_k.shape
        samples = 1 if torch.compiler.is_exporting() else samples
        query = samples * math.prod(rest) * hidden_k.element_size()  # with all keys
        return max(1, self.chunk_bytes // max(1, query))

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(b h i c), (b h j c) -> (b h i j)"""
        return self.score(torch.tanh(q[:, :, :, None] + k[:, :, None])).squeeze(-1)
