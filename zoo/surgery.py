"""Another kind of attention in a trained model, with the weights it has.

Works on our models and on timm's Vision Transformers (`timm.layers.Attention`).

Shapes: b batch, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zoo.card import ModelCard
from zoo.layers import Mask, SelfAttention
from zoo.layers.factory import build_core, core_options, geometry


@dataclass(frozen=True)
class Replacement:
    """What `replace_attention` did.

    Attributes:
        kind: The new kind.
        layers: Names of the modules that changed.
        new_parameters: Names of parameters that the kind brings, untrained.
        layer_errors: |new - old| / |old| of each layer's output on the inputs it had before.
        output_error: The same of the model's output; None where no inputs were given.
    """

    kind: str
    layers: tuple[str, ...]
    new_parameters: tuple[str, ...] = ()
    layer_errors: dict[str, float] = field(default_factory=dict)
    output_error: float | None = None

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers now attend by {self.kind!r}"]
        if self.new_parameters:
            lines.append(f"untrained: {', '.join(self.new_parameters)}")
        lines += [f"{name:<24} error {error:.2%}" for name, error in self.layer_errors.items()]
        if self.output_error is not None:
            lines.append(f"{'output':<24} error {self.output_error:.2%}")
        return "\n".join(lines)


def replace_attention(
    model: nn.Module,
    kind: str,
    layers: str | Sequence[str] = "*",
    inputs: Tensor | None = None,
    **options: Any,
) -> Replacement:
    """Exchanges the kind of attention, in place; projections keep their weights and names.

    Args:
        model: Ours, or a Vision Transformer of timm; not yet wrapped for parallel training.
        kind: One of `zoo.layers.list_attention()`; `identity` and `mean` are the baselines.
        layers: Names of attention modules, with wildcards.
        inputs: A batch for the model, on which the errors are measured.
        options: Of the kind; grid, prefix tokens and length are filled in.

    Raises:
        ValueError: no layer matches, or a layer that computes more than an attention of ours.
        TypeError: an option that the kind does not have.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("replace attention before the model is wrapped for parallel training")
    found = _matching(model, layers)
    unknown = set(options) - set(core_options(kind))
    if unknown:
        raise TypeError(
            f"attention kind {kind!r} has no option {', '.join(sorted(unknown))}; "
            f"its own: {', '.join(core_options(kind)) or 'none'}"
        )
    before = None if inputs is None else _observe(model, found, inputs)
    made: dict[int, SelfAttention] = {}  # a layer that is shared stays so
    for number, (name, layer) in enumerate(found.items()):
        if id(layer) not in made:
            made[id(layer)] = _changed(model, name, layer, kind, number, options)
    changed = {name: made[id(layer)] for name, layer in found.items()}
    for name, layer in changed.items():  # after all could be built, so that errors change nothing
        _put(model, name, layer)
    done = Replacement(kind, tuple(found), _new_parameters(changed))
    try:
        after = None if inputs is None else _observe(model, changed, inputs)
    except Exception:
        for name, old in found.items():
            _put(model, name, old)
        raise
    _note(model, found, kind, options)
    if before is None or after is None:
        return done
    return replace(
        done,
        layer_errors=_layer_errors(model, changed, before),
        output_error=_error(after[""][1], before[""][1]),
    )


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Self-attention that can be replaced, by name: ours and `timm.layers.Attention`."""
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SelfAttention) or _is_timm(module)
    }


def _is_timm(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Attention" and kind.__module__ == "timm.layers.attention"


def _matching(model: nn.Module, layers: str | Sequence[str]) -> dict[str, nn.Module]:
    patterns = [layers] if isinstance(layers, str) else list(layers)
    found = attention_layers(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(
                f"layers={pattern!r} matches no attention of {type(model).__name__} that can be "
                f"replaced; there is {list(found) or 'none'}"
            )
    return {n: m for n, m in found.items() if any(fnmatchcase(n, p) for p in patterns)}


def _changed(
    model: nn.Module,
    name: str,
    layer: Any,
    kind: str,
    number: int,
    options: dict[str, Any],
) -> SelfAttention:
    """A layer of the new kind that shares the old one's projections."""
    owner = _owner(model, name)
    grid = getattr(getattr(owner, "patch_embed", None), "grid_size", None)
    known: dict[str, Any] = {}
    if isinstance(grid, (tuple, list)):
        known = geometry(kind, (grid[0], grid[1]), getattr(owner, "num_prefix_tokens", 0), number)
    core = build_core(kind, layer.num_heads, layer.head_dim, **{**known, **options})
    core.to(layer.proj.weight).train(layer.training)
    if layer.attn_drop.p and not core.drops:
        raise ValueError(f"{name} drops attention weights, and kind {kind!r} has none")
    if not isinstance(layer, SelfAttention):
        return TimmAttention(name, layer, core)
    if layer.bias is not None and not core.biases:
        raise ValueError(f"{name} has a position bias, and kind {kind!r} has no scores to add to")
    copy = layer.__new__(type(layer))
    copy.__dict__ = {**layer.__dict__, "_modules": {**layer._modules, "core": core}}
    copy._compiled_call_impl = None  # it would call the old layer
    return copy


