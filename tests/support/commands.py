"""Types of the fixtures that run the `exl` command: the outcome of one run, and the runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of one run of the command."""

    code: int
    out: str
    err: str

    def error_line(self, code: int) -> str:
        """The error line on stderr. Checks the exit code and the form of the line."""
        assert self.code == code, self.err
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("exl: error: ")
        return self.err.removeprefix("exl: error: ").removesuffix("\n")


Command = Callable[..., Outcome]
"""Runs the command with these arguments; the keyword `stdin` is its input as bytes."""

JsonCommand = Callable[..., dict[str, Any]]
"""Runs a command that prints one JSON object, which must succeed, and parses the object."""
