"""Returns memory to the operating system after long bodies.

glibc keeps freed memory in the arenas of its threads. After a few bodies of 8 MB they held 2.3 GB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from exl_core.cache.memory import malloc_trim

LONG_BYTES = 1024 * 1024
_WAIT_S = 1.0
_trim = malloc_trim()


class MemoryReturn:
    """Calls `malloc_trim` 1 s after `schedule`, on another thread, once for all calls in between.

    The trim does not hold the GIL.
    """

    def __init__(self) -> None:
        self._is_scheduled = False

    def schedule(self) -> None:
        """Schedule a trim. Call it from the event loop."""
        if not self._is_scheduled and _trim is not None:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_WAIT_S, self._start, _trim)

    def _start(self, trim: Callable[[int], object]) -> None:
        self._is_scheduled = False
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
