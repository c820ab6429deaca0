"""Fusion against its formula in float64, torch and open_clip; scales, padding, gates, refusals."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crossmodal.cross import LAYOUTS, NORMS, Gate
from crossmodal.encoded import Encoded
from crossmodal.fusion import DIRECTIONS, CrossBlock, Fusion, modality_share
from crossmodal.pool import TokenPool
from zoo import capture_attention
from zoo.layers import Mask, PriorBias, RelativeBias1d, Rope

B, N, M, D, C, H = 3, 5, 7, 16, 24, 4
LENGTHS = torch.tensor([5, 3, 1])
TEXT_MASK = torch.arange(N) < LENGTHS[:, None]
DIRECTED = [*itertools.product(DIRECTIONS, LAYOUTS)]
EVERY = [*itertools.product(NORMS, LAYOUTS)]


def shuffled(module, seed=0):
    """Random weights everywhere, gates and norms too: what is 1 or 0 at first could hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.eval()


def pair(seed=0, dim_text=D, dim_image=C, dtype=torch.float32, mask=TEXT_MASK):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(B, N, dim_text, generator=generator, dtype=dtype)
    image = torch.randn(B, M, dim_image, generator=generator, dtype=dtype)
    return Encoded(text, text[:, 0], mask), Encoded(image, image[:, 0])


def fusion_of(**options):
    torch.manual_seed(0)
    return shuffled(Fusion(**{"dim_text": D, "dim_image": C, "dim": D, "num_heads": H, **options}))


def present(outputs):
    return [tokens for tokens in outputs if tokens is not None]


# --- the formula -------------------------------------------------------------------------------


def linear(state, name, x):
    return torch.einsum("...c,dc->...d", x, state[f"{name}.weight"]) + state[f"{name}.bias"]


def normed(state, name, x, eps=1e-6):
    """Layer norm by the weights of that name, if there are any."""
    if f"{name}.weight" not in state:
        return x
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    return x * state[f"{name}.weight"] + state[f"{name}.bias"]


def attended(state, name, q, k, v, allowed):
    q, k, v = (x.unflatten(-1, (H, -1)) for x in (q, k, v))
    q, k = normed(state, f"{name}.q_norm", q), normed(state, f"{name}.k_norm", k)
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~allowed[:, None, None], -math.inf).softmax(-1)
    mixed = torch.einsum("bhij,bjhe->bihe", weights, v).flatten(2)
    return linear(state, f"{name}.proj", mixed)


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gated(state, name, x):
    return x * state[f"{name}.alpha"].tanh() if f"{name}.alpha" in state else x


def block_formula(block, x, context, seen_x, seen_context, norm, layout):
    state = {name: value.detach().double() for name, value in block.state_dict().items()}
    if "self_attn.qkv.weight" in state:
        q, k, v = linear(state, "self_attn.qkv", normed(state, "norm_self", x)).chunk(3, -1)
        x = x + gated(state, "gate_self", attended(state, "self_attn", q, k, v, seen_x))
    keys = normed(state, "norm_q" if norm == "shared" else "norm_kv", context)
    queries = normed(state, "norm_q", x)
    if layout == "merged":
        keys = torch.cat([queries, keys], 1)
        seen_context = torch.cat([seen_x, seen_context], 1)
    k, v = linear(state, "attn.kv", keys).chunk(2, -1)
    mixed = attended(state, "attn", linear(state, "attn.q", queries), k, v, seen_context)
    x = x + gated(state, "gate_attn", mixed)
    hidden = gelu(linear(state, "mlp.fc1", normed(state, "norm_mlp", x)))
    return x + gated(state, "gate_mlp", linear(state, "mlp.fc2", hidden))


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize(("norm", "layout"), EVERY)
def test_block_equals_its_formula(norm, layout, gates):
    block = shuffled(CrossBlock(D, D, H, norm=norm, layout=layout, gated=gates)).double()
    text, image = pair(dim_image=D, dtype=torch.float64)
    seen_image = torch.arange(M) < torch.tensor([[7], [2], [4]])
    masks = (seen[:, None, None] for seen in (TEXT_MASK, seen_image))
    wanted = block_formula(
        block, text.tokens, image.tokens, TEXT_MASK, seen_image, norm=norm, layout=layout
    )
    torch.testing.assert_close(block(text.tokens, image.tokens, *masks), wanted)


