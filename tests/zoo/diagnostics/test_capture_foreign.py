"""Weights of other libraries' attention, against what they themselves compute in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from open_clip.transformer import CustomResidualAttentionBlock
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import swin_transformer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.vit.modeling_vit import ViTAttention

import vision
import zoo
from crossmodal.matcher import Matcher
from zoo.diagnostics import NothingCapturedError, capture_attention
from zoo.weights import unwrap

Weights = dict[str, list[Tensor]]


def shuffled(model: Any, std: float = 0.2) -> Any:
    """With random parameters throughout: no scale is 1 and no bias is 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, std, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(0.5)
    return model.eval()


def same(records: Weights, expected: Weights, tolerance: float = 1e-5) -> None:
    """Equal, where a row of NaN in what is expected stands for one of zeros."""
    assert list(records) == list(expected)
    for name, maps in records.items():
        assert len(maps) == len(expected[name])
        for got, want in zip(maps, expected[name], strict=True):
            assert got.dtype == torch.float32
            assert not got.requires_grad
            want = want.nan_to_num(0).float()
            torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
            sums = got.sum(-1)
            assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()


def double(model: nn.Module) -> Any:
    return copy.deepcopy(model).double().eval()


def dropped(model: nn.Module, run: Callable[[Any], Any]) -> Weights:
    """What timm's attention gives to its dropout, computed without the fused kernel."""
    reference, seen = double(model), {}
    for name, module in reference.named_modules():
        if isinstance(drop := getattr(module, "attn_drop", None), nn.Module):
            module.fused_attn = False

            def keep(module: nn.Module, args: Any, name: str = name) -> None:
                seen.setdefault(name, []).append(args[0].detach())

            drop.register_forward_pre_hook(keep)
    run(reference)
    return seen


def needed(model: nn.Module, run: Callable[[Any], Any]) -> Weights:
    """What nn.MultiheadAttention returns where it is asked for its weights."""
    reference, seen = double(model), {}
    for name, module in reference.named_modules():
        if isinstance(module, nn.MultiheadAttention):

            def forward(
                *args: Any, own: Any = module.forward, name: str = name, **kwargs: Any
            ) -> Any:
                kwargs |= {"need_weights": True, "average_attn_weights": False}
                output, weights = own(*args, **kwargs)
                name = name or "MultiheadAttention"
                seen.setdefault(name, []).append(weights.detach())
                return output, weights

            module.forward = forward  # type: ignore[method-assign]
    run(reference)
    return seen


# --- ours and timm ------------------------------------------------------------------------------

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
TIMM: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: VisionTransformer(**SMALL, attn_drop_rate=0.3),
    "vit, q and k normed, registers": lambda: VisionTransformer(
        **SMALL, qk_norm=True, reg_tokens=2
    ),
    "vit, not fused": lambda: unfused(VisionTransformer(**SMALL)),
    "eva": lambda: Eva(**SMALL, qk_norm=True, use_rot_pos_emb=True),
    "eva, three projections": lambda: Eva(**SMALL, qkv_fused=False, use_rot_pos_emb=True),
    "rope, halves": lambda: Eva(**SMALL, attn_type="rope", rope_rotate_half=True),
    "beit": lambda: Beit(**SMALL, use_rel_pos_bias=True, qkv_bias=True),
    "beit, shared bias": lambda: Beit(**SMALL, use_shared_rel_pos_bias=True, qkv_bias=False),
    "swin": lambda: SwinTransformer(**SWIN, window_size=4),
    "swin v2": lambda: SwinTransformerV2(**SWIN, window_size=4),
}


