"""Cuts tokenized documents into windows, and marks the tokens of each that are scored.

Knows ids and sizes; neither models nor the names of the styles (`styles.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from exl_core.tokenizer.base import Tokenizer

_SPACES = b" \t\n\r\v\f"


@dataclass(frozen=True, slots=True)
class Window:
    """Input of one scoring run. Tokens `first` and later are scored. `size_bytes` and `words`
    measure the text of the scored tokens: its bytes, and the words that begin in it."""

    token_ids: tuple[int, ...]
    first: int
    size_bytes: int
    words: int


class Tokens:
    """Token ids of a document, with the bytes and words of each."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        sizes, words = measure_pieces(tokenizer, self.token_ids)
        self._size_before = list(accumulate(sizes, initial=0))
        self._words_before = list(accumulate(words, initial=0))

    def __len__(self) -> int:
        return len(self.token_ids)

    def window(self, start: int, end: int, *, scored_from: int, head: int | None = None) -> Window:
        """Window of tokens start .. end - 1, preceded by `head` if given; scored from index
        `scored_from` of the document on."""
        ids = self.token_ids[start:end]
        return Window(
            ids if head is None else (head, *ids),
            first=scored_from - start + (head is not None),
            size_bytes=self._size_before[end] - self._size_before[scored_from],
            words=self._words_before[end] - self._words_before[scored_from],
        )

    def after(self, token_id: int | None) -> Tokens:
        """The tokens preceded by one that stands for no text; unchanged for None."""
        if token_id is None:
            return self
        other = object.__new__(Tokens)
        other.token_ids = (token_id, *self.token_ids)
        other._size_before = [0, *self._size_before]
        other._words_before = [0, *self._words_before]
        return other


def measure_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes of each token, and the number of words that begin in it. A word is a run of bytes other
    than ASCII whitespace."""
    sizes, words = [], []
    known: dict[int, tuple[bytes, int]] = {}
    is_after_space = True
    to_drop = tokenizer.leading_spaces_dropped
    for token_id in token_ids:
        found = known.get(token_id)
        if found is None:
            piece = tokenizer.token_bytes(token_id, skip_special=False)
            found = known[token_id] = (piece, len(piece.split()))
        piece, count = found
        if piece and not is_after_space and piece[0] not in _SPACES:
            count -= 1  # continues the word before it
        size = len(piece)
        if to_drop:  # leading spaces that decoding drops at the start of a text
            dropped = min(to_drop, size - len(piece.lstrip(b" ")))
            size, to_drop = size - dropped, to_drop - dropped if dropped == size else 0
        sizes.append(size)
        words.append(count)
        is_after_space = piece[-1] in _SPACES if piece else is_after_space
    return sizes, words


def disjoint(tokens: Tokens, ctx: int) -> Iterator[Window]:
    """Disjoint windows. All tokens but the first of each are scored. Tokens that do not fill a
    window at the end are dropped."""
    for start in range(0, len(tokens) - ctx + 1, ctx):
        yield tokens.window(start, start + ctx, scored_from=start + 1)


def disjoint_after(tokens: Tokens, ctx: int, head: int) -> Iterator[Window]:
    """As `disjoint`, with `head` in front of each window and its last token dropped, for models
    that need BOS in every window. All tokens but `head` are scored."""
    for start in range(0, len(tokens) - ctx + 1, ctx):
        yield tokens.window(start, start + ctx - 1, scored_from=start, head=head)


def second_halves(tokens: Tokens, ctx: int, head: int | None) -> Iterator[Window]:
    """Windows as in llama.cpp: disjoint, with `head` in place of the first token of each. The
    predictions at positions ctx / 2 to ctx - 2 count."""
    for start in range(0, len(tokens) - ctx + 1, ctx):
        scored = start + ctx // 2 + 1
        own = start if head is None else start + 1
        yield tokens.window(own, start + ctx, scored_from=scored, head=head)


def strided(tokens: Tokens, ctx: int, stride: int) -> Iterator[Window]:
    """Overlapping windows, `stride` apart. Every token but the first is scored once, with at least
    ctx - stride tokens of context wherever the document has them. The last window may be shorter.
    """
    scored = 1
    for start in range(0, len(tokens), stride):
        end = min(start + ctx, len(tokens))
        if end > scored:
            yield tokens.window(start, end, scored_from=scored)
        scored = end
        if end == len(tokens):
            return


def rolling(tokens: Tokens, ctx: int) -> Iterator[Window]:
    """Windows as in lm-eval. Every token but the first is scored once, with at most `ctx` tokens of
    context. Each window scores the next `ctx` tokens; the last one scores fewer, and reaches back
    into its predecessor to have a full context."""
    scored = 1
    while scored < len(tokens):
        end = min(scored + ctx, len(tokens))
        yield tokens.window(max(0, end - ctx - 1), end, scored_from=scored)
        scored = end
