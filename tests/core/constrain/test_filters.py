"""Masks of every filter, compared with brute force over finite languages."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.constrain.choice import OneOf, StartsWith
from exl_core.constrain.filter import Constraint
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError, RequestError
from support.constraints import (
    LANGUAGES,
    assert_agrees,
    make_filter,
    random_reply,
    vocabularies,
    without_eos,
)
from support.profiles import examples, first_by_default
from support.scripted import ByteTokenizer

VOCABULARIES = vocabularies()


@pytest.mark.parametrize("name", first_by_default(LANGUAGES, 8))
def test_masks_allow_exactly_the_viable_tokens(name: str, vocabulary: Vocabulary) -> None:
    reached = set()
    for seed in range(30):
        rng = random.Random(seed)
        f, language = make_filter(name, vocabulary)
        text = b""
        assert_agrees(f, vocabulary, language, text)
        while not f.is_finished:
            if f.is_complete and rng.random() < 0.3:
                break
            mask = f.mask()
            assert mask is not None
            token_id = rng.choice(without_eos(vocabulary.ids_of(mask), vocabulary))
            f.accept(token_id)
            text += vocabulary.token_bytes[token_id]
            assert_agrees(f, vocabulary, language, text)
        reached.add(text.decode())
    assert reached <= set(language)
    assert len(reached) >= min(3, len(language))


@given(
    name=st.sampled_from(sorted(LANGUAGES)),
    kind=st.sampled_from(sorted(VOCABULARIES)),
    steps=st.lists(st.integers(-4, 1000), max_size=14),
)
@settings(max_examples=examples(150))
def test_a_rewound_filter_equals_a_fresh_one(name: str, kind: str, steps: list[int]) -> None:
    """A negative step undoes that many tokens; step n accepts the n-th allowed token."""
    vocabulary = VOCABULARIES[kind]
    f, language = make_filter(name, vocabulary)
    ids: list[int] = []
    for step in steps:
        if step < 0:
            count = min(-step, len(ids))
            f.rewind(count)
            del ids[len(ids) - count :]
        elif not f.is_finished:
            mask = f.mask()
            assert mask is not None
            allowed = without_eos(vocabulary.ids_of(mask), vocabulary)
            if allowed:
                ids.append(allowed[step % len(allowed)])
                f.accept(ids[-1])
        text = b"".join(vocabulary.token_bytes[i] for i in ids)
        assert_agrees(f, vocabulary, language, text)


def test_starts_with_allows_overshoot_and_everything_after_the_prefix(
    vocabulary: Vocabulary,
) -> None:
    prefixes = [b"ab", b"abca", b"ca"]
    for seed in range(20):
        rng = random.Random(seed)
        f = StartsWith([prefix.decode() for prefix in prefixes]).filter(vocabulary)
        text = b""
        while not f.is_complete:
            mask = f.mask()
            assert mask is not None
            expected = [
                number
                for number, token in enumerate(vocabulary.token_bytes)
                if token
                and any(
                    p.startswith(text + token) or (text + token).startswith(p) for p in prefixes
                )
            ]
            assert vocabulary.ids_of(mask) == expected
            text += vocabulary.token_bytes[chosen := rng.choice(expected)]
            f.accept(chosen)
        assert any(text.startswith(prefix) for prefix in prefixes)
        assert f.mask() is None
        f.accept(257)  # a special token: everything is allowed after the prefix
        assert (f.mask(), f.is_complete, f.is_finished) == (None, True, False)
        f.rewind(2)
        assert f.mask() is not None
        assert not f.is_complete


def test_one_of_ignores_case_but_not_accents() -> None:
    vocabulary = VOCABULARIES["made"]
    replies = set()
    for seed in range(60):
        f = OneOf(["Öa"], ignore_case=True).filter(vocabulary)
        ids = random_reply(f, vocabulary, random.Random(seed))
        replies.add(b"".join(vocabulary.token_bytes[i] for i in ids).decode())
    assert replies == {"Öa", "ÖA", "öa", "öA"}


def test_a_grammar_may_name_a_special_token() -> None:
    vocabulary = VOCABULARIES["made"]
    f = Grammar('start: <tool> "a"').filter(vocabulary)
    mask = f.mask()
    assert mask is not None
    assert vocabulary.ids_of(mask) == [257]
    f.accept(257)
    f.accept(ord("a"))
    assert f.is_finished


def test_text_constraints_never_allow_special_tokens() -> None:
    vocabulary = VOCABULARIES["made"]
    for constraint in (Regex("(?s).*"), JsonSchema(True), Regex("<tool>")):
        mask = constraint.filter(vocabulary).mask()
        assert mask is not None
        assert not {257, *vocabulary.eos_ids} & set(vocabulary.ids_of(mask))


UNUSABLE: list[tuple[Constraint, str]] = [
    (Regex("(a"), "unclosed group"),
    (Regex("(?=a)b"), "look-around"),
    (Regex("a\\"), "backslash"),
    (Regex("a\\\\\\"), "backslash"),
    (Regex("\ud800"), "surrogate"),
    (Regex(cast(Any, 5)), "the regular expression is not a text"),
    (Grammar('start: "\ud800"'), "surrogate"),
    (JsonSchema('{"const": "\\ud800"}'), "hex escape"),
    (JsonSchema('{"const": NaN}'), "not a JSON value"),
    (JsonSchema("[" * 100_000), "is not JSON"),
    (Regex(r"[^\s\S]"), "cannot be satisfied"),
    (Grammar("start: foo"), "unknown name"),
    (Grammar("start: ("), "Expected token"),
    (Grammar(""), "start"),
    (Grammar("start: start"), "cannot be satisfied"),
    (Grammar('start: "a" <missing>'), "unknown special token"),
    (JsonSchema("{"), "is not JSON"),
    (JsonSchema("[1]"), "neither an object"),
    (JsonSchema(False), "schema is false"),
    (JsonSchema({"enum": []}), "empty"),
    (JsonSchema({"type": "integer", "minimum": 5, "maximum": 4}), "greater"),
    (JsonSchema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible"),
    (JsonSchema({"allOf": [{"enum": [1]}, {"enum": [2]}]}), "Unsatisfiable"),
    (JsonSchema({"properties": {"a": False}, "required": ["a"], "type": "object"}), "'a'"),
    (JsonSchema({"type": "array", "minItems": 3, "maxItems": 2}), "minItems"),
    (JsonSchema({"type": "string", "pattern": "^a$", "minLength": 2}), "Unsatisfiable"),
    (JsonSchema({"type": "string", "format": "unheard-of"}), "unheard-of"),
    (JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (JsonSchema({"not": {"type": "string"}}), "not"),
    (JsonSchema({"type": "colour"}), "colour"),
    (JsonSchema({"$ref": "#/$defs/nowhere"}), "nowhere"),
    (JsonSchema({"$ref": "#"}), "cannot be satisfied"),
    (JsonSchema({"type": "array", "minItems": 1, "items": {"$ref": "#"}}), "never ends"),
    (JsonSchema({"$ref": "https://example.org/schema"}), "example.org"),
]


@pytest.mark.parametrize(("constraint", "said"), UNUSABLE, ids=lambda v: str(v)[:50])
def test_an_unusable_constraint_is_a_one_line_error(constraint: Constraint, said: str) -> None:
    with pytest.raises(ConstraintError, match=said) as caught:
        constraint.filter(VOCABULARIES["bytes"])
    assert isinstance(caught.value, RequestError)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    assert "no_forcing" not in str(caught.value)


@pytest.mark.parametrize("bad", [[], "text", ["a", 3], ["\ud800"], 5, None, b"ab"], ids=repr)
def test_options_that_are_not_texts_are_refused(bad: Any) -> None:
    with pytest.raises(ConstraintError, match="the options"):
        OneOf(bad)
    if bad != "text":  # a prefix may be given alone
        with pytest.raises(ConstraintError, match="the prefixes"):
            StartsWith(bad)


def test_a_schema_that_is_not_json_is_refused_at_construction() -> None:
    for value in ({"const": float("nan")}, {"const": {1, 2}}):
        with pytest.raises(ConstraintError, match="not a JSON value"):
            JsonSchema(value)


def test_texts_that_the_vocabulary_cannot_spell_are_refused() -> None:
    vocabulary = Vocabulary(ByteTokenizer(), 97)  # no lower-case letters
    for constraint in (OneOf(["abc"]), StartsWith("abc"), Regex("abc")):
        with pytest.raises(ConstraintError, match="no token of this model"):
            constraint.filter(vocabulary)


@pytest.mark.parametrize("name", [n for n in LANGUAGES if n != "foreign"])
def test_a_token_that_is_not_allowed_is_refused_without_a_change(name: str) -> None:
    vocabulary = VOCABULARIES["bytes"]
    f, language = make_filter(name, vocabulary)
    for token_id in (ord("z"), 255, 256, 280):
        with pytest.raises(ConstraintError, match="does not fit"):
            f.accept(token_id)
    assert_agrees(f, vocabulary, language, b"")


def test_white_space_in_json_is_bounded() -> None:
    vocabulary = VOCABULARIES["bytes"]
    f = JsonSchema({"type": "array", "items": {"type": "null"}}).filter(vocabulary)
    for char in b"[" + b" " * 40:
        f.accept(char)
    mask = f.mask()
    assert mask is not None
    assert bytes(vocabulary.ids_of(mask)) == b"]n"
    compact = JsonSchema({"type": "array"}, compact=True).filter(vocabulary)
    compact.accept(ord("["))
    mask = compact.mask()
    assert mask is not None
    assert not set(vocabulary.ids_of(mask)) & set(b" \n\r\t")
