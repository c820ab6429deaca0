"""Files of numpy.savez: what they hold, and what they only claim to hold."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from vision.convert_google import revert_google
from zoo.npz_weights import read_npz
from zoo.weights import WeightsError


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_names_and_values_stay(save: Any, tmp_path: Path) -> None:
    """Names of the original checkpoints of ViT; numbers of any kind and order."""
    random = np.random.default_rng(0)
    arrays = {
        "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel": random.normal(size=(3, 4)),
        "embedding/kernel": random.normal(size=(2, 2, 3, 4)).astype(np.float16),
        "cls": np.asfortranarray(random.normal(size=(2, 3)).astype(np.float32)),
        "head/bias": np.arange(3, dtype=">f4"),
        "step": np.array(7),
    }
    save(tmp_path / "x.npz", **arrays)
    tensors = read_npz(tmp_path / "x.npz")
    assert tensors.keys() == arrays.keys()
    for key, array in arrays.items():
        expected = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        assert tensors[key].dtype == expected.dtype
        assert torch.equal(tensors[key], expected)


def test_bfloat16_of_flax_is_read(tmp_path: Path) -> None:
    """numpy has no bfloat16; Flax saves it as voids of two bytes."""
    values = torch.randn(5, 2).bfloat16()
    np.savez(tmp_path / "x.npz", a=values.view(torch.int16).numpy().view("V2"))
    assert torch.equal(read_npz(tmp_path / "x.npz")["a"], values)


def test_an_original_checkpoint_loads(tmp_path: Path) -> None:
    options = {"depth": 2, "num_classes": 5, "class_token": True, "global_pool": "token"}
    model = zoo.create_model("vit_micro_patch2_8", **options).eval()
    arrays = revert_google(model.state_dict(), num_heads=4)
    np.savez(tmp_path / "x.npz", **{key: value.numpy() for key, value in arrays.items()})
    other = zoo.create_model("vit_micro_patch2_8", **options).eval()
    assert "Transformer/encoderblock_0/LayerNorm_0/scale" in arrays
    assert zoo.load_pretrained(other, f"file:{tmp_path / 'x.npz'}").matched_fraction == 1
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(other(x), model(x))


def npy(shape: tuple[int, ...], data: bytes, descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def write(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (npy((2**40, 2**20), b"\0" * 8), rf"a.npy claims shape \({2**40}, {2**20}\) .* 8 bytes"),
        (npy((2**32, 2**32), b"\0" * 8), "claims shape"),  # 0 in 64 bits
        (npy((3,), b"\0" * 8), r"claims shape \(3,\) of float32, and has 8 bytes"),
        (npy((1,), b"\0" * 8), "claims shape"),
        (npy((-2,), b"\0" * 8), "claims shape"),
        (npy((2,), b"\0" * 8, "'<U1'"), "holds no numbers, but <U1"),
        (npy((1,), b"\0" * 8, "[('x', '<f4'), ('y', '<f4')]"), "holds no numbers"),
        (npy((1,), b"\0" * 8, "'|O'"), "holds Python objects, and loading objects can run"),
        (npy((1,), b"\0" * 8, "__import__('os').mkdir('was-run')"), "was cut short or is no file"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "was cut short or is no file of numpy.savez"),
        (b"<html>", "was cut short or is no file of numpy.savez"),
    ],
)
def test_broken_arrays_are_refused(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "x.npz", {"good.npy": npy((2,), b"\0" * 8), "a.npy": content})
    with pytest.raises(WeightsError, match=rf"x\.npz.*{said}"):
        zoo.load_pretrained(torch.nn.Linear(1, 1), f"file:{path}")
    assert os.listdir(tmp_path) == ["x.npz"]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def test_arrays_of_objects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", a=np.array([Evil()], dtype=object))
    with pytest.raises(WeightsError, match=r"x\.npz: a\.npy holds Python objects"):
        read_npz("x.npz")
    assert os.listdir(tmp_path) == ["x.npz"]


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    """Its header is honest: 256 MB of zeros, in 250 kB."""
    path = tmp_path / "x.npz"
    content = npy((2**26,), bytes(2**28))
    write(path, {"a.npy": content}, zipfile.ZIP_DEFLATED)
    with pytest.raises(WeightsError, match=r"x\.npz unpacks to 2684.* bytes from \d+: more than"):
        read_npz(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(100))
    content = (tmp_path / "x.npz").read_bytes()
    for keep in (100, len(content) // 2, len(content) - 1):
        (tmp_path / "x.npz").write_bytes(content[:keep])
        with pytest.raises(WeightsError, match=r"x\.npz was cut short"):
            read_npz(tmp_path / "x.npz")
    damaged = bytearray(content)
    damaged[200] ^= 1
    (tmp_path / "x.npz").write_bytes(damaged)
    with pytest.raises(WeightsError, match="Bad CRC-32"):
        read_npz(tmp_path / "x.npz")