def unfused(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn, module.scale = False, 0.7
    return model


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    model = shuffled(TIMM[name]())
    with capture_attention(model) as records:
        model(IMAGES)
    same(records, dropped(model, lambda m: m(IMAGES.double())))
    counts = [len(maps) for (maps,) in records.values()]
    assert set(counts) == ({32, 8} if name.startswith("swin") else {2})  # windows, or samples


def test_ours_by_the_formula() -> None:
    model = shuffled(vision.vit.VisionTransformer(**SMALL, attn_drop_rate=0.3))
    reference, inputs = double(model), {}
    for name, module in reference.named_modules():
        if name.endswith(".norm1"):
            module.register_forward_hook(lambda m, a, out, name=name: inputs.update({name: out}))
    reference(IMAGES.double())
    with capture_attention(model.train()) as records:
        model(IMAGES)
    first = reference.blocks[0].attn.qkv(inputs["blocks.0.norm1"]).view(2, 17, 3, 4, 8)
    q, k, _ = first.unbind(2)
    expected = (torch.einsum("bihe,bjhe->bhij", q, k) / 8**0.5).softmax(-1)
    same({"0": records["blocks.0.attn"]}, {"0": [expected]})


@pytest.mark.parametrize("kind", ["dense", "padding", "float", "causal"])
def test_timm_masks(kind: str) -> None:
    attn = shuffled(timm.layers.Attention(16, 2))
    x = torch.randn(3, 5, 16)
    allowed = torch.rand(3, 1, 5, 5) > 0.5
    allowed[0, 0, 2] = False  # a query with nothing to attend to
    masks = {
        "dense": {"attn_mask": allowed},
        "padding": {
            "attn_mask": (torch.arange(5) < torch.tensor([5, 2, 1])[:, None])[:, None, None]
        },
        "float": {"attn_mask": torch.randn(5, 5).masked_fill(~allowed[0, 0], -torch.inf)},
        "causal": {"is_causal": True},
    }
    with capture_attention(attn) as records:
        attn(x, **masks[kind])

    def run(reference: Any) -> None:
        mask = {k: v.double() if kind == "float" else v for k, v in masks[kind].items()}
        reference(x.double(), **mask)

    same(records, {"Attention": dropped(attn, run)[""]})


def test_timm_pools_by_a_learned_query() -> None:
    model = shuffled(VisionTransformer(**SMALL, global_pool="map", class_token=False))
    with capture_attention(model, "attn_pool") as records:
        model(IMAGES)
    reference = double(model)
    tokens = reference.forward_features(IMAGES.double())
    pool = reference.attn_pool
    q = pool.q(pool.latent).view(1, 4, 8)
    k = pool.kv(tokens).view(2, 16, 2, 4, 8)[:, :, 0]
    expected = (torch.einsum("ihe,bjhe->bhij", q, k) / 8**0.5).softmax(-1)
    same(records, {"attn_pool": [expected]})


def test_queries_that_share_keys() -> None:
    options = {"num_heads": 4, "num_kv_heads": 2, "qkv_fused": False}
    attn = shuffled(timm.layers.AttentionRope(32, **options))
    x = torch.randn(2, 6, 32)
    with capture_attention(attn) as records:
        attn(x)
    same(records, {"AttentionRope": dropped(attn, lambda m: m(x.double()))[""]})


def test_the_real_tiny_vit() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224").eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad(), capture_attention(model) as records:
        model(images)
        expected = dropped(model, lambda m: m(images.double()))
    assert len(records) == 12
    same(records, expected)


# --- torch and torchvision ----------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 12, "vdim": 20},
    "more keys": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths, more keys": {"kdim": 12, "vdim": 20, "add_bias_kv": True, "bias": False},
}


