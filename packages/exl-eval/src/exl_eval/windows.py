"""Documents of tokens as the windows that a model is given, and which tokens of each are scored.

Knows ids and sizes; neither models nor what the ways of cutting are called (`styles.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from exl_core.tokenizer.base import Tokenizer

_SPACES = b" \t\n\r\v\f"


@dataclass(frozen=True, slots=True)
class Window:
    """What the model is given; tokens `first` and later are scored. `size_bytes` and `words` are
    the text that the scored tokens make: its bytes, and the words that begin in it."""

    token_ids: tuple[int, ...]
    first: int
    size_bytes: int
    words: int


class Tokens:
    """The ids of a document, and how much text each of them stands for."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        sizes, words = measure_pieces(tokenizer, self.token_ids)
        self._size_before = list(accumulate(sizes, initial=0))
        self._words_before = list(accumulate(words, initial=0))

    def __len__(self) -> int:
        return len(self.token_ids)

    def window(self, start: int, end: int, *, scored_from: int, head: int | None = None) -> Window:
        """Tokens start .. end - 1, after `head` if there is one; scored from `scored_from` on."""
        ids = self.token_ids[start:end]
        return Window(
            ids if head is None else (head, *ids),
            first=scored_from - start + (head is not None),
            size_bytes=self._size_before[end] - self._size_before[scored_from],
            words=self._words_before[end] - self._words_before[scored_from],
        )

    def after(self, token_id: int | None) -> Tokens:
        """With a token before them that stands for no text; None: as they are."""
        if token_id is None:
            return self
        other = object.__new__(Tokens)
        other.token_ids = (token_id, *self.token_ids)
        other._size_before = [0, *self._size_before]
        other._words_before = [0, *self._words_before]
        return other


def measure_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes of each token, and words that begin in it: runs of anything but ASCII's spaces."""
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
            count -= 1  # goes on with the word before it
        size = len(piece)
        if to_drop:  # what decoding leaves out at the start of a text
            dropped = min(to_drop, size - len(piece.lstrip(b" ")))
            size, to_drop = size - dropped, to_drop - dropped if dropped == size else 0
        sizes.append(size)
        words.append(count)
        is_after_space = piece[-1] in _SPACES if piece else is_after_space
    return sizes, words


def disjoint(tokens: Tokens, ctx: int) -> Iterator[Window]:
    """All but the first token of each are scored; what is left at the end is dropped."""
    for start in range(0, len(tokens) - ctx + 1, ctx):
        yield tokens.window(start, start + ctx, scored_from=start + 1)


def disjoint_after(tokens: Tokens, ctx: int, head: int) -> Iterator[Window]:
    """The same windows without their last token and with `head` before them, which is what
    models that need BOS everywhere are given; all but `head` are scored."""
    for start in range(0, len(tokens) - ctx + 1, ctx):
        yield tokens.window(start, start + ctx - 1, scored_from=start, head=head)


def second_halves(tokens: Tokens, ctx: int, head: int | None) -> Iterator[Window]:
    """As llama.cpp does it: predictions of positions ctx / 2 to ctx - 2 of disjoint windows count,
    and `head` takes the place of each window's first token."""
    for start in range(0, len(tokens) - ctx + 1, ctx):
        scored = start + ctx // 2 + 1
        own = start if head is None else start + 1
        yield tokens.window(own, start + ctx, scored_from=scored, head=head)


def strided(tokens: Tokens, ctx: int, stride: int) -> Iterator[Window]:
    """Windows that overlap, each `stride` further; every token but the first is scored once, after
    at least ctx - stride others wherever there are so many. The last window may be shorter."""
    scored = 1
    for start in range(0, len(tokens), stride):
        end = min(start + ctx, len(tokens))
        if end > scored:
            yield tokens.window(start, end, scored_from=scored)
        scored = end
        if end == len(tokens):
            return


def rolling(tokens: Tokens, ctx: int) -> Iterator[Window]:
    """Every token but the first is scored once. Predictions come from at most `ctx` tokens: the
    first window has as many, and the others overlap only where the last one reaches back."""
    scored = 1
    while scored < len(tokens):
        end = min(scored + ctx, len(tokens))
        yield tokens.window(max(0, end - ctx - 1), end, scored_from=scored)
        scored = end
