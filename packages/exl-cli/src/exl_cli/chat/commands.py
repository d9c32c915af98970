"""Slash commands of `exl chat`: parsing, help texts and implementation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exl_cli import config
from exl_cli.chat import presets, transcript
from exl_core.errors import RequestError
from exl_core.session.pulled import pulled_models

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
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1, cutoff=0.5)
        raise RequestError(
            f"there is no command /{name}",
            next_step=(f"The nearest is /{near[0]}. " if near else "") + "/help lists them.",
        )
    return name, match[2] or ""


def _help(_session: ChatSession, _argument: str) -> Outcome:
    lines = [f"{command.usage:<21}{command.what}" for command in COMMANDS.values()]
    return Outcome(note="\n".join([*lines, "", KEYS]))


def _set(session: ChatSession, argument: str) -> Outcome:
    argument = argument.removeprefix("parameter ").strip()  # as in ollama
    name, _, value = argument.partition(" ")
    name, value = SWITCHES.get(argument, (name, value.strip()))
    if name == "system":
        return _system(session, value)
    if not value:
        return Outcome(note=_shown(session, name))
    session.settings.set(name, value, session.tokenizer)
    now = next(iter(session.settings.shown(name).values()))
    return Outcome(note=f"{name} is now {now}.")


def _shown(session: ChatSession, name: str) -> str:
    shown = session.settings.shown(name)
    return "\n".join(f"{key:<20}{text}" for key, text in shown.items())


def _show(session: ChatSession, argument: str) -> Outcome:
    name = argument.strip()
    if name in ("", "info"):
        return Outcome(note=session.description())
    if name in ("parameters", "settings"):
        return Outcome(note=_shown(session, ""))
    if name == "system":
        return _system(session, "")
    if name == "template":
        return Outcome(note=session.style.source or "The model has no chat template.")
    return Outcome(note=_shown(session, name))


def _model(session: ChatSession, argument: str) -> Outcome:
    if not argument.strip():
        return Outcome(note=session.description())
    return Outcome(note=session.use_model(argument.strip()))


def _models(_session: ChatSession, _argument: str) -> Outcome:
    names = [model.name for model in pulled_models() if model.is_complete]
    return Outcome(note="\n".join([*names, "", "/model NAME talks to one of them, or to a path."]))


def _system(session: ChatSession, argument: str) -> Outcome:
    conversation = session.conversation
    if not argument:
        return Outcome(note=conversation.system or _without_system(session))
    conversation.system = session.style.no_system() if argument == "none" else argument
    return Outcome(note="The system prompt is changed.")


def _without_system(session: ChatSession) -> str:
    if session.has_default_system:
        return "No system prompt except the model's default."
    return "No system prompt."


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
    name = _unquoted(argument)
    if presets.is_preset_name(name):
        path = presets.save_preset(name, session.preset())
        said = f"Saved model, system prompt and settings to {path}: exl chat --profile {name}."
        return Outcome(note=f"{said} A path, as in /save {name}.json, saves the conversation.")
    path = _path(name, "/save NAME or /save FILE.json")
    transcript.save(session.conversation, path, session.model_name)
    return Outcome(note=f"Saved {len(session.conversation.turns) // 2} turns to {path}.")


def _load(session: ChatSession, argument: str) -> Outcome:
    name = _unquoted(argument)
    if presets.is_preset_name(name) and not Path(name).exists():
        return _load_preset(session, name)
    path = _path(name, "/load NAME or /load FILE.json")
    system, turns = transcript.load(path)
    session.conversation.system = system
    session.conversation.replace(turns)
    return Outcome(note=f"Loaded {len(turns) // 2} turns from {path}, replacing the conversation.")


def _load_preset(session: ChatSession, name: str) -> Outcome:
    values = dict(config.profile(name))
    model, system = values.pop(config.MODEL, None), values.pop("system", None)
    notes = [] if model in (None, session.spec) else [session.use_model(str(model))]
    if isinstance(system, str):
        session.conversation.system = session.style.usable(system)
    left = session.settings.apply(values, session.tokenizer)
    notes.append(f"The preset {name} is applied.")
    if left:
        notes.append(f"Only 'exl chat --profile {name}' applies {', '.join(left)}.")
    return Outcome(note="\n".join(notes))


def _unquoted(argument: str) -> str:
    """The argument without the quotes that people put around a path with spaces, as in a shell."""
    text = argument.strip()
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if is_quoted else text


def _path(name: str, usage: str) -> Path:
    if not name:
        raise RequestError("no file is named", expected=usage)
    return Path(name).expanduser()


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
    "show": Command(
        "/show [WHAT]", "the model; or: parameters, system, template, or a setting", _show
    ),
    "system": Command(
        "/system [TEXT]", "set the system prompt ('none': off); alone: show", _system
    ),
    "model": Command("/model [NAME]", "talk to another model; alone: show this one", _model),
    "models": Command("/models", "list the models on this machine", _models),
    "retry": Command("/retry", "generate another reply to the last message", _retry),
    "edit": Command("/edit", "edit the last message and send it again", _edit),
    "undo": Command("/undo", "remove the last message and its reply", _undo),
    "save": Command("/save NAME | FILE", "save a preset, or the conversation to a file", _save),
    "load": Command("/load NAME | FILE", "apply a preset, or continue a conversation", _load),
    "clear": Command("/clear", "clear the conversation; the system prompt stays", _clear),
    "stats": Command("/stats", "show or hide the speed after each reply", _stats),
    "bye": Command("/bye, /exit, /quit", "exit (so does Ctrl-D)", _leave),
}
ALIASES = {
    **{"?": "help", "exit": "bye", "quit": "bye", "q": "bye", "regen": "retry"},
    **{"list": "models", "ls": "models", "new": "clear", "reset": "clear"},
}
SWITCHES = {
    **{"verbose": ("stats", "on"), "quiet": ("stats", "off")},
    **{"wordwrap": ("wrap", "on"), "nowordwrap": ("wrap", "off")},
    **{"history": ("amnesia", "off"), "nohistory": ("amnesia", "on")},
}
"""Settings that ollama switches by one word."""
KEYS = (
    'Alt-Enter, or Esc then Enter, starts a new line; lines between """ and """ are one message.\n'
    "Ctrl-C stops a reply but not the chat. Tab completes commands, settings and file names."
)
