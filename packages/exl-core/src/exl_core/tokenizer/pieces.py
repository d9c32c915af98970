"""Tables over all tokens of a tokenizer: texts by id, ids by text, ids by prefix.

A piece is the text that a token adds inside a sequence. Its leading space is kept, and incomplete
characters read as U+FFFD. Several ids may have the same piece. The highest of them represents the
piece, so that tables by text have one id per text. Every table is built at first use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from exl_core.tokenizer.base import Tokenizer

UNDEFINED = "\ufffd\ufffd_undefined_token_\ufffd\ufffd"
"""Piece of an id that has no token."""


@dataclass(slots=True)
class CharTrie:
    """Trie of pieces by character. `leaf`: ids whose piece ends at this node, ascending."""

    children: dict[str, CharTrie] = field(default_factory=dict)
    leaf: list[int] = field(default_factory=list)

    def add(self, text: str, token_id: int) -> None:
        node = self
        for char in text:
            child = node.children.get(char)
            if child is None:
                child = node.children[char] = CharTrie()
            node = child
        node.leaf.append(token_id)

    def find(self, text: str) -> CharTrie | None:
        """Node at the end of `text`, or None."""
        node: CharTrie | None = self
        for char in text:
            node = None if node is None else node.children.get(char)
        return node


class Pieces:
    """Tables of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Pieces by id. The piece of a special token is empty."""
        return self._texts(skip_special=True)

    @cached_property
    def texts_with_special(self) -> tuple[str, ...]:
        """Pieces by id. The piece of a special token is its own text."""
        return self._texts(skip_special=False)

    @cached_property
    def byte_values(self) -> tuple[int, ...]:
        """Byte value by id, for tokens of a single byte; -1 for others."""
        return tuple(
            raw[0] if len(raw) == 1 else -1
            for raw in map(self._tokenizer.token_bytes, range(self._tokenizer.vocab_size))
        )

    @cached_property
    def id_of_text(self) -> dict[str, int]:
        """Id that represents each piece, without special tokens, gaps and empty pieces."""
        return {text: i for i, text in enumerate(self.texts) if text and text != UNDEFINED}

    def single_id(self, text: str) -> int | None:
        """Id of the token whose text is exactly `text`. Special tokens have precedence."""
        special = self._tokenizer.special_tokens.get(text)
        return self.id_of_text.get(text) if special is None else special

    def starting_with(self, prefix: str) -> list[int]:
        """Ids whose piece starts with `prefix`, ascending, one per piece."""
        texts = self._sorted_texts
        first = bisect_left(texts, prefix)
        end = bisect_right(texts, prefix, lo=first, key=lambda text: text[: len(prefix)])
        return sorted(self.id_of_text[text] for text in texts[first:end])

    def replacements(self, token_id: int) -> list[int]:
        """Ids that may replace the last prompt token in healing, ascending, including itself.

        The candidates are the tokens whose piece starts with this token's piece. A token without
        text, or one that does not represent its piece, has no other candidate.
        """
        text = self.texts[token_id]
        if self.id_of_text.get(text) != token_id:
            return [token_id]
        return self.starting_with(text)

    @cached_property
    def trie(self) -> CharTrie:
        return _trie_of(self.texts)

    @cached_property
    def lower_trie(self) -> CharTrie:
        """Trie of the pieces in lower case."""
        return _trie_of(map(str.lower, self.texts))

    @cached_property
    def _sorted_texts(self) -> list[str]:
        return sorted(self.id_of_text)

    def _texts(self, *, skip_special: bool) -> tuple[str, ...]:
        tokenizer = self._tokenizer
        return tuple(
            tokenizer.token_bytes(i, skip_special=skip_special).decode("utf-8", errors="replace")
            if tokenizer.has_token(i)
            else UNDEFINED
            for i in range(tokenizer.vocab_size)
        )


def _trie_of(texts: Iterable[str]) -> CharTrie:
    trie = CharTrie()
    for token_id, text in enumerate(texts):
        if text and text.lower() != UNDEFINED.lower():
            trie.add(text, token_id)
    return trie
