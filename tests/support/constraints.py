"""Small vocabularies, finite languages and brute-force masks, which filters are compared with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from exl_core.constrain.choice import OneOf
from exl_core.constrain.filter import Constraint, Filter
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.tokenizer.base import ControlIds, Tokenizer
from support.scripted import ByteTokenizer


class ListTokenizer(Tokenizer):
    """Tokenizer of the given tokens by id, None for a gap. Encodes greedily with the longest token.

    EOS is the last id.
    """

    kind = "list"

    def __init__(self, tokens: Sequence[bytes | None], special: Mapping[str, int]) -> None:
        super().__init__(ControlIds(eos_ids=(len(tokens) - 1,)), special, "ListTokenizer")
        self._tokens = list(tokens)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            fits = [i for i, token in enumerate(self._tokens) if token and rest.startswith(token)]
            ids.append(max(fits, key=lambda i: len(self._tokens[i] or b"")))
            rest = rest[len(self._tokens[ids[-1]] or b"") :]
        return ids

    def _piece(self, token_id: int) -> bytes | None:
        return self._tokens[token_id] if token_id < len(self._tokens) else None


def made_tokenizer() -> ListTokenizer:
    """Vocabulary with merges, two ids of one text, partial characters, gaps and special tokens."""
    merges = ["ab", "bc", "abc", "aa", "bb", "ca", '{"', '":', '",', "true", "als", "tr", "ab"]
    merges += ["Ab", "AB", "ß", "ö", "a\nb", "cé"]
    tokens: list[bytes | None] = [bytes([i]) for i in range(256)]
    tokens += [None, b"<tool>", *(text.encode() for text in merges)]
    tokens += ["ö".encode()[1:] + b"a", b"a" + "ö".encode()[:1], None, b"\xff\xfe", b"<end>"]
    return ListTokenizer(tokens, {"<tool>": 257, "<end>": len(tokens) - 1})


def vocabularies() -> dict[str, Vocabulary]:
    """One vocabulary that fills the last word of its masks, and one that the model pads."""
    made = made_tokenizer()
    return {"bytes": Vocabulary(ByteTokenizer(), 288), "made": Vocabulary(made, 333)}


def _words(alphabet: str, longest: int) -> list[str]:
    words = [""]
    for word in words:
        if len(word) < longest:
            words += [word + char for char in alphabet]
    return words


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [None, "ö"]}},
    "required": ["a"],
    "additionalProperties": False,
}
# Constraints, each with all texts that satisfy it.
LANGUAGES: dict[str, tuple[Constraint, list[str]]] = {
    "regex": (Regex("ab?c{0,2}"), ["a", "ab", "ac", "acc", "abc", "abcc"]),
    "regex_choice": (Regex("^(a|bc){1,2}$"), ["a", "bc", "aa", "abc", "bca", "bcbc"]),
    "regex_unicode": (Regex("a[öß]b?"), ["aö", "aß", "aöb", "aßb"]),
    "regex_symbols": (Regex('a/b\\n?"\\$'), ['a/b"$', 'a/b\n"$']),
    "regex_empty": (Regex(""), [""]),
    "regex_optional": (Regex("(ab)?c?"), ["", "ab", "c", "abc"]),
    "regex_words": (Regex("[ab]{0,3}"), _words("ab", 3)),
    "grammar": (
        Grammar('start: "a" pair? "b"\npair: "a" "b" | "c"'),
        ["ab", "aabb", "acb"],
    ),
    "grammar_nested": (
        Grammar('start: "a" one "b" | "c"\none: "a" two "b" | "c"\ntwo: "c" | "a"'),
        ["c", "acb", "aacbb", "aaabb"],
    ),
    "json_enum": (
        JsonSchema({"enum": ["a", "ab", 1, 12, True, None]}),
        ['"a"', '"ab"', "1", "12", "true", "null"],
    ),
    "json_object": (
        JsonSchema(OBJECT, compact=True),
        [f'{{"a":{a}{b}}}' for a in ("true", "false") for b in ("", ',"b":null', ',"b":"ö"')],
    ),
    "one_of": (OneOf(["a", "abc", "abb", "öa", "c"]), ["a", "abc", "abb", "öa", "c"]),
    "one_of_empty": (OneOf(["", "ab"]), ["", "ab"]),
    "one_of_any_case": (
        OneOf(["aB", "ßc"], ignore_case=True),
        ["ab", "aB", "Ab", "AB", "ßc", "ßC", "SSc", "SSC"],
    ),
    "foreign": (Foreign("placeholder"), ["ab", "abc", "ca"]),
}


def brute_force(vocabulary: Vocabulary, language: Sequence[str], text: bytes) -> list[int]:
    """Ids after which a text of the language can still be reached."""
    whole = [word.encode() for word in language]
    return [
        number
        for number, token in enumerate(vocabulary.token_bytes)
        if token and any(word.startswith(text + token) for word in whole)
    ]


def assert_agrees(f: Filter, vocabulary: Vocabulary, language: Sequence[str], text: bytes) -> None:
    whole = [word.encode() for word in language]
    expected = brute_force(vocabulary, language, text)
    mask = f.mask()
    assert mask is not None
    assert len(mask) == vocabulary.num_words
    assert without_eos(vocabulary.ids_of(mask), vocabulary) == expected
    assert f.is_complete == (text in whole)
    assert f.is_finished == (text in whole and not expected)


class SelectObject:
    """Minimal filter object of exllamav2 that allows one of several texts.

    It ends the reply at a text that is not a prefix of another one.
    """

    def __init__(self, vocabulary: Vocabulary, options: Sequence[str]) -> None:
        self.tokenizer = vocabulary  # shared by all copies
        self.options = [option.encode() for option in options]
        self.text = b"not begun"

    def begin(self, prefix: str) -> None:
        assert prefix == ""
        self.text = b""

    def feed(self, token: object) -> None:
        assert token.shape == (1, 1)  # type: ignore[attr-defined]
        number = int(token[0][0])  # type: ignore[index]
        self.text += self.tokenizer.token_bytes[number]

    def next(self) -> tuple[set[int], set[int]]:
        ids = {
            number
            for number, token in enumerate(self.tokenizer.token_bytes)
            if token and any(o.startswith(self.text + token) for o in self.options)
        }
        if self.text in self.options:
            ids |= set(self.tokenizer.eos_ids)
        longer = [o for o in self.options if o != self.text]
        ends = {
            number
            for number in ids - set(self.tokenizer.eos_ids)
            if (after := self.text + self.tokenizer.token_bytes[number]) in self.options
            and not any(o.startswith(after) and o != after for o in longer)
        }
        return ids, ends


class CloneObject(SelectObject):
    """`SelectObject` with a `clone` method, and with sorted lists instead of sets."""

    def clone(self, made: CloneObject | None = None) -> CloneObject:
        made = made or CloneObject.__new__(CloneObject)
        made.tokenizer, made.options, made.text = self.tokenizer, self.options, self.text
        return made

    def next(self) -> tuple[list[int], list[int]]:  # type: ignore[override]
        pass_tokens, end_tokens = super().next()
        return sorted(pass_tokens), sorted(end_tokens)


class UncopyableObject(SelectObject):
    """`SelectObject` with an attribute that cannot be copied; `begin` restarts it."""

    def __init__(self, vocabulary: Vocabulary, options: Sequence[str]) -> None:
        super().__init__(vocabulary, options)
        self.generator = (i for i in range(3))


def make_filter(name: str, vocabulary: Vocabulary) -> tuple[Filter, list[str]]:
    constraint, language = LANGUAGES[name]
    if name == "foreign":
        constraint = Foreign(SelectObject(vocabulary, language))
    return constraint.filter(vocabulary), language


def random_reply(f: Filter, vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """Random allowed tokens until the filter is finished."""
    ids: list[int] = []
    while not f.is_finished:
        mask = f.mask()
        assert mask is not None
        ids.append(rng.choice(without_eos(vocabulary.ids_of(mask), vocabulary)))
        f.accept(ids[-1])
    return ids


def without_eos(ids: list[int], vocabulary: Vocabulary) -> list[int]:
    return [i for i in ids if i not in vocabulary.eos_ids]
