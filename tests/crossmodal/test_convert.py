"""open_clip's modules with random weights against ours with the same weights converted."""

from __future__ import annotations

import open_clip
import pytest
import torch
import transformers
from open_clip import transformer as theirs
from open_clip.model import resize_text_pos_embed
from torch import nn

import zoo
from crossmodal.convert import (
    convert_block,
    convert_coca_block,
    convert_pooler,
    convert_text_projection,
    convert_text_tower,
    revert_text_tower,
)
from crossmodal.fusion import CrossBlock
from crossmodal.pool import TokenPool
from crossmodal.text import TextTower
from crossmodal.text_layouts import (
    convert_transformers_text,
    revert_transformers_text,
)
from zoo import capture_attention
from zoo.layers import Block, Mask
from zoo.merge import resample_sequence
from zoo.sources import Source, WeightsError
from zoo.weights import apply_source

B, N, M, D, C, H = 3, 6, 9, 32, 20, 4
CAPTIONS = ["a dog", "two red houses by the sea", ""]
SMALL = {"width": D, "heads": H, "layers": 2, "output_dim": 12}


def shuffled(module):
    """Random weights everywhere: norms and biases that start at 1 and 0 could hide a mix-up.

    open_clip leaves some as memory was, which may be NaN: these start at 0.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.nan_to_num(0, 0, 0).clamp(-2, 2))
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval()


def close(ours, wanted):
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def tokens_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_tower(tower, projection, theirs_tower, state):
    """Pooled and projected, and every token of the captions."""
    tower.load_state_dict(convert_text_tower(state))
    projection.load_state_dict(convert_text_projection(state))
    ids, mask = tower.make_tokenizer()(CAPTIONS, length=tower.context_length)
    theirs_tower.output_tokens = True
    with torch.no_grad():
        pooled, tokens = theirs_tower(ids)
        encoded = tower.eval()(ids, mask)
        close(projection(encoded.pooled), pooled)
    close(encoded.tokens[mask], tokens[mask])


# --- text towers -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "text."])
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        ({"no_causal_mask": True, "use_pad_mask": True}, {"causal": False}),
        ({"act_layer": theirs.QuickGELU}, {"act": "quick_gelu"}),
        ({"ls_init_value": 0.1}, {"init_values": 0.1}),
        ({"qk_norm": True, "block_type": "custom"}, {"qk_norm": True}),
        ({"proj_bias": True}, {}),
        ({"context_length": 12}, {"context_length": 12}),
    ],
)
def test_text_tower(options, ours, prefix):
    torch.manual_seed(0)
    tower = shuffled(theirs.TextTransformer(**SMALL, **options))
    state = {f"{prefix}{name}": value for name, value in tower.state_dict().items()}
    state |= {"visual.proj": torch.zeros(1), "logit_scale": torch.zeros(())}
    mine = TextTower(embed_dim=D, depth=2, num_heads=H, **ours)
    projection = nn.Linear(D, 12, bias="proj_bias" in options)
    check_tower(mine, projection, tower, state)


def test_text_part_of_clip():
    """The first CLIP keeps its text tower at the top of the model, and the projection beside it."""
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    text = {"context_length": 77, "width": D, "heads": H, "layers": 2}
    clip = shuffled(open_clip.CLIP(12, vision_cfg=vision, text_cfg=text))
    tower, projection = TextTower(embed_dim=D, depth=2, num_heads=H), nn.Linear(D, 12, bias=False)
    state = clip.state_dict()
    tower.load_state_dict(convert_text_tower(state))
    projection.load_state_dict(convert_text_projection(state))
    ids, mask = tower.make_tokenizer()(CAPTIONS)
    full, _ = tower.make_tokenizer()(CAPTIONS, length=77)
    with torch.no_grad():
        close(projection(tower.eval()(ids, mask).pooled), clip.encode_text(full))


def test_text_tower_of_vit_b_32_at_two_layers():
    config = open_clip.get_model_config("ViT-B-32")["text_cfg"]
    torch.manual_seed(0)
    tower = theirs.TextTransformer(**{**config, "layers": 2}, output_dim=512).eval()
    ours = TextTower(depth=2)
    check_tower(ours, nn.Linear(512, 512, bias=False), tower, tower.state_dict())


@pytest.mark.slow
def test_text_tower_of_vit_b_32():
    config = open_clip.get_model_config("ViT-B-32")["text_cfg"]
    tower = theirs.TextTransformer(**config, output_dim=512).eval()
    check_tower(TextTower(), nn.Linear(512, 512, bias=False), tower, tower.state_dict())


# --- blocks and pooler -------------------------------------------------------------------------


@pytest.mark.parametrize("mlp_ratio", [4.0, 2.0])
def test_coca_block(mlp_ratio):
    block = shuffled(theirs.ResidualAttentionBlock(D, H, mlp_ratio, is_cross_attention=True))
    ours = CrossBlock(D, D, H, gated=False, mlp_ratio=mlp_ratio, norm_layer=nn.LayerNorm)
    ours.load_state_dict(convert_coca_block(block.state_dict()))
    x, context = tokens_of(B, N, D), tokens_of(B, M, D, seed=2) * 3
    lengths = torch.tensor([M, 4, 1])
    seen = torch.arange(M) < lengths[:, None]
    close(ours(x, context), block(x, context, context))
    forbidden = torch.zeros(B * H, N, M).masked_fill(
        ~seen.repeat_interleave(H, 0)[:, None], float("-inf")
    )
    wanted = block(x, context, context, attn_mask=forbidden)
    close(ours(x, context, context_mask=Mask.padding(lengths)), wanted)


def test_multimodal_transformer():
    """CoCa's text decoder: a causal block and a cross-attending one in turn."""
    decoder = shuffled(theirs.MultimodalTransformer(D, 2, H, context_length=N, output_dim=D))
    x, image = tokens_of(B, N, D), tokens_of(B, M, D, seed=2)
    wanted = decoder(image, x)
    cross = nn.ModuleList(
        CrossBlock(D, D, H, gated=False, norm_layer=nn.LayerNorm) for _ in decoder.cross_attn
    )
    with capture_attention(cross) as records:
        for index, mixed in enumerate(cross):
            own = Block(D, H, norm_layer=nn.LayerNorm)
            own.load_state_dict(convert_block(decoder.resblocks[index].state_dict()))
            mixed.load_state_dict(convert_coca_block(decoder.cross_attn[index].state_dict()))
            x = mixed(own(x, Mask.causal()), image)
    close(decoder.ln_final(x) @ decoder.text_projection, wanted)
    assert set(records) == {"0.attn", "1.attn"}


