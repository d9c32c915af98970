"""Tables over all tokens of a tokenizer: their texts, and which texts they begin.

A piece is the text that a token adds inside a sequence: its leading space is kept, and bytes that
are no whole character read as U+FFFD. Several ids may have one piece; the highest stands for all of
them, so that a table has one id for each text. Everything is built at first use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from exl_core.tokenizer.base import Tokenizer

UNDEFINED = "\ufffd\ufffd_undefined_token_\ufffd\ufffd"
"""The piece of an id that has no token."""


@dataclass(slots=True)
class CharTrie:
    """Pieces by their characters: `leaf` has the ids whose piece ends at this node, ascending."""

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
        """The node that `text` leads to."""
        node: CharTrie | None = self
        for char in text:
            node = None if node is None else node.children.get(char)
        return node


class Pieces:
    """The tables of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """By id; a special token has the empty text."""
        return self._texts(skip_special=True)

    @cached_property
    def texts_with_special(self) -> tuple[str, ...]:
        """By id; a special token has its own text."""
        return self._texts(skip_special=False)

    @cached_property
    def byte_values(self) -> tuple[int, ...]:
        """By id: the value of a token that is a single byte, else -1."""
        return tuple(
            raw[0] if len(raw) == 1 else -1
            for raw in map(self._tokenizer.token_bytes, range(self._tokenizer.vocab_size))
        )

    @cached_property
    def id_of_text(self) -> dict[str, int]:
        """The id that stands for each piece; without special tokens, gaps and empty pieces."""
        return {text: i for i, text in enumerate(self.texts) if text and text != UNDEFINED}

    def single_id(self, text: str) -> int | None:
        """The token that is exactly `text`, special tokens first."""
        special = self._tokenizer.special_tokens.get(text)
        return self.id_of_text.get(text) if special is None else special

    def starting_with(self, prefix: str) -> list[int]:
        """Ascending, the ids whose piece starts with `prefix`: one for each piece."""
        texts = self._sorted_texts
        first = bisect_left(texts, prefix)
        end = bisect_right(texts, prefix, lo=first, key=lambda text: text[: len(prefix)])
        return sorted(self.id_of_text[text] for text in texts[first:end])

    def replacements(self, token_id: int) -> list[int]:
        """What may stand in for a last prompt token that perhaps was cut short, itself included.

        Ascending. A token without text, or that does not stand for its piece, can only be itself.
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
        """Of the pieces in lower case."""
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
