"""One thread per process, as tests run side by side, and the same random numbers in every order."""

from __future__ import annotations

import os
import random

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random numbers do not depend on the tests before it."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
