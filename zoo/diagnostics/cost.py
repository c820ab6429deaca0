"""What a model costs: operations, memory kept for the backward pass, speed.

Shapes: b batch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zoo.layers import explicit_attention

Times = dict[str, list[float]]


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


def in_turn(
    steps: Mapping[str, Callable[[], object]], repeats: int = 7, device: str = "cpu"
) -> Times:
    """Seconds of each candidate in each round; the order is drawn anew in every round."""
    import numpy as np

    times: Times = {name: [] for name in steps}
    names, order = list(steps), np.random.default_rng(0)
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats + 2):  # two rounds to warm up
            for name in order.permutation(names):
                synchronize(device)
                start = time.perf_counter()
                steps[name]()
                synchronize(device)
                if turn >= 2:
                    times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
