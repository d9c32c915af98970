"""jinja2's filters with budget checks, and replacements for a few of them.

A filter whose output can be much larger than its input (`center`, `replace`, `sum` of lists) is
checked before it runs. Filters that only format web pages are removed, because some of them take
quadratic time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jinja2 import pass_environment
from jinja2.filters import make_attrgetter

from exl_core.prompt.budget import check_width, current_budget, refusal
from exl_core.prompt.formatting import check_indent, check_join, check_percent, check_replace
from exl_core.prompt.tracked import as_text, join, tracked

_REMOVED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_MAX_INDENT = 64
_MAX_DECIMALS = 100
_MAX_PARTS = 1_000_000

Filter = Callable[..., Any]


def bounded_filters(filters: Mapping[str, Filter]) -> dict[str, Filter]:
    kept = {name: found for name, found in filters.items() if name not in _REMOVED}
    kept |= {
        "join": _join,
        "replace": _replace,
        "string": as_text,
        "sum": _sum,
        "tojson": to_json,
    }
    return {name: _bounded(found, _CHECKS.get(name)) for name, found in kept.items()}


def _bounded(original: Filter, check: Filter | None) -> Filter:
    takes_context = getattr(original, "jinja_pass_arg", None) is not None

    @wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.step()
        if check is not None:
            check(*(args[1:] if takes_context else args), **kwargs)
        return budget.made(original(*args, **kwargs))

    return bounded


def _check_center(_value: object, width: object = 80) -> None:
    check_width(width)


def _check_indent(text: object, width: object = 4, *_: object, **__: object) -> None:
    check_indent(text, width)


def _check_replace(text: object, old: object, new: object, *_: object, **__: object) -> None:
    check_replace(str(text), old, new)


def _check_format(text: object, *args: object, **kwargs: object) -> None:
    check_percent(str(text), kwargs or args)


def _check_round(_value: object, precision: object = 0, *_: object, **__: object) -> None:
    if isinstance(precision, int) and abs(precision) > _MAX_DECIMALS:
        raise refusal(f"rounds to more than {_MAX_DECIMALS} decimals")


def _check_batch(_value: object, linecount: object, *_: object, **__: object) -> None:
    if isinstance(linecount, int) and linecount > _MAX_PARTS:
        raise refusal(f"makes parts of more than {_MAX_PARTS} elements")


def _check_slice(_value: object, slices: object, *_: object, **__: object) -> None:
    if isinstance(slices, int) and slices > _MAX_PARTS:
        raise refusal(f"makes more than {_MAX_PARTS} parts")


_CHECKS: dict[str, Filter] = {
    "center": _check_center,
    "indent": _check_indent,
    "replace": _check_replace,
    "format": _check_format,
    "round": _check_round,
    "batch": _check_batch,
    "slice": _check_slice,
}


@pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    items = list(value)
    check_join(items, d)
    return join(str(d), map(as_text, items))


def _replace(value: object, old: object, new: object, count: int | None = None) -> str:
    return tracked(str(value)).replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Uses the sandbox's `+`, which has checks, because a sum of lists takes quadratic time."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    total = start
    for value in iterable:
        total = environment.call_binop(None, "+", total, value)
    return total


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes, which models were not trained on."""
    budget = current_budget()
    budget.expect(budget.weigh(value))
    for text in (*(separators or ()), *([] if indent is None else [indent])):
        if (len(text) if isinstance(text, str) else text) > _MAX_INDENT:
            raise refusal(f"writes JSON with more than {_MAX_INDENT} characters between values")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    parts: list[str] = []
    weight = 0
    for part in encoder.iterencode(value):  # the output of nested values is mostly indent
        weight += len(part)
        budget.expect(weight)
        parts.append(part)
    return "".join(parts)
