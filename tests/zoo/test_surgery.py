from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch

import zoo
from zoo.card import CardError
from zoo.layers import list_attention
from zoo.layers.factory import build_core
from zoo.surgery import attention_layers
from zoo.weights import WeightsError

OURS = {"class_token": True, "global_pool": "token", "reg_tokens": 1, "img_size": (32, 48)}


def ours(**options: Any) -> Any:
    torch.manual_seed(0)
    return zoo.create_model("vit_micro_patch4_32", **{**OURS, **options}).eval()


def theirs(**options: Any) -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 3}
    return timm.models.VisionTransformer(**{**shape, "num_classes": 5, **options}).eval()


IMAGES = {ours: (2, 3, 32, 48), theirs: (2, 3, 64, 64)}


@pytest.mark.parametrize("make", [ours, theirs])
@pytest.mark.parametrize("kind", list_attention())
def test_every_kind_takes_the_place_and_tells_its_error(make, kind):
    model, x = make(), torch.randn(IMAGES[make])
    keys, expected = dict(model.state_dict()), model(x)
    done = zoo.replace_attention(model, kind, inputs=x)
    out = model(x)
    error = float(((out - expected).norm() / expected.norm()).detach())
    assert done.output_error == pytest.approx(error, abs=1e-6)
    if kind == "full":
        assert error < 1e-5
    if kind in ("identity", "mean", "linear", "dot", "window"):
        assert error > 1e-4
    assert done.layers == tuple(attention_layers(model))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in keys.items())
    new = sorted(key for key in model.state_dict() if key not in keys)
    assert new == sorted(done.new_parameters)
    assert not model.training
    assert str(done).count("error") == len(done.layers) + 1


@pytest.mark.parametrize("make", [ours, theirs])
def test_full_restores_the_model(make):
    model, x = make(), torch.randn(IMAGES[make])
    expected = model(x)
    zoo.replace_attention(model, "identity")
    assert not torch.allclose(model(x), expected, atol=1e-5)
    zoo.replace_attention(model, "full")
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_some_layers_only(tmp_path):
    model, x = ours(), torch.randn(IMAGES[ours])
    done = zoo.replace_attention(model, "mean", layers="blocks.[12].attn", inputs=x)
    assert list(done.layer_errors) == ["blocks.1.attn", "blocks.2.attn"]
    assert model.blocks[0].attn.core.kind == "full"


def test_a_mixture_is_not_saved_and_says_why(tmp_path):
    model = ours()
    zoo.replace_attention(model, "block", layers="blocks.[12].attn", block_size=8)
    told = (
        r"vit_micro_patch4_32 .*: full in blocks\.0\.attn, blocks\.3\.attn; "
        r"block\(block_size=8\) in blocks\.1\.attn, blocks\.2\.attn\. .*replace_attention"
    )
    with pytest.raises(WeightsError, match=told):
        zoo.save_pretrained(model, tmp_path / "m")
    assert not any(tmp_path.iterdir())
    zoo.replace_attention(model, "block", layers=["blocks.0.attn", "blocks.3.attn"], block_size=4)
    with pytest.raises(WeightsError, match=r"block_size=4.*block_size=8"):  # one kind, two sizes
        zoo.save_pretrained(model, tmp_path / "m")


@pytest.mark.parametrize("parts", [["blocks.[12].*", "*"], [["blocks.1.*"], "blocks.[023].*"]])
@pytest.mark.parametrize(
    ("kind", "options"), [("full", {}), ("window", {}), ("window", {"window": (2, 3)})]
)
def test_layer_by_layer_to_one_kind_it_is_saved_again(kind, options, parts, tmp_path):
    """Also with what depends on the layer's number, as the shift of windows does."""
    model, x = ours(), torch.randn(IMAGES[ours])
    card = model.card
    zoo.replace_attention(model, "mean", layers=parts[0])
    for layers in parts:
        zoo.replace_attention(model, kind, layers=layers, **options)
    zoo.save_pretrained(model, tmp_path / "m")
    again = zoo.create_model(f"local-dir:{tmp_path / 'm'}").eval()
    torch.testing.assert_close(again(x), model(x))
    assert model.card == card.with_options(attention=kind, attention_options=options or None)


@pytest.mark.parametrize("kind", ["window", "mean", "linformer", "performer"])
def test_a_changed_model_is_saved_and_opened(kind, tmp_path):
    model, x = ours(), torch.randn(IMAGES[ours])
    zoo.replace_attention(model, kind)
    zoo.save_pretrained(model, tmp_path / "m")
    again = zoo.create_model(f"local-dir:{tmp_path / 'm'}").eval()
    assert torch.equal(again(x), model(x))


