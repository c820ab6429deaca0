"""Settings of modules that no tensor shows: stride, padding, epsilon, activation, pooling.

Two networks may have the same keys and shapes and compute different values.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import nn

_CONVOLUTION = ("stride", "padding", "output_padding", "dilation", "groups", "padding_mode")
_POOLING = (
    *("kernel_size", "stride", "padding", "dilation", "ceil_mode", "count_include_pad"),
    *("divisor_override", "output_size", "norm_type"),
)
_PLAIN = ("num_groups", "num_heads", "pool_type")  # numbers and names that decide a value
_OF_A_CLASS = ("global_pool", "pool_include_prefix")  # the same, between networks of one class
_ACTIVATION = re.compile(r"elu|silu|swish|mish|sigmoid|tanh|softplus|softsign", re.IGNORECASE)
_TWINS = {"timm": ("tf_", ""), "open_clip": ("", "-quickgelu")}  # what one of two names has more
_CLIP, _QUICK_CLIP = "_clip_", "_clip_quickgelu_"  # in names of timm and of ours


def differences(model: nn.Module, network: nn.Module) -> dict[str, tuple[str, str]]:
    """Settings of modules that both have under one name: name -> (in model, in network).

    Activations are compared by what they compute, everything else by its value. Dropout and the
    momentum of norms are left out: they change no output of a trained model.
    """
    theirs = dict(network.named_modules(remove_duplicate=False))
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in theirs:
            here, there = _settings(module), _settings(theirs[name])
            if type(module) is type(theirs[name]):
                here, there = here | _pooled(module), there | _pooled(theirs[name])
            unequal = [key for key in here if key in there and here[key] != there[key]]
            if unequal:
                found[name] = (_text(here, unequal), _text(there, unequal))
    return found | _other_activations(model, network)


def _other_activations(model: nn.Module, network: nn.Module) -> dict[str, tuple[str, str]]:
    """Activations that two networks with tensors in common call differently, if they are not the
    same functions as a whole."""
    if not model.state_dict().keys() & network.state_dict().keys():
        return {}
    here, there = _activations(model), _activations(network)
    ours = [function for name, function in here.items() if name not in there]
    theirs = [function for name, function in there.items() if name not in here]
    alike = all(f in theirs for f in ours) and all(f in ours for f in theirs)
    if not ours or not theirs or alike:
        return {}
    told = (", ".join(dict.fromkeys(map(str, functions))) for functions in (ours, theirs))
    return {"activations": (next(told), next(told))}


def _activations(network: nn.Module) -> dict[str, _Activation]:
    return {
        name: _Activation(module)
        for name, module in network.named_modules(remove_duplicate=False)
        if not isinstance(module, nn.Identity) and "activation" in _settings(module)
    }


def _text(settings: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {settings[name]}" for name in names)


def _settings(module: nn.Module) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in _PLAIN if _is_plain(module, name)}
    if isinstance(getattr(module, "eps", None), float):
        found["eps"] = getattr(module, "eps")  # noqa: B009, mypy takes it for a tensor
    if isinstance(module, nn.modules.conv._ConvNd):
        found |= {"kind": _kind(module), **_convolution(module)}
    elif (base := _of_torch(module)).__module__ == "torch.nn.modules.pooling":
        found["pooling"] = " ".join([_kind(module), *_pooling(module)])
    elif _is_activation(module, base):
        found["activation"] = _Activation(module)
    return found


def _pooled(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(module, name) for name in _OF_A_CLASS if _is_plain(module, name)}


def _is_plain(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), int | str)


def _of_torch(module: nn.Module) -> type:
    """The nearest class of torch that it is."""
    return next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch."))


def _kind(module: nn.Module) -> str:
    """Its class in torch, or its own where that computes something else, as Conv2dSame does."""
    own, base = type(module), _of_torch(module)
    methods = ("forward", "_conv_forward")
    same = all(getattr(own, name, None) is getattr(base, name, None) for name in methods)
    return base.__name__ if same else own.__name__


def _convolution(module: Any) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in _CONVOLUTION}
    if isinstance(module.padding, str):  # "same" is what a number says for odd kernels
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if module.padding == "valid":
            found["padding"] = (0,) * len(totals)
        elif not any(total % 2 for total in totals):
            found["padding"] = tuple(total // 2 for total in totals)
    return found


def _pooling(module: nn.Module) -> list[str]:
    values = {name: getattr(module, name, None) for name in _POOLING}
    return [f"{name}={_pair(value)}" for name, value in values.items() if value is not None]


def _pair(value: Any) -> Any:
    """3 and (3, 3) mean the same."""
    alike = isinstance(value, tuple | list) and len(set(value)) == 1
    return value[0] if alike else value


def _is_activation(module: nn.Module, base: type) -> bool:
    if isinstance(module, nn.RReLU) or next(module.children(), None) is not None:
        return False
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return False
    return base is nn.Identity or _ACTIVATION.search(type(module).__name__) is not None


class _Activation:
    """A function of one number; equal to another that gives the same values."""

    def __init__(self, module: nn.Module) -> None:
        self.name = re.sub(r",? ?inplace=True", "", repr(module))
        try:
            with torch.no_grad(), torch.device("cpu"):
                self.values = module.forward(torch.linspace(-6, 6, 49))
        except (TypeError, RuntimeError, ValueError, IndexError):  # of another shape or more inputs
            self.values = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Activation):
            return NotImplemented
        if not isinstance(self.values, torch.Tensor) or not isinstance(other.values, torch.Tensor):
            return True  # nothing can be said
        return torch.allclose(self.values, other.values, rtol=0, atol=1e-6)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.name


@functools.lru_cache
def twin_of(architecture: str) -> tuple[str, str] | None:
    """Another network of the library with the same tensors and other settings, and which these are.

    timm has many networks twice, `tf_NAME` with the padding and the epsilon of TensorFlow;
    open_clip, timm and this zoo have some of CLIP's with QuickGELU. Weights of one load into the
    other, and compute other values.
    """
    from zoo.registry import create_model

    library, _, name = architecture.rpartition(":")
    other = _other_name(library, name.partition(".")[0])
    if other is None:
        return None
    try:
        with torch.device("meta"):
            one, two = (
                create_model(f"{library}:{n}" if library else n, num_classes=0)
                for n in (name, other)
            )  # without the classifier, whose default size need not be the same
    except ValueError:  # there is no such network
        return None
    if _shapes(one) != _shapes(two) or not (found := differences(one, two)):
        return None
    key, (here, there) = next(iter(found.items()))
    return f"{library}:{other}".removeprefix(
        ":"
    ), f"{len(found)} modules, such as {key}: {here} or {there}"


def _other_name(library: str, name: str) -> str | None:
    if library in ("", "timm") and _CLIP in name:
        quick = _QUICK_CLIP in name
        return name.replace(*((_QUICK_CLIP, _CLIP) if quick else (_CLIP, _QUICK_CLIP)))
    if library not in _TWINS:
        return None
    prefix, suffix = _TWINS[library]
    if name.startswith(prefix) and name.endswith(suffix):
        return name[len(prefix) : len(name) - len(suffix)]
    return f"{prefix}{name}{suffix}"


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in model.state_dict().items()}
