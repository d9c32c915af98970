"""The person's side of a chat: line editing with history, notes, and the keys that end things.

Everything here goes to stderr, so that a redirected stdout holds the replies and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

from exl_cli.chat.commands import COMMANDS
from exl_cli.chat.settings import NAMES
from exl_cli.render import stderr_console

FENCE = '"""'
PROMPT = ">>> "


class Terminal:
    """What is typed is kept in `history_file`, which only its owner can read, if there is one."""

    def __init__(self, history_file: Path | None) -> None:
        self._console = stderr_console()
        self._session: PromptSession[str] = PromptSession(
            history=self._history(history_file),
            output=create_output(stdout=sys.stderr),
            multiline=True,
            key_bindings=_key_bindings(),
            prompt_continuation="... ",
            completer=CommandCompleter(),
            complete_while_typing=False,
        )

    @staticmethod
    def is_there() -> bool:
        return (
            sys.stdin is not None
            and sys.stderr is not None
            and sys.stdin.isatty()
            and sys.stderr.isatty()
        )

    def ask(self, draft: str = "") -> str:
        """One message, `draft` to begin with; fences around it are dropped.

        Bytes that are no text are question marks, as they are shown. Raises EOFError on Ctrl-D and
        KeyboardInterrupt on Ctrl-C.
        """
        if is_dumb_terminal():
            text = self._ask_plainly(draft)
        else:
            text = self._session.prompt(PROMPT, default=draft)
        text = text.encode("utf-8", errors="replace").decode("utf-8").strip()
        if text.startswith(FENCE):
            text = text.removeprefix(FENCE).removesuffix(FENCE).strip("\n")
        return text

    def _ask_plainly(self, draft: str) -> str:
        """A line, where the terminal can edit nothing."""
        if draft:
            self.note(f"It was: {draft}")
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def _history(self, path: Path | None) -> History:
        if path is None:
            return InMemoryHistory()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            os.fchmod(descriptor, 0o600)
            os.close(descriptor)
        except OSError as error:
            self.note(f"What is typed is not kept: {path}: {error.strerror}")
            return InMemoryHistory()
        return FileHistory(path)


class CommandCompleter(Completer):
    """What Tab goes on with: commands, names of settings, files."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        command, space, argument = document.text_before_cursor.partition(" ")
        if command in ("/save", "/load") and space:
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), event)
            return
        known = tuple(f"/{name}" for name in COMMANDS)
        begun = command
        if space:
            known, begun = (NAMES if command == "/set" else ()), argument
        if begun:
            fitting = (name for name in known if name.startswith(begun))
            yield from (Completion(name, -len(begun)) for name in fitting)


def _key_bindings() -> KeyBindings:
    """Enter sends, except within an open fence; Alt-Enter (or Esc, Enter) begins a new line.

    A paste of many lines comes as one piece, so its line ends are no Enter. Tab completes.
    """
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text.strip()
        if text.startswith(FENCE) and (text == FENCE or not text.endswith(FENCE)):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("tab")
    def _complete(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        asked = CompleteEvent(completion_requested=True)
        found = list(CommandCompleter().get_completions(buffer.document, asked))
        if len(found) == 1:  # at once: an Enter may be next
            buffer.apply_completion(found[0])
        elif buffer.complete_state is not None:
            buffer.complete_next()
        elif found:
            buffer.start_completion(insert_common_part=True)

    return bindings
