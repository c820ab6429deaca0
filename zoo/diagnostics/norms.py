"""Norms of the tokens of the residual stream, block by block.

Shapes: b batch, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.diagnostics.capture import Observable, Records, capture, layer_names
from zoo.diagnostics.foreign_attention import (
    UntracedHook,
    compiled_paths,
    encoder_paths,
    find_foreign_attention,
    no_fast_path,
    refuse_compiled,
    within,
)
from zoo.layers.tap import Observer, Tap


@contextmanager
def capture_norms(
    model: nn.Module,
    layers: str | Sequence[str] = "*",
    samples: int | None = None,
    *,
    max_bytes: int = 2 << 30,
) -> Iterator[Records]:
    """Yields a dict that fills: block name -> one fp32 CPU tensor (b n) a forward.

    The norm of each token as a block with attention puts it out, for `outlier_norms`, whose paper
    (arXiv 2309.16588) looks at the last block's. A block is the module around an attention that
    stands in a list or a sequence of modules, as in our models and in those of timm, torchvision,
    open_clip and transformers. Swin's tokens are the places of its map, row by row. Blocks that
    normalise behind the sum, as nn.TransformerEncoderLayer does by default, show it normalised.

    Args:
        layers: Names of blocks, with wildcards: "blocks.*", ["blocks.0", "*.resblocks.11"].
        samples: Keeps only the first samples of each batch; by default all.
        max_bytes: Bound on the memory of all records.

    Raises:
        ValueError: A pattern matches no block, `samples` is less than 1, or a block is part of a
            compiled model.
        NothingCapturedError: None of the blocks ran.
        MemoryError: The records would take more than `max_bytes`.
    """
    blocks = _find_blocks(model)
    with capture(blocks, "block with attention", layers, samples, max_bytes) as records:
        yield records


@dataclass(frozen=True)
class _Block:
    """The norms of what a block puts out, for observers.

    Args:
        compiled: Whether it runs inside a compiled module, where it cannot be observed.
        in_encoder: Whether it is or is in a layer of nn.TransformerEncoder.
        tokens_first: Whether its axes are (n b d).
    """

    module: nn.Module
    compiled: bool
    in_encoder: bool
    tokens_first: bool

    @contextmanager
    def observe(self, callback: Observer, /) -> Iterator[None]:
        refuse_compiled(f"the norms of {type(self.module).__name__}", self.compiled)
        tap = Tap("norms")

        @UntracedHook
        def show(module: nn.Module, args: Any, output: Any) -> None:
            if module is self.module or getattr(module, "_is_replica", False):  # no deep copy
                tap.record(lambda: self._norms(output))

        with ExitStack() as stack:
            if self.in_encoder:
                stack.enter_context(no_fast_path())
            stack.enter_context(tap.observe(callback))
            handle = self.module.register_forward_hook(show)
            stack.callback(handle.remove)
            yield

    def _norms(self, output: Any) -> Tensor:
        """(b n d), (n d) or (b y x d) -> (b n), in fp32 or better."""
        tokens: Tensor = output if isinstance(output, Tensor) else output[0]
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        norms = tokens.norm(dim=-1)
        if norms.ndim == 1:
            return norms[None]
        return norms.transpose(0, 1) if self.tokens_first else norms.flatten(1)


def _find_blocks(model: nn.Module) -> dict[str, Observable]:
    """The innermost modules of a list or sequence that have attention inside, by name."""
    modules = dict(model.named_modules())
    paths: dict[str, list[nn.Module]] = {}
    for path in _attention_paths(model):
        block = _block_around(path, modules)
        if block is not None:
            paths.setdefault(block, []).append(modules[path])
    compiled, encoders = compiled_paths(model), encoder_paths(model)
    name = layer_names(model)
    return {
        name(path): _Block(
            modules[path],
            compiled=within(path, compiled),
            in_encoder=within(path, encoders),
            tokens_first=any(_takes_tokens_first(attention) for attention in inside),
        )
        for path, inside in paths.items()
        if not any(other != path and within(other, [path]) for other in paths)
    }


def _attention_paths(model: nn.Module) -> list[str]:
    """Of ours and of other libraries, in the model's order."""
    foreign = find_foreign_attention(model)
    return [
        path
        for path, module in model.named_modules()
        if path in foreign or getattr(getattr(module, "tap", None), "kind", None) == "attention"
    ]


def _block_around(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The nearest module above that stands in a list or a sequence."""
    while path:
        path = path.rpartition(".")[0]
        above = modules[path.rpartition(".")[0]]
        if path and isinstance(above, (nn.ModuleList, nn.Sequential)):
            return path
    return None


def _takes_tokens_first(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) and not module.batch_first
