"""The attention core against a float64 formula, on both paths, with the faults others met.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.layers import Mask, Tap, attend, attention_weights, explicit_attention

TOLERANCE = {
    torch.float32: {"atol": 2e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float16: {"atol": 3e-3, "rtol": 3e-3},
}

both_paths = pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)


def make(
    b: int = 2, h: int = 2, i: int = 5, j: int = 5, e: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    shapes = [(b, h, i, e), (b, h, j, e), (b, h, j, e)]
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]


def reference_weights(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Softmax by its definition, in float64 and row by row."""
    q, k = q.detach().double(), k.detach().double()
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool)
    allowed = allowed.expand(weights.shape)
    for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in q.shape[:3])).tolist():
        keys = allowed[b, h, i].nonzero().flatten().tolist()
        scores = [scale * float(q[b, h, i] @ k[b, h, j]) for j in keys]
        exps = [math.exp(score - max(scores)) for score in scores]
        for j, value in zip(keys, exps, strict=True):
            weights[b, h, i, j] = value / sum(exps)
    return weights


def reference(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    return reference_weights(q, k, allowed, q.shape[-1] ** -0.5) @ v.detach().double()


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=draw).to(out.dtype))


def masks(b: int, i: int, j: int) -> dict[str, Mask | Tensor | None]:
    draw = torch.Generator().manual_seed(1)
    padding = Mask.padding(torch.tensor([j - 2, j][:b]))
    segments = torch.randint(0, 3, (b, i), generator=draw)
    keys = torch.randint(0, 3, (b, j), generator=draw)
    return {
        "none": None,
        "padding": padding,
        "causal": Mask.causal(),
        "padding and causal": padding & Mask.causal(),
        "segment": Mask.segment(segments, keys),
        "per head": torch.rand(1, 2, i, j, generator=draw) > 0.4,
        "rows and columns": torch.rand(i, j, generator=draw) > 0.4,
        "one row": torch.rand(b, 1, 1, j, generator=draw) > 0.4,
        "one column": torch.rand(b, 1, i, 1, generator=draw) > 0.4,
        "nothing": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
    }


def lowered(mask: Mask | Tensor | None, i: int, j: int) -> Tensor | None:
    rule = Mask.of(mask)
    return None if rule is None else rule.lower(i, j)


@both_paths
def test_worked_example(fused: bool) -> None:
    q = torch.tensor([[[[0.8, 0.2]]]])
    k = torch.tensor([[[[0.9, 0.1], [0.1, 0.9]]]])
    expected = torch.tensor([0.584, 0.416])
    torch.testing.assert_close(attention_weights(q, k)[0, 0, 0], expected, atol=5e-4, rtol=0)
    out = attend(q, k, torch.eye(2)[None, None], fused=fused)
    torch.testing.assert_close(out[0, 0, 0], expected, atol=5e-4, rtol=0)


@both_paths
@both_dtypes
@pytest.mark.parametrize(("i", "j"), [(5, 5), (3, 5), (5, 3)])
@pytest.mark.parametrize("kind", list(masks(2, 5, 5)))
def test_equals_the_formula(kind: str, i: int, j: int, dtype: torch.dtype, fused: bool) -> None:
    mask = masks(2, i, j)[kind]
    q, k, v = make(i=i, j=j, dtype=dtype)
    out = attend(q, k, v, mask, fused=fused)
    assert out.dtype == dtype
    expected = reference(q, k, v, lowered(mask, i, j))
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])


@both_dtypes
@pytest.mark.parametrize(("i", "j"), [(5, 5), (3, 5), (5, 3)])
@pytest.mark.parametrize("kind", list(masks(2, 5, 5)))
def test_gradients_of_both_paths_agree(kind: str, i: int, j: int, dtype: torch.dtype) -> None:
    mask = masks(2, i, j)[kind]
    inputs = make(i=i, j=j, dtype=dtype)
    fused, explicit = (gradients(attend(*inputs, mask, fused=f), inputs) for f in (True, False))
    for left, right in zip(fused, explicit, strict=True):
        assert left.isfinite().all()
        torch.testing.assert_close(left, right, **TOLERANCE[dtype])


@both_dtypes
@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.padding([400, 0]) & Mask.causal()])
def test_paths_agree_beyond_one_tile(mask: Mask | None, dtype: torch.dtype) -> None:
    """Fused kernels work in tiles; rows here span several, and some tiles are fully masked."""
    inputs = make(i=300, j=700, dtype=dtype)
    fused, explicit = (attend(*inputs, mask, fused=f) for f in (True, False))
    torch.testing.assert_close(fused, explicit, **TOLERANCE[dtype])
    for left, right in zip(gradients(fused, inputs), gradients(explicit, inputs), strict=True):
        torch.testing.assert_close(left, right, atol=TOLERANCE[dtype]["atol"] * 4, rtol=2e-2)


