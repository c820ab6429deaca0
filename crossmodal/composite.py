"""Models made of parts: what each part says of itself, under the names of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from crossmodal.towers import ImageTower
from zoo.card import ModelCard


class Composite(nn.Module):
    """A model with an image tower, `image_tower`, among its parts.

    Its images are prepared as the tower's, its weights load, resize and decay as those of its
    parts do alone.
    """

    image_tower: ImageTower

    @property
    def card(self) -> ModelCard:
        return self._card

    @card.setter
    def card(self, card: ModelCard) -> None:
        # The registry knows no preprocessing for a name whose tower is an option; weights that
        # were loaded bring theirs.
        if card.source is None:
            card = replace(card, preprocessing=self.image_tower.preprocessing)
        self._card = card

    @property
    def first_conv(self) -> str | None:
        """Name of the module that reads the image's channels; `zoo.weights` adapts it."""
        name = getattr(self.image_tower.trunk, "first_conv", None)
        return f"image_tower.trunk.{name}" if isinstance(name, str) else None

    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Grid of each learned position embedding, for resampling; see `zoo.weights`."""
        return {
            f"{name}.{key}": grid
            for name, part in self._parts("position_grids")
            for key, grid in part.position_grids().items()  # type: ignore[operator]
        }

    def no_weight_decay(self) -> set[str]:
        """Names of the positions and tokens of all parts, which weight decay leaves alone."""
        return {
            f"{name}.{key}"
            for name, part in self._parts("no_weight_decay")
            for key in part.no_weight_decay()  # type: ignore[operator]
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass, in all parts that can.

        Raises:
            ValueError: no part can.
        """
        refused = []
        parts = list(self._parts("set_grad_checkpointing"))
        for _, part in parts:
            try:
                part.set_grad_checkpointing(enable)  # type: ignore[operator]
            except ValueError as error:
                refused.append(str(error))
        if len(refused) == len(parts):
            raise ValueError("; ".join(refused) or "no part has gradient checkpointing")

    def _parts(self, method: str) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules inside that have a method, and their names."""
        found: list[str] = []
        for name, part in self.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if name and not inside and callable(getattr(part, method, None)):
                found.append(name)
                yield name, part
