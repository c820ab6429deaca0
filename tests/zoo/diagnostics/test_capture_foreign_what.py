"""Logits and heads' outputs of other libraries' attention, against the libraries in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from open_clip.transformer import CustomResidualAttentionBlock
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import zoo
from zoo.diagnostics import capture_attention

WHAT = ("weights", "logits", "outputs")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
VISION = {"layers": 2, "width": 32, "head_width": 8, "image_size": 32, "patch_size": 8}
TEXT = {"context_length": 7, "vocab_size": 20, "width": 32, "heads": 4, "layers": 2}
HIDDEN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(1, 20, (2, 7), generator=torch.Generator().manual_seed(2))


def hugging(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**HIDDEN, **options)
    return getattr(transformers, f"{name}Model")(config)


def encoder(batch_first: bool) -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], Any]] = {
    "timm vit": lambda: VisionTransformer(**SMALL),
    "timm vit, q and k normed": lambda: VisionTransformer(**SMALL, qk_norm=True, reg_tokens=2),
    "timm eva": lambda: Eva(**SMALL, qk_norm=True, use_rot_pos_emb=True),
    "timm beit": lambda: Beit(**SMALL, use_rel_pos_bias=True, qkv_bias=True),
    "timm swin": lambda: SwinTransformer(**SWIN, window_size=4),
    "timm swin v2": lambda: SwinTransformerV2(**SWIN, window_size=4),
    "torchvision": lambda: torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    ),
    "open_clip": lambda: open_clip.CLIP(16, vision_cfg=VISION, text_cfg=TEXT),
    "transformers vit": lambda: hugging("ViT", image_size=32, patch_size=8),
    "transformers clip": lambda: hugging("CLIPVision", image_size=32, patch_size=8),
    "transformers text": lambda: hugging("CLIPText", vocab_size=20, max_position_embeddings=7),
    "transformers bert text": lambda: hugging("Bert", vocab_size=20, max_position_embeddings=7),
    "torch": lambda: encoder(batch_first=True),
    "torch, tokens first": lambda: encoder(batch_first=False),
}


def inputs(name: str) -> tuple[Tensor, ...]:
    if name == "open_clip":
        return IMAGES, WORDS
    if name.endswith(" text"):
        return (WORDS,)
    if name.startswith("torch") and name != "torchvision":
        return (torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3)),)
    return (IMAGES,)


def build(name: str) -> Any:
    """With random parameters throughout: no scale is 1 and no bias is 0."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
            if parameter.ndim < 2:
                parameter.add_(0.5)
    return model.eval()


def double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def everything(model: Any, *args: Tensor) -> dict[str, dict[str, Tensor]]:
    with torch.no_grad(), ExitStack() as stack:
        shown = {what: stack.enter_context(capture_attention(model, what=what)) for what in WHAT}
        model(*args)
    return {what: {n: maps[0] for n, maps in records.items()} for what, records in shown.items()}


def put_out(model: Any, layers: Iterable[str], *args: Tensor) -> dict[str, Tensor]:
    """What attention modules return, in float64 and without fused kernels."""
    reference, seen = copy.deepcopy(model).double(), {}
    for name, module in reference.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if name not in layers:
            continue

        def keep(module: Any, args: Any, out: Any, name: str = name) -> None:
            out = out[0] if isinstance(out, tuple) else out
            first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
            seen[name] = (out.transpose(0, 1) if first else out).detach()

        module.register_forward_hook(keep)
    reference(*map(double, args))  # with gradients: torch's encoder then runs its modules
    return seen


