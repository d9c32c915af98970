"""JSON after a marker in free text: masks, documents, reasoning before them, and rewinding."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.constrain.filter import Filter
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.triggered import AnswerOrCalls, Triggered
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError
from support.constraints import ListTokenizer
from support.profiles import examples

MARKER, CLOSING = "<call>", "</call>"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PIECES = [
    "<ca",
    "ll>",
    "ll>\n",
    "ll>{",
    "<call>{",
    "<call> ",
    "l></",
    '{"',
    "</ca",
    " {",
    "</think>",
]
PIECES += ["</think>\n", "</think>{", "<thi", "nk>", '{"a', "true", "k>{"]
MANY = Triggered(SCHEMA, MARKER, closing=CLOSING)
LAST = Triggered(SCHEMA, MARKER)
LISTED = Triggered(SCHEMA, "<|tag|>", separator=";", begins=True)
RULES = {"many": MANY, "last": LAST, "listed": LISTED}


def made(*special: str) -> Vocabulary:
    tokens = [bytes([i]) for i in range(256)]
    tokens += [text.encode() for text in (*PIECES, *special, "<end>")]
    named = {text: 256 + len(PIECES) + i for i, text in enumerate((*special, "<end>"))}
    return Vocabulary(ListTokenizer(tokens, named), 300)


PLAIN = made()
SPECIAL = made(MARKER, CLOSING, "<|tag|>", "<think>")
VOCABULARIES = {"plain": PLAIN, "special": SPECIAL}


def allowed(f: Filter, vocabulary: Vocabulary) -> set[int]:
    mask = f.mask()
    ids = vocabulary.everything() if mask is None else mask
    return set(vocabulary.ids_of(ids)) - set(vocabulary.eos_ids)


def bytes_of(vocabulary: Vocabulary, token_id: int) -> bytes:
    return vocabulary.tokenizer.token_bytes(token_id, skip_special=False)


def write(f: Filter, vocabulary: Vocabulary, text: str, rng: random.Random) -> str:
    """Accept allowed tokens that write `text`. Returns what no allowed token could write."""
    left = text.encode()
    while left:
        fits = [
            i
            for i in sorted(allowed(f, vocabulary))
            if (said := bytes_of(vocabulary, i)) and left.startswith(said)
        ]
        if not fits:
            break
        token_id = rng.choice(fits)
        f.accept(token_id)
        left = left[len(bytes_of(vocabulary, token_id)) :]
    return left.decode()


GOOD = '{"a": true}'
BAD = '{"a": 1}'


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize(
    ("rule", "text", "left"),
    [
        ("many", f"Hi <call {{x <call>\n {GOOD} </call> and {BAD}<call>{GOOD}</call>", ""),
        ("many", f"Hi <call>{BAD}", "1}"),
        ("many", f"<call>\n{GOOD}{GOOD}", GOOD),
        ("many", f"<call><call>{GOOD}", f"<call>{GOOD}"),
        ("many", f"<think>I write <call>{BAD}</think>{BAD}<call>{GOOD}</call>", ""),
        ("many", f"<think>a</think><think><call>{BAD}", "1}"),
        ("many", f" <thin <call>{BAD}", "1}"),
        ("last", f"{BAD}\n<call>{GOOD} more", " more"),
        ("listed", f"{GOOD} ; {GOOD}", ""),
        ("listed", f"\n {BAD}", "1}"),
        ("listed", f"So: {BAD}", ""),
        ("listed", f"<|tag|>{GOOD};{BAD}", "1}"),
        ("listed", f"<think>{BAD}</think>{BAD}", "1}"),
        ("listed", f"<think>{BAD}</think>\n{GOOD}", ""),
    ],
)
def test_a_document_after_the_marker_follows_the_schema(
    kind: str, rule: str, text: str, left: str, seed: int
) -> None:
    vocabulary = VOCABULARIES[kind]
    f = RULES[rule].filter(vocabulary)
    assert write(f, vocabulary, text, random.Random(seed)) == left


def test_reply_may_end_in_free_text_and_not_in_a_document() -> None:
    rng = random.Random(1)
    f = MANY.filter(PLAIN)
    for text, is_complete in [("Hi", True), ("<call>", False), (GOOD, False), (CLOSING, True)]:
        assert write(f, PLAIN, text, rng) == ""
        assert (f.is_complete, f.is_finished) == (is_complete, False)
    f = LAST.filter(PLAIN)
    assert write(f, PLAIN, f"Hi<call>{GOOD}", rng) == ""
    assert f.is_complete and f.is_finished
    f = LISTED.filter(PLAIN)
    assert write(f, PLAIN, GOOD, rng) == ""
    assert f.is_complete and not f.is_finished


def test_free_text_has_no_mask_and_may_hold_special_tokens() -> None:
    f = MANY.filter(SPECIAL)
    assert allowed(f, SPECIAL) == set(range(len(SPECIAL.token_bytes) - 1)) - {
        256 + PIECES.index("<call>{")
    }
    plain = Vocabulary(
        ListTokenizer([bytes([i]) for i in range(256)] + [b"<end>"], {"<end>": 256}), 257
    )
    assert MANY.filter(plain).mask() is None
    f.accept(256 + len(PIECES) + 2)  # <|tag|> is no marker of this constraint
    assert f.mask() is not None and f.is_complete


def test_reply_that_begins_inside_the_reasoning() -> None:
    rule = Triggered(SCHEMA, MARKER, closing=CLOSING, begins_inside=True)
    for text, left in [(f"<call>{BAD}</think> <call>{BAD}", "1}"), (f"<call>{BAD}", "")]:
        assert write(rule.filter(PLAIN), PLAIN, text, random.Random(2)) == left


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("seed", range(10))
def test_random_replies_hold_valid_documents_only(kind: str, seed: int) -> None:
    """Tokens are drawn from the mask; the marker is favored, so that documents occur."""
    vocabulary, rng = VOCABULARIES[kind], random.Random(seed)
    f = MANY.filter(vocabulary)
    text, number = b"", 0
    for _ in range(400):
        ids = sorted(allowed(f, vocabulary))
        likely = [
            i for i in ids if bytes_of(vocabulary, i) in (b"<ca", b"ll>", b"<call>", b"ll>\n")
        ]
        ids = likely if likely and rng.random() < 0.4 else ids
        token_id = rng.choice(ids)
        f.accept(token_id)
        text += bytes_of(vocabulary, token_id)
    _, _, after = text.lstrip().partition(b"<call>")
    while after:
        document, closing, rest = after.partition(b"</call>")
        if closing:
            value: Any = json.loads(document)
            assert isinstance(value["a"], bool) and value.get("b", 1) in (1, "x")
            number += 1
        _, _, after = rest.partition(b"<call>")
    assert number > 2


@given(
    kind=st.sampled_from(["plain", "special"]), steps=st.lists(st.integers(-5, 400), max_size=40)
)
@settings(max_examples=examples(60), deadline=None)
def test_a_rewound_filter_equals_a_fresh_one(kind: str, steps: list[int]) -> None:
    """A negative step undoes tokens; others accept a token that writes a call, or any."""
    vocabulary = VOCABULARIES[kind]
    f = MANY.filter(vocabulary)
    script = f"a<call>{GOOD}</call>b<call>{GOOD}"
    ids: list[int] = []
    for step in steps:
        if step < 0:
            count = min(-step, len(ids))
            f.rewind(count)
            del ids[len(ids) - count :]
            continue
        text = b"".join(bytes_of(vocabulary, i) for i in ids)
        options = sorted(allowed(f, vocabulary))
        fits = [
            i
            for i in options
            if (said := bytes_of(vocabulary, i)) and script.encode().startswith(text + said)
        ]
        options = fits if fits and step % 7 else options
        ids.append(options[step % len(options)])
        f.accept(ids[-1])
    fresh = MANY.filter(vocabulary)
    for token_id in ids:
        fresh.accept(token_id)
    assert allowed(f, vocabulary) == allowed(fresh, vocabulary)
    assert (f.is_complete, f.is_finished) == (fresh.is_complete, fresh.is_finished)


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize(
    ("rule", "text", "left"),
    [
        (MANY, "[1]", ""),
        (MANY, "[1, x", "x"),
        (MANY, f"<call>{GOOD}</call>\n<call>{GOOD}</call>", ""),
        (MANY, f"<call>{BAD}", "1}"),
        (MANY, "So", "So"),
        (LAST, f"<call> {GOOD}", ""),
        (LISTED, f"{GOOD};{GOOD}", ""),
        (LISTED, "[2]", ""),
    ],
)
def test_answer_with_a_schema_or_calls(kind: str, rule: Triggered, text: str, left: str) -> None:
    answer = json.dumps({"type": "array", "items": {"type": "integer"}})
    vocabulary = VOCABULARIES[kind]
    for seed in range(3):
        f = AnswerOrCalls(JsonSchema(answer), rule).filter(vocabulary)
        assert write(f, vocabulary, text, random.Random(seed)) == left
        assert f.is_complete == (not left)


def test_special_token_that_a_grammar_cannot_name_is_refused() -> None:
    rule = AnswerOrCalls(JsonSchema("{}"), Triggered(SCHEMA, "[CALLS]"))
    with pytest.raises(ConstraintError, match="cannot name"):
        rule.filter(made("[CALLS]"))
    assert rule.filter(PLAIN).mask() is not None


def test_what_cannot_be_a_rule_is_refused() -> None:
    for fields in ({"marker": "<"}, {"marker": "\ud800x"}, {"reasoning": ("", "</think>")}):
        with pytest.raises(ConstraintError):
            Triggered(SCHEMA, **{"marker": MARKER, **fields})  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="schema of the tools"):
        Triggered({"type": "nothing"}, MARKER).filter(PLAIN)
    f = MANY.filter(PLAIN)
    with pytest.raises(ConstraintError, match="same token"):
        f.accept(256 + PIECES.index("<call>{"))
