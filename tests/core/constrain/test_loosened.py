"""Schemas that are a best effort: looser forms of those that the compiler cannot express."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.limits import CompileLimits
from exl_core.constrain.loosened import FORMATS, UNSUPPORTED, is_valid, loosened
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError
from support.constraints import ListTokenizer
from support.schemas import SLOW_SCHEMA


def bytes_vocabulary(limits: CompileLimits | None = None) -> Vocabulary:
    tokens = [*(bytes([i]) for i in range(256)), b"<eos>"]
    return Vocabulary(ListTokenizer(tokens, {"<eos>": 256}), 257, limits)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return bytes_vocabulary()


def accepts(schema: Any, vocabulary: Vocabulary, document: object) -> bool:
    found = JsonSchema(schema, loose=["#"]).filter(vocabulary)
    try:
        for byte in json.dumps(document).encode():
            found.accept(byte)
    except ConstraintError:
        return False
    return found.is_complete


INTEGER: dict[str, Any] = {"type": "integer"}
UNEXPRESSED: dict[str, tuple[Any, Any, Any]] = {
    # a schema, a document of it, and one that its looser form still excludes
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 2], ["a"]),
    "oneOf": ({"oneOf": [INTEGER, {"type": "number", "minimum": 2}]}, 2.5, "a"),
    "oneOf beside anyOf": (
        {"oneOf": [INTEGER, {"type": "number"}], "anyOf": [INTEGER, {"type": "null"}]},
        3,
        None,
    ),
    "not": ({"type": "string", "not": {"const": "a"}}, "b", 1),
    "if": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}, "else": {}}, 4, "a"),
    "contains": ({"type": "array", "contains": INTEGER, "minContains": 1}, [1], {}),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"a": 1}, []),
    "dependentRequired": ({"type": "object", "dependentRequired": {"type": ["b"]}}, {}, []),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        {"a": 1},
        {"a": "b"},
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1},
        {"a": 1},
        {"a": "b"},
    ),
    "format": ({"type": "string", "format": "json-pointer"}, "/a", 1),
    "look-ahead": ({"type": "string", "pattern": "^(?!a)b"}, "b", 1),
    "word boundary": ({"type": "string", "pattern": "\\bb\\b", "minLength": 1}, "b", ""),
    "anchor inside": ({"type": "string", "pattern": "a^b|c"}, "c", 1),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^(?!a)": INTEGER},
            "additionalProperties": False,
        },
        {"b": 1},
        [],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 62615533}, 62615533, "a"),
    "minLength": ({"type": "array", "items": {"type": "string", "minLength": 10**12}}, [], [1]),
    "repeat": ({"type": "string", "pattern": "a{10000000}"}, "a", 1),
    "remote": ({"type": "object", "properties": {"a": {"$ref": "https://x.org/y"}}}, {"a": 1}, []),
    "draft 3": ({"type": "object", "properties": {"a": {"required": True}}}, {"a": 1}, []),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, 4, "a"),
    "boolean": (False, 1, ...),
    "reference": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "uniqueItems": True}}},
        [1],
        {},
    ),
    "keyword as a property": (
        {"type": "object", "properties": {"not": INTEGER, "x": {"not": {}}}, "required": ["not"]},
        {"not": 1},
        {"not": "a"},
    ),
}


@pytest.mark.parametrize("name", UNEXPRESSED)
def test_looser_form_keeps_the_documents_and_the_other_keywords(
    vocabulary: Vocabulary, name: str
) -> None:
    schema, document, other = UNEXPRESSED[name]
    with pytest.raises(ConstraintError):
        JsonSchema(schema).filter(vocabulary)
    assert accepts(schema, vocabulary, document)
    if other is not ...:
        assert not accepts(schema, vocabulary, other)


def test_forms_accept_ever_more() -> None:
    """Checked by an independent validator, on the documents of all schemas above."""
    documents = [document for _, one, other in UNEXPRESSED.values() for document in (one, other)]
    for name, (schema, _, _) in UNEXPRESSED.items():
        if name == "remote":  # the validator would fetch it
            continue
        forms = [schema, *loosened(schema, ["#"])]
        assert len(forms) == 4
        for tighter, looser in itertools.pairwise(forms):
            for document in documents:
                if document is not ... and _matches(tighter, document):
                    assert _matches(looser, document), (name, document)


def _matches(schema: Any, document: object) -> bool:
    if isinstance(schema, dict) and "draft 3" in str(schema):
        return True
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(document))
    except (TypeError, jsonschema.exceptions.UnknownType):
        return False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"type": []},
        {"properties": []},
        {"properties": {"a": 3}},
        {"minLength": -1},
        {"minItems": 2.5},
        {"enum": 3},
        {"required": "a"},
        {"anyOf": {}},
        {"items": "a"},
        {"pattern": 3},
        {"$ref": "#/$defs/missing"},
        {"not": {"type": "nothing"}},
    ],
    ids=str,
)
def test_invalid_schemas_are_refused(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    assert not is_valid(schema, schema)
    with pytest.raises(ConstraintError):
        JsonSchema(schema, loose=["#"]).filter(vocabulary)


def test_only_the_named_parts_are_loosened(vocabulary: Vocabulary) -> None:
    part = {"type": "array", "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/b"}},
        "required": ["a", "b"],
        "$defs": {"a": part, "b": {"type": "null"}},
    }
    found, text = JsonSchema(schema, loose=["#/$defs/a"]).compiled(vocabulary)
    assert json.loads(text) == {**schema, "$defs": {"a": {"type": "array"}, "b": {"type": "null"}}}
    assert not found.is_complete
    with pytest.raises(ConstraintError, match="uniqueItems"):
        JsonSchema(schema, loose=["#/$defs/b"]).filter(vocabulary)
    assert list(loosened(schema, ["#/$defs/c"])) == []


def test_a_schema_that_takes_too_long_becomes_its_type() -> None:
    limits = CompileLimits(time_s=0.5)
    quick = bytes_vocabulary(limits)
    _, text = JsonSchema(SLOW_SCHEMA, loose=["#"]).compiled(quick)
    assert json.loads(text) == {"type": SLOW_SCHEMA["type"]}


def test_lists_of_keywords_are_those_of_the_compiler(vocabulary: Vocabulary) -> None:
    """A keyword that a new version of the compiler implements shall leave the list."""
    values: dict[str, object] = {"uniqueItems": True, "minContains": 1, "maxContains": 1}
    for keyword in UNSUPPORTED:
        schema = {keyword: values.get(keyword, "#" if keyword.startswith("$") else {})}
        with pytest.raises(ConstraintError, match="not supported"):
            JsonSchema(schema).filter(vocabulary)
    for name in FORMATS:
        JsonSchema({"type": "string", "format": name}).filter(vocabulary)
