"""Log probabilities of prompts and replies: the model's own, independent of other requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from exl_core.engine.engine import Engine
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    ScoreEvent,
    TextEvent,
)
from exl_core.engine.request import Report, Request
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError
from exl_core.speculate.ngram import NgramDrafter
from support.async_steps import enable_async_steps
from support.driving import ask, engine_for, run_all
from support.guessing import ScriptedDrafter, right
from support.scripted import BOS_ID, VOCAB_SIZE, HashRule, Rule

RULE = HashRule(11)
SCORED = Report(log_probs=2, prompt=True)
PROMPTS = [[(7 * i + 13 * n) % 200 for i in range(20 + 90 * n)] for n in range(4)]


def scored(prompt: Sequence[int], **rest: Any) -> Request:
    return ask(prompt, report=SCORED, stop_ids=frozenset(), **{"max_tokens": 5, **rest})


def check(request: Request, events: Sequence[Event], rule: Rule = RULE) -> FinishEvent:
    """Check the scores of the prompt, each token but the first once and in order, and the reply."""
    own = [event for event in events if event.request_id == request.request_id]
    tokens = [token for event in own if isinstance(event, ScoreEvent) for token in event.tokens]
    assert tuple(token.token_id for token in tokens) == request.prompt_ids[1:]
    is_score = [isinstance(event, ScoreEvent) for event in own]
    assert is_score == sorted(is_score, reverse=True), "scores come before the reply"
    end = own[-1]
    assert isinstance(end, FinishEvent)
    tokens += [token for event in own if isinstance(event, TextEvent) for token in event.tokens]
    tokens += end.tokens
    history = list(request.prompt_ids[:1])
    for token in tokens:
        expected = rule(history).log_softmax(0)
        assert token.log_prob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
        values, ids = expected.topk(2)
        assert [i for i, _ in token.top_log_probs] == ids.tolist()
        assert [p for _, p in token.top_log_probs] == pytest.approx(values.tolist(), abs=1e-5)
        if token.token_id == ids[0]:
            assert token.log_prob == token.top_log_probs[0][1], "both are the same number"
        history.append(token.token_id)
    assert len(history) == len(request.prompt_ids) + end.completion_tokens
    return end


def run(engine: Engine, requests: Sequence[Request]) -> list[Event]:
    for request in requests:
        engine.submit(request)
    return run_all(engine)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_scores_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    engine = engine_for(RULE, cache_tokens=4096)
    engine.scheduler.score_chunk = chunk
    requests = [scored(prompt) for prompt in PROMPTS]
    events = run(engine, requests)
    for request in requests:
        check(request, events)


def test_a_scored_prompt_is_recomputed_and_cached_for_others() -> None:
    engine = engine_for(RULE, cache_tokens=4096)
    for _ in range(2):
        request = scored(PROMPTS[3])
        assert check(request, run(engine, [request])).cached_tokens == 0
    plain = ask(PROMPTS[3], max_tokens=1)
    *_, end = run(engine, [plain])
    assert isinstance(end, FinishEvent)
    assert end.cached_tokens == len(PROMPTS[3]) - 1


@pytest.mark.parametrize("has_drafts", [False, True])
def test_scores_beside_other_requests_and_with_drafts(has_drafts: bool) -> None:
    drafter = ScriptedDrafter(right(RULE)) if has_drafts else None
    engine = engine_for(RULE, drafter=drafter, cache_tokens=4096, prefill_chunk=50)
    requests = [scored(prompt, max_tokens=20) for prompt in PROMPTS]
    others = [ask(prompt, max_tokens=20, stop_ids=frozenset()) for prompt in PROMPTS]
    mixed = [one for pair in zip(others, requests, strict=True) for one in pair]
    events = run(engine, mixed)
    for request in requests:
        check(request, events)
    if has_drafts:
        assert any(
            isinstance(e, FinishEvent) and e.drafting and e.drafting.accepted for e in events
        )


def test_a_preempted_request_reports_each_score_once() -> None:
    """Two replies need new pages while the prompt is still being scored."""
    engine = engine_for(RULE, cache_tokens=1280, max_batch=4)
    engine.scheduler.score_chunk = 5
    before = [ask(range(n, n + 250), max_tokens=60, stop_ids=frozenset()) for n in (0, 5)]
    request = scored(PROMPTS[3] + PROMPTS[2])
    events = run(engine, [*before, request])
    assert engine.scheduler.num_requeued, "or this tested nothing"
    check(request, events)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_prompt_of_one_token_has_no_scores(max_tokens: int) -> None:
    request = scored([BOS_ID], max_tokens=max_tokens)
    check(request, run(engine_for(RULE), [request]))


@pytest.mark.parametrize("mode", ["plain", "drafts", "hybrid", "async"])
@pytest.mark.parametrize("chunk", [7, 109, 512])
def test_a_prompt_is_scored_without_a_reply(mode: str, chunk: int) -> None:
    """Also if the pass with the last score does not compute the last token (chunks of 109)."""
    drafter = ScriptedDrafter(right(RULE)) if mode == "drafts" else None
    engine = engine_for(RULE, drafter=drafter, cache_tokens=4096, is_hybrid=mode == "hybrid")
    if mode == "async":
        enable_async_steps(engine)
    engine.scheduler.score_chunk = chunk
    requests = [scored(prompt, max_tokens=0) for prompt in PROMPTS]
    other = scored(PROMPTS[0], max_tokens=20)
    events = run(engine, [other, *requests])
    check(other, events)
    for request in requests:
        end = check(request, events)
        assert (end.reason, end.token_ids, end.text) == (FinishReason.LENGTH, (), "")
        assert end.tokens == ()
    assert engine.pool.num_available == engine.pool.num_pages
    again = ask(PROMPTS[3], max_tokens=1)
    *_, last = run(engine, [again])
    assert isinstance(last, FinishEvent)
    assert last.cached_tokens, "a scored prompt is cached for others"


@pytest.mark.parametrize("length", [511, 512])
def test_a_prompt_that_fills_the_cache_is_scored_without_a_reply(length: int) -> None:
    request = scored([i % 200 for i in range(length)], max_tokens=0)
    check(request, run(engine_for(RULE, cache_tokens=512), [request]))
    with pytest.raises(RequestError, match="do not fit the cache"):
        engine_for(RULE, cache_tokens=512).submit(scored([1] * 513, max_tokens=0))


def test_log_probabilities_do_not_depend_on_sampler_settings() -> None:
    sampler = SamplerParams(temperature=0.3, top_k=3, repetition_penalty=1.4, seed=5)
    request = scored(PROMPTS[0], sampler=sampler, max_tokens=30)
    check(request, run(engine_for(RULE), [request]))
    engine = engine_for(RULE, drafter=NgramDrafter())
    request = scored(PROMPTS[0], sampler=sampler, max_tokens=30)
    check(request, run(engine, [request]))


def test_an_impossible_prompt_token_fails_its_own_request_only() -> None:
    def rule(history: Sequence[int]) -> torch.Tensor:
        logits = RULE(history).clone()
        logits[5] = -math.inf
        return logits

    bad, good = scored([1, 2, 5, 6]), scored([1, 2, 6, 7])
    events = run(engine_for(rule), [bad, good])
    (failed,) = [event for event in events if isinstance(event, FailEvent)]
    assert failed.request_id == bad.request_id
    assert isinstance(failed.error, LogitsError)
    check(good, events, rule)


def test_reports_and_prompts_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(RequestError, match="nothing to tell"):
        Report(prompt=True)
    with pytest.raises(RequestError, match="log_probs is out of range"):
        Report(log_probs=-1)
    with pytest.raises(RequestError, match="cannot be scored"):
        scored([1, 2, 3], token_healing=True)
    with pytest.raises(RequestError, match="cannot be scored"):
        scored([1], negative_prompt_ids=(2,), sampler=SamplerParams(cfg_scale=2.0))
    assert len(RULE([1])) == VOCAB_SIZE
