"""Size limits of files and functions, and a docstring in every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES = 600
FUNCTION_LINES = 60
NOXFILE_LINES = 250
FOLDERS = ("csrc", "packages", "scripts", "tests")
SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_built = {"build", ".nox", "node_modules"} & set(path.relative_to(ROOT).parts)
            if path.suffix in SUFFIXES and not is_built:
                yield path


@cache
def python_modules() -> dict[Path, ast.Module]:
    paths = (path for path in sources() if path.suffix == ".py")
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_files_are_short() -> None:
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert len(counts) > 60
    long = [f"{path.relative_to(ROOT)}: {n}" for path, n in counts.items() if n > FILE_LINES]
    assert not long
    assert len((ROOT / "noxfile.py").read_text(encoding="utf-8").splitlines()) <= NOXFILE_LINES


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions anywhere below a node. Visits statements only, because expressions contain no
    function definitions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from functions(child)


def test_functions_are_short() -> None:
    long = []
    for path, module in python_modules().items():
        for node in functions(module):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                long.append(f"{path.relative_to(ROOT)}, {node.name}: {lines}")
    assert not long


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path, module in python_modules().items()
        if path.name != "__init__.py" and ast.get_docstring(module) is None
    ]
    assert not silent


def test_no_leftovers() -> None:
    names = [str(p.relative_to(ROOT)) for p in sources() if re.search(r"_old|utils\.py$", p.name)]
    assert not names
