from __future__ import annotations

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import vision
import zoo
from zoo.card import CardError, ModelCard, Preprocessing
from zoo.export import BATCHES, ExportError, export_onnx, export_program
from zoo.exported import card_of_export, open_export
from zoo.layers import list_attention
from zoo.layers.factory import kinds_with_bias

VIT = {"depth": 1, "img_size": 8, "patch_size": 2, "embed_dim": 16, "num_heads": 2}
KINDS = list_attention()
EXPORTS = {".onnx": export_onnx, ".pt2": export_program}


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zoo.create_model("vit_micro_patch2_8", **{**VIT, **options})


def trained(model: nn.Module) -> nn.Module:
    """With statistics and weights as after some training, so that no part is without effect."""
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.mul_(torch.empty_like(value).uniform_(0.8, 1.25))
                value.add_(torch.rand_like(value), alpha=0.01)  # what starts at zero, too
    return model


def images(model: nn.Module, number: int, seed: int = 7) -> torch.Tensor:
    preprocessing = model.card.preprocessing
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(number, preprocessing.in_chans, *preprocessing.size, generator=rng)


def assert_onnx_equals(model: nn.Module, path: Path, batches: tuple[int, ...] = (1, 4, 7)) -> None:
    """onnxruntime on the file, by itself, against the model in evaluation mode."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    model.eval()
    for number in batches:
        x = images(model, number)
        (outputs,) = session.run(None, {"images": x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(outputs), model(x), rtol=1e-4, atol=1e-5)


MODELS: dict[str, Any] = {
    "vit_of_rows_and_columns": lambda: vit(
        img_size=(8, 12), in_chans=1, class_token=True, global_pool="token", reg_tokens=2
    ),
    "resnet_with_insertions": lambda: zoo.create_model(
        "resnet_micro",
        img_size=(16, 24),
        in_chans=1,
        drop_path_rate=0.5,
        insertions=["se@standard", "cbam@post:stages=2"],
    ),
}
MORE: dict[str, Any] = {
    "vit_with_map_pooling": lambda: vit(global_pool="map", num_classes=0),
    "vit_with_all_options": lambda: vit(
        init_values=0.1,
        qk_norm=True,
        temperature="learned",
        drop_path_rate=0.5,
        drop_rate=0.5,
        attn_drop_rate=0.5,
        position="rope",
    ),
    "vit_with_relative_positions": lambda: vit(position="relative", class_token=True),
    "vit_with_prior": lambda: vit(position="prior"),
    "timm_host_with_insertion": lambda: zoo.create_model(
        "timm:resnet10t", img_size=32, num_classes=3, insertions=["eca@standard"]
    ),
    "torchvision_host": lambda: zoo.create_model(
        "torchvision:squeezenet1_1", img_size=64, num_classes=3
    ),
    "open_clip_tower": lambda: zoo.create_model(
        "open_clip:ViT-B-32", img_size=32, num_classes=4, layers=1, width=64, patch_size=16
    ),
    "image_tower_of_a_pair": lambda: zoo.create_model("dual_micro").image_tower.trunk,
}


def slow(values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("name", [*MODELS, *slow(MORE)])
def test_onnxruntime_equals_eager(name: str, tmp_path: Path) -> None:
    model = trained({**MODELS, **MORE}[name]())
    report = export_onnx(model, tmp_path / "model.onnx")
    assert set(report.differences) == set(BATCHES)
    assert all(d < report.tolerances[number] for number, d in report.differences.items())
    assert card_of_export(tmp_path / "model.onnx") == model.card
    assert_onnx_equals(model, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "kind", ["longformer", "mean", *slow(sorted({*KINDS} - {"longformer", "mean"}))]
)
def test_every_attention_kind_becomes_a_program(kind: str, tmp_path: Path) -> None:
    model = trained(vit(attention=kind, class_token=True, global_pool="token"))
    report = export_program(model, tmp_path / "model.pt2", check=False)
    assert report.differences == {}
    program = torch.export.load(tmp_path / "model.pt2").module()
    x = images(model, 5)
    torch.testing.assert_close(program(x), model.eval()(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "position"),
    [(kind, "none") for kind in KINDS] + [(kind, "relative") for kind in kinds_with_bias()],
)
def test_every_attention_kind_becomes_onnx(kind: str, position: str, tmp_path: Path) -> None:
    model = trained(vit(attention=kind, position=position))
    export_onnx(model, tmp_path / "model.onnx")
    assert_onnx_equals(model, tmp_path / "model.onnx")


# Of an image, all queries at once or a few.
@pytest.mark.parametrize(("suffix", "chunk_bytes"), [(".pt2", 1 << 26), (".onnx", 1 << 13)])
def test_additive_attention_in_chunks_for_any_batch(
    chunk_bytes: int, suffix: str, tmp_path: Path
) -> None:
    options = {"chunk_bytes": chunk_bytes}
    model = trained(vit(attention="additive", attention_options=options, class_token=True))
    report = EXPORTS[suffix](model, tmp_path / f"model{suffix}")
    assert set(report.differences) == set(BATCHES)
    run = open_export(tmp_path / f"model{suffix}")
    for number in (1, 4, 7):
        x = images(model, number)
        torch.testing.assert_close(run(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_batch_of_one(tmp_path: Path) -> None:
    model = trained(vit())
    report = export_program(model, tmp_path / "model.pt2", dynamic_batch=False)
    assert set(report.differences) == {1}
    assert "for a batch of 1" in str(report)
    x = images(model, 1)
    torch.testing.assert_close(open_export(tmp_path / "model.pt2")(x), model.eval()(x))


@pytest.mark.parametrize(("dynamic", "first"), [(True, "batch"), (False, 1)])
def test_inputs_outputs_and_opset(dynamic: bool, first: object, tmp_path: Path) -> None:
    model = zoo.create_model("resnet_micro", img_size=8, num_classes=3 if dynamic else 0)
    path = tmp_path / "model.onnx"
    export_onnx(model, path, dynamic_batch=dynamic, opset=18 if dynamic else None, check=False)
    file = onnx.load(path)
    values = (file.graph.input[0], file.graph.output[0])
    dims = [value.type.tensor_type.shape.dim[0] for value in values]
    assert [dim.dim_param or dim.dim_value for dim in dims] == [first, first]
    assert [value.name for value in values] == ["images", "logits" if dynamic else "features"]
    opset = {entry.domain: entry.version for entry in file.opset_import}[""]
    assert opset == 18 if dynamic else opset > 18


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_program_keeps_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = vit().to(dtype)
    export_program(model, tmp_path / "model.pt2")
    x = images(model, 2).to(dtype)
    torch.testing.assert_close(open_export(tmp_path / "model.pt2")(x), model.eval()(x))


def test_onnx_dtypes(tmp_path: Path) -> None:
    report = export_onnx(
        zoo.create_model("resnet_micro", img_size=8).half(), tmp_path / "model.onnx"
    )
    assert max(report.differences.values()) < 1e-2
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ExportError, match=rf"is in {dtype}.*float\(\), or a .pt2 program"):
            export_onnx(vit().to(dtype), tmp_path / "other.onnx")


def test_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = trained(zoo.create_model("resnet_micro", img_size=8))
    model.layer1.eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export_program(torch.optim.swa_utils.AveragedModel(model), tmp_path / "model.pt2")
    assert [module.training for module in model.modules()] == modes
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(p.requires_grad for p in model.parameters())


def test_card_inside(tmp_path: Path) -> None:
    model = vit(class_names=["cat", "dog"], img_size=(8, 12), in_chans=1)
    model.card = replace(model.card, license="Apache-2.0", source="file:somewhere")
    export_program(model, tmp_path / "model.pt2", check=False)
    assert card_of_export(tmp_path / "model.pt2") == model.card


def test_card_knows_another_classifier(tmp_path: Path) -> None:
    model = zoo.create_model("timm:resnet10t", num_classes=3, img_size=32)
    model.reset_classifier(5)
    export_program(model, tmp_path / "model.pt2", check=False)
    assert card_of_export(tmp_path / "model.pt2").options["num_classes"] == 5


def test_report(tmp_path: Path) -> None:
    report = export_program(vit(), tmp_path / "deep" / "model.pt2")
    assert report.path == tmp_path / "deep" / "model.pt2"
    assert report.size == report.path.stat().st_size
    assert "for any batch size" in str(report)
    assert "batch 5: largest difference" in str(report)
    assert "not checked" in str(replace(report, differences={}))
    assert [p.name for p in report.path.parent.iterdir()] == ["model.pt2"]


class Off(nn.Module):
    """Gives other outputs in each run, as if an exporter had made a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.card = ModelCard("off", {}, Preprocessing((4, 4)))
        self.offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offset += 0.01
        return self.fc(x.mean((2, 3))) + self.offset