@both_paths
@pytest.mark.parametrize("kind", ["padding and causal", "segment", "nothing"])
def test_gradients_are_derivatives(kind: str, fused: bool) -> None:
    inputs = [x.detach().double().requires_grad_() for x in make(b=2, h=2, i=3, j=4, e=3)]
    mask = masks(2, 3, 4)[kind]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask, fused=fused), inputs)


@both_paths
def test_scale_and_a_value_width_of_its_own(fused: bool) -> None:
    q, k, _ = make()
    v = torch.randn(2, 2, 5, 3)
    out = attend(q, k, v, scale=0.1, fused=fused)
    expected = reference_weights(q, k, None, 0.1) @ v.double()
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])


@both_paths
@both_dtypes
def test_a_fully_padded_sample_gives_zeros(dtype: torch.dtype, fused: bool) -> None:  # A1
    inputs = make(dtype=dtype)
    out = attend(*inputs, Mask.padding(torch.tensor([5, 0])), fused=fused)
    assert (out[1] == 0).all()
    alone = [x.detach()[:1].requires_grad_() for x in inputs]
    out_alone = attend(*alone, Mask.padding(torch.tensor([5])), fused=fused)
    torch.testing.assert_close(out[:1], out_alone, **TOLERANCE[dtype])
    loss = out.float().square().mean()
    assert loss.isfinite()
    grads = torch.autograd.grad(loss, inputs)
    grads_alone = torch.autograd.grad(out_alone.float().square().sum() / out.numel(), alone)
    for grad, grad_alone in zip(grads, grads_alone, strict=True):
        assert (grad[1] == 0).all()
        torch.testing.assert_close(grad[:1], grad_alone, **TOLERANCE[dtype])


@both_paths
@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -1e4])
def test_a_float_mask_is_refused(fill: float, fused: bool) -> None:  # A2, A5
    additive = torch.zeros(2, 1, 1, 5).masked_fill(torch.arange(5) > 2, fill)
    with pytest.raises(TypeError, match=r"mask must be bool .*float32.*mask == 0"):
        attend(*make(), additive, fused=fused)


@both_paths
def test_true_means_may_attend(fused: bool) -> None:  # A5
    q, k, v = make()
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:, 3] = True
    torch.testing.assert_close(attend(q, k, v, mask, fused=fused), v[:, :, 3:4].expand_as(v))
    inverted = attend(q, k, v, ~mask, fused=fused)
    others = [x[:, :, [0, 1, 2, 4]] for x in (k, v)]
    torch.testing.assert_close(inverted, attend(q, *others, fused=fused))


def test_a_mask_that_does_not_broadcast_is_refused() -> None:
    q, k, v = make(i=5, j=4)
    with pytest.raises(ValueError, match=r"mask \(1, 1, 2, 4\).*\(2, 2, 5, 4\).*\(b, 1, 1, j\)"):
        attend(q, k, v, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask \(3, 1, 1, 4\)"):
        attend(q, k, v, Mask.padding(torch.tensor([1, 2, 3])))


@both_paths
@pytest.mark.parametrize(("i", "j"), [(3, 5), (5, 3), (4, 4)])
def test_causal_is_aligned_to_the_end(i: int, j: int, fused: bool) -> None:  # A6
    q, k, _ = make(i=i, j=j)
    v = torch.eye(j).expand(2, 2, j, j)  # so that the output is the weights
    seen = attend(q, k, v, Mask.causal(), fused=fused) > 0
    for query in range(i):
        for key in range(j):
            visible = (j - 1 - key) >= (i - 1 - query)  # counted from the ends
            assert (seen[:, :, query, key] == visible).all()


@both_paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_and_causal_in_half_precision(dtype: torch.dtype, fused: bool) -> None:  # A8
    q, k, v = make(dtype=dtype)
    q, k = ((150 * x).detach().requires_grad_() for x in (q, k))  # fp16 ends at 65,504
    assert (q @ k.transpose(-2, -1)).detach().abs().max() > 65_504
    mask = Mask.padding(torch.tensor([3, 0])) & Mask.causal()
    out = attend(q, k, v, mask, fused=fused)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(out, [q, k, v]))
    expected = reference(q, k, v, mask.lower(5, 5))
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])


@both_paths
@both_dtypes
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_unseen_keys_do_not_leak(junk: float, dtype: torch.dtype, fused: bool) -> None:
    clean = make(dtype=dtype)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[0, :, 3:], x[1] = junk, junk
    dirty[0][0] = clean[0].detach()[0]  # queries of the first sample see something
    dirty = [x.requires_grad_() for x in dirty]
    mask = Mask.padding(torch.tensor([3, 0]))
    outs = [attend(*inputs, mask, fused=fused) for inputs in (clean, dirty)]
    assert torch.equal(*outs)
    for left, right in zip(gradients(outs[0], clean), gradients(outs[1], dirty), strict=True):
        assert torch.equal(left, right)
    weights = attention_weights(dirty[0], dirty[1], mask)
    assert set(weights.sum(-1).round(decimals=5).unique().tolist()) == {0.0, 1.0}
    assert all(grad.isfinite().all() for grad in gradients(weights, dirty[:2]))


