"""`tokenizer.json` made from SentencePiece models, read by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend

from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.spm import SentencePieceTokenizer
from exl_core.tokenizer.spm_json import merges_of, tokenizer_json
from support.profiles import examples

Train = Callable[..., bytes]
WriteDirectory = Callable[..., Path]
MARK = "\u2581"
DEFINED = ["<code>", "\n\n", "\n\n\n", MARK + MARK, "🙂🙂"]


def written(tokenizer: Tokenizer) -> bytes | None:
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer_json(tokenizer)


def assert_same_ids(content: bytes | None, library: SentencePieceProcessor, text: str) -> None:
    assert content is not None
    backend = Backend.from_str(content.decode())
    backend.encode_special_tokens = True  # sentencepiece takes no text for a control piece
    assert backend.encode(text, add_special_tokens=False).ids == library.encode(text)


@pytest.mark.parametrize("has_bytes", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("adds_space", [True, False], ids=["space", "no-space"])
def test_ids_are_those_of_sentencepiece(
    train_sentencepiece: Train,
    write_directory: WriteDirectory,
    awkward_texts: list[str],
    adds_space: bool,
    has_bytes: bool,
) -> None:
    model = train_sentencepiece(
        "bpe",
        add_dummy_prefix=adds_space,
        byte_fallback=has_bytes,
        vocab_size=345 if has_bytes else 200,
        user_defined_symbols=[] if adds_space else DEFINED,
    )
    library = SentencePieceProcessor(model_proto=model)
    content = written(load_tokenizer(write_directory({"tokenizer.model": model})))
    for text in [*awkward_texts, "<code>x</code>", " <code> 🙂🙂🙂", "a   b\n\n\n\nc"]:
        if adds_space or MARK not in text:
            assert_same_ids(content, library, text)


@pytest.mark.hypothesis
def test_any_text_has_the_same_ids(
    train_sentencepiece: Train, write_directory: WriteDirectory
) -> None:
    model = train_sentencepiece("bpe", add_dummy_prefix=False, user_defined_symbols=DEFINED)
    library = SentencePieceProcessor(model_proto=model)
    content = written(load_tokenizer(write_directory({"tokenizer.model": model})))

    @settings(max_examples=examples(100))
    @given(st.text(max_size=40) | st.text(alphabet=" \n<s>/thelo🙂", max_size=40))
    def check(text: str) -> None:
        assert_same_ids(content, library, text.replace(MARK, ""))

    check()


def test_a_directory_with_both_files_reads_alike(
    train_sentencepiece: Train, write_directory: WriteDirectory, awkward_texts: list[str]
) -> None:
    model = train_sentencepiece("bpe", add_dummy_prefix=False, user_defined_symbols=DEFINED)
    before = load_tokenizer(write_directory({"tokenizer.model": model}))
    content = written(before)
    assert content is not None
    after = load_tokenizer(write_directory({"tokenizer.json": content}))
    assert (before.kind, after.kind) == ("sentencepiece", "bpe")
    assert before.bos_id == after.bos_id
    assert before.control.adds_bos == after.control.adds_bos
    for text in [*(text for text in awkward_texts if MARK not in text), "<s>a</s> b"]:
        for allow_special in (False, True):
            ids = before.encode(text, allow_special=allow_special)
            assert after.encode(text, allow_special=allow_special) == ids
            assert after.decode(ids) == before.decode(ids)


def test_ids_of_a_real_vocabulary_are_the_same(
    gemma3_tokenizer: Tokenizer, awkward_texts: list[str]
) -> None:
    content = written(gemma3_tokenizer)
    assert content is not None
    backend = Backend.from_str(content.decode())
    bos = gemma3_tokenizer.bos_id
    for text in (text for text in awkward_texts if MARK not in text):
        ids = gemma3_tokenizer.encode(text, add_bos=False, allow_special=True)
        assert backend.encode(text, add_special_tokens=False).ids == ids
        assert backend.encode(text).ids == [bos, *ids]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "unigram"},
        {"kind": "bpe", "normalization_rule_name": "nmt_nfkc"},
        {"kind": "bpe", "remove_extra_whitespaces": True},
        {"kind": "bpe", "treat_whitespace_as_suffix": True},
        {"kind": "bpe", "add_dummy_prefix": True, "user_defined_symbols": ["<code>"]},
    ],
    ids=["unigram", "charsmap", "folded-spaces", "suffix", "space-and-defined"],
)
def test_models_without_an_equivalent_have_none(
    train_sentencepiece: Train, write_directory: WriteDirectory, options: dict[str, object]
) -> None:
    model = train_sentencepiece(**options)
    assert written(load_tokenizer(write_directory({"tokenizer.model": model}))) is None


def test_merges_are_in_the_order_of_scores() -> None:
    scores = {"a": -3.0, "b": -4.0, "ab": -1.0, "ba": -0.5, "aba": -2.0, "xy": 0.0}
    assert merges_of(scores) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]