@pytest.mark.parametrize("dim_context", [D, C])
def test_pooler(dim_context):
    """torch stacks the projections where the widths are equal, and keeps them apart elsewhere."""
    pooler = shuffled(theirs.AttentionalPooler(D, dim_context, H, n_queries=5))
    ours = TokenPool(D, dim_context, num_queries=5, num_heads=H, norm_layer=nn.LayerNorm)
    ours.load_state_dict(convert_pooler(pooler.state_dict()))
    x = tokens_of(B, M, dim_context)
    close(ours(x), pooler(x))


def test_nothing_given_is_changed():
    pooler = theirs.AttentionalPooler(D, D, H, n_queries=5).state_dict()
    block = theirs.ResidualAttentionBlock(D, H, is_cross_attention=True).state_dict()
    tower = theirs.TextTransformer(**SMALL).state_dict()
    for convert, state in (
        (convert_pooler, pooler),
        (convert_coca_block, block),
        (convert_text_tower, tower),
    ):
        names, values = list(state), [value.clone() for value in state.values()]
        convert(state)
        assert list(state) == names
        assert all(torch.equal(a, b) for a, b in zip(state.values(), values, strict=True))


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convert", "state", "message"),
    [
        (convert_text_tower, {"text.transformer.embeddings.word_embeddings.weight": 1},
         "no token_embedding.weight, positional_embedding; it has transformer.embeddings"),
        (convert_text_projection, {"ln_final.weight": 1}, "no text_projection.weight"),
        (convert_coca_block, {"ln_1.weight": 1}, "no ln_1_kv.weight; it has ln_1.weight"),
        (convert_coca_block, {"ln_1_kv.weight": 1}, "no attn.in_proj_bias"),
        (convert_pooler, {"probe": 1}, "no query, ln_k.weight; it has probe"),
        (convert_pooler, {}, "it has nothing"),
    ],
)  # fmt: skip
def test_state_dicts_of_something_else(convert, state, message):
    with pytest.raises(ValueError, match=message):
        convert({name: torch.zeros(value) for name, value in state.items()})


@pytest.mark.parametrize(
    ("options", "name"),
    [({"embed_cls": True}, "TextTower has no place for cls_emb"),
     ({"block_type": "custom", "scale_heads": True}, "Block has no place for attn.head_scale")],
)  # fmt: skip
def test_parts_without_a_place(options, name):
    state = theirs.TextTransformer(**SMALL, **options).state_dict()
    with pytest.raises(ValueError, match=name):
        convert_text_tower(state)


# --- as sources of load_pretrained -------------------------------------------------------------

VISION = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
TEXT = {"context_length": 77, "width": D, "heads": H, "layers": 2}
LENGTH = 77


def small_clip(quick_gelu=False, custom=False, **text):
    torch.manual_seed(0)
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    return shuffled(kind(12, VISION, {**TEXT, **text}, quick_gelu=quick_gelu))


