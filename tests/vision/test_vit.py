"""The Vision Transformer, against timm's and by its properties."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers import trunc_normal_
from torch import nn
from torch.nn import functional as F

import zoo
from vision import VisionTransformer
from zoo.layers import list_attention
from zoo.layers.factory import build_core

SHARED = [name for name in zoo.list_models("vit_*") if name in set(timm.list_models("vit_*"))]
MODERATE = [name for name in SHARED if "large" not in name]
TINY: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "num_heads": 2, "depth": 3}


def copied(theirs: nn.Module, ours: nn.Module) -> None:
    """Both get the same weights, with norms, scales and tokens away from their initial values."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    ours.load_state_dict(theirs.state_dict())


def assert_equal_logits(name: str, **options: Any) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(name, **options).eval()
    ours = zoo.create_model(name, **options).eval()
    copied(theirs, ours)
    x = torch.randn(1, 3, *ours.card.preprocessing.size)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_most_variants_are_shared_with_timm() -> None:
    assert len(SHARED) >= 18


@pytest.mark.parametrize("name", SHARED)
def test_logits_equal_timms(name: str) -> None:
    patch = int(name.split("patch")[1].split("_")[0])
    assert_equal_logits(name, depth=2, img_size=(4 * patch, 3 * patch))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch32_224"])
def test_logits_equal_timms_at_full_size(name: str) -> None:
    assert_equal_logits(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODERATE)
def test_logits_equal_timms_at_full_size_slow(name: str) -> None:
    assert_equal_logits(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SHARED) - set(MODERATE)))
def test_logits_equal_timms_at_full_resolution_slow(name: str) -> None:
    assert_equal_logits(name, depth=2)


@pytest.mark.parametrize("name", SHARED)
def test_state_and_preprocessing_equal_timms(name: str) -> None:
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), zoo.create_model(name)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }
    assert ours.num_classes == theirs.num_classes
    cfg, pre = theirs.pretrained_cfg, ours.card.preprocessing
    assert (pre.size, pre.mean, pre.std) == (cfg["input_size"][1:], cfg["mean"], cfg["std"])
    assert (pre.interpolation, pre.crop_pct, pre.crop_mode) == (
        cfg["interpolation"],
        cfg["crop_pct"],
        cfg["crop_mode"],
    )


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"pre_norm": True, "reg_tokens": 2},
        {"global_pool": "avg", "reg_tokens": 3, "no_embed_class": True},
        {"global_pool": "avg", "fc_norm": False, "class_token": False},
        {"global_pool": "token", "fc_norm": True},
        {"global_pool": "map", "mlp_ratio": 2.0},
        {"global_pool": "", "init_values": 0.1},
        {"in_chans": 1, "img_size": (8, 12), "patch_size": (2, 4)},
    ],
    ids=str,
)
def test_options_equal_timms(options: dict[str, Any]) -> None:
    from timm.models.vision_transformer import VisionTransformer as Timm

    options = {**TINY, "num_classes": 5, **options}
    theirs, ours = Timm(**options).eval(), VisionTransformer(**options).eval()
    copied(theirs, ours)
    size = options["img_size"] if isinstance(options["img_size"], tuple) else (8, 8)
    x = torch.randn(2, options.get("in_chans", 3), *size)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x))
    for pre_logits in (True, False):
        features = theirs.forward_features(x)
        torch.testing.assert_close(
            ours.forward_head(features, pre_logits), theirs.forward_head(features, pre_logits)
        )


@pytest.mark.parametrize("indices", [None, 2, [0, -1], (1,)])
@pytest.mark.parametrize("output_fmt", ["NCHW", "NLC"])
@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_intermediates_equal_timms(indices: Any, output_fmt: str, flags: int) -> None:
    from timm.models.vision_transformer import VisionTransformer as Timm

    options = {**TINY, "img_size": (8, 12), "reg_tokens": 2}
    theirs, ours = Timm(**options).eval(), VisionTransformer(**options).eval()
    copied(theirs, ours)
    x = torch.randn(2, 3, 8, 12)
    kwargs: dict[str, Any] = {
        "indices": indices,
        "output_fmt": output_fmt,
        "return_prefix_tokens": bool(flags & 1),
        "norm": bool(flags & 1),
        "stop_early": bool(flags & 2),
        "intermediates_only": bool(flags & 2),
    }
    torch.testing.assert_close(
        ours.forward_intermediates(x, **kwargs), theirs.forward_intermediates(x, **kwargs)
    )


