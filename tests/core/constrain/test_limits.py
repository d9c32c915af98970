"""Numbers that would make a compiled constraint explode are refused with keyword and place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exl_core.constrain.filter import Constraint
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.limits import MAX_COUNT, MAX_MULTIPLE, CompileLimits
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError
from support.constraints import vocabularies
from support.scripted import ByteTokenizer

BYTES = vocabularies()["bytes"]
MANY = MAX_COUNT + 1
THREE_PRIMES = [{"multipleOf": prime} for prime in (97, 101, 103)]


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the constraint allows this text, byte by byte, as a complete reply."""
    made = constraint.filter(BYTES)
    for byte in text.encode():
        mask = made.mask()
        if mask is not None and not int(mask.view(-1)[byte // 32]) >> byte % 32 & 1:
            return False
        made.accept(byte)
    return made.is_complete


REFUSED: list[tuple[Constraint, str, str, str]] = [
    (
        JsonSchema({"type": "integer", "multipleOf": 62615533}),
        "#/multipleOf",
        "multipleOf in the JSON schema",
        "62615533",
    ),
    (
        JsonSchema({"properties": {"a/b~c": {"multipleOf": MAX_MULTIPLE + 1}}}),
        "#/properties/a~1b~0c/multipleOf",
        "multipleOf",
        "100001",
    ),
    (JsonSchema({"multipleOf": 0.000000001}), "#/multipleOf", "multipleOf", "1e-09"),
    (JsonSchema({"multipleOf": 99999.9}), "#/multipleOf", "multipleOf", "99999.9"),
    (JsonSchema({"multipleOf": 1e300}), "#/multipleOf", "multipleOf", "1e+300"),
    (
        JsonSchema({"items": {"type": "integer", "allOf": THREE_PRIMES}}),
        "#/items",
        "least common multiple of all multipleOf",
        "1009091",
    ),
    (
        JsonSchema(
            {
                "$defs": {"one": {"type": "integer", "multipleOf": 997}},
                "allOf": [{"$ref": "#/$defs/one"}, {"multipleOf": 99.1}],
            }
        ),
        "#",
        "least common multiple",
        "988027",
    ),
    *[
        (
            JsonSchema({"$defs": {"x": {"anyOf": [True, {keyword: MANY}]}}}),
            f"#/$defs/x/anyOf/1/{keyword}",
            f"{keyword} in the JSON schema",
            str(MANY),
        )
        for keyword in ("minLength", "minItems", "minProperties")
    ],
    (
        JsonSchema({"type": "string", "pattern": f"^a{{{MANY},}}$"}),
        "#/pattern",
        f"the repeat {{{MANY},}} in the pattern",
        str(MANY),
    ),
    (
        JsonSchema({"patternProperties": {f"a{{{MANY}}}": True}}),
        f"#/patternProperties/a{{{MANY}}}",
        "the repeat",
        str(MANY),
    ),
    (Regex(f"(a|b){{{MANY},}}"), "None", "the repeat", str(MANY)),
    (Grammar(f'start: "{{{MANY}}}"\n  a{{1,{MANY}}}\na: "b"'), "line 2", "the repeat", str(MANY)),
    (Grammar(f'start: "a"~2..{MANY}'), "line 1", "the repeat", str(MANY)),
    (Grammar(f"start: A\nA: /b{{{MANY}}}/"), "line 2", "the repeat", str(MANY)),
    (
        Grammar('start: "x" a\na: %json {"properties":\n{"b": {"multipleOf": 62615533}}}'),
        "line 2: #/properties/b/multipleOf",
        "multipleOf in the grammar",
        "62615533",
    ),
]


@pytest.mark.parametrize(
    ("constraint", "where", "what", "got"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_an_exploding_number_is_refused_with_its_keyword_and_place(
    constraint: Constraint, where: str, what: str, got: str
) -> None:
    with pytest.raises(ConstraintError) as caught:
        constraint.filter(BYTES)
    error = caught.value
    assert str(error.where) == where
    assert what in error.what
    assert error.expected is not None
    assert error.expected.startswith("at most ")
    assert error.got == got
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 100},
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "anyOf": THREE_PRIMES},
        {"type": "integer", "allOf": [{"multipleOf": 6}, {"multipleOf": 10}, {"multipleOf": 6}]},
        {"const": {"maxLength": MANY, "multipleOf": 62615533}},
        {"type": "object", "properties": {"maxLength": {"enum": [MANY]}, "const": {"const": MANY}}},
        {"type": "string", "pattern": rf"^\{{{MANY}\}}[{{{MANY}}}]$"},
        {"type": "string", "maxLength": MAX_COUNT},
        {"type": "integer", "minimum": -MANY, "maximum": 2**53},
    ],
    ids=str,
)
def test_an_ordinary_number_is_not_refused(schema: dict[str, object]) -> None:
    assert JsonSchema(schema).filter(BYTES).mask() is not None


