"""Guidance: one reply from two prompts, compared with a plain loop over two histories."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from exl_core.engine.events import (
    FinishEvent,
    FinishReason,
    PrefillEvent,
    StartEvent,
    TextEvent,
)
from exl_core.engine.request import Report, Request
from exl_core.errors import RequestError
from exl_core.ops.open import get_table
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler, guide
from support.driving import ask, engine_for, run_all, run_one
from support.guessing import ScriptedDrafter, right
from support.scripted import VOCAB_SIZE, HashRule, ScriptedModel, certain

RULE = HashRule(4, spread=2.0)


def guided(
    positive: Sequence[int], negative: Sequence[int], *, scale: float = 1.5, **rest: object
) -> Request:
    sampler = SamplerParams(
        temperature=0.9, top_k=20, repetition_penalty=1.1, seed=7, cfg_scale=scale
    )
    return ask(
        positive,
        negative_prompt_ids=tuple(negative),
        sampler=sampler,
        stop_ids=frozenset(),
        **{"max_tokens": 20, **rest},  # type: ignore[arg-type]
    )


def reference_reply(request: Request, count: int) -> tuple[int, ...]:
    """Reference loop: one token at a time, from two histories."""
    assert request.negative_prompt_ids is not None
    assert request.sampler.cfg_scale is not None
    positive, negative = list(request.prompt_ids), list(request.negative_prompt_ids)
    sampler = Sampler(request.sampler, get_table("reference", threads=1))
    for _ in range(count):
        logits = guide(RULE(positive), RULE(negative), request.sampler.cfg_scale)
        sample = sampler.sample(logits, positive)
        sampler.accept(sample)
        positive.append(sample.token_id)
        negative.append(sample.token_id)
    return tuple(positive[len(request.prompt_ids) :])


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5, 4.0])
@pytest.mark.parametrize(
    ("positive", "negative"),
    [([1, 2, 3], [4]), ([9], [5] * 300), ([6] * 520, [7] * 254), ([8] * 250, [8] * 250)],
)
def test_tokens_equal_those_of_a_plain_loop(
    positive: list[int], negative: list[int], scale: float
) -> None:
    request = guided(positive, negative, scale=scale)
    engine = engine_for(RULE, prefill_chunk=100)
    _, end = run_one(engine, request)
    assert end.token_ids == reference_reply(request, 20)
    assert end.prompt_tokens == len(positive)


def test_guidance_with_preemption_and_other_requests() -> None:
    requests = [guided([10 + i] * 200, [20 + i] * (240 - i), max_tokens=80) for i in range(4)]
    plain = ask([3] * 200, max_tokens=80, stop_ids=frozenset())
    drafter = ScriptedDrafter(right(RULE))
    engine = engine_for(RULE, cache_tokens=7 * 256, drafter=drafter, clock=lambda: 0.0)
    for request in (*requests[:2], plain, *requests[2:]):
        engine.submit(request)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    for request in requests:
        assert ends[request.request_id].token_ids == reference_reply(request, 80)
    assert ends[plain.request_id].token_ids == run_one(engine_for(RULE), plain)[1].token_ids
    assert engine.scheduler.num_requeued > 0, "or this tested little"
    assert engine.pool.num_available == engine.pool.num_pages


def test_no_drafts_with_guidance() -> None:
    drafter = ScriptedDrafter(right(RULE))
    engine = engine_for(RULE, drafter=drafter, clock=lambda: 0.0)
    _, end = run_one(engine, guided([1, 2], [3]))
    assert drafter.num_proposed == 0
    assert end.drafting is not None
    assert (end.drafting.rounds, end.drafting.drafted) == (20, 0)


def test_cancel_releases_the_pages_of_both_sequences() -> None:
    engine = engine_for(RULE, prefill_chunk=64)
    for steps in (1, 5, 12):
        request = guided([1] * 300, [2] * 200)
        engine.submit(request)
        for _ in range(steps):
            engine.step()
        assert engine.cancel(request.request_id)
        *_, end = run_all(engine)
        assert isinstance(end, FinishEvent)
        assert end.reason is FinishReason.CANCELLED
        assert end.token_ids == reference_reply(request, len(end.token_ids))
        assert not engine.pool.held_pages


@pytest.mark.parametrize(
    ("lengths", "chunk"), [((300, 200), 64), ((1, 300), 64), ((300, 1), 64), ((70, 70), 128)]
)
def test_prefill_progress_counts_both_prompts_and_increases(
    lengths: tuple[int, int], chunk: int
) -> None:
    engine = engine_for(RULE, prefill_chunk=chunk)
    engine.submit(guided([1] * lengths[0], [2] * lengths[1], max_tokens=2))
    events = [event for _ in range(12) for event in engine.step()]
    assert isinstance(events[0], StartEvent), "sent with the first pass, of either prompt"
    assert sum(isinstance(event, StartEvent) for event in events) == 1
    progress = [event for event in events if isinstance(event, PrefillEvent)]
    done = [event.done for event in progress]
    assert done == sorted(set(done))
    assert done[0] == chunk
    assert {event.total for event in progress} == {sum(lengths)}
    assert done[-1] < sum(lengths)
    assert isinstance(events[-1], FinishEvent)


def test_probabilities_are_guided_and_reported_logits_are_the_prompts() -> None:
    request = guided([1, 2], [3], max_tokens=1, report=Report(probabilities=True, logits=True))
    engine = engine_for(RULE)
    engine.submit(request)
    (token,) = [t for e in run_all(engine) for t in getattr(e, "tokens", ())]
    assert torch.equal(token.logits, RULE([1, 2]))
    sampler = Sampler(request.sampler, get_table("reference", threads=1))
    spread = sampler.probabilities(guide(RULE([1, 2]), RULE([3]), 1.5), [1, 2])
    assert token.probability == pytest.approx(float(spread[token.token_id]), rel=1e-5)


def test_banned_strings_rewind_both_sequences() -> None:
    """`b` is sampled wherever it can be; after each rewind the negative history lacks it too."""
    seen: list[tuple[int, ...]] = []

    def rule(history: Sequence[int]) -> Tensor:
        seen.append(tuple(history))
        logits = certain(98)
        logits[99] = 20.0
        return logits

    engine = engine_for(rule)
    request = guided([1], [2], banned_strings=("b",), max_tokens=3)
    engine.submit(request)
    events = run_all(engine)
    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert end.text == "ccc"
    assert "".join(e.text for e in events if isinstance(e, TextEvent)) == "ccc"
    ends = {history[1:] for history in seen if history[0] == 2}
    assert ends == {(), (99,), (99, 99)}


@pytest.mark.parametrize("pages", [2, 3, 5])
def test_without_max_tokens_both_sequences_fill_the_cache(pages: int) -> None:
    engine = engine_for(RULE, cache_tokens=pages * 256)
    request = guided([1] * 200, [2] * 100, max_tokens=None, scale=1.0)
    _, end = run_one(engine, request)
    longest = max(  # pages hold all tokens of both sequences but the newest
        count
        for count in range(1, 1200)
        if -(-(199 + count) // 256) + -(-(99 + count) // 256) <= pages
    )
    assert len(end.token_ids) == longest


def test_the_longer_prompt_limits_the_reply_to_the_context() -> None:
    for lengths in ((10, 280), (280, 10)):
        request = guided([1] * lengths[0], [2] * lengths[1], max_tokens=None)
        _, end = run_one(engine_for(RULE, max_seq_len=300, cache_tokens=1024), request)
        assert end.token_ids == reference_reply(request, 20)


def test_requests_that_guidance_refuses() -> None:
    with pytest.raises(RequestError, match="max_batch 2 or more"):
        engine_for(RULE, max_batch=1).submit(guided([1], [2]))
    with pytest.raises(RequestError, match="do not fit the cache"):
        engine_for(RULE, cache_tokens=512).submit(guided([1] * 200, [2] * 200, max_tokens=60))
    with pytest.raises(RequestError, match="negative prompt has 300 tokens"):
        engine_for(RULE, max_seq_len=300).submit(guided([1], [2] * 300))
    engine = engine_for(RULE, max_batch=2)
    with pytest.raises(RequestError, match="negative prompt token 1 is not in the vocabulary"):
        engine.submit(guided([1], [2, VOCAB_SIZE]))
    assert isinstance(engine.model, ScriptedModel)
    assert len(run_one(engine, guided([1], [2]))[1].token_ids) == 20