@pytest.mark.parametrize("indices", [0, 4, [3], []])
def test_intermediates_refuse_other_blocks(indices: Any) -> None:
    with pytest.raises(ValueError, match="indices"):
        VisionTransformer(**TINY).forward_intermediates(torch.zeros(1, 3, 8, 8), indices)


def test_initialisation_spreads_as_timms() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2)
    ours = zoo.create_model("vit_tiny_patch16_224", depth=2)
    their_state = theirs.state_dict()
    for name, value in ours.state_dict().items():
        expected = their_state[name].std() if value.numel() > 1 else torch.tensor(0.0)
        torch.testing.assert_close(value.std(), expected, atol=2e-7, rtol=0.1, msg=name)
    sample = trunc_normal_(torch.empty(10000), std=0.02)
    assert sample.abs().max() < 0.2  # nothing is cut: bounds are 100 deviations away


@pytest.mark.parametrize("position", ["learned", "sincos", "none"])
def test_order_is_visible_with_positions_only(position: str) -> None:
    model = VisionTransformer(**TINY, position=position, global_pool="avg").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    x = torch.randn(2, 3, 8, 8)
    turned = x.roll(2, dims=-1)  # by one patch: the same patches in another order
    assert torch.allclose(model(x), model(turned), atol=1e-4) == (position == "none")


def test_sincos_is_no_parameter_and_not_saved() -> None:
    model = VisionTransformer(**TINY, position="sincos")
    assert "pos_embed" not in model.state_dict()
    assert not model.pos_embed.requires_grad
    assert "pos_embed" not in model.no_weight_decay()


@pytest.mark.parametrize("head_dim", [3, 16])
def test_head_width_is_free(head_dim: int) -> None:
    model = VisionTransformer(**TINY, head_dim=head_dim)
    assert model.blocks[0].attn.proj.in_features == 2 * head_dim
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 1000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"img_size": (8, 9)},
            r"\(8, 9\) must be divisible by patch_size \(2, 2\); nearest: \(8, 8\)",
        ),
        ({"img_size": 0}, "img_size must be a positive integer"),
        ({"img_size": (8, 8, 3)}, "img_size must be"),
        ({"patch_size": 2.0}, "patch_size must be a positive integer"),
        ({"global_pool": "tokens"}, "global_pool 'tokens' must be one of.*nearest: 'token'"),
        ({"class_token": False}, "needs class_token=True"),
        ({"act": "relu6"}, "act 'relu6' must be one of"),
        ({"num_heads": 3}, r"dim \(16\) must be divisible by num_heads \(3\)"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        VisionTransformer(**{**TINY, **options})


@pytest.mark.parametrize("shape", [(2, 3, 8, 10), (2, 1, 8, 8), (3, 8, 8)])
def test_wrong_images_show_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"\({', '.join(map(str, shape))}\).*\(b, 3, 8, 8\)"):
        VisionTransformer(**TINY)(torch.zeros(shape))