def test_block_attends_to_its_own_tokens_first_where_asked():
    block = shuffled(CrossBlock(D, C, H, self_attention=True)).double()
    text, image = pair(dtype=torch.float64)
    everything = torch.ones(B, M, dtype=torch.bool)
    wanted = block_formula(
        block, text.tokens, image.tokens, TEXT_MASK, everything, norm="per_modality", layout="cross"
    )
    got = block(text.tokens, image.tokens, TEXT_MASK[:, None, None])
    torch.testing.assert_close(got, wanted)


def test_merged_masks_of_any_shape_meet():
    """A rule by query beside a rule by key, and one of them alone."""
    block = shuffled(CrossBlock(D, D, H, layout="merged"))
    text, image = pair(dim_image=D)
    by_key = Mask.padding([7, 2, 4])
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    whole = torch.cat([causal.expand(B, 1, N, N), by_key.lower(N, M).expand(B, 1, N, M)], dim=-1)
    with capture_attention(block) as records:
        got = block(text.tokens, image.tokens, Mask.causal(), by_key)
        block(text.tokens, image.tokens, None, by_key)
    queries, keys = block.norm_q(text.tokens), block.norm_kv(image.tokens)
    mixed = block.attn(queries, torch.cat([queries, keys], 1), whole)
    x = text.tokens + block.gate_attn(mixed)
    torch.testing.assert_close(got, x + block.gate_mlp(block.mlp(block.norm_mlp(x))))
    first, second = records["attn"]
    assert torch.equal(first > 0, whole.expand_as(first))
    assert (second[..., :N] > 0).all()


@pytest.mark.parametrize(("direction", "layout"), DIRECTED)
@pytest.mark.parametrize("norm", NORMS)
def test_fusion_equals_its_formula(direction, layout, norm):
    """Projections and norms on entry, two layers in step, a norm and zeros at padding on exit."""
    fusion = fusion_of(
        direction=direction, layout=layout, norm=norm, depth=2, position="learned",
        max_text=9, max_image=M,
    ).double()  # fmt: skip
    text, image = pair(dtype=torch.float64)
    state = {name: value.detach() for name, value in fusion.state_dict().items()}
    seen = [TEXT_MASK, torch.ones(B, M, dtype=torch.bool)]
    streams = []
    for name, part in (("text", text), ("image", image)):
        projected = torch.einsum("bnc,dc->bnd", part.tokens, state[f"proj_{name}.weight"])
        own = "text" if norm == "shared" else name
        table = state[f"pos_{name}.table"][: part.tokens.shape[1]]
        streams.append(normed(state, f"norm_{own}", projected) + table)
    for layer in range(2):
        x, y = streams
        given = {"norm": norm, "layout": layout}
        if direction != "image_to_text":
            streams[0] = block_formula(fusion.blocks_text[layer], x, y, *seen, **given)
        if direction != "text_to_image":
            streams[1] = block_formula(fusion.blocks_image[layer], y, x, *seen[::-1], **given)
    got = fusion(text, image)
    assert (got[0] is None) == (direction == "image_to_text")
    assert (got[1] is None) == (direction == "text_to_image")
    if got[0] is not None:
        wanted = normed(state, "out_text", streams[0]).masked_fill(~TEXT_MASK[..., None], 0)
        torch.testing.assert_close(got[0], wanted)
    if got[1] is not None:
        torch.testing.assert_close(got[1], normed(state, "out_image", streams[1]))


# --- torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim_context", [D, C])
def test_attention_equals_torch(dim_context):
    ours = shuffled(CrossBlock(D, dim_context, H, norm="none", gated=False))
    theirs = nn.MultiheadAttention(D, H, batch_first=True, kdim=dim_context, vdim=dim_context)
    with torch.no_grad():
        weights = [ours.attn.q.weight, *ours.attn.kv.weight.chunk(2)]
        if dim_context == D:
            theirs.in_proj_weight.copy_(torch.cat(weights))
        else:
            for name, weight in zip("qkv", weights, strict=True):
                getattr(theirs, f"{name}_proj_weight").copy_(weight)
        theirs.in_proj_bias.copy_(torch.cat([ours.attn.q.bias, ours.attn.kv.bias]))
        theirs.out_proj.load_state_dict(ours.attn.proj.state_dict())
    generator = torch.Generator().manual_seed(1)
    x, context = (torch.randn(B, n, d, generator=generator) for n, d in ((M, D), (N, dim_context)))
    mixed, weights = theirs(
        x, context, context, key_padding_mask=~TEXT_MASK, average_attn_weights=False
    )
    x_after = x + mixed
    wanted = x_after + ours.mlp(ours.norm_mlp(x_after))
    with capture_attention(ours) as records:
        got = ours(x, context, context_mask=TEXT_MASK[:, None, None])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(records["attn"][0], weights.detach(), rtol=1e-5, atol=1e-5)


