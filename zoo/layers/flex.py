"""FlexAttention (arXiv 2412.05496) for the sparse kinds, on GPUs.

One fused kernel walks the blocks of keys that a block of queries may see. It serves
self-attention with padding and causal masks; everything else, and every CPU, where it has no
backward pass, takes the blocked code of `zoo.layers.sparse`, with the same values.

Shapes: b batch, h heads, n tokens, e head width, r/c blocks of queries and keys.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.layers.mask import Causal, Mask, Padding

Rule = Callable[[Tensor, Tensor], Tensor]  # places of queries and keys -> which pairs are seen

_BLOCK = 128  # tokens of the kernel's blocks
_FROM = 1024  # tokens; shorter sequences have too few blocks to leave out
_NARROWEST = 16  # head width that the kernel takes
_failed = False


@dataclass(frozen=True)
class Blocks:
    """Which blocks of keys each block of queries sees, as the kernel lists them.

    Each is how many there are (1 1 r), and which, these first (1 1 r c).

    Attributes:
        seen: All of which some pair is seen.
        part: Those of which some pair is not seen.
        whole: Those seen entirely.
    """

    seen: tuple[Tensor, Tensor]
    part: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]


def serves(q: Tensor, k: Tensor, mask: Mask | None, bias: Any, dropout_p: float) -> bool:
    """Whether the kernel computes this on this device."""
    n, e = q.shape[-2:]
    return (
        q.device.type == "cuda"
        and not _failed
        and not torch.compiler.is_compiling()
        and bias is None
        and dropout_p == 0
        and k.shape[-2] == n >= _FROM
        and e >= _NARROWEST
        and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and follows(mask, len(q))
    )


def follows(mask: Mask | None, b: int) -> bool:
    """Whether the mask is made of padding by lengths, one or b of them, and causal rules."""
    return all(
        isinstance(rule, Causal) or (isinstance(rule, Padding) and len(rule.lengths) in (1, b))
        for rule in ([] if mask is None else mask.rules())
    )


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, blocks: Blocks, mask: Mask | None
) -> Tensor:
    """(b h n e), (b h n e), (b h n e) -> (b h n e)

    Args:
        rule: What the kind allows; elementwise operations only, as the kernel computes it.
        blocks: Of that rule, and the causal one where the mask has it (`find_blocks`).
        mask: One that `follows`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    n, lengths, causal = q.shape[-2], key_lengths(mask, q), is_causal(mask)
    if lengths is not None:  # weights of 0 would not keep NaN out
        hidden = (torch.arange(n, device=q.device) >= lengths[:, None])[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)

    def allowed(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        seen = rule(row, col)
        if causal:
            seen = seen & (col <= row)
        return seen if lengths is None else seen & (col < lengths[b])

    # With padding no block is seen entirely for certain.
    part, whole = (blocks.part, blocks.whole) if lengths is None else (blocks.seen, (None, None))
    block_mask = BlockMask.from_kv_blocks(
        part[0], part[1], whole[0], whole[1], _BLOCK, allowed, seq_lengths=(n, n)
    )
    return _kernel(q.device.type)(q, k, v, block_mask=block_mask)


def or_blocked(flex: Callable[[], Tensor], blocked: Callable[[], Tensor]) -> Tensor:
    """`flex()`, or from its first failure to compile on, said once, `blocked()`."""
    global _failed
    try:
        return flex()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler: no toolchain, a GPU or shape it does not know
        _failed = True
        warnings.warn(
            f"FlexAttention does not work here ({type(error).__name__}: {error}); sparse attention "
            "takes the blocked path, which gives the same values",
            stacklevel=2,
        )
        return blocked()


@functools.cache
def _kernel(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cuda":
        return flex_attention
    # fullgraph: what cannot be compiled is an error, and not the slow path that builds (n n).
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@torch.no_grad()
def find_blocks(rule: Rule, n: int, causal: bool, device: torch.device) -> Blocks:
    """Looks at the rule one row of blocks at a time: memory grows with n."""
    cols = torch.arange(-(-n // _BLOCK) * _BLOCK, device=device)[None]
    counts, areas = [], []
    for start in range(0, n, _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, n), device=device)[:, None]
        seen = rule(rows, cols) & (cols < n)
        if causal:
            seen = seen & (cols <= rows)
        counts.append(seen.expand(len(rows), -1).sum(0).unflatten(0, (-1, _BLOCK)).sum(1))
        areas.append(len(rows) * _BLOCK)
    count = torch.stack(counts)  # r c
    whole = count == torch.tensor(areas, device=device)[:, None]
    seen = count > 0
    return Blocks(_listed(seen), _listed(seen & ~whole), _listed(whole))


def key_lengths(mask: Mask | None, q: Tensor) -> Tensor | None:
    """The shortest length that the mask gives each sample: (b), or None without padding."""
    rules = [] if mask is None else mask.rules()
    lengths = [rule.lengths.to(q.device) for rule in rules if isinstance(rule, Padding)]
    return functools.reduce(torch.minimum, lengths).expand(len(q)) if lengths else None


def is_causal(mask: Mask | None) -> bool:
    return mask is not None and any(isinstance(rule, Causal) for rule in mask.rules())


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(r c) -> how many are chosen in each row (1 1 r), and the columns, these first (1 1 r c)."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]