@pytest.mark.parametrize("masks", ["none", "bool", "float", "each head"])
@pytest.mark.parametrize("layout", ["batch first", "tokens first", "no batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch(kind: str, layout: str, masks: str) -> None:
    options = KINDS[kind]
    attn = nn.MultiheadAttention(16, 4, **options, batch_first=layout == "batch first", dropout=0.5)
    shuffled(attn).train()
    b = 1 if layout == "no batch" else 3
    widths = (16, options.get("kdim", 16), options.get("vdim", 16))
    inputs = [torch.randn(b, n, width) for n, width in zip((5, 7, 7), widths, strict=True)]
    given = torch_masks(masks, b)
    if layout == "tokens first":
        inputs = [x.transpose(0, 1) for x in inputs]
    elif layout == "no batch":
        inputs = [x[0] for x in inputs]
        given = {n: m[0] if n == "key_padding_mask" else m for n, m in given.items()}
    with capture_attention(attn) as records:
        attn(*inputs, need_weights=False, **given)

    def run(reference: Any) -> None:
        masks = {n: m.double() if m.is_floating_point() else m for n, m in given.items()}
        reference(*(x.double() for x in inputs), **masks)

    expected = needed(attn, run)
    if layout == "no batch":
        expected = {name: [maps[None] for maps in all_maps] for name, all_maps in expected.items()}
    same(records, expected)


def torch_masks(kind: str, b: int) -> dict[str, Tensor]:
    """In torch's meaning: True may not. The first query has nothing to attend to."""
    if kind == "none":
        return {}
    padding = torch.arange(7) >= torch.tensor([7, 3, 1][:b])[:, None]
    shape = (4 * b, 5, 7) if kind == "each head" else (5, 7)
    structure = torch.rand(shape) > 0.6
    structure[..., 0, :] = True
    if kind != "float":
        return {"key_padding_mask": padding, "attn_mask": structure}
    return {
        "key_padding_mask": torch.randn(b, 7).masked_fill(padding, -torch.inf),
        "attn_mask": torch.randn(shape).masked_fill(structure, -torch.inf),
    }


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder_of_torch(norm_first: bool, train: bool) -> None:
    """In evaluation, torch runs no attention module of it, and cuts the padding out."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    shuffled(encoder).train(train)
    x, padding = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([6, 4, 1])[:, None]
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        with capture_attention(encoder) as records:
            out = encoder(x, src_key_padding_mask=padding)
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(out[~padding], expected[~padding])
    assert list(records) == ["layers.0.self_attn", "layers.1.self_attn"]
    reference = double(encoder).train(train)  # the fast kernel is off there as well, by gradients
    want = needed(reference, lambda m: m.train()(x.double(), src_key_padding_mask=padding))
    same(records, want)


def test_torchvision() -> None:
    options = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4}
    model = shuffled(torchvision.models.VisionTransformer(**options, hidden_dim=32, mlp_dim=64))
    with capture_attention(model) as records:
        model(IMAGES)
    assert next(iter(records)) == "encoder.layers.encoder_layer_0.self_attention"
    same(records, needed(model, lambda m: m(IMAGES.double())))


def softmaxes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What every softmax from now on puts out."""
    seen: list[Tensor] = []
    softmax = nn.functional.softmax

    def kept(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(softmax(*args, **kwargs).detach())
        return seen[-1]

    monkeypatch.setattr(nn.functional, "softmax", kept)
    return seen


def torchvision_swin(block: Any) -> nn.Module:
    """8x8 patches, of the last stage 4x4 in windows of 4x3: padded, shifted in one axis only."""
    return swin_transformer.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 3], stochastic_depth_prob=0.0, block=block,
        downsample_layer=swin_transformer.PatchMerging
        if block is swin_transformer.SwinTransformerBlock
        else swin_transformer.PatchMergingV2,
    )  # fmt: skip


@pytest.mark.parametrize("size", [(32, 32), (28, 40)])
@pytest.mark.parametrize("version", ["", "V2"])
def test_swin_of_torchvision(
    version: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shuffled(torchvision_swin(getattr(swin_transformer, f"SwinTransformerBlock{version}")))
    images = torch.randn(2, 3, *size)
    with capture_attention(model) as records:
        model(images)
    seen = softmaxes(monkeypatch)
    double(model)(images.double())
    assert list(records) == [f"features.{stage}.{k}.attn" for stage in (1, 3) for k in (0, 1)]
    same(records, {name: [maps] for name, maps in zip(records, seen, strict=True)})


@pytest.mark.slow
def test_the_real_vit_b_16() -> None:
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16().eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad(), capture_attention(model) as records:
        model(images)
        expected = needed(model, lambda m: m(images.double()))
    assert len(records) == 12
    same(records, expected)


# --- open_clip ----------------------------------------------------------------------------------

VISION = {"layers": 2, "width": 32, "head_width": 8, "image_size": 32, "patch_size": 8}
TEXT = {"context_length": 7, "vocab_size": 20, "width": 32, "heads": 4, "layers": 2}


def small_clip(**text: Any) -> Any:
    return shuffled(open_clip.CLIP(16, vision_cfg=VISION, text_cfg=TEXT | text))


def words(b: int = 2) -> Tensor:
    return torch.randint(1, 20, (b, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("train", [False, True])
def test_open_clip(train: bool) -> None:
    model, text = small_clip(), words()
    with torch.no_grad(), capture_attention(model.train(train)) as records:
        model(IMAGES, text)
    same(records, needed(model, lambda m: m(IMAGES.double(), text)))
    causal = records["transformer.resblocks.0.attn"][0]
    assert (causal.triu(1) == 0).all()
    assert records["visual.transformer.resblocks.1.attn"][0].shape == (2, 4, 17, 17)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"scale_cosine_attn": True}])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "each head"])
