"""Capturing the attention of whole models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zoo.diagnostics import capture_attention
from zoo.layers import AttentionPool, Block, Mask, attention_weights, checkpoint_block


class Tower(nn.Module):
    """Three blocks and an attention pool, with an unused block beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4, attn_drop=0.5, drop_path=0.2) for _ in range(3))
        self.attn_pool = AttentionPool(32, 4)
        self.unused = Block(32, 4)
        self.checkpointing = False

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        for block in self.blocks:
            x = checkpoint_block(block, x, mask) if self.checkpointing else block(x, mask)
        return self.attn_pool(x, mask)


NAMES = ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn", "attn_pool"]


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 7, 32)


def observed(model: nn.Module) -> bool:
    return any(getattr(module, "active", False) for module in model.modules())


def test_one_map_a_layer_and_forward(tower: Tower, x: Tensor) -> None:
    with capture_attention(tower) as records:
        tower(x)
        tower(x[:2])
    assert list(records) == NAMES
    for name, (first, second) in records.items():
        queries = 1 if name == "attn_pool" else 7
        assert first.shape == (3, 4, queries, 7)
        assert second.shape == (2, 4, queries, 7)
        assert first.dtype == torch.float32
        assert first.device.type == "cpu"
        assert not first.requires_grad
        torch.testing.assert_close(first.sum(-1), torch.ones(3, 4, queries))


def test_the_weights_are_the_layers_own(tower: Tower, x: Tensor) -> None:
    with capture_attention(tower, "blocks.0.*") as records:
        tower(x)
    attn = tower.blocks[0].attn
    q, k, _ = attn.qkv(tower.blocks[0].norm1(x)).view(3, 7, 3, 4, 8).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(records["blocks.0.attn"][0], attention_weights(q, k).detach())


@pytest.mark.parametrize("train", [False, True])
def test_changes_no_output(tower: Tower, x: Tensor, train: bool) -> None:  # A3, A9
    tower.train(train)
    mask = Mask.padding(torch.tensor([7, 4, 0]))
    torch.manual_seed(1)
    expected = tower(x, mask)
    torch.manual_seed(1)
    with capture_attention(tower) as records:
        out = tower(x, mask)
    assert torch.equal(out, expected)
    for (maps,) in records.values():
        sums = maps.sum(-1)
        torch.testing.assert_close(sums[:2], torch.ones_like(sums[:2]))
        assert (sums[2] == 0).all()


def test_one_record_under_checkpointing(tower: Tower, x: Tensor) -> None:
    tower.checkpointing = True
    with capture_attention(tower.train()) as records:
        tower(x).sum().backward()
    assert [len(maps) for maps in records.values()] == [1] * 4


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("blocks.1.attn", NAMES[1:2]),
        ("blocks.*", NAMES[:3]),
        (["*pool", "*.[02].*"], [NAMES[0], NAMES[2], NAMES[3]]),
    ],
)
def test_layers_by_wildcard(
    tower: Tower, x: Tensor, layers: str | list[str], names: list[str]
) -> None:
    with capture_attention(tower, layers) as records:
        tower(x)
    assert list(records) == names


def test_names_do_not_depend_on_wrappers(tower: Tower, x: Tensor) -> None:
    compiled = torch.compile(nn.DataParallel(tower), backend="eager")
    with capture_attention(compiled, "blocks.*") as records:
        compiled(x)
    assert list(records) == NAMES[:3]


def test_first_samples_only(tower: Tower, x: Tensor) -> None:
    with capture_attention(tower, samples=2) as records, capture_attention(tower) as everything:
        tower(x)
    for name in NAMES:
        assert torch.equal(records[name][0], everything[name][0][:2])


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "2"])
def test_samples_are_at_least_one(tower: Tower, samples: object) -> None:
    with (
        pytest.raises((TypeError, ValueError), match=rf"^samples \({samples!r}\) must be .*1$"),
        capture_attention(tower, samples=samples),  # type: ignore[arg-type]
    ):
        pass
    assert not observed(tower)


def test_nothing_matches(tower: Tower) -> None:
    with (
        pytest.raises(ValueError, match=r"layers='encoder\.\*' matches no .*blocks\.0\.attn"),
        capture_attention(tower, ["blocks.*", "encoder.*"]),
    ):
        pass
    assert not observed(tower)


def test_no_attention_in_the_model() -> None:
    with pytest.raises(ValueError, match="matches no"), capture_attention(nn.Linear(2, 2)):
        pass


def test_nothing_captured(tower: Tower, x: Tensor) -> None:
    with (
        pytest.raises(RuntimeError, match=r"no attention was captured.*unused\.attn"),
        capture_attention(tower, "unused.*"),
    ):
        tower(x)
    assert not observed(tower)


def test_an_error_inside_is_not_replaced(tower: Tower) -> None:
    with pytest.raises(KeyError, match="mine"), capture_attention(tower):
        raise KeyError("mine")
    assert not observed(tower)


def test_memory_is_bounded(tower: Tower, x: Tensor) -> None:
    one_map = 3 * 4 * 7 * 7 * 4
    with capture_attention(tower, "blocks.*", max_bytes=3 * one_map):
        tower(x)
    with (
        pytest.raises(MemoryError, match=r"blocks\.2\.attn \(3, 4, 7, 7\).*max_bytes=7,055"),
        capture_attention(tower, "blocks.*", max_bytes=3 * one_map - 1),
    ):
        tower(x)
    assert not observed(tower)


def test_nested_captures_are_independent(tower: Tower, x: Tensor) -> None:
    with capture_attention(tower) as outer:
        with capture_attention(tower) as inner:
            tower(x)
        tower(x)
    assert {len(maps) for maps in outer.values()} == {2}
    assert {len(maps) for maps in inner.values()} == {1}


def test_records_own_their_memory(tower: Tower, x: Tensor) -> None:
    """A record is no view: the samples that were left out are freed."""
    with torch.inference_mode(), capture_attention(tower, samples=1) as records:
        tower(x)
    for (maps,) in records.values():
        assert maps.untyped_storage().nbytes() == maps.nbytes


GATHERING = """
import torch, torch.distributed as dist
from torch import nn
from zoo import capture_attention
from zoo.layers import Mask, create_attention

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
x = torch.randn(2, 9, 16)
num_global = torch.tensor([rank, 3 - rank])[:, None, None]  # differs by sample and by process
row, col = torch.arange(9)[:, None], torch.arange(9)[None]
near = (row - col).abs() <= 1
structure = Mask.dense((near | (row < num_global) | (col < num_global))[:, None])
for kind, options, mask in (
    ("full", {}, structure & Mask.padding([9 - rank, 5])),
    ("longformer", {"window": 3, "num_global": 1 + rank}, Mask.padding([9, 4 + rank])),
):
    model = nn.ModuleDict({"attn": create_attention(kind, 16, 2, **options)})
    with capture_attention(model) as records:
        model["attn"](x, mask=mask)
    (maps,) = records["attn"]
    gathered = [torch.empty(2, 2, 9, 9) for _ in range(2)]
    dist.all_gather(gathered, maps)
    assert torch.equal(gathered[rank], maps)
    sums = torch.cat(gathered).sum(-1)
    assert torch.allclose(sums, torch.ones(4, 2, 9)), (kind, sums)
dist.destroy_process_group()
"""


def test_a17_maps_have_one_shape_whatever_the_global_tokens(tmp_path: Path) -> None:
    script = tmp_path / "gathering.py"
    script.write_text(GATHERING)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            script,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
