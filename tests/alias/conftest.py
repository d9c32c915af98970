"""Fixtures that run programs written for exllamav2 on a tiny model, in this process."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exl_exllamav2 import environment, notices
from exl_exllamav2.activation import SHADOW
from support import tiny_models

PROGRAMS = Path(__file__).parent / "programs"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 1,024 positions with a byte tokenizer. Read-only."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_models.save(tiny_models.tiny_llama(max_position_embeddings=1024), folder)
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8"
    )
    return folder


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch, tiny_dir: Path) -> Iterator[Any]:
    """The module `exllamav2`; every model path means the tiny model. Forgotten after the test."""
    monkeypatch.syspath_prepend(str(SHADOW))
    monkeypatch.setenv("EXL_ALIAS_MODELS", json.dumps({"*": str(tiny_dir)}))
    assert environment.model_paths() == {"*": str(tiny_dir)}
    notices.forget_warnings()
    yield importlib.import_module("exllamav2")
    for name in [name for name in sys.modules if name.split(".")[0] == "exllamav2"]:
        del sys.modules[name]


@pytest.fixture
def run_program(old: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run_program("name", *args)` runs a file of `programs/`; returns its global variables."""

    def run(name: str, *args: str) -> dict[str, Any]:
        path = PROGRAMS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *args])
        return runpy.run_path(str(path), run_name="__main__")

    return run
