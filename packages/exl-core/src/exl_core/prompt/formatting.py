"""Size checks for the string methods, `%` and `format` that a template calls.

Each check bounds the size of the result and raises before memory is allocated. Arguments of a wrong
type pass the checks; the operation itself raises the error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from string import Formatter
from typing import Any

from exl_core.prompt.budget import check_width, current_budget, refusal
from exl_core.prompt.tracked import TrackedText, concat, template_text

# Methods that templates use. The others can expand their input without limit (`translate`,
# `expandtabs`) or return types that templates do not need (`encode`).
TEXT_METHODS = frozenset(
    """
    capitalize casefold center count endswith find format format_map index isalnum isalpha isascii
    isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition
    removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
    """.split()  # noqa: SIM905 - a list would take forty lines
)
LIST_METHODS = frozenset({"copy", "count", "index"})
MAPPING_METHODS = frozenset({"copy", "get", "items", "keys", "values"})

_PERCENT = re.compile(r"[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")
_DIGITS = re.compile(r"\d+")


def check_text_method(text: str, name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Check a call of a string method and return the arguments to call it with."""
    current_budget().step(len(text))
    if name == "replace" and len(args) >= 2:
        check_replace(text, args[0], args[1])
    elif name == "join" and args:
        items = list(args[0])
        check_join(items, text)
        return [items, *args[1:]]
    elif name in ("center", "ljust", "rjust", "zfill") and args:
        check_width(args[0])
    return args


def check_replace(text: str, old: object, new: object) -> None:
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old) if old else len(text) + 1
        current_budget().expect(len(text) + found * len(new))


def check_join(items: Sequence[object], separator: object) -> None:
    between = len(separator) if isinstance(separator, str) else 1
    weights = map(current_budget().weigh, items)
    current_budget().expect(sum(weights) + between * len(items))


def check_indent(text: object, width: object) -> None:
    check_width(width)
    size = len(width) if isinstance(width, str) else width
    if isinstance(text, str) and isinstance(size, int):
        current_budget().expect(len(text) + size * (1 + len(text.splitlines())))


def check_percent(text: str, values: object) -> None:
    """Check `text % values` before it is computed."""
    widths = list(_percent_widths(text))
    weight = current_budget().weigh(values)
    if isinstance(values, Mapping):  # a value may be written by several fields
        weight *= len(widths)
    current_budget().expect(len(text) + weight + sum(widths))


def _percent_widths(text: str) -> Iterator[int]:
    """Width plus precision of each field."""
    position = text.find("%")
    while position >= 0:
        position += 1
        if text.startswith("(", position):
            end = text.find(")", position)
            if end < 0 or "(" in text[position + 1 : end]:
                raise refusal("names a field with brackets in it")
            position = end + 1
        match = _PERCENT.match(text, position)
        found = ("",) if match is None else match.groups(default="")
        if "*" in found:
            raise refusal("takes the width of a field from its values")
        yield sum(_checked_number(digits) for digits in found if digits)
        position = text.find("%", (position if match is None else match.end()) + 1)


def _checked_number(digits: str) -> int:
    number = int(digits[:9])  # any number with more digits is too large
    check_width(number if len(digits) < 9 else 10**9)
    return number


class BoundedFormatter(Formatter):
    """`str.format` whose fields are looked up by the sandbox and whose widths are bounded."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._weight = 0

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        if not isinstance(format_string, TrackedText) or 0 in format_string.trusted:
            return super().vformat(format_string, args, kwargs)
        numbers = count()
        parts: list[str] = []
        for literal, name, spec, conversion in self.parse(format_string):
            parts.append(template_text(literal))
            if name is None:
                continue
            number = next(numbers) if name[:1] in ("", ".", "[") else ""
            value, _ = self.get_field(f"{number}{name}", args, kwargs)
            width = super().vformat(spec or "", args, kwargs)
            parts.append(self.format_field(self.convert_field(value, conversion), width))
        return concat(parts)

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        from jinja2.sandbox import SandboxedFormatter

        field: tuple[Any, str] = SandboxedFormatter(self._environment).get_field(
            field_name, args, kwargs
        )
        return field

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in _DIGITS.findall(format_spec):
            _checked_number(digits)
        text = str(super().format_field(value, format_spec))
        current_budget().made(text)
        self._weight += len(text)
        current_budget().expect(self._weight)
        return text
