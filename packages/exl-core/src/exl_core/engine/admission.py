"""Whether a model and a cache can ever serve a request, and how long its sequences may become."""

from __future__ import annotations

from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.model.embedded import EMBEDDED_FROM
from exl_core.model.runner import ModelShape


def check_tokens(request: Request, vocab_size: int) -> None:
    """Every id is one of the vocabulary, or of the request's own spans of vectors."""
    known = {token_id for span in request.embeddings for token_id in span.token_ids}
    for name, ids in (
        ("prompt", request.prompt_ids),
        ("negative prompt", request.negative_prompt_ids or ()),
    ):
        if max(ids, default=0) < vocab_size:
            continue
        for place, token_id in enumerate(ids):
            if token_id < vocab_size or token_id in known:
                continue
            is_embedded = token_id >= EMBEDDED_FROM
            raise RequestError(
                f"{name} token {place} "
                + ("stands for no vector" if is_embedded else "is not in the vocabulary"),
                where=request.request_id,
                expected="an id of the request's embeddings"
                if is_embedded
                else f"ids below {vocab_size}",
                got=token_id,
                next_step="Give the span with the request."
                if is_embedded
                else "Does this tokenizer belong to this model?",
            )


def max_len(request: Request, prompt_len: int, shape: ModelShape, capacity: int) -> int:
    """Where a sequence of the request ends at the latest, its prompt included.

    `capacity`: tokens that the whole cache holds.
    """
    context = shape.max_seq_len
    if prompt_len + 1 > context:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, the context {context}",
            where=request.request_id,
            expected=f"at most {context - 1}, to leave room for a reply",
            got=prompt_len,
            next_step="Shorten the prompt.",
        )
    if request.max_tokens is not None:
        return min(context, prompt_len + request.max_tokens)
    # Until all is full; a prompt that leaves no room at all is then found not to fit.
    return max(prompt_len + 1, min(context, capacity + 1))
