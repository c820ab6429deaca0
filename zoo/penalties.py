"""Terms of the loss against what goes wrong in attention: heads that are alike, rows gone stiff.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.diagnostics.capture import NothingCapturedError, choose_attention
from zoo.layers.check import positive

StepFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class PenaltyOptions:
    """Flags of recipes: terms to add to their loss."""

    head_penalty: float = 0.0
    """Weight in the loss of how alike the heads of a layer are."""
    entropy_bonus: float = 0.0
    """Weight of attention's evenness, which is taken from the loss: against one-hot rows."""

    def __post_init__(self) -> None:
        for name in ("head_penalty", "entropy_bonus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0, and finite")

    def penalized(self, step_fn: StepFn) -> StepFn:
        """`(model, batch) -> loss` with these terms; the function itself where there are none."""
        if not self.head_penalty and not self.entropy_bonus:
            return step_fn

        def penalized(model: nn.Module, batch: Any) -> Tensor:
            heads, entropy = self.head_penalty, self.entropy_bonus
            with attention_penalty(model, heads=heads, entropy=entropy) as penalty:
                return step_fn(model, batch) + penalty()

        return penalized


class Penalty:
    """What `attention_penalty` collects; calling it gives the term and forgets the passes.

    Attributes:
        parts: Of the last call, without its weights and detached: "heads" and "entropy".
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.parts: dict[str, Tensor] = {}
        self._found: dict[str, list[Tensor]] = {name: [] for name in weights}

    def __call__(self) -> Tensor:
        """The term to add to the loss of the passes since the last call: mean over layers, passes.

        Raises:
            NothingCapturedError: No layer ran with gradients.
        """
        found = self._found
        self._found = {name: [] for name in self.weights}
        missing = [name for name, values in found.items() if not values]
        if missing:
            raise NothingCapturedError(
                f"no attention ran with gradients for the penalty on {' and '.join(missing)}: call "
                "it once for each forward pass inside the context, in training, not under "
                "torch.no_grad or checkpointing with use_reentrant=True, and not of layers that "
                "are frozen or whose weights do not learn, as those of kind mean"
            )
        means = {name: torch.stack(values).mean() for name, values in found.items()}
        self.parts = {name: mean.detach() for name, mean in means.items()}
        terms = [_TERMS[name].sign * self.weights[name] * mean for name, mean in means.items()]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def collect(
        self, name: str, measure: Callable[[Tensor], Tensor], layer: str, shown: Tensor
    ) -> None:
        """Takes what a layer shows."""
        if name == "heads" and shown.shape[1] < 2:
            raise ValueError(f"heads ({self.weights[name]}) needs two or more; {layer} has one")
        if shown.numel() and shown.requires_grad:
            with torch.autocast(shown.device.type, enabled=False):
                self._found[name].append(measure(shown))


class _Term(NamedTuple):
    what: str  # what it takes of attention
    measure: Callable[[Tensor], Tensor]
    sign: int


@contextmanager
def attention_penalty(
    model: nn.Module,
    *,
    heads: float = 0.0,
    entropy: float = 0.0,
    layers: str | Sequence[str] = "*",
) -> Iterator[Penalty]:
    """Collects, from forward passes inside the context, what to add to the loss.

    `heads` weighs `alike`, of what the heads put out; `entropy` weighs `evenness`, of the weights,
    which is taken from the loss. The first leaves fused kernels as they are and costs a product of
    (h e) with itself a token; the second computes the weights beside the kernel and keeps them for
    the backward pass: time and memory grow with the square of the tokens.

    Works under autocast, gradient accumulation, torch.compile, checkpointing and
    DistributedDataParallel, given the wrapped model or the one inside: call the penalty for every
    backward pass. Passes without gradients, such as evaluation, do not count.

    >>> from zoo.layers import Block
    >>> model, x = nn.ModuleList([Block(16, 2)]), torch.randn(2, 5, 16)
    >>> with attention_penalty(model, heads=0.1) as penalty:
    ...     loss = model[0](x).square().mean()
    ...     (loss + penalty()).backward()

    Args:
        heads: Weight of the likeness of heads; 0 leaves it out.
        entropy: Weight of the evenness of the weights; 0 leaves it out.
        layers: Names of attention modules, with wildcards, as `zoo.capture_attention` takes them.

    Raises:
        ValueError: A weight is below 0 or infinite, a pattern matches no layer, a layer has one
            head, or attention of another library is part of a compiled model.
    """
    given = {"heads": heads, "entropy": entropy}
    weights = {name: positive(name, weight) for name, weight in given.items() if weight != 0}
    penalty = Penalty(weights)
    with ExitStack() as stack:
        for name in weights:
            what, measure, _ = _TERMS[name]
            for layer, tap in choose_attention(model, layers, what).items():
                collect = partial(penalty.collect, name, measure, layer)
                stack.enter_context(tap.observe(collect, what, grad=True))
        yield penalty


def alike(outputs: Tensor) -> Tensor:
    """How alike heads are by what they put out: (b h i e) -> a number from 0 to 1.

    The cosine between two heads' matrices of inner products of tokens (i i), mean over samples and
    pairs: linear CKA (arXiv 1905.00414) without centring, so that heads which give all tokens the
    same are alike. Disagreement of outputs as arXiv 1810.10183 has it compares two heads number by
    number; a turn of one head's values, which changes nothing, escapes that, and not this.
    """
    _, h, _, e = outputs.shape
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    largest = outputs.detach().abs().amax((2, 3), keepdim=True)  # the size of a head is no matter
    outputs = outputs / largest.clamp(min=torch.finfo(outputs.dtype).tiny)
    flat = outputs.transpose(1, 2).flatten(2)
    products = (flat.mT @ flat).unflatten(2, (h, e)).unflatten(1, (h, e))  # b h e h e
    likeness = products.square().sum((2, 4))  # b h h
    own = likeness.diagonal(dim1=1, dim2=2)
    scale = (own[:, :, None] * own[:, None]).clamp(min=torch.finfo(own.dtype).tiny).sqrt()
    others = (likeness / scale).triu(1).sum((1, 2))
    return others.mean() / (h * (h - 1) / 2)


def evenness(weights: Tensor) -> Tensor:
    """Mean entropy of the rows, as a share of the logarithm of the number of keys: 0 to 1.

    (b h i j) -> a number. As a bonus against low entropy: arXiv 2303.06296 on why. Rows that are
    one-hot already have no gradient.
    """
    terms = weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    return -terms.sum(-1).mean() / math.log(max(2, weights.shape[-1]))


_TERMS = {"heads": _Term("outputs", alike, 1), "entropy": _Term("weights", evenness, -1)}
