"""The person's side of a chat: line editing with history, notes, and the keys that end things.

Everything here goes to stderr, so that a redirected stdout holds the replies and nothing else.
"""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.output import create_output

from exl_cli.render import stderr_console


class Terminal:
    """History lives as long as the session: what was typed is not written to disk."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(), output=create_output(stdout=sys.stderr)
        )
        self._console = stderr_console()

    @staticmethod
    def is_there() -> bool:
        return (
            sys.stdin is not None
            and sys.stderr is not None
            and sys.stdin.isatty()
            and sys.stderr.isatty()
        )

    def ask(self) -> str:
        """One message. Raises EOFError on Ctrl-D and KeyboardInterrupt on Ctrl-C."""
        return self._session.prompt(">>> ")

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)
