"""Wrong options, masks and inputs of every kind: an error that names what is wrong, and its value.

A new kind is tested by being registered: its options are read from its signature.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from zoo.layers import (
    CrossAttention,
    Mask,
    PriorBias,
    RelativeBias1d,
    RelativeBiasGrid,
    Rope,
    core_options,
    create_attention,
    list_attention,
    set_temperature,
    supported_masks,
)
from zoo.layers.check import flag, fraction, integer, is_integer, positive
from zoo.layers.factory import _kinds, build_core, check_known, check_own, kinds_with_bias

DIM, H = 12, 2
KINDS = list_attention()
OWN = [(kind, option) for kind in KINDS for option in core_options(kind)]
WRONG = ["eight", 2.5, 8.0, math.nan, {}, [], object, -3]  # for whatever option


def default(kind: str, option: str) -> Any:
    return inspect.signature(_kinds[kind]).parameters[option].default


def refused(name: str, value: Any, **options: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        create_attention(**{"kind": "full", "dim": DIM, "num_heads": H, **options, name: value})
    message = str(caught.value)
    assert re.match(rf"{name}\b", message), message
    assert repr(value) in message or f"({value})" in message, message


@pytest.mark.parametrize(("kind", "option"), OWN)
def test_own_options(kind, option):
    usual = default(kind, option)
    wrong = WRONG[:-1] if option == "seed" else WRONG[:]
    if usual is not None:
        wrong.append(None)
    if not isinstance(usual, bool):
        wrong.append(True)
    if is_integer(usual) and usual > 1 and option not in ("threshold", "num_random"):
        wrong.append(0)  # a size
    for value in wrong:
        refused(option, value, kind=kind)


@pytest.mark.parametrize(("kind", "option"), OWN)
def test_whole_numbers_of_numpy_are_taken(kind, option):
    value = default(kind, option)
    if is_integer(value):
        attn = create_attention(kind, DIM, H, **{option: np.int64(value)})
        usual = create_attention(kind, DIM, H, **{option: value})
        usual.load_state_dict(attn.state_dict())
        x = torch.randn(1, 9, DIM)
        assert torch.equal(attn.eval()(x), usual.eval()(x))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_heads_and_widths(kind):
    for name in ("dim", "num_heads", "head_dim", "num_kv_heads", "dim_context"):
        for value in ["eight", 2.5, math.nan, [], True, 0, -3]:
            refused(name, value, kind=kind)
    for name in ("num_heads", "head_dim"):
        with pytest.raises((TypeError, ValueError), match=rf"^{name} \(0\.5\)"):
            build_core(kind, **{"num_heads": H, "head_dim": 6, name: 0.5})


def test_options_of_every_kind():
    for name in ("qkv_bias", "qk_norm", "proj_bias"):
        for value in ["no", 2.5, None, 2]:
            refused(name, value)
    for name in ("attn_drop", "proj_drop"):
        for value in ["no", None, True, math.nan, -0.1, 1.5]:
            refused(name, value)
    for value in ["hot", None, True, math.nan, math.inf, 0, -1.0, [1.0]]:
        refused("temperature", value)
    for name in ("core", "bias", "rope"):
        for value in ["full", True, 3]:
            if name != "core":
                refused(name, value)
            with pytest.raises(TypeError, match=rf"^{name} \({value!r}\)"):
                CrossAttention(DIM, H, **{name: value})
    refused("norm_layer", None)
    for value in (math.inf, 0, None, True):
        with pytest.raises((TypeError, ValueError), match=rf"^temperature \({value}\)"):
            set_temperature(create_attention("full", DIM, H), value)


def test_two_sides_and_shifts_of_windows():
    grid = {"kind": "window", "grid": (4, 6)}
    for value in [(2, 2.0), (2, 0), (2, 2, 2), "22", (True, 2), 5, (4, 7)]:
        with pytest.raises((TypeError, ValueError), match=r"^window .*grid.*\(4, 6\)"):
            create_attention(dim=DIM, num_heads=H, **{**grid, "window": value})
    for value in [(1, 2), (1,), (0.5, 1), "11", (1, True), 2]:
        refused_shift = re.escape(f"shift {value!r} must")
        with pytest.raises(ValueError, match=rf"^{refused_shift}.*\(2, 2\)"):
            create_attention(dim=DIM, num_heads=H, window=2, shift=value, **grid)
    for value in [7, (3,), (3, 4, 5), (2.5, 4), "44", (0, 4), (True, 4)]:
        refused("grid", value, kind="window")
    attn = create_attention(dim=DIM, num_heads=H, window=[2, 3], shift=np.int64(1), **grid)
    assert (attn.core.window, attn.core.shift, attn.core.grid) == ((2, 3), (1, 1), (4, 6))


def test_what_is_no_kind():
    for value in (None, 3, ["full"]):
        with pytest.raises(TypeError, match=rf"^kind \({re.escape(repr(value))}\).*'full'"):
            create_attention(value, DIM, H)
        with pytest.raises(TypeError, match=r"^kind "):
            supported_masks(value)
    with pytest.raises(ValueError, match=r"^train: unknown .* 'ful'.*did you mean 'full'"):
        create_attention("adaptive", DIM, H, train="ful")
    check_known("full")


def test_an_option_of_the_model_is_sent_there():
    for name in ("num_heads", "attn_drop", "qk_norm"):
        with pytest.raises(TypeError, match=rf"'block'.*{name}.*block_size.*; {name} is an option"):
            check_own("block", [name])
    with pytest.raises(TypeError, match=r"'full'.*'blocks'.*its own: none$"):
        build_core("full", H, 6, blocks=3)
    check_own("block", ["block_size", "num_global"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in kinds_with_bias()])
def test_a_position_bias_without_scores_names_the_kinds_that_have(kind):
    able = ", ".join(kinds_with_bias())
    with pytest.raises(ValueError, match=rf"^attention kind '{kind}' .*bias.*: {able}$"):
        create_attention(kind, DIM, H, bias=RelativeBias1d(H))
    if kind != "linformer":  # it has weights of its own
        with pytest.raises(ValueError, match=rf"^attention kind '{kind}' .*bias.*: {able}$"):
            create_attention("adaptive", DIM, H, bias=RelativeBias1d(H), short=kind)


@pytest.mark.parametrize("kind", sorted(set(kinds_with_bias()) - {"window"}))
def test_kinds_with_bias_use_it(kind):
    bias, x = RelativeBias1d(H), torch.randn(1, 9, DIM)
    attn = create_attention(kind, DIM, H, bias=bias).eval()
    before = attn(x)
    torch.nn.init.normal_(bias.relative_attention_bias.weight)
    assert not torch.allclose(attn(x), before)


def wrong_masks(b, i, j):
    """By the words that the error must have."""
    any_of = torch.ones(b, 1, 1, j, dtype=torch.bool)
    return {
        rf"mask \({b + 1}, 1, 1, {j}\)": Mask.padding([j] * (b + 1)),
        rf"mask \({b}, 1, 1, {j + 1}\)": torch.ones(b, 1, 1, j + 1, dtype=torch.bool),
        rf"mask \({b}, {j}\)": any_of[:, 0, 0],
        rf"mask \({b + 2}, 1, 1, {j}\)": Mask.padding([j] * b)
        & any_of[:1].expand(b + 2, -1, -1, -1),
        rf"mask \({H + 1}, {i}, {j}\)": torch.ones(H + 1, i, j, dtype=torch.bool),
        rf"mask \({i - 1}, {j}\)": Mask.causal() | torch.ones(i - 1, j, dtype=torch.bool),
        rf"ids_q \({b}, {i + 1}\)": Mask.segment(*(torch.zeros(b, n).long() for n in (i + 1, j))),
        rf"ids_k \({b + 1}, {j}\)": Mask.segment(
            torch.zeros(b, i).long(), torch.zeros(b + 1, j).long()
        ),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_mask_is_told_with_the_callers_shapes(kind):
    b, i, j = 2, 150, 300
    attn = create_attention(kind, DIM, H, dim_context=DIM)
    x, context = torch.randn(b, i, DIM), torch.randn(b, j, DIM)
    for words, mask in wrong_masks(b, i, j).items():
        with pytest.raises(ValueError, match=rf"{words}.*\({b}, {H}, {i}, {j}\)"):
            attn(x, context, mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_another_shape(kind):
    attn = create_attention(kind, DIM, H)
    for shape in ((2, 9, DIM + 1), (9, DIM), (2, 3, 3, DIM)):
        with pytest.raises(ValueError, match=rf"^x .*\(b, n, {DIM}\), got {re.escape(str(shape))}"):
            attn(torch.randn(shape))
    attn, x = create_attention(kind, DIM, H, dim_context=5), torch.randn(2, 9, DIM)
    with pytest.raises(ValueError, match=rf"^context .*\(b, n, 5\), got \(2, 4, {DIM}\)"):
        attn(x, torch.randn(2, 4, DIM))
    with pytest.raises(ValueError, match=rf"batch; got x \(2, 9, {DIM}\), context \(3, 4, 5\)"):
        attn(x, torch.randn(3, 4, 5))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RelativeBias1d(2.5), r"num_heads \(2\.5\) must be an integer"),
        (lambda: RelativeBias1d(2, 64.0), r"max_distance \(64\.0\) must be an integer"),
        (lambda: RelativeBias1d(2, 64, "8"), r"num_buckets \('8'\) must be an integer"),
        (lambda: RelativeBias1d(2, bidirectional=None), r"bidirectional \(None\)"),
        (lambda: RelativeBiasGrid(2, (2.5, 2)), r"grid \(\(2\.5, 2\)\) must be \(rows, columns\)"),
        (lambda: RelativeBiasGrid(2, None), r"grid \(None\) must be \(rows, columns\)"),
        (lambda: RelativeBiasGrid(2, (2, 2), 0.5), r"num_prefix_tokens \(0\.5\)"),
        (lambda: PriorBias(2, 2.5), r"size \(2\.5\) must be at least 1, or \(rows, columns\)"),
        (lambda: PriorBias(True, 3), r"num_heads \(True\) must be an integer"),
        (lambda: Rope("8"), r"head_dim \('8'\) must be an integer"),
        (lambda: Rope(8, temperature="hot"), r"temperature \('hot'\) must be a number"),
        (lambda: Rope(8, grid=(2, None)), r"grid \(\(2, None\)\) must be \(rows, columns\)"),
    ],
)
def test_positions(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_checks_return_plain_values():
    for value, expected in (
        (integer("n", np.int32(3)), 3),
        (integer("n", -3, minimum=None), -3),
        (integer("n", 0, minimum=0), 0),
        (positive("t", np.float32(0.5)), 0.5),
        (fraction("p", 1), 1.0),
        (flag("f", 1), True),
        (flag("f", False), False),
    ):
        assert type(value) is type(expected)
        assert value == expected
    with pytest.raises(ValueError, match=r"^n \(1\) must be at least 2$"):
        integer("n", 1, minimum=2)
    with pytest.raises(TypeError, match=r"^n \(1\.0\) must be an integer of at least 2$"):
        integer("n", 1.0, minimum=2)
    with pytest.raises(ValueError, match=r"^t \(inf\) must be positive and finite, or 'any'$"):
        positive("t", math.inf, other="any")
    with pytest.raises(ValueError, match=r"^p \(1\.5\) must lie in \[0, 1\]$"):
        fraction("p", 1.5)
    with pytest.raises(ValueError, match=r"^f \(2\) must be True or False$"):
        flag("f", 2)
