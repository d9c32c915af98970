"""Which vocabulary a figure is about, and whether two models have the same one."""

from __future__ import annotations

import hashlib

from exl_core.errors import RequestError
from exl_core.tokenizer.base import REPLACEMENT, Tokenizer

_NO_TOKEN = REPLACEMENT.encode()


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """Of the kind and of every token's bytes in the order of ids: equal for equal vocabularies."""
    digest = hashlib.sha256(tokenizer.kind.encode())
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id, skip_special=False)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def check_same_tokens(reference: Tokenizer, candidate: Tokenizer, text: str) -> list[int]:
    """The ids of `text`, which both tokenizers must cut alike, with every id meaning the same.

    Ids that only one of the two has are padding. Special tokens that the text spells out count as
    themselves, as in every published figure.
    """
    shared = min(reference.vocab_size, candidate.vocab_size)
    for token_id in range(shared):
        expected = reference.token_bytes(token_id, skip_special=False)
        got = candidate.token_bytes(token_id, skip_special=False)
        is_padding = _NO_TOKEN in (expected, got) and not (
            reference.is_special(token_id) and candidate.is_special(token_id)
        )
        if expected != got and not is_padding:
            raise _other_vocabulary(
                f"token {token_id} differs", candidate, repr(expected), repr(got)
            )
    ids = reference.encode(text, allow_special=True)
    others = candidate.encode(text, allow_special=True)
    if ids != others:
        place = next(
            (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
            min(len(ids), len(others)),
        )
        raise _other_vocabulary(
            f"the text is cut in another way from token {place} on",
            candidate,
            f"{ids[place : place + 4]} of {len(ids)}",
            f"{others[place : place + 4]} of {len(others)}",
        )
    return ids


def _other_vocabulary(what: str, candidate: Tokenizer, expected: str, got: str) -> RequestError:
    return RequestError(
        f"the two models have different tokenizers: {what}",
        where=candidate.where,
        expected=expected,
        got=got,
        next_step="Their predictions cannot be compared token by token; take a reference of the "
        "same family, or compare bits per byte of 'exl eval perplexity'.",
    )