def test_open_clips_own_attention(
    options: dict[str, bool], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "bmm", torch.matmul)  # open_clip calls it with four axes
    block = shuffled(CustomResidualAttentionBlock(32, 4, scale_heads=True, **options))
    x = torch.randn(2, 5, 32)
    shape = (8, 5, 5) if mask == "each head" else (5, 5)
    given: Any = torch.rand(shape) > 0.6
    given[..., 0, :] = True
    if mask == "none":
        given = None
    elif mask == "float":
        given = torch.randn(shape).masked_fill(given, -torch.inf)
    with capture_attention(block) as records:
        block(x, attn_mask=given)

    def run(reference: Any) -> None:
        reference.attn.use_fsdpa = False
        reference(x.double(), attn_mask=given)

    same(records, dropped(block, run))


@pytest.mark.slow
def test_the_real_open_clip() -> None:
    torch.manual_seed(0)
    model = open_clip.create_model("ViT-B-32").eval()
    images, text = torch.randn(1, 3, 224, 224), open_clip.tokenize(["a dog on a sofa"])
    with torch.no_grad(), capture_attention(model) as records:
        model(images, text)
        expected = needed(model, lambda m: m(images.double(), text))
    assert len(records) == 24
    same(records, expected)


# --- transformers -------------------------------------------------------------------------------

HIDDEN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
IMAGE = HIDDEN | {"image_size": 32, "patch_size": 8}
WORDS = HIDDEN | {"vocab_size": 20, "max_position_embeddings": 7}
TRANSFORMERS = {
    "ViT": IMAGE,
    "DeiT": IMAGE,
    "Dinov2": IMAGE,
    "Dinov2WithRegisters": IMAGE,
    "IJepa": IMAGE,
    "ViTMSN": IMAGE,
    "CLIPVision": IMAGE,
    "CLIPText": WORDS,
    "SiglipVision": IMAGE | {"vision_use_head": False},
    "SiglipText": WORDS,
    "Beit": IMAGE | {"use_relative_position_bias": True},
    "DINOv3ViT": IMAGE | {"num_register_tokens": 2},
    "Yolos": IMAGE | {"image_size": [32, 32], "num_detection_tokens": 3},
    "DPT": IMAGE | {"backbone_out_indices": [0, 0, 1, 1]},
    "CLIPSegVision": IMAGE,
    "MetaClip2Text": WORDS,
    "XCLIPText": WORDS,
    "ChineseCLIPVision": IMAGE,
    "ChineseCLIPText": WORDS,
    "Bert": WORDS,
    "Roberta": WORDS | {"max_position_embeddings": 9},
    "XLMRoberta": WORDS | {"max_position_embeddings": 9},
    "Camembert": WORDS | {"max_position_embeddings": 9},
    "Electra": WORDS | {"embedding_size": 32},
}
READ = ("CLIPText", "SiglipText", "ChineseCLIPText", "Bert", "Roberta", "Electra")


def transformer(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**TRANSFORMERS[name], **options)
    return shuffled(getattr(transformers, f"{name}Model")(config))


