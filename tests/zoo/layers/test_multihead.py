"""Self- and cross-attention against torch's and timm's modules with the same weights."""

from __future__ import annotations

import pytest
import torch
from timm.layers import Attention as TimmAttention
from torch import nn

from zoo.layers import (
    CrossAttention,
    Mask,
    SelfAttention,
    attention_weights,
    create_attention,
    explicit_attention,
    list_attention,
    register_attention,
    sincos_1d,
)

PADDING = Mask.padding(torch.tensor([4, 7]))


def torch_mask(mask: Mask | None, i: int, j: int) -> torch.Tensor | None:
    """The same mask as nn.MultiheadAttention wants it: True = may not attend, (b * h) i j."""
    if mask is None:
        return None
    return ~mask.lower(i, j).expand(2, 4, i, j).flatten(0, 1)


@pytest.mark.parametrize("mask", [None, PADDING, PADDING & Mask.causal()])
@pytest.mark.parametrize("explicit", [False, True])
def test_self_attention_equals_torch(mask: Mask | None, explicit: bool) -> None:
    ours, theirs = SelfAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        ours.qkv.weight.copy_(theirs.in_proj_weight)
        ours.qkv.bias.copy_(theirs.in_proj_bias.normal_())
        ours.proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 7, 32)
    expected, _ = theirs(x, x, x, attn_mask=torch_mask(mask, 7, 7))
    if explicit:
        with explicit_attention():
            out = ours(x, mask=mask)
    else:
        out = ours(x, mask=mask)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("mask", [None, PADDING])
def test_cross_attention_equals_torch(mask: Mask | None) -> None:
    ours = CrossAttention(32, 4, dim_context=24)
    theirs = nn.MultiheadAttention(32, 4, kdim=24, vdim=24, batch_first=True)
    with torch.no_grad():
        ours.q.weight.copy_(theirs.q_proj_weight)
        ours.kv.weight.copy_(torch.cat([theirs.k_proj_weight, theirs.v_proj_weight]))
        q, k, v = theirs.in_proj_bias.normal_().chunk(3)
        ours.q.bias.copy_(q)
        ours.kv.bias.copy_(torch.cat([k, v]))
        ours.proj.load_state_dict(theirs.out_proj.state_dict())
    x, context = torch.randn(2, 3, 32), torch.randn(2, 7, 24)
    expected, _ = theirs(x, context, context, attn_mask=torch_mask(mask, 3, 7))
    torch.testing.assert_close(ours(x, context, mask=mask), expected)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("head_dim", [None, 5])
