"""What holds for every kind of channel attention: a registered kind is tested by being registered.

A new kind adds its formula to `PARAMETERS`, and variants worth sweeping to `VARIANTS`.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vision.channel_attention import (
    ChannelAttention,
    channel_attention_options,
    create_channel_attention,
    list_channel_attention,
    min_channels,
    reduced_width,
    register_channel_attention,
)

KINDS = list_channel_attention()
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    *(("se", {"squeeze": squeeze}) for squeeze in ("max", "both")),
    *(("se", {"gate": gate}) for gate in ("hard_sigmoid", "tanh", "relu")),
    ("se", {"bias": False, "round_to": 8}),
    ("ese", {"squeeze": "both", "gate": "hard_sigmoid"}),
    ("eca", {"kernel_size": 5}),
    ("ge", {"extent": 4}),
    ("ge", {"extent": 4, "learned": True}),
    ("ge", {"extent": 2, "learned": True, "mlp": True}),
    ("gc", {"fuse": "scale"}),
    ("fca", {"dct_size": 14, "num_freq": 4}),
]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_variant = pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)


def _two_layers(c: int, w: int) -> int:
    return c * w + w + w * c + c


def _eca_taps(c: int, w: int) -> int:
    exact = (math.log2(c) + 1) / 2
    return min((1, 3, 5, 7, 9), key=lambda k: (abs(k - exact), -k))


# Learnable numbers of each kind by the papers, of channels and width.
PARAMETERS: dict[str, Callable[[int, int], int]] = {
    "se": _two_layers,
    "constant": _two_layers,
    "nosqueeze": _two_layers,
    "none": lambda c, w: 0,
    "ese": lambda c, w: c * c + c,
    "eca": _eca_taps,
    "cbam": lambda c, w: _two_layers(c, w) + 2 * 49 + 2,
    "bam": lambda c, w: _two_layers(c, w) + 2 * c + (c * w + w) + 2 * (9 * w * w + w) + (w + 1) + 2,
    "ge": lambda c, w: 0,
    "gc": lambda c, w: (c + 1) + _two_layers(c, w) + 2 * w,
    "gct": lambda c, w: 3 * c,
    "srm": lambda c, w: 2 * c + 2 * c,
    "simam": lambda c, w: 0,
    "coord": lambda c, w: (c * w + w) + 2 * w + 2 * (w * c + c),
    "fca": lambda c, w: 2 * c * w,
    "triplet": lambda c, w: 3 * (2 * 49 + 2),
    "scse": lambda c, w: _two_layers(c, w) + c + 1,
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def shaken(kind: str, channels: int, **options: Any) -> ChannelAttention:
    """A module whose parameters are all random: several kinds start with zeros."""
    torch.manual_seed(0)
    module = create_channel_attention(kind, channels, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def shown(module: ChannelAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and what the tap showed."""
    seen: list[Tensor] = []
    with module.tap.observe(seen.append):
        y = module(x)
    (gate,) = seen
    return y, gate


def broadcast(gate: Tensor) -> Tensor:
    return gate[..., None, None] if gate.ndim == 2 else gate


