"""Work on threads that the process does not wait for when it ends: a connection may never be made.
Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Runs `work` on a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            future.set_exception(error)

    Thread(target=run, name="exl-connect", daemon=True).start()
    return future