def test_reset_classifier_refuses_pooling_without_weights() -> None:
    model = VisionTransformer(**TINY)
    with pytest.raises(ValueError, match="'map' needs a model built with it"):
        model.reset_classifier(3, global_pool="map")
    assert model.num_classes == 1000
    pooled = VisionTransformer(**TINY, global_pool="map", class_token=False)
    with pytest.raises(ValueError, match="needs class_token=True"):
        pooled.reset_classifier(3, global_pool="token")
    pooled.reset_classifier(3, global_pool="avg")
    assert not [name for name, _ in pooled.named_parameters() if "attn_pool" in name]
    assert pooled(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_checkpointing_changes_nothing() -> None:
    model = VisionTransformer(**TINY, drop_path_rate=0.3, proj_drop_rate=0.1, attn_drop_rate=0.1)
    x = torch.randn(4, 3, 8, 8)
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(0)
        loss = model(x).square().sum()
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_drop_path_rises_to_its_rate() -> None:
    model = VisionTransformer(**TINY, drop_path_rate=0.2)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize("pool", ["token", "map"])
def test_layers_and_decay_cover_every_parameter(pool: str) -> None:
    model = VisionTransformer(**TINY, reg_tokens=1, pre_norm=True, global_pool=pool)
    names = {name for name, _ in model.named_parameters()}
    layers = {name: model.layer_index(name) for name in names}
    assert set(layers.values()) == set(range(5))
    assert layers["pos_embed"] == layers["norm_pre.weight"] == 0
    assert layers["blocks.0.norm1.weight"] == 1
    assert layers["blocks.2.mlp.fc2.bias"] == 3
    assert layers["head.weight"] == model.num_layers == 4
    assert {"pos_embed", "cls_token", "reg_token"} <= model.no_weight_decay() <= names
    with pytest.raises(ValueError, match=r"'neck\.weight' is no parameter"):
        model.layer_index("neck.weight")


def test_attention_of_every_block_is_captured() -> None:
    model = VisionTransformer(**TINY).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    with zoo.capture_attention(model) as records:
        assert torch.equal(model(x), expected)
    assert len(records) == 3
    for (weights,) in records.values():
        assert weights.shape == (2, 2, 17, 17)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17))


