"""One thread per process, as tests run side by side, and the same random numbers in every order."""

from __future__ import annotations

import os
import random
import zlib

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's random numbers depend on its name; those of a fixture that a file shares, on which
    test uses it first."""
    import torch

    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
