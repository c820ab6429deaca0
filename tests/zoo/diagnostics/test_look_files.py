"""Looks come back from a file as they went into it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from safetensors.torch import load, save

from zoo.diagnostics.look_files import pack, unpack
from zoo.diagnostics.looks import look_at_gates, look_at_layer


def weights():
    return torch.rand(2, 3, 5, 5).softmax(-1)


@pytest.mark.parametrize("logits", [None, torch.tensor([-1.0, 2.0]).expand(2, 3, 5, 2)])
@pytest.mark.parametrize("grid", [None, (1, 4)])
def test_looks_come_back(logits, grid):
    given = {"grid": grid, "num_prefix_tokens": 1} if grid else {}
    layers = {"blocks.0.attn": look_at_layer(weights(), logits=logits, **given),
              "a/b.attn": look_at_layer(weights())}  # fmt: skip
    gates = {"layer1.se": look_at_gates(torch.rand(4, 6), None)}
    found, found_gates = unpack(load(save(pack(layers, gates))))
    assert found.keys() == layers.keys()
    for name, look in layers.items():
        assert found[name].numbers() == look.numbers()
        for field in fields(look):
            one, two = getattr(look, field.name), getattr(found[name], field.name)
            assert type(one) is type(two), field.name
    wanted = gates["layer1.se"].numbers()
    assert found_gates["layer1.se"].numbers() == pytest.approx(wanted, nan_ok=True)
    assert found_gates["layer1.se"].channels == 6


def test_other_tensors_are_passed_over():
    more = {"maps/a": torch.zeros(1), "gates/b": torch.zeros(1), "x": torch.zeros(1)}
    assert unpack(more) == ({}, {})
    assert pack() == {}
