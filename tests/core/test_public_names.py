"""Public names of `exl_core`: complete, typed, imported when used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import exl_core
from exl_core.generate.dynamic import DynamicGenerator


def test_every_public_name_is_there_and_is_what_its_module_defines() -> None:
    for name, module in exl_core._HOMES.items():
        value = getattr(exl_core, name)
        assert value.__module__ == f"exl_core.{module}", name
        assert value.__doc__, name
        assert name in dir(exl_core)
    assert exl_core.Generator is DynamicGenerator
    assert {*exl_core.__all__} == {*exl_core._HOMES, "__version__"}


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(exl_core.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("exl_core.")
        for alias in node.names
    }
    assert imported == {name: f"exl_core.{module}" for name, module in exl_core._HOMES.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Generators'"):
        getattr(exl_core, "Generators")  # noqa: B009 - mypy would refuse the attribute


def test_the_import_loads_no_torch_until_a_name_needs_it() -> None:
    script = (
        "import sys, exl_core\n"
        "from exl_core import ExlError, SamplerParams, resolve_model\n"
        "assert 'torch' not in sys.modules\n"
        "from exl_core import load_model\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
