"""Writes the answer of a command to stdout, as text or as one JSON object, and errors to stderr.

Each function flushes. Progress and notes go to stderr too (`render.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress

from exl_cli.machine import closed_stdout, unwritable_stdout
from exl_core.files import encode_text


class ClosedPipeError(Exception):
    """The reader of stdout closed the pipe (`exl generate | head -c 1`). Not an error to report."""


def write_text(text: str) -> None:
    """Write and flush. A closed pipe raises ClosedPipeError, a full disk ExlError."""
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
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    write_text(encode_text(text).decode() + "\n")


def write_error(line: str) -> None:
    """Print "exl: error: " and `line` to stderr, where there is one that can be written.

    Otherwise the exit code alone reports the failure. Text and newline are one write, because other
    threads log to stderr at the same time.
    """
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"exl: error: {line}\n")
            sys.stderr.flush()


def end_line_on_terminal() -> None:
    """End the line on a terminal, for the shell's prompt. A file or a pipe gets only the text."""
    if sys.stdout is not None and sys.stdout.isatty():
        write_text("\n")
