"""Other libraries' Vision Transformers, loaded into ours: equal logits with copied weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
from open_clip import transformer as clip
from timm.models.vision_transformer import VisionTransformer as Timm
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as Torchvision
from vit_files import assert_round_trip, images, load

import zoo
from vision import VisionTransformer
from vision.convert import (
    KeyMap,
    activation_name,
    convert_torchvision_vit,
    norm_eps,
    revert_torchvision_vit,
    stack,
    unstack,
)
from vision.convert_clip import convert_clip_visual, revert_clip_visual
from vision.convert_google import convert_google, revert_google
from vision.convert_timm import convert_open_clip_trunk, revert_open_clip_trunk, timm_options
from zoo.weights import Source, WeightsError, apply_source

SIZE: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
SMALL: dict[str, Any] = {**SIZE, "img_size": 16, "patch_size": 4, "num_classes": 5}
CLIP: dict[str, Any] = {**SMALL, "pre_norm": True, "norm_eps": 1e-5}
OTHER_SIZES = [(24, 8), (8, 12), (32, 32)]


def randomised(network: nn.Module) -> Any:
    """Away from initial values, most of which are 0 or 1; in evaluation mode."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return network.eval()


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.05  # else anything is close
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def at_another_size(state: dict[str, Tensor], img_size: tuple[int, int], **options: Any) -> Any:
    """timm's model with timm's own reading and resampling of these weights."""
    model = Timm(**{**SMALL, **options, "img_size": img_size})
    model.load_state_dict(checkpoint_filter_fn(dict(state), model))
    return model.eval()


# --- parts all share -------------------------------------------------------------------------


def test_key_map_goes_both_ways_and_loses_no_name() -> None:
    names = KeyMap({"a.*.x": "b.*.y", "old.*.x": "b.*.y", "top": "head"})
    theirs = {"a.3.x.weight": 1, "a.3.x.z.weight": 2, "old.12.x": 3, "top.bias": 4, "stop": 5}
    ours = {"b.3.y.weight": 1, "a.3.x.z.weight": 2, "b.12.y": 3, "head.bias": 4, "stop": 5}
    assert names.convert(theirs) == ours
    back = {**theirs, "a.12.x": 3}
    del back["old.12.x"]  # the first of two names is written
    assert names.revert(ours) == back


def test_stacked_projections_have_queries_first() -> None:
    q, k, v = torch.randn(3, 4, 6)
    apart = {"a.attn.q.weight": q, "a.attn.k.weight": k, "a.attn.v.weight": v, "a.attn.q.scale": q}
    stacked = stack(apart)
    assert stacked.keys() == {"a.attn.qkv.weight", "a.attn.q.scale"}
    assert torch.equal(stacked["a.attn.qkv.weight"], torch.cat([q, k, v]))
    assert_round_trip(apart, unstack(stacked))
    assert stack({"attn.q.weight": q}).keys() == {"attn.q.weight"}  # the others are missing


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (timm.layers.GELU(), "gelu"),
        (timm.layers.GELUTanh(), "gelu_tanh"),
        (timm.layers.activations.QuickGELU(), "quick_gelu"),
        (clip.QuickGELU(), "quick_gelu"),
    ],
    ids=repr,
)
def test_activations_are_recognised(module: nn.Module, name: str) -> None:
    from vision.vit import ACTIVATIONS

    assert activation_name("x", module) == name
    x = torch.linspace(-4, 4, 50)
    torch.testing.assert_close(ACTIVATIONS[name]()(x), module(x))


def test_foreign_activations_and_norms_are_named() -> None:
    with pytest.raises(WeightsError, match="x has the activation SiLU, which"):
        activation_name("x", nn.SiLU())
    with pytest.raises(WeightsError, match="x has RMSNorm; VisionTransformer has LayerNorm"):
        norm_eps("x", nn.Sequential(nn.RMSNorm(4)))
    with pytest.raises(WeightsError, match="norms of eps 1e-06, 1e-05"):
        norm_eps("x", nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-6)))


# --- torchvision -----------------------------------------------------------------------------


def torchvision_vit(**options: Any) -> Any:
    sizes = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 24}
    network = Torchvision(**{**sizes, "mlp_dim": 48, "num_classes": 5, **options})
    return randomised(network)


def older(name: str) -> str:
    return name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2")


