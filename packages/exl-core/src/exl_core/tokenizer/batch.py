"""Encoding beyond one plain text: batches of equal length, remembered texts, texts with aliases.

Lists of ids only; tensors are made by whoever needs them.
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
    """Texts of one length, padded on the left.

    token_ids   a row for each text
    offsets     what to add to an index to get a token's position: minus the padding of the row
    is_padding  by row and index. Not to be read off the ids: padding may be EOS
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
    """Every text as `Tokenizer.encode` has it, and filled up to the longest."""
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
    """PAD, else a token `<pad>`, else EOS where it is not BOS, else -1: nothing fits."""
    if tokenizer.pad_id is not None:
        return tokenizer.pad_id
    named = tokenizer.special_tokens.get("<pad>", 0)
    if named:
        return named
    return next((i for i in tokenizer.eos_ids if i != tokenizer.bos_id), -1)


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The length of `text`, in which special tokens are text like any other."""
    return len(tokenizer.encode(text))


class CachedEncoder:
    """`Tokenizer.encode` that remembers the latest texts. Safe to share between threads."""

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
    """The ids of `text`, where each alias in it stands for given ids, such as those of an image.

    Aliases are found before anything else is: leftmost first, the longest at each place. The text
    between them is encoded run by run, so no token goes across an alias. A run of more than
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
