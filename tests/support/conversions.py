"""Conversions with stages that take no time, and what is left of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from exl_core.convert.events import Event
from exl_core.convert.job import Conversion, GateOutcome, Hooks, convert_model
from exl_core.convert.plan import ConvertOptions
from support import stub_stages

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
COMMAND = "exl convert again --resume"


def conversion(source: Path, folder: Path, **changes: Any) -> Conversion:
    wanted = Conversion(
        source=source,
        out=folder / "out",
        bits=6.5,
        rows=3,
        length=20,
        calibration="numbers",
        shard_bytes=1 << 17,
        stages=ConvertOptions(),
    )
    return replace(wanted, **changes)


def hooks(**changes: Any) -> Hooks:
    found = Hooks(
        make_rows=stub_stages.make_rows,
        gate=lambda *_: GateOutcome({"kld": 0.01}, None),
        on_event=lambda _: None,
        should_stop=lambda: False,
        command=COMMAND,
    )
    return replace(found, **changes)


def run(wanted: Conversion, found: Hooks | None = None, **options: Any) -> Path:
    """States are saved at every layer, so that a kill may come between any two."""
    return convert_model(wanted, found or hooks(), saving_share=math.inf, **options)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def recorder() -> tuple[list[Event], Callable[[Event], None]]:
    events: list[Event] = []
    return events, events.append
