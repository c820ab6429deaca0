"""Position biases against T5 of transformers, timm's RelPosBias and plain loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from timm.layers import RelPosBias, resize_rel_pos_bias_table_simple
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from zoo.layers.bias import (
    PositionBias,
    PriorBias,
    RelativeBias1d,
    RelativeBiasGrid,
    resample_prior,
    resample_table,
)

Grid = tuple[int, int]

# A bias, and numbers of queries and keys that it has values for.
CASES: dict[str, tuple[Callable[[], PositionBias], int, int]] = {
    "1d": (lambda: RelativeBias1d(3, max_distance=20, num_buckets=8), 9, 9),
    "1d-causal": (lambda: RelativeBias1d(3, 20, 8, bidirectional=False), 9, 9),
    "1d-few-queries": (lambda: RelativeBias1d(3), 4, 9),
    "1d-many-queries": (lambda: RelativeBias1d(3), 9, 4),
    "grid": (lambda: RelativeBiasGrid(3, (2, 5)), 10, 10),
    "grid-class": (lambda: RelativeBiasGrid(3, (2, 5), 1), 11, 11),
    "grid-registers": (lambda: RelativeBiasGrid(3, (4, 2), 3), 11, 11),
    "prior": (lambda: PriorBias(3, 7), 5, 7),
    "prior-grid": (lambda: PriorBias(3, (2, 3), 1), 4, 7),
}


def filled(make: Callable[[], PositionBias]) -> PositionBias:
    bias = make()
    for parameter in bias.parameters():
        nn.init.normal_(parameter)
    return bias


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> tuple[PositionBias, int, int]:
    make, i, j = request.param
    return filled(make), i, j


def test_at_gathered_places_equals_all_pairs(case: tuple[PositionBias, int, int]) -> None:
    bias, i, j = case
    full = bias.lower(i, j)
    assert full.shape == (1, 3, i, j)
    shapes = [
        ((6,), (6,)),
        ((4, 1), (4, 5)),
        ((5,), (2, 1)),
        ((2, 3, 1), (4,)),
        ((), ()),
        ((0,),) * 2,
    ]
    for rows_shape, cols_shape in shapes:
        rows, cols = torch.randint(i, rows_shape), torch.randint(j, cols_shape)
        out = bias.at(rows, cols, i, j)
        assert out.shape == (1, 3, *torch.broadcast_shapes(rows_shape, cols_shape))
        assert torch.equal(out, full[:, :, rows, cols])
    small = bias.at(rows.to(torch.uint8), cols.int(), i, j)
    assert torch.equal(small, out)
    every = bias.at(torch.arange(i)[:, None], torch.arange(j)[None], i, j)
    assert torch.equal(every, full)


def test_gradients_reach_the_table(case: tuple[PositionBias, int, int]) -> None:
    """Each entry gets the sum of what the pairs that use it get."""
    bias, i, j = case
    (table,) = bias.parameters()
    weight = torch.randn(1, 3, i, j)
    (bias.lower(i, j) * weight).sum().backward()
    grad = table.grad
    assert grad is not None
    with torch.no_grad():
        table.copy_(torch.arange(len(table))[:, None].expand_as(table))
        entries = bias.lower(i, j)[0].long()
    expected = torch.zeros_like(table)
    for head, query, key in torch.cartesian_prod(*map(torch.arange, (3, i, j))).tolist():
        expected[entries[head, query, key], head] += weight[0, head, query, key]
    torch.testing.assert_close(grad, expected)


def test_dtype_is_the_parameters(case: tuple[PositionBias, int, int]) -> None:
    bias, i, j = case
    with torch.autocast("cpu", torch.bfloat16):
        assert bias.lower(i, j).dtype == torch.float32
    rounded = bias.lower(i, j).bfloat16()
    assert torch.equal(bias.bfloat16().lower(i, j), rounded)


def test_copies_state_and_tracing(case: tuple[PositionBias, int, int]) -> None:
    bias, i, j = case
    assert len(bias.state_dict()) == 1
    twin = copy.deepcopy(bias)
    assert torch.equal(twin.lower(i, j), bias.lower(i, j))
    rows, cols = torch.randint(i, (4, 1)), torch.randint(j, (5,))
    torch.compiler.reset()  # the cases share one function, and its count of recompilations
    traced = torch.compile(bias.at, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(rows, cols, i, j), bias.at(rows, cols, i, j))


def test_positions_outside(case: tuple[PositionBias, int, int]) -> None:
    bias, i, j = case
    inside = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=rf"rows must lie in \[0, {i}\), got 0 to {i}"):
        bias.at(torch.tensor([0, i]), inside, i, j)
    with pytest.raises(ValueError, match=rf"cols must lie in \[0, {j}\), got -1 to 0"):
        bias.at(inside, torch.tensor([-1, 0]), i, j)
    with pytest.raises(TypeError, match=r"rows must hold integers, got torch.float32"):
        bias.at(inside.float(), inside, i, j)
    with pytest.raises(TypeError, match=r"cols must hold integers, got torch.bool"):
        bias.at(inside, inside.bool(), i, j)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("max_distance", "num_buckets"), [(128, 32), (20, 8), (1000, 64), (100, 4), (9, 16), (77, 22)]
)
def test_buckets_equal_t5(bidirectional: bool, max_distance: int, num_buckets: int) -> None:
    bias = RelativeBias1d(2, max_distance, num_buckets, bidirectional)
    distance = torch.arange(-3000, 3001)
    expected = T5Attention._relative_position_bucket(
        distance, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(bias.bucket(distance), expected)


def test_made_without_memory(case: tuple[PositionBias, int, int]) -> None:
    """On the meta device, then on the CPU with loaded weights."""
    bias, i, j = case
    empty = copy.deepcopy(bias).to("meta")
    assert empty.lower(i, j).device.type == "meta"
    empty.to_empty(device="cpu").load_state_dict(bias.state_dict())
    assert torch.equal(empty.lower(i, j), bias.lower(i, j))
    with torch.device("meta"):
        assert RelativeBias1d(3).lower(4, 4).shape == (1, 3, 4, 4)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("i", "j"), [(300, 300), (1, 200), (50, 60)])
def test_bias_equals_t5(bidirectional: bool, i: int, j: int) -> None:
    bias = filled(lambda: RelativeBias1d(3, bidirectional=bidirectional))
    t5 = SimpleNamespace(
        relative_attention_bias=bias.relative_attention_bias,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        is_decoder=not bidirectional,
        _relative_position_bucket=T5Attention._relative_position_bucket,
    )
    expected = T5Attention.compute_bias(t5, j, j)[:, :, j - i :]  # the last i queries
    assert torch.equal(bias.lower(i, j), expected)


@pytest.mark.parametrize("grid", [(7, 7), (3, 5), (4, 2), (1, 6), (1, 1)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_grid_equals_timm(grid: Grid, prefix: int) -> None:
    ours, theirs = RelativeBiasGrid(3, grid, prefix), RelPosBias(grid, 3, prefix)
    ours.load_state_dict(theirs.state_dict())
    n = prefix + math.prod(grid)
    assert torch.equal(ours.lower(n, n), theirs.get_bias())


def test_grid_with_registers() -> None:
    """Every prefix token uses the three entries that a single one does."""
    one, four = filled(lambda: RelativeBiasGrid(3, (2, 3), 1)), RelativeBiasGrid(3, (2, 3), 4)
    four.load_state_dict(one.state_dict())
    same = torch.tensor([0, 0, 0, 0, 1, 2, 3, 4, 5, 6])
    assert torch.equal(four.lower(10, 10), one.lower(7, 7)[:, :, same[:, None], same])


def test_initial_tables() -> None:
    for table in (
        RelativeBias1d(500).relative_attention_bias.weight,
        RelativeBiasGrid(50, (7, 7)).relative_position_bias_table,
    ):
        assert table.std().item() == pytest.approx(0.02, rel=0.1)
    assert not PriorBias(3, (2, 3), 1).prior.any()


def test_prior_is_of_the_key_alone() -> None:
    bias = filled(lambda: PriorBias(3, (2, 3), 1))
    assert isinstance(bias, PriorBias)
    full = bias.lower(4, 7)
    for query in range(4):
        assert torch.equal(full[0, :, query], bias.prior.T)


@pytest.mark.parametrize(("size", "prefix"), [(7, 0), (5, 2), ((2, 3), 1)])
def test_prior_from_places(size: int | Grid, prefix: int) -> None:
    """Equal scores attend in proportion to the places."""
    places = torch.rand(7) + 0.1
    bias = PriorBias(3, size, prefix, places=places)
    attention = bias.lower(4, 7).softmax(dim=-1)
    torch.testing.assert_close(attention, (places / places.sum()).expand(1, 3, 4, 7))
    bias.lower(4, 7).sum().backward()
    assert bias.prior.grad is not None


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resampling_a_table(extra: int, dtype: torch.dtype) -> None:
    table = torch.randn(9 * 13 + extra, 4).to(dtype)
    assert torch.equal(resample_table(table, (5, 7), (5, 7)), table)
    for new in ((5, 8), (9, 7), (3, 3), (1, 1)):
        out = resample_table(table, (5, 7), new)
        assert out.shape == ((2 * new[0] - 1) * (2 * new[1] - 1) + extra, 4)
        assert out.dtype == dtype
        assert torch.equal(out[len(out) - extra :], table[len(table) - extra :])


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("new", [(10, 10), (4, 4), (5, 9)])
def test_resampling_a_table_equals_timm(extra: int, new: Grid) -> None:
    table = torch.randn(13 * 13 + extra, 4)
    shape = ((2 * new[0] - 1) * (2 * new[1] - 1) + extra, 4)
    expected = resize_rel_pos_bias_table_simple(table, new, shape)
    torch.testing.assert_close(resample_table(table, (7, 7), new), expected)


def test_resampling_keeps_rows_and_the_center() -> None:
    """A symmetric table of offsets in rows stays one, with its peak at offset 0."""
    peak = -torch.arange(-3.0, 4.0).abs()[:, None].expand(7, 5).reshape(-1, 1)
    out = resample_table(peak, (4, 3), (6, 2)).view(11, 3)
    torch.testing.assert_close(out, out[:, :1].expand(11, 3))
    torch.testing.assert_close(out, out.flip(0))
    assert out[:, 0].argmax() == 5


def test_resampling_a_prior() -> None:
    prior = torch.randn(1 + 6, 3)
    for old, new in ((6, 11), ((2, 3), (4, 5))):
        assert torch.equal(resample_prior(prior, old, old, num_prefix_tokens=1), prior)
        out = resample_prior(prior, old, new, num_prefix_tokens=1)
        PriorBias(3, new, 1).load_state_dict({"prior": out})
        assert torch.equal(out[0], prior[0])
    line = torch.arange(6.0)[:, None].expand(6, 3)
    expected = torch.arange(0.0, 5.5, 0.5)[:, None].expand(11, 3)
    torch.testing.assert_close(resample_prior(line, 6, 11), expected)


def test_resampling_errors() -> None:
    table, prior = torch.zeros(15, 2), torch.zeros(6, 2)
    with pytest.raises(ValueError, match=r"table must be \(9, h\), or \(12, h\).*got \(15, 2\)"):
        resample_table(table, (2, 2), (3, 3))
    with pytest.raises(ValueError, match=r"grid \(\(0, 3\)\) must be"):
        resample_table(table, (2, 3), (0, 3))
    with pytest.raises(ValueError, match=r"prior has 6 tokens.*\(1\) and length 6 make 7"):
        resample_prior(prior, 6, 8, num_prefix_tokens=1)
    with pytest.raises(ValueError, match=r"old_size \(6\) and new_size \(\(2, 3\)\)"):
        resample_prior(prior, 6, (2, 3))
    with pytest.raises(ValueError, match=r"prior must be \(n, h\), got \(1, 6, 2\)"):
        resample_prior(prior[None], 6, 8)


def test_wrong_counts() -> None:
    grid = RelativeBiasGrid(3, (2, 5), 1)
    for i, j, name in ((10, 11, "i"), (11, 12, "j")):
        message = rf"{name} has 1[02] tokens.*prefix_tokens \(1\) and grid \(2, 5\) make 11"
        with pytest.raises(ValueError, match=message):
            grid.lower(i, j)
        with pytest.raises(ValueError, match=message):
            grid.at(torch.tensor(0), torch.tensor(0), i, j)
    with pytest.raises(ValueError, match=r"j has 6 tokens.*length 7 make 7"):
        PriorBias(3, 7).lower(2, 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativeBias1d(0), r"num_heads \(0\) must be at least 1"),
        (lambda: RelativeBias1d(2, num_buckets=7), r"num_buckets \(7\) must be even and at least"),
        (
            lambda: RelativeBias1d(2, num_buckets=2),
            r"num_buckets \(2\) must be even and at least 4",
        ),
        (lambda: RelativeBias1d(2, 9, 1, False), r"num_buckets \(1\) must be at least 2"),
        (lambda: RelativeBias1d(2, 8), r"max_distance \(8\) must exceed 8,.*num_buckets \(32\)"),
        (lambda: RelativeBiasGrid(2, (0, 2)), r"grid \(\(0, 2\)\) must be \(rows, columns\)"),
        (lambda: RelativeBiasGrid(2, (2, 2), -1), r"num_prefix_tokens \(-1\) must be at least 0"),
        (lambda: PriorBias(2, 0), r"size \(0\) must be at least 1, or \(rows, columns\)"),
        (lambda: PriorBias(2, 3, places=torch.ones(4)), r"places must be \(3,\).*got \(4,\)"),
        (
            lambda: PriorBias(2, 3, places=torch.tensor([0.0, 1.0, 2.0])),
            r"places must be positive and finite, got 0 to 2",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_gradients_are_summed_in_fp32() -> None:
    """10,000 pairs that share an entry: a running sum in bf16 would stop at 256."""
    bias = RelativeBias1d(1, 2, 4).bfloat16()
    bias.lower(1, 10002).sum().backward()
    grad: Tensor | None = bias.relative_attention_bias.weight.grad
    assert grad is not None
    assert grad.float().max().item() == pytest.approx(10000, rel=0.01)
