"""The import rule, checked on the syntax tree of every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["zoo", "vision", "crossmodal", "recipes"]  # each may import those before it
# Floors inside zoo, lowest first; each may import its own floor and those below.
FLOORS = [
    {"rng", "layers", "card", "untraced", "wrappers"},
    {
        *(
            "registry",
            "weights",
            "sources",
            *("files", "npz_weights", "onnx_weights", "onnx_names"),
            "layouts",
            *("merge", "keys", "copying", "causes", "agreement", "settings", "report"),
            "preprocess",
            "diagnostics",
            "penalties",
            "temperature",
            "surgery",
            "freezing",
            "depth",
        ),
        *("folders", "folder_cards", "downloads", "push"),
        *("hosts", "hosts_open_clip", "imagenet", "run_folder"),
        *("export", "exported"),
    },
    {"engine"},
    {"pages"},
    {"ablation"},
]
LIGHT = {"torch", "einops", "zoo", *sys.stdlib_module_names}  # what zoo may import at module level
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports(path: Path, everywhere: bool) -> set[str]:
    """Dotted names that a file imports: anywhere in it, or at module level only."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not everywhere and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
        ):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def floor(dotted: str) -> int | None:
    """Floor of a name inside zoo; None for zoo's own `__init__`."""
    part = dotted.split(".")[1] if "." in dotted else ""
    return next((level for level, parts in enumerate(FLOORS) if part in parts), None)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    own = module_name(path)
    package = own.split(".")[0]
    for name in imports(path, everywhere=True):
        top = name.split(".")[0]
        if top in PACKAGES:
            assert PACKAGES.index(top) <= PACKAGES.index(package), f"{own} imports {name}"
            assert top != "recipes", f"{own} imports {name}: nothing imports recipes"
        if package == "vision":
            assert not name.startswith("zoo.engine"), f"{own} imports {name}"
        if top == "zoo" and package == "zoo" and floor(own) is not None:
            level = floor(name)
            assert level is not None, f"{own} imports {name}, which is on no floor"
            assert level <= (floor(own) or 0), f"{own} imports {name}, a floor above"


@pytest.mark.parametrize(
    "path", [p for p in FILES if module_name(p).startswith("zoo")], ids=lambda path: path.name
)
def test_zoo_imports_heavy_libraries_inside_functions(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path, everywhere=False)} <= LIGHT


def test_every_part_of_zoo_is_on_a_floor() -> None:
    parts = {p.stem for p in (ROOT / "zoo").glob("*.py")} - {"__init__"}
    parts |= {p.parent.name for p in (ROOT / "zoo").glob("*/__init__.py")}
    assert parts == set().union(*FLOORS)


def modules_after(code: str) -> set[str]:
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"timm", "open_clip", "transformers", "accelerate", "matplotlib", "torchvision", "sklearn"}


@pytest.mark.parametrize("code", ["import zoo, vision", "import zoo; zoo.list_models()"])
def test_import_is_light(code: str) -> None:
    loaded = modules_after(code)
    assert "zoo" in loaded
    assert not loaded & (HEAVY | {"PIL", "safetensors"})


def test_import_does_not_start_the_compiler() -> None:
    """It takes over a second, which each command would pay."""
    code = "import zoo, vision, crossmodal, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_names_resolve() -> None:
    import vision
    import zoo

    for module in (zoo, vision):
        for name in module.__all__:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            module.nonsense  # noqa: B018


def test_every_package_is_shipped() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^packages = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    listed = set(re.findall(r'"([\w.]+)"', block[1]))
    there = {module_name(path.parent / "__init__.py") for path in FILES}
    assert listed == there
    for path in FILES:
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_tests_hide_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