@pytest.mark.parametrize("names", [str, older, "module._orig_mod.{}".format])
def test_torchvision(names: Any, tmp_path: Any) -> None:
    theirs = torchvision_vit()
    ours, report = load(tmp_path, {names(k): v for k, v in theirs.state_dict().items()}, **SMALL)
    assert_same(ours(images()), theirs(images()))
    assert report.matched_fraction == 1
    assert ours.card.preprocessing.mean == (0.485, 0.456, 0.406)
    assert ours.card.preprocessing.interpolation == "bilinear"


@pytest.mark.parametrize("size", OTHER_SIZES)
def test_torchvision_at_another_size(size: tuple[int, int], tmp_path: Any) -> None:
    """torchvision's model takes squares of its own size only; timm resamples its positions."""
    state = torchvision_vit().state_dict()
    ours, report = load(tmp_path, state, **{**SMALL, "img_size": size})
    theirs = at_another_size(convert_torchvision_vit(state), size)
    assert_same(ours(images(*size)), theirs(images(*size)))
    assert report.resized == {"pos_embed": f"grid 4x4 -> {size[0] // 4}x{size[1] // 4}"}


def test_torchvision_round_trip() -> None:
    state = torchvision_vit().state_dict()
    assert_round_trip(state, revert_torchvision_vit(convert_torchvision_vit(state)))


def test_torchvision_with_other_channels_and_classes(tmp_path: Any) -> None:
    theirs = torchvision_vit()
    grey = images(channels=1)
    one, report = load(tmp_path, theirs.state_dict(), **{**SMALL, "in_chans": 1})
    assert_same(one(grey), theirs(grey.expand(-1, 3, -1, -1)))
    four, report = load(tmp_path, theirs.state_dict(), **{**SMALL, "in_chans": 4, "num_classes": 3})
    assert "3 input channels -> 4" in report.adapted["patch_embed.proj.weight"]
    assert report.reinitialized.keys() == {"head.weight", "head.bias"}
    theirs.heads = nn.Identity()
    features = four.forward_head(four.forward_features(grey.expand(-1, 4, -1, -1)), pre_logits=True)
    assert_same(features, theirs(grey.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"norm_eps": 1e-5}, "norm_eps: 1e-06 there, 1e-05 here"),
        ({"act": "gelu_tanh"}, "act: 'gelu' there, 'gelu_tanh' here"),
        ({"global_pool": "avg", "fc_norm": False}, "global_pool: 'token' there, 'avg' here"),
        ({"pre_norm": True}, "pre_norm: False there, True here"),
        ({"no_embed_class": True}, "no_embed_class: False there, True here"),
        ({"attention": "window"}, "attention: 'full' there, 'window' here"),
        ({"temperature": 2.0}, "temperature: 1.0 there, 2.0 here"),
    ],
    ids=str,
)
def test_torchvision_refuses_other_variants(option: Any, said: str, tmp_path: Any) -> None:
    with pytest.raises(WeightsError, match=said):
        load(tmp_path, torchvision_vit().state_dict(), **{**SMALL, **option})


def test_another_kind_of_attention_where_it_is_asked_for(tmp_path: Any) -> None:
    theirs = torchvision_vit(hidden_dim=192, mlp_dim=768, num_heads=3)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    model = zoo.create_model(
        "vit_tiny_patch16_224",
        pretrained=f"file:{tmp_path / 'weights.pt'}",
        **{**SMALL, "embed_dim": 192, "num_heads": 3, "mlp_ratio": 4.0},
        attention="linformer",
    )
    assert torch.equal(model.blocks[1].mlp.fc1.weight, theirs.encoder.layers[1].mlp[0].weight)


def test_torchvision_network_tells_what_tensors_cannot() -> None:
    theirs = torchvision_vit(norm_layer=nn.LayerNorm)
    source = Source("torchvision:x", theirs.state_dict(), network=theirs)
    with pytest.raises(WeightsError, match="norm_eps: 1e-05 there, 1e-06 here"):
        apply_source(VisionTransformer(**SMALL), source)
    with pytest.raises(WeightsError, match="num_heads: 2 there, 4 here"):
        apply_source(VisionTransformer(**{**SMALL, "norm_eps": 1e-5, "num_heads": 4}), source)
    ours = VisionTransformer(**{**SMALL, "norm_eps": 1e-5}).eval()
    apply_source(ours, source)
    assert_same(ours(images()), theirs(images()))


