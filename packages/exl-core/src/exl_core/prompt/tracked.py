"""Text that records which of its characters the chat template wrote.

A template mixes its own text with text of messages. Only the former may become special tokens. A
`TrackedText` is a `str` with one byte per character: 1 for a trusted character, which the template
wrote, 0 for any other. A plain `str` is untrusted throughout. The text of a `TrackedText` is always
that of the same operation on plain strings, so that a template takes the same branches. Methods
that have no version here return a plain `str`: what is lost is trust, never text.

This module knows neither templates nor tokens. `sandbox.py` makes literals of a template trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.hlL]*[a-zA-Z%]")


class TrackedText(str):
    """Text with its trusted characters. Equal to, and hashed like, the plain text."""

    __slots__ = ("trusted",)
    trusted: bytes

    def __new__(cls, text: str, trusted: bytes) -> TrackedText:
        made = super().__new__(cls, text)
        assert len(trusted) == len(made), "one byte per character"
        made.trusted = trusted
        return made

    def plain(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Any:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return concat((self, other))

    def __radd__(self, other: object) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> TrackedText:
        return TrackedText(str.__mul__(self, times), self.trusted * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> TrackedText:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            index = key.__index__()
            key = slice(index, index + 1 or None)
        return TrackedText(text, self.trusted[key])

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __mod__(self, values: Any) -> Any:
        if isinstance(values, tuple):
            left = list(values)
        elif isinstance(values, Mapping):
            left = None
        else:
            left = [values]
        expected = str.__mod__(self, values)
        parts: list[str] = []
        start = 0
        for field in _FIELD.finditer(str(self)):
            parts.append(self[start : field.start()])
            start = field.end()
            parts.append(_field_text(field[0], values if left is None else left))
        made = concat((*parts, self[start:]))
        return made if made == expected else expected

    def join(self, items: Iterable[str], /) -> str:
        return join(self, items)

    def strip(self, characters: str | None = None, /) -> TrackedText:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None, /) -> TrackedText:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None, /) -> TrackedText:
        return self[: len(str.rstrip(self, characters))]

    def removeprefix(self, prefix: str, /) -> TrackedText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> TrackedText:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        lines = self._located(str.splitlines(self, keepends=True), 0)
        if keepends:
            return lines
        return [line[: len(bare)] for line, bare in zip(lines, str.splitlines(self), strict=True)]

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        first, middle, last = self._located(str.partition(self, sep), 0)
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        first, middle, last = self._located(str.rpartition(self, sep), 0)
        return first, middle, last

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return join(new, self.split(old, count))

    def upper(self) -> str:
        return self._same_places(str.upper(self))

    def lower(self) -> str:
        return self._same_places(str.lower(self))

    def casefold(self) -> str:
        return self._same_places(str.casefold(self))

    def capitalize(self) -> str:
        return self._same_places(str.capitalize(self))

    def title(self) -> str:
        return self._same_places(str.title(self))

    def swapcase(self) -> str:
        return self._same_places(str.swapcase(self))

    def _located(self, parts: Iterable[str], gap: int) -> list[TrackedText]:
        """Parts in order with `gap` characters between; white space between them if it is 0."""
        found = []
        start = 0
        for part in parts:
            if not gap:
                start = self.index(part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + gap
        return found

    def _same_places(self, text: str) -> str:
        return TrackedText(text, self.trusted) if len(text) == len(self) else text


def template_text(text: str) -> TrackedText:
    """Text that a template wrote."""
    return TrackedText(text, b"\1" * len(text))


def tracked(text: str) -> TrackedText:
    return text if isinstance(text, TrackedText) else TrackedText(text, bytes(len(text)))


def as_text(value: object) -> str:
    """Text of a value. The template chose to write a number, whose digits are trusted."""
    if isinstance(value, str):
        return value
    return template_text(str(value)) if isinstance(value, int) else str(value)


def trusted_of(text: str) -> bytes:
    """One byte per character: 1 where a template wrote it."""
    return text.trusted if isinstance(text, TrackedText) else bytes(len(text))


def concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    text = "".join(parts)
    if not any(isinstance(part, TrackedText) for part in parts):
        return text
    return TrackedText(text, b"".join(map(trusted_of, parts)))


def join(separator: str, items: Iterable[str]) -> str:
    items = list(items)
    text = str.join(separator, items)
    if not any(isinstance(part, TrackedText) for part in (separator, *items)):
        return text
    return TrackedText(text, trusted_of(separator).join(map(trusted_of, items)))


def _field_text(field: str, values: Any) -> str:
    """Text of one field of `%`. Values in a list are taken from its front."""
    if field.endswith("%"):
        return template_text("%") if field == "%%" else field
    if not isinstance(values, list):
        name = field[2 : field.index(")")] if field.startswith("%(") else None
        value = values if name is None else values[name]
        bare = field if name is None else "%" + field[len(name) + 3 :]
    else:
        value, bare = values.pop(0), field
    if bare == "%s" and isinstance(value, TrackedText):
        return value
    return bare % (value,)
