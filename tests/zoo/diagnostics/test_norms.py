"""Norms of tokens block by block, of our models and of other libraries'."""

from __future__ import annotations

from typing import Any

import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

import vision
from crossmodal.matcher import Matcher
from zoo.diagnostics import NothingCapturedError, capture_attention
from zoo.diagnostics.norms import capture_norms
from zoo.weights import unwrap

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(1, 20, (2, 7), generator=torch.Generator().manual_seed(2))
CLIP: dict[str, Any] = {
    "vision_cfg": {"layers": 2, "width": 32, "head_width": 8, "image_size": 32, "patch_size": 8},
    "text_cfg": {"context_length": 7, "vocab_size": 20, "width": 32, "heads": 4, "layers": 2},
}


def hugging(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return getattr(transformers, f"{name}Model")(config)


def ours(**options: Any) -> Any:
    torch.manual_seed(0)
    return vision.VisionTransformer(**SMALL, **options).eval()


MODELS: dict[str, Any] = {
    "ours": (ours, ["blocks.0", "blocks.1"]),
    "timm": (lambda: timm.models.VisionTransformer(**SMALL), ["blocks.0", "blocks.1"]),
    "torchvision": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64),
        [f"encoder.layers.encoder_layer_{i}" for i in range(2)],
    ),
    "open_clip": (
        lambda: open_clip.CLIP(16, **CLIP),
        [f"{tower}transformer.resblocks.{i}" for tower in ("visual.", "") for i in range(2)],
    ),
    "transformers": (lambda: hugging("ViT"), ["layers.0", "layers.1"]),
    "transformers, clip": (lambda: hugging("CLIPVision"), ["encoder.layers.0", "encoder.layers.1"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_what_blocks_put_out(name: str) -> None:
    build, names = MODELS[name]
    model, seen = build().eval(), {}
    for path in names:

        def keep(module: Any, args: Any, out: Any, path: str = path) -> None:
            seen[path] = out[0] if isinstance(out, tuple) else out

        model.get_submodule(path).register_forward_hook(keep)
    args = (IMAGES, WORDS) if name == "open_clip" else (IMAGES,)
    with torch.no_grad(), capture_norms(model) as records:
        model(*args)
    assert list(records) == names
    for path, (norms,) in records.items():
        expected = seen[path].double().square().sum(-1).sqrt()
        assert norms.shape == (2, 7 if path.startswith("transformer.") else 17)
        torch.testing.assert_close(norms.double(), expected, rtol=0, atol=1e-5)


def test_the_norms_are_before_the_models_last_norm() -> None:
    """The last block's tokens, through the model's norm and head, are the model's outputs."""
    model = ours(global_pool="", num_classes=0)
    with capture_norms(model, "blocks.1") as records:
        model(IMAGES)
    kept: list[Tensor] = []
    model.norm.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    model(IMAGES)
    torch.testing.assert_close(records["blocks.1"][0], kept[0].detach().norm(dim=-1))


def test_swin_counts_places_row_by_row() -> None:
    swin = SwinTransformer(
        img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4
    ).eval()
    seen: list[Tensor] = []
    swin.get_submodule("layers.1.blocks.1").register_forward_hook(lambda m, a, o: seen.append(o))
    with capture_norms(swin, samples=1) as records:
        swin(IMAGES)
    assert [len(norms[0][0]) for norms in records.values()] == [256, 256, 64, 64]
    last = records["layers.1.blocks.1"][0]
    torch.testing.assert_close(last, seen[0][:1].detach().norm(dim=-1).view(1, 64))


@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_encoder_with_padding(batch_first: bool) -> None:
    """In evaluation torch would hand whole layers to one kernel, and drop the padding."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=batch_first, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([6, 4, 1])[:, None]
    x = x if batch_first else x.transpose(0, 1)
    with torch.no_grad(), capture_norms(encoder) as records:
        out = encoder(x, src_key_padding_mask=padding)
    norms = out.norm(dim=-1)
    assert torch.backends.mha.get_fastpath_enabled()
    last = records["layers.1"][0]
    torch.testing.assert_close(last, norms if batch_first else norms.transpose(0, 1))


def test_models_of_several_parts() -> None:
    model = Matcher("timm:vit_tiny_patch16_224", img_size=32).eval()
    with torch.no_grad(), capture_norms(model) as records:
        model(IMAGES, WORDS, torch.ones(2, 7, dtype=torch.bool))
    with torch.no_grad(), capture_attention(model) as maps:
        model(IMAGES, WORDS, torch.ones(2, 7, dtype=torch.bool))
    assert {name.rpartition(".")[0] for name in maps} >= set(records)
    assert any(name.startswith("fusion") for name in records)
    assert "image_tower.trunk.blocks.11" in records


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_the_same_bit_for_bit(checkpointing: bool) -> None:
    def train(capturing: bool) -> tuple[list[Tensor], Any]:
        model, records = ours(drop_path_rate=0.2, attn_drop_rate=0.2).train(), {}
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            if capturing:
                with capture_norms(model) as records:
                    loss = model(IMAGES).square().mean()
                    loss.backward()
            else:
                loss = model(IMAGES).square().mean()
                loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())], records

    (plain, _), (captured, records) = train(False), train(True)
    assert all(map(torch.equal, plain, captured))
    assert [len(norms) for norms in records.values()] == [1, 1]


def test_hooks_are_gone_and_errors_are_not_replaced() -> None:
    model = ours()
    with pytest.raises(KeyError, match="mine"), capture_norms(model):
        raise KeyError("mine")
    with pytest.raises(NothingCapturedError, match=r"no block .*'blocks\.0'"), capture_norms(model):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_wrappers_and_bf16() -> None:
    model = nn.DataParallel(ours().to(torch.bfloat16))
    with capture_norms(model, "blocks.*", samples=1) as records:
        model(IMAGES.bfloat16())
    assert {n: (v[0].shape, v[0].dtype) for n, v in records.items()} == {
        f"blocks.{i}": ((1, 17), torch.float32) for i in range(2)
    }


def test_a_sequence_around_the_model_is_no_block() -> None:
    model = nn.Sequential(ours(global_pool="map", class_token=False))
    with capture_norms(model) as records:
        model(IMAGES)
    assert list(records) == ["0.blocks.0", "0.blocks.1"]


def test_bad_input() -> None:
    with (
        pytest.raises(ValueError, match=r"matches no block with attention: the model has none$"),
        capture_norms(nn.Linear(2, 2)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"'block\.0' matches no .*\['blocks\.0', 'blocks\.1'\]"),
        capture_norms(ours(), "block.0"),
    ):
        pass
    with pytest.raises(ValueError, match="samples"), capture_norms(ours(), samples=0):
        pass


def test_compiled_models_are_refused() -> None:
    model: Any = ours()
    compiled: Any = torch.compile(model, backend="eager")
    with (
        pytest.raises(ValueError, match=r"norms of Block cannot .*compiled.*unwrap\(model\)"),
        capture_norms(compiled),
    ):
        pass
    with capture_norms(unwrap(compiled)) as records:
        unwrap(compiled)(IMAGES)
    assert len(records) == 2
