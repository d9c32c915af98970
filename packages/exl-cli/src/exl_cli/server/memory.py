"""Memory that long bodies leave behind goes back to the operating system.

The C library keeps what is freed for later use, in pools of each thread: after a few bodies of
eight megabytes 2.3 GB of them.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

LONG_BYTES = 1024 * 1024
_WAIT_S = 1.0


def _find_trim() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library than glibc
        return None


_trim = _find_trim()


class MemoryReturn:
    """Trims the pools a moment after `schedule`, on another thread, once for all calls till then.

    It takes 30 to 200 ms, during which the interpreter is not held.
    """

    def __init__(self) -> None:
        self._is_scheduled = False

    def schedule(self) -> None:
        """From the event loop."""
        if not self._is_scheduled and _trim is not None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_WAIT_S, self._start, _trim)

    def _start(self, trim: Callable[[int], object]) -> None:
        self._is_scheduled = False
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
