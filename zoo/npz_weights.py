"""Weights from numpy's `.npz`, such as the original checkpoints of Vision Transformers.

Names stay as they are (`Transformer/encoderblock_0/LayerNorm_0/scale`); a layout translates them.
Headers are compared with the sizes in the archive before an array is read, so that no file can
make the reader allocate more than it holds.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.sources import WeightsError

if TYPE_CHECKING:
    import numpy as np

# Trained weights hardly compress. Beyond both, a small file would fill the memory.
MOST_COMPRESSED, SMALL = 100, 100 * 2**20


def read_npz(path: str | Path) -> dict[str, Tensor]:
    """The arrays of an `.npz` by name; Flax's bfloat16 (two-byte voids) included.

    Raises:
        WeightsError: the file is broken, claims more than it holds, or holds objects.
    """
    path = Path(path).expanduser()
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_size(sum(member.file_size for member in members), path)
            return {
                member.filename.removesuffix(".npy"): _read_member(archive, member, path)
                for member in members
            }
    except WeightsError:
        raise
    except Exception as error:  # damaged archives and headers raise anything
        raise WeightsError(
            f"{path} was cut short or is no file of numpy.savez: {type(error).__name__}: {error}"
        ) from error


def _check_size(size: int, path: Path) -> None:
    stored = path.stat().st_size
    if size > max(SMALL, MOST_COMPRESSED * stored):
        raise WeightsError(
            f"{path} unpacks to {size} bytes from {stored}: more than {MOST_COMPRESSED} times, "
            f"which weights do not reach"
        )


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Tensor:
    import numpy as np

    where = f"{path}: {member.filename}"
    with archive.open(member) as file:
        shape, _, dtype = _read_header(file)
        if dtype.hasobject:
            raise WeightsError(
                f"{where} holds Python objects, and loading objects can run any code; "
                f"save arrays of numbers"
            )
        values = 1
        for edge in shape:  # Python's integers, which do not overflow
            values *= edge
        if file.tell() + values * dtype.itemsize != member.file_size:
            raise WeightsError(
                f"{where} claims shape {shape} of {dtype}, and has "
                f"{member.file_size - file.tell()} bytes"
            )
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    return _tensor(array, where)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    from numpy.lib import format as npy

    if npy.read_magic(file) == (1, 0):
        return npy.read_array_header_1_0(file)
    return npy.read_array_header_2_0(file)


def _tensor(array: np.ndarray[Any, Any], where: str) -> Tensor:
    import numpy as np

    if array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise WeightsError(f"{where} holds no numbers, but {array.dtype}") from error
