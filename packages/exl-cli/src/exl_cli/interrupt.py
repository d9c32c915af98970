"""Handlers of Ctrl-C, one for each phase of a command.

- `exits_at_once`: while there is nothing to save.
- `Interrupt`: while text is generated. The first Ctrl-C asks the loop to stop after the current
  step, so that the engine stays usable. A second one raises at once.
- `StopSignals`: during work that is saved on disk and can be resumed, wherever it is interrupted.
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
    """Context manager: Ctrl-C ends the process at once.

    It wraps heavy imports, because a library that is interrupted during its import may raise any
    exception.

    Only the main thread receives signals; on another thread this does nothing.
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
    """Context manager: calls `on_signal` for these signals and restores the previous handlers."""

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
    """Context manager: Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread and set
    `is_set`, which other threads poll. `code` is the exit code for the process."""

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
