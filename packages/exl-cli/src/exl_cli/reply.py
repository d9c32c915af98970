"""Streams one reply of the engine, and prints a note if it does not meet its constraints.

Text and token ids so far survive a Ctrl-C, because the loop stops between two steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from exl_cli.interrupt import Interrupt
from exl_core.engine.engine import Engine
from exl_core.engine.events import (
    FinishEvent,
    FinishReason,
    PrefillEvent,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.generate.driver import running
from exl_core.session.runtime import Runtime


def stream_reply(
    engine: Engine,
    request: Request,
    interrupt: Interrupt,
    write: Callable[[TextEvent], None] | None,
    note_progress: Callable[[PrefillEvent], None] | None = None,
) -> FinishEvent:
    """Run one request to its end, or until `interrupt` is set.

    `write` receives each piece of text. `note_progress` receives the progress of prefill, which
    the engine reports for long prompts.
    """
    with running(engine, [request]) as run:
        for event in run.events(lambda: interrupt.is_set):
            match event:
                case TextEvent() if write is not None:
                    write(event)
                case PrefillEvent() if note_progress is not None:
                    note_progress(event)
                case FinishEvent():
                    return event
    raise AssertionError("a run ends with a FinishEvent or raises")


def note_unmet(runtime: Runtime, request: Request, reply: FinishEvent) -> None:
    """Note on stderr that a constrained text ended early. It may look like a complete document."""
    if not request.constraints or sys.stderr is None:
        return
    if isinstance(reply.stopped_by, str):
        print("exl: note: --stop ended the text; it may not meet its constraint", file=sys.stderr)
    elif reply.reason is FinishReason.LENGTH and not _is_met(runtime, request, reply):
        print(
            f"exl: note: cut off after {len(reply.token_ids)} tokens (-n, -c): the text does not "
            "meet its constraint yet",
            file=sys.stderr,
        )


def _is_met(runtime: Runtime, request: Request, reply: FinishEvent) -> bool:
    filters = runtime.engine.compile(request)
    for one in filters:
        for token_id in reply.token_ids:
            one.accept(token_id)
    return all(one.is_complete for one in filters)
