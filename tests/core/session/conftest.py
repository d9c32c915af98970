"""A hub on this machine for tests that download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub import Hub, hub_of_this_process


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of_this_process(tmp_path / "hub-cache", monkeypatch) as hub:
        yield hub