def projected(attn: Any, heads: Tensor) -> Tensor:
    """What the module makes of what its heads put out, in float64."""
    merged = heads.double().transpose(1, 2).flatten(2)
    merged = attn.norm(merged) if isinstance(getattr(attn, "norm", None), nn.Module) else merged
    parts = (getattr(attn, name, None) for name in ("proj", "out_proj", "o_proj"))
    return next((part for part in parts if part is not None), nn.Identity())(merged)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_what_the_library_projects(name: str) -> None:
    model, args = build(name), inputs(name)
    shown = everything(model, *args)["outputs"]
    expected, reference = put_out(model, shown, *args), copy.deepcopy(model).double()
    assert len(shown) == 4 if name == "open_clip" or "swin" in name else 2
    for layer, heads in shown.items():
        assert heads.dtype == torch.float32
        made = projected(reference.get_submodule(layer), heads)
        torch.testing.assert_close(made, expected[layer], rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", ["", "V2"])
def test_outputs_of_torchvisions_swin(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output projection is no module that runs."""
    name = f"ShiftedWindowAttention{version}"
    attn: Any = getattr(torchvision.models.swin_transformer, name)(32, [4, 3], [2, 1], 4).eval()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.normal_(0, 0.3)
    x = torch.randn(2, 7, 8, 32)
    shown = everything(attn, x)["outputs"][name]
    reference, seen, linear = copy.deepcopy(attn).double(), [], nn.functional.linear

    def kept(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is reference.proj.weight:
            seen.append(given.detach())
        return linear(given, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", kept)
    reference(x.double())
    merged = shown.double().transpose(1, 2).flatten(2)
    torch.testing.assert_close(merged, seen[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_weights_agree(name: str) -> None:
    """A softmax's largest and least weight differ by a factor exp(most - least)."""
    shown = everything(build(name), *inputs(name))
    for layer, maps in shown["weights"].items():
        logits, weights = shown["logits"][layer], maps.double()
        assert logits.shape == (*maps.shape[:3], 2)
        least = weights.masked_fill(weights < 1e-30, math.inf).amin(-1)
        span = (logits[..., 1] - logits[..., 0]).double()
        seen = span < 50  # beyond, as in Swin's masks of -100, a weight rounds to nothing
        ratio = (weights.amax(-1) / least).log()
        torch.testing.assert_close(span[seen], ratio[seen], rtol=1e-4, atol=1e-4)
        assert seen.any()


def scores_of_torch(attn: Any, x: Tensor) -> Tensor:
    """(b n d) -> (b h n n), in float64."""
    qkv = x.double() @ attn.in_proj_weight.double().T + attn.in_proj_bias.double()
    q, k, _ = qkv.view(*x.shape[:2], 3, attn.num_heads, -1).unbind(2)
    return torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(attn.head_dim)


def test_logits_of_torch_by_the_formula() -> None:
    attn, x = nn.MultiheadAttention(16, 4, batch_first=True), 3 * torch.randn(3, 6, 16)
    hidden = torch.arange(6) >= torch.tensor([6, 2, 0])[:, None]
    bias = torch.randn(6, 6)
    wrapped = nn.ModuleDict({"attn": attn})
    with capture_attention(wrapped, what="logits") as records:
        attn(x, x, x, key_padding_mask=hidden, attn_mask=bias)
    scores = scores_of_torch(attn, x) + bias
    least = scores.masked_fill(hidden[:, None, None], math.inf).amin(-1)
    most = scores.masked_fill(hidden[:, None, None], -math.inf).amax(-1)
    expected = torch.stack([least, most], -1).detach()
    torch.testing.assert_close(records["attn"][0].double(), expected, rtol=0, atol=1e-5)
    assert (records["attn"][0][2] == torch.tensor([math.inf, -math.inf])).all()


def test_logits_of_timm_by_the_formula() -> None:
    model, inner = build("timm vit, q and k normed"), {}
    reference: Any = copy.deepcopy(model).double().blocks[1].attn
    model.blocks[1].attn.register_forward_pre_hook(lambda m, args: inner.update(x=args[0]))
    logits = everything(model, IMAGES)["logits"]["blocks.1.attn"]
    q, k, _ = reference.qkv(inner["x"].double()).view(2, -1, 3, 4, 8).unbind(2)
    q, k = reference.q_norm(q), reference.k_norm(k)
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(8)
    expected = torch.stack(scores.aminmax(dim=-1), -1).detach()
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"scale_cosine_attn": True}])
def test_open_clips_own_attention(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "bmm", torch.matmul)  # open_clip calls it with four axes
    torch.manual_seed(0)
    block = CustomResidualAttentionBlock(32, 4, scale_heads=True, **options).eval()
    with torch.no_grad():
        block.attn.head_scale.normal_()
    x, seen = torch.randn(2, 5, 32), {}
    block.attn.register_forward_hook(lambda m, args, out: seen.update(out=out))
    shown = everything(block, x)["outputs"]["attn"]
    merged = shown.transpose(1, 2).flatten(2)
    torch.testing.assert_close(block.attn.out_proj(merged), seen["out"])


