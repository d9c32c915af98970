"""Terminal input of a chat: line editing with history, key bindings, and notes to the user.

All output of this module goes to stderr, so that a redirected stdout holds only the replies.
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
from exl_core.session.pulled import pulled_models

FENCE = '"""'
PROMPT = ">>> "


class Terminal:
    """Line editor on stderr. Saves input in `history_file`, mode 0600; None: in memory only."""

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
        """Read one message, with `draft` as its initial text. Fences around it are removed.

        Bytes that are not valid UTF-8 become question marks, as the terminal shows them. Raises
        EOFError on Ctrl-D and KeyboardInterrupt on Ctrl-C.
        """
        if is_dumb_terminal():
            text = self._ask_without_editing(draft)
        else:
            text = self._session.prompt(PROMPT, default=draft)
        text = text.encode("utf-8", errors="replace").decode("utf-8").strip()
        if text.startswith(FENCE):
            text = text.removeprefix(FENCE).removesuffix(FENCE).strip("\n")
        return text

    def _ask_without_editing(self, draft: str) -> str:
        """Read one line on a dumb terminal, which cannot edit; `draft` is shown above it."""
        if draft:
            self.note(f"Previous text: {draft}")
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
            self.note(f"Input history is not saved: {path}: {error.strerror}")
            return InMemoryHistory()
        return FileHistory(path)


def _arguments(command: str) -> tuple[str, ...]:
    """Words that may follow a command."""
    if command == "/model":
        return tuple(model.name for model in pulled_models() if model.is_complete)
    if command == "/show":
        return ("info", "parameters", "system", "template", *NAMES)
    return NAMES if command == "/set" else ()


class CommandCompleter(Completer):
    """Tab completion of commands, setting names and file names."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        command, space, argument = document.text_before_cursor.partition(" ")
        if command in ("/save", "/load") and space:
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), event)
            return
        known = tuple(f"/{name}" for name in COMMANDS)
        prefix = command
        if space:
            known, prefix = _arguments(command), argument
        if prefix:
            matches = (name for name in known if name.startswith(prefix))
            yield from (Completion(name, -len(prefix)) for name in matches)


def _key_bindings() -> KeyBindings:
    """Enter sends, except inside an open fence; Alt-Enter (or Esc, Enter) inserts a newline.

    A bracketed paste arrives as one event, so its newlines do not count as Enter. Tab completes.
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
        request = CompleteEvent(completion_requested=True)
        found = list(CommandCompleter().get_completions(buffer.document, request))
        if len(found) == 1:  # applied synchronously: the next key may be Enter
            buffer.apply_completion(found[0])
        elif buffer.complete_state is not None:
            buffer.complete_next()
        elif found:
            buffer.start_completion(insert_common_part=True)

    return bindings
