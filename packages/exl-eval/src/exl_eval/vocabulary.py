"""Which vocabulary a figure is about, and whether two models have the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from exl_core.errors import RequestError
from exl_core.tokenizer.base import REPLACEMENT, Tokenizer
from exl_eval.windows import Window

_NO_TOKEN = REPLACEMENT.encode()
_ADVICE = (
    "Predictions cannot be compared token by token; take models of one family, or compare bits per "
    "byte of 'exl eval perplexity'."
)


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """Of the kind and of every token's bytes in the order of ids: equal for equal vocabularies."""
    digest = hashlib.sha256(tokenizer.kind.encode())
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id, skip_special=False)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def check_same_vocabulary(first: Tokenizer, second: Tokenizer) -> None:
    """An id must mean the same to both. Ids that only one of them has are padding."""
    for token_id in range(min(first.vocab_size, second.vocab_size)):
        expected = first.token_bytes(token_id, skip_special=False)
        got = second.token_bytes(token_id, skip_special=False)
        is_special = first.is_special(token_id) and second.is_special(token_id)
        if expected != got and (is_special or _NO_TOKEN not in (expected, got)):
            raise RequestError(
                f"the two models have different tokenizers: token {token_id} differs",
                where=second.where,
                expected=repr(expected),
                got=repr(got),
                next_step=_ADVICE,
            )


def check_same_windows(first: Sequence[Window], second: Sequence[Window], where: object) -> None:
    """The same text must be the same tokens to both, in the same windows."""
    for number, (ours, theirs) in enumerate(zip(first, second, strict=False), start=1):
        if ours.token_ids == theirs.token_ids:
            continue
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), 0)
        raise RequestError(
            f"the two tokenizers cut the text in different ways, from token {place} of window "
            f"{number} on",
            where=where,
            expected=list(ours.token_ids[place : place + 4]),
            got=list(theirs.token_ids[place : place + 4]),
            next_step=_ADVICE,
        )
    if len(first) != len(second):
        raise RequestError(
            "the two tokenizers cut the text into different numbers of windows",
            where=where,
            expected=len(first),
            got=len(second),
            next_step=_ADVICE,
        )
