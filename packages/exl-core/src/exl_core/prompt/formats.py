"""Named prompt formats, which write a conversation as text without a chat template.

The formats are data, in `formats.toml`. A format joins one piece of text per turn and defines the
texts that end a reply. It does not use a tokenizer. Keys of an entry:

    like                   entry from which missing keys are inherited
    about, model, also     description; the model whose card it follows; other names
    bos                    the tokenizer's BOS, if it has one, comes first
    special                special tokens in the text are encoded as these tokens
    start                  text before everything else
    start_without_system   text after `start` if there is no system prompt
    default_system         system prompt if the caller gives none
    system                 turn of the system prompt
    first_user_with_system, last_user_with_system
                           turn of the user that contains the system prompt, instead of `system`
    user, reply            turn of the user; complete reply
    opening                text before a reply; by default the part of `reply` before its text
    stop                   texts that end a reply besides EOS; tokens if the vocabulary has them
    reasoning              tags around reasoning

Earlier replies are written without their reasoning, so that no piece has a place for it.
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
from exl_core.prompt.tracked import TrackedText, concat, template_text, tracked

_DATA = "formats.toml"
_PLACE = re.compile(r"\{(system|user|reply)\}")  # all other braces are text


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """One entry of `formats.toml`, with the defaults of its keys."""

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

    def render(self, messages: Sequence[Mapping[str, object]]) -> TrackedText:
        """Conversation as text, up to the place of the next reply, without BOS.

        The first message may be of the system; all others are of user and assistant. The result is
        a `TrackedText`: texts of messages are not trusted.
        """
        turns = [(str(message["role"]), str(message["content"])) for message in messages]
        system = turns.pop(0)[1] if turns and turns[0][0] == "system" else None
        parts: list[str] = [template_text(self.start)]
        if system is None:
            parts.append(template_text(self.start_without_system))
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
        return tracked(concat([*parts, template_text(self.opening)]))

    @property
    def source(self) -> str:
        """All text that the format itself writes, as the source of a chat template has it."""
        pieces = (self.start, self.start_without_system, self.user, self.reply, self.opening)
        systems = (self.system, self.first_user_with_system, self.last_user_with_system)
        return "\n".join([*pieces, *filter(None, systems)])

    def stops(self, special_tokens: Mapping[str, int]) -> tuple[frozenset[int], tuple[str, ...]]:
        """Stop token ids and stop strings besides EOS.

        A stop text that is a special token of this vocabulary becomes an id. If the format does not
        encode special tokens (`special`), the model may spell them, so that they are strings too.
        """
        ids = frozenset(special_tokens[text] for text in self.stop if text in special_tokens)
        texts = (text for text in self.stop if text not in special_tokens or not self.special)
        return ids, tuple(texts)


def _fill(piece: str, **texts: str) -> str:
    """Substitute all places in one pass, so that a text may contain `{user}` and the like."""
    parts = _PLACE.split(piece)  # text, name, text, name, ..., text
    parts[::2] = map(template_text, parts[::2])
    parts[1::2] = [texts[name] for name in parts[1::2]]
    return concat(parts)


@cache
def all_formats() -> dict[str, PromptFormat]:
    """Formats by their main name, in the order of the file."""
    text = files(__package__).joinpath(_DATA).read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    return {name: _read(name, entries) for name in entries}


def find_format(name: str) -> PromptFormat:
    """Format with this name or other name; the RequestError suggests the nearest name."""
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
        if "reply" in entry:  # an inherited `opening` belongs to the inherited `reply`
            inherited.pop("opening", None)
        entry = inherited | entry
    entry.setdefault("opening", str(entry["reply"]).partition("{reply}")[0])
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return PromptFormat(name=name, **values)  # type: ignore[arg-type]  # a test reads every entry
