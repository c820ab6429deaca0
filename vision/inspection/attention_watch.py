"""The attention of a model of images, for `training_watch`: numbers a layer, maps a head.

A map has the weight of each patch: in the row of the class token where there is one, else the mean
over the patches' rows, or over all queries of a pooling. What goes to class tokens and registers is
left out and nothing is renormalised, so that a map sums to the share that the patches get.

Shapes: b images, h heads, i/j query/key tokens, y x rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vision.inspection.attention_grid import draw_grid, draw_over_time
from vision.inspection.fixed_images import FixedImages, undisturbed
from vision.inspection.image_tokens import ImageTokens, image_tokens
from zoo.diagnostics.capture import Records, attention_of, capture_attention
from zoo.diagnostics.looks import LayerLook, look_at_layer


class Captured(NamedTuple):
    """Weights (b h i j) and ranges of logits (b h i 2) by layer."""

    weights: Records
    logits: Records


class AttentionPart:
    """All layers whose attention can be seen.

    Args:
        model: As it will train.
        images: At which it will be looked.

    Raises:
        ValueError: No layer's attention can be measured or drawn; with the reasons.
        NothingCapturedError: No layer showed any.
        MemoryError: So many images take too much memory.
    """

    kind = "layers"

    def __init__(self, model: nn.Module, images: FixedImages) -> None:
        self.images, self.with_logits = images, list(attention_of(model, "logits"))
        with undisturbed(model), self.capture(model) as found:
            model(images.inputs.to(next(model.parameters()).device))
        self.tokens: dict[str, ImageTokens] = {}  # of layers that can be drawn
        self.refused: dict[str, str] = {}  # layers that cannot be measured
        for layer, records in found.weights.items():
            tokens = _tokens_of(model, images, records[0])
            if tokens is not None:
                self.tokens[layer] = tokens
            try:
                self._measure(layer, found)
            except ValueError as error:  # weights of another kind: below 0, not summing to 1
                self.refused[layer] = f"{layer}: {error}"
        if not self.tokens and len(self.refused) == len(found.weights):
            raise ValueError("; ".join(self.refused.values()))

    @contextmanager
    def capture(self, model: nn.Module) -> Iterator[Captured]:
        with capture_attention(model) as weights:
            if not self.with_logits:
                yield Captured(weights, {})
                return
            with capture_attention(model, self.with_logits, what="logits") as logits:
                yield Captured(weights, logits)

    def see(self, records: Captured) -> tuple[dict[str, LayerLook], dict[str, Tensor]]:
        looks = {
            layer: self._measure(layer, records)
            for layer in records.weights
            if layer not in self.refused
        }
        maps = {
            f"maps/{layer}": patch_maps(records.weights[layer][0], tokens).half()
            for layer, tokens in self.tokens.items()
        }
        return looks, maps

    def _measure(self, layer: str, records: Captured) -> LayerLook:
        weights, tokens = records.weights[layer][0], self.tokens.get(layer)
        own = records.logits.get(layer)
        square = tokens is not None and weights.shape[2] == weights.shape[3] and not tokens.suffix
        return look_at_layer(
            weights,
            grid=tokens.grid if tokens and square else None,
            num_prefix_tokens=tokens.prefix if tokens and square else 0,
            logits=own[0] if own else None,
        )

    def numbers(self, looks: Mapping[str, LayerLook]) -> dict[str, float]:
        return {
            f"attn/{layer}/{name}": value
            for layer, look in looks.items()
            for name, value in look.numbers().items()
        }

    @property
    def _title(self) -> str:
        read = {tokens.names[:1] == ("class",) for tokens in self.tokens.values()}
        if read == {True}:
            return "where the class token looks"
        return "where the patches look, on average" if read == {False} else "where tokens look"

    def _maps(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By layer, in the model's order."""
        return {layer: tensors[f"maps/{layer}"] for layer in self.tokens}

    def draw(self, folder: Path, step: int, tensors: Mapping[str, Tensor], names: Any) -> None:
        if self.tokens:
            draw_grid(
                folder / f"step{step:06d}.png",
                self.images.pixels,
                self._maps(tensors),
                title=f"step {step}: {self._title}",
                names=names,
            )

    def draw_over_time(self, folder: Path, steps: Mapping[int, Mapping[str, Tensor]]) -> None:
        if self.tokens:
            first = {
                step: {layer: maps[0] for layer, maps in self._maps(tensors).items()}
                for step, tensors in steps.items()
            }
            draw_over_time(
                folder / "over_time.png",
                self.images.pixels[0],
                first,
                title=f"{self._title}, mean over heads",
                name=self.images.names[0],
            )


def _tokens_of(model: nn.Module, images: FixedImages, weights: Tensor) -> ImageTokens | None:
    """Which keys are patches; None where they are not, as in windows."""
    size = images.inputs.shape[-2:]
    if len(weights) != len(images.inputs):
        return None
    try:
        return image_tokens(model, (size[0], size[1]), weights.shape[-1])
    except ValueError:
        return None


def patch_maps(weights: Tensor, tokens: ImageTokens) -> Tensor:
    """(b h i j) -> (b h y x)"""
    rows, columns = tokens.grid
    patches = slice(tokens.prefix, tokens.prefix + rows * columns)
    if weights.shape[2] == weights.shape[3]:
        class_token = tokens.names[:1] == ("class",)
        weights = weights[:, :, :1] if class_token else weights[:, :, patches]
    return weights.mean(2)[..., patches].unflatten(-1, (rows, columns))
