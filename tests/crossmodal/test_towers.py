"""Towers against the libraries' own forward passes, with the same random weights."""

from __future__ import annotations

from typing import Any

import open_clip
import pytest
import torch
from einops import rearrange
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

import zoo
from crossmodal.open_clip_text import OpenClipText
from crossmodal.towers import ImageTower, text_tower

TINY_VIT = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "embed_dim": 24}
TINY_RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16, "embed_dim": 24}
TINY_TEXT = {"layers": 2, "width": 32, "heads": 2, "embed_dim": 24, "vocab_size": 100}


@pytest.fixture(autouse=True)
def quick_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated normal numbers take most of the time of building large networks."""
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda x, **_: nn.init.uniform_(x, -0.02, 0.02))


def tower(name: str, img_size: Any = 32, **options: Any) -> ImageTower:
    torch.manual_seed(0)
    return ImageTower(name, img_size=img_size, options=options).eval()


def images(made: ImageTower) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, made.in_chans, *made.preprocessing.size, generator=generator)


def check_sizes(made: ImageTower) -> None:
    tokens, pooled, mask = made(images(made))
    assert mask is None
    assert tokens.shape[2] == made.num_features
    assert pooled.shape == (2, made.pooled_features)
    rows, cols = made.grid
    assert tokens.shape[1] == made.num_prefix_tokens + rows * cols


@pytest.mark.parametrize(
    ("name", "img_size", "options", "grid", "prefix"),
    [
        ("vit_micro_patch4_32", (32, 24), {}, (8, 6), 0),
        ("vit_tiny_patch16_224", (32, 48), {"depth": 2, "reg_tokens": 2}, (2, 3), 3),
        ("vit_micro_patch4_32", (32, 40), {"patch_size": [8, 4]}, (4, 10), 0),
        ("resnet_micro", (32, 16), {}, (8, 4), 0),
        ("timm:vit_tiny_patch16_224", (32, 64), {"depth": 2}, (2, 4), 1),
        ("timm:vit_tiny_patch16_224", (32, 64), {"global_pool": "map", "depth": 1}, (2, 4), 1),
        ("timm:resnet10t", (64, 32), {}, (2, 1), 0),
        ("timm:mobilenetv3_small_050", (64, 96), {}, (2, 3), 0),
    ],
)
def test_networks_with_features_and_head(
    name: str, img_size: Any, options: Any, grid: Any, prefix: int
) -> None:
    made = tower(name, img_size, **options)
    x = images(made)
    features = made.trunk.forward_features(x)
    tokens = rearrange(features, "b d y x -> b (y x) d") if features.ndim == 4 else features
    assert torch.equal(made(x).tokens, tokens)
    torch.testing.assert_close(made(x).pooled, made.trunk(x))
    assert (made.grid, made.num_prefix_tokens) == (grid, prefix)
    check_sizes(made)


def test_maps_with_channels_last_are_read_row_by_row() -> None:
    small = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    made = tower("timm:swin_tiny_patch4_window7_224", None, **small)
    x = images(made)
    features = made.trunk.forward_features(x)
    assert features.shape == (2, 7, 7, 128)
    assert torch.equal(made(x).tokens[:, 7 * 2 + 3], features[:, 2, 3])
    assert made.grid == (7, 7)


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("resnet18", "layer4"),
        ("mobilenet_v2", "features"),
        ("mobilenet_v3_small", "features"),
        ("squeezenet1_1", "features"),
        ("shufflenet_v2_x0_5", "conv5"),
        ("mnasnet0_5", "layers"),
        ("regnet_y_400mf", "trunk_output"),
        ("densenet121", "relu"),  # a function after its last module
        ("swin_t", "permute"),
        ("vit_b_32", "encoder"),
    ],
)
def test_torchvision_networks_give_what_their_pooling_reads(name: str, node: str) -> None:
    made = tower(f"torchvision:{name}", 64)
    expected = create_feature_extractor(made.trunk, [node])(images(made))[node]
    if expected.ndim == 4:
        expected = rearrange(expected, "b d y x -> b (y x) d")
    assert torch.equal(made(images(made)).tokens, expected)
    assert torch.equal(made(images(made)).pooled, made.trunk(images(made)))
    assert made.grid == ((2, 2) if name != "squeezenet1_1" else (3, 3))
    check_sizes(made)


def test_blocks_in_a_list_are_found() -> None:
    made = tower("torchvision:maxvit_t", 224)
    assert made.grid == (7, 7)
    assert made.num_features == made.pooled_features == 512


@pytest.mark.parametrize(
    ("arch", "img_size", "options", "grid"),
    [
        ("ViT-B-32", (32, 48), TINY_VIT, (4, 6)),
        ("ViT-B-32", 32, {**TINY_VIT, "pool_type": "avg", "final_ln_after_pool": True}, (4, 4)),
        ("coca_ViT-B-32", 32, {**TINY_VIT, "attn_pooler_heads": 2}, (4, 4)),
        ("RN50", 64, TINY_RESNET, (2, 2)),
        ("convnext_tiny", 64, {"timm_model_name": "resnet10t", "embed_dim": 24}, (2, 2)),
        ("ViT-B-16-SigLIP", 32, {"timm_model_name": "vit_tiny_patch16_224"}, (2, 2)),
    ],
)
def test_embeddings_of_images_are_open_clips(
    arch: str, img_size: Any, options: Any, grid: Any
) -> None:
    made = tower(f"open_clip:{arch}", img_size, **options)
    made.trunk.visual.output_tokens = True
    found = made.trunk.visual(images(made))
    pooled, tokens = found if isinstance(found, tuple) else (found, None)
    assert torch.equal(made(images(made)).pooled, pooled)
    if tokens is not None and not arch.startswith("coca"):  # whose tokens are queries, not places
        assert torch.equal(made(images(made)).tokens[:, 1:], tokens)
    assert made.grid == grid
    check_sizes(made)


def test_tokens_before_attentional_pooling_are_the_last_states() -> None:
    made = tower("open_clip:coca_ViT-B-32", 32, **TINY_VIT, attn_pooler_heads=2)
    kept: list[Tensor] = []
    made.trunk.visual.transformer.register_forward_hook(lambda m, args, out: kept.append(out))
    tokens = made(images(made)).tokens
    assert torch.equal(tokens, kept[0])


def test_images_of_another_size_are_refused() -> None:
    made = tower("resnet_micro", 32)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 16, 16\).*takes \(b, 3, 32, 32\)"):
        made(torch.zeros(2, 3, 16, 16))


@pytest.mark.parametrize(
    ("name", "img_size", "options", "message"),
    [
        ("resnet_mikro", 32, {}, r"unknown model 'resnet_mikro'; nearest: resnet_micro"),
        ("open_clip:ViT-B-33", 32, {}, r"open_clip has no model 'ViT-B-33'; nearest: ViT-B-32"),
        ("vit_micro_patch4_32", 30, {}, r"img_size \(30, 30\) must be divisible"),
        ("timm:vit_tiny_patch16_224", 30, {"depth": 1}, r"by the patches of .*, 16x16"),
        ("torchvision:alexnet", 16, {}, r"alexnet does not run on images of 16x16"),
        ("torchvision:vit_b_32", 40, {}, r"vit_b_32: img_size \(\(40, 40\)\): .*indivisible"),
        ("torchvision:vit_b_32", (64, 32), {}, r"\(64, 32\) must be square"),
        ("open_clip:ViT-B-32", 40, {}, r"\(40, 40\) must be divisible by 32"),
        ("open_clip:RN50", (32, 64), {}, r"\(32, 64\) must be square"),
        ("timm:pit_ti_224", None, {}, r"pit_ti_224 has no tokens in space"),
        ("text_bag", None, {}, r"text_bag has no option 'num_classes'"),
        ("vit_micro_patch4_32", 32, {"global_pool": ""}, r"does not pool: .* another global_pool"),
    ],
)
def test_what_cannot_be_a_tower_is_refused(
    name: str, img_size: Any, options: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tower(name, img_size, **options)


def test_options_that_the_tower_sets_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'num_classes'.*no classes"):
        tower("resnet_micro", 32, num_classes=3)
    with pytest.raises(ValueError, match=r"resnet_micro is a ResNet and no text tower; .*text_bag"):
        text_tower("resnet_micro")


def test_channels_and_preprocessing_follow() -> None:
    made = ImageTower("open_clip:ViT-B-32", img_size=32, in_chans=1, options=TINY_VIT)
    mean = sum(open_clip.OPENAI_DATASET_MEAN) / 3
    assert made.preprocessing.size == (32, 32)
    assert made.preprocessing.mean == pytest.approx((mean,))
    assert made(torch.zeros(2, 1, 32, 32)).pooled.shape == (2, 24)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "vit_micro_patch4_32"])
def test_checkpointing_changes_no_gradient(name: str) -> None:
    made = tower(name, 32)
    x = images(made)
    grads = []
    for enable in (False, True):
        made.set_grad_checkpointing(enable)
        made.zero_grad()
        made(x).tokens.square().sum().backward()
        grads.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert "trunk.pos_embed" in made.no_weight_decay()


@pytest.mark.parametrize("name", ["torchvision:resnet18", "open_clip:RN50"])
def test_checkpointing_that_a_network_lacks_is_refused(name: str) -> None:
    made = tower(name, 64, **(TINY_RESNET if "RN50" in name else {}))
    with pytest.raises(ValueError, match="no gradient checkpointing"):
        made.set_grad_checkpointing()


# --- text ------------------------------------------------------------------------------------


def captions(context: int) -> tuple[Tensor, Tensor]:
    """Ids with the highest one at the end, as CLIP's, and the mask."""
    lengths = torch.tensor([5, 2, context, 8])
    ids = torch.randint(1, 98, (4, context), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(context) < lengths[:, None]
    ids[torch.arange(4), lengths - 1] = 99
    return ids * mask, mask  # 0 is open_clip's padding


def peer_of(made: OpenClipText, cls: type[nn.Module], **config: Any) -> Any:
    text = {name: value for name, value in TINY_TEXT.items() if name != "embed_dim"}
    vision = {"layers": 1, "width": 16, "head_width": 16, "patch_size": 8, "image_size": 8}
    peer = cls(embed_dim=24, vision_cfg=vision, text_cfg={**text, **config}).eval()
    getattr(peer, "text", peer).load_state_dict(made.text.state_dict(), strict=False)
    return peer


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("ViT-B-32", {"context_length": 77}),
        ("coca_ViT-B-32", {"context_length": 76, "embed_cls": True}),
        (
            "ViT-B-16-SigLIP",
            {
                "context_length": 64,
                "no_causal_mask": True,
                "proj_bias": True,
                "pool_type": "last",
                "norm_kwargs": {"eps": 1e-6},
            },
        ),
    ],
)
def test_embeddings_of_texts_are_open_clips(arch: str, config: Any) -> None:
    made: Any = text_tower(f"open_clip:{arch}", **TINY_TEXT).eval()
    peer = peer_of(made, CLIP if arch == "ViT-B-32" else CustomTextCLIP, **config)
    ids, mask = captions(config["context_length"])
    found = made(ids, mask)
    torch.testing.assert_close(found.pooled, peer.encode_text(ids), rtol=1e-5, atol=1e-5)
    states = peer.forward_intermediates(text=ids, text_indices=1, normalize_intermediates=True)
    tokens = states["text_intermediates"][-1] * mask[..., None]
    torch.testing.assert_close(found.tokens, tokens, rtol=1e-5, atol=1e-5)
    assert (made.num_features, made.pooled_features, made.vocab_size) == (32, 24, 100)
    assert made.context_length == config["context_length"]


