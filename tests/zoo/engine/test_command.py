"""A recipe as a command: which errors become one line, and which keep their traceback."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.engine import cli, command
from zoo.engine.command import is_mistake
from zoo.sources import WeightsError


@dataclass
class Flags:
    """Flags of a recipe."""

    number: int = 1
    """Any but a negative one."""

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(f"number ({self.number}) must be at least 0")


def function(code: str, package: str = "zoo.made_up") -> Any:
    """`f()` with this body, as if it stood in a package."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    names: dict[str, Any] = {
        "__name__": package,
        "torch": torch,
        "WeightsError": WeightsError,
        "foreign": lambda: exec("raise ValueError('theirs')", {"__name__": "somewhere"}),
    }
    exec(compile(f"def f(*_):\n{body}", package, "exec"), names)
    return names["f"]


def error_of(code: str, package: str = "zoo.made_up") -> Exception:
    try:
        function(code, package)()
    except Exception as error:
        return error
    raise AssertionError(f"no error: {code}")


FORESEEN = [
    "raise ValueError('x')",
    "raise TypeError('x')",
    "raise FileNotFoundError('x')",
    "raise ImportError('x needs y')",
    "raise RuntimeError('x')",
    "raise WeightsError('x')",
    "try:\n    raise ValueError('x')\nfinally:\n    print()",
    "try:\n    int('x')\nexcept ValueError as error:\n    raise ValueError('better') from error",
    "try:\n    foreign()\nexcept ValueError as error:\n    raise type(error)('better') from error",
    "try:\n    raise ValueError('x')\nexcept ValueError:\n    raise",
]
BUGS = [
    "int('x')",
    "a, b = [1, 2, 3]",
    "list(zip([1], [], strict=True))",
    "[].index(3)",
    "open('/nowhere/at/all')",
    "import no_such_module",
    "foreign()",
    "torch.ones(2) @ torch.ones(3)",
    "torch.nn.Linear(2, 3)(torch.ones(4))",
    "assert False",
    "[][3]",
    "raise KeyError('x')",
    "raise NotImplementedError",
    "try:\n    foreign()\nexcept ValueError:\n    raise",
    "try:\n    int('x')\nexcept ValueError:\n    raise",
    "try:\n    int('x')\nfinally:\n    print()",
]


@pytest.mark.parametrize("package", ["zoo.a.b", "vision.a", "crossmodal.a", "__main__"])
@pytest.mark.parametrize("code", FORESEEN)
def test_what_our_code_raises_is_a_mistake(code: str, package: str) -> None:
    assert is_mistake(error_of(code, package))


@pytest.mark.parametrize("code", BUGS)
def test_anything_else_is_a_bug(code: str) -> None:
    assert not is_mistake(error_of(code))


def test_what_others_raise_is_a_bug() -> None:
    assert not is_mistake(error_of("raise ValueError('x')", "zoological"))
    assert not is_mistake(ValueError("never raised"))


def test_a_mistake_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = function("raise WeightsError('no such weights')")
    with pytest.raises(SystemExit) as end:
        cli(main, Flags, [])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: no such weights (ZOO_TRACEBACK=1 shows where)\n")
    monkeypatch.setenv("ZOO_TRACEBACK", "1")
    with pytest.raises(WeightsError, match="no such weights"):
        cli(main, Flags, [])
    assert capsys.readouterr() == ("", "")


def test_a_bug_goes_on_as_it_is() -> None:
    with pytest.raises(IndexError):
        cli(function("[][3]"), Flags, [])


def test_flags_reach_main_and_wrong_ones_end_with_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    got: list[Flags] = []
    cli(got.append, Flags, ["--number", "7"])
    assert got == [Flags(7)]
    for args, told in [(["--numbr", "3"], "--numbr"), (["--number", "-3"], "number (-3) must")]:
        with pytest.raises(SystemExit) as end:
            cli(got.append, Flags, args)
        assert end.value.code == 2
        assert told in capsys.readouterr().err
    assert len(got) == 1


def test_other_processes_leave_the_telling_to_the_main_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(command.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as end:
        cli(print, Flags, ["--numbr", "3"])
    assert (end.value.code, *capsys.readouterr()) == (2, "", "")
    with pytest.raises(SystemExit):
        cli(function("raise ValueError('only here')"), Flags, [])
    assert waited == [command.SECONDS_FOR_MAIN]
    assert capsys.readouterr().err.startswith("error on process 1: only here")


def test_terminals_get_short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = "/a/path-with-hyphens/" + "x" * 70
    text = f"error: {'word ' * 30}\n  second line {path}"
    lines = command._wrapped(text).splitlines()
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert all(len(line) < 60 or path in line for line in lines)
    assert any(line.startswith("  second line") for line in lines)


def test_as_a_script(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(
        "from dataclasses import dataclass\n"
        "from zoo.engine import cli\n"
        "@dataclass\n"
        "class Config:\n"
        "    number: int = 1\n"
        "def main(config):\n"
        "    raise ValueError('no') if config.number else AssertionError('bug')\n"
        "if __name__ == '__main__':\n"
        "    cli(main, Config)\n"
    )
    for number, lines in ((1, 1), (0, None)):
        words = [sys.executable, str(tmp_path / "recipe.py"), "--number", str(number)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) == (lines is None)
        assert lines is None or len(done.stderr.splitlines()) == lines
