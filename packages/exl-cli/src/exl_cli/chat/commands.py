"""Slash commands of `exl chat`: parsing, help texts and implementation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exl_cli.chat import transcript
from exl_core.errors import RequestError

if TYPE_CHECKING:
    from exl_cli.chat.session import ChatSession

_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
NOTHING_SAID = "nothing has been said yet"
FOR_PIPES = ("bye", "exit", "clear", "help", "stats")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effect of a command. With all defaults, the chat reads the next message."""

    note: str | None = None
    leaves: bool = False
    draft: str = ""
    """Initial text of the next message in the line editor."""
    is_edit: bool = False
    """True if the next message replaces the last one."""
    message: str | None = None
    """Message to answer as if the user had typed it."""


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    what: str
    run: Callable[[ChatSession, str], Outcome]


def parse(text: str, *, is_piped: bool) -> tuple[str, str] | None:
    """Name and argument of a command; None for a message to the model.

    On a terminal, an unknown command is an error: a typing mistake is more likely than a message
    that begins with a slash. Over a pipe, only the commands in `FOR_PIPES` are recognized. All
    other text is a message, so that piped text cannot read or write files.
    """
    match = _COMMAND.fullmatch(text)
    if match is None:
        return None
    name = ALIASES.get(match[1], match[1])
    if is_piped:
        return (name, match[2] or "") if name in FOR_PIPES else None
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        raise RequestError(
            f"there is no command /{name}",
            next_step=(f"The nearest is /{near[0]}. " if near else "") + "/help lists them.",
        )
    return name, match[2] or ""


def _help(_session: ChatSession, _argument: str) -> Outcome:
    lines = [f"{command.usage:<20}{command.what}" for command in COMMANDS.values()]
    return Outcome(note="\n".join([*lines, "", KEYS]))


def _set(session: ChatSession, argument: str) -> Outcome:
    name, _, value = argument.partition(" ")
    if not value.strip():
        shown = session.settings.shown(name)
        return Outcome(note="\n".join(f"{key:<20}{text}" for key, text in shown.items()))
    session.settings.set(name, value.strip(), session.tokenizer)
    now = next(iter(session.settings.shown(name).values()))
    return Outcome(note=f"{name} is now {now}.")


def _system(session: ChatSession, argument: str) -> Outcome:
    conversation = session.conversation
    if not argument:
        return Outcome(note=conversation.system or "No system prompt except the model's default.")
    conversation.system = session.style.no_system() if argument == "none" else argument
    return Outcome(note="The system prompt is changed.")


def _retry(session: ChatSession, _argument: str) -> Outcome:
    return Outcome(message=_last(session))


def _edit(session: ChatSession, _argument: str) -> Outcome:
    users = [turn["content"] for turn in session.conversation.turns if turn["role"] == "user"]
    if not users:
        raise RequestError(NOTHING_SAID)
    return Outcome(draft=users[-1], is_edit=True)


def _undo(session: ChatSession, _argument: str) -> Outcome:
    _last(session)
    return Outcome(note="The last message and its reply are removed.")


def _last(session: ChatSession) -> str:
    message = session.conversation.take_back()
    if message is None:
        raise RequestError(NOTHING_SAID)
    return message


def _save(session: ChatSession, argument: str) -> Outcome:
    path = _path(argument, "/save FILE")
    transcript.save(session.conversation, path, session.model_name)
    return Outcome(note=f"Saved {len(session.conversation.turns) // 2} turns to {path}.")


def _load(session: ChatSession, argument: str) -> Outcome:
    path = _path(argument, "/load FILE")
    system, turns = transcript.load(path)
    session.conversation.system = system
    session.conversation.replace(turns)
    return Outcome(note=f"Loaded {len(turns) // 2} turns from {path}, replacing the conversation.")


def _path(argument: str, usage: str) -> Path:
    if not argument.strip():
        raise RequestError("no file is named", expected=usage)
    return Path(argument.strip()).expanduser()


def _clear(session: ChatSession, _argument: str) -> Outcome:
    session.conversation.clear()
    return Outcome(note="The conversation is cleared; the system prompt stays.")


def _stats(session: ChatSession, _argument: str) -> Outcome:
    is_on = not session.settings.chat.stats
    session.settings.set("stats", "on" if is_on else "off")
    return Outcome(note=f"Speed is {'shown' if is_on else 'hidden'}.")


def _leave(_session: ChatSession, _argument: str) -> Outcome:
    return Outcome(leaves=True)


COMMANDS = {
    "help": Command("/help, /?", "show this list", _help),
    "set": Command("/set [NAME [VALUE]]", "change or show a setting; alone: show all", _set),
    "system": Command(
        "/system [TEXT]", "set the system prompt ('none': off); alone: show", _system
    ),
    "retry": Command("/retry", "generate another reply to the last message", _retry),
    "edit": Command("/edit", "edit the last message and send it again", _edit),
    "undo": Command("/undo", "remove the last message and its reply", _undo),
    "save": Command("/save FILE", "save the conversation to a file", _save),
    "load": Command("/load FILE", "load a conversation and continue it", _load),
    "clear": Command("/clear", "clear the conversation; the system prompt stays", _clear),
    "stats": Command("/stats", "show or hide the speed after each reply", _stats),
    "bye": Command("/bye, /exit", "exit (so does Ctrl-D)", _leave),
}
ALIASES = {"?": "help", "exit": "bye", "regen": "retry", "show": "set"}
KEYS = (
    'Alt-Enter, or Esc then Enter, starts a new line; lines between """ and """ are one message.\n'
    "Ctrl-C stops a reply but not the chat. Tab completes commands, settings and file names."
)
