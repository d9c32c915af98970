"""One reply of the engine, streamed: what came, and how fast.

The text so far and its token ids survive a Ctrl-C, because the loop stops between two steps.
"""

from __future__ import annotations

from collections.abc import Callable

from exl_cli.interrupt import Interrupt
from exl_core.engine.engine import Engine
from exl_core.engine.events import FailEvent, FinishEvent, TextEvent
from exl_core.engine.request import Request


def stream_reply(
    engine: Engine, request: Request, interrupt: Interrupt, write: Callable[[str], None] | None
) -> FinishEvent:
    """Run one request to its end, or until `interrupt`; `write` gets each piece as it comes."""
    engine.submit(request)
    try:
        while True:
            if interrupt.is_set:
                engine.cancel(request.request_id)
            for event in engine.step():
                match event:
                    case TextEvent() if write is not None:
                        write(event.text)
                    case FinishEvent():
                        return event
                    case FailEvent():
                        raise event.error
    except BaseException:  # a closed pipe, a second Ctrl-C: the engine must not keep the sequence
        engine.cancel(request.request_id)
        raise
