"""Files of weights of every kind, and files that are broken, foreign or hostile."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from zoo.files import kind_of, read_file, read_safetensors, read_torch
from zoo.weights import WeightsError

NAME = "vit_micro_patch2_8"


def make() -> Any:
    return zoo.create_model(NAME, depth=1, num_classes=5)


def randomized() -> Any:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def save_legacy(state: dict[str, Tensor], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_npz(state: dict[str, Tensor], path: Path) -> None:
    np.savez(path, **{key: value.numpy() for key, value in state.items()})


def save_onnx(model: nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(1, 3, 8, 8),), path, dynamo=False)


def refuse(path: Path, said: str) -> None:
    """Loading fails, names the file, and changes nothing."""
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=f"(?s){said}") as error:
        zoo.load_pretrained(model, f"file:{path}")
    assert path.name in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- every kind, into the same model -----------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".legacy.pt", ".npz", ".onnx"])
@pytest.mark.parametrize("renamed", [False, True])
def test_every_kind_loads_into_the_same_model(suffix: str, renamed: bool, tmp_path: Path) -> None:
    model, path = randomized(), tmp_path / f"model{suffix}"
    state = model.state_dict()
    if suffix == ".onnx":
        save_onnx(model, path)
    else:
        save = {".safetensors": save_file, ".npz": save_npz, ".pt": torch.save}
        save.get(suffix, save_legacy)(state, path)
    if renamed:  # as in the caches of hubs: the content tells the kind
        path = path.rename(tmp_path / "blob")
    other = make().eval()
    report = zoo.load_pretrained(other, f"file:{path}")
    assert (report.missing, report.unexpected, report.matched_fraction) == ((), (), 1.0)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(other(x), model(x))


def test_kinds_are_told_by_content(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2)}
    for name, save, kind in (
        ("a.ckpt", torch.save, "torch"),
        ("b.ckpt", save_legacy, "torch"),
        ("c.bin", save_file, "safetensors"),
    ):
        save(state, tmp_path / name)
        assert kind_of(tmp_path / name) == kind
        source = read_file(str(tmp_path / name))
        assert source.name == f"file:{tmp_path / name}"
        assert torch.equal(source.tensors["weight"], state["weight"])


@pytest.mark.parametrize("nest", ["model", "state_dict", "ema", "model_state_dict"])
@pytest.mark.parametrize("legacy", [False, True])
def test_f1_nested_state_dicts(nest: str, legacy: bool, tmp_path: Path) -> None:
    state = {nest: {"module.weight": torch.ones(2)}, "epoch": 3, "optimizer": {"state": {}}}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    source = read_file(str(tmp_path / "x.pt"))
    assert source.tensors.keys() == {"module.weight"}
    assert source.name.endswith(f"x.pt ({nest})")


def resident() -> int:
    """Bytes of private memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_files_are_mapped_not_copied(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    state = {f"{index}": torch.ones(2**20) for index in range(8)}
    (save_file if kind == "safetensors" else torch.save)(state, path)
    before = resident()
    tensors = (read_safetensors if kind == "safetensors" else read_torch)(path)
    assert sum(float(value.sum()) for value in tensors.values()) == 2**23
    assert resident() - before < 2**24  # of 2**25 bytes in the file


# --- code, which is never run ------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def write_pickle(data: Any, path: Path, kind: str) -> None:
    if kind == "raw":
        path.write_bytes(pickle.dumps(data))
    elif kind == "raw2":
        path.write_bytes(pickle.dumps(data, protocol=2))
    elif kind == "raw0":
        path.write_bytes(pickle.dumps(data, protocol=0))
    else:
        torch.save(data, path, _use_new_zipfile_serialization=kind == "zip")


SAYS = {
    "zip": r"holds a Python object \({}\), and loading objects can run any code",
    "legacy": r"holds a Python object \({}\), and loading objects can run any code",
    "raw": "is a pickle that torch.save did not write, and loading pickles can run any code",
    "raw2": r"holds a Python object \({}\)",
    "raw0": "(is a text file that begins with|is no file of torch.save)",
}


@pytest.mark.parametrize("kind", SAYS)
@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (Evil(), r"(posix|nt)\.mkdir"),
        (argparse.Namespace(lr=1), r"argparse\.Namespace"),
        (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
    ],
)
def test_f2_pickles_with_code_are_refused(
    kind: str, thing: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    write_pickle({"args": thing, "model": {"weight": [1, 2]}}, path, kind)
    refuse(path, SAYS[kind].format(name))
    assert not Path("was-run").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), path)
    refuse(path, "script.pt is a TorchScript archive .* holds a program; save only tensors")