def eager(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the library returns where it is asked for its weights."""
    reference = double(model)
    reference.set_attn_implementation("eager")
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    return list(reference(**inputs, output_attentions=True).attentions)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, implementation: str) -> None:
    model = transformer(name)
    model.set_attn_implementation(implementation)
    text = "vocab_size" in TRANSFORMERS[name]
    inputs = {"input_ids": words()} if text else {"pixel_values": IMAGES}
    with capture_attention(model) as records:
        model(**inputs)
    expected = eager(model, inputs)
    assert len(records) == len(expected) == 2
    same(records, {name: [maps] for name, maps in zip(records, expected, strict=True)})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", READ)
def test_transformers_padding(name: str, implementation: str) -> None:
    model = transformer(name)
    model.set_attn_implementation(implementation)
    seen = torch.arange(7) < torch.tensor([7, 3])[:, None]
    inputs = {"input_ids": words(), "attention_mask": seen.long()}
    with capture_attention(model) as records:
        model(**inputs)
    same(records, {n: [w] for n, w in zip(records, eager(model, inputs), strict=True)})
    for (maps,) in records.values():
        assert (maps[1, :, :, 3:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_are_masked_by_the_least_number_under_autocast(dtype: torch.dtype) -> None:
    """It is -inf in a shorter type; the library adds it in its own, and a row of nothing else is
    even then. In float16 it is as its scores are, which are not lost beside so small a number."""
    model = transformer("Bert")
    model.set_attn_implementation("eager")
    mask = torch.tensor([[1] * 7, [0] * 7])
    with torch.autocast("cpu", dtype), capture_attention(model) as records:
        out = model(input_ids=words(), attention_mask=mask, output_attentions=True)
    for (got,), want in zip(records.values(), out.attentions, strict=True):
        compared = slice(None) if dtype == torch.bfloat16 else slice(1)
        torch.testing.assert_close(got[compared], want[compared].float(), atol=0.02, rtol=0)
        torch.testing.assert_close(got.sum(-1), torch.ones(2, 4, 7))


def test_attention_of_transformers_without_its_model() -> None:
    attn = shuffled(ViTAttention(transformers.ViTConfig(hidden_size=32, num_attention_heads=4)))
    x = torch.randn(2, 5, 32)
    with capture_attention(attn) as records:
        attn(x)
    same(records, {"ViTAttention": [double(attn)(x.double())[1].detach()]})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_swin_of_transformers(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    config = transformers.SwinConfig(image_size=32, patch_size=2, **options)
    model = shuffled(transformers.SwinModel(config))
    model.set_attn_implementation(implementation)
    with capture_attention(model) as records:
        model(IMAGES)
    reference = double(model)
    reference.set_attn_implementation("eager")
    seen = softmaxes(monkeypatch)
    reference(IMAGES.double())
    assert len(records) == 4
    same(records, {name: [maps] for name, maps in zip(records, seen, strict=True)})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_decoder_that_looks_at_what_an_encoder_put_out(implementation: str) -> None:
    model = transformer("Bert", is_decoder=True, add_cross_attention=True, use_cache=False)
    model.set_attn_implementation(implementation)
    inputs = {"input_ids": words(), "encoder_hidden_states": torch.randn(2, 5, 32)}
    inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with capture_attention(model, "*.crossattention.*") as records:
        model(**inputs)
    reference = double(model)
    reference.set_attn_implementation("eager")
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].double()
    expected = reference(**inputs, output_attentions=True).cross_attentions
    same(records, {name: [maps] for name, maps in zip(records, expected, strict=True)})
    with capture_attention(model, "*.attention.*") as records:
        model(**inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].float()})
    expected = reference(**inputs, output_attentions=True).attentions
    same(records, {name: [maps] for name, maps in zip(records, expected, strict=True)})


def test_a_cache_that_hides_keys_is_told() -> None:
    model = transformer("Bert", is_decoder=True)
    with pytest.raises(ValueError, match="with use_cache=False"), capture_attention(model):
        model(input_ids=words(), use_cache=True)
    assert not hooks(model)


def test_transformers_kernels_that_hide_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(kernels, "hidden", sdpa_attention_forward)
    model = transformer("ViT")
    model.set_attn_implementation("hidden")
    with (
        pytest.raises(ValueError, match=r"'hidden' hides .*set_attn_implementation\('sdpa'\)"),
        capture_attention(model),
    ):
        model(IMAGES)
    assert not hooks(model)


# --- capturing changes nothing ------------------------------------------------------------------


class TextEncoder(nn.Module):
    """nn.TransformerEncoder over words, some of them padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, text: Tensor) -> Tensor:
        return self.encoder(self.embed(text), src_key_padding_mask=text > 15)


