"""One reply of the engine, streamed: what came, and how fast.

The text so far and its token ids survive a Ctrl-C, because the loop stops between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exl_cli.interrupt import Interrupt
from exl_core.engine.engine import Engine
from exl_core.engine.events import FailEvent, FinishEvent, TextEvent
from exl_core.engine.request import Request


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stopped_by: int | str | None
    prompt_tokens: int
    cached_tokens: int
    prefill_s: float
    decode_s: float
    prefill_tok_s: float
    decode_tok_s: float


def stream_reply(
    engine: Engine, request: Request, interrupt: Interrupt, write: Callable[[str], None] | None
) -> Reply:
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
                        return _as_reply(event)
                    case FailEvent():
                        raise event.error
    except BaseException:  # a closed pipe, a second Ctrl-C: the engine must not keep the sequence
        engine.cancel(request.request_id)
        raise


def _as_reply(event: FinishEvent) -> Reply:
    return Reply(
        text=event.text,
        token_ids=tuple(event.token_ids),
        finish_reason=event.reason.value,
        stopped_by=event.stopped_by,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        prefill_s=event.prefill_s,
        decode_s=event.decode_s,
        prefill_tok_s=event.prefill_tok_s,
        decode_tok_s=event.decode_tok_s,
    )