def test_archives_are_not_unpacked(tmp_path: Path) -> None:
    """Nothing is written to disk, wherever the names of members point."""
    path = tmp_path / "deep" / "x.npz"
    path.parent.mkdir()
    np.savez(path, **{"../../up": np.ones(2), "/abs": np.ones(3)})
    assert read_file(str(path)).tensors.keys() == {"../../up", "/abs"}
    torch.save({"weight": torch.ones(2)}, path.with_suffix(".pt"))
    with zipfile.ZipFile(path.with_suffix(".pt"), "a") as archive:
        archive.writestr("../../up.txt", "x")
    refuse(path.with_suffix(".pt"), r"not in a subdirectory .*\.\./\.\./up\.txt")
    assert sorted(os.listdir(tmp_path)) == ["deep"]
    assert sorted(os.listdir(path.parent)) == ["x.npz", "x.pt"]


# --- broken files ------------------------------------------------------------------------------


def safetensors_bytes(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        safetensors_bytes(b'{"a": {"dtype"', b""),  # no JSON
        safetensors_bytes({"a": entry(0, 8, [2])}, b"\0" * 8, length=2**40),  # longer than the file
        safetensors_bytes({"a": entry(0, 8, [2])}, b"\0" * 8, length=2**63),
        safetensors_bytes({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12),  # overlap
        safetensors_bytes({"a": entry(0, 8, [200])}, b"\0" * 8),  # a shape it has not
        safetensors_bytes({"a": entry(0, 2**40, [2**38])}, b"\0" * 8),  # a size it has not
        safetensors_bytes({"a": entry(8, 0, [2])}, b"\0" * 8),  # backwards
        safetensors_bytes({"a": entry(0, 8, [2])}, b"\0" * 20),  # bytes that belong to nothing
        safetensors_bytes({"a": {"dtype": "F99", "shape": [], "data_offsets": [0, 4]}}, b"\0" * 4),
        safetensors_bytes({"a": entry(0, 8, [2])}, b"\0" * 8)[:12],
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_broken_safetensors_are_refused(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refuse(tmp_path / name, "was cut short or is no safetensors file: ")


@pytest.mark.parametrize("keep", [3, 100, 0.3, 0.9, -1])
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_cut_short_are_refused(keep: float, legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(randomized().state_dict(), path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    refuse(path, "was cut short")


def rewrite_zip(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {m.filename: archive.read(m) for m in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))


def test_torch_records_that_hold_less_than_claimed_are_refused(tmp_path: Path) -> None:
    """A mapped tensor would go on into the next record: wrong weights, without a word."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(64), "b": torch.ones(64)}, path)
    rewrite_zip(path, lambda name, data: data[:8] if name.endswith("/data/0") else data)
    refuse(path, "model.pt claims tensors of 256 bytes, and has no records of these sizes")
    torch.save({"a": torch.ones(64)}, path)
    rewrite_zip(path, lambda name, data: data[:8] if name.endswith("/data/0") else data)
    refuse(path, "model.pt (claims tensors|was cut short)")
    torch.save({"a": torch.zeros(2**16)}, path)
    rewrite_zip(path, lambda _, data: data, zipfile.ZIP_DEFLATED)
    refuse(path, "model.pt has compressed records, which torch.save does not write")


def test_shared_and_sliced_tensors_pass_the_check_of_records(tmp_path: Path) -> None:
    whole = torch.randn(8, 4)
    state = {"whole": whole, "part": whole[2:4], "again": whole, "empty": torch.empty(0)}
    torch.save({"model": state, "other": torch.ones(3)}, tmp_path / "x.pt")
    tensors = read_file(str(tmp_path / "x.pt")).tensors
    assert all(torch.equal(tensors[key], value) for key, value in state.items())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_damaged_files_never_raise_anything_else(tmp_path: Path) -> None:
    """A few bytes changed, anywhere: refused, or read as numbers."""
    generator, path = np.random.default_rng(0), tmp_path / "x.pt"
    for legacy in (True, False):
        torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=not legacy)
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        for _ in range(60):
            damaged = content.copy()
            places = generator.integers(0, len(damaged), max(1, len(damaged) // 400))
            damaged[places] = generator.integers(0, 256, len(places))
            path.write_bytes(damaged.tobytes())
            with contextlib.suppress(WeightsError):
                assert all(isinstance(v, Tensor) for v in read_file(str(path)).tensors.values())


# --- files that are something else -------------------------------------------------------------

HTML = b"\n<!DOCTYPE html><html><body>404: Not Found</body></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 346\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"", "was cut short: it is empty"),
        ("model.safetensors", HTML, "is a web page, .* download it again"),
        ("model.pt", HTML, "is a web page"),
        ("model.pt", LFS, "is a Git LFS pointer, not the weights: fetch them with git lfs pull"),
        ("model.safetensors", LFS, "is a Git LFS pointer"),
        ("model.npz", b"Entry not found", "is a text file that begins with 'Entry not found'"),
        ("model.bin", b"GGUF\3\0\0\0", "is a GGUF file"),
        ("model.gguf", b"\0\1\2", "is a file of llama.cpp"),
        ("model.bin", b"\x89HDF\r\n\x1a\n\0", "is an HDF5 file"),
        ("weights.h5", b"\0\1\2", "is a file of Keras"),
        ("saved_model.pb", b"\x08\x01\x12\x00", "is a file of TensorFlow"),
        ("model.ckpt.data-00000-of-00001", b"\0\0", "is a file of TensorFlow"),
        ("model.ckpt.index", b"\0\0", "is a file of TensorFlow"),
        ("model.ckpt", b"\0\0\1", "is a checkpoint of TensorFlow, or was cut short"),
        ("flax_model.msgpack", b"\x81\xa6params", "is a file of Flax"),
        ("model.bin", b"\x1c\0\0\0TFL3\0", "is a file of TensorFlow Lite"),
        ("model.npy", b"\x93NUMPY\1\0", "is one array without a name"),
        ("model.pt", b"\x1f\x8b\x08\0", "is a gzip archive: unpack it first"),
        ("model.pt", b"\xff" * 64, "was cut short or is no file of torch.save"),
        ("model.onnx", b"\xff" * 64, "was cut short or is no ONNX file"),
        ("model.npz", b"\xff" * 64, "was cut short or is no file of numpy.savez"),
    ],
)
def test_foreign_files_are_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refuse(tmp_path / name, f"{name} {said}")


def test_other_archives_and_folders_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model.txt", "x")
    refuse(tmp_path / "model.pt", r"is a zip archive that holds model\.txt: neither")
    refuse(tmp_path, r"is a folder \(use local-dir:\)")
    refuse(tmp_path / "gone.pt", "is missing")


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"optimizer": state}])
def test_optimizer_states_are_named(wrap: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(wrap(optimizer.state_dict()), tmp_path / "optimizer.bin")
    refuse(tmp_path / "optimizer.bin", r"is an optimizer's state \(exp_avg, exp_avg_sq, step\)")


def test_flat_optimizer_states_are_named(tmp_path: Path) -> None:
    state = {"head.weight.exp_avg": torch.ones(2), "head.weight.exp_avg_sq": torch.ones(2)}
    save_file(state, tmp_path / "x.safetensors")
    refuse(tmp_path / "x.safetensors", "is an optimizer's state")
    torch.save(state, tmp_path / "x.pt")
    refuse(tmp_path / "x.pt", "is an optimizer's state")
    torch.save(torch.optim.SGD([torch.ones(1)]).state_dict(), tmp_path / "new.pt")
    refuse(tmp_path / "new.pt", r"is an optimizer's state \(no steps yet\)")


def test_bad_grids_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    state = {"model": make().state_dict(), "position_grids": {"pos_embed": 4}}
    torch.save(state, tmp_path / "x.pt")
    refuse(tmp_path / "x.pt", r"position_grids must be a table of \(rows, columns\)")


def test_sparse_tensors_are_named(tmp_path: Path) -> None:
    state = {"head.weight": torch.eye(3).to_sparse(), "head.bias": torch.ones(3)}
    torch.save(state, tmp_path / "sparse.pt")
    with pytest.raises(WeightsError, match=r"head\.weight are sparse tensors; save them dense"):
        read_file(str(tmp_path / "sparse.pt"))
