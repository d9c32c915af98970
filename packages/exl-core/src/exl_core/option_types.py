"""Types and lower limits of options, checked where a caller gives them.

A value of the wrong type would fail later, in code that the caller does not know, or would count as
true. The annotations of a dataclass are the rules, so that an option states its type once.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from exl_core.errors import RequestError, wrong_type

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN: Mapping[object, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    NoneType: (NoneType, "None"),
}


def check_options(options: DataclassInstance, where: object = None, /, **at_least: int) -> None:
    """Raise RequestError for a field that its annotation excludes, or that is below its limit.

    `at_least`: lower limits of whole numbers, by field. A whole number of another type, such as
    numpy's, is replaced by an `int`.
    """
    for name, members in _fields_of(type(options)):
        value = getattr(options, name)
        _check(name, value, members, where)
        if isinstance(value, Integral) and not issubclass(type(value), int):
            object.__setattr__(options, name, int(value))
        low = at_least.get(name)
        if low is not None and value is not None and value < low:
            raise RequestError(
                f"{name} is too small", where=where, expected=f"at least {low}", got=value
            )


def check_option(name: str, value: object, kind: Any, where: object = None) -> None:
    """Raise RequestError for a single value that the annotation `kind` excludes."""
    _check(name, value, _members_of(kind), where)


@cache
def _fields_of(kind: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    return tuple((name, _members_of(hint)) for name, hint in get_type_hints(kind).items())


def _members_of(hint: Any) -> tuple[Any, ...]:
    """Alternatives of a union; any other annotation is the only one."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _check(name: str, value: object, members: tuple[Any, ...], where: object) -> None:
    if any(_fits(value, member) for member in members):
        return
    expected = " or ".join(map(_words, members))
    if isinstance(value, str) and all(get_origin(member) is Literal for member in members):
        raise RequestError(f"no such {name}", where=where, expected=expected, got=value[:100])
    raise wrong_type(name, expected, value, where=where)


def _fits(value: object, member: Any) -> bool:
    if get_origin(member) is Literal:
        return isinstance(value, str) and value in get_args(member)
    kind = _PLAIN[member][0] if member in _PLAIN else get_origin(member) or member
    return isinstance(value, kind) and (member is bool or not isinstance(value, bool))


def _words(member: Any) -> str:
    if get_origin(member) is Literal:
        return " or ".join(get_args(member))
    if member in _PLAIN:
        return _PLAIN[member][1]
    kind: type = get_origin(member) or member
    return " or ".join(map(str, kind)) if issubclass(kind, Enum) else f"a {kind.__name__}"
