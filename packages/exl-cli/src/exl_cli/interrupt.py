"""Ctrl-C, in the three ways that a command wants it.

`exits_at_once` while there is nothing to save; `Interrupt` while text is being generated: the
first Ctrl-C asks the loop to stop after the step that runs, so that the engine stays usable, and a
second one does not wait. `StopSignals` while work goes on that is safe on the disk, wherever it is
dropped.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_CODE_INTERRUPTED = 130


@contextmanager
def exits_at_once() -> Iterator[None]:
    """Around heavy imports: a library that is interrupted half way raises what it likes.

    Signals are the main thread's; on another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(_CODE_INTERRUPTED)

    previous = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class _Handler:
    """Context manager: these signals come to `on_signal`; what had them before has them back."""

    numbers: tuple[int, ...] = (signal.SIGINT,)

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in self.numbers:
            self._previous[number] = signal.signal(number, self.on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        raise NotImplementedError


class StopSignals(_Handler):
    """Context manager: Ctrl-C and SIGTERM raise KeyboardInterrupt where they arrive, and `is_set`
    from then on, for threads to ask. `code` is what the process should end with."""

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        super().__init__()
        self.code = 0

    @property
    def is_set(self) -> bool:
        return self.code != 0

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.code = 128 + number
        raise KeyboardInterrupt


class Interrupt(_Handler):
    """Context manager: `is_set` after the first Ctrl-C; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:  # noqa: ARG002
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
