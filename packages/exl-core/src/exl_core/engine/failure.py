"""Containment of failures: an exception in the work of one request ends that request alone.

Sampling, filters, hooks, text decoding and reports run on settings, data and code of one request
and may raise any exception. The engine runs each of these steps under the request's `FailureGuard`.
The forward pass and the page bookkeeping serve all requests: their failures are not caught here and
end every running request (`Engine.step`).
"""

from __future__ import annotations

from types import TracebackType

_INTERRUPTS = (KeyboardInterrupt, SystemExit)


class FailureGuard:
    """Context manager that keeps the first exception of one request as its `error`.

    It catches every class, including those that do not derive from `Exception`: a panic in a
    grammar library written in Rust, or an `asyncio.CancelledError` from a hook. Only
    KeyboardInterrupt and SystemExit propagate, since they address the process.
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
        """Record the error that ends the request; the first one counts."""
        if self.error is None:
            self.error = error
