"""Checks that a draft model fits its target model, made before either of them runs."""

from __future__ import annotations

from exl_core.errors import RequestError
from exl_core.tokenizer.base import REPLACEMENT, Tokenizer

_COMPARED = 512
"""Ordinary tokens that are compared: the first ones and an even sample of the rest. Independently
trained tokenizers differ in nearly all of them."""

_NO_TOKEN = REPLACEMENT.encode()


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise RequestError unless each shared id has the same meaning in both vocabularies.

    Ids that only one of the two has are padding.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    step = max(1, shared // _COMPARED)
    compared = {*range(min(shared, _COMPARED // 2)), *range(0, shared, step)}
    for tokenizer in (target, draft):
        compared |= {i for i in tokenizer.special_tokens.values() if i < shared}
    for token_id in sorted(compared):
        ours = target.token_bytes(token_id, skip_special=False)
        theirs = draft.token_bytes(token_id, skip_special=False)
        is_special = target.is_special(token_id) and draft.is_special(token_id)
        if ours == theirs or (not is_special and _NO_TOKEN in (ours, theirs)):
            continue
        raise RequestError(
            f"the draft model has another vocabulary: token {token_id} differs",
            where=draft.where,
            expected=repr(ours),
            got=repr(theirs),
            next_step="Take a draft model of the same family.",
        )


def draft_rope_alpha(target_context: int, draft_context: int) -> float:
    """NTK-alpha that stretches a draft model to a longer context; 1 if none is needed.

    A fit over r, the ratio of the contexts: -0.13436 + 0.80541 r + 0.28833 r^2.
    """
    if target_context <= draft_context:
        return 1.0
    ratio = target_context / draft_context
    return max(1.0, -0.13436 + 0.80541 * ratio + 0.28833 * ratio * ratio)