@pytest.mark.parametrize("arch", ["ViT-B-32", "coca_ViT-B-32", "MobileCLIP-S1"])
def test_padding_of_texts_never_matters(arch: str) -> None:
    made: Any = text_tower(f"open_clip:{arch}", **TINY_TEXT).eval()
    ids, mask = captions(20)
    few = mask.sum(1) <= 8
    short = made(ids[few, :8], mask[few, :8])
    garbage = torch.where(mask, ids, 57)[few]
    long = made(garbage, mask[few])
    torch.testing.assert_close(short.pooled, long.pooled)
    torch.testing.assert_close(short.tokens, long.tokens[:, :8])
    assert not long.tokens[:, 8:].any()
    empty = made(ids, torch.zeros_like(mask))
    assert not empty.tokens.any()
    assert not empty.pooled.any()


def test_a_text_tower_makes_its_tokenizer() -> None:
    made: Any = text_tower("open_clip:ViT-B-32", layers=1, width=32, heads=2, context_length=9)
    ids, mask = made.make_tokenizer()(["a dog", "a very long caption of a dog that sits on a mat"])
    assert ids.shape == (2, 9)
    assert made.eval()(ids, mask).pooled.shape == (2, made.pooled_features) == (2, 512)
    assert made.no_weight_decay() == {"text.positional_embedding"}
    with pytest.raises(ValueError, match=r"timm/ViT-B-16-SigLIP of the Hugging Face hub"):
        text_tower("open_clip:ViT-B-16-SigLIP", **TINY_TEXT).make_tokenizer()  # type: ignore[operator]


