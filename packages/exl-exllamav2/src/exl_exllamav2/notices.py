"""Warnings about settings of a program that are accepted and have no effect, once per process.

They go to stderr. With `--strict` of `exl exec` they are errors.
"""

from __future__ import annotations

import sys

from exl_exllamav2.environment import is_strict
from exl_exllamav2.errors import RefusedError

_seen: set[str] = set()


def warn_once(name: str, text: str) -> None:
    """Print one line about the old setting `name`, at its first use in this process."""
    if name in _seen:
        return
    if is_strict():
        raise RefusedError(f"{name}: {text}", next_step="Without --strict this is a warning.")
    _seen.add(name)
    print(f"exl: warning: {name}: {text}", file=sys.stderr, flush=True)


def forget_warnings() -> None:
    """Print every warning again at its next use. For tests."""
    _seen.clear()
