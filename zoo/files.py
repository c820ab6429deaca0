"""Reading files of weights: safetensors, torch.save, npz and ONNX, without running their code.

What a file is, its first bytes tell; the suffix only where they cannot. Files are mapped into
memory where their format allows it, so that the weights do not lie there twice.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.sources import Source, WeightsError, listed

READS = "safetensors, torch.save, .npz, .onnx"

# Where training scripts keep the state dict, best first; an average is what was evaluated.
_WRAPPERS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema",
    "state_dict", "model_state_dict", "model", "module",
)  # fmt: skip

_MOMENTS = re.compile(r"(^|[._])(exp_avg|exp_avg_sq|momentum_buffer|max_exp_avg_sq)($|[._])")

_FOREIGN_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights: fetch them with git lfs pull",
    b"GGUF": "a GGUF file (llama.cpp)",
    b"\x89HDF": "an HDF5 file (Keras, TensorFlow)",
    b"\x93NUMPY": "one array without a name (.npy); several with names are an .npz",
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"BZh": "a bzip2 archive: unpack it first",
    b"\xfd7zXZ": "an xz archive: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
}
_FOREIGN_SUFFIXES = {
    r"\.(h5|hdf5|keras)": "a file of Keras",
    r"\.(pb|tflite|index|meta|data-\d+-of-\d+)": "a file of TensorFlow",
    r"\.msgpack": "a file of Flax",
    r"\.(gguf|ggml)": "a file of llama.cpp",
}
_PICKLE, _ZIP = b"\x80", b"PK\x03\x04"
_TORCH_PICKLE = b"\x80\x02"  # torch.save writes protocol 2
_ONNX = re.compile(rb"\x08[\x01-\x20][\x12\x3a]")  # ir_version, then the producer or the graph


def read_file(path: str) -> Source:
    """The weights in a file of any kind of `READS`, by the names it gives them.

    Raises:
        WeightsError: the file is missing, broken, of another kind, or holds no weights.
    """
    file = Path(path).expanduser()
    name, kind = f"file:{path}", kind_of(file)
    if kind == "onnx":
        from zoo.onnx_weights import read_onnx

        return read_onnx(path)
    if kind == "npz":
        from zoo.npz_weights import read_npz

        return Source(name, read_npz(file))
    if kind == "safetensors":
        tensors = read_safetensors(file)
        _refuse_optimizer(tensors, file)
        return Source(name, tensors)
    data = read_torch(file)
    tensors, inside = _state_dict(data, file)
    _check_records(tensors, file)
    # Checkpoints of our training runs tell the grids of their positions.
    told = data.get("position_grids", {}) if inside else {}
    return Source(f"{name} ({inside})" if inside else name, tensors, None, _grids(told, file))


def kind_of(file: Path) -> str:
    """`safetensors`, `torch`, `npz` or `onnx`; anything else is an error that says what it is."""
    if not file.is_file():
        kind = "a folder (use local-dir:)" if file.is_dir() else f"missing{_near(file)}"
        raise WeightsError(f"{file} is {kind}")
    with file.open("rb") as opened:
        head = opened.read(512)
    if not head:
        raise WeightsError(f"{file} was cut short: it is empty")
    if foreign := _foreign(head, file):
        raise WeightsError(f"{file} is {foreign}; what can be read: {READS}")
    if head[8:9] == b"{" or file.suffix == ".safetensors":
        return "safetensors"
    if head.startswith(_ZIP):
        return _kind_of_zip(file)
    if file.suffix in (".onnx", ".npz"):
        return file.suffix[1:]
    if head.startswith(_PICKLE) and not _TORCH_PICKLE.startswith(head[:2]):
        raise WeightsError(
            f"{file} is a pickle that torch.save did not write, and loading pickles can run any "
            f"code; what can be read: {READS}"
        )
    return "onnx" if _ONNX.match(head) else "torch"


def _near(file: Path) -> str:
    """Files of nearly that name beside it, or that there is no such folder."""
    if not file.parent.is_dir():
        return f": there is no folder {file.parent}"
    near = get_close_matches(file.name, [path.name for path in file.parent.iterdir()])
    return f"; beside it: {', '.join(near)}" if near else ""


def _foreign(head: bytes, file: Path) -> str | None:
    """What a file is that is known, but holds no weights that can be read."""
    for beginning, what in _FOREIGN_BEGINNINGS.items():
        if head.startswith(beginning):
            return what
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it first"
    if head[4:8] == b"TFL3":
        return "a file of TensorFlow Lite"
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.IGNORECASE):
        return "a web page, such as a server sends in place of the file: download it again"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return f"a text file that begins with {head[:30].decode()!r}"
    if head.startswith((_ZIP, _PICKLE)):
        return None  # a .ckpt of Lightning, say
    for suffix, what in _FOREIGN_SUFFIXES.items():
        if re.search(f"{suffix}$", file.name, re.IGNORECASE):
            return what
    if not head.strip(b"\0"):
        return "nothing but zeros at its beginning: it was not written or downloaded to its end"
    return "a checkpoint of TensorFlow, or was cut short" if file.suffix == ".ckpt" else None


def _kind_of_zip(file: Path) -> str:
    members = _members(file)
    names = {member.filename.rpartition("/")[2] for member in members}
    if "constants.pkl" in names:
        raise WeightsError(
            f"{file} is a TorchScript archive (torch.jit.save), which holds a program; save only "
            f"tensors: torch.save(model.state_dict(), path)"
        )
    if "data.pkl" in names:
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise WeightsError(f"{file} has compressed records, which torch.save does not write")
        return "torch"
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    shown = listed(sorted(member.filename for member in members), 4) or "nothing"
    raise WeightsError(
        f"{file} is a zip archive that holds {shown}: neither torch.save nor numpy.savez wrote it; "
        + (
            "it is a model of Keras, which is not read"
            if file.suffix == ".keras"
            else "unpack it and name the file of weights inside"
        )
    )


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_ZIP)) == _ZIP


def _members(file: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.infolist()
    except Exception as error:  # a damaged directory raises anything
        raise WeightsError(
            f"{file} was cut short: its zip directory cannot be read ({error})"
        ) from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which stay in it until they are used."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise WeightsError(f"{path} was cut short or is no safetensors file: {error}") from error


def read_torch(path: Path) -> Any:
    """What torch.save wrote, if it is tensors and plain types; zip files are mapped, not read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) `?([\w.]+)", str(error))
        if found is None:
            raise WeightsError(f"{path} was cut short or is no file of torch.save") from error
        raise WeightsError(
            f"{path} holds a Python object ({found[1]}), and loading objects can run any code; "
            f"save only tensors: torch.save(model.state_dict(), path)"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        said = str(error).partition("Cannot use ``weights_only")[0]  # advice to run what is inside
        raise WeightsError(
            f"{path} was cut short or is no file of torch.save: {type(error).__name__}: {said}"
        ) from error


def _check_records(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuses a zip whose pickle claims other sizes than its records have: a mapped tensor would
    go on into the next record."""
    if not _is_zip(path):
        return  # torch.load compares them in the older format
    storages = {(s := value.untyped_storage()).data_ptr(): s.nbytes() for value in tensors.values()}
    records = Counter(m.file_size for m in _members(path) if "/data/" in m.filename)
    wrong = Counter(size for size in storages.values() if size) - records
    if wrong:
        raise WeightsError(
            f"{path} claims tensors of {listed(str(size) for size in wrong)} bytes, and has no "
            f"records of these sizes"
        )


def _state_dict(data: Any, path: Path) -> tuple[dict[str, Tensor], str]:
    """The state dict inside `data`, and the names it was nested under."""
    inside: list[str] = []
    while isinstance(data, Mapping) and not _holds_tensors(data):
        wrapper = next((name for name in _WRAPPERS if isinstance(data.get(name), Mapping)), None)
        if wrapper is None:
            break
        inside.append(wrapper)
        data = data[wrapper]
    if not isinstance(data, Mapping) or not _holds_tensors(data):
        _refuse_optimizer(data, path)
        keys = f" keys {listed([str(key) for key in data])}" if isinstance(data, Mapping) else ""
        raise WeightsError(
            f"{path} holds no state dict: {type(data).__name__}{keys}; looked under "
            f"{', '.join(_WRAPPERS)}"
        )
    others = [str(key) for key, value in data.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(f"{path}: {listed(others)} of the state dict are no tensors")
    tensors = {str(key): value for key, value in data.items()}
    if sparse := [key for key, value in tensors.items() if value.layout is not torch.strided]:
        raise WeightsError(f"{path}: {listed(sparse)} are sparse tensors; save them dense")
    _refuse_optimizer(tensors, path)
    return tensors, ".".join(inside)


def _refuse_optimizer(data: Any, path: Path) -> None:
    """Names an optimizer's state, which lies beside the weights in many run folders."""
    if not isinstance(data, Mapping):
        return
    moments = [str(key) for key in data if _MOMENTS.search(str(key))]
    state = data.get("optimizer", data)
    if isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys():
        each = state["state"].values() if isinstance(state["state"], Mapping) else ()
        moments = sorted({str(key) for one in each if isinstance(one, Mapping) for key in one})
    elif not moments:
        return
    raise WeightsError(
        f"{path} is an optimizer's state ({listed(moments, 3) or 'no steps yet'}), not a model's "
        f"weights; they lie in another file beside it"
    )


def _grids(told: Any, path: Path) -> dict[str, tuple[int, int]]:
    try:
        return {str(key): (int(y), int(x)) for key, (y, x) in told.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path}: position_grids must be a table of (rows, columns)") from error


def _holds_tensors(data: Mapping[Any, Any]) -> bool:
    """True where tensors outnumber tables: averaged models keep a counter beside their table."""
    tensors = sum(isinstance(value, Tensor) for value in data.values())
    return tensors > sum(isinstance(value, Mapping) for value in data.values())