# --- scales of the modalities ------------------------------------------------------------------


def relative_change(fusion, scale_text, scale_image):
    text, image = pair()
    scaled = (
        text._replace(tokens=text.tokens * scale_text),
        image._replace(tokens=image.tokens * scale_image),
    )
    before, after = fusion(text, image), fusion(*scaled)
    changes = [
        ((b - a).norm() / a.norm()).item()
        for a, b in zip(present(before), present(after), strict=True)
    ]
    return max(changes)


@pytest.mark.parametrize(("direction", "layout"), DIRECTED)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ratio", [1, 10, 100])
def test_scale_of_a_modality(norm, ratio, direction, layout):
    """Normalised tokens do not know their tower's scale; others carry it into the output."""
    exact = partial(nn.LayerNorm, eps=1e-12)  # 1e-6 is no longer small beside features of 0.01
    fusion = fusion_of(norm=norm, direction=direction, layout=layout, depth=2, norm_layer=exact)
    for scales in ((1, ratio), (ratio, 1), (1, 1 / ratio)):
        change = relative_change(fusion, *scales)
        if norm in ("per_modality", "shared") or ratio == 1:
            assert change < 1e-4
        else:
            assert change > 0.02


def block_change(norm, ratio):
    torch.manual_seed(0)
    block = shuffled(CrossBlock(D, D, H, norm=norm))
    text, image = pair(dim_image=D)
    with capture_attention(block) as records:
        before, after = (block(text.tokens, image.tokens * scale) for scale in (1, ratio))
    weights = records["attn"]
    return (after - before).norm() / before.norm(), (weights[1] - weights[0]).abs().max()


@pytest.mark.parametrize("ratio", [10, 100])
def test_what_each_norm_keeps_out_of_a_block(ratio):
    """The context's scale: from the output, from the weights alone, or from neither."""
    for norm in ("per_modality", "shared"):
        output, weights = block_change(norm, ratio)
        assert output < 1e-5
        assert weights < 1e-5
    output, qk_weights = block_change("qk", ratio)
    assert output > 0.1
    output, weights = block_change("none", ratio)
    assert output > 0.1
    assert weights > qk_weights


def test_unnormalised_the_larger_modality_takes_all_the_weight_or_none():
    """At a ratio of 100 rows are near one-hot over the image, and its share is 0 or 1."""
    entropies, shares = {}, {}
    for norm in ("per_modality", "none"):
        torch.manual_seed(0)
        block = shuffled(CrossBlock(D, D, H, norm=norm, layout="merged"))
        text, image = pair(dim_image=D)
        with capture_attention(block) as records:
            block(text.tokens, image.tokens * 100)
        weights = records["attn"][0]
        entropies[norm] = -torch.xlogy(weights, weights).sum(-1).mean()
        share = modality_share(weights, N)
        shares[norm] = ((share > 0.01) & (share < 0.99)).float().mean()
    assert entropies["none"] < 0.2 * entropies["per_modality"]
    assert shares["none"] < 0.2
    assert shares["per_modality"] > 0.5


def test_modality_share_counts_real_tokens():
    block = shuffled(CrossBlock(D, D, H, layout="merged"))
    text, image = pair(dim_image=D)
    seen_image = torch.tensor([7, 0, 4])
    with capture_attention(block) as records:
        block(text.tokens, image.tokens, TEXT_MASK[:, None, None], Mask.padding(seen_image))
    weights = records["attn"][0]
    share = modality_share(weights, N)
    assert share.shape == (B, H, N)
    torch.testing.assert_close(share, 1 - weights[..., N:].sum(-1))
    torch.testing.assert_close(share[1], torch.ones(H, N))  # the second image has no token
    assert ((share[0] > 0) & (share[0] < 1)).all()
    assert torch.equal(modality_share(weights, 0), torch.zeros(B, H, N))
    with pytest.raises(ValueError, match=r"num_first \(13\) must lie in \[0, 12\]"):
        modality_share(weights, 13)