class TimmAttention(SelfAttention):
    """The projections of a `timm.layers.Attention` around another core, called as timm calls it."""

    def __init__(self, name: str, host: Any, core: nn.Module) -> None:
        if getattr(host, "gate", None) is not None or not isinstance(host.norm, nn.Identity):
            raise ValueError(f"{name} gates or normalises its output, which no kind of ours does")
        width, heads = host.qkv.in_features, host.num_heads
        with torch.device("meta"):  # the host's parts take the places below
            super().__init__(width, heads, head_dim=host.head_dim, core=core)  # type: ignore[arg-type]
        for part in ("qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop"):
            setattr(self, part, getattr(host, part))
        self.train(host.training)

    def forward(  # type: ignore[override]
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """(b n d) -> (b n d)"""
        mask = Mask.of(attn_mask)
        if is_causal:
            mask = Mask.causal() & mask
        return super().forward(x, mask=mask)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def _note(
    model: nn.Module, found: dict[str, nn.Module], kind: str, options: dict[str, Any]
) -> None:
    """The card tells the new kind; a mixture cannot be told, and is refused when saved."""
    for owner in {id(m): m for m in (_owner(model, name) for name in found)}.values():
        card = getattr(owner, "card", None)
        if not isinstance(card, ModelCard):
            continue
        layers: list[Any] = list(attention_layers(owner).values())
        if all(isinstance(m, SelfAttention) and m.core.kind == kind for m in layers):
            card = card.with_options(attention=kind, attention_options=options or None)
        else:
            card = replace(card, architecture=None)
        owner.card = card  # type: ignore[assignment]


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The nearest module around a layer that embeds patches: it knows the tokens' geometry."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if hasattr(module, "patch_embed"):
            return module
    return model


def _new_parameters(changed: dict[str, SelfAttention]) -> tuple[str, ...]:
    return tuple(
        f"{name}.core.{own}"
        for name, layer in changed.items()
        for own, _ in layer.core.named_parameters()
    )


Seen = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def _observe(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Tensor) -> Seen:
    """Input and output of each layer; of the model under the empty name."""
    seen: Seen = {}

    def keep(name: str) -> Any:
        return lambda module, args, output: seen.update({name: (args[0], output)})

    with _evaluating(model), ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(keep(name))
            stack.callback(hook.remove)
        output = model(inputs)
    return {**seen, "": (inputs, output)}


@torch.no_grad()
def _layer_errors(
    model: nn.Module, changed: dict[str, SelfAttention], before: Seen
) -> dict[str, float]:
    with _evaluating(model):
        return {name: _error(m(before[name][0]), before[name][1]) for name, m in changed.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Any:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _error(new: Tensor, old: Tensor) -> float:
    new, old = new.double(), old.double()
    return float((new - old).norm() / old.norm().clamp(min=1e-30))
