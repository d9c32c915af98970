"""Recursive schemas: which of them describe a finite document."""

from __future__ import annotations

import pytest

from exl_core.constrain.json_recursion import has_finite_document
from support.schemas import SCHEMAS, Schema


def node(required: list[str], **properties: object) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


SELF: Schema = {"$ref": "#"}
A: Schema = {"$ref": "#/$defs/a"}
B: Schema = {"$ref": "#/$defs/b~1c%20d"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_ordinary_schemas_have_finite_documents(name: str) -> None:
    assert has_finite_document(SCHEMAS[name])


@pytest.mark.parametrize(
    "schema",
    [
        True,
        node([], next=SELF),
        node(["next"], next={"anyOf": [SELF, {"type": "null"}]}),
        {"type": "array", "items": SELF},
        {"type": "array", "items": SELF, "prefixItems": [{"type": "null"}], "minItems": 1},
        {"items": SELF, "minItems": 3},  # a number satisfies it
        {**node(["next"], next=SELF), "type": ["object", "null"]},
        {"anyOf": [A, B], "$defs": {"a": node(["b"], b=B), "b/c d": {"type": "string"}}},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#anchor"},
        {"type": "array", "minItems": "x", "required": 3, "properties": [], "allOf": {}},
    ],
    ids=str,
)
def test_recursion_with_a_base_case_is_accepted(schema: object) -> None:
    assert has_finite_document(schema)


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        node(["next"], next=SELF),
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [{}, SELF], "minItems": 2},
        node(["next"], next={"anyOf": [SELF, {"type": "array", "items": SELF, "minItems": 2}]}),
        {"allOf": [{"type": "object"}, SELF]},
        {"$ref": "#/$defs/a", "$defs": {"a": node(["b"], b=B), "b/c d": node(["a"], a=A)}},
        {"oneOf": [A, B], "$defs": {"a": node(["b"], b=B), "b/c d": node(["a"], a=A)}},
    ],
    ids=str,
)
def test_recursion_without_a_base_case_is_detected(schema: object) -> None:
    assert not has_finite_document(schema)