def test_it_can_be_trained_afterwards():
    model = theirs().train()
    zoo.replace_attention(model, "linformer", rank=4)
    model(torch.randn(IMAGES[theirs])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_mistakes_are_named():
    model = ours()
    before = {name: layer.core for name, layer in attention_layers(model).items()}
    cases = [
        (ValueError, {"kind": "windo"}, "did you mean 'window'"),
        (ValueError, {"kind": "mean", "layers": "blocks.9.*"}, "blocks.9.*blocks.0.attn"),
        (TypeError, {"kind": "window", "windows": 3}, "windows.*window"),
        (TypeError, {"kind": "window", "num_heads": 3}, "num_heads is an option of the model"),
        (ValueError, {"kind": "window", "window": 99}, "must fit into the grid"),
        (ValueError, {"kind": "mean", "layers": []}, r"layers \(\[\]\) .*blocks.0.attn"),
        (TypeError, {"kind": "mean", "layers": None}, r"layers \(None\) .*blocks.0.attn"),
        (TypeError, {"kind": "mean", "layers": 3}, r"layers \(3\) .*blocks.0.attn"),
        (TypeError, {"kind": "mean", "layers": ["*", 1]}, r"layers \(.* 1\]\) .*blocks.0.attn"),
        (TypeError, {"kind": None}, r"kind \(None\) .*'window'"),
        (CardError, {"kind": "adaptive", "threshold": np.int64(9)}, "threshold is a int64"),
    ]
    for error, options, words in cases:
        with pytest.raises(error, match=words):
            zoo.replace_attention(model, **options)
    assert all(layer.core is before[name] for name, layer in attention_layers(model).items())
    with pytest.raises(ValueError, match=r"blocks\.0\.attn has a position bias.*'mean'.*full"):
        zoo.replace_attention(ours(position="relative"), "mean")
    with pytest.raises(ValueError, match="normalises its output"):
        zoo.replace_attention(theirs(scale_attn_norm=True), "mean")
    with pytest.raises(ValueError, match=r"matches no attention of Linear"):
        zoo.replace_attention(torch.nn.Linear(2, 2), "mean")


def test_build_core_takes_the_kind_only():
    with pytest.raises(ValueError, match="unknown attention kind"):
        build_core("nothing", 2, 4)


def test_wrapped_shared_and_compiled_layers():
    wrapped = torch.nn.Sequential(ours())
    zoo.replace_attention(wrapped, "window")
    assert wrapped[0].blocks[0].attn.core.grid == (8, 12)
    assert wrapped[0].card.options["attention"] == "window"
    shared = ours()
    shared.blocks[1].attn = shared.blocks[0].attn
    zoo.replace_attention(shared, "identity")
    assert [block.attn.core.kind for block in shared.blocks] == ["identity"] * 4
    assert shared.blocks[1].attn is shared.blocks[0].attn
    compiled, x = ours(), torch.randn(IMAGES[ours])
    before = compiled(x)
    for block in compiled.blocks:
        block.attn.compile(backend="eager")
    zoo.replace_attention(compiled, "identity")
    assert not torch.allclose(compiled(x), before, atol=1e-4)


def test_a_failed_measurement_leaves_the_model_as_it_was():
    model = ours()
    before = {name: layer.core for name, layer in attention_layers(model).items()}
    card = model.card
    with pytest.raises(ValueError, match="max_len=5"):
        zoo.replace_attention(model, "linformer", inputs=torch.randn(IMAGES[ours]), max_len=5)
    assert all(layer.core is before[name] for name, layer in attention_layers(model).items())
    assert model.card == card


def test_another_kind_drops_the_stored_options(tmp_path):
    model = ours(attention="block", attention_options={"block_size": 8})
    zoo.save_pretrained(model, tmp_path / "m")
    again = zoo.create_model(f"local-dir:{tmp_path / 'm'}", attention="full")
    assert again.card.options["attention"] == "full"


def test_a_file_that_lost_a_kinds_weights_is_refused(tmp_path):
    """Weights of a kind are left untrained only where the source has another kind."""
    model = ours(attention="linformer")
    folder = zoo.save_pretrained(model, tmp_path / "m")
    state = {k: v for k, v in model.state_dict().items() if k != "blocks.0.attn.core.key"}
    torch.save(state, tmp_path / "cut.pt")
    with pytest.raises(WeightsError, match=r"blocks\.0\.attn\.core\.key"):
        zoo.load_pretrained(ours(attention="linformer"), f"file:{tmp_path / 'cut.pt'}")
    block = ours(attention="block", attention_options={"block_size": 8})
    folder = zoo.save_pretrained(block, tmp_path / "b")
    with pytest.raises(WeightsError, match="attention_options"):  # the same kind, other options
        zoo.create_model(
            "vit_micro_patch4_32", pretrained=f"local-dir:{folder}", attention="block", **OURS
        )
