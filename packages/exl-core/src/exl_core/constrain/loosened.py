"""Looser forms of JSON schemas that the grammar compiler cannot express.

A schema that is a best effort (OpenAI's schemas without `strict`) must not be refused because
llguidance does not implement one of its keywords. `loosened` yields forms with ever fewer
keywords: every document of the schema satisfies all of them. A schema that is not valid has no
looser form, and its fault is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

from exl_core.constrain.json_recursion import list_of, target_of
from exl_core.constrain.limits import SCHEMA_MAPS, VALUES, check_schema
from exl_core.errors import ConstraintError

UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)
"""Keywords that llguidance does not implement."""
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
    | {"unknown"}
)
"""Values of `format` that llguidance implements."""
_BOUNDED = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("multipleOf", "pattern"),
)
_STRUCTURE = frozenset(
    {"type", "properties", "required", "items", "prefixItems", "additionalProperties"}
    | {"anyOf", "allOf", "enum", "const", "$ref", "$defs", "definitions", "$id", "$anchor"}
)
# Look-around, word boundaries, references to groups, and escapes that Rust's regex lacks.
_PATTERN_PARTS = re.compile(r"\\.|\(\?<?[=!]", re.DOTALL)
_UNSUPPORTED_ESCAPES = frozenset("bBkceZzAG0123456789")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

Form = Callable[[dict[str, object]], object]
"""Looser form of one schema, whose parts are loosened already."""


def loosened(root: object, places: Collection[str]) -> Iterator[object]:
    """Ever looser forms of `root`, in which only the parts at `places` differ.

    A place is `#`, or a local reference such as `#/$defs/a`. Yields nothing if one of the parts is
    not a valid schema.
    """
    parts = [target_of(root, place) for place in places]
    if not all(is_valid(part, root) for part in parts):
        return
    for loosen in (_expressible, _structure, _kind):
        form = root
        for place in places:
            form = _replaced(form, place.split("/")[1:], loosen)
        yield form


def is_valid(schema: object, root: object) -> bool:
    """Whether the keywords of a schema have values that the JSON Schema standard allows, and its
    local references lead to a part of `root`."""
    found = [schema]
    while found:
        node = found.pop()
        if not isinstance(node, Mapping):
            if not isinstance(node, bool):
                return False
            continue
        if not all(check(node[key]) for key, check in _CHECKS.items() if key in node):
            return False
        ref = node.get("$ref", "#")
        if ref.startswith("#/") and target_of(root, ref) is None:
            return False
        for key, part in node.items():
            if key in SCHEMA_MAPS:
                found += part.values()
            elif key in _SCHEMA_LISTS and isinstance(part, list):
                found += part
            elif key in _SCHEMA_PARTS:
                found.append(part)
    return True


_SCHEMA_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_SCHEMA_PARTS = frozenset(
    {"items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not"}
    | {"if", "then", "else", "unevaluatedItems", "unevaluatedProperties"}
)


def _is_count(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and value == int(value)  # type: ignore[operator,call-overload]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)  # the bounds of draft 4 are booleans beside a number


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(name in _TYPES for name in names)


def _is_name_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


_CHECKS: dict[str, Callable[[object], bool]] = {
    "type": _is_type,
    "enum": _is(list),
    "required": lambda value: _is_name_list(value) or isinstance(value, bool),
    "multipleOf": lambda value: _is_number(value) and value > 0,  # type: ignore[operator]
    **dict.fromkeys(("$ref", "pattern", "format"), _is(str)),
    **dict.fromkeys(SCHEMA_MAPS, _is(Mapping)),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _is(list)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties"), _is_count),
}


def _replaced(root: object, keys: list[str], loosen: Callable[[object], object]) -> object:
    """`root` with the part at these keys loosened."""
    if not keys:
        return loosen(root)
    assert isinstance(root, Mapping), "`target_of` has found the part"
    return {**root, keys[0]: _replaced(root[keys[0]], keys[1:], loosen)}


def _walked(node: object, form: Form, *, is_map: bool = False) -> object:
    if isinstance(node, list):
        return [_walked(part, form) for part in node]
    if not isinstance(node, Mapping):
        return node
    found = {
        key: part
        if not is_map and key in VALUES
        else _walked(part, form, is_map=not is_map and key in SCHEMA_MAPS)
        for key, part in node.items()
    }
    return found if is_map else form(found)


def _expressible(schema: object) -> object:
    """The schema without the keywords that the compiler does not express."""
    return _walked(schema, _expressed)


def _expressed(node: dict[str, object]) -> object:
    found = {key: part for key, part in node.items() if key not in UNSUPPORTED}
    for key in _BOUNDED:
        if key in found and not _is_bounded(key, found[key]):
            del found[key]
    pattern, ref = found.get("pattern"), found.get("$ref")
    if isinstance(pattern, str) and not _is_supported(pattern):
        del found["pattern"]
    if found.get("format", "date") not in FORMATS:
        del found["format"]
    if isinstance(ref, str) and not ref.startswith("#"):
        del found["$ref"]
    if isinstance(found.get("required"), bool):  # draft 3 has it in the property
        del found["required"]
    listed, required = found.get("properties"), list_of(found.get("required"))
    if isinstance(listed, dict) and not listed.keys() <= set(required):
        found.pop("minProperties", None)
        found.pop("maxProperties", None)
    by_pattern = found.get("patternProperties")
    if isinstance(by_pattern, dict) and not all(map(_is_supported, by_pattern)):
        # The properties that the patterns allow count as additional ones now.
        del found["patternProperties"]
        found.pop("additionalProperties", None)
    alternatives = found.pop("oneOf", None)
    if alternatives is None:
        return found
    if "anyOf" not in found:
        return {**found, "anyOf": alternatives}
    return {**found, "allOf": [*list_of(found.get("allOf")), {"anyOf": alternatives}]}


def _structure(schema: object) -> object:
    """The schema without bounds, patterns and formats."""
    return _walked(_expressible(schema), _structural)


def _structural(node: dict[str, object]) -> object:
    found = {key: part for key, part in node.items() if key in _STRUCTURE}
    if "patternProperties" in node:
        found.pop("additionalProperties", None)
    return found


def _kind(schema: object) -> object:
    """The type of the schema alone."""
    is_typed = isinstance(schema, Mapping) and "type" in schema
    return {"type": schema["type"]} if is_typed else {}  # type: ignore[index]


def _is_bounded(keyword: str, value: object) -> bool:
    """Whether the value of a keyword is within the limits of the compiler."""
    try:
        check_schema({keyword: value}, "")
    except ConstraintError:
        return False
    return True


def _is_supported(pattern: str) -> bool:
    return all(
        part[0][0] == "\\" and part[0][1] not in _UNSUPPORTED_ESCAPES
        for part in _PATTERN_PARTS.finditer(pattern)
    )
