"""What a model costs: operations, memory kept for the backward pass, speed.

Shapes: b batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.layers import explicit_attention


def count_flops(model: nn.Module, inputs: Tensor) -> int:
    """Floating-point operations of a forward pass over the batch, a multiply-add being two.

    Attention is written out while counting: torch counts nothing for its fused kernel on a CPU.
    Matrix products and convolutions count, elementwise operations do not, as is usual.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), explicit_attention(), FlopCounterMode(display=False) as counter:
        model(inputs)
    return counter.get_total_flops()


def saved_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Bytes that a forward pass keeps for its backward pass, without the parameters.

    The part of a training step's peak memory that depends on the model's kind of attention; the
    same on every device and in every run.
    """
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers(), inputs)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = model(inputs)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


def seconds_in_turn(
    steps: dict[str, Callable[[], object]], repeats: int = 7
) -> dict[str, list[float]]:
    """Times every step once a round, so that a machine's moods meet all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):  # the first round warms up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times
