"""Positions against plain loops in float64 and against timm's resampling."""

from __future__ import annotations

import math

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from zoo.layers import resample_1d, resample_grid, sincos_1d, sincos_2d


def loop_1d(n: int, dim: int, temperature: float) -> list[list[float]]:
    table = [[0.0] * dim for _ in range(n)]
    for pos in range(n):
        for channel in range(0, dim, 2):
            angle = pos / temperature ** (channel / dim)
            table[pos][channel], table[pos][channel + 1] = math.sin(angle), math.cos(angle)
    return table


@pytest.mark.parametrize(("n", "dim", "temperature"), [(7, 6, 10000.0), (1000, 16, 100.0)])
def test_sincos_1d(n: int, dim: int, temperature: float) -> None:
    table = sincos_1d(n, dim, temperature=temperature)
    assert table.dtype == torch.float32
    expected = torch.tensor(loop_1d(n, dim, temperature), dtype=torch.float64)
    torch.testing.assert_close(table.double(), expected, atol=1e-7, rtol=0)


def test_a_shift_is_linear() -> None:
    """PE[p + k] is a rotation of PE[p] that depends on k alone."""
    table = sincos_1d(50, 8).double()
    shift = torch.linalg.lstsq(table[:40], table[5:45]).solution
    torch.testing.assert_close(
        table[5:] @ torch.eye(8).double(), table[:45] @ shift, atol=1e-4, rtol=0
    )


def test_sincos_2d() -> None:
    rows, cols, dim = 3, 5, 8
    table = sincos_2d((rows, cols), dim)
    assert table.shape == (rows * cols, dim)
    by_row, by_col = loop_1d(rows, dim // 2, 10000.0), loop_1d(cols, dim // 2, 10000.0)
    for y in range(rows):
        for x in range(cols):
            expected = torch.tensor(by_row[y] + by_col[x])
            torch.testing.assert_close(table[y * cols + x], expected)


def test_sincos_width() -> None:
    with pytest.raises(ValueError, match=r"dim \(7\) must be even"):
        sincos_1d(4, 7)
    with pytest.raises(ValueError, match=r"dim \(6\) must be divisible by 4"):
        sincos_2d((2, 2), 6)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("old", [(14, 14), (8, 16)])
@pytest.mark.parametrize("new", [(14, 14), (8, 16), (16, 8), (10, 6), (20, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resampling_equals_timm(
    prefix: int, old: tuple[int, int], new: tuple[int, int], dtype: torch.dtype
) -> None:
    pos = torch.randn(1, prefix + math.prod(old), 6).to(dtype)
    out = resample_grid(pos, old, new, num_prefix_tokens=prefix)
    expected = resample_abs_pos_embed(pos, list(new), list(old), num_prefix_tokens=prefix)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[:, :prefix], pos[:, :prefix])  # B3
    if old == new:
        assert torch.equal(out, pos)


def test_resampling_without_antialiasing_and_by_another_mode() -> None:
    pos = torch.randn(1, 64, 6)
    for options in ({"antialias": False}, {"mode": "bilinear"}):
        out = resample_grid(pos, (8, 8), (5, 5), num_prefix_tokens=0, **options)
        names = {"mode": "interpolation"}
        theirs = {names.get(name, name): value for name, value in options.items()}
        expected = resample_abs_pos_embed(pos, [5, 5], [8, 8], num_prefix_tokens=0, **theirs)
        torch.testing.assert_close(out, expected)


def test_rows_are_rows() -> None:
    """A table that varies by row only still does so on a grid of another shape."""
    pos = torch.arange(4.0)[:, None].expand(4, 6).reshape(1, 24, 1)
    out = resample_grid(pos, (4, 6), (8, 3), num_prefix_tokens=0).view(8, 3)
    torch.testing.assert_close(out, out[:, :1].expand(8, 3))
    assert (out[1:] > out[:-1]).all()


def test_old_grid_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(1, 17, d\).*1 prefix.*\(4, 4\), got \(1, 16, 6\)"):
        resample_grid(torch.zeros(1, 16, 6), (4, 4), (8, 8), num_prefix_tokens=1)


@pytest.mark.parametrize("length", [2, 5, 9, 31])
def test_resample_1d(length: int) -> None:
    pos = torch.randn(1, 1 + 9, 3)
    out = resample_1d(pos, 1 + length, num_prefix_tokens=1)
    assert torch.equal(out[:, 0], pos[:, 0])
    for new in range(length):  # where the new position falls on the old axis
        place = new * 8 / (length - 1)
        low = min(int(place), 7)
        expected = pos[0, 1 + low].lerp(pos[0, 2 + low], place - low)
        torch.testing.assert_close(out[0, 1 + new], expected, atol=1e-5, rtol=1e-5)


def test_resample_1d_keeps_what_fits() -> None:
    pos = torch.randn(1, 10, 3).bfloat16()
    assert torch.equal(resample_1d(pos, 10), pos)
    assert resample_1d(pos, 5).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"length \(1\) must exceed num_prefix_tokens \(1\)"):
        resample_1d(pos, 1, num_prefix_tokens=1)
