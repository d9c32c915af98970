"""Containment of failures: what goes wrong in the work of one request ends that request alone.

Sampling, filters, hooks, the decoder and reports run code and data that come with the request, so
they may raise anything. The engine runs each such step under the request's `FailureGuard`. The
forward pass and the books of pages serve all requests: their failures are not caught here and end
everything that runs (`Engine.step`).
"""

from __future__ import annotations

from types import TracebackType

_INTERRUPTS = (KeyboardInterrupt, SystemExit)


class FailureGuard:
    """Context manager that keeps the first exception of one request as its `error`.

    It takes every class, also those that are no `Exception`: a panic in a grammar library written
    in Rust, or an `asyncio.CancelledError` that a hook lets through. Only KeyboardInterrupt and
    SystemExit pass, since they are meant for the process.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or isinstance(error, _INTERRUPTS):
            return False
        self.fail(error)
        return True

    def fail(self, error: BaseException) -> None:
        """The request ends with this, unless it had failed before."""
        if self.error is None:
            self.error = error
