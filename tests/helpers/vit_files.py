"""Another library's weights in a bare file, into our ViT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zoo
from vision import VisionTransformer
from zoo import LoadReport


def load(tmp_path: Any, tensors: dict[str, Tensor], **options: Any) -> tuple[Any, LoadReport]:
    """Our model with the weights of a bare file; also what loading says of them."""
    torch.save(tensors, tmp_path / "weights.pt")
    model = VisionTransformer(**options).eval()
    return model, zoo.load_pretrained(model, f"file:{tmp_path / 'weights.pt'}")


def images(rows: int = 16, cols: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, rows, cols, generator=torch.Generator().manual_seed(1))


def assert_round_trip(state: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    assert state.keys() == there.keys()
    for name, value in state.items():
        assert torch.equal(value, there[name]), name
