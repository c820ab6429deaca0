from __future__ import annotations

import pytest
import torch

import zoo
from zoo.diagnostics.cost import (
    count_flops,
    free_bytes,
    in_turn,
    peak_bytes,
    ratio_of_medians,
    saved_bytes,
)
from zoo.layers import explicit_attention


def test_h1_flops_equal_the_formula_fused_or_not():
    model = zoo.create_model("vit_tiny_patch16_224", depth=2).eval()
    n, d, b = 197, 192, 3
    block = 2 * n * d * (3 * d + d + 2 * 4 * d) + 2 * 2 * n * n * d
    # The head reads the class token alone: the last MLP runs on it and on no other.
    unread = 2 * (n - 1) * d * (2 * 4 * d)
    expected = b * (2 * block - unread + 2 * 196 * 768 * d + 2 * d * 1000)
    images = torch.randn(b, 3, 224, 224)
    assert count_flops(model, images) == pytest.approx(expected, rel=0.01)
    with explicit_attention():
        assert count_flops(model, images) == pytest.approx(expected, rel=0.01)


def test_saved_bytes_grow_with_the_batch_and_leave_parameters_out():
    linear = torch.nn.Linear(8, 4)
    assert saved_bytes(linear, torch.randn(2, 8)) == 0  # its input and its weight are there anyway
    two = torch.nn.Sequential(linear, torch.nn.Tanh())
    assert saved_bytes(two, torch.randn(2, 8)) == 2 * 4 * 4
    assert saved_bytes(two, torch.randn(6, 8)) == 6 * 4 * 4


def test_rounds_and_order():
    seen = []
    times = in_turn({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    rounds = [seen[i : i + 2] for i in range(0, len(seen), 2)]
    assert len(rounds) == 3 + 2, "two rounds warm up"
    assert all(sorted(pair) == ["a", "b"] for pair in rounds)
    assert [len(t) for t in times.values()] == [3, 3]


MIB = 2**20


def floats(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


@pytest.mark.parametrize("mib", [1, 3, 64])
def test_the_peak_of_one_tensor_is_its_size(mib):
    assert peak_bytes(lambda: floats(mib)) == mib * MIB


def test_what_was_freed_counts_no_more():
    def one_after_the_other() -> None:
        a = floats(4)
        del a
        b, c = floats(2), floats(1)  # 3 MiB at once, less than the 4 before
        del b, c
        floats(2)

    assert peak_bytes(one_after_the_other) == 4 * MIB
    assert peak_bytes(lambda: [floats(2), floats(3)]) == 5 * MIB


def test_what_was_there_before_counts_neither_held_nor_freed():
    held = [floats(8)]
    assert peak_bytes(lambda: held[0].zero_()) == 0

    def free_first() -> None:
        held.clear()
        floats(2)

    assert peak_bytes(free_first) == 2 * MIB


def test_an_earlier_step_leaves_no_trace():
    kept = []
    peak_bytes(lambda: kept.append(floats(16)))
    kept.clear()
    assert [peak_bytes(lambda: floats(2)) for _ in range(3)] == [2 * MIB] * 3


class Scratch(torch.autograd.Function):
    """Identity whose backward pass needs a scratch tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * floats(32).sum().sign()


def test_the_backward_pass_is_seen():
    x = torch.ones(1, requires_grad=True)
    forward = peak_bytes(lambda: Scratch.apply(x))
    assert forward < 1024
    assert 32 * MIB <= peak_bytes(lambda: Scratch.apply(x).backward()) < 32 * MIB + 1024


def test_a_chain_holds_all_outputs_in_training_and_two_without_gradients():
    x = floats(1).requires_grad_()

    def chain() -> None:
        x.exp().exp().exp().exp()

    assert peak_bytes(chain) == 4 * MIB
    with torch.no_grad():
        assert peak_bytes(chain) == 2 * MIB


def test_the_inside_of_a_kernel_is_seen():
    """Without a fused kernel the scores are built inside of one call."""
    q = torch.randn(1, 2, 512, 16)
    plain = torch.nn.attention.SDPBackend.MATH
    with torch.inference_mode(), torch.nn.attention.sdpa_kernel(plain):
        peak = peak_bytes(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert peak >= 2 * 512 * 512 * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peak_on_a_gpu():
    def step() -> None:
        torch.ones(MIB, device="cuda")
        torch.ones(2 * MIB, device="cuda")

    assert peak_bytes(step, "cuda") == 8 * MIB
    assert 0 < free_bytes("cuda") <= torch.cuda.get_device_properties(0).total_memory


def test_free_memory_is_what_the_machine_has_at_most():
    import psutil

    assert 0 < free_bytes() <= psutil.virtual_memory().total


def test_ratio_of_medians_and_its_interval():
    ratio, (low, high) = ratio_of_medians([2.0] * 5, [1.0] * 5)
    assert (ratio, low, high) == (2, 2, 2)
    ratio, (low, high) = ratio_of_medians([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert ratio == 3
    assert 1 <= low < 3 < high <= 5
