"""Admission checks: can a model and a cache serve a request, and how long may its sequences get."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.model.embedded import EMBEDDED_FROM
from exl_core.model.protocol import ModelShape


def check_ids(request: Request, shape: ModelShape, tokenizer_size: int) -> None:
    """Refuse token ids outside the vocabulary, in the prompts and in every setting that holds ids.

    Prompts may hold ids of the model's vocabulary and of the request's own embedded spans. Stop
    tokens may be known to the tokenizer alone: they are then never sampled, which is harmless.
    Sampler settings may hold only ids that can be sampled, those below both vocabulary sizes.
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
    _check_setting(request, "stop_ids", request.stop_ids, max(shape.vocab_size, tokenizer_size))
    for name, named in request.sampler.named_ids.items():
        _check_setting(request, name, named, min(shape.vocab_size, tokenizer_size))


def _check_setting(request: Request, name: str, ids: Collection[int], end: int) -> None:
    largest = max(ids, default=-1)
    if largest >= end:
        raise RequestError(
            f"{name} holds a token id that is not in the vocabulary",
            where=request.request_id,
            expected=f"ids below {end}",
            got=largest,
        )


def check_banned(request_id: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary that are banned while the request runs."""
    for token_id in token_ids:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id < vocab_size:
            raise RequestError(
                "a banned token is not in the vocabulary",
                where=request_id,
                expected=f"ids from 0, below {vocab_size}",
                got=repr(token_id)[:200],
            )


def reply_limit(request: Request, shape: ModelShape, num_pages: int) -> int:
    """Most tokens that the reply may have.

    `num_pages` is the size of the whole cache. It limits the reply only if the request has no
    `max_tokens`. The result is at least 1, so that `Scheduler.check_fits` refuses a prompt that
    fills the cache; but 0 if no token is wanted and no prompt is scored, which takes no cache.
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
    limit = shape.max_seq_len - max(lengths)
    if request.max_tokens is not None:
        return min(limit, max(request.max_tokens, 1 if request.report.prompt else 0))

    def needed(count: int) -> int:
        """Pages for a reply of `count` tokens; its last token is sampled and never cached."""
        return sum(pages_for(length + count - 1, PAGE_SIZE) for length in lengths)

    return max(1, bisect_right(range(1, limit + 1), num_pages, key=needed))


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
