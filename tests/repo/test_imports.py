"""Import rules of docs/architecture.md: imports point down; modules that decide need no torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "exl_kernels": ROOT / "csrc/python/exl_kernels",
    "exl_core": ROOT / "packages/exl-core/src/exl_core",
    "exl_eval": ROOT / "packages/exl-eval/src/exl_eval",
    "exl_cli": ROOT / "packages/exl-cli/src/exl_cli",
    "exl_exllamav2": ROOT / "packages/exl-exllamav2/src/exl_exllamav2",
}
DISTRIBUTION_RANK = {name: rank for rank, name in enumerate(SOURCES)}
ALIAS = "exl_exllamav2"
SHADOW = SOURCES[ALIAS] / "shadow"  # files of the old package names, which only re-export
CORE_RANK = {
    "errors": -1,  # below settings, which raises errors too
    "files": 0,
    "option_types": 0,
    "settings": 0,
    **dict.fromkeys(("ops", "arch", "tokenizer", "prompt"), 1),
    **dict.fromkeys(("cache", "sampling", "constrain"), 2),
    "formats": 3,
    "model": 4,
    **dict.fromkeys(("lora", "parallel"), 5),
    "speculate": 6,
    "engine": 7,
    "session": 8,
    "generate": 9,
    "convert": 10,
}
CLI_ONLY = ("typer", "click", "rich", "prompt_toolkit", "starlette", "fastapi", "uvicorn")
WITHOUT_TORCH = (
    "exl_core.errors",
    "exl_core.files",
    "exl_core.option_types",
    "exl_core.session.resolve",
    "exl_core.settings",
    "exl_core.arch.*",
    "exl_core.parallel.plan",
    "exl_core.prompt.*",
    "exl_core.cache.page_pool",
    "exl_core.cache.sequence_state",
    "exl_core.cache.format",
    "exl_core.sampling.params",
    "exl_core.engine.request",
    "exl_core.engine.scheduler",
    "exl_core.engine.events",
    "exl_eval.result",
    "exl_cli.main",
    "exl_cli.chat.conversation",
)

VERSION_INIT = '''
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Reads the version of the installed distribution at its first use, not at the import."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("DISTRIBUTION")
'''
"""The one `__init__` that may have content: that of a distribution's top package."""


def modules() -> Iterator[tuple[str, Path]]:
    for name, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((name, *parts)).removesuffix(".__init__"), path


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of all imports in a file, including those inside functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def core_package(module: str) -> str:
    """Package that has a rank: `engine` for `exl_core.engine.events.TextEvent`."""
    parts = module.split(".")
    assert len(parts) > 1, f"import of {module} itself: its __init__ is empty"
    return parts[1]


def formats_rank(module: str) -> int:
    """Rank within `formats`: codecs below containers, below the modules that know both."""
    return {"codecs": 0, "containers": 1}.get(module.split(".")[2], 2)


