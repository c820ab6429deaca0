"""Slots: named places in a CNN that hold inserted modules, and are the identity while empty.

Shapes: b batch, c y x channels/rows/columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.layers.tap import Tap

SITES = {
    "stem": "input of the first stage",
    "pre": "input of the residual branch, not of the shortcut",
    "conv1": "after the branch's first convolution, with its norm and activation",
    "conv2": "after the second",
    "conv3": "after the third",
    "standard": "end of the branch, before the add",
    "post_add": "after the add, before the activation",
    "post": "output of the block, after the activation",
    "identity": "on the shortcut",
    "between_stages": "output of every stage but the last",
}


class Slot(nn.Sequential):
    """A place for modules (b c y x) -> (b c y x), which run in the order they were put in.

    Loading a state dict that has nothing for a filled slot, a host's own checkpoint, keeps the
    values that are there and warns once; one that has a part of it is refused as usual.

    Args:
        site: One of `SITES`, or the name of the module after whose output the slot stands.

    Attributes:
        stage: Of the network, from 1, once it is filled; 0 after a module that was named.
    """

    stage: int = 0

    may_be_absent: ClassVar[bool] = True  # from weights of the host, as `zoo.merge` understands it
    _warned: ClassVar[list[str] | None] = None

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def extra_repr(self) -> str:
        return "" if len(self) else self.site

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = self.state_dict(prefix=prefix, keep_vars=True)
        if own and not any(key in state_dict for key in own):
            state_dict.update(own)  # what is absent is loaded from where it stands
            if Slot._warned is not missing_keys:  # one list for each call of load_state_dict
                Slot._warned = missing_keys
                warnings.warn(
                    f"the state dict has nothing for the modules in {prefix[:-1]} and perhaps "
                    f"other slots: they keep their values",
                    stacklevel=2,
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class FromIdentity(nn.Module):
    """x + scale * (module(x) - x), where a learned scale starts at 0: at first the identity.

    ReZero, arXiv 2003.04887, around a whole module. The module itself learns from the second
    update on, when the scale has left zero. A tap of the module that shows its gate shows from now
    on what that gate amounts to here: x times g becomes x times 1 + scale * (g - 1).
    """

    bears_name_of = "module"  # which is not told in names of layers

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.zeros(1))
        tap = getattr(module, "tap", None)
        if isinstance(tap, Tap) and tap.kind == "gate":
            scaled = _ScaledTap(self)
            for part in list(module.modules()):
                if part._modules.get("tap") is tap:
                    part.tap = scaled

    @property
    def kind(self) -> str:
        return kind_of(self.module)

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c y x)"""
        return x + (self.scale * (self.module(x) - x)).to(x.dtype)


class _ScaledTap(Tap):
    """Shows the factor, or the added term, that is left of a module's own inside `FromIdentity`."""

    def __init__(self, owner: FromIdentity) -> None:
        super().__init__("gate")
        self._owner = (owner,)  # no child: the owner contains this tap

    def record(self, compute: Callable[[], Tensor]) -> None:
        super().record(lambda: self._left_of(compute()))

    def shown_range(self, low: float, high: float) -> tuple[float, float]:
        """The limits of what is shown, at the present scale, from the gate's own."""
        if not self._owner[0].scale.any():
            return 1.0, 1.0
        ends = self._left_of(torch.tensor([low, high])).tolist()
        return min(ends), max(ends)

    def _left_of(self, gate: Tensor) -> Tensor:
        owner = self._owner[0]
        scale = owner.scale.detach().to(gate.device)
        rest = 0 if getattr(owner.module, "adds", False) else 1
        return rest + scale * (gate - rest)


def kind_of(module: nn.Module) -> str:
    """The kind of an inserted module: its name in the factory, or that of its class."""
    kind = getattr(module, "kind", None)
    return kind if isinstance(kind, str) else type(module).__name__


def slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """The slots of a model and their names, empty ones too."""
    for name, module in model.named_modules():
        if isinstance(module, Slot):
            yield name, module