@pytest.mark.parametrize("suffix", EXPORTS)
def test_wrong_outputs_leave_what_was_there(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_text("older")
    with pytest.raises(ExportError, match=r"off differs from the model by .*nothing was written"):
        EXPORTS[suffix](Off(), path)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_nan_is_a_difference(tmp_path: Path) -> None:
    model = vit()
    nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(ExportError, match="differs from the model by nan"):
        export_program(model, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


class Branching(Off):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mean((2, 3))
        return self.fc(x) if x.sum().item() > 0 else x


@pytest.mark.parametrize("suffix", EXPORTS)
def test_what_cannot_be_traced_is_named(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=rf"off cannot be exported to {suffix}.*data-dependent"):
        EXPORTS[suffix](Branching(), tmp_path / f"model{suffix}")
    assert not list(tmp_path.iterdir())


class Two(Off):
    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x.mean((2, 3))), x


def test_models_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(ExportError, match=r"Linear has no card.*create_model"):
        export_program(nn.Linear(2, 2), path)
    with pytest.raises(ExportError, match=r"tokens, mask.*can be: image_tower.trunk$"):
        export_program(zoo.create_model("dual_micro"), path)
    with pytest.raises(ExportError, match="text_micro takes tokens, mask; only models"):
        export_program(zoo.create_model("text_micro"), path)
    with pytest.raises(ExportError, match="off returns a tuple"):
        export_program(Two(), path)
    assert not path.exists()


def test_more_than_one_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.export._LARGEST_ONNX", 1000)
    with pytest.raises(ExportError, match=r"one ONNX file holds 2 GB: .*half\(\), or a .pt2"):
        export_onnx(vit(), tmp_path / "model.onnx")


def test_paths_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.bin\) must end with .onnx"):
        export_onnx(vit(), tmp_path / "model.bin")
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        export_program(vit(), tmp_path / "folder.pt2")


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        return None if name in ("onnx", "onnxruntime") else sys.modules[__name__].__spec__ or 1

    monkeypatch.setattr("zoo.exported.find_spec", gone)
    with pytest.raises(ImportError, match=r"needs onnx, onnxruntime.*attention-zoo\[onnx\]"):
        export_onnx(vit(), tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ImportError, match=r"needs onnx, which"):
        card_of_export(tmp_path / "model.onnx")
    with pytest.raises(ImportError, match=r"needs onnxruntime, which"):
        open_export(tmp_path / "model.onnx")
    export_program(vit(), tmp_path / "model.pt2")  # needs none of them


