"""The transformer block, its parts and the attention pool against timm's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from timm.layers import AttentionPoolLatent
from timm.layers import Mlp as TimmMlp
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from zoo.layers import AttentionPool, Block, DropPath, LayerScale, Mask, Mlp, checkpoint_block

norm = partial(nn.LayerNorm, eps=1e-6)


def assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Equal state dicts, outputs and gradients, after copying the weights strictly."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    outs, grads = [], []
    for module in (ours, theirs):
        outs.append(module(x))
        outs[-1].square().mean().backward()
        grads.append({name: p.grad for name, p in module.named_parameters()})
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("init_values", [None, 0.1])
def test_block_equals_timm(qk_norm: bool, init_values: float | None) -> None:
    options = {"mlp_ratio": 2.0, "qkv_bias": True, "qk_norm": qk_norm, "init_values": init_values}
    assert_same(Block(32, 4, **options), TimmBlock(32, 4, **options), torch.randn(2, 7, 32))


def test_block_names_equal_timm() -> None:
    """Parameter-free slots too, so that paths from elsewhere resolve."""
    ours, theirs = (
        block(32, 4, qkv_bias=True, drop_path=0.1, init_values=1e-5) for block in (Block, TimmBlock)
    )
    missing = {n for n, _ in theirs.named_modules()} - {n for n, _ in ours.named_modules()}
    assert missing == {"attn.norm"}  # timm's norm after attention, which we do not have


@pytest.mark.parametrize("norm_layer", [None, norm])
@pytest.mark.parametrize("sizes", [(32,), (32, 48), (32, 48, 8)])
def test_mlp_equals_timm(norm_layer: partial | None, sizes: tuple[int, ...]) -> None:
    x = torch.randn(2, 7, 32)
    assert_same(Mlp(*sizes, norm_layer=norm_layer), TimmMlp(*sizes, norm_layer=norm_layer), x)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_pool_equals_timm(qk_norm: bool) -> None:
    theirs = AttentionPoolLatent(32, num_heads=4, mlp_ratio=2.0, qk_norm=qk_norm, norm_layer=norm)
    ours = AttentionPool(32, 4, mlp_ratio=2.0, qk_norm=qk_norm)
    assert_same(ours, theirs, torch.randn(2, 7, 32))


def test_pool_ignores_padding() -> None:
    pool, x = AttentionPool(32, 4), torch.randn(2, 7, 32)
    out = pool(x, Mask.padding(torch.tensor([4, 7])))
    torch.testing.assert_close(out[:1], pool(x[:1, :4]))


def test_block_with_another_attention() -> None:
    class Mean(nn.Module):
        def forward(
            self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
        ) -> Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    block, x = Block(32, attn=Mean()), torch.randn(2, 7, 32)
    normed = block.norm1(x)
    x = x + normed.mean(1, keepdim=True)
    torch.testing.assert_close(
        block(x - normed.mean(1, keepdim=True)), x + block.mlp(block.norm2(x))
    )


def test_block_passes_the_mask_on() -> None:
    block, x = Block(32, 4), torch.randn(2, 7, 32)
    lengths = torch.tensor([4, 4])
    out = block(x, Mask.padding(lengths))
    torch.testing.assert_close(out[:, :4], block(x[:, :4]))


def test_dropout_reaches_attention_projection_and_mlp() -> None:
    block = Block(32, 4, proj_drop=0.1, attn_drop=0.2)
    rates = {n: m.p for n, m in block.named_modules() if isinstance(m, nn.Dropout)}
    assert rates == {
        "attn.attn_drop": 0.2,
        "attn.proj_drop": 0.1,
        "mlp.drop1": 0.1,
        "mlp.drop2": 0.1,
    }


def test_layer_scale() -> None:
    scale, x = LayerScale(8, 0.5), torch.randn(2, 3, 8)
    assert torch.equal(scale(x), 0.5 * x)
    assert [name for name, _ in scale.named_parameters()] == ["gamma"]


def test_drop_path_drops_samples_and_keeps_the_mean() -> None:
    drop, x = DropPath(0.25), torch.ones(20000, 2, 3)
    out = drop(x)
    per_sample = out.flatten(1)
    assert (per_sample == per_sample[:, :1]).all()  # a sample as a whole
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(out.mean().item() - 1.0) < 0.02
    assert drop.eval()(x) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_drop_path_rate(rate: float) -> None:
    with pytest.raises(ValueError, match=r"drop_prob .* must be in \[0, 1\)"):
        DropPath(rate)


@pytest.mark.parametrize("mask", [None, Mask.padding(torch.tensor([4, 0]))])
def test_checkpointing_gives_equal_gradients(mask: Mask | None) -> None:
    """With dropout and drop-path: the recomputation must draw the same numbers."""
    plain = Block(32, 4, drop_path=0.5, attn_drop=0.3, proj_drop=0.3)
    saved = copy.deepcopy(plain)
    x = torch.randn(2, 7, 32)
    for block, run in ((plain, plain), (saved, partial(checkpoint_block, saved))):
        torch.manual_seed(0)
        run(x, mask).square().mean().backward()
        assert block.norm1.weight.grad is not None
    for left, right in zip(plain.parameters(), saved.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_compiles_without_a_break() -> None:
    block, x = Block(32, 4, drop_path=0.1, init_values=1e-5), torch.randn(2, 7, 32)
    compiled = torch.compile(block.eval(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))
    compiled.train()(x, Mask.causal()).sum().backward()


def test_exports_with_free_batch_and_length() -> None:
    block, x = Block(32, 4).eval(), torch.randn(2, 7, 32)
    axes = {"x": {0: torch.export.Dim("b"), 1: torch.export.Dim("n")}}
    exported = torch.export.export(block, (x,), dynamic_shapes=axes).module()
    longer = torch.randn(3, 11, 32)
    torch.testing.assert_close(exported(longer), block(longer))
