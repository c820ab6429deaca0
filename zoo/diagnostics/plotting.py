"""The one place where matplotlib is asked for: it belongs to an extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure_class(file: Path) -> Any:
    """matplotlib's `Figure`, which draws with Agg whatever pyplot is set to.

    Raises:
        ImportError: it is missing; the message names the file that cannot be drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{file.name} needs matplotlib: pip install 'attention-zoo[plots]'"
        ) from error
    return Figure
