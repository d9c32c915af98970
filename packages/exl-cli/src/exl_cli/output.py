"""What goes to stdout: the text, or one JSON object; flushed at once, and nothing else.

Everything that is not the answer itself belongs on stderr (`render.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from exl_cli.machine import closed_stdout, unwritable_stdout


class ClosedPipeError(Exception):
    """The reader of stdout has gone away (`exl generate | head -c 1`): nothing to report."""


def write_text(text: str) -> None:
    """Write and flush. A closed pipe and a full disk are told apart."""
    if sys.stdout is None:
        raise closed_stdout()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ClosedPipeError from error
    except OSError as error:
        raise unwritable_stdout(error) from error


def write_json(value: Mapping[str, object]) -> None:
    """One object on one line."""
    write_text(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def end_line_on_terminal() -> None:
    """The shell's prompt wants a line of its own; a file or a pipe gets the text and no more."""
    if sys.stdout is not None and sys.stdout.isatty():
        write_text("\n")
