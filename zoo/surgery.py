"""Another kind of attention in a trained model, with the weights it has.

Works on our models and on timm's Vision Transformers (`timm.layers.Attention`).

Shapes: b batch, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zoo.card import ModelCard, plain
from zoo.layers import Core, Mask, SelfAttention
from zoo.layers.factory import build_core, check_own, geometry
from zoo.sources import WeightsError


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


Kinds = dict[str, tuple[Any, dict[str, Any]]]  # kind and options by the layer's name


@dataclass(frozen=True)
class MixedCard(ModelCard):
    """The card of a model whose layers differ in kind: no options could build it again.

    Attributes:
        kinds: Kind and options of each layer; `options` tell those that it was built with.
    """

    kinds: Kinds = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Refused: `save_pretrained` could not tell how to make the model again."""
        layers: dict[str, list[str]] = {}
        for name, (kind, options) in self.kinds.items():
            shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
            layers.setdefault(f"{kind}({shown})" if shown else str(kind), []).append(name)
        told = "; ".join(f"{kind} in {', '.join(names)}" for kind, names in layers.items())
        raise WeightsError(
            f"{self.architecture} has layers of several attention kinds, which no option of it can "
            f"tell: {told}. Give all layers one kind by zoo.replace_attention(model, kind), or "
            "save model.state_dict() and repeat the replacements"
        )


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
        TypeError: an option that the kind does not have, or layers that are no names.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("replace attention before the model is wrapped for parallel training")
    found = _matching(model, layers)
    check_own(kind, options)
    before = None if inputs is None else _observe(model, found, inputs)
    made: dict[int, SelfAttention] = {}  # a layer that is shared stays so
    for name, layer in found.items():
        if id(layer) not in made:
            made[id(layer)] = _changed(model, name, layer, kind, options)
    changed = {name: made[id(layer)] for name, layer in found.items()}
    cards = _cards(model, found, kind, options)
    for name, layer in changed.items():  # after all could be built, so that errors change nothing
        _put(model, name, layer)
    done = Replacement(kind, tuple(found), _new_parameters(changed))
    try:
        after = None if inputs is None else _observe(model, changed, inputs)
    except Exception:
        for name, old in found.items():
            _put(model, name, old)
        raise
    for owner, card in cards:
        owner.card = card  # type: ignore[assignment]
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
    patterns = [layers] if isinstance(layers, str) else layers
    found = attention_layers(model)
    legal = f"a name or a list of names, with wildcards; there is {list(found) or 'none'}"
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"layers ({layers!r}) must be {legal}")
    if not patterns:
        raise ValueError(f"layers ({layers!r}) names no layer; it must be {legal}")
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
    options: dict[str, Any],
) -> SelfAttention:
    """A layer of the new kind that shares the old one's projections."""
    path, owner = _owner(model, name)
    number = list(attention_layers(owner)).index(path)  # as in a model built with the kind
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
    if layer.bias is not None:
        _check_bias(name, core)
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


def _check_bias(name: str, core: Core) -> None:
    try:
        core.check_bias()
    except ValueError as error:
        raise ValueError(f"{name} has a position bias: {error}") from error


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def _cards(
    model: nn.Module, found: dict[str, nn.Module], kind: str, options: dict[str, Any]
) -> list[tuple[nn.Module, ModelCard]]:
    """The modules that have a card, and what it says afterwards."""
    cards: dict[int, tuple[nn.Module, ModelCard]] = {}
    for name in found:
        path, owner = _owner(model, name)
        _, card = cards.get(id(owner), (owner, getattr(owner, "card", None)))
        if isinstance(card, ModelCard):
            kinds = {**_kinds(owner, card), path: (kind, plain(options, "options"))}
            cards[id(owner)] = owner, _card(card, kinds)
    return list(cards.values())


def _kinds(owner: nn.Module, card: ModelCard) -> Kinds:
    if isinstance(card, MixedCard):
        return card.kinds
    built = (card.options.get("attention"), card.options.get("attention_options") or {})
    return dict.fromkeys(attention_layers(owner), built)


def _card(card: ModelCard, kinds: Kinds) -> ModelCard:
    known = {f.name: getattr(card, f.name) for f in fields(ModelCard)}
    first, *others = kinds.values()
    if any(other != first for other in others):
        return MixedCard(**known, kinds=kinds)
    kind, options = first
    return ModelCard(**known).with_options(attention=kind, attention_options=options or None)


def _owner(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The nearest module around a layer that embeds patches, and the layer's name in it.

    It knows the tokens' geometry.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if hasattr(module, "patch_embed"):
            return ".".join(parts[end:]), module
    return name, model


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

    with evaluating(model), ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(keep(name))
            stack.callback(hook.remove)
        output = model(inputs)
    return {**seen, "": (inputs, output)}


@torch.no_grad()
def _layer_errors(
    model: nn.Module, changed: dict[str, SelfAttention], before: Seen
) -> dict[str, float]:
    with evaluating(model):
        return {name: _error(m(before[name][0]), before[name][1]) for name, m in changed.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in evaluation, and afterwards each in the mode it had."""
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