def test_torchvision_with_parts_that_we_lack(tmp_path: Any) -> None:
    with pytest.raises(WeightsError, match=r"a hidden layer in its head \(heads.pre_logits"):
        load(tmp_path, torchvision_vit(representation_size=8).state_dict(), **SMALL)


# --- CLIP ------------------------------------------------------------------------------------


def clip_tower(**options: Any) -> Any:
    sizes = {"image_size": 16, "patch_size": 4, "width": 24, "layers": 2, "heads": 2}
    network = clip.VisionTransformer(**{**sizes, "mlp_ratio": 2.0, "output_dim": 5, **options})
    return randomised(network)


@pytest.mark.parametrize("prefix", ["", "visual.", "module.visual."])
@pytest.mark.parametrize(("act", "layer"), [("gelu", nn.GELU), ("quick_gelu", clip.QuickGELU)])
def test_clip(prefix: str, act: str, layer: Any, tmp_path: Any) -> None:
    theirs = clip_tower(act_layer=layer)
    state = {f"{prefix}{name}": value for name, value in theirs.state_dict().items()}
    ours, report = load(tmp_path, state, **{**CLIP, "act": act})
    assert_same(ours(images()), theirs(images()))
    assert report.matched_fraction == 1
    assert ours.card.preprocessing.mean == open_clip.OPENAI_DATASET_MEAN
    assert ours.card.preprocessing.std == open_clip.OPENAI_DATASET_STD
    assert any("does not tell which activation" in note for note in ours.card.extra["notes"])


@pytest.mark.parametrize("size", OTHER_SIZES)
def test_clip_at_another_size(size: tuple[int, int], tmp_path: Any) -> None:
    state = {f"visual.{name}": value for name, value in clip_tower().state_dict().items()}
    ours, _ = load(tmp_path, state, **{**CLIP, "img_size": size})
    theirs = at_another_size(state, size, pre_norm=True, norm_layer=nn.LayerNorm)
    assert_same(ours(images(*size)), theirs(images(*size)))


def test_clip_round_trip() -> None:
    state = clip_tower(ls_init_value=0.1).state_dict()
    ours = convert_clip_visual(state)
    assert_round_trip(state, revert_clip_visual(ours))
    with pytest.raises(ValueError, match=r"head\.bias must be zero"):
        revert_clip_visual({**ours, "head.bias": torch.ones(5)})


def test_whole_clip_leaves_the_text_out_and_says_so(tmp_path: Any) -> None:
    vision = {"layers": 2, "width": 24, "head_width": 12, "mlp_ratio": 2.0, "patch_size": 4}
    text = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
    theirs = randomised(open_clip.CLIP(5, {**vision, "image_size": 16}, text))
    state = {name: value.half() for name, value in theirs.state_dict().items()}
    state |= {"input_resolution": torch.tensor(16), "context_length": torch.tensor(8)}
    ours, _ = load(tmp_path, state, **CLIP)
    theirs.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
    assert_same(ours(images()), theirs.encode_image(images()))
    text_part = [name for name in state if not name.startswith("visual.")]
    assert ours.card.extra["left_out"] == [f"{len(text_part)} tensors of the text part"]
    with pytest.raises(WeightsError, match="adapter"):
        load(tmp_path, {**state, "adapter.weight": torch.zeros(3)}, **CLIP)


