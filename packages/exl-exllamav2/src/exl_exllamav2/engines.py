"""Engines on caches of the old kind, and requests with the old arguments."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import SampledToken
from exl_core.engine.request import Hook, HookedToken, Report, Request
from exl_core.model.transformer import Transformer
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_exllamav2.cache import ExLlamaV2CacheBase
from exl_exllamav2.embeddings import spans_of
from exl_exllamav2.errors import OldValueError, whole_number
from exl_exllamav2.filters import constraints_of
from exl_exllamav2.lora import adapters_of
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.settings import Settings
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

Stops = tuple[frozenset[int], tuple[str, ...]]
Weights = tuple[Transformer, ...]
"""Weights of a model, and those of its draft model."""

NO_LOGIT = -65504.0  # of the padding of rows


def weights_of(model: ExLlamaV2, draft_model: ExLlamaV2 | None = None) -> Weights:
    """The present weights. `unload` and `load` give a model new ones, which need a new engine."""
    return (model.weights,) if draft_model is None else (model.weights, draft_model.weights)


def make_engine(
    model: ExLlamaV2,
    cache: ExLlamaV2CacheBase,
    tokenizer: ExLlamaV2Tokenizer,
    *,
    max_batch: int,
    prefill_chunk: int | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """An engine on the memory of `cache`."""
    options = EngineOptions(max_batch=max_batch, prefill_chunk=prefill_chunk)
    engine = Engine(model.weights, tokenizer.exl, options, drafter=drafter, store=cache.store)
    if model.vocabulary is None:
        model.vocabulary = engine.vocabulary
    else:
        engine.vocabulary = model.vocabulary
    return engine


def model_drafter(
    model: ExLlamaV2,
    cache: ExLlamaV2CacheBase,
    draft_model: ExLlamaV2,
    draft_cache: ExLlamaV2CacheBase | None,
    tokenizer: ExLlamaV2Tokenizer,
    *,
    max_tokens: int,
    min_probability: float = 0.25,
) -> ModelDrafter:
    """A drafter on the memory of the draft cache, if that is as large as the main one."""
    pages = cache.store.num_pages
    store = None
    if draft_cache is not None and draft_cache.store.num_pages >= pages:
        store = draft_cache.store
    return ModelDrafter(
        draft_model.weights,
        vocab_size=min(model.config.vocab_size, tokenizer.exl.vocab_size),
        num_pages=pages,
        kv_format=cache.kv_format,
        max_tokens=max_tokens,
        min_probability=min_probability,
        store=store,
    )


def split_stops(conditions: Any) -> Stops:
    """Stop tokens and stop strings. A single condition counts as a list of one."""
    if conditions is None:
        return frozenset(), ()
    listed = [conditions] if isinstance(conditions, int | str) else list(conditions)
    ids: set[int] = set()
    strings: list[str] = []
    for one in listed:
        if isinstance(one, str):
            if one:
                strings.append(one)
        elif isinstance(one, int) and not isinstance(one, bool):
            ids.add(one)
        else:
            raise OldValueError(
                "a stop condition is neither a token id nor a text", got=repr(one)[:100]
            )
    return frozenset(ids), tuple(strings)


def ids_of(input_ids: Tensor) -> tuple[int, ...]:
    """Token ids of a tensor [1, n] or [n]."""
    if not isinstance(input_ids, Tensor):
        raise OldValueError("input_ids is no tensor", got=type(input_ids).__name__)
    return tuple(input_ids.reshape(-1).tolist())


def random_seed() -> int:
    """Seed from Python's global random numbers: `random.seed(n)` before makes a text repeat."""
    return random.getrandbits(63)


def build_request(
    prompt_ids: Sequence[int],
    *,
    padded_vocab: int,
    max_tokens: int,
    sampler: SamplerParams,
    settings: Settings,
    stops: Stops = (frozenset(), ()),
    negative_ids: Sequence[int] | None = None,
    min_tokens: int = 0,
    banned_strings: Iterable[str] | None = None,
    filters: Sequence[Any] | None = None,
    busy_filters: Iterable[Any] = (),
    filter_prefer_eos: bool = False,
    token_healing: bool = False,
    healed: str | None = None,
    loras: Any = None,
    embeddings: Any = None,
    report: Report | None = None,
    decode_special_tokens: bool = False,
    hooks: Sequence[Hook] = (),
) -> Request:
    """A request with the old arguments; combinations that mean nothing are dropped as before.

    healed  text of the last prompt token, if the filters see the token that replaces it
    """
    stop_ids, stop_strings = stops
    max_tokens = whole_number("max_new_tokens", max_tokens)
    min_tokens = whole_number("min_new_tokens", min_tokens)
    called = hooks_of(settings, padded_vocab)
    constraints = constraints_of(filters, busy_filters, healed)
    return Request(
        prompt_ids=tuple(prompt_ids),
        negative_prompt_ids=None if negative_ids is None else tuple(negative_ids),
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        sampler=sampler,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        banned_strings=tuple(text for text in banned_strings or () if text),
        constraints=constraints,
        prefer_eos=filter_prefer_eos and bool(constraints) and bool(stop_ids),
        token_healing=token_healing and len(prompt_ids) > 1,
        adapters=adapters_of(loras),
        embeddings=spans_of(embeddings),
        hooks=(*hooks, *called),
        report=report_for(called, report or Report()),
        show_special=decode_special_tokens,
    )


class ExLlamaV2PostSamplingResult:
    """Argument of a post-sampling hook. A hook may replace `sampled_token` [1, 1], and clear
    `feed_filters`, so that the filters do not see this token."""

    def __init__(self) -> None:
        self.sampled_token: Tensor | None = None
        self.sampled_prob: Tensor | None = None
        self.logits: Tensor | None = None
        self.candidate_probs: Tensor | None = None
        self.candidate_tokens: Tensor | None = None
        self.feed_filters = True


class ExLlamaV2PostSamplingHook:
    """Base class of post-sampling hooks: callables that take a result object."""

    def __call__(self, _: ExLlamaV2PostSamplingResult) -> None:
        raise NotImplementedError


def hooks_of(settings: Settings, padded_vocab: int) -> tuple[Hook, ...]:
    """A hook of exl that calls those of the settings, one after the other."""
    calls = tuple(settings.post_sampling_hooks or ())
    return (_hook(calls, padded_vocab),) if calls else ()


def report_for(hooks: Sequence[Hook], asked: Report) -> Report:
    """The details of each token that the program requested, and those that hooks need."""
    return replace(asked, probabilities=True, logits=True) if hooks else asked


def _hook(calls: Sequence[Any], padded_vocab: int) -> Hook:
    def hook(token: SampledToken) -> HookedToken:
        result = ExLlamaV2PostSamplingResult()
        result.sampled_token = torch.tensor([[token.token_id]])
        if token.probability is not None:
            result.sampled_prob = torch.tensor([[token.probability]])
        if token.top:
            result.candidate_tokens = torch.tensor([[[i for i, _ in token.top]]])
            result.candidate_probs = torch.tensor([[[p for _, p in token.top]]])
        if token.logits is not None:
            result.logits = torch.full((1, 1, padded_vocab), NO_LOGIT)
            result.logits[0, 0, : len(token.logits)] = token.logits
        for call in calls:  # they share one result, as in exllamav2
            call(result)
        assert result.sampled_token is not None, "hooks replace tokens, not remove them"
        return HookedToken(int(result.sampled_token.view(-1)[0]), bool(result.feed_filters))

    return hook