def dropping() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]]:
    drop = {"attn_drop_rate": 0.3, "proj_drop_rate": 0.2, "drop_path_rate": 0.2}
    hidden = {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}
    return {
        "ours": (
            lambda: vision.vit.VisionTransformer(**SMALL, attn_drop_rate=0.3, drop_path_rate=0.2),
            lambda m: m(IMAGES),
        ),
        "timm": (lambda: VisionTransformer(**SMALL, **drop), lambda m: m(IMAGES)),
        "swin": (lambda: SwinTransformer(**SWIN, window_size=4, **drop), lambda m: m(IMAGES)),
        "torch": (TextEncoder, lambda m: m(words(3))),
        "open_clip": (
            lambda: open_clip.CLIP(16, vision_cfg=VISION | {"patch_dropout": 0.3}, text_cfg=TEXT),
            lambda m: torch.cat(m(IMAGES, words())[:2]),
        ),
        "transformers": (
            lambda: transformer("ViT", **hidden).train(),
            lambda m: m(IMAGES).last_hidden_state,
        ),
    }


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", dropping())
def test_training_is_the_same_bit_for_bit(name: str, autocast: bool) -> None:  # A3, A9
    build, run = dropping()[name]

    def train(capturing: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = build().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses: list[Tensor] = []

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(run(model).float().square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            if not capturing:
                step()
                continue
            with capture_attention(model) as records:
                step()
            for maps in (maps for layer in records.values() for maps in layer):
                sums = maps.sum(-1)
                assert ((sums - 1).abs() < 1e-5).all(), name  # before dropout
        return losses, list(model.parameters()), torch.get_rng_state()

    plain, captured = train(False), train(True)
    for one, other in zip(plain[0] + plain[1], captured[0] + captured[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain[2], captured[2])


def test_the_fused_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    kernel = nn.functional.scaled_dot_product_attention

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(None)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counting)
    model = VisionTransformer(**SMALL).eval()
    expected = model(IMAGES)
    with capture_attention(model):
        assert torch.equal(model(IMAGES), expected)
    assert len(calls) == 4


def test_adapters_with_dropout_are_run_once() -> None:
    """Weights are those of the pass that ran, where a projection drops at random."""
    attn = shuffled(timm.layers.Attention(16, 2))
    attn.qkv = nn.Sequential(nn.Dropout(0.5), attn.qkv)
    x = torch.randn(2, 5, 16)
    torch.manual_seed(3)
    with capture_attention(attn.train()) as records:
        attn(x)
    torch.manual_seed(3)
    q, k, _ = attn.qkv(x).view(2, 5, 3, 2, 8).unbind(2)
    expected = (torch.einsum("bihe,bjhe->bhij", q, k) / 8**0.5).softmax(-1)
    same(records, {"Attention": [expected.detach()]})


def test_entropy_is_within_its_range() -> None:  # A9
    from zoo.diagnostics import entropy

    model = VisionTransformer(**SMALL, attn_drop_rate=0.5).train()
    with capture_attention(model) as records:
        model(IMAGES)
    for (maps,) in records.values():
        bits = entropy(maps)
        assert (bits >= 0).all()
        assert (bits <= torch.log(torch.tensor(17.0)) + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = shuffled(VisionTransformer(**SMALL)).to(dtype)
    with capture_attention(model) as records:
        model(IMAGES.to(dtype))
    if dtype == torch.float64:
        same(records, dropped(model, lambda m: m(IMAGES.double())))
        return
    block = model.blocks[0].attn
    seen: list[Tensor] = []
    block.qkv.register_forward_hook(lambda m, a, out: seen.append(out))
    model(IMAGES.to(dtype))
    q, k, _ = seen[0].double().view(2, 17, 3, 4, 8).unbind(2)
    expected = (torch.einsum("bihe,bjhe->bhij", q, k) / 8**0.5).softmax(-1)
    same({"0": records["blocks.0.attn"]}, {"0": [expected.detach()]})


# --- hooks, names, bounds -----------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_gone() -> None:
    model = TextEncoder().eval()
    with capture_attention(model):
        assert hooks(model) == 2
        model(words())
    assert hooks(model) == 0
    with pytest.raises(KeyError, match="mine"), capture_attention(model):
        raise KeyError("mine")
    with (
        pytest.raises(NothingCapturedError, match=r"encoder\.layers\.1\.self_attn"),
        capture_attention(model),
    ):
        pass
    with pytest.raises(IndexError), capture_attention(model):
        model(words() + 100)
    assert hooks(model) == 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_nested_captures_are_independent() -> None:
    model = VisionTransformer(**SMALL).eval()
    with capture_attention(model) as outer:
        with capture_attention(model, "blocks.1.*", samples=1) as inner:
            model(IMAGES)
        model(IMAGES)
    assert [len(maps) for maps in outer.values()] == [2, 2]
    assert [len(maps) for maps in inner.values()] == [1]
    assert torch.equal(inner["blocks.1.attn"][0], outer["blocks.1.attn"][0][:1])


def test_memory_is_bounded() -> None:
    model = VisionTransformer(**SMALL).eval()
    one_map = 2 * 4 * 17 * 17 * 4
    with (
        pytest.raises(MemoryError, match=r"blocks\.1\.attn .* samples="),
        capture_attention(model, max_bytes=2 * one_map - 1),
    ):
        model(IMAGES)
    assert not hooks(model)


@pytest.mark.parametrize("name", ["timm", "open_clip", "transformers"])
def test_one_record_under_checkpointing(name: str) -> None:
    model: Any
    if name == "timm":
        model, run = VisionTransformer(**SMALL), lambda: model(IMAGES)
        model.set_grad_checkpointing()
    elif name == "open_clip":
        model, run = small_clip(), lambda: torch.cat(model(IMAGES, words())[:2])
        model.set_grad_checkpointing()
    else:
        model, run = transformer("ViT"), lambda: model(IMAGES).last_hidden_state
        model.gradient_checkpointing_enable()
    with capture_attention(model.train()) as records:
        run().sum().backward()
    assert {len(maps) for maps in records.values()} == {1}


def test_copies_are_not_recorded() -> None:
    model = VisionTransformer(**SMALL).eval()
    with capture_attention(model) as records:
        copy.deepcopy(model)(IMAGES)
        model(IMAGES)
    assert {len(maps) for maps in records.values()} == {1}


def test_a_layer_that_is_used_twice() -> None:
    attn = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.ModuleDict({"first": attn, "second": attn})
    x = torch.randn(2, 5, 16)
    with capture_attention(model) as records:
        y, _ = model["first"](x, x, x)
        model["second"](y, y, y)
    assert {name: len(maps) for name, maps in records.items()} == {"first": 2}


def test_names_do_not_depend_on_wrappers() -> None:
    model = nn.DataParallel(VisionTransformer(**SMALL).eval())
    with capture_attention(model) as records:
        model(IMAGES)
    assert list(records) == ["blocks.0.attn", "blocks.1.attn"]


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_are_refused(in_place: bool) -> None:
    model = VisionTransformer(**SMALL).eval()
    compiled: Any = model
    if in_place:
        model.compile(backend="eager")
        model = copy.deepcopy(model)
    else:
        compiled = torch.compile(nn.Sequential(model), backend="eager")
        model = unwrap(compiled)
    compiled(IMAGES)
    with (
        pytest.raises(ValueError, match=r"of Attention cannot be .*compiled.*unwrap\(model\)"),
        capture_attention(compiled),
    ):
        pass
    with capture_attention(model) as records:
        model(IMAGES)
    assert len(records) == 2


def test_what_is_compiled_elsewhere_can_be_captured() -> None:
    """Our layers run inside a compiled model; theirs outside of its compiled part."""
    model = nn.ModuleDict(
        {
            "ours": torch.compile(zoo.layers.Block(16, 2), backend="eager"),
            "theirs": nn.MultiheadAttention(16, 2, batch_first=True),
        }
    )
    x = torch.randn(2, 5, 16)
    with capture_attention(model) as records:
        x = model["ours"](x)
        model["theirs"](x, x, x)
    assert set(records) == {"ours.attn", "theirs"}


def test_ours_and_theirs_in_one_model() -> None:
    model = Matcher("timm:vit_tiny_patch16_224", img_size=32).eval()
    tokens, mask = words(), torch.ones(2, 7, dtype=torch.bool)
    with torch.no_grad(), capture_attention(model) as records:
        model(IMAGES, tokens, mask)
    parts = ("image_tower.trunk", "text_tower", "fusion")
    assert all(any(name.startswith(part) for name in records) for part in parts)


def test_what_is_not_known_is_named() -> None:
    cait = Cait(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2)
    with (
        pytest.raises(
            ValueError,
            match=r"the model has none; weights of these are not known: timm\..*"
            r"TalkingHeadAttn \(blocks\.0\.attn and 2 more\)",
        ),
        capture_attention(cait),
    ):
        pass


class Scaled(timm.layers.Attention):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(2 * x, **options)


def test_a_class_with_a_forward_of_its_own_is_not_guessed() -> None:
    known, changed = timm.layers.Attention(16, 2), timm.layers.Attention(16, 2)
    changed.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict({"known": known, "scaled": Scaled(16, 2), "changed": changed})
    unknown = r"weights .*Scaled \(scaled\), timm\.layers\.attention\.Attention \(changed\)$"
    for name in ("scaled", "changed"):
        with (
            pytest.raises(ValueError, match=r"there is \['known'\]; " + unknown),
            capture_attention(model, name),
        ):
            pass
    with capture_attention(model) as records:
        known(torch.randn(1, 3, 16))
    assert list(records) == ["known"]


def test_a_model_without_attention() -> None:
    with (
        pytest.raises(ValueError, match=r"layers='\*' matches no attention: the model has none$"),
        capture_attention(timm.create_model("resnet18")),
    ):
        pass


def test_patterns_that_match_nothing_list_the_names() -> None:
    with (
        pytest.raises(ValueError, match=r"'block\.\*' matches no .*'blocks\.0\.attn', 'blocks\.1"),
        capture_attention(VisionTransformer(**SMALL), "block.*"),
    ):
        pass


class Named(nn.Module):
    """Two layers, one of them below a part of its own that is called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)})
        self.parts = nn.ModuleDict(
            {"module": inner, "attn": nn.MultiheadAttention(8, 2, batch_first=True)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts["module"]["attn"](x, x, x)[0]
        return self.parts["attn"](x, x, x)[0]


def test_only_wrappers_are_left_out_of_names() -> None:
    x, own = torch.randn(1, 3, 8), ["parts.module.attn", "parts.attn"]
    for model in (Named(), nn.DataParallel(Named())):
        with capture_attention(model) as records:
            model(x)
        assert list(records) == own
    alone = nn.DataParallel(nn.MultiheadAttention(8, 2, batch_first=True))
    with capture_attention(alone) as records:
        alone(x, x, x)
    assert list(records) == ["MultiheadAttention"]


def test_copies_and_pickles_made_while_capturing_have_no_recorder() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    images = torch.randn(1, 3, 32, 32)
    with capture_attention(model) as records:
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = model(images)
        for twin in twins:
            assert torch.equal(twin(images), expected)
    assert [len(layer) for layer in records.values()] == [1]
    assert torch.equal(pickle.loads(pickle.dumps(twins[0]))(images), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    refused = pytest.raises(ValueError, match="MultiheadAttention is called with nested tensors")
    with torch.no_grad(), refused, capture_attention(model):
        model(x, x, x, need_weights=False)


def test_no_layer_asked_for_is_an_error() -> None:
    empty = pytest.raises(ValueError, match=r"layers is empty; there is \['parts")
    with empty, capture_attention(Named(), []):
        pass
