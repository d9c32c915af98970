"""Tables over all tokens, compared with their definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.pieces import UNDEFINED, CharTrie, Pieces
from support.scripted import BOS_ID, EOS_ID, ByteTokenizer


class Listed(Tokenizer):
    """Tokenizer with given pieces by id. None is a gap, and the last piece is special."""

    kind = "list"

    def __init__(self, *pieces: bytes | None) -> None:
        self._pieces = pieces
        last, special = len(pieces) - 1, pieces[-1]
        assert special is not None
        super().__init__(ControlIds(eos_ids=(last,)), {str(special, "utf-8"): last}, "Listed")

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        raise NotImplementedError

    def _piece(self, token_id: int) -> bytes | None:
        return self._pieces[token_id]


@pytest.fixture
def pieces() -> Pieces:
    return Pieces(
        Listed(b"a", b"ab", b" The", None, b"ab", b"", b"\xc3", b"A", b"abc", b"The", b"<end>")
    )


def test_piece_is_the_text_a_token_adds_inside_a_sequence(pieces: Pieces) -> None:
    texts = ("a", "ab", " The", UNDEFINED, "ab", "", "\ufffd", "A", "abc", "The")
    assert pieces.texts == (*texts, "")
    assert pieces.texts_with_special == (*texts, "<end>")


def test_the_highest_id_represents_a_piece(pieces: Pieces) -> None:
    assert pieces.id_of_text["ab"] == 4
    assert pieces.single_id("ab") == 4
    assert pieces.single_id("<end>") == 10
    assert pieces.single_id("nowhere") is None
    assert pieces.single_id("") is None
    assert UNDEFINED not in pieces.id_of_text


def test_healing_candidates_start_with_the_token(pieces: Pieces) -> None:
    assert pieces.replacements(0) == [0, 4, 8]
    assert pieces.replacements(4) == [4, 8]
    assert pieces.replacements(1) == [1]  # another id represents its piece
    for silent in (3, 5, 10):
        assert pieces.replacements(silent) == [silent]
    assert pieces.starting_with("ab") == [4, 8]
    assert pieces.starting_with("") == [0, 2, 4, 6, 7, 8, 9]
    assert pieces.starting_with("x") == []


def test_tries_map_characters_to_ids(pieces: Pieces) -> None:
    def leaf(trie: CharTrie, text: str) -> list[int]:
        node = trie.find(text)
        return [] if node is None else node.leaf

    assert leaf(pieces.trie, "ab") == [1, 4]
    assert leaf(pieces.trie, " The") == [2]
    assert leaf(pieces.trie, " T") == []
    assert leaf(pieces.lower_trie, "a") == [0, 7]
    assert leaf(pieces.lower_trie, " the") == [2]
    assert set(pieces.trie.children) == {"a", " ", "\ufffd", "A", "T"}
    assert pieces.trie.find("none") is None


def test_byte_values() -> None:
    values = Pieces(ByteTokenizer()).byte_values
    assert values[:256] == tuple(range(256))
    assert (values[BOS_ID], values[EOS_ID]) == (-1, -1)


def test_prefix_table_of_a_real_vocabulary_matches_a_scan(smollm2_tokenizer: Tokenizer) -> None:
    pieces = Pieces(smollm2_tokenizer)
    assert len(pieces.texts) == smollm2_tokenizer.vocab_size
    for text in (" th", "Hello", "\n", " "):
        expected = sorted({pieces.id_of_text[t] for t in pieces.texts if t and t.startswith(text)})
        assert pieces.starting_with(text) == expected
    for text in ("Hello", " world", "ing"):
        token_id = pieces.single_id(text)
        assert token_id is not None
        assert smollm2_tokenizer.encode(text) == [token_id]
        assert token_id in pieces.replacements(token_id)
    every = smollm2_tokenizer.encode("One may heal, or not: naïve ☕ words.")
    assert all(token_id in pieces.replacements(token_id) for token_id in every)


def test_added_ordinary_tokens_are_pieces(
    byte_level_backend: Callable[[], Backend], write_directory: Callable[..., Path]
) -> None:
    folder = write_directory(
        {
            "tokenizer.json": byte_level_backend().to_str(),
            "tokenizer_config.json": {"eos_token": "<|end|>"},
        }
    )
    tokenizer = load_tokenizer(folder)
    pieces = Pieces(tokenizer)
    for text in ("<think>", "<café>", "    "):
        token_id = pieces.single_id(text)
        assert token_id is not None
        assert not tokenizer.is_special(token_id)
        assert pieces.texts[token_id] == text
        for allow_special in (False, True):
            assert tokenizer.encode(f"a{text}b", allow_special=allow_special)[1:-1] == [token_id]
        for skip_special in (False, True):
            assert tokenizer.decode([token_id], skip_special=skip_special) == text
    end = pieces.single_id("<|end|>")
    assert end is not None
    assert pieces.texts[end] == ""
    assert pieces.texts_with_special[end] == "<|end|>"
    assert end not in tokenizer.encode("<|end|>")
    assert tokenizer.encode("<|end|>", allow_special=True) == [end]