def test_checkpointing_of_a_text_tower_changes_no_gradient() -> None:
    made: Any = text_tower("open_clip:ViT-B-32", **TINY_TEXT)
    grads = []
    for enable in (False, True):
        made.set_grad_checkpointing(enable)
        made.zero_grad()
        made(*captions(12)).pooled.square().sum().backward()
        grads.append(made.text.token_embedding.weight.grad.clone())
    assert made.text.transformer.grad_checkpointing
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.ones(2, 78).long(), torch.ones(2, 78).bool(), "78 tokens, but context_length is 77"),
        (torch.ones(2, 3).long(), torch.ones(2, 4).bool(), r"must both be \(b, n\)"),
        (torch.ones(2, 3).long(), torch.ones(2, 3), r"mask of truth values"),
        (torch.full((1, 2), 100), torch.ones(1, 2).bool(), r"\[100\] are not in the vocabulary"),
    ],
)
def test_captions_that_do_not_fit_are_refused(ids: Tensor, mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_tower("open_clip:ViT-B-32", **TINY_TEXT)(ids, mask)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("open_clip:ViT-B-33", {}, "open_clip has no model 'ViT-B-33'"),
        ("open_clip:ViT-B-32", {"widht": 3}, "no option 'widht'; valid: .*width"),
        ("open_clip:roberta-ViT-B-32", {}, "roberta-base of the Hugging Face hub"),
        ("text_mikro", {}, "unknown model 'text_mikro'; nearest: text_micro"),
    ],
)
def test_unknown_text_towers_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        text_tower(name, **options)


