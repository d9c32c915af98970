"""Slash commands of `exl chat`: what a person may ask of the chat itself."""

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
    """What follows a command. Without any of these: the next message is asked for."""

    note: str | None = None
    leaves: bool = False
    draft: str = ""
    """To begin the next message with."""
    is_edit: bool = False
    """Whether that takes the place of the last message."""
    message: str | None = None
    """To be answered as if it had been typed."""


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    what: str
    run: Callable[[ChatSession, str], Outcome]


def parse(text: str, *, is_piped: bool) -> tuple[str, str] | None:
    """Name and argument; None for a message to the model.

    On a terminal an unknown command is an error: it is a slip rather than a message. Over a pipe
    it is a message, and so are the commands that read or write files.
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
    session.settings.set(name, value.strip())
    return Outcome(note=f"{name} is {value.strip()} now.")


def _system(session: ChatSession, argument: str) -> Outcome:
    conversation = session.conversation
    if not argument:
        return Outcome(note=conversation.system or "There is no system prompt but the model's own.")
    conversation.system = session.style.no_system() if argument == "none" else argument
    return Outcome(note="The system prompt is another one from here on.")


def _retry(session: ChatSession, _argument: str) -> Outcome:
    return Outcome(message=_last(session))


def _edit(session: ChatSession, _argument: str) -> Outcome:
    users = [turn["content"] for turn in session.conversation.turns if turn["role"] == "user"]
    if not users:
        raise RequestError(NOTHING_SAID)
    return Outcome(draft=users[-1], is_edit=True)


def _undo(session: ChatSession, _argument: str) -> Outcome:
    _last(session)
    return Outcome(note="The last message and its reply are forgotten.")


def _last(session: ChatSession) -> str:
    message = session.conversation.take_back()
    if message is None:
        raise RequestError(NOTHING_SAID)
    return message


def _save(session: ChatSession, argument: str) -> Outcome:
    path = _path(argument, "/save FILE")
    transcript.save(session.conversation, path, session.model_name)
    return Outcome(note=f"{len(session.conversation.turns) // 2} turns are in {path}.")


def _load(session: ChatSession, argument: str) -> Outcome:
    path = _path(argument, "/load FILE")
    system, turns = transcript.load(path)
    session.conversation.system = system
    session.conversation.replace(turns)
    return Outcome(note=f"{len(turns) // 2} turns of {path} take the place of what was said.")


def _path(argument: str, usage: str) -> Path:
    if not argument.strip():
        raise RequestError("no file is named", expected=usage)
    return Path(argument.strip()).expanduser()


def _clear(session: ChatSession, _argument: str) -> Outcome:
    session.conversation.clear()
    return Outcome(note="The conversation is forgotten; the system prompt stays.")


def _stats(session: ChatSession, _argument: str) -> Outcome:
    is_on = not session.settings.chat.stats
    session.settings.set("stats", "on" if is_on else "off")
    return Outcome(note=f"Speed is {'shown' if is_on else 'hidden'}.")


def _leave(_session: ChatSession, _argument: str) -> Outcome:
    return Outcome(leaves=True)


COMMANDS = {
    "help": Command("/help, /?", "this list", _help),
    "set": Command("/set [NAME [VALUE]]", "a setting, such as temp; alone: all of them", _set),
    "system": Command("/system [TEXT]", "another system prompt, or 'none'; alone: which", _system),
    "retry": Command("/retry", "another reply to the last message", _retry),
    "edit": Command("/edit", "change the last message and send it again", _edit),
    "undo": Command("/undo", "forget the last message and its reply", _undo),
    "save": Command("/save FILE", "write the conversation to a file", _save),
    "load": Command("/load FILE", "go on with the conversation in a file", _load),
    "clear": Command("/clear", "forget the conversation; the system prompt stays", _clear),
    "stats": Command("/stats", "show or hide the speed after each reply", _stats),
    "bye": Command("/bye, /exit", "leave (so does Ctrl-D)", _leave),
}
ALIASES = {"?": "help", "exit": "bye", "regen": "retry", "show": "set"}
KEYS = (
    'Alt-Enter, or Esc and Enter, begins a new line; lines between """ and """ are one message.\n'
    "Ctrl-C stops a reply, and the conversation goes on. Tab completes commands, settings, files."
)
