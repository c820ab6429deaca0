"""A recipe as a command: flags in, and the user's mistakes told in one line.

A mistake is an error that a `raise` statement of ours made, of the kinds in `MISTAKES`: our code
foresaw it and says what would be right. Everything else (torch's errors, failed assertions, a line
of ours that failed by itself) is a bug, whose traceback stays.

`accelerate launch` and `torchrun` add a traceback of their own when a process ends with an error;
`accelerate launch -q` adds none.
"""

from __future__ import annotations

import dis
import io
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from types import TracebackType
from typing import TypeVar

C = TypeVar("C")
SHOW = "ZOO_TRACEBACK"  # environment variable; 1 shows the traceback of mistakes as well
MISTAKES = (ValueError, TypeError, RuntimeError, OSError, ImportError)
OURS = ("zoo", "vision", "crossmodal", "recipes", "__main__")
SECONDS_FOR_MAIN = 3.0  # in which the main process tells a mistake that all processes share


def cli(
    main: Callable[[C], object], config_class: type[C], args: Sequence[str] | None = None
) -> None:
    """Reads flags into a `config_class` and calls `main` with it: a recipe's last line.

    Wrong flags end the process with exit code 2 (by tyro), the user's other mistakes with one line
    `error: ...` on stderr and exit code 1. Several processes tell a mistake once. With
    ZOO_TRACEBACK=1 in the environment every error keeps its traceback.

    Args:
        main: What the recipe does.
        config_class: A dataclass of its flags.
        args: The command line; `sys.argv` by default.

    Raises:
        SystemExit: after a mistake.
        Exception: any other error of `main`, as it is.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        main(_read(config_class, args, quietly=rank > 0))
    except MISTAKES as error:
        if os.environ.get(SHOW, "0") not in ("", "0") or not is_mistake(error):
            raise
        _tell(error, rank)
        sys.exit(1)


def _read(config_class: type[C], args: Sequence[str] | None, quietly: bool) -> C:
    import tyro

    if not quietly:
        return tyro.cli(config_class, args=args)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return tyro.cli(config_class, args=args)


def is_mistake(error: BaseException) -> bool:
    """Whether an error is of `MISTAKES` and was made by a `raise` statement in our packages."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    foreseen = isinstance(error, MISTAKES) and not isinstance(error, NotImplementedError)
    return foreseen and place is not None and _raised_by_us(place)


def _raised_by_us(place: TracebackType) -> bool:
    package = str(place.tb_frame.f_globals.get("__name__")).partition(".")[0]
    instruction = place.tb_frame.f_code.co_code[place.tb_lasti]
    return package in OURS and dis.opname[instruction] == "RAISE_VARARGS"


def _tell(error: BaseException, rank: int) -> None:
    """Prints the error; a process other than the main one only if that has nothing to tell.

    The launcher ends the others as soon as the main process has ended.
    """
    if rank:
        time.sleep(SECONDS_FOR_MAIN)
    of = f" on process {rank}" if rank else ""
    said = str(error) or type(error).__name__
    hint = "" if SHOW in said else f" ({SHOW}=1 shows where)"  # a cell of an ablation said it
    text = f"error{of}: {said}{hint}"
    print(_wrapped(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _wrapped(text: str) -> str:
    """Lines no wider than the terminal; paths and flags stay whole."""
    width = max(40, shutil.get_terminal_size().columns - 1)
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for line in text.splitlines()
    )