def test_compiles_without_a_break() -> None:
    model = VisionTransformer(**TINY).eval()
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_learns_a_toy_problem() -> None:
    """Which half is brighter: a few steps bring the loss close to zero."""
    torch.manual_seed(0)
    model = VisionTransformer(**{**TINY, "num_classes": 2})
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    x, y = torch.randn(64, 3, 8, 8), torch.arange(64) % 2
    x[y == 1, :, :, 4:] += 2
    x[y == 0, :, :, :4] += 2
    first = F.cross_entropy(model(x), y).item()
    for _ in range(80):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 < first


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_that_nobody_reads_change_nothing(checkpointing):
    """`forward` spares them the last MLP; values, gradients and records stay what they were."""
    torch.manual_seed(0)
    model = zoo.create_model("vit_micro_patch4_32", class_token=True, global_pool="token")
    model.set_grad_checkpointing(checkpointing)
    x = torch.randn(2, 3, 32, 32)
    with zoo.capture_attention(model, "blocks.3.attn") as records:
        short = model(x)
    assert records["blocks.3.attn"][0].shape == (2, 4, 65, 65)
    full = model.forward_head(model.forward_features(x))
    torch.testing.assert_close(short, full)
    params = list(model.parameters())
    for one, two in zip(
        torch.autograd.grad(short.sum(), params),
        torch.autograd.grad(full.sum(), params),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_hook_on_the_last_block_sees_all_tokens():
    model = zoo.create_model("vit_micro_patch4_32", class_token=True, global_pool="token")
    for watched in (model.norm, model.blocks[-1], model.blocks[-1].mlp.fc1):
        shapes = []
        handle = watched.register_forward_hook(lambda _m, _i, out, s=shapes: s.append(out.shape[1]))
        model(torch.randn(1, 3, 32, 32))
        handle.remove()
        assert shapes == [65]


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_export_keeps_the_batch_free(pool):
    model = zoo.create_model("vit_micro_patch4_32", class_token=True, global_pool=pool).eval()
    batch = torch.export.Dim("b", min=2, max=64)
    program = torch.export.export(model, (torch.randn(3, 3, 32, 32),), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("position", ["none", "learned", "sincos", "relative", "rope", "prior"])
@pytest.mark.parametrize("attention", list_attention())
def test_every_kind_with_every_position(attention, position, tmp_path):
    options = {"class_token": True, "global_pool": "token", "reg_tokens": 1, "img_size": (32, 48)}
    options |= {"depth": 2, "attention": attention, "position": position}
    if position in ("relative", "prior") and not build_core(attention, 1, 4).biases:
        with pytest.raises(ValueError, match=rf"{attention}.*no scores to add a bias to"):
            zoo.create_model("vit_micro_patch4_32", **options)
        return
    torch.manual_seed(0)
    model = zoo.create_model("vit_micro_patch4_32", **options).eval()
    images = torch.randn(2, 3, 32, 48)
    model(images).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    zoo.save_pretrained(model, tmp_path / "m")
    again = zoo.create_model(f"local-dir:{tmp_path / 'm'}").eval()
    assert torch.equal(again(images), model(images))
    if position in ("learned", "relative", "prior", "rope") and attention in ("full", "window"):
        other = zoo.create_model("vit_micro_patch4_32", **{**options, "img_size": (64, 32)})
        report = zoo.load_pretrained(other, f"local-dir:{tmp_path / 'm'}")
        tables = {"learned": 1, "relative": 2, "prior": 2, "rope": 0}[position]
        assert list(report.resized.values()) == ["grid 8x12 -> 16x8"] * tables
        assert report.matched_fraction == 1


@pytest.mark.parametrize("position", ["none", "learned", "sincos", "relative", "rope", "prior"])
def test_order_is_seen_with_positions_only(position):
    """Swapping patches permutes what a model without positions gives, and changes all others."""
    torch.manual_seed(0)
    model = zoo.create_model("vit_micro_patch4_32", position=position, depth=2).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    images = torch.randn(1, 3, 32, 32)
    swapped = torch.cat([images[..., 16:], images[..., :16]], -1)  # patches change places
    same = torch.allclose(model(images), model(swapped), atol=1e-4)
    assert same == (position == "none")


def test_relative_tables_are_those_of_timm():
    """With copied weights the logits equal timm's BEiT-like attention block by block."""
    from timm.layers import RelPosBias

    model = zoo.create_model("vit_micro_patch4_32", position="relative", class_token=True)
    bias = model.blocks[0].attn.bias
    other = RelPosBias((8, 8), 4, prefix_tokens=1)
    other.relative_position_bias_table.data.copy_(bias.relative_position_bias_table)
    torch.testing.assert_close(bias.lower(65, 65), other.get_bias())


def test_layer_decay_and_weight_decay_know_the_new_parameters():
    model = zoo.create_model("vit_micro_patch4_32", position="prior", temperature="learned")
    alone = model.no_weight_decay()
    assert "blocks.3.attn.bias.prior" in alone
    assert all(0 <= model.layer_index(n) <= model.num_layers for n, _ in model.named_parameters())


@pytest.mark.parametrize("attention", list_attention())
def test_checkpointed_gradients_are_the_same(attention):
    torch.manual_seed(0)
    options = {"redraw": True} if attention == "performer" else None
    model = zoo.create_model(
        "vit_micro_patch2_8", depth=2, attention=attention, attention_options=options
    ).train()
    images = torch.randn(2, model.card.preprocessing.in_chans, 8, 8)
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(1)
        model.zero_grad()
        model(images).square().sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "instead"), [("num_heads", "num_heads"), ("attn_drop", "attn_drop_rate")]
)
def test_attention_options_of_the_model_itself(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=f"has '{name}', which the model sets.*{instead}"):
        zoo.create_model("vit_micro_patch2_8", attention_options={name: 2})


def test_the_activation_is_saved_with_the_weights(tmp_path: Any) -> None:
    """CLIP's two variants have the same tensors and compute other values."""
    sizes: dict[str, Any] = {**TINY, "num_classes": 5}
    quick = zoo.create_model("vit_base_patch32_clip_quickgelu_224", **sizes).eval()
    with torch.no_grad():
        for parameter in quick.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    zoo.save_pretrained(quick, tmp_path / "m")
    again = zoo.create_model(f"local-dir:{tmp_path / 'm'}").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), quick(x))
    plain = zoo.create_model("vit_base_patch32_clip_224", **sizes).eval()
    with pytest.raises(zoo.weights.WeightsError, match="act: 'quick_gelu' there, 'gelu' here"):
        zoo.load_pretrained(plain, f"local-dir:{tmp_path / 'm'}")
    plain.load_state_dict(quick.state_dict())
    assert (plain(x) - quick(x)).abs().max() > 1e-3
