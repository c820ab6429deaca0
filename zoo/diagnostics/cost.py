"""What a model costs: operations, memory kept for the backward pass, peak memory, speed.

Shapes: b batch.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

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


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Most bytes that a step holds at once beyond those that are held before it.

    Both allocators are asked themselves, so what a kernel holds inside and what a backward pass
    holds count: on a GPU by torch's counter, on a CPU by the profiler's record of every allocation.
    The same in every run; what libraries such as oneDNN allocate past torch does not count.
    """
    if not device.startswith("cuda"):
        return _cpu_peak_bytes(step)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak_bytes(step: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it reports each start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    held: dict[int, int] = {}
    now = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            held[address] = size
            now += size
        else:  # 0 for what was there before
            now -= held.pop(address, 0)
        peak = max(peak, now)
    return peak


def free_bytes(device: str = "cpu") -> int:
    """Bytes that this process can still allocate, in a container also within the container."""
    if device.startswith("cuda"):
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    import psutil

    free = psutil.virtual_memory().available
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups, version 2 and 1
        limit = Path("/sys/fs/cgroup", name)
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            free = min(free, int(text) - psutil.Process().memory_info().rss)
    return max(0, free)


def in_turn(
    steps: Mapping[str, Callable[[], object]],
    repeats: int = 7,
    device: str = "cpu",
    before: Callable[[], object] = lambda: None,
) -> Times:
    """Seconds of each candidate in each round; the order is drawn anew in every round.

    `before` is called ahead of each, outside of its time.
    """
    import numpy as np

    times: Times = {name: [] for name in steps}
    names, order = list(steps), np.random.default_rng(0)
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats + 2):  # two rounds to warm up
            for name in order.permutation(names):
                before()
                synchronize(device)
                start = time.perf_counter()
                steps[name]()
                synchronize(device)
                if turn >= 2:
                    times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def ratio_of_medians(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, list[float]]:
    """Median time of theirs over ours, and its 95 % interval, bootstrapped by round."""
    import numpy as np

    a, b = np.array(theirs), np.array(ours)
    draws = np.random.default_rng(0).integers(len(a), size=(2000, len(a)))
    ratios = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(np.median(a) / np.median(b)), [float(low), float(high)]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