def small_tower(**options):
    return zoo.create_model("text_micro", embed_dim=D, num_heads=H, **options).eval()


def saved(model, folder):
    torch.save(model.state_dict(), folder / "clip.pt")
    return f"file:{folder / 'clip.pt'}"


def pooled_and_projected(tower, model, length=LENGTH):
    """What the tower pools, through open_clip's projection."""
    ids, mask = tower.make_tokenizer()(CAPTIONS, length=length)
    projection = convert_text_projection(model.state_dict())["weight"]
    with torch.no_grad():
        return tower(ids, mask).pooled @ projection.T, ids


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("length", [77, 16, 100])
def test_text_tower_of_a_whole_clip_at_any_length(custom, length, tmp_path):
    """Positions of another number are those that open_clip itself would load."""
    clip = small_clip(custom=custom)
    ours = small_tower(context_length=length)
    report = zoo.load_pretrained(ours, saved(clip, tmp_path))
    assert report.matched_fraction == 1
    assert not report.missing
    assert not report.unexpected
    left_out, beside = ours.card.extra["left_out"]
    assert left_out == f"{len(clip.visual.state_dict())} tensors of the images' tower"
    assert beside == "the projection behind the text tower"
    theirs = small_clip(custom=custom, context_length=length)
    state = clip.state_dict()
    resize_text_pos_embed(state, theirs)
    theirs.load_state_dict(state)
    mine, ids = pooled_and_projected(ours, clip, length)
    with torch.no_grad():
        close(mine, theirs.encode_text(ids))
    notes = ours.card.extra["notes"]
    assert any("activation" in note for note in notes)
    resampled = {"pos_embed": f"77 tokens -> {length}, linearly"}
    assert report.resized == (resampled if length != 77 else {})


def test_resampling_of_a_text_tower_can_be_switched_off(tmp_path):
    source = saved(small_clip(), tmp_path)
    ours = small_tower(context_length=16)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with pytest.raises(WeightsError, match=r"pos_embed: 77 tokens -> 16.*adding 'positions' to ad"):
        zoo.load_pretrained(ours, source, adapt=())
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    zoo.load_pretrained(small_tower(), source, adapt=())


def test_saved_towers_take_another_length_alone_and_in_a_pair(tmp_path):
    """What open_clip's resampling gives, not only for its files."""
    tower = shuffled(small_tower(context_length=20))
    source = f"local-dir:{zoo.save_pretrained(tower, tmp_path / 'tower')}"
    other = zoo.create_model("text_micro", embed_dim=D, num_heads=H, context_length=9)
    report = zoo.load_pretrained(other, source)
    assert report.resized == {"pos_embed": "20 tokens -> 9, linearly"}
    again = zoo.create_model(source, context_length=9)
    assert torch.equal(again.pos_embed, other.pos_embed)
    wanted = {"positional_embedding": tower.pos_embed[0].detach().clone()}
    model = nn.Module()
    model.positional_embedding = torch.zeros(9, D)
    resize_text_pos_embed(wanted, model)
    close(again.pos_embed[0], wanted["positional_embedding"])
    pair = shuffled(zoo.create_model("dual_micro", context_length=20))
    folder = zoo.save_pretrained(pair, tmp_path / "pair")
    shorter = zoo.create_model(f"local-dir:{folder}", context_length=9)
    close(shorter.text_tower.pos_embed, resample_sequence(pair.text_tower.pos_embed, 9))


def test_network_tells_activation_and_heads(monkeypatch):
    clip = small_clip(quick_gelu=True)
    monkeypatch.setattr("zoo.hosts_open_clip.load_open_clip", lambda name, **options: (clip, {}))
    source = "open_clip:ViT-B-32-quickgelu/openai"
    with pytest.raises(WeightsError, match=r"act: 'quick_gelu' there, 'gelu' here"):
        zoo.load_pretrained(small_tower(), source)
    with pytest.raises(WeightsError, match=r"num_heads: 4 there, 8 here"):
        zoo.load_pretrained(
            zoo.create_model("text_micro", embed_dim=D, num_heads=8, act="quick_gelu"), source
        )
    ours = small_tower(act="quick_gelu")
    before = ours.card.preprocessing
    zoo.load_pretrained(ours, source)
    mine, ids = pooled_and_projected(ours, clip)
    with torch.no_grad():
        close(mine, clip.encode_text(ids))
    assert ours.card.preprocessing == before
    assert "notes" not in ours.card.extra


def test_config_of_a_folder_tells_the_same():
    clip = small_clip(quick_gelu=True)
    table = {"model_cfg": {"quick_gelu": True, "text_cfg": TEXT}}
    source = Source("folder", clip.state_dict(), config=table)
    with pytest.raises(WeightsError, match=r"act: 'quick_gelu' there, 'gelu' here"):
        apply_source(small_tower(), source)
    apply_source(small_tower(act="quick_gelu"), source)


