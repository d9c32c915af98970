"""Whether a JSON schema that refers to itself lets any document come to an end.

A node that requires a node of its own kind describes no finite document, and a reply to it would
run until its tokens are spent; the library that follows a schema token by token cannot see that.
Only recursion is looked at: which of the local references (`#/...`) lead to a document is found by
adding them one after the other, beginning with those that need no other. Everything else counts as
possible, so a schema is never refused wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

_MANY = 64  # items that an array is taken to need at most; the rest are like the last of them


def has_finite_document(schema: object) -> bool:
    targets = {ref: target_of(schema, ref) for ref in set(_references(schema))}
    finite = {ref for ref, target in targets.items() if target is None}  # not ours to judge
    while True:
        added = {
            ref
            for ref, target in targets.items()
            if ref not in finite and _is_finite(target, finite)
        }
        if not added:
            return _is_finite(schema, finite)
        finite |= added


def _is_finite(schema: object, finite: set[str]) -> bool:
    """Whether there is a document, when only the references in `finite` lead to one."""
    if not isinstance(schema, Mapping):
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in finite:
        return False
    if not all(_is_finite(part, finite) for part in list_of(schema.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        parts = list_of(schema.get(key))
        if parts and not any(_is_finite(part, finite) for part in parts):
            return False
    return all(_is_finite(part, finite) for part in _needed(schema))


def _needed(schema: Mapping[str, object]) -> Iterator[object]:
    """What every document must hold."""
    if schema.get("type") == "object":
        properties = schema.get("properties")
        for name in list_of(schema.get("required")):
            if isinstance(properties, Mapping) and isinstance(name, str):
                yield properties.get(name)
    if schema.get("type") == "array":
        least = schema.get("minItems", 0)
        count = min(least, _MANY) if isinstance(least, int) else 0
        first = list_of(schema.get("prefixItems"))
        yield from first[:count]
        if count > len(first):
            yield schema.get("items")


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        if isinstance(ref, str):
            yield ref
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def target_of(root: object, ref: str) -> object | None:
    """What a local reference means; None for any other, and for one that leads nowhere."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found: object | None = root
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def list_of(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []
