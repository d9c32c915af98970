"""Whether a model and a cache can ever serve a request, and how long its sequences may become."""

from __future__ import annotations

from bisect import bisect_right

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.model.embedded import EMBEDDED_FROM
from exl_core.model.runner import ModelShape


def check_ids(request: Request, shape: ModelShape, vocab_size: int) -> None:
    """Every id is one of the vocabulary, or of the request's own spans of vectors.

    `vocab_size`: ids from there on are not drawn, though the model may know them.
    """
    known = {token_id for span in request.embeddings for token_id in span.token_ids}
    for name, ids in (
        ("prompt", request.prompt_ids),
        ("negative prompt", request.negative_prompt_ids or ()),
    ):
        if max(ids, default=0) < shape.vocab_size:
            continue
        for place, token_id in enumerate(ids):
            if token_id >= shape.vocab_size and token_id not in known:
                raise _unknown(request, f"{name} token {place}", token_id, shape.vocab_size)
    for span in request.embeddings:
        if span.vectors.shape[1] != shape.hidden_size:
            raise RequestError(
                "embedded vectors are as wide as those of another model",
                where=request.request_id,
                expected=f"[n, {shape.hidden_size}]",
                got=list(span.vectors.shape),
            )
    allowed = request.sampler.allowed_tokens
    if allowed is not None and min(allowed - request.sampler.banned_tokens) >= vocab_size:
        raise RequestError(
            "none of the allowed tokens can be drawn",
            where=request.request_id,
            expected=f"an id below {vocab_size}",
            got=sorted(allowed)[:10],
        )


def room_for(request: Request, shape: ModelShape, num_pages: int) -> int:
    """Most tokens that the reply may have.

    `num_pages` of the whole cache. They limit a reply only where the request does not; a prompt
    that leaves no room at all is then found not to fit.
    """
    lengths = [len(request.prompt_ids)]
    if request.negative_prompt_ids is not None:
        lengths.append(len(request.negative_prompt_ids))
    for name, length in zip(("prompt", "negative prompt"), lengths, strict=False):
        if length + 1 > shape.max_seq_len:
            raise RequestError(
                f"the {name} has {length} tokens, the context {shape.max_seq_len}",
                where=request.request_id,
                expected=f"at most {shape.max_seq_len - 1}, to leave room for a reply",
                got=length,
                next_step="Shorten the prompt.",
            )
    room = shape.max_seq_len - max(lengths)
    if request.max_tokens is not None:
        return min(room, request.max_tokens)

    def needed(count: int) -> int:
        """Pages; the last token is sampled and never cached."""
        return sum(pages_for(length + count - 1, PAGE_SIZE) for length in lengths)

    return max(1, bisect_right(range(1, room + 1), num_pages, key=needed))


def _unknown(request: Request, what: str, token_id: int, vocab_size: int) -> RequestError:
    if token_id >= EMBEDDED_FROM:
        return RequestError(
            f"{what} stands for no vector",
            where=request.request_id,
            expected="an id of the request's embeddings",
            got=token_id,
            next_step="Give the span with the request.",
        )
    return RequestError(
        f"{what} is not in the vocabulary",
        where=request.request_id,
        expected=f"ids below {vocab_size}",
        got=token_id,
        next_step="Does this tokenizer belong to this model?",
    )
