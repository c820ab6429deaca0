from __future__ import annotations

import pytest
import torch

import zoo
from zoo.diagnostics.cost import count_flops, in_turn, saved_bytes
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
