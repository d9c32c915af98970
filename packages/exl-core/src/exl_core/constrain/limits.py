"""Limits on constraints: bounds of their numbers, and time and memory for compiling them.

Numbers that make a compiled constraint explode are refused here before compilation, with the
keyword and its place. These checks are cheap and cover the known cases only. `trial.py` enforces
`CompileLimits` for all others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from exl_core.constrain.json_recursion import list_of, target_of
from exl_core.errors import ConstraintError

MAX_COUNT = 1_000_000
"""Largest count in a keyword or a repeat. No reply has as many characters, items or properties."""
MAX_MULTIPLE = 100_000
"""Largest `multipleOf` without its decimal point. The compiler visits one state per remainder: it
takes 0.3 s and 25 MB for 100,003 on one core."""
MAX_COMMON_MULTIPLE = 65_535
"""Largest least common multiple of several `multipleOf`. llguidance multiplies two of them in 32
bits, so that a larger one would silently overflow."""
MAX_DECIMALS = 8
"""Most decimals of a `multipleOf`. More would overflow 32 bits too."""

_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
)
_UPPER_COUNTS = frozenset(name for name in _COUNTS if name.startswith("max"))
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "example", "examples")  # their values are data
_MAX_DEPTH = 100  # of `allOf` and `$ref` within each other, in the search for `multipleOf`

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

    time_s        wall time in seconds
    memory_bytes  address space of the trial process
    characters    length of the text of the schema, expression or grammar
    """

    time_s: float = 5.0
    memory_bytes: int = 512 * 2**20
    characters: int = 1_000_000


def check_length(text: str, limits: CompileLimits, name: str) -> None:
    if len(text) > limits.characters:
        raise ConstraintError(
            f"{name} is too long",
            expected=f"at most {limits.characters} characters",
            got=len(text),
        )


def without_unreachable(schema: object) -> object:
    """The schema without upper bounds above `MAX_COUNT`, which no reply reaches.

    Schema generators write such bounds for "any length" (`"maxLength": 2147483647`). Repeats of
    patterns are treated alike: `{2,2147483647}` becomes `{2,}`.
    """
    return _opened(schema, is_map=False)


def _opened(node: object, *, is_map: bool) -> object:
    if isinstance(node, list):
        return [_opened(part, is_map=False) for part in node]
    if not isinstance(node, Mapping):
        return node
    found: dict[str, object] = {}
    for key, part in node.items():
        if not is_map and key in VALUES:
            found[key] = part
        elif not is_map and key == "pattern" and isinstance(part, str):
            found[key] = _open_repeats(part)
        elif is_map or key not in _UPPER_COUNTS or not _is_unreachable(part):
            found[key] = _opened(part, is_map=not is_map and key in SCHEMA_MAPS)
    return found


def _is_unreachable(count: object) -> bool:
    is_count = isinstance(count, int | float) and not isinstance(count, bool)
    return is_count and count > MAX_COUNT  # type: ignore[operator]


def _open_repeats(pattern: str) -> str:
    def opened(part: re.Match[str]) -> str:
        high = part["high"]
        if not high or (len(high) <= 20 and int(high) <= MAX_COUNT):
            return part[0]
        return f"{{{part['low']},}}"

    return _REGEX_PARTS.sub(opened, pattern)


def check_schema(schema: object, name: str, *, where: str = "") -> None:
    """Raise ConstraintError for a number that explodes. `where` precedes the JSON pointer."""
    num_multiples = 0
    for pointer, node in _schemas_in(schema):
        for keyword in _COUNTS:
            count = node.get(keyword)
            if isinstance(count, int | float) and count > MAX_COUNT:
                raise _too_large(f"{keyword} in {name}", f"{where}{pointer}/{keyword}", count)
        if _is_number(node.get("multipleOf")):
            num_multiples += 1
            _check_multiple(node["multipleOf"], name, f"{where}{pointer}/multipleOf")
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            check_regex(pattern, f"the pattern in {name}", where=f"{where}{pointer}/pattern")
        by_pattern = node.get("patternProperties")
        for pattern in by_pattern if isinstance(by_pattern, Mapping) else ():
            place = f"{where}{pointer}/patternProperties/{_escaped(pattern)}"
            check_regex(pattern, f"the pattern in {name}", where=place)
    if num_multiples > 1:
        common = _CommonMultiples(schema, name, where)
        for pointer, node in _schemas_in(schema):
            common.check(node, pointer)