def test_self_attention_equals_timm(qk_norm: bool, qkv_bias: bool, head_dim: int | None) -> None:
    theirs = TimmAttention(
        32, 4, attn_head_dim=head_dim, qkv_bias=qkv_bias, qk_norm=qk_norm, norm_layer=nn.LayerNorm
    )
    ours = SelfAttention(
        32, 4, head_dim=head_dim, qkv_bias=qkv_bias, qk_norm=qk_norm, norm_layer=nn.LayerNorm
    )
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 7, 32)
    outs = [module(x) for module in (ours, theirs)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().mean().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_cross_attention_to_itself_is_self_attention() -> None:
    ours, cross = SelfAttention(32, 4, qk_norm=True), CrossAttention(32, 4, qk_norm=True)
    state = ours.state_dict()
    for name in ("weight", "bias"):
        qkv = state.pop(f"qkv.{name}")
        state[f"q.{name}"], state[f"kv.{name}"] = qkv[:32], qkv[32:]
    cross.load_state_dict(state, strict=True)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(cross(x, x, PADDING), ours(x, mask=PADDING))


def test_permuted_tokens_give_permuted_outputs() -> None:  # A11
    attn, x, order = SelfAttention(32, 4), torch.randn(2, 7, 32), torch.randperm(7)
    torch.testing.assert_close(attn(x[:, order]), attn(x)[:, order])


def test_positions_make_order_visible() -> None:
    attn, x, order = SelfAttention(32, 4), torch.randn(2, 7, 32), torch.tensor([1, 0, *range(2, 7)])
    pos = sincos_1d(7, 32)
    moved = attn(x[:, order] + pos)
    assert (moved - attn(x + pos)[:, order]).abs().max() > 1e-3


def test_dropout_is_off_in_eval_and_on_in_training() -> None:  # A7
    attn, x = SelfAttention(32, 4, attn_drop=0.5).eval(), torch.randn(2, 7, 32)
    assert torch.equal(attn(x), attn(x))
    plain = SelfAttention(32, 4)
    plain.load_state_dict(attn.state_dict())
    assert torch.equal(attn(x), plain(x))
    attn.train()
    assert not torch.equal(attn(x), attn(x))


@pytest.mark.parametrize("train", [True, False])
def test_all_samples_end_in_padding(train: bool) -> None:  # A12
    attn, x = SelfAttention(32, 4).train(train), torch.randn(2, 7, 32)
    lengths = torch.tensor([5, 3])
    out = attn(x, mask=Mask.padding(lengths))
    assert out.shape == x.shape
    for sample, length in enumerate(lengths.tolist()):
        alone = attn(x[sample : sample + 1, :length])
        torch.testing.assert_close(out[sample : sample + 1, :length], alone)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_fully_padded_sample_changes_no_gradient(kind: str) -> None:  # A1
    keys = torch.randn(2, 7, 32)
    keys[1] = 1e4
    module = SelfAttention(32, 4) if kind == "self" else CrossAttention(32, 4)
    inputs = (keys,) if kind == "self" else (torch.randn(2, 3, 32), keys)
    out = module(*inputs, mask=Mask.padding(torch.tensor([7, 0])))
    torch.testing.assert_close(out[1], module.proj.bias.expand_as(out[1]))
    grads = torch.autograd.grad(out[:1].square().sum(), list(module.parameters()))
    alone = module(*(t[:1] for t in inputs))
    expected = torch.autograd.grad(alone.square().sum(), list(module.parameters()))
    torch.testing.assert_close(grads, expected, atol=1e-4, rtol=1e-4)


def test_autocast_with_qk_norm() -> None:
    attn, x = SelfAttention(32, 4, qk_norm=True), torch.randn(2, 7, 32)
    exact = attn(x)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [attn(x)]
        with explicit_attention():
            outs.append(attn(x))
    for out in outs:
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)


def test_wider_heads_scale_by_their_own_width() -> None:
    attn, x, seen = SelfAttention(32, 2, head_dim=24), torch.randn(2, 7, 32), []
    with attn.tap.observe(seen.append):
        attn(x)
    q, k, _ = attn.qkv(x).view(2, 7, 3, 2, 24).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(seen[0], attention_weights(q, k, scale=24**-0.5))
    assert attn.proj.in_features == 48


@pytest.mark.parametrize("module", [SelfAttention, CrossAttention])
def test_width_that_heads_do_not_divide(module: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"dim \(100\) must be divisible by num_heads \(12\)"):
        module(100, 12)
    with pytest.raises(ValueError, match=r"num_heads \(0\) must be at least 1"):
        module(100, 0)
    assert module(100, 12, head_dim=8).head_dim == 8


def test_context_in_the_wrong_module() -> None:
    x = torch.randn(2, 7, 32)
    with pytest.raises(TypeError, match="CrossAttention"):
        SelfAttention(32, 4)(x, x)
    with pytest.raises(TypeError, match="needs a context"):
        CrossAttention(32, 4)(x)


def test_kinds_by_name() -> None:
    assert "full" in list_attention()
    assert isinstance(create_attention("full", 32, 4, qk_norm=True), SelfAttention)
    assert isinstance(create_attention("full", 32, 4, dim_context=16), CrossAttention)
    with pytest.raises(ValueError, match=r"unknown attention kind 'ful'.*'full'.*did you mean"):
        create_attention("ful", 32, 4)
    with pytest.raises(TypeError, match="qk_nrom"):
        create_attention("full", 32, 4, qk_nrom=True)
    with pytest.raises(ValueError, match=r"'full' of .* already registered by zoo\.layers\."):
        register_attention("full")(SelfAttention)