@every_variant
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 4), (9, 7), (14, 14)])
def test_any_size_keeps_its_shape_in_training_and_evaluation(
    kind: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    module = shaken(kind, 24, **options)
    for batch in (2, 1):  # case C5: a batch of 1, also on a map of one position
        x = torch.randn(batch, 24, *size, requires_grad=True)
        y = module.train()(x)
        y.square().sum().backward()
        assert y.shape == x.shape
        assert y.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert module.eval()(x).isfinite().all()


@every_variant
def test_every_parameter_learns(kind: str, options: dict[str, Any]) -> None:
    module = shaken(kind, 24, **options).train()
    x = torch.randn(4, 24, 9, 7, requires_grad=True)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@every_variant
def test_the_output_is_the_input_times_the_shown_gate(kind: str, options: dict[str, Any]) -> None:
    module = shaken(kind, 24, **options).eval()
    x = torch.randn(3, 24, 9, 7)
    y, gate = shown(module, x)
    assert gate.shape in {(3, 24), (3, 1, 9, 7), (3, 24, 9, 7)}
    assert torch.equal(y, module(x))  # observing changes nothing
    if module.gate_range is None:  # an added term
        torch.testing.assert_close(y, x + broadcast(gate))
        return
    torch.testing.assert_close(y, x * broadcast(gate))
    low, high = module.gate_range
    assert gate.min() >= low - 1e-6
    assert gate.max() <= high + 1e-6


@every_kind
def test_has_what_insertion_relies_on(kind: str) -> None:
    module = create_channel_attention(kind, 16)
    assert isinstance(module, ChannelAttention)
    assert (module.kind, module.channels, module.tap.kind) == (kind, 16, "gate")
    assert min_channels(kind) == type(module).min_channels
    assert kind in repr(module)


@every_kind
@pytest.mark.parametrize("channels", [7, 8, 24, 36, 64, 1024])
@pytest.mark.parametrize("r", [16, 4, 3])
def test_parameters_follow_the_papers_formula(kind: str, channels: int, r: int) -> None:
    """Case C1."""
    defaults = channel_attention_options(kind)
    options = {"rd_ratio": 1 / r} if "rd_ratio" in defaults else {}
    width = max(defaults.get("min_width", 0), channels // r)
    module = create_channel_attention(kind, channels, **options)
    assert count(module) == PARAMETERS[kind](channels, width)


@pytest.mark.parametrize("learned", [False, True])
def test_parameters_of_the_variants_of_gather_excite(learned: bool) -> None:
    module = create_channel_attention("ge", 24, extent=8, learned=learned, mlp=True, rd_ratio=1 / 4)
    assert count(module) == _two_layers(24, 6) + learned * 3 * (9 * 24 + 2 * 24)


@every_variant
def test_zero_input_has_finite_gradients(kind: str, options: dict[str, Any]) -> None:
    module = shaken(kind, 24, **options).train()
    x = torch.zeros(2, 24, 5, 5, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_dtype_and_channels_last(
    kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    module = shaken(kind, 24, **options).eval()
    x = torch.randn(2, 24, 9, 7)
    expected = module(x)
    y = module.to(dtype)(x.to(dtype, memory_format=torch.channels_last))
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.1}
    )
    torch.testing.assert_close(y.float(), expected, **tolerance)


@every_variant
def test_autocast_keeps_the_dtype_of_the_input(kind: str, options: dict[str, Any]) -> None:
    module = shaken(kind, 24, **options).train()
    x = torch.randn(2, 24, 9, 7, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.float32
        y = module(x.bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("ge", {"extent": 4, "learned": True})]
)
def test_compiles_into_one_graph(kind: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module = shaken(kind, 8, **options).train()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for batch in (3, 1):
        x = torch.randn(batch, 8, 6, 5, requires_grad=True)
        torch.testing.assert_close(compiled(x), module(x))
    module(x).sum().backward()
    compiled(x).sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


@every_variant
def test_copies_and_state_dicts_give_the_same_outputs(kind: str, options: dict[str, Any]) -> None:
    module = shaken(kind, 24, **options)
    x = torch.randn(4, 24, 9, 7)
    module.train()(x)  # moves running statistics
    expected = module.eval()(x)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    other = create_channel_attention(kind, 24, **options).eval()
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(x), expected)


@every_variant
def test_samples_do_not_see_each_other_in_evaluation(kind: str, options: dict[str, Any]) -> None:
    module = shaken(kind, 24, **options).eval()
    x = torch.randn(3, 24, 9, 7)
    torch.testing.assert_close(module(x)[1:2], module(x[1:2]))


@every_kind
def test_places_with_one_channel(kind: str) -> None:
    if min_channels(kind) == 1:
        assert create_channel_attention(kind, 1)(torch.randn(2, 1, 4, 4)).shape == (2, 1, 4, 4)
        return
    with pytest.raises(ValueError, match=rf"'{kind}' needs channels >= 2, got 1.*simam") as error:
        create_channel_attention(kind, 1)
    legal = str(error.value).split("legal here: ")[1].split(", ")
    assert legal == [name for name in KINDS if min_channels(name) == 1]
    assert legal == list_channel_attention(channels=1)


@every_kind
@pytest.mark.parametrize("channels", [0, -4, 2.5, True, "16", None])
def test_channels_must_be_a_positive_integer(kind: str, channels: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^channels \({channels!r}\) must be .*at "):
        create_channel_attention(kind, channels)


@every_kind
def test_an_input_of_another_shape_is_named(kind: str) -> None:
    module = create_channel_attention(kind, 16)
    for shape in ((2, 8, 4, 4), (2, 16, 4)):
        with pytest.raises(ValueError, match=rf"'{kind}' expects \(b, 16, y, x\), got \(2, "):
            module(torch.randn(shape))


@every_kind
def test_unknown_options_are_refused_with_the_known_ones(kind: str) -> None:
    known = channel_attention_options(kind)
    with pytest.raises(TypeError, match=f"{kind!r} has no option 'reduction'") as error:
        create_channel_attention(kind, 16, reduction=4)
    assert all(name in str(error.value) for name in known)
    assert all(default is not inspect.Parameter.empty for default in known.values())


@pytest.mark.parametrize("kind", [k for k in KINDS if "rd_ratio" in channel_attention_options(k)])
@pytest.mark.parametrize("rd_ratio", [0, -0.25, 1.5, 16, math.nan, True, "1/4"])
def test_rd_ratio_out_of_range(kind: str, rd_ratio: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^rd_ratio .* in \(0, 1\], such as 1/16"):
        create_channel_attention(kind, 32, rd_ratio=rd_ratio)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "se",
            {"gate": "sigmiod"},
            r"gate \('sigmiod'\) must be .*did you mean 'sigmoid'",
        ),
        ("se", {"squeeze": "avg"}, r"squeeze \('avg'\) must be one of mean, max, both"),
        ("constant", {"squeeze": "avg"}, r"squeeze \('avg'\) must be one of mean, max, both"),
        ("se", {"min_width": 0}, r"min_width \(0\) must be at least 1"),
        ("se", {"round_to": 0}, r"round_to \(0\) must be at least 1"),
        ("ese", {"gate": "softmax"}, r"gate \('softmax'\) must be one of"),
        ("eca", {"kernel_size": 4}, r"kernel_size \(4\) must be odd .* such as 3 or 5"),
        ("eca", {"kernel_size": 0}, r"kernel_size \(0\) must be at least 1"),
        ("eca", {"min_kernel": 2}, r"min_kernel \(2\) must be odd"),
        ("cbam", {"kernel_size": 6}, r"kernel_size \(6\) must be odd"),
        ("triplet", {"kernel_size": 2.0}, r"kernel_size \(2\.0\) must be an integer"),
        ("bam", {"dilation": 0}, r"dilation \(0\) must be at least 1"),
        ("ge", {"extent": 3}, r"extent \(3\) must be one of \(0, 2, 4, 8, 16\), 0 for"),
        ("ge", {"extent": 1}, r"extent \(1\) must be one of"),
        ("ge", {"extent": -2}, r"extent \(-2\) must be at least 0"),
        ("ge", {"learned": True}, r"learned needs an extent of \(2, 4, 8, 16\)"),
        ("gc", {"min_width": 1}, r"min_width \(1\) must be >= 2: LayerNorm over one channel"),
        ("gc", {"fuse": "sum"}, r"fuse \('sum'\) must be one of add, scale"),
        ("fca", {"num_freq": 17}, r"num_freq \(17\) must be at most 16"),
        ("fca", {"num_freq": 2.5}, r"num_freq \(2\.5\) must be an integer"),
        ("fca", {"dct_size": 8}, r"dct_size \(8\) must be a multiple of 7"),
    ],
)
def test_illegal_values_name_argument_value_and_choices(
    kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        create_channel_attention(kind, 16, **options)


@pytest.mark.parametrize(
    ("kind", "option"), [(k, option) for k in KINDS for option in channel_attention_options(k)]
)
def test_options_of_a_wrong_type_or_value(kind: str, option: str) -> None:
    """Whatever the option: a new kind is swept by being registered."""
    usual = channel_attention_options(kind)[option]
    wrong: list[Any] = ["no", math.nan, {}, [], object, -3]
    wrong += [] if option == "eps" else [2.5, 8.0]
    wrong += [] if usual is None else [None]
    wrong += [2] if isinstance(usual, bool) else [True]
    wrong += [0, math.inf] if isinstance(usual, float) else []
    for value in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            create_channel_attention(kind, 32, **{option: value})
        message = str(caught.value)
        assert re.match(rf"{option} \({re.escape(repr(value))}\) must ", message), message


@every_kind
def test_numbers_of_numpy_are_taken(kind: str) -> None:
    options = {
        name: np.asarray(value)[()]
        for name, value in channel_attention_options(kind).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    module = create_channel_attention(kind, np.int64(16), **options)
    usual = create_channel_attention(kind, 16)
    assert type(module.channels) is int
    assert {n: p.shape for n, p in module.named_parameters()} == {
        n: p.shape for n, p in usual.named_parameters()
    }


@pytest.mark.parametrize("kind", [None, 3, ["se"]])
def test_a_kind_must_be_a_name(kind: Any) -> None:
    for call in (lambda: create_channel_attention(kind, 16), lambda: min_channels(kind)):
        with pytest.raises(TypeError, match=rf"^kind \({re.escape(repr(kind))}\) must .*'se'"):
            call()


def test_an_unknown_kind_names_the_nearest_and_all() -> None:
    with pytest.raises(ValueError, match=r"'cbma' \(did you mean 'cbam'\?\); valid: bam") as error:
        create_channel_attention("cbma", 16)
    assert all(kind in str(error.value) for kind in (*KINDS, "timm:NAME"))


def test_every_kind_of_the_project_is_listed() -> None:
    expected = "bam cbam coord constant eca ese fca gc gct ge none nosqueeze scse se simam srm"
    assert set(expected.split()) <= set(KINDS)
    assert sorted(KINDS) == KINDS


def test_registering_makes_a_kind_available_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vision.channel_attention.registry._kinds", {})

    @register_channel_attention("half")
    class Half(ChannelAttention):
        def gate(self, x: Tensor) -> Tensor:
            return x.new_full((1, self.channels, 1, 1), 0.5)

    assert list_channel_attention() == ["half"]
    x = torch.randn(2, 3, 4, 4)
    y, gate = shown(create_channel_attention("half", 3), x)
    assert torch.equal(y, x / 2)
    assert torch.equal(gate, torch.full((2, 3), 0.5))
    with pytest.raises(ValueError, match=r"'half' of .* is already registered by"):
        register_channel_attention("half")(Half)
    with pytest.raises(ValueError, match=r"stand for timm's"):
        register_channel_attention("timm:half")(Half)


def test_a_kind_without_gate_says_so() -> None:
    class Empty(ChannelAttention):
        pass

    with pytest.raises(NotImplementedError, match="Empty does not say"):
        Empty(4)(torch.randn(1, 4, 2, 2))


@pytest.mark.parametrize("r", range(1, 65))
def test_width_is_the_floor_division(r: int) -> None:
    """1 / r is no exact float, 49 * (1 / 49) < 1; the width is exact all the same."""
    for channels in range(1, 2049):
        assert reduced_width(channels, 1 / r) == max(1, channels // r)
    assert reduced_width(16, 1 / r, min_width=8) == max(8, 16 // r)


@pytest.mark.parametrize("options", [{}, {"rd_ratio": 1 / 4}, {"bias": False}, {"gate": "tanh"}])
def test_the_constant_gate_ignores_the_input_and_has_the_parameters_of_se(
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    se = create_channel_attention("se", 24, **options)
    torch.manual_seed(0)
    constant = create_channel_attention("constant", 24, **options)
    torch.testing.assert_close(dict(constant.state_dict()), dict(se.state_dict()))
    gates = [shown(constant, torch.randn(2, 24, 5, 5))[1] for _ in range(2)]
    assert torch.equal(gates[0], gates[1])
    assert torch.equal(gates[0][0], gates[0][1])
    ones = torch.ones(2, 24, 5, 5)
    torch.testing.assert_close(constant(ones), se(ones))


def test_none_returns_its_input() -> None:
    x = torch.randn(2, 4, 3, 3)
    module = create_channel_attention("none", 4)
    assert module(x) is x
    assert torch.equal(shown(module, x)[1], torch.ones(2, 4))


def test_a_norm_on_single_values_uses_and_keeps_the_running_statistics() -> None:
    module = shaken("srm", 8).train()
    module(torch.randn(4, 8, 5, 5))
    before = copy.deepcopy(module.norm)
    x = torch.randn(1, 8, 5, 5)
    y = module(x)
    assert torch.equal(module.norm.running_mean, before.running_mean)
    assert torch.equal(module.norm.num_batches_tracked, before.num_batches_tracked)
    torch.testing.assert_close(y, module.eval()(x))
