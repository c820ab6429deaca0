"""The text tower against open_clip's, against formulas, and against itself without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from crossmodal.text import (
    ACTIVATIONS,
    POOLS,
    POSITIONS,
    TextTower,
    text_bag,
    text_base,
    text_micro,
    text_small,
)
from zoo.layers import explicit_attention, list_attention, supported_masks

SMALL: dict[str, Any] = {
    "tokenizer": "bytes",
    "context_length": 16,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}
TEXTS = ["a cat", "", "fourteen bytes", "éà東"]
# (kind, causal) for all that the kind's masks allow
KINDS = [
    (kind, causal)
    for kind in list_attention()
    for causal in (False, True)
    if not causal or "causal" in supported_masks(kind)
]


def small(**options: Any) -> TextTower:
    """A tower whose weights are larger than at the start, so that nothing is lost in rounding."""
    torch.manual_seed(0)
    tower = TextTower(**{**SMALL, **options})
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.3)
    return tower.eval()


def captions(texts: list[str] = TEXTS, length: int | None = None) -> tuple[Tensor, Tensor]:
    return small(depth=0).make_tokenizer()(texts, length)


# --- open_clip's ------------------------------------------------------------------------------


def open_clip_tower(**options: Any) -> nn.Module:
    from open_clip.transformer import TextTransformer

    torch.manual_seed(1)
    sizes = {"context_length": 16, "vocab_size": 259, "width": 16, "heads": 2, "layers": 2}
    tower = TextTransformer(
        **sizes, output_dim=0, pad_id=258, eos_id=257, output_tokens=True, **options
    )
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.3)
    return tower.eval()


def copy_open_clip(source: nn.Module, tower: TextTower) -> None:
    names = {
        "token_embedding": "token_embed",
        "transformer.resblocks": "blocks",
        "in_proj_": "qkv.",
        "out_proj": "proj",
        "c_fc": "fc1",
        "c_proj": "fc2",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "ln_final": "norm",
        "ls_": "ls",
    }
    state = {}
    for key, value in source.state_dict().items():
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        state[key] = value
    state["pos_embed"] = state.pop("positional_embedding")[None]
    tower.load_state_dict(state)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_equals_open_clip(causal: bool, act: str) -> None:
    from open_clip.transformer import QuickGELU

    theirs = open_clip_tower(
        no_causal_mask=not causal,
        use_pad_mask=not causal,
        pool_type="eos",
        act_layer=QuickGELU if act == "quick_gelu" else nn.GELU,
        ls_init_value=1.0,
    )
    ours = small(causal=causal, act=act, init_values=1.0)
    copy_open_clip(theirs, ours)
    tokens, mask = captions(length=16)
    pooled, wanted = theirs(tokens)
    got = ours(tokens, mask)
    torch.testing.assert_close(got.pooled, pooled, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.tokens[mask], wanted[mask], atol=1e-5, rtol=1e-5)
    assert (got.tokens[~mask] == 0).all()
    assert got.mask is mask
    shorter = ours(*captions())  # no longer than the longest caption
    torch.testing.assert_close(shorter.pooled, pooled, atol=1e-5, rtol=1e-5)


def test_base_has_the_size_and_start_of_clips_tower() -> None:
    from open_clip.transformer import TextTransformer

    with torch.device("meta"):
        theirs, ours = TextTransformer(output_dim=0), text_base()
    theirs_shapes, shapes = (
        sorted(tuple(p.squeeze(0).shape) for p in model.parameters()) for model in (theirs, ours)
    )
    assert shapes == theirs_shapes
    torch.manual_seed(0)
    ours = text_base(tokenizer="bytes", depth=3, embed_dim=256)
    theirs = TextTransformer(vocab_size=259, width=256, layers=3, output_dim=0)
    copied = text_base(tokenizer="bytes", depth=3, embed_dim=256, context_length=77)
    copy_open_clip(theirs, copied)
    for (name, parameter), other in zip(ours.named_parameters(), copied.parameters(), strict=True):
        if parameter.std() > 0:
            assert parameter.std().item() == pytest.approx(other.std().item(), rel=0.05), name


# --- pooling ----------------------------------------------------------------------------------


def test_bag_of_words_is_a_mean() -> None:
    tower = small(depth=0, position="none", pool="mean", causal=False).double()
    tokens, mask = captions()
    pooled = tower(tokens, mask).pooled
    for row, seen, got in zip(tokens, mask, pooled, strict=True):
        words = tower.token_embed.weight[row[seen]]
        centred = words - words.mean(1, keepdim=True)
        words = centred / (words.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        wanted = (words * tower.norm.weight + tower.norm.bias).mean(0)
        torch.testing.assert_close(got, wanted)


def test_bag_of_words_knows_no_order() -> None:
    bag = text_bag(tokenizer="bytes")
    ordered, shuffled = (bag(*captions([text])) for text in ("a cat", "tac a"))
    torch.testing.assert_close(ordered.pooled, shuffled.pooled)
    assert len(bag.blocks) == 0
    assert bag.pos_embed is None


def test_pooled_is_read_from_the_tokens() -> None:
    tokens, mask = captions()
    lengths = mask.sum(1)
    last = small()(tokens, mask)
    torch.testing.assert_close(last.pooled, last.tokens[torch.arange(4), lengths - 1])
    mean = small(pool="mean")(tokens, mask)
    torch.testing.assert_close(mean.pooled, mean.tokens.sum(1) / lengths[:, None])
    tower = small(pool="attention")
    seen = tower(tokens, mask)
    assert tower.attn_pool is not None
    alone = [tower.attn_pool(x[None, :n])[0] for x, n in zip(seen.tokens, lengths, strict=True)]
    torch.testing.assert_close(seen.pooled, torch.stack(alone))


# --- padding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_padding_changes_nothing(kind: str, causal: bool, pool: str) -> None:
    """Neither its ids, legal or not, nor its amount; and no gradient goes to it."""
    tower = small(attention=kind, causal=causal, pool=pool)
    tokens, mask = captions(length=16)
    encoded = tower(tokens, mask)
    (encoded.pooled.square().sum() + encoded.tokens.square().sum()).backward()
    gradient = tower.token_embed.weight.grad
    assert gradient is not None
    used = torch.zeros(259, dtype=torch.bool).scatter(0, tokens[mask], True)
    assert (gradient[~used] == 0).all()
    assert gradient[used].abs().sum() > 0
    for other in (7, -1, 10**6):
        changed = tower(tokens.masked_fill(~mask, other), mask)
        assert torch.equal(changed.tokens, encoded.tokens)
        assert torch.equal(changed.pooled, encoded.pooled)
    for row, text in enumerate(TEXTS):
        own = captions([text])
        alone = tower(*own)
        n = own[0].shape[1]
        torch.testing.assert_close(alone.tokens[0], encoded.tokens[row, :n], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone.pooled[0], encoded.pooled[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_moves_no_position(position: str, causal: bool) -> None:
    tower = small(position=position, causal=causal)
    short, long = tower(*captions(["a cat"])), tower(*captions(["a cat"], length=16))
    torch.testing.assert_close(short.tokens, long.tokens[:, :7], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(short.pooled, long.pooled, atol=1e-5, rtol=1e-5)


def test_padding_sets_no_scale() -> None:
    """Performer divides by its largest feature, of a small key: here padding has the smallest."""
    tower = small(attention="performer", depth=1, position="none")
    block = tower.blocks[0]
    with torch.no_grad():
        tower.token_embed.weight[:, 0] = 10.0
        tower.token_embed.weight[0] = torch.tensor([0.0, 1.0, -1.0, 0.0] * 4)
        nn.init.zeros_(block.norm1.bias)
        nn.init.zeros_(block.attn.qkv.bias)
        block.attn.qkv.weight[16:32] = 0.0
        block.attn.qkv.weight[16:32, 0] = 20.0  # keys: 0 for padding
    short, long = tower(*captions(["a cat"])), tower(*captions(["a cat"], length=16))
    torch.testing.assert_close(short.tokens, long.tokens[:, :7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_nothing_but_padding(kind: str, causal: bool, pool: str, dtype: torch.dtype) -> None:
    tower = small(attention=kind, causal=causal, pool=pool, qk_norm=True).to(dtype)
    tokens, mask = captions(["a cat", ""])
    mask[1] = False
    encoded = tower(tokens, mask)
    assert (encoded.tokens[1] == 0).all()
    assert (encoded.pooled[1] == 0).all()
    alone = tower(tokens[:1], mask[:1])
    close = {} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(encoded.pooled[0], alone.pooled[0], **close)
    (encoded.pooled[1].square().sum() + encoded.tokens[1].square().sum()).backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is None or (parameter.grad == 0).all(), name
    tower.zero_grad()
    tower(tokens, mask).pooled.float().square().sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_no_caption() -> None:
    encoded = small()(*captions([]))
    assert encoded.tokens.shape == (0, 2, 16)
    assert encoded.pooled.shape == (0, 16)


# --- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_causal_sees_no_later_token(kind: str, causal: bool) -> None:
    tower = small(attention=kind, causal=causal)
    one, two = (tower(*captions([text])).tokens[0, :5] for text in ("abcdefgh", "abcdzzzz"))
    same = torch.allclose(one, two, atol=1e-5)
    assert same == (causal or kind == "identity")


@pytest.mark.parametrize("position", POSITIONS)
def test_position_tells_the_order(position: str) -> None:
    tower = small(position=position, causal=False, pool="mean")
    one, two = (tower(*captions([text])).pooled for text in ("ab cd", "dc ba"))
    assert torch.allclose(one, two, atol=1e-5) == (position == "none")


def test_position_tables() -> None:
    learned, fixed = small(), small(position="sincos")
    assert learned.state_dict()["pos_embed"].shape == (1, 16, 16)
    assert "pos_embed" not in fixed.state_dict()
    place = torch.arange(16, dtype=torch.float64)
    assert fixed.pos_embed is not None
    torch.testing.assert_close(fixed.pos_embed[0, :, 0], (0.02 * place.sin()).float())
    assert learned.no_weight_decay() == {"pos_embed"}
    for causal in (True, False):
        bias = small(position="relative", causal=causal).blocks[0].attn.bias
        assert bias.bidirectional is not causal
    biased = small(position="relative", pool="attention").no_weight_decay()
    weights = {f"blocks.{i}.attn.bias.relative_attention_bias.weight" for i in range(2)}
    assert biased == {"attn_pool.latent"} | weights


# --- options ----------------------------------------------------------------------------------


def test_activations() -> None:
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS["quick_gelu"]()(x), x / (1 + torch.exp(-1.702 * x)))
    torch.testing.assert_close(ACTIVATIONS["gelu_tanh"]()(x), F.gelu(x, approximate="tanh"))
    outputs = [small(act=act)(*captions()).pooled for act in ("gelu", "gelu_tanh", "quick_gelu")]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


def test_attention_options_reach_the_kind() -> None:
    tower = small(attention="linformer", causal=False, attention_options={"rank": 3})
    assert tower.blocks[0].attn.core.key.shape == (16, 3)  # context_length rows
    shifts = [block.attn.core.shift for block in small(attention="window").blocks]
    assert shifts == [(0,), (3,)]
    wide = small(head_dim=10, qk_norm=True, attn_drop_rate=0.1).blocks[0].attn
    assert (wide.head_dim, wide.attn_drop.p, wide.qkv.out_features) == (10, 0.1, 60)
    assert isinstance(wide.q_norm, nn.LayerNorm)


def test_fast_kernel_equals_the_formula() -> None:
    tower = small()
    fused = tower(*captions())
    with explicit_attention():
        written_out = tower(*captions())
    torch.testing.assert_close(fused.tokens, written_out.tokens)


def test_weights_can_be_captured() -> None:
    tokens, mask = captions()
    with zoo.capture_attention(tower := small()) as captured:
        tower(tokens, mask)
    weights = captured["blocks.1.attn"]
    weights = weights[0] if isinstance(weights, list) else weights
    rows = weights.sum(-1)[mask[:, None].expand(-1, 2, -1)]
    torch.testing.assert_close(rows, torch.ones_like(rows))
    assert (weights.triu(1) == 0).all()


def test_drop_rates_act_in_training_only() -> None:
    rates = ("embed_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
    wanted = small()(*captions()).pooled
    for rate in rates:
        tower = small(**{rate: 0.5})
        torch.testing.assert_close(tower(*captions()).pooled, wanted)
        assert not torch.allclose(tower.train()(*captions()).pooled, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_checkpointing_keeps_the_gradients(causal: bool) -> None:
    gradients = []
    for enable in (False, True):
        tower = small(causal=causal)
        tower.set_grad_checkpointing(enable)
        assert tower.grad_checkpointing is enable
        tower(*captions()).pooled.square().sum().backward()
        gradients.append(tower.token_embed.weight.grad)
    torch.testing.assert_close(*gradients)


def test_tokenizer_is_the_towers() -> None:
    tower = small(tokenizer="clip", context_length=None)
    tokenizer = tower.make_tokenizer()
    assert tower.vocab_size == tokenizer.vocab_size == tower.token_embed.num_embeddings == 49408
    assert tower.context_length == tokenizer.context_length == 77
    assert small().make_tokenizer().context_length == 16
    assert tower.num_features == 16


# --- bad input --------------------------------------------------------------------------------


def test_refuses_ids_and_lengths() -> None:
    tower = small()
    tokens, mask = captions(["a cat"])
    with pytest.raises(ValueError, match=r"tokens \[-2, 259\] are not in the vocabulary of 259"):
        tower(tokens.clone().index_fill_(1, torch.tensor([1]), 259) - (tokens == 257) * 259, mask)
    long = small(context_length=40).make_tokenizer()(["a caption of many words"])
    with pytest.raises(ValueError, match="captions have 25 tokens, but context_length is 16"):
        tower(*long)
    with pytest.raises(ValueError, match="padding comes last"):
        tower(tokens, mask.flip(1) & (torch.arange(7) > 0))
    with pytest.raises(ValueError, match=r"must both be \(b, n\).*got \(1, 7\) and \(1, 6\)"):
        tower(tokens, mask[:, 1:])
    with pytest.raises(ValueError, match=r"n of at least 1, got \(1, 0\)"):
        tower(tokens[:, :0], mask[:, :0])
    with pytest.raises(TypeError, match=r"got torch\.float32 and torch\.bool"):
        tower(tokens.float(), mask)
    with pytest.raises(TypeError, match=r"got torch\.int64 and torch\.int64"):
        tower(tokens, mask.long())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pool": "max"}, ValueError, "pool 'max' must be one of 'last', 'mean', 'attention'"),
        ({"position": "learnt"}, ValueError, "nearest: 'learned'"),
        ({"act": "relu"}, ValueError, "act 'relu' must be one of"),
        ({"depth": -1}, ValueError, r"depth \(-1\) must be at least 0"),
        ({"embed_dim": 15}, ValueError, r"dim \(15\) must be divisible by num_heads \(2\)"),
        ({"attention": "ful"}, ValueError, "did you mean 'full'"),
        ({"attention": "linformer"}, ValueError, "cannot be causal: give causal=False"),
        ({"attention": "linear", "position": "relative"}, ValueError, "has no scores to add a"),
        ({"attention_options": {"rank": 3}}, TypeError, "'full' has no option 'rank'"),
        ({"attention_options": {"qk_norm": True}}, TypeError, "qk_norm is an option of the model"),
        ({"tokenizer": "clap"}, ValueError, "nearest: 'clip'"),
        ({"position": "rope", "head_dim": 3}, ValueError, r"head_dim \(3\) must be even"),
    ],
)
def test_refuses_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        small(**options)


# --- variants ---------------------------------------------------------------------------------


def test_variants_are_registered(tmp_path: Path) -> None:
    assert {"text_bag", "text_micro", "text_small", "text_base"} <= set(zoo.list_models("text_*"))
    tower = zoo.create_model("text_micro", tokenizer="bytes", position="rope", attention="additive")
    assert tower.card.architecture == "text_micro"
    assert tower.card.options["embed_dim"] == 128
    folder = zoo.save_pretrained(tower, tmp_path / "tower")
    again = zoo.create_model(f"local-dir:{folder}")
    torch.testing.assert_close(again(*captions()).pooled, tower(*captions()).pooled)
    with pytest.raises(TypeError, match="text_micro has no option 'dpeth'; nearest: depth"):
        zoo.create_model("text_micro", dpeth=3)


def test_a_vocabulary_must_match_the_weights(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(
        zoo.create_model("text_micro", tokenizer="bytes"), tmp_path / "tower"
    )
    with pytest.raises(ValueError, match="tokenizer: 'bytes' there, 'clip' here"):
        zoo.create_model("text_micro", pretrained=f"local-dir:{folder}")
    with pytest.raises(ValueError, match=r"token_embed\.weight: \(259, 128\) in the source"):
        zoo.create_model(f"local-dir:{folder}", tokenizer="clip")


@pytest.mark.parametrize(
    ("build", "width", "depth"),
    [(text_bag, 128, 0), (text_micro, 128, 2), (text_small, 384, 6), (text_base, 512, 12)],
)
def test_variants(build: Any, width: int, depth: int) -> None:
    tower = build(tokenizer="bytes").eval()
    tokens, mask = captions()
    encoded = tower(tokens, mask)
    assert encoded.tokens.shape == (*tokens.shape, width)
    assert encoded.pooled.shape == (len(TEXTS), width)
    assert tower.num_features == width
    assert len(tower.blocks) == depth
    assert encoded.tokens.isfinite().all()
