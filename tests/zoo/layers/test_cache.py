"""What is kept of tokens already read gives the outputs of reading all of them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo.layers import (
    CrossAttention,
    KeyValues,
    Mask,
    PriorBias,
    RelativeBias1d,
    Rope,
    SelfAttention,
    create_attention,
    list_attention,
    reorder,
    supported_masks,
)

DIM, H, N = 32, 4, 11

# Small enough to leave keys out within N tokens.
OPTIONS: dict[str, dict[str, Any]] = {
    "block": {"block_size": 3},
    "window": {"window": 3, "shift": 1},
    "longformer": {"window": 4},
    "bigbird": {"block_size": 2, "num_random": 2, "seed": 3},
    "strided": {"window": 4, "stride": 3, "num_far": 2},
}
REFUSED = {
    "adaptive": "number of keys",
    "linformer": "cannot follow a causal mask",
}
STEADY = [kind for kind in list_attention() if kind not in REFUSED]


def attention(kind: str = "full", **options: Any) -> nn.Module:
    return create_attention(kind, DIM, H, **OPTIONS.get(kind, {}), **options).double().eval()


def one_by_one(attn: Any, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The outputs of a sequence read in parts of these sizes."""
    past, outs = None, []
    for part in x.split(sizes, dim=1):
        out, past = attn.extend(part, past)
        outs.append(out)
    assert past.length == x.shape[1]
    return torch.cat(outs, dim=1)


def test_every_causal_kind_is_either_steady_or_refused() -> None:
    causal = {kind for kind in list_attention() if "causal" in supported_masks(kind)}
    assert set(STEADY) == causal - {"adaptive"}


@pytest.mark.parametrize("kind", STEADY)
@pytest.mark.parametrize("sizes", [[1] * N, [4, 1, 1, 5], [N]])
def test_parts_give_what_the_whole_gives(kind: str, sizes: list[int]) -> None:
    attn, x = attention(kind), torch.randn(2, N, DIM, dtype=torch.float64)
    torch.testing.assert_close(one_by_one(attn, x, sizes), attn(x, mask=Mask.causal()))


@pytest.mark.parametrize("kind", STEADY)
def test_no_output_changes_with_the_tokens_behind_it(kind: str) -> None:
    """The kinds that are refused fail here, and bigbird's random blocks once did at 3 blocks."""
    attn, x = attention(kind), torch.randn(2, N, DIM, dtype=torch.float64)
    whole = attn(x, mask=Mask.causal())
    for n in range(1, N):
        torch.testing.assert_close(attn(x[:, :n], mask=Mask.causal()), whole[:, :n])


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2},
        {"qk_norm": True},
        {"head_dim": 6, "qkv_bias": False},
        {"rope": Rope(8)},
        {"rope": Rope(8), "qk_norm": True, "num_kv_heads": 1},
        {"bias": RelativeBias1d(H, bidirectional=False)},
        {"temperature": "learned"},
        {"temperature": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["full", "additive", "longformer"])
def test_options_of_attention(kind: str, options: dict[str, Any]) -> None:
    attn, x = attention(kind, **options), torch.randn(2, N, DIM, dtype=torch.float64)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = attn(x, mask=Mask.causal())
    torch.testing.assert_close(one_by_one(attn, x, [1] * N), expected)
    torch.testing.assert_close(one_by_one(attn, x, [3, 8]), expected)


def test_grouped_heads_are_kept_once() -> None:
    attn: Any = attention(num_kv_heads=2)
    _, kept = attn.extend(torch.randn(3, 5, DIM, dtype=torch.float64))
    assert kept.keys.shape == kept.values.shape == (3, 2, 5, 8)


