"""Fixtures for conversions: a tiny source model, and stub stages that take no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import stub_stages, tiny_models
from support.conversions import SHAPE


@pytest.fixture(scope="session")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Safetensors directory with sizes that EXL2 can store. Read only: copy it to damage it."""
    model = tiny_models.tiny_llama(**SHAPE)
    folder = tiny_models.save(model, tmp_path_factory.mktemp("source"))
    (folder / "notes.md").write_text("kept", encoding="utf-8")
    return folder


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_stages.install(monkeypatch.setattr)
