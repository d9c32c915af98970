"""Helpers that run conversions with stub stages, and read their files and events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from exl_core.convert.events import ConversionStopped, Event, Stage
from exl_core.convert.job import Conversion, GateOutcome, Hooks, convert_model
from exl_core.convert.plan import ConvertOptions
from support import stub_stages

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
COMMAND = "exl convert again"


def conversion(source: Path, folder: Path, **changes: Any) -> Conversion:
    task = Conversion(
        source=source,
        out=folder / "out",
        bits=6.5,
        rows=3,
        length=20,
        calibration="numbers",
        shard_bytes=1 << 17,
        stages=ConvertOptions(),
    )
    return replace(task, **changes)


def hooks(**changes: Any) -> Hooks:
    callbacks = Hooks(
        make_rows=stub_stages.make_rows,
        gate=lambda *_: GateOutcome({"kld": 0.01}, None),
        on_event=lambda _: None,
        should_stop=lambda: False,
        command=COMMAND,
    )
    return replace(callbacks, **changes)


def run(task: Conversion, callbacks: Hooks | None = None, **options: Any) -> Path:
    """Runs a conversion that saves states at every layer, so that it can resume between any two."""
    return convert_model(task, callbacks or hooks(), saving_share=math.inf, **options)


def content(folder: Path) -> dict[str, bytes]:
    """Content of every file below `folder`, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def recorder() -> tuple[list[Event], Callable[[Event], None]]:
    events: list[Event] = []
    return events, events.append


def stops_until_done(task: Conversion, pieces: int, **changes: Any) -> Iterator[Stage]:
    """Runs a conversion until it is complete. It stops repeatedly, each time after `pieces` more
    pieces of work, and the stage of each stop is yielded. `changes` are those of `hooks`."""
    most = 0
    while not task.out.exists():
        most += pieces
        calls = count()
        events, on_event = recorder()
        callbacks = hooks(
            should_stop=lambda calls=calls, most=most: next(calls) >= most,
            on_event=on_event,
            **changes,
        )
        try:
            convert_model(task, callbacks)
        except ConversionStopped:
            yield events[-1].stage