@pytest.mark.parametrize("kind", ["full", "additive", "linear", "longformer"])
def test_a_further_mask(kind: str) -> None:
    attn: Any = attention(kind)
    x, allowed = torch.randn(2, N, DIM, dtype=torch.float64), torch.rand(2, 1, 1, N) > 0.3
    expected = attn(x, mask=Mask.causal() & allowed)
    past, outs = None, []
    for n, part in enumerate(x.split(1, dim=1), start=1):
        out, past = attn.extend(part, past, mask=allowed[..., :n])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_gradients_pass_through_what_is_kept() -> None:
    attn, x = attention(), torch.randn(2, N, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, N, DIM, dtype=torch.float64)
    grads = [
        torch.autograd.grad((out * weight).sum(), [x, *attn.parameters()])
        for out in (one_by_one(attn, x, [2, 4, 5]), attn(x, mask=Mask.causal()))
    ]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_step_leaves_its_past_as_it_was() -> None:
    attn: Any = attention()
    first, a, b = torch.randn(3, 2, 1, DIM, dtype=torch.float64).unbind()
    _, past = attn.extend(first)
    before = KeyValues(past.keys.clone(), past.values.clone())
    outs = [attn.extend(token, past)[0] for token in (a, b, a)]
    assert past.length == 1
    assert torch.equal(past.keys, before.keys)
    assert torch.equal(past.values, before.values)
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_kinds_whose_outputs_are_not_final_are_refused(kind: str, reason: str) -> None:
    attn: Any = attention(kind)
    with pytest.raises(ValueError, match=f"{kind}.*{reason}"):
        attn.extend(torch.randn(2, 1, DIM, dtype=torch.float64))


def test_positions_of_a_whole_grid_are_refused() -> None:
    x = torch.randn(2, 1, DIM, dtype=torch.float64)
    window: Any = create_attention("window", DIM, H, grid=(3, 3), window=2).double()
    with pytest.raises(ValueError, match="whole grid"):
        window.extend(x)
    for options in ({"rope": Rope(8, grid=(2, 2))}, {"bias": PriorBias(H, 4)}):
        attn: Any = attention(**options)
        with pytest.raises(ValueError, match="1 tokens, but"):
            attn.extend(x)


@pytest.mark.parametrize("kind", list_attention())
@pytest.mark.parametrize("masked", [False, True])
def test_a_context_projected_once_gives_what_the_context_gives(kind: str, masked: bool) -> None:
    attn: Any = attention(kind, dim_context=7)
    x, context = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((3, DIM), (N, 7)))
    mask = (torch.arange(N) < torch.tensor([[4], [N]]))[:, None, None] if masked else None
    torch.testing.assert_close(attn(x, attn.project(context), mask), attn(x, context, mask))


def test_additive_attention_keeps_what_its_network_makes_of_keys() -> None:
    attn: Any = attention("additive", dim_context=7, hidden_dim=5)
    calls = []
    attn.core.key.register_forward_hook(lambda *_: calls.append(1))
    kept = attn.project(torch.randn(2, N, 7, dtype=torch.float64))
    assert kept.keys.shape == (2, H, N, 5)
    for _ in range(3):
        attn(torch.randn(2, 1, DIM, dtype=torch.float64), kept)
    assert len(calls) == 1


def test_nan_behind_a_mask_does_not_come_back_from_what_is_kept() -> None:
    for kind in ("full", "additive"):
        attn: Any = attention(kind, dim_context=DIM)
        x, context = torch.randn(2, 2, 4, DIM, dtype=torch.float64).unbind()
        mask = torch.tensor([True, True, False, True])[None, None, None]
        expected = attn(x, attn.project(context), mask)
        context[:, 2] = torch.nan
        assert torch.equal(attn(x, attn.project(context), mask), expected)


def test_batches_that_differ_are_refused() -> None:
    attn, cross = SelfAttention(DIM, H), CrossAttention(DIM, H)
    _, past = attn.extend(torch.randn(2, 1, DIM))
    with pytest.raises(ValueError, match=r"past \(2, 4, 1, 8\).*\(3, 4, 1, 8\)"):
        attn.extend(torch.randn(3, 1, DIM), past)
    with pytest.raises(ValueError, match=r"x \(3, 1, 32\), context \(2, 4, 5, 8\)"):
        cross(torch.randn(3, 1, DIM), cross.project(torch.randn(2, 5, DIM)))
    with pytest.raises(ValueError, match=r"context must be \(b, n, 32\)"):
        cross.project(torch.randn(2, 5, DIM + 1))


def test_reorder_takes_samples_of_every_tensor_inside() -> None:
    index = torch.tensor([2, 0, 0, 1])
    a, b = torch.arange(3), torch.randn(3, 2, 5, 4)
    state = (KeyValues(b, -b, prepared=True), None, (a,))
    kept, nothing, (moved,) = reorder(state, index)
    assert isinstance(kept, KeyValues)
    assert kept.prepared
    assert torch.equal(kept.keys, b[index])
    assert torch.equal(kept.values, -b[index])
    assert nothing is None
    assert moved.tolist() == [2, 0, 0, 1]