@pytest.mark.parametrize("widths", [{}, {"kdim": 12, "vdim": 20}])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_torch_with_more_keys_and_other_widths(widths: Any, more: Any) -> None:
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(16, 4, **widths, **more, batch_first=True)
    q, k, v = (
        torch.randn(2, n, width)
        for n, width in ((3, 16), (5, widths.get("kdim", 16)), (5, widths.get("vdim", 16)))
    )
    wrapped = nn.ModuleDict({"attn": attn})
    with capture_attention(wrapped, what="outputs") as records:
        out, _ = attn(q, k, v)
    made = attn.out_proj(records["attn"][0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(made, out, rtol=0, atol=1e-5)


def test_timm_pools_by_a_learned_query() -> None:
    torch.manual_seed(0)
    pool: Any = timm.layers.AttentionPoolLatent(32, num_heads=4).eval()
    x, seen = torch.randn(2, 5, 32), {}
    pool.proj.register_forward_hook(lambda m, args, out: seen.update(out=out))
    shown = everything(pool, x)
    (heads,), (logits,) = shown["outputs"].values(), shown["logits"].values()
    assert (heads.shape, logits.shape) == ((2, 4, 1, 8), (2, 4, 1, 2))
    torch.testing.assert_close(pool.proj(heads.transpose(1, 2).flatten(2)), seen["out"])


def test_outputs_are_those_of_the_pass_with_its_dropout() -> None:
    attn = timm.layers.Attention(16, 2, attn_drop=0.5).train()
    wrapped = nn.ModuleDict({"attn": attn})
    with capture_attention(wrapped, what="outputs") as records:
        out = attn(torch.randn(2, 5, 16))
    assert torch.equal(attn.proj(records["attn"][0].transpose(1, 2).flatten(2)), out)


def test_norms_and_gates_behind_the_heads_are_not_theirs() -> None:
    torch.manual_seed(0)
    attn: Any = timm.layers.Attention(
        16, 2, scale_norm=True, gated=True, norm_layer=nn.LayerNorm
    ).eval()
    x = torch.randn(2, 5, 16)
    shown = everything(nn.Sequential(attn), x)
    v = attn.qkv(x).view(2, 5, 3, 2, 8)[:, :, 2]
    expected = torch.einsum("bhij,bjhe->bhie", shown["weights"]["0"], v).detach()
    torch.testing.assert_close(shown["outputs"]["0"], expected)


def test_training_is_the_same_bit_for_bit() -> None:
    def losses(capturing: bool) -> list[Tensor]:
        found: list[Tensor] = []
        for name in MODELS:
            model = build(name).train()
            torch.manual_seed(1)
            with ExitStack() as stack:
                for what in WHAT if capturing else ():
                    stack.enter_context(capture_attention(model, what=what))
                out: Any = model(*inputs(name))
                out = out if isinstance(out, Tensor) else out[0]
                loss = out.square().mean()
                loss.backward()
            found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return found

    for one, other in zip(losses(False), losses(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_b_16", "ViT-B-32", "ViT"])
def test_real_models(name: str) -> None:
    torch.manual_seed(0)
    model: Any = {
        "vit_tiny_patch16_224": lambda: timm.create_model(name),
        "vit_b_16": torchvision.models.vit_b_16,
        "ViT-B-32": lambda: open_clip.create_model(name),
        "ViT": lambda: transformers.ViTModel(transformers.ViTConfig()),
    }[name]().eval()  # fmt: skip
    args = [torch.randn(1, 3, 224, 224)]
    if name == "ViT-B-32":
        args.append(open_clip.tokenize(["a dog on a sofa"]))
    shown, reference = everything(model, *args), copy.deepcopy(model).double()
    expected = put_out(model, shown["outputs"], *args)
    assert len(shown["outputs"]) == (24 if name == "ViT-B-32" else 12)
    for layer, heads in shown["outputs"].items():
        made = projected(reference.get_submodule(layer), heads)
        torch.testing.assert_close(made, expected[layer], rtol=0, atol=1e-5)


def test_hosts_show_all() -> None:
    model = zoo.create_model("timm:vit_tiny_patch16_224", img_size=32).eval()
    shown = everything(model, IMAGES)
    assert {what: next(iter(maps.values())).shape for what, maps in shown.items()} == {
        "weights": (2, 3, 5, 5),
        "logits": (2, 3, 5, 2),
        "outputs": (2, 3, 5, 64),
    }
