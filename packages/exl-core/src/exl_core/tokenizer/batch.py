"""Encoding of several texts: padded batches, a cache of recent texts, texts with aliases.

Results are lists of ids. Callers make tensors from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from exl_core.errors import RequestError
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.special_text import SpecialText

MAX_CACHED_STRINGS = 100


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Texts of equal length, padded on the left.

    token_ids   one row per text
    offsets     position of a token minus its index in the row: the negated padding length
    is_padding  by row and index. Ids do not show padding, because its id may be EOS
    """

    token_ids: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    is_padding: tuple[tuple[bool, ...], ...]


def encode_batch(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    allow_special: bool = False,
    add_bos: bool | None = False,
) -> PaddedBatch:
    """Encodes every text like `Tokenizer.encode` and pads all to the longest."""
    rows = [tokenizer.encode(t, allow_special=allow_special, add_bos=add_bos) for t in texts]
    longest = max(map(len, rows), default=0)
    pad_id = padding_id(tokenizer)
    gaps = [longest - len(row) for row in rows]
    pairs = list(zip(rows, gaps, strict=True))
    return PaddedBatch(
        token_ids=tuple((*[pad_id] * gap, *row) for row, gap in pairs),
        offsets=tuple(-gap for gap in gaps),
        is_padding=tuple((*[True] * gap, *[False] * len(row)) for row, gap in pairs),
    )


def padding_id(tokenizer: Tokenizer) -> int:
    """Id for padding: PAD, else a token `<pad>`, else an EOS that is not BOS, else -1."""
    if tokenizer.pad_id is not None:
        return tokenizer.pad_id
    named = tokenizer.special_tokens.get("<pad>", 0)
    if named:
        return named
    return next((i for i in tokenizer.eos_ids if i != tokenizer.bos_id), -1)


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Length of `text` in tokens. The text of special tokens counts as ordinary text."""
    return len(tokenizer.encode(text))


class CachedEncoder:
    """`Tokenizer.encode` with a cache of recent texts. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, max_strings: int = MAX_CACHED_STRINGS) -> None:
        @lru_cache(maxsize=max_strings)
        def encode(text: str, allow_special: bool, add_bos: bool | None) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, allow_special=allow_special, add_bos=add_bos))

        self._encode = encode

    def encode(
        self, text: str, *, allow_special: bool = False, add_bos: bool | None = False
    ) -> tuple[int, ...]:
        return self._encode(text, allow_special, add_bos)


def encode_with_aliases(
    tokenizer: Tokenizer,
    text: str,
    aliases: Mapping[str, Sequence[int]],
    *,
    allow_special: bool = False,
    add_bos: bool | None = False,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids of `text` with each alias replaced by its ids, for instance those of an image.

    Aliases are matched first: leftmost first, the longest at each position. The text between two
    aliases is encoded separately, so no token crosses an alias. Such a text of more than
    `max_tokens` raises ContextLengthError.
    """
    if "" in aliases:
        raise RequestError("an alias is the empty text", got=sorted(aliases))
    names = list(aliases)
    ids = tokenizer.encode("", add_bos=add_bos)
    for part in SpecialText({name: place for place, name in enumerate(names)}).split(text):
        if isinstance(part, int):
            ids += aliases[names[part]]
        else:
            ids += tokenizer.encode(part, allow_special=allow_special, max_tokens=max_tokens)
    return ids
