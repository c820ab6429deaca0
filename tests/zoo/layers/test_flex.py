"""FlexAttention serves sparse kinds with the values of the blocked code.

On a CPU it has a forward pass only; the backward pass of its kernel is torch's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.layers import Mask, flex, list_attention
from zoo.layers.factory import build_core
from zoo.layers.sparse import Sparse

N = 300  # more than two blocks of the kernel, and no multiple of one

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "block": [{"block_size": 48, "num_global": 2}],
    "window": [
        {"window": 50, "shift": True},
        {"window": (3, 4), "shift": True, "grid": (13, 23), "num_global": 1},
    ],
    "longformer": [{"window": 40, "num_global": 3}],
    "strided": [{"window": 30, "stride": 37}, {"window": 30}],
    "bigbird": [{"block_size": 32}],
}
SPARSE = [kind for kind in list_attention() if isinstance(build_core(kind, 2, 16), Sparse)]
CASES = [(kind, options) for kind in SPARSE for options in OPTIONS.get(kind, [{}])]
MASKS = {
    "none": None,
    "causal": Mask.causal(),
    "padding": Mask.padding([N - 130, 0]),
    "both": Mask.causal() & Mask.padding([N - 130, 0]) & Mask.padding([N]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.filterwarnings("ignore:.*without torch.compile")
def test_same_values_as_by_blocks(kind: str, options: dict[str, Any], mask: str) -> None:
    core: Any = build_core(kind, 2, 16, **options)
    n = 1 + 13 * 23 if "grid" in options else N
    q, k, v = _inputs(n)
    if mask in ("padding", "both"):  # nothing of it may leak
        k[0, :, n - 130 :], v[0, :, n - 130 :], v[1] = torch.nan, torch.inf, torch.nan
    with torch.no_grad():
        torch.testing.assert_close(
            core._by_flex(q, k, v, MASKS[mask]), core(q, k, v, MASKS[mask]), rtol=1e-5, atol=2e-6
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_blocks_are_those_of_the_pattern(
    kind: str, options: dict[str, Any], causal: bool
) -> None:
    core: Any = build_core(kind, 2, 16, **options)
    n = 1 + 13 * 23 if "grid" in options else N
    places = torch.arange(n)
    dense = core.sees(places[:, None], places[None], n)
    if causal:
        dense = dense.tril()
    size = flex._BLOCK
    found = flex.find_blocks(core.rule(n, torch.device("cpu")), n, causal, torch.device("cpu"))
    for row in range(-(-n // size)):
        cut = dense[row * size : (row + 1) * size].split(size, dim=1)
        seen = {col for col, part in enumerate(cut) if part.any()}
        whole = {col for col, part in enumerate(cut) if part.all() and part.shape[1] == size}
        assert _listed(found.seen, row) == seen
        assert _listed(found.whole, row) == whole
        assert _listed(found.part, row) == seen - whole


def test_serves_only_what_the_kernel_computes() -> None:
    q = torch.empty(2, 2, 2048, 32, device="meta")
    on_gpu = _Pretends(q)
    assert flex.serves(on_gpu, on_gpu, Mask.causal(), None, 0.0)
    assert not flex.serves(q, q, None, None, 0.0)
    assert not flex.serves(on_gpu, on_gpu, None, None, 0.1)
    assert not flex.serves(on_gpu, on_gpu, None, object(), 0.0)
    assert not flex.serves(on_gpu, on_gpu, Mask.dense(torch.ones(1, 2, 1, 2048).bool()), None, 0.0)
    assert not flex.serves(on_gpu, on_gpu, Mask.padding([1, 2, 3]), None, 0.0)
    assert not flex.serves(on_gpu, _Pretends(q[:, :, 1:]), None, None, 0.0)
    assert not flex.serves(_Pretends(q[..., :8]), _Pretends(q[..., :8]), None, None, 0.0)


def test_a_failure_to_compile_is_said_once_and_the_blocks_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "_failed", False)
    on_gpu: Any = _Pretends(torch.empty(2, 2, 2048, 32, device="meta"))

    def broken() -> Tensor:
        raise RuntimeError("no toolchain")

    with pytest.warns(UserWarning, match="no toolchain.*same values"):
        assert flex.or_blocked(broken, lambda: torch.ones(1)) == 1
    assert not flex.serves(on_gpu, on_gpu, None, None, 0.0)

    def full() -> Tensor:
        raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        flex.or_blocked(full, lambda: torch.ones(1))


class _Pretends:
    """A tensor that says it is on a GPU."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, torch.device("cuda")

    def __len__(self) -> int:
        return self.shape[0]


def _inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator) for _ in range(3))
    return q, k, v


def _listed(blocks: tuple[Tensor, Tensor], row: int) -> set[int]:
    number, order = blocks
    return set(order[0, 0, row, : number[0, 0, row]].tolist())