# --- padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "layout"), DIRECTED)
@pytest.mark.parametrize("kind", ["full", "additive", "linear", "performer", "mean", "uniform"])
def test_padding_content_and_amount_change_nothing(direction, layout, kind):
    self_attention = layout == "cross"
    fusion = fusion_of(
        direction=direction, layout=layout, attention=kind, depth=2, self_attention=self_attention,
        position="sincos", max_text=16, max_image=16,
    )  # fmt: skip
    text, image = pair()
    image = image._replace(mask=torch.arange(M) < torch.tensor([[7], [3], [6]]))
    garbage = text.tokens.masked_fill(~TEXT_MASK[..., None], torch.nan)
    other = image.tokens.masked_fill(~image.mask[..., None], 1e4)
    longer = Encoded(
        F.pad(garbage, (0, 0, 0, 4), value=-3.0), text.pooled, F.pad(TEXT_MASK, (0, 4))
    )
    wider = Encoded(F.pad(other, (0, 0, 0, 2), value=5.0), image.pooled, F.pad(image.mask, (0, 2)))
    before, after = fusion(text, image), fusion(longer, wider)
    for part, got, wanted in zip((text, image), after, before, strict=True):
        if wanted is not None:
            n = wanted.shape[1]
            torch.testing.assert_close(got[:, :n], wanted, rtol=1e-5, atol=1e-5)
            assert (got[:, n:] == 0).all()
            assert (wanted[~part.mask] == 0).all()


def _extended(tokens, more):
    return F.pad(tokens, (0, 0, 0, more), value=-3.0)


@pytest.mark.parametrize(("direction", "layout"), DIRECTED)
@pytest.mark.parametrize("norm", NORMS)
def test_sample_of_padding_alone(direction, layout, norm):
    """Finite outputs, no gradient from it, and the other samples as without it."""
    fusion = fusion_of(direction=direction, layout=layout, norm=norm, depth=2)
    mask = TEXT_MASK.clone()
    mask[1] = False
    text, image = pair(mask=mask)
    text.tokens[1] = torch.nan
    x, y = text.tokens.requires_grad_(), image.tokens.requires_grad_()
    got = fusion(text._replace(tokens=x), image._replace(tokens=y))
    assert all(tokens.isfinite().all() for tokens in present(got))
    sum(tokens.square().sum() for tokens in present(got)).backward()
    assert (x.grad[1] == 0).all()
    assert (x.grad[0].abs().sum(-1) > 0).all()
    assert all(p.grad.isfinite().all() for p in fusion.parameters())
    if direction == "text_to_image":
        assert (got[0][1] == 0).all()
        assert (y.grad[1] == 0).all()
    rest = torch.tensor([0, 2])
    alone = fusion(*(part._replace(**_rows(part, rest)) for part in (text, image)))
    for tokens, wanted in zip(present(got), present(alone), strict=True):
        torch.testing.assert_close(tokens[rest], wanted, rtol=1e-5, atol=1e-5)


def _rows(part, rows):
    taken = {"tokens": part.tokens[rows].detach(), "pooled": part.pooled[rows]}
    return taken if part.mask is None else {**taken, "mask": part.mask[rows]}


# --- gates, positions, kinds -------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "layout"), EVERY)
def test_gated_starts_as_the_identity_and_learns(norm, layout):
    block = CrossBlock(D, D, H, norm=norm, layout=layout, self_attention=layout == "cross")
    text, image = pair(dim_image=D)
    out = block(text.tokens, image.tokens)
    assert torch.equal(out, text.tokens)
    (out * torch.arange(D)).sum().backward()
    gates = [module for module in block.modules() if isinstance(module, Gate)]
    assert len(gates) == (3 if layout == "cross" else 2)
    assert all(gate.alpha.grad.abs() > 0 for gate in gates)
    ungated = CrossBlock(D, D, H, norm=norm, layout=layout, gated=False)
    assert not torch.equal(ungated(text.tokens, image.tokens), text.tokens)
    assert not any(isinstance(module, Gate) for module in ungated.modules())


