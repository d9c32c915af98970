"""Bounds on constraints: what may be compiled, how long that may take, and how much memory.

Numbers that make a compiled constraint explode are refused here, before anything is compiled, with
the keyword and its place. These checks are cheap and find the known cases only. `trial.py` enforces
`CompileLimits` for everything else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from exl_core.constrain.filter import ConstraintError
from exl_core.constrain.json_recursion import list_of, target_of

MAX_COUNT = 1_000_000
"""Largest count in a keyword or a repeat: no reply holds a million characters, items or members."""
MAX_MULTIPLE = 100_000
"""Largest `multipleOf`, without its decimal point. The compiler visits one state per remainder:
0.3 s and 25 MB for 100,003 on one core."""
MAX_COMMON_MULTIPLE = 65_535
"""Largest least common multiple of several `multipleOf`. The library multiplies two of them in 32
bits, so that a larger one would silently become another number."""
MAX_DECIMALS = 8
"""Most decimals of `multipleOf`, for the same reason."""

_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "example", "examples")  # data, not schemas
_MOST_REFERENCES = 100  # followed one after the other in search of `multipleOf`

_REGEX_PARTS = re.compile(
    r"""
    \\.                                     # an escape
    | \[ \^? \]? (?: \\. | [^\]\\] )* \]    # a class
    | \{ (?P<low>\d+) (?: , (?P<high>\d*) )? \}
    """,
    re.VERBOSE | re.DOTALL,
)
_LARK_PARTS = re.compile(
    r"""
    "(?: \\. | [^"\\\n] )*"
    | //[^\n]* | \#[^\n]*
    | /(?P<regex> (?: \\. | [^/\\\n] )+ )/
    | %(?: json | regex ) \s* (?= \{ ) (?P<json>)
    | \{ \s* (?P<low>\d+) \s* (?: , \s* (?P<high>\d*) \s* )? \}
    | ~ \s* (?P<from>\d+) (?: \s* \.\. \s* (?P<to>\d+) )?
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of compiling one constraint.

    time_s        seconds of wall time
    memory_bytes  address space of the process that compiles it first
    characters    length of its text: schema, expression or grammar
    """

    time_s: float = 5.0
    memory_bytes: int = 512 * 2**20
    characters: int = 1_000_000


def check_length(text: str, limits: CompileLimits, what: str) -> None:
    if len(text) > limits.characters:
        raise ConstraintError(
            f"{what} is too long",
            expected=f"at most {limits.characters} characters",
            got=len(text),
        )


def check_schema(schema: object, what: str, *, where: str = "") -> None:
    """Refuse numbers that explode. `where` is put before each JSON pointer."""
    num_multiples = 0
    for pointer, node in _schemas_in(schema):
        for keyword in _COUNTS:
            count = node.get(keyword)
            if isinstance(count, int | float) and count > MAX_COUNT:
                raise _too_large(f"{keyword} in {what}", f"{where}{pointer}/{keyword}", count)
        if _is_number(node.get("multipleOf")):
            num_multiples += 1
            _check_multiple(node["multipleOf"], what, f"{where}{pointer}/multipleOf")
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            check_regex(pattern, f"the pattern in {what}", where=f"{where}{pointer}/pattern")
        by_pattern = node.get("patternProperties")
        for pattern in by_pattern if isinstance(by_pattern, Mapping) else ():
            place = f"{where}{pointer}/patternProperties/{_escaped(pattern)}"
            check_regex(pattern, f"the pattern in {what}", where=place)
    if num_multiples > 1:
        common = _CommonMultiples(schema, what, where)
        for pointer, node in _schemas_in(schema):
            common.check(node, pointer)


def check_regex(pattern: str, what: str, *, where: str | None = None) -> None:
    """Refuse repeats that explode."""
    for part in _REGEX_PARTS.finditer(pattern):
        _check_repeat(part[0], (part["low"], part["high"]), what, where)


def check_grammar(lark: str, what: str) -> None:
    """Refuse repeats that explode, and schemas inside the grammar that `check_schema` refuses."""
    line, position = 1, 0
    while (part := _LARK_PARTS.search(lark, position)) is not None:
        line += lark.count("\n", position, part.start())
        where, start, position = f"line {line}", part.start(), part.end()
        if part["json"] is not None:
            try:
                schema, position = json.JSONDecoder().raw_decode(lark, position)
            except (ValueError, RecursionError):
                pass  # the compiler reports the fault
            else:
                check_schema(schema, what, where=f"{where}: ")
        elif part["regex"] is not None:
            check_regex(part["regex"], what, where=where)
        else:
            numbers = (part["low"], part["high"], part["from"], part["to"])
            _check_repeat(part[0], numbers, what, where)
        line += lark.count("\n", start, position)


def _schemas_in(schema: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Every object that may be a schema, with its place as `$ref` would name it."""
    found: list[tuple[str, object, bool]] = [("#", schema, False)]
    while found:
        pointer, node, is_map = found.pop()
        if isinstance(node, Mapping):
            if not is_map:
                yield pointer, node
            for key, part in node.items():
                if is_map or key not in _VALUES:
                    inner_map = not is_map and key in _SCHEMA_MAPS
                    found.append((f"{pointer}/{_escaped(key)}", part, inner_map))
        elif isinstance(node, list):
            found += [(f"{pointer}/{i}", part, False) for i, part in enumerate(node)]


class _CommonMultiples:
    """Least common multiples of all `multipleOf` that hold for one number at once.

    Multiples are in units of 10^-MAX_DECIMALS, so that they are whole numbers. 1: no `multipleOf`.
    """

    def __init__(self, root: object, what: str, where: str) -> None:
        self._root = root
        self._what = what
        self._where = where
        self._known: dict[int, tuple[int, int]] = {}  # by id of a node: multiple and decimals

    def check(self, schema: object, pointer: str, depth: int = 0) -> tuple[int, int]:
        """Multiple and decimals of one schema. Of alternatives the largest one counts."""
        if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
            return 1, 0
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = 1, 0  # for a schema that refers to itself
        multiple = schema.get("multipleOf")
        found = _as_multiple(multiple) if _is_number(multiple) else (1, 0)
        for i, part in enumerate(list_of(schema.get("allOf"))):
            found = self._join(found, self.check(part, f"{pointer}/allOf/{i}", depth + 1), pointer)
        ref = schema.get("$ref")
        if isinstance(ref, str):
            target = target_of(self._root, ref)
            found = self._join(found, self.check(target, ref, depth + 1), pointer)
        for keyword in ("anyOf", "oneOf"):
            alternatives = [
                self._join(found, self.check(part, f"{pointer}/{keyword}/{i}", depth + 1), pointer)
                for i, part in enumerate(list_of(schema.get(keyword)))
            ]
            found = max(alternatives, default=found)
        self._known[id(schema)] = found
        return found

    def _join(self, one: tuple[int, int], other: tuple[int, int], pointer: str) -> tuple[int, int]:
        if one == other or 1 in (one[0], other[0]):
            return max(one, other)
        joined, decimals = math.lcm(one[0], other[0]), max(one[1], other[1])
        if joined // 10 ** (MAX_DECIMALS - decimals) > MAX_COMMON_MULTIPLE:
            value = Decimal(joined).scaleb(-MAX_DECIMALS).normalize()
            raise ConstraintError(
                f"the least common multiple of all multipleOf in {self._what} that hold here "
                "together is too large",
                where=f"{self._where}{pointer}",
                expected=f"at most {MAX_COMMON_MULTIPLE} without the decimal point",
                got=f"{value:f}",
            )
        return joined, decimals


def _as_multiple(value: object) -> tuple[int, int]:
    """In units of 10^-MAX_DECIMALS, and its own decimals; the value has been checked."""
    exact = Decimal(repr(value))
    exponent = exact.normalize().as_tuple().exponent
    assert isinstance(exponent, int), "a finite number"
    return int(exact.scaleb(MAX_DECIMALS)) or 1, max(-exponent, 0)


def _check_multiple(value: object, what: str, where: str) -> None:
    exact = Decimal(repr(value))
    if exact <= 0:
        return  # the compiler reports the fault
    _, digits, exponent = exact.normalize().as_tuple()
    assert isinstance(exponent, int), "a finite number"
    size = len(digits) + max(exponent, 0)
    is_large = size > 20 or int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_MULTIPLE
    if is_large or -exponent > MAX_DECIMALS:
        raise ConstraintError(
            f"multipleOf in {what} has too many digits",
            where=where,
            expected=f"at most {MAX_MULTIPLE} without the decimal point, and {MAX_DECIMALS} "
            "decimals",
            got=_short(value),
        )


def _check_repeat(text: str, numbers: tuple[str | None, ...], what: str, where: str | None) -> None:
    for number in numbers:
        if number and (len(number) > 20 or int(number) > MAX_COUNT):
            raise _too_large(f"the repeat {_short(text, quote=False)} in {what}", where, number)


def _too_large(subject: str, where: str | None, got: object) -> ConstraintError:
    return ConstraintError(
        f"{subject} is too large", where=where, expected=f"at most {MAX_COUNT}", got=_short(got)
    )


def _is_number(value: object) -> bool:
    """Whether a value of a JSON document is a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _short(value: object, *, quote: bool = True) -> str:
    text = repr(value) if quote and not isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