@both_paths
def test_values_of_padding_do_not_matter(fused: bool) -> None:  # A12
    """All samples end in padding; longer padding changes nothing, in shape or value."""
    q, k, v = make(j=5)
    mask = Mask.padding(torch.tensor([3, 2]))
    short = attend(q, k[:, :, :3], v[:, :, :3], Mask.padding(torch.tensor([3, 2])), fused=fused)
    out = attend(q, k, v, mask, fused=fused)
    assert out.shape == short.shape
    torch.testing.assert_close(out, short)


@both_paths
def test_no_keys_at_all(fused: bool) -> None:
    q, k, v = make(j=0)
    assert (attend(q, k, v, fused=fused) == 0).all()
    assert attend(q, k, v, fused=fused).shape == q.shape


@both_dtypes
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_tap_changes_no_bit(dtype: torch.dtype, dropout_p: float) -> None:  # A3, A9
    inputs = make(dtype=dtype)
    mask = Mask.padding(torch.tensor([4, 0])) & Mask.causal()
    tap, seen = Tap(), []
    torch.manual_seed(0)
    without = attend(*inputs, mask, dropout_p=dropout_p, tap=tap)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with tap.observe(seen.append):
        observed = attend(*inputs, mask, dropout_p=dropout_p, tap=tap)
    assert torch.equal(without, observed)
    assert torch.equal(after, torch.get_rng_state())
    for left, right in zip(gradients(without, inputs), gradients(observed, inputs), strict=True):
        assert torch.equal(left, right)
    (weights,) = seen
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    sums = weights.sum(-1)
    torch.testing.assert_close(sums[0], torch.ones_like(sums[0]))
    assert (sums[1] == 0).all()
    entropy = torch.special.entr(weights).sum(-1)  # dropped-out weights would break the bounds
    assert (entropy >= 0).all()
    assert (entropy <= math.log(5) + 1e-6).all()


@both_dtypes
def test_weights_equal_the_formula(dtype: torch.dtype) -> None:
    q, k, _ = make(dtype=dtype)
    mask = masks(2, 5, 5)["segment"]
    weights = attention_weights(q, k, mask)
    assert weights.dtype == torch.float32
    expected = reference_weights(q, k, lowered(mask, 5, 5), 8**-0.5)
    torch.testing.assert_close(weights.double(), expected, **TOLERANCE[torch.float32])


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    q, k, _ = make(b=64, h=16)
    v = torch.eye(5).expand(64, 16, 5, 5)
    plain = attend(q, k, v)
    for fused in (True, False):
        dropped = attend(q, k, v, dropout_p=0.5, fused=fused)
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], 2 * plain[kept])
        assert 0.45 < kept.float().mean() < 0.55


class SoftmaxDtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._softmax.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_softmax_is_fp32_under_autocast() -> None:
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16), SoftmaxDtypes() as softmax:
        explicit = attend(q, k, v, fused=False)
        fused = attend(q, k, v)
        assert attention_weights(q, k).dtype == torch.float32
    assert set(softmax.dtypes) == {torch.float32}
    assert explicit.dtype == fused.dtype == torch.bfloat16
    rounded = [x.detach().bfloat16() for x in (q, k, v)]
    expected = reference(*rounded, None)
    for out in (explicit, fused):
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.bfloat16])


def test_autocast_accepts_the_mixed_dtypes_of_qk_norm() -> None:
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        for fused in (True, False):
            assert attend(q, k, v.bfloat16(), fused=fused).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"one dtype.*float32.*bfloat16"):
        attend(q, k, v.bfloat16())


def test_explicit_context_forces_the_path_and_ends() -> None:
    q, k, v = make()
    with SoftmaxDtypes() as softmax, explicit_attention():
        with explicit_attention():
            attend(q, k, v)
        attend(q, k, v, fused=True)
    assert len(softmax.dtypes) == 2
    with SoftmaxDtypes() as softmax:
        attend(q, k, v)
    assert not softmax.dtypes


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 5, 8)] * 3, r"four axes.*\(2, 5, 8\)"),
        ([(2, 2, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)], r"batch and heads.*\(2, 3, 5, 8\)"),
        ([(2, 2, 5, 8), (2, 2, 5, 4), (2, 2, 5, 8)], "head width"),
        ([(2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 4, 8)], "number of positions"),
    ],
)
def test_shapes_that_do_not_fit(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "segment"])
def test_compiles_without_a_break(kind: str) -> None:
    inputs, tap, mask = make(), Tap(), masks(2, 5, 5)[kind]
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with explicit_attention():
        explicit = compiled(*inputs, mask, tap=tap)
        assert torch.equal(explicit, attend(*inputs, mask, tap=tap))
    assert torch.equal(compiled(*inputs, mask, tap=tap), attend(*inputs, mask))
    assert torch.equal(compiled(*inputs, copy.copy(mask), tap=tap), attend(*inputs, mask))
