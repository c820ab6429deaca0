"""A small ViT of ours, its weights and files of them, for the tests of loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import zoo

NAME = "vit_micro_patch2_8"


def make(**options: Any) -> Any:
    token = {"class_token": True, "global_pool": "token"}
    return zoo.create_model(NAME, **{"depth": 2, **token, **options})


def randomized(**options: Any) -> Any:
    model = make(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def equal_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def saved(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "x.safetensors")
    return f"file:{folder / 'x.safetensors'}"
