"""Identity of a vocabulary, and checks that two models share one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from exl_core.errors import RequestError
from exl_core.tokenizer.base import REPLACEMENT, Tokenizer
from exl_eval.windows import Window

_NO_TOKEN = REPLACEMENT.encode()
_ADVICE = (
    "Predictions cannot be compared token by token. Take models of one family, or compare the bits "
    "per byte that 'exl eval perplexity' prints."
)


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer's kind and of each token's bytes by id. Equal for equal
    vocabularies."""
    digest = hashlib.sha256(tokenizer.kind.encode())
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id, skip_special=False)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def check_same_vocabulary(first: Tokenizer, second: Tokenizer) -> None:
    """Raises `RequestError` if an id stands for different tokens. Ids beyond the smaller vocabulary
    are padding."""
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
    """Raises `RequestError` if two tokenizers turned one text into different windows."""
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