def test_trained_texts_come_from_open_clips_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh: Any = text_tower("open_clip:ViT-B-32", **TINY_TEXT)
    trained = peer_of(fresh, CLIP, context_length=77)
    nn.init.normal_(trained.positional_embedding)
    asked: list[Any] = []

    def create(arch: str, **options: Any) -> Any:
        asked.append((arch, options))
        return trained

    monkeypatch.setattr(open_clip, "create_model", create)
    source = "open_clip:ViT-B-32/laion2b_s34b_b79k"
    made: Any = text_tower("open_clip:ViT-B-32", pretrained=source, **TINY_TEXT)
    assert asked == [("ViT-B-32", {"pretrained": "laion2b_s34b_b79k", "force_context_length": 77})]
    ids, mask = captions(77)
    torch.testing.assert_close(made(ids, mask).pooled, trained.encode_text(ids))
    with pytest.raises(zoo.weights.WeightsError, match=r"does not fit .* shape, positional_emb"):
        text_tower("open_clip:ViT-B-32", pretrained=source, **{**TINY_TEXT, "width": 64})
    with pytest.raises(zoo.weights.WeightsError, match="must be open_clip:ARCH/TAG"):
        text_tower("open_clip:ViT-B-32", pretrained="file:x.pt", **TINY_TEXT)
