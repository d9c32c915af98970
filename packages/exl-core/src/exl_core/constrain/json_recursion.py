"""Check that a recursive JSON schema describes a finite document.

A node that requires a node of its own kind describes no finite document. The reply would continue
until its token limit. llguidance follows a schema token by token and cannot detect this. The check
considers recursion only: it finds the local references (`#/...`) that lead to a finite document, as
a fixed point that starts with the references that need no other. It assumes that everything else
can be satisfied, and therefore never refuses a valid schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

_MANY = 64  # required items of an array that are looked at; later ones are like the last one


def has_finite_document(schema: object) -> bool:
    targets = {ref: target_of(schema, ref) for ref in set(_references(schema))}
    finite = {ref for ref, target in targets.items() if target is None}  # unknown: assumed finite
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
    """Whether a finite document exists if only the references in `finite` lead to one."""
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
    return all(_is_finite(part, finite) for part in _required_parts(schema))


def _required_parts(schema: Mapping[str, object]) -> Iterator[object]:
    """Schemas of the properties and items that every document must have."""
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
    """Node that a local reference points to; None if it is not local or points nowhere."""
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
