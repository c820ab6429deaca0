"""Rotary positions against complex numbers in float64 and against timm's."""

from __future__ import annotations

import cmath
import copy
import io
import math
import pickle

import pytest
import torch
from timm.layers import apply_rot_embed_cat, build_rotary_pos_embed
from torch import Tensor

from zoo.layers.rope import Rope

GRIDS = [None, (3, 5), (4, 2)]
Grid = tuple[int, int]


def turn(x: Tensor, place: float, temperature: float) -> Tensor:
    """One token's channels, pair by pair, as complex numbers in a plain loop."""
    out = torch.empty_like(x, dtype=torch.float64)
    for channel in range(0, len(x), 2):
        angle = place / temperature ** (channel / len(x))
        z = complex(x[channel], x[channel + 1]) * cmath.exp(1j * angle)
        out[channel], out[channel + 1] = z.real, z.imag
    return out


def reference(x: Tensor, first: int, grid: Grid | None, prefix: int, temperature: float) -> Tensor:
    """`x` (b h n e), whose first token is at index `first`."""
    out = x.double().clone()
    half = x.shape[-1] // 2
    for b, h, n in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        token, index = x[b, h, n].double(), first + n - prefix
        if index < 0:
            continue
        if grid is None:
            out[b, h, n] = turn(token, index, temperature)
        else:
            y, x_ = divmod(index, grid[1])
            turned = turn(token[:half], y, temperature), turn(token[half:], x_, temperature)
            out[b, h, n] = torch.cat(turned)
    return out


def tokens(grid: Grid | None, prefix: int = 0) -> int:
    return prefix + (9 if grid is None else math.prod(grid))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("temperature", [None, 50.0])
def test_equals_complex_numbers(grid: Grid | None, prefix: int, temperature: float | None) -> None:
    rope = Rope(8, grid=grid, num_prefix_tokens=prefix, temperature=temperature)
    used = temperature or (10000.0 if grid is None else 100.0)
    q, k = torch.randn(2, 2, 3, tokens(grid, prefix), 8).double()
    for x, out in zip((q, k), rope(q, k), strict=True):
        assert out.dtype == torch.float64
        expected = reference(x, 0, grid, prefix, used)
        torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-13)
        assert torch.equal(out[:, :, :prefix], x[:, :, :prefix])


@pytest.mark.parametrize("grid", [(3, 5), (4, 2)])
def test_equals_timm(grid: Grid) -> None:
    sin, cos = build_rotary_pos_embed(list(grid), dim=16, in_pixels=False, temperature=100.0)
    embed = torch.cat([sin, cos], dim=-1)
    q, k = torch.randn(2, 2, 3, tokens(grid), 16)
    for x, out in zip((q, k), Rope(16, grid=grid)(q, k), strict=True):
        torch.testing.assert_close(out, apply_rot_embed_cat(x, embed))


def test_scores_depend_on_the_distance_alone() -> None:
    """The same two vectors at every pair of places: scores are constant along diagonals."""
    q, k = torch.randn(2, 1, 1, 1, 8).double().expand(2, 1, 1, 12, 8)
    q, k = Rope(8)(q, k)
    scores = (q @ k.mT)[0, 0]
    for offset in range(-11, 12):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].unique().numel() == 12


def test_scores_depend_on_the_distances_in_rows_and_columns() -> None:
    y, x = 3, 5
    q, k = torch.randn(2, 1, 1, 1, 8).double().expand(2, 1, 1, y * x, 8)
    q, k = Rope(8, grid=(y, x))(q, k)
    scores = (q @ k.mT)[0, 0].view(y, x, y, x)
    seen: dict[tuple[int, int], float] = {}
    for yq, xq, yk, xk in torch.cartesian_prod(*map(torch.arange, (y, x, y, x))).tolist():
        score = scores[yq, xq, yk, xk].item()
        assert score == pytest.approx(seen.setdefault((yq - yk, xq - xk), score), abs=1e-12)
    assert len({round(score, 9) for score in seen.values()}) == (2 * y - 1) * (2 * x - 1)


@pytest.mark.parametrize("grid", GRIDS)
def test_norms_stay(grid: Grid | None) -> None:
    q, k = torch.randn(2, 2, 3, tokens(grid), 8)
    for x, out in zip((q, k), Rope(8, grid=grid)(q, k), strict=True):
        torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
        assert not torch.allclose(out, x)


@pytest.mark.parametrize(("i", "j"), [(1, 9), (4, 9), (9, 4), (9, 9)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_last_query_is_aligned_with_last_key(i: int, j: int, prefix: int) -> None:
    q, k = torch.randn(2, 3, i, 8).double(), torch.randn(2, 3, j, 8).double()
    q_out, k_out = Rope(8, num_prefix_tokens=prefix)(q, k)
    expected_q = reference(q, max(j - i, 0), None, prefix, 10000.0)
    expected_k = reference(k, max(i - j, 0), None, prefix, 10000.0)
    torch.testing.assert_close(q_out, expected_q)
    torch.testing.assert_close(k_out, expected_k)


def test_growing_and_shrinking_sequences() -> None:
    rope = Rope(8)
    for n in (1, 2, 5, 3, 40, 17, 65):
        q, k = torch.randn(2, 1, 1, n, 8)
        torch.testing.assert_close(rope(q, k)[0], reference(q, 0, None, 0, 10000.0).float())


@pytest.mark.parametrize("convert", ["to", "half", "bfloat16", "autocast"])
def test_angles_are_never_rounded(convert: str) -> None:
    """10,000 is 9,984 in bf16, which is another angle altogether."""
    rope = torch.nn.ModuleList([Rope(8)])
    dtype = torch.float16 if convert == "half" else torch.bfloat16
    if convert == "to":
        rope.to(torch.bfloat16)
    elif convert != "autocast":
        getattr(rope, convert)()
    q, k = torch.randn(2, 1, 1, 10001, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=convert == "autocast"):
        q_out, _ = rope[0](q, k)
        single, _ = rope[0](q.float(), k.float())
    assert q_out.dtype == dtype
    assert single.dtype == torch.float32
    last = reference(q[:, :, -1:], 10000, None, 0, 10000.0)
    torch.testing.assert_close(single[:, :, -1:].double(), last, atol=1e-6, rtol=1e-6)
    assert torch.equal(q_out, single.to(dtype))  # rounded once, at the end


def test_dtypes_of_queries_and_keys_are_kept() -> None:
    q, k = torch.randn(2, 1, 1, 4, 8)
    q_out, k_out = Rope(8)(q.half(), k.double())
    assert (q_out.dtype, k_out.dtype) == (torch.float16, torch.float64)


def test_set_grid() -> None:
    rope = Rope(8, grid=(3, 5), num_prefix_tokens=1)
    q, k = torch.randn(2, 1, 2, 16, 8)
    before = rope(q, k)[0]
    rope.set_grid((5, 3))
    fresh = Rope(8, grid=(5, 3), num_prefix_tokens=1)
    assert rope.grid == (5, 3)
    assert torch.equal(rope(q, k)[0], fresh(q, k)[0])
    assert not torch.allclose(rope(q, k)[0], before)


def test_no_state_and_clean_copies() -> None:
    rope = Rope(8, grid=(3, 5))
    q, k = torch.randn(2, 1, 2, 15, 8)
    expected = rope(q, k)[0]
    assert not rope.state_dict()
    assert not list(rope.parameters()) + list(rope.buffers())
    assert len(pickle.dumps(rope)) == len(pickle.dumps(Rope(8, grid=(3, 5))))  # no tables
    file = io.BytesIO()
    torch.save(rope, file)
    file.seek(0)
    copies = copy.deepcopy(rope), copy.copy(rope), torch.load(file, weights_only=False)
    for twin in copies:
        assert torch.equal(twin(q, k)[0], expected)
        twin.set_grid((5, 3))
    assert rope.grid == (3, 5)
    assert torch.equal(rope(q, k)[0], expected)


def test_trains_after_inference_mode() -> None:
    rope = Rope(8)
    q, k = torch.randn(2, 1, 1, 4, 8)
    with torch.inference_mode():
        rope(q, k)
    q = q.requires_grad_()
    rope(q, k)[0].square().sum().backward()
    torch.testing.assert_close(q.grad, 2 * q.detach())  # a rotation keeps the norm


def test_gradients() -> None:
    rope = Rope(4, grid=(2, 3), num_prefix_tokens=1)
    q, k = (torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(rope, (q, k))


@pytest.mark.parametrize("grid", GRIDS)
def test_traced(grid: Grid | None) -> None:
    """A traced model holds the same angles, and leaves none of its own tensors behind."""
    rope = Rope(8, grid=grid)
    q, k = torch.randn(2, 2, 3, tokens(grid), 8)
    compiled = torch.compile(rope, backend="eager", fullgraph=True)
    traced = compiled(q, k)
    assert not rope._tables
    torch.testing.assert_close(traced, rope(q, k))


def test_fake_tensors_stay_outside() -> None:
    from torch._subclasses import FakeTensorMode

    rope = Rope(8)
    q, k = torch.randn(2, 1, 1, 4, 8)
    for _ in range(2):  # before and after there are tables
        with FakeTensorMode() as mode:
            assert rope(mode.from_tensor(q), mode.from_tensor(k))[0].shape == q.shape
        assert type(rope(q, k)[0]) is Tensor


@pytest.mark.parametrize("head_dim", [0, 7])
def test_odd_width(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim \({head_dim}\) must be even"):
        Rope(head_dim)


@pytest.mark.parametrize("head_dim", [0, 6, 7])
def test_width_with_a_grid(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim \({head_dim}\) must be divisible by 4"):
        Rope(head_dim, grid=(2, 2))


def test_wrong_arguments() -> None:
    for grid in ((0, 3), (3,), 14):
        with pytest.raises(ValueError, match=r"grid \(.*\) must be \(rows, columns\)"):
            Rope(8, grid=grid)
    with pytest.raises(ValueError, match=r"num_prefix_tokens \(-1\) must be at least 0"):
        Rope(8, num_prefix_tokens=-1)
    with pytest.raises(ValueError, match=r"temperature \(0\) must be positive"):
        Rope(8, temperature=0)
    with pytest.raises(ValueError, match=r"grid \(\(2, 2\)\) needs a Rope made with one"):
        Rope(8).set_grid((2, 2))


def test_wrong_tensors() -> None:
    q, k = torch.randn(2, 1, 1, 15, 8)
    rope = Rope(8, grid=(3, 5), num_prefix_tokens=1)
    with pytest.raises(ValueError, match=r"q has 15 tokens.*prefix_tokens \(1\).*\(3, 5\) make 16"):
        rope(q, k)
    with pytest.raises(ValueError, match=r"k has 15 tokens"):
        rope(torch.randn(1, 1, 16, 8), k)
    with pytest.raises(ValueError, match=r"q must be \(b, h, n, 4\), got \(1, 1, 15, 8\)"):
        Rope(4)(q, k)
    with pytest.raises(ValueError, match=r"k must be \(b, h, n, 8\), got \(1, 15, 8\)"):
        Rope(8)(q, k[0])
    with pytest.raises(TypeError, match=r"q must be floating point, got torch.int64"):
        Rope(8)(q.long(), k)
