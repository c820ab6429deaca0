"""Modules that stand around another and do none of its work: parallel, averaged, compiled ones."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel

_HAVE_MODULE = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)


def wrapped_child(module: nn.Module) -> str | None:
    """Name of the child that a wrapper wraps; None of any other module."""
    if isinstance(module, _HAVE_MODULE):
        return "module"
    return "_orig_mod" if isinstance(getattr(module, "_orig_mod", None), nn.Module) else None


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel, torch.compile, AveragedModel."""
    while (name := wrapped_child(model)) is not None:
        model = getattr(model, name)
    return model
