"""Limit on the lines that bad requests can cause on stderr.

uvicorn logs one warning per request that is not HTTP, and a traceback per failure of a handler. A
client could fill a disk with them. The first lines of each kind are logged, then one per period,
with the number of lines left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FIRST_LINES = 5
PERIOD_S = 60.0
_MAX_KINDS = 256


class LineLimit(logging.Filter):
    """Passes `FIRST_LINES` records of each message template, then one per `PERIOD_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = str(record.msg)[:200]
        if key not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            key = ""  # all further kinds count together
        kind = self._kinds.setdefault(key, _Kind())
        now = self._clock()
        if kind.passed >= FIRST_LINES and now - kind.last < PERIOD_S:
            kind.left_out += 1
            return False
        kind.passed, kind.last = kind.passed + 1, now
        if kind.left_out:
            record.msg = f"{record.msg} ({kind.left_out} more lines like this were left out)"
            kind.left_out = 0
        return True


class _Kind:
    """Records of one message template."""

    def __init__(self) -> None:
        self.passed = 0
        self.left_out = 0
        self.last = 0.0


def limit_log_lines(logger: logging.Logger) -> None:
    """Add the limit to a logger, once."""
    if not any(isinstance(one, LineLimit) for one in logger.filters):
        logger.addFilter(LineLimit())
