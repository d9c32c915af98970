"""Transcript files of `/save` and `/load`: versioned JSON, written atomically, checked on load."""

from __future__ import annotations

from pathlib import Path

from exl_cli.chat.conversation import Conversation, Message
from exl_core.errors import RequestError
from exl_core.files import read_json_object, write_json

KIND = "exl-chat"
VERSION = 1
_LIMIT_BYTES = 256 * 2**20
_KEYS = {"role", "content", "reasoning_content"}


def save(conversation: Conversation, path: Path, model: str) -> None:
    """Write all turns, including those dropped from the context."""
    write_json(
        path,
        {
            "format": KIND,
            "version": VERSION,
            "model": model,
            "system": conversation.system,
            "messages": conversation.turns,
        },
    )


def load(path: Path) -> tuple[str | None, list[Message]]:
    """System prompt and turns; raises RequestError for a file that `save` did not write."""
    data = read_json_object(path, RequestError, _LIMIT_BYTES)
    if data.get("format") != KIND:
        raise _refusal(path, "is not a transcript of exl chat", f'"format": "{KIND}"')
    if data.get("version") != VERSION:
        raise _refusal(path, "has another version", f'"version": {VERSION}', data.get("version"))
    system, messages = data.get("system"), data.get("messages")
    if not (system is None or isinstance(system, str)):
        raise _refusal(path, "has a system prompt that is not a string", "a string or null")
    if not isinstance(messages, list) or len(messages) % 2:
        raise _refusal(path, "has no message pairs", "a list: user, assistant, user, ...")
    turns = []
    for number, message in enumerate(messages):
        role = "assistant" if number % 2 else "user"
        if not _is_message(message, role):
            raise _refusal(
                path, f"has a malformed message {number + 1}", f"strings, with role {role}"
            )
        turns.append(dict(message))
    return system, turns


def _is_message(message: object, role: str) -> bool:
    return (
        isinstance(message, dict)
        and {"role", "content"} <= message.keys() <= _KEYS
        and all(isinstance(text, str) for text in message.values())
        and message["role"] == role
    )


def _refusal(path: Path, fault: str, expected: str, got: object = None) -> RequestError:
    return RequestError(
        f"the file {fault}", where=path, expected=expected, got=None if got is None else repr(got)
    )
