"""Prompt formats by name: how a conversation is written where no chat template is followed.

The formats are data, in `formats.toml`. A format puts pieces of text together, one for each turn,
and says what ends a reply; it knows no tokenizer. Keys of an entry, of which `like` takes those
that it does not have from another one:

    about, model, also     what it is for; the model whose card it follows; other names
    bos                    whether the tokenizer's BOS comes first, where it has one
    special                whether the text of special tokens in the result becomes these tokens
    start                  before everything
    start_without_system   what follows it where there is no system prompt
    default_system         the system prompt where none is asked for
    system                 its turn; or `first_user_with_system`, `last_user_with_system`: the
                           user's turn that takes it in
    user, reply            a turn of the user; a finished reply
    opening                what a reply is written after; without it, `reply` up to its text
    stop                   texts that end a reply, besides EOS: tokens where the vocabulary has them
    reasoning              the tags around reasoning

A reply in the context has no reasoning in it, so no piece has room for it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from exl_core.errors import RequestError, TemplateError
from exl_core.prompt.reasoning import CLOSING, OPENING

_DATA = "formats.toml"
_PLACE = re.compile(r"\{(system|user|reply)\}")  # any other brace is text


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """One entry of `formats.toml`, with what its keys default to."""

    name: str
    about: str
    user: str
    reply: str
    opening: str
    stop: tuple[str, ...]
    model: str | None = None
    also: tuple[str, ...] = ()
    bos: bool = False
    special: bool = True
    start: str = ""
    start_without_system: str = ""
    default_system: str | None = None
    system: str | None = None
    first_user_with_system: str | None = None
    last_user_with_system: str | None = None
    reasoning: tuple[str, str] = (OPENING, CLOSING)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The conversation as text, up to where the model replies; a BOS is not part of it.

        A system message may come first, then those of user and assistant.
        """
        turns = [(str(message["role"]), str(message["content"])) for message in messages]
        system = turns.pop(0)[1] if turns and turns[0][0] == "system" else None
        parts = [self.start]
        if system is None:
            parts.append(self.start_without_system)
        elif self.system is not None:
            parts.append(_fill(self.system, system=system))
        users = [index for index, (role, _) in enumerate(turns) if role == "user"]
        for index, (role, content) in enumerate(turns):
            if role == "assistant":
                parts.append(_fill(self.reply, reply=content))
            elif role == "user":
                piece = self.user
                if system is not None and index == users[0]:
                    piece = self.first_user_with_system or piece
                if system is not None and index == users[-1]:
                    piece = self.last_user_with_system or piece
                parts.append(_fill(piece, system=system or "", user=content))
            else:
                raise TemplateError(
                    f"the format {self.name!r} has no place for a message",
                    expected="'user' and 'assistant', after at most one 'system'",
                    got=repr(role),
                )
        return "".join([*parts, self.opening])

    def stops(self, special_tokens: Mapping[str, int]) -> tuple[frozenset[int], tuple[str, ...]]:
        """What ends a reply besides EOS: ids of tokens, and texts that are none in this vocabulary.

        Where special tokens are not read from text, the model writes them as text too: then both.
        """
        ids = frozenset(special_tokens[text] for text in self.stop if text in special_tokens)
        texts = (text for text in self.stop if text not in special_tokens or not self.special)
        return ids, tuple(texts)


def _fill(piece: str, **texts: str) -> str:
    """In one go, so that a text may hold what looks like a place for another."""
    return _PLACE.sub(lambda place: texts[place[1]], piece)


@cache
def all_formats() -> dict[str, PromptFormat]:
    """By name, without the other names, in the order of the file."""
    text = files(__package__).joinpath(_DATA).read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    return {name: _read(name, entries) for name in entries}


def find_format(name: str) -> PromptFormat:
    """By any of its names; raises RequestError with the nearest one."""
    names = {
        other: known for known in all_formats().values() for other in (known.name, *known.also)
    }
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise RequestError(
            "there is no prompt format of this name",
            expected="a name that 'exl chat --list-formats' shows",
            got=name,
            next_step=f"Did you mean {near[0]}?" if near else None,
        )
    return names[name]


def _read(name: str, entries: Mapping[str, dict[str, object]]) -> PromptFormat:
    entry = dict(entries[name])
    like = entry.pop("like", None)
    if like is not None:
        inherited = dict(entries[str(like)])
        inherited.pop("also", None)
        if "reply" in entry:  # what it opens with goes with it
            inherited.pop("opening", None)
        entry = inherited | entry
    entry.setdefault("opening", str(entry["reply"]).partition("{reply}")[0])
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return PromptFormat(name=name, **values)  # type: ignore[arg-type]  # a test reads every entry
