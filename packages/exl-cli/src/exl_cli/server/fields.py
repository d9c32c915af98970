"""Settings in a request body: their names, how each is read, and the part of the engine it goes to.

`settings.py` has the tables. A table is a list of rows; this module reads a body by its rows. Null
counts as absent. A field that is in no row and that the caller does not know either is returned as
unknown. Knows neither HTTP routes nor models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from exl_cli.server.errors import ApiError

JsonSchema = dict[str, Any]
_DIGITS = re.compile("-?[0-9]{1,32}")


class Goes(Enum):
    """Where the value of a field goes."""

    SAMPLER = "sampler"  # an argument of SamplerParams
    REPLY = "reply"  # a field of `Settings`
    TEMPLATE = "template"  # a variable of the chat template
    NOWHERE = "nowhere"  # known, and without effect on this server
    REFUSED = "refused"  # not supported: only a neutral value is accepted


@dataclass(frozen=True, slots=True)
class Kind:
    """Type of a field. `read` converts a JSON value, or raises ValueError. `schema` is the type in
    the OpenAPI document."""

    read: Callable[[Any], Any]
    schema: JsonSchema


@dataclass(frozen=True, slots=True)
class Row:
    """One field.

    name    its name in this server's API
    kind    its type
    goes    where its value goes
    target  the name there
    also    names that other servers' clients send
    """

    name: str
    kind: Kind
    goes: Goes
    target: str
    also: tuple[str, ...] = ()


class Table:
    """Rows by every name. `names` lists all of them."""

    def __init__(self, *groups: Iterable[Row]) -> None:
        self.rows = tuple(row for group in groups for row in group)
        self._by_name: dict[str, Row] = {}
        for row in self.rows:
            for name in (row.name, *row.also):
                assert name not in self._by_name, f"{name} has two rows"
                self._by_name[name] = row

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def split(
        self, body: Mapping[str, object]
    ) -> tuple[dict[Goes, dict[str, Any]], dict[str, Any]]:
        """Read all fields that have a row. Returns their values by place and target, and the
        fields without a row."""
        values: dict[Goes, dict[str, Any]] = {goes: {} for goes in Goes}
        others: dict[str, Any] = {}
        used: dict[str, str] = {}
        for name, given in body.items():
            row = self._by_name.get(name)
            if row is None:
                others[name] = given
            elif given is not None:
                value = _read(row, name, given)
                place = values[row.goes]
                if row.target in place and place[row.target] != value:
                    raise _invalid(
                        f"{used[row.target]} and {name} are the same and have different values; "
                        "send one",
                        name,
                    )
                place[row.target] = value
                used[row.target] = name
        return values, others

    def properties(self) -> JsonSchema:
        """Properties of the OpenAPI document."""
        found: JsonSchema = {}
        for row in self.rows:
            schema: JsonSchema = {"anyOf": [row.kind.schema, {"type": "null"}]}
            about = _about(row)
            if about:
                schema["description"] = about
            found[row.name] = schema
        return found


def _about(row: Row) -> str:
    said = [f"Also: {', '.join(row.also)}."] if row.also else []
    if row.goes is Goes.NOWHERE:
        said.append("Has no effect.")
    return " ".join(said)


def _read(row: Row, name: str, given: object) -> object:
    try:
        return row.kind.read(given)
    except ValueError as error:
        if row.goes is Goes.REFUSED:
            message = f"{name}: this server does not support it; {error} or leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter") from error
        raise _invalid(f"{name}: {error}", name) from error


def _invalid(message: str, name: str) -> ApiError:
    return ApiError(400, message, param=name[:200], code="invalid_value")


# Rows


def sampler(name: str, kind: Kind, *also: str, to: str | None = None) -> Row:
    return Row(name, kind, Goes.SAMPLER, to or name, also)


def reply(name: str, kind: Kind, *also: str, to: str | None = None) -> Row:
    return Row(name, kind, Goes.REPLY, to or name, also)


def variable(name: str, kind: Kind, *also: str) -> Row:
    return Row(name, kind, Goes.TEMPLATE, name, also)


def inert(*names: str) -> tuple[Row, ...]:
    """Fields without effect here, whatever their value."""
    return tuple(Row(name, _ANYTHING, Goes.NOWHERE, name) for name in names)


def unsupported(name: str, *neutral: object) -> Row:
    """A field that would change the result and that the server lacks. `neutral`: values that change
    nothing. False, 0 and empty values are always neutral."""
    return Row(name, _only(neutral), Goes.REFUSED, name)


# Kinds


def number(low: float, high: float, *, replace: Mapping[float, float] | None = None) -> Kind:
    """A number from `low` to `high`; as text too, like OpenAI. `replace`: values that stand for
    others."""

    def read(given: object) -> float:
        value = _number(given)
        value = (replace or {}).get(value, value)
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g} is expected, not {value:g}")
        return value

    return Kind(read, {"type": "number", "minimum": low, "maximum": high})


def whole(low: int, high: int = 2**31 - 1, *, replace: Mapping[int, int] | None = None) -> Kind:
    """A whole number from `low` to `high`; as text or as 5.0 too."""

    def read(given: object) -> int:
        value = _whole(given)
        value = (replace or {}).get(value, value)
        if not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high} is expected, not {value}")
        return value

    return Kind(read, {"type": "integer", "minimum": low, "maximum": high})


def seed() -> Kind:
    """A seed; -1 is a random one, as in llama.cpp."""

    def read(given: object) -> int | None:
        value = _whole(given)
        if not -(2**63) <= value < 2**64:
            raise ValueError("a whole number of at most 64 bits is expected")
        return None if value == -1 else value % 2**63

    return Kind(read, {"type": "integer"})


def flag() -> Kind:
    def read(given: object) -> bool:
        if given in (True, False) and isinstance(given, bool | int):
            return bool(given)
        raise ValueError("true or false is expected")

    return Kind(read, {"type": "boolean"})


def text(*, max_length: int | None = None) -> Kind:
    def read(given: object) -> str:
        if not isinstance(given, str):
            raise ValueError("a text is expected")
        if max_length is not None and len(given) > max_length:
            raise ValueError(f"at most {max_length} characters are expected")
        return given

    return Kind(read, {"type": "string"})


def texts(*, max_items: int, max_length: int) -> Kind:
    """A text or a list of texts. Empty texts are dropped: they say nothing."""

    def read(given: object) -> tuple[str, ...]:
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ValueError("a text or a list of texts is expected")
        found = tuple(dict.fromkeys(one for one in listed if one))
        if len(found) > max_items:
            raise ValueError(f"at most {max_items} texts are expected")
        if any(len(one) > max_length for one in found):
            raise ValueError(f"texts of at most {max_length} characters are expected")
        return found

    of_texts = {"type": "array", "items": {"type": "string"}}
    return Kind(read, {"anyOf": [{"type": "string"}, of_texts]})


def one_of(*values: str) -> Kind:
    def read(given: object) -> object:
        if not isinstance(given, str) or given not in values:
            raise ValueError(f"one of {', '.join(values)} is expected")
        return given

    return Kind(read, {"enum": list(values)})


def custom(read: Callable[[Any], object], schema: JsonSchema | None = None) -> Kind:
    """`schema` None: an object or a text."""
    return Kind(read, schema or {"anyOf": [{"type": "object"}, {"type": "string"}]})


def _only(neutral: Sequence[object]) -> Kind:
    empty: tuple[object, ...] = (False, 0, "", [], {})
    listed = [*neutral, *(value for value in empty if value not in neutral)]

    def read(given: object) -> None:
        if any(given == value for value in listed):
            return
        said = " or ".join(repr(value) for value in neutral) or "a neutral value"
        raise ValueError(f"send {said}")

    return Kind(read, {"enum": [value for value in listed if not isinstance(value, list | dict)]})


def _number(given: object) -> float:
    value = math.nan
    if isinstance(given, int | float) and not isinstance(given, bool):
        value = float(given) if abs(given) < 2**1000 else math.inf
    elif isinstance(given, str) and len(given) <= 64 and given.isascii():
        try:
            value = float(given)
        except ValueError:
            value = math.nan
    if not math.isfinite(value):
        raise ValueError("a number is expected")
    return value


def as_whole(given: object) -> Any:
    """5 for 5.0, and any other value as it is. Languages without integers send 5.0.

    Every field for whole numbers reads its values with it: the settings in `settings.py`, lists of
    token ids, and the fields of bodies in pydantic.
    """
    if isinstance(given, float) and given.is_integer() and abs(given) <= 2**53:
        return int(given)
    return given


def all_as_whole(given: object) -> Any:
    """A list with `as_whole` of its elements, and any other value as it is."""
    if isinstance(given, list) and float in set(map(type, given)):  # 10 ns for each element
        return [as_whole(one) for one in given]
    return given


def _whole(given: object) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        if given.bit_length() > 128:
            raise ValueError("a whole number of fewer digits is expected")
        return given
    if isinstance(given, str) and _DIGITS.fullmatch(given):
        return int(given)
    value = as_whole(_number(given))
    if not isinstance(value, int):
        raise ValueError("a whole number is expected")
    return value


_ANYTHING = Kind(lambda given: given, {})
