"""Randomness that depends on a key (seed, epoch, sample, ...) and on nothing else.

A number drawn under `seeded(seed, epoch, index)` is the same in any process, worker, batch or
resumed run, which is what makes runs repeatable across one or many devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*key: int | str) -> int:
    """Hashes a key to a 63-bit seed: nearby keys give unrelated streams."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by `key`."""
    return torch.Generator().manual_seed(derive_seed(*key))


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seeds torch's CPU generator by `key` inside the context and restores it afterwards.

    For libraries that draw from the global generator (torchvision's transforms). Devices'
    generators are left alone.
    """
    default = torch.default_generator
    state = default.get_state()
    default.manual_seed(derive_seed(*key))
    try:
        yield
    finally:
        default.set_state(state)