def check_regex(pattern: str, name: str, *, where: str | None = None) -> None:
    """Raise ConstraintError for a repeat that explodes."""
    for part in _REGEX_PARTS.finditer(pattern):
        _check_repeat(part[0], (part["low"], part["high"]), name, where)


def check_grammar(lark: str, name: str) -> None:
    """Raise ConstraintError for a repeat or an inline JSON schema that explodes."""
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
                check_schema(schema, name, where=f"{where}: ")
        elif part["regex"] is not None:
            check_regex(part["regex"], name, where=where)
        else:
            numbers = (part["low"], part["high"], part["from"], part["to"])
            _check_repeat(part[0], numbers, name, where)
        line += lark.count("\n", start, position)


def _schemas_in(schema: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Every object that may be a schema, with its place in the notation of `$ref`."""
    found: list[tuple[str, object, bool]] = [("#", schema, False)]
    while found:
        pointer, node, is_map = found.pop()
        if isinstance(node, Mapping):
            if not is_map:
                yield pointer, node
            for key, part in node.items():
                if is_map or key not in VALUES:
                    inner_map = not is_map and key in SCHEMA_MAPS
                    found.append((f"{pointer}/{_escaped(key)}", part, inner_map))
        elif isinstance(node, list):
            found += [(f"{pointer}/{i}", part, False) for i, part in enumerate(node)]


class _CommonMultiples:
    """Least common multiples of all `multipleOf` that apply to the same number.

    Multiples are integers in units of 10^-MAX_DECIMALS. 1 stands for no `multipleOf`.
    """

    def __init__(self, root: object, name: str, where: str) -> None:
        self._root = root
        self._name = name
        self._where = where
        self._known: dict[int, tuple[int, int]] = {}  # multiple and decimals by node id

    def check(self, schema: object, pointer: str, depth: int = 0) -> tuple[int, int]:
        """Multiple and decimals of one schema; of alternatives, the largest ones."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return 1, 0
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = 1, 0  # ends the recursion of a schema that refers to itself
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
                f"the least common multiple of all multipleOf in {self._name} that hold here "
                "together is too large",
                where=f"{self._where}{pointer}",
                expected=f"at most {MAX_COMMON_MULTIPLE} without the decimal point",
                got=f"{value:f}",
            )
        return joined, decimals


def _as_multiple(value: object) -> tuple[int, int]:
    """Multiple in units of 10^-MAX_DECIMALS, and number of decimals."""
    exact = Decimal(repr(value))
    exponent = exact.normalize().as_tuple().exponent
    assert isinstance(exponent, int), "a finite number"
    return int(exact.scaleb(MAX_DECIMALS)) or 1, max(-exponent, 0)


def _check_multiple(value: object, name: str, where: str) -> None:
    exact = Decimal(repr(value))
    if exact <= 0:
        return  # the compiler reports the fault
    _, digits, exponent = exact.normalize().as_tuple()
    assert isinstance(exponent, int), "a finite number"
    size = len(digits) + max(exponent, 0)
    is_large = size > 20 or int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_MULTIPLE
    if is_large or -exponent > MAX_DECIMALS:
        raise ConstraintError(
            f"multipleOf in {name} has too many digits",
            where=where,
            expected=f"at most {MAX_MULTIPLE} without the decimal point, and {MAX_DECIMALS} "
            "decimals",
            got=_short(value),
        )


def _check_repeat(text: str, numbers: tuple[str | None, ...], name: str, where: str | None) -> None:
    for number in numbers:
        if number and (len(number) > 20 or int(number) > MAX_COUNT):
            raise _too_large(f"the repeat {_short(text, quote=False)} in {name}", where, number)


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