@pytest.mark.parametrize("bound", [MANY, 2**31 - 1, 2**63 - 1, 1e300, 10**400])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 2, "maxLength": ...}, '"ab"', '"a"'),
        ({"type": "array", "minItems": 1, "maxItems": ...}, "[1,2,3]", "[]"),
        ({"type": "object", "maxProperties": ...}, '{"a":1}', "[]"),
        (
            {"properties": {"maxLength": {"maxLength": ..., "type": "string"}}, "type": "object"},
            '{"maxLength":"x"}',
            '{"maxLength":1}',
        ),
        ({"anyOf": [{"type": "string", "maxLength": ...}, {"type": "null"}]}, "null", "1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_upper_bound_that_no_reply_reaches_is_no_bound(
    schema: dict[str, Any], good: str, bad: str, bound: float
) -> None:
    def bounded(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: bounded(part) for key, part in node.items()}
        if isinstance(node, list):
            return [bounded(part) for part in node]
        return bound if node is ... else node

    whole = bounded(schema)
    assert accepts(JsonSchema(whole, compact=True), good)
    assert not accepts(JsonSchema(whole, compact=True), bad)


def test_repeats_of_patterns_that_no_reply_reaches_are_open() -> None:
    pattern = r"^a{2,2147483647}[{1,9999999999}]\{1,9999999999\}$"
    constraint = JsonSchema({"type": "string", "pattern": pattern})
    assert accepts(constraint, '"aaa9{1,9999999999}"')
    assert not accepts(constraint, '"a9{1,9999999999}"')


def test_bounds_within_data_are_not_touched() -> None:
    schema = {"const": {"maxLength": MANY, "pattern": "a{1,2147483647}"}}
    assert accepts(
        JsonSchema(schema, compact=True), json.dumps(schema["const"], separators=(",", ":"))
    )


def test_a_constant_inside_a_property_named_const_is_data() -> None:
    schema = {"properties": {"const": {"type": "integer", "multipleOf": 62615533}}}
    with pytest.raises(ConstraintError, match="#/properties/const/multipleOf"):
        JsonSchema(schema).filter(BYTES)


@pytest.mark.parametrize(
    "constraint",
    [JsonSchema({"const": "x" * 100}), Regex("a" * 101), Grammar(f'start: "{"a" * 100}"')],
    ids=lambda constraint: type(constraint).__name__,
)
def test_a_long_text_is_refused_before_it_is_read(constraint: Constraint) -> None:
    short = Vocabulary(ByteTokenizer(), 288, CompileLimits(characters=100))
    with pytest.raises(ConstraintError, match="is too long"):
        constraint.filter(short)


def test_schemas_that_refer_to_themselves_and_to_each_other_are_checked_in_linear_time() -> None:
    count = 3000
    definitions = {
        f"d{i}": {"type": "integer", "multipleOf": 2, "allOf": [{"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(count)
    }
    definitions[f"d{count}"] = {"$ref": "#/$defs/d0"}
    with pytest.raises(ConstraintError):  # the compiler refuses it
        JsonSchema({"$defs": definitions, "$ref": "#/$defs/d0"}).filter(BYTES)