@pytest.mark.parametrize("position", ["learned", "sincos"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_order_is_seen_with_positions_only(position, direction):
    text, image = pair(mask=None)
    for name in ("none", position):
        fusion = fusion_of(position=name, direction=direction, max_text=N, max_image=M)
        if direction == "image_to_text":
            other = fusion(text._replace(tokens=text.tokens.flip(1)), image)
        else:
            other = fusion(text, image._replace(tokens=image.tokens.flip(1)))
        first, second = (present(each)[0] for each in (fusion(text, image), other))
        assert torch.allclose(first, second, atol=1e-5) == (name == "none")


def test_learned_positions_do_not_decay():
    fusion = fusion_of(position="learned", max_text=N, max_image=M)
    assert fusion.no_weight_decay() == {"pos_text.table", "pos_image.table"}
    assert fusion_of().no_weight_decay() == set()
    assert (
        "pos_text.table" not in fusion_of(position="sincos", max_text=N, max_image=M).state_dict()
    )


def test_a_prior_over_image_tokens_is_an_option_of_attention():
    places = torch.ones(M)
    places[2] = 1e9
    bias = PriorBias(H, M, places=places)
    block = CrossBlock(D, C, H, attention_options={"bias": bias}, gated=False)
    text, image = pair()
    with capture_attention(block) as records:
        block(text.tokens, image.tokens)
    assert (records["attn"][0][..., 2] > 0.99).all()


def test_weights_are_captured_by_layer():
    fusion = fusion_of(direction="both", depth=2, self_attention=True)
    text, image = pair()
    with capture_attention(fusion, layers="*.attn") as records:
        fusion(text, image)
    names = {f"blocks_{part}.{layer}.attn" for part in ("text", "image") for layer in range(2)}
    assert set(records) == names
    weights = records["blocks_image.1.attn"][0]
    assert weights.shape == (B, H, M, N)
    assert (weights[~TEXT_MASK[:, None, None].expand_as(weights)] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, M))


def test_checkpointing_changes_no_gradient():
    fusion = fusion_of(direction="both", depth=2)
    gradients = []
    for enable in (False, True):
        fusion.set_grad_checkpointing(enable)
        fusion.zero_grad()
        sum(tokens.square().sum() for tokens in fusion(*pair())).backward()
        gradients.append([p.grad.clone() for p in fusion.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_parameter_is_used_and_stored_once(direction, norm):
    """Parallel training waits for each gradient; a file holds no tensor twice."""
    fusion = fusion_of(direction=direction, norm=norm, depth=2)
    sum(tokens.sin().sum() for tokens in present(fusion(*pair()))).backward()
    assert all(p.grad is not None for p in fusion.parameters())
    storages = [tensor.data_ptr() for tensor in fusion.state_dict().values()]
    assert len(storages) == len(set(storages))


def test_linformer_reads_a_context_of_some_length():
    fusion = fusion_of(attention="linformer", attention_options={"max_len": M, "rank": 3})
    text, image = pair()
    assert fusion(text, image)[0].shape == (B, N, D)
    with pytest.raises(ValueError, match="max_len"):
        fusion(text, image._replace(tokens=F.pad(image.tokens, (0, 0, 0, 1))))


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["window", "block", "strided", "longformer", "bigbird", "identity",
                                  "adaptive"])  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kinds_that_go_by_place_are_refused(kind, layout):
    with pytest.raises(ValueError, match=f"attention kind '{kind}'.* places"):
        CrossBlock(D, D, H, attention=kind, layout=layout)


@pytest.mark.parametrize("kind", ["linformer", "adaptive"])
def test_kinds_that_go_by_the_places_of_keys_are_refused_where_these_move(kind):
    options = {"train": "full", "long": "mean"} if kind == "adaptive" else {}
    given = {"attention": kind, "attention_options": options}
    CrossBlock(D, D, H, **given)
    with pytest.raises(ValueError, match=f"'{kind}' goes by the places of keys"):
        CrossBlock(D, D, H, layout="merged", **given)


@pytest.mark.parametrize("option", [{"rope": Rope(D // H)}, {"bias": RelativeBias1d(H)}])
def test_distances_between_modalities_are_refused(option):
    with pytest.raises(ValueError, match="no common places"):
        CrossBlock(D, C, H, attention_options=option)


def test_a_mask_that_the_kind_cannot_follow_is_refused():
    block = CrossBlock(D, D, H, attention="mean", layout="merged")
    text, image = pair(dim_image=D)
    block(text.tokens, image.tokens, TEXT_MASK[:, None, None])
    with pytest.raises(ValueError, match="'mean' cannot follow a dense mask"):
        block(text.tokens, image.tokens, Mask.causal())
    with pytest.raises(ValueError, match=r"mask \(3, 1, 1, 4\) does not broadcast"):
        block(text.tokens, image.tokens, TEXT_MASK[:, None, None, :4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "permodality"}, "norm 'permodality' must be one of .*nearest: 'per_modality'"),
        ({"layout": "merge"}, "layout 'merge' must be one of .*nearest: 'merged'"),
        ({"direction": "text_image"}, "direction 'text_image' must be one of"),
        ({"position": "rope"}, "position 'rope' must be one of"),
        ({"position": "learned", "max_image": M}, "position 'learned' needs max_text"),
        ({"attention": "ful"}, "unknown attention kind 'ful'.*did you mean 'full'"),
        ({"num_heads": 3}, r"dim \(16\) must be divisible by num_heads \(3\)"),
        ({"layout": "merged", "self_attention": True}, "self_attention must be False with layout"),
        ({"depth": 0}, r"depth \(0\) must be at least 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        fusion_of(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "shared"}, r"norm 'shared' needs one width .*\(16\).*\(24\)"),
        ({"layout": "merged"}, r"layout 'merged'.* dim \(16\) and dim_context \(24\)"),
    ],
)
def test_two_widths_where_one_is_needed(options, message):
    with pytest.raises(ValueError, match=message):
        CrossBlock(D, C, H, **options)


def test_towers_of_another_width():
    text, image = pair()
    with pytest.raises(ValueError, match=r"text.tokens must be \(b, n, 16\), as dim_text \(16\)"):
        fusion_of()(text._replace(tokens=torch.randn(B, N, 20)), image)
    with pytest.raises(ValueError, match=r"as dim_image \(24\) says, got \(3, 7, 16\)"):
        fusion_of()(text, image._replace(tokens=torch.randn(B, M, D)))
    with pytest.raises(ValueError, match=r"context must be \(b, n, 24\), as dim_context"):
        CrossBlock(D, C, H)(text.tokens, text.tokens)
    with pytest.raises(ValueError, match=r"x must be \(b, n, 24\), as dim_context"):
        TokenPool(D, C)(text.tokens)


def test_inputs_that_do_not_belong_together():
    text, image = pair()
    with pytest.raises(ValueError, match=r"agree in batch; .*\(3, 5, 16\).*\(2, 7, 24\)"):
        fusion_of()(text, image._replace(tokens=image.tokens[:2]))
    with pytest.raises(ValueError, match=r"text.mask must be bool, \(b, n\) = \(3, 5\).*\(3, 4\)"):
        fusion_of()(text._replace(mask=TEXT_MASK[:, :4]), image)
    with pytest.raises(ValueError, match=r"image.mask must be bool, .*got torch.int64"):
        fusion_of()(text, image._replace(mask=torch.ones(B, M, dtype=torch.long)))
    short = fusion_of(position="sincos", max_text=4, max_image=M)
    with pytest.raises(ValueError, match="5 tokens, but max_text is 4"):
        short(text, image)


# --- pooling to several tokens -----------------------------------------------------------------


def test_pool_equals_its_formula_and_reads_no_padding():
    pool = shuffled(TokenPool(D, C, num_queries=6, num_heads=H, norm_layer=nn.LayerNorm))
    pool = pool.double()
    _, image = pair(dtype=torch.float64)
    seen = torch.arange(M) < torch.tensor([[7], [3], [5]])
    state = {name: value.detach() for name, value in pool.state_dict().items()}
    queries = linear(state, "attn.q", normed(state, "norm_q", state["query"], eps=1e-5))
    k, v = linear(state, "attn.kv", normed(state, "norm_kv", image.tokens, eps=1e-5)).chunk(2, -1)
    wanted = attended(state, "attn", queries.expand(B, -1, -1), k, v, seen)
    torch.testing.assert_close(pool(image.tokens, seen[:, None, None]), wanted)
    garbage = image.tokens.masked_fill(~seen[..., None], 1e6)
    torch.testing.assert_close(pool(garbage, Mask.padding(seen.sum(1))), wanted)