def test_text_tower_without_a_causal_rule():
    torch.manual_seed(0)
    tower = shuffled(theirs.TextTransformer(**SMALL, no_causal_mask=True, use_pad_mask=True))
    source = Source("clip", tower.state_dict(), network=tower)
    with pytest.raises(WeightsError, match=r"causal: False there, True here"):
        apply_source(small_tower(), source)
    ours = small_tower(causal=False)
    apply_source(ours, source)
    mine, ids = pooled_and_projected(ours, tower)
    with torch.no_grad():
        close(mine, tower(ids))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"no_causal_mask": True}, "lets tokens see the padding"),
        ({"pool_type": "last"}, "pools by 'last'"),
        ({"pool_type": "first"}, "pools by 'first'"),
        ({"embed_cls": True}, "TextTower has no place for cls_emb"),
    ],
)
def test_other_text_towers_are_refused(text, why):
    clip = small_clip(custom=True, **text)
    with pytest.raises(WeightsError, match=why):
        apply_source(small_tower(), Source("clip", clip.state_dict(), network=clip))


def test_siglips_bias_is_refused_where_nothing_else_tells_it():
    state = small_clip(custom=True, proj_bias=True).state_dict()
    with pytest.raises(WeightsError, match=r"as those of SigLIP do.*text_tower"):
        apply_source(small_tower(), Source("siglip", state))


def test_another_depth_is_named():
    clip = small_clip(layers=3)
    with pytest.raises(WeightsError, match="depth: 3 there, 2 here"):
        apply_source(small_tower(), Source("clip", clip.state_dict()))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "block_type": "custom"}])
def test_text_tower_and_back(options):
    tower = shuffled(theirs.TextTransformer(**SMALL, **options))
    state = {k: v for k, v in tower.state_dict().items() if k != "text_projection"}
    back = revert_text_tower(convert_text_tower(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_towers_that_open_clip_has_no_names_for():
    bag = zoo.create_model("text_bag")
    with pytest.raises(ValueError, match="no pos_embed"):
        revert_text_tower(bag.state_dict())
    pooling = small_tower(pool="attention")
    with pytest.raises(ValueError, match="open_clip's text tower has no place for attn_pool"):
        revert_text_tower(pooling.state_dict())


def transformers_clip(**text):
    config = transformers.CLIPTextConfig(
        vocab_size=49408, hidden_size=D, intermediate_size=4 * D, num_hidden_layers=2,
        num_attention_heads=H, eos_token_id=49407, bos_token_id=49406, pad_token_id=0, **text,
    )  # fmt: skip
    image = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    whole = transformers.CLIPConfig(text_config=config.to_dict(), vision_config=image)
    return shuffled(transformers.CLIPModel(whole)), whole.to_dict()


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_transformers_text_tower(act):
    torch.manual_seed(0)
    clip, config = transformers_clip(hidden_act=act)
    source = Source("folder", clip.state_dict(), config={"library": "transformers", **config})
    ours = small_tower(act=act)
    report = apply_source(ours, source)
    assert not report.missing
    assert not report.unexpected
    ids, mask = ours.make_tokenizer()(CAPTIONS)
    with torch.no_grad():
        wanted = clip.text_model(input_ids=ids, attention_mask=mask.long())
        encoded = ours(ids, mask)
    close(encoded.tokens[mask], wanted.last_hidden_state[mask])
    close(encoded.pooled[:2], wanted.pooler_output[:2])
    other = small_tower(act="gelu" if act == "quick_gelu" else "quick_gelu")
    with pytest.raises(WeightsError, match=f"act: '{act}' there"):
        apply_source(other, source)


def test_transformers_text_tower_and_back():
    clip, _ = transformers_clip()
    state = clip.text_model.state_dict()
    ours = convert_transformers_text({f"text_model.{name}": state[name] for name in state})
    back = revert_transformers_text(ours)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    clip.text_model.load_state_dict(back)


def test_transformers_activation_that_we_lack():
    clip, config = transformers_clip(hidden_act="relu")
    source = Source("folder", clip.state_dict(), config=config)
    with pytest.raises(WeightsError, match="'relu'; TextTower has gelu, gelu_tanh, quick_gelu"):
        apply_source(small_tower(), source)


@pytest.mark.parametrize("length", [4, 9, 20])
def test_resampled_positions_are_open_clips(length):
    positions = tokens_of(9, D)
    wanted = {"positional_embedding": positions.clone()}
    model = nn.Module()
    model.positional_embedding = torch.zeros(length, D)
    resize_text_pos_embed(wanted, model)
    close(resample_sequence(positions[None], length)[0], wanted["positional_embedding"])
    close(resample_sequence(positions, length), wanted["positional_embedding"])
    assert resample_sequence(positions[None].half(), length).dtype == torch.float16
