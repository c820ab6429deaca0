"""Taps show values, change nothing, and belong to one module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from zoo.layers import Block, Tap, checkpoint_block


def test_shows_what_passes_only_inside_the_context() -> None:
    tap, seen, x = Tap("gate"), [], torch.randn(3, requires_grad=True)
    tap(x)
    with tap.observe(seen.append):
        assert tap.active
        assert tap(x) is x
    tap(x)
    assert not tap.active
    assert len(seen) == 1
    assert torch.equal(seen[0], x)
    assert not seen[0].requires_grad


def test_two_observers_one_leaves() -> None:
    tap, first, second, x = Tap(), [], [], torch.zeros(1)
    with tap.observe(first.append):
        with tap.observe(second.append):
            tap(x)
        tap(x)
    assert (len(first), len(second)) == (2, 1)


def test_observers_leave_after_an_error() -> None:
    tap = Tap()
    with pytest.raises(RuntimeError, match="boom"), tap.observe(lambda _: None):
        raise RuntimeError("boom")
    assert not tap.active


def test_computes_nothing_without_an_observer() -> None:
    def fail() -> torch.Tensor:
        raise AssertionError("computed")

    Tap().record(fail)
    with Tap().observe(print):
        Tap().record(fail)


def test_copies_and_pickles_are_not_observed() -> None:
    block, seen, x = Block(32, 4), [], torch.randn(2, 7, 32)
    with block.attn.tap.observe(seen.append):
        copied, loaded = copy.deepcopy(block), pickle.loads(pickle.dumps(block.attn.tap))
        copied(x)
        assert not seen
        assert not loaded.active
        assert block.attn.tap.active
        block(x)
    assert len(seen) == 1
    assert torch.equal(copied(x), block(x))


def test_has_no_state() -> None:
    assert not Tap().state_dict()
    assert [name for name in Block(32, 4).state_dict() if "tap" in name] == []


def test_one_record_a_forward_under_checkpointing() -> None:
    blocks, seen = nn.ModuleList(Block(32, 4) for _ in range(2)), []
    x = torch.randn(2, 7, 32)
    with blocks[0].attn.tap.observe(seen.append):
        for step in range(1, 4):
            y = x
            for block in blocks:
                y = checkpoint_block(block, y)
            assert len(seen) == step
            y.sum().backward()
            assert len(seen) == step
