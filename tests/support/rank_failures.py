"""Groups of ranks that a test hurts: settings of single ranks, and what is left of a group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.session import ranks
from exl_core.session.load import LoadedModel


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return state[0] != "Z"


def processes_of(loaded: LoadedModel) -> tuple[int, ...]:
    assert isinstance(loaded.model, LeadingTransformer)
    assert isinstance(loaded.model.followers, Followers)
    return loaded.model.followers.process_ids


def starting_with(
    monkeypatch: pytest.MonkeyPatch, rank: int = 1, **changed: object
) -> list[Followers]:
    """Lets one rank start with other settings. Returns the groups that are made."""
    made: list[Followers] = []

    def start(
        count: int, module: str, settings_of: Callable[[int], Mapping[str, object]], **options: bool
    ) -> Any:
        def own(index: int) -> Mapping[str, object]:
            return {**settings_of(index), **(changed if index == rank else {})}

        made.append(Followers(count, module, own, **options))
        return made[-1]

    monkeypatch.setattr(ranks, "Followers", start)
    return made


def remains() -> set[Path]:
    """Folders in which ranks meet, and shared memory of NCCL."""
    folders = Path(tempfile.gettempdir()).glob("exl-ranks-*")
    return {*folders, *Path("/dev/shm").glob("nccl-*"), *Path("/dev/shm").glob("torch_*")}