@pytest.mark.parametrize(
    ("tower", "option"),
    [
        ({"act_layer": clip.QuickGELU}, {"act": "quick_gelu"}),
        ({"pool_type": "avg"}, {"global_pool": "avg", "fc_norm": False}),
        ({"pool_type": "avg", "final_ln_after_pool": True}, {"global_pool": "avg"}),
        ({"final_ln_after_pool": True}, {}),
        ({"no_ln_pre": True}, {"pre_norm": False}),
        ({"ls_init_value": 0.3}, {"init_values": 1e-5}),
        ({"image_size": (16, 8)}, {}),
    ],
    ids=str,
)
def test_clip_network_tells_its_options(tower: Any, option: Any) -> None:
    theirs = clip_tower(**tower)
    state = {f"visual.{name}": value for name, value in theirs.state_dict().items()}
    grids = {"visual.positional_embedding": theirs.grid_size}
    source = Source("open_clip:x", state, None, grids, network=nn.ModuleDict({"visual": theirs}))
    ours = VisionTransformer(**{**CLIP, "img_size": theirs.image_size, **option}).eval()
    apply_source(ours, source)
    x = images(*theirs.image_size)
    assert_same(ours(x), theirs(x))
    assert "notes" not in ours.card.extra
    resized = VisionTransformer(**{**CLIP, "img_size": (32, 24), **option})
    rows, cols = theirs.grid_size
    assert apply_source(resized, source).resized == {"pos_embed": f"grid {rows}x{cols} -> 8x6"}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"act": "gelu"}, "act: 'quick_gelu' there, 'gelu' here"),
        ({"norm_eps": 1e-6}, "norm_eps: 1e-05 there, 1e-06 here"),
        ({"num_heads": 4}, "num_heads: 2 there, 4 here"),
        ({"global_pool": "avg", "fc_norm": False}, "global_pool: 'token' there, 'avg' here"),
    ],
    ids=str,
)
def test_clip_network_refuses_other_variants(option: Any, said: str) -> None:
    theirs = clip_tower(act_layer=clip.QuickGELU)
    source = Source("open_clip:x", theirs.state_dict(), network=theirs)
    with pytest.raises(WeightsError, match=said):
        apply_source(VisionTransformer(**{**CLIP, "act": "quick_gelu", **option}), source)


def test_clip_with_attentional_pooling_is_refused(tmp_path: Any) -> None:
    state = clip_tower(attentional_pool=True, attn_pooler_heads=1).state_dict()
    with pytest.raises(WeightsError, match="attentional pooling"):
        load(tmp_path, state, **CLIP)


# --- Google ----------------------------------------------------------------------------------


def google_arrays(prefix: str = "", grid: int = 4) -> dict[str, np.ndarray]:
    """An original checkpoint with random values."""
    torch.manual_seed(0)
    model = randomised(VisionTransformer(**{**SMALL, "img_size": 4 * grid}))
    arrays = revert_google(model.state_dict(), num_heads=2)
    return {f"{prefix}{name}": value.detach().numpy() for name, value in arrays.items()}


