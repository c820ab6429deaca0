"""The temperature of attention over a run: high early (smooth weights), low later (sharp ones).

Weights do not tell it, so a checkpoint from the middle of a run has it by where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from zoo.layers import set_temperature

ScheduleFn = Callable[[nn.Module, float], None]


def temperature_schedule(text: str) -> tuple[float | str, ScheduleFn | None]:
    """Reads `2`, `learned` or `2:0.5` (from 2 at the first update to 0.5 at the last).

    The course is geometric, since only ratios of temperatures matter to a softmax.

    Returns:
        The temperature to build the model with, which is the last one, and the schedule for `fit`.

    Raises:
        ValueError: the text is none of these.
    """
    if text == "learned":
        return text, None
    try:
        ends = [float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or not all(0 < end < math.inf for end in ends):
        raise ValueError(
            f"temperature {text!r} must be a positive number, START:END such as 2:0.5, or 'learned'"
        )
    if len(ends) == 1:
        return ends[0], None
    start, end = ends
    return end, lambda model, progress: set_temperature(model, start * (end / start) ** progress)