def import_circles(sources: dict[str, Path]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others.

    Counts imports within functions and under TYPE_CHECKING too.
    """
    targets: dict[str, set[str]] = {}
    for module, path in sources.items():
        named = set(imports_of(path))
        named |= {name.rpartition(".")[0] for name in named}  # `from module import name`
        targets[module] = named & sources.keys() - {module}
    waiting = dict(targets)
    while free := [module for module, needed in waiting.items() if not needed & waiting.keys()]:
        for module in free:
            del waiting[module]
    circles: list[list[str]] = []
    for module in waiting:  # these are in a circle, or import one
        if any(module in circle for circle in circles):
            continue
        reached = reachable(targets, module)
        mutual = sorted(other for other in reached if module in reachable(targets, other))
        if mutual:
            circles.append(mutual)
    return circles


def reachable(targets: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    open_ = [start]
    while open_:
        new = targets[open_.pop()] - found
        found |= new
        open_ += new
    return found


def faults_of(module: str, path: Path) -> Iterator[str]:
    own = module.partition(".")[0]
    for imported in imports_of(path):
        top = imported.partition(".")[0]
        if top in CLI_ONLY and own != "exl_cli":
            yield f"{module} imports {imported}: only exl_cli may"
        if module.startswith("exl_cli.server") and imported.startswith("exl_cli.commands"):
            yield f"{module} imports {imported}: the server must not import commands"
        if top not in DISTRIBUTION_RANK:
            continue
        if ALIAS in (top, own) and top != own and top not in ("exl_core", ALIAS):
            yield f"{module} imports {imported}: the alias may import exl_core only"
        if DISTRIBUTION_RANK[top] > DISTRIBUTION_RANK[own]:
            yield f"{module} imports {imported}: upwards"
        may_call = module.startswith("exl_core.ops.backends.")
        if top == "exl_kernels" and own != top and not may_call:
            yield f"{module} imports {imported}: only exl_core.ops.backends may"
        if own == top == "exl_core":
            here, there = core_package(module), core_package(imported)
            if here != there and CORE_RANK[there] >= CORE_RANK[here]:
                yield f"{module} (rank {CORE_RANK[here]}) imports {imported} ({CORE_RANK[there]})"
            if here == there == "formats" and formats_rank(imported) > formats_rank(module):
                yield f"{module} imports {imported}: codecs know no files, containers no models"


def test_imports_point_down() -> None:
    listed = [(module, path) for module, path in modules() if module != "exl_core"]
    assert len(listed) > 30
    faults = [fault for module, path in listed for fault in faults_of(module, path)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("exl_core.cache.store", "from exl_core.engine.events import TextEvent", "rank 2"),
        ("exl_core.arch.spec", "import exl_core.tokenizer.base", "rank 1"),
        ("exl_core.formats.codecs.bits", "import exl_core.formats.containers.gguf", "no files"),
        ("exl_core.engine.engine", "import rich", "only exl_cli"),
        ("exl_cli.server.app", "from exl_cli.commands import chat", "not import commands"),
        ("exl_eval.result", "from exl_cli.main import app", "upwards"),
        ("exl_cli.main", "import exl_exllamav2.model", "upwards"),
        ("exl_exllamav2.model", "import exl_cli.main", "exl_core only"),
        (
            "exl_core.model.weights",
            "def f():\n    import exl_kernels",
            "only exl_core.ops.backends",
        ),
    ],
)
def test_violations_are_found(tmp_path: Path, module: str, source: str, expected: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    faults = list(faults_of(module, path))
    assert any(expected in fault for fault in faults), faults


def test_exl_core_has_no_import_circle() -> None:
    sources = {module: path for module, path in modules() if module.startswith("exl_core")}
    assert len(sources) > 150
    assert import_circles(sources) == []


def test_import_circles_are_found(tmp_path: Path) -> None:
    texts = {
        "a.table": "def f():\n    from a.backend import Table",  # within a function
        "a.backend": "from a import types",
        "a.types": "if TYPE_CHECKING:\n    from a.table import OpTable",  # for annotations only
        "a.user": "import a.table\nimport a.leaf",  # imports the circle, is not part of it
        "a.leaf": "import torch",
    }
    sources = {}
    for module, text in texts.items():
        sources[module] = tmp_path / f"{module}.py"
        sources[module].write_text(text, encoding="utf-8")
    assert import_circles(sources) == [["a.backend", "a.table", "a.types"]]


def test_modules_that_decide_import_without_torch() -> None:
    names = [
        module
        for module, _ in modules()
        for pattern in WITHOUT_TORCH
        if module == pattern
        or (pattern.endswith(".*") and module.startswith(pattern.removesuffix("*")))
    ]
    assert len(names) >= len(WITHOUT_TORCH)
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"  # importing it raises ImportError from now on
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_package_inits_are_empty() -> None:
    inits = {
        path: name
        for name, folder in SOURCES.items()
        if name != "exl_kernels"  # its purpose is to load the extension
        for path in folder.rglob("__init__.py")
        if not path.is_relative_to(SHADOW)
    }
    assert len(inits) > 10
    own = {SOURCES[name] / "__init__.py": name for name in set(inits.values())}
    public = SOURCES["exl_core"] / "__init__.py"
    filled = [
        str(path) for path in inits if path.read_text(encoding="utf-8").strip() and path not in own
    ]
    assert not filled
    for path, name in own.items():
        if name == ALIAS:
            continue  # it offers two functions too, and imports them when they are used
        if path == public:  # has the public names, which tests/core/test_public_names.py checks
            continue
        expected = VERSION_INIT.replace("DISTRIBUTION", name.replace("_", "-"))
        docstring, _, rest = path.read_text(encoding="utf-8").partition("\n")
        assert docstring.startswith('"""')
        assert rest == expected, path


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "exl_kernels"])
def test_version_is_that_of_the_distribution_and_read_when_used(name: str) -> None:
    script = (
        f"import sys, {name} as package\n"
        "assert 'importlib.metadata' not in sys.modules, 'read at the import'\n"
        "print(package.__version__, hasattr(package, 'no_such_name'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.stdout.split() == [version(name), "False"], done.stderr


def test_only_settings_reads_the_environment() -> None:
    readers = []
    allowed = ("exl_core.settings", f"{ALIAS}.environment")
    for module, path in modules():
        for node in nodes_of(path):
            if not isinstance(node, ast.Attribute) or module in allowed:
                continue
            if node.attr in ("environ", "getenv"):
                readers.append(f"{module}, line {node.lineno}")
    assert not readers