def big_vision_arrays(prefix: str, stacked: bool) -> dict[str, np.ndarray]:
    """SigLIP's image tower as big_vision names it, with random values."""
    rng, d, h = np.random.default_rng(0), 24, 2
    block = {"LayerNorm_0/scale": (d,), "LayerNorm_0/bias": (d,)}
    block |= {"LayerNorm_1/scale": (d,), "LayerNorm_1/bias": (d,)}
    attention = {f"{n}/kernel": (d, h, d // h) for n in ("query", "key", "value")}
    attention |= {f"{n}/bias": (h, d // h) for n in ("query", "key", "value")}
    attention |= {"out/kernel": (h, d // h, d), "out/bias": (d,)}
    mlp = {"Dense_0/kernel": (d, 2 * d), "Dense_0/bias": (2 * d,)}
    mlp |= {"Dense_1/kernel": (2 * d, d), "Dense_1/bias": (d,)}
    inside = {f"MultiHeadDotProductAttention_0/{k}": v for k, v in attention.items()}
    inside |= {f"MlpBlock_0/{k}": v for k, v in mlp.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (4, 4, 3, d),
        "embedding/bias": (d,),
        "pos_embedding": (1, 16, d),
        "Transformer/encoder_norm/scale": (d,),
        "Transformer/encoder_norm/bias": (d,),
        "MAPHead_0/probe": (1, 1, d),
        "MAPHead_0/LayerNorm_0/scale": (d,),
        "MAPHead_0/LayerNorm_0/bias": (d,),
        **{f"MAPHead_0/{k}": v for k, v in inside.items()},
    }
    for name, shape in {**block, **inside}.items():
        if stacked:
            shapes[f"Transformer/encoderblock/{name}"] = (2, *shape)
        else:
            shapes |= {f"Transformer/encoderblock_{i}/{name}": shape for i in range(2)}
    return {
        f"{prefix}{name}": rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_google_equals_timms_own_reading(prefix: str, tmp_path: Any) -> None:
    path = tmp_path / "vit.npz"
    np.savez(path, **google_arrays(prefix), **({"opt/state/step": np.ones(1)} if prefix else {}))
    theirs = Timm(**SMALL).eval()
    theirs.load_pretrained(str(path))
    ours = VisionTransformer(**SMALL).eval()
    report = zoo.load_pretrained(ours, f"file:{path}")
    assert_same(ours(images()), theirs(images()))
    assert report.matched_fraction == 1
    assert ("left_out" in ours.card.extra) == bool(prefix)
    assert "tanh approximation" in ours.card.extra["notes"][0]
    with pytest.raises(WeightsError, match="num_heads: 2 there, 4 here"):
        zoo.load_pretrained(VisionTransformer(**{**SMALL, "num_heads": 4}), f"file:{path}")


@pytest.mark.parametrize("size", OTHER_SIZES)
def test_google_at_another_size(size: tuple[int, int], tmp_path: Any) -> None:
    """timm reads at the file's own size, and resamples bicubically as it does elsewhere."""
    np.savez(tmp_path / "vit.npz", **google_arrays())
    native = Timm(**SMALL)
    native.load_pretrained(str(tmp_path / "vit.npz"))
    ours = VisionTransformer(**{**SMALL, "img_size": size}).eval()
    zoo.load_pretrained(ours, f"file:{tmp_path / 'vit.npz'}")
    assert_same(ours(images(*size)), at_another_size(native.state_dict(), size)(images(*size)))


@pytest.mark.parametrize("prefix", ["params/", "params/img/"])
@pytest.mark.parametrize("stacked", [False, True])
def test_big_vision_equals_timms_own_reading(prefix: str, stacked: bool, tmp_path: Any) -> None:
    path, options = tmp_path / "siglip.npz", {"class_token": False, "global_pool": "map"}
    np.savez(path, **big_vision_arrays(prefix, stacked), **{"params/t": np.ones(1)})
    theirs = Timm(**{**SMALL, **options, "num_classes": 0}).eval()
    theirs.load_pretrained(str(path))
    ours = VisionTransformer(**{**SMALL, **options, "num_classes": 0}).eval()
    if prefix == "params/":  # `params/t` counts as part of it
        with pytest.raises(WeightsError, match=r"only in the source.*: t"):
            zoo.load_pretrained(ours, f"file:{path}")
        np.savez(path, **big_vision_arrays(prefix, stacked))
    zoo.load_pretrained(ours, f"file:{path}")
    assert_same(ours(images()), theirs(images()))
    pooled = {**SMALL, "class_token": False, "global_pool": "avg", "fc_norm": False}
    with pytest.raises(WeightsError, match="global_pool: 'map' there, 'avg' here"):
        zoo.load_pretrained(VisionTransformer(**pooled), f"file:{path}")


def test_google_round_trip() -> None:
    arrays = {name: torch.from_numpy(value) for name, value in google_arrays().items()}
    assert_round_trip(arrays, revert_google(convert_google(arrays), num_heads=2))


def test_google_hidden_layer_goes_with_the_classifier(tmp_path: Any) -> None:
    hidden = {"pre_logits/kernel": np.ones((24, 24)), "pre_logits/bias": np.ones(24)}
    np.savez(tmp_path / "vit.npz", **google_arrays(), **hidden)
    with pytest.raises(WeightsError, match=r"pre_logits\.weight"):
        zoo.load_pretrained(VisionTransformer(**SMALL), f"file:{tmp_path / 'vit.npz'}")
    model = VisionTransformer(**{**SMALL, "num_classes": 0})
    zoo.load_pretrained(model, f"file:{tmp_path / 'vit.npz'}")
    assert "pre_logits" in model.card.extra["left_out"][0]


# --- timm ------------------------------------------------------------------------------------

SAME_NAMES = [
    {},
    {"class_token": False, "global_pool": "avg"},
    {"reg_tokens": 4},
    {"reg_tokens": 4, "no_embed_class": True},
    {"class_token": False, "reg_tokens": 2, "global_pool": "avg"},
    {"init_values": 0.1},
    {"class_token": False, "global_pool": "map", "num_classes": 0},
    {"qk_norm": True},
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "", "num_classes": 0},
]


def timm_source(network: Any) -> Source:
    return Source("timm:x", network.state_dict(), network=network)


@pytest.mark.parametrize("size", [(16, 16), (16, 8), (24, 32)])
@pytest.mark.parametrize("options", SAME_NAMES, ids=str)
def test_timm(options: dict[str, Any], size: tuple[int, int]) -> None:
    """Class token, registers and positions on them or not; the grid alone is resampled."""
    theirs = randomised(Timm(**{**SMALL, "img_size": (16, 8), **options}))
    ours = VisionTransformer(**{**SMALL, **options, "img_size": size}).eval()
    report = apply_source(ours, timm_source(theirs))
    assert report.matched_fraction == 1
    theirs.set_input_size(size)
    assert_same(ours(images(*size)), theirs(images(*size)))


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({"act_layer": "gelu_tanh"}, {}, "act: 'gelu_tanh' there, 'gelu' here"),
        ({"act_layer": "quick_gelu"}, {"act": "gelu_tanh"}, "act: 'quick_gelu' there"),
        ({"norm_layer": nn.LayerNorm}, {}, "norm_eps: 1e-05 there, 1e-06 here"),
        ({"num_heads": 4}, {}, "num_heads: 4 there, 2 here"),
        ({"global_pool": "avg", "fc_norm": False}, {}, "global_pool: 'avg' there, 'token' here"),
        ({"reg_tokens": 1, "no_embed_class": True}, {"reg_tokens": 1}, "no_embed_class: True"),
        ({"qk_norm": True}, {}, "qk_norm: True there, False here"),
        ({"pos_embed": "none"}, {}, "position: 'none' there, 'learned' here"),
        ({"pre_norm": True}, {}, "pre_norm: True there, False here"),
        ({"qkv_bias": False}, {}, "qkv_bias: False there, True here"),
        ({}, {"qkv_bias": False}, "qkv_bias: True there, False here"),
        ({"class_token": False, "global_pool": "avg"}, {"global_pool": "avg"}, "class_token"),
    ],
    ids=str,
)
def test_timm_refuses_other_variants(there: Any, here: Any, said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        apply_source(
            VisionTransformer(**{**SMALL, **here}), timm_source(Timm(**{**SMALL, **there}))
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mlp_layer": timm.layers.SwiGLU}, "a SwiGLU in place of Mlp"),
        ({"global_pool": "avgmax"}, "global_pool 'avgmax'"),
        ({"final_norm": False}, "no final norm"),
        ({"scale_mlp_norm": True}, "scale_mlp_norm"),
        ({"scale_attn_norm": True}, "scale_attn_norm"),
        ({"proj_bias": False}, "proj_bias=False"),
        ({"pool_include_prefix": True}, "pool_include_prefix"),
        ({"embed_norm_layer": nn.LayerNorm}, "a norm of the patches"),
        (
            {"block_fn": timm.models.vision_transformer.ParallelScalingBlock},
            "a ParallelScalingBlock in place of Block",
        ),
        ({"norm_layer": timm.layers.RmsNorm}, "x has RmsNorm"),
        ({"act_layer": "silu"}, "the activation SiLU"),
    ],
    ids=str,
)
def test_timm_with_parts_that_we_lack(options: dict[str, Any], said: str) -> None:
    network = Timm(**{**SMALL, **options})
    with pytest.raises(WeightsError, match=said):
        timm_options(network, "x")
    with pytest.raises(WeightsError, match=said.replace("x has", "timm:x has")):
        apply_source(VisionTransformer(**SMALL), timm_source(network))


def test_timm_distilled_is_refused() -> None:
    network = timm.create_model("deit_tiny_distilled_patch16_224", depth=1)
    with pytest.raises(WeightsError, match="a distillation token"):
        apply_source(zoo.create_model("vit_tiny_patch16_224", depth=1), timm_source(network))


def test_timm_trunk_of_open_clip(tmp_path: Any) -> None:
    """SigLIP's towers in open_clip are timm's; a projection behind them is our head."""
    options = {**SMALL, "class_token": False, "global_pool": "map", "num_classes": 0}
    theirs = randomised(Timm(**options))
    state = revert_open_clip_trunk(theirs.state_dict())
    state |= {"text.transformer.weight": torch.zeros(3), "logit_bias": torch.zeros(1)}
    ours = VisionTransformer(**options).eval()
    apply_source(ours, Source("open_clip:x", state, network=nn.ModuleDict({"visual": theirs})))
    assert_same(ours(images()), theirs(images()))
    assert ours.card.extra["left_out"] == ["2 tensors of the text part"]
    assert_round_trip(theirs.state_dict(), convert_open_clip_trunk(state))

    projection = torch.randn(7, 24)
    state["visual.head.proj.weight"] = projection
    headed, _ = load(tmp_path, state, **{**options, "num_classes": 7})
    assert_same(headed(images()), theirs(images()) @ projection.T)
    assert "does not tell" in headed.card.extra["notes"][0]