def test_cards_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"must end with .onnx or .pt2"):
        card_of_export(tmp_path / "model.pth")
    with pytest.raises(CardError, match="there is no file"):
        card_of_export(tmp_path / "model.pt2")
    for suffix in EXPORTS:
        (tmp_path / f"bad{suffix}").write_bytes(b"\xff" * 100)
        with pytest.raises(CardError, match=r"is not an? (ONNX file|program)"):
            card_of_export(tmp_path / f"bad{suffix}")
    with zipfile.ZipFile(tmp_path / "bare.pt2", "w") as archive:
        archive.writestr("bare/models/model.json", "{}")
    with pytest.raises(CardError, match=r"bare.pt2 has no card"):
        card_of_export(tmp_path / "bare.pt2")
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    onnx.save(empty, tmp_path / "bare.onnx")
    with pytest.raises(CardError, match=r"bare.onnx has no card"):
        card_of_export(tmp_path / "bare.onnx")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "cannot be read"),
        ("{", "cannot be read"),
        (json.dumps({"format": 99}), "format is not 1"),
        (json.dumps({"format": 1, "options": {}}), "lacks architecture, preprocessing"),
    ],
)
def test_damaged_cards(text: str, says: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        archive.writestr("model/extra/model.json", text)
    with pytest.raises(CardError, match=says):
        card_of_export(tmp_path / "model.pt2")


def test_card_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_program(vit(), tmp_path / "model.pt2", check=False)
    monkeypatch.setattr("zoo.exported._LARGEST_CARD", 10)
    with pytest.raises(CardError, match="too large for a card"):
        card_of_export(tmp_path / "model.pt2")


def test_inserted_modules_keep_their_effect(tmp_path: Path) -> None:
    model = zoo.create_model("resnet_micro", img_size=8)
    vision.insert(trained(model), "se@standard")
    export_program(model, tmp_path / "with.pt2")
    x = images(model, 2)
    before = open_export(tmp_path / "with.pt2")(x)
    vision.remove_insertions(model)
    assert not torch.allclose(before, model.eval()(x))
    assert card_of_export(tmp_path / "with.pt2").options["insertions"]


def test_names_of_the_package() -> None:
    assert zoo.export_onnx is export_onnx
    assert zoo.export_program is export_program


def test_an_opset_that_torch_does_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be written in opset 7: torch's exporter wrote"):
        export_onnx(trained(vit()), tmp_path / "model.onnx", opset=7)
    assert not list(tmp_path.iterdir())
