"""The engine on a scripted model: texts and ends of replies, prefix caching, failures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    StartEvent,
    TextEvent,
)
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError
from support.driving import ask, engine_for, run_all, run_one, without_progress
from support.scripted import (
    EOS_ID,
    VOCAB_SIZE,
    ByteTokenizer,
    HashRule,
    ScriptedModel,
    ScriptedShape,
    always,
    certain,
    reply_with,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_a_stop_token_ends_the_reply_and_is_not_part_of_its_text() -> None:
    texts, end = run_one(engine_for(reply_with("hello")), ask())
    assert texts == list("hello"), "one event per token"
    assert (end.reason, end.stopped_by) == (STOP, EOS_ID)
    assert end.token_ids == (*b"hello", EOS_ID)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (2, 6, 0)


@pytest.mark.parametrize("max_tokens", [1, 3, 5])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    _, end = run_one(engine_for(reply_with("hello world")), ask(max_tokens=max_tokens))
    assert (end.text, end.reason, end.stopped_by) == ("hello world"[:max_tokens], LENGTH, None)
    assert end.completion_tokens == max_tokens


def test_a_request_for_zero_tokens_runs_no_pass() -> None:
    engine = engine_for(reply_with("hello"))
    _, end = run_one(engine, ask(max_tokens=0))
    assert (end.text, end.reason, end.token_ids) == ("", LENGTH, ())
    assert engine.model.rows_of_pass == []  # type: ignore[attr-defined]


def test_the_last_token_may_be_the_stop_token() -> None:
    _, end = run_one(engine_for(reply_with("hi")), ask(max_tokens=3))
    assert (end.text, end.reason) == ("hi", STOP)


def test_without_a_limit_the_reply_ends_with_the_context() -> None:
    _, end = run_one(engine_for(always(certain(97)), max_seq_len=40), ask("123", max_tokens=None))
    assert (end.text, end.reason) == ("a" * 37, LENGTH)
    _, end = run_one(engine_for(always(certain(97)), max_seq_len=40), ask("123", max_tokens=99))
    assert (end.text, end.reason) == ("a" * 37, LENGTH)


def test_without_a_limit_the_reply_ends_with_the_cache() -> None:
    engine = engine_for(always(certain(97)), cache_tokens=256)
    _, end = run_one(engine, ask([65] * 250, max_tokens=None))
    assert (end.completion_tokens, end.reason) == (7, LENGTH)  # the last one is never cached


@pytest.mark.parametrize(
    ("reply", "stops", "text", "stopped_by"),
    [
        ("one END two", ("END",), "one ", "END"),
        ("one END", ("END",), "one ", "END"),
        ("one ENd EN", ("END",), "one ENd EN", EOS_ID),  # held back, then emitted
        ("a\n\nUser: x", ("\nUser:", "User:"), "a\n", "\nUser:"),
        ("xabcd", ("bc", "abcd"), "x", "abcd"),
        ("naïve 🙂 ok", ("🙂",), "naïve ", "🙂"),
        ("END", ("END",), "", "END"),
    ],
)
def test_stop_strings(reply: str, stops: tuple[str, ...], text: str, stopped_by: object) -> None:
    texts, end = run_one(engine_for(reply_with(reply)), ask(stop_strings=stops))
    assert (end.text, end.stopped_by, end.reason) == (text, stopped_by, STOP)
    assert all(text.startswith("".join(texts[:i])) for i in range(len(texts)))


def test_a_stop_string_wins_over_the_length_that_ends_on_it() -> None:
    _, end = run_one(engine_for(reply_with("abEND")), ask(max_tokens=5, stop_strings=("END",)))
    assert (end.text, end.reason, end.stopped_by) == ("ab", STOP, "END")
    _, end = run_one(engine_for(reply_with("abEND")), ask(max_tokens=4, stop_strings=("END",)))
    assert (end.text, end.reason, end.stopped_by) == ("abEN", LENGTH, None)


def test_text_events_hold_whole_characters() -> None:
    texts, end = run_one(engine_for(reply_with("né🙂!")), ask())
    assert texts == ["n", "é", "🙂", "!"]
    texts, end = run_one(engine_for(reply_with("é🙂")), ask(max_tokens=4))
    assert texts == ["é", "�"], (
        "an incomplete character becomes one replacement character, at the end"
    )
    assert end.reason is LENGTH


def test_a_character_may_begin_in_the_prompt() -> None:
    half = "🙂".encode()
    texts, _ = run_one(engine_for(reply_with(half[2:] + b"!")), ask([65, *half[:2]]))
    assert texts == ["🙂", "!"]


def test_min_tokens_excludes_stop_tokens_but_not_stop_strings() -> None:
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[EOS_ID], logits[97] = 9.0, 8.0
    _, end = run_one(engine_for(always(logits)), ask(min_tokens=4))
    assert (end.text, end.stopped_by) == ("aaaa", EOS_ID)
    _, end = run_one(engine_for(always(logits)), ask(min_tokens=4, stop_strings=("aa",)))
    assert (end.text, end.stopped_by) == ("", "aa")


def test_ids_unknown_to_the_tokenizer_are_never_sampled() -> None:
    logits = torch.zeros(300)
    logits[280] = 9.0  # padding of the model's vocabulary
    model = ScriptedModel(always(logits), ScriptedShape(vocab_size=300))
    engine = Engine(model, ByteTokenizer(), EngineOptions(cache_tokens=256))
    _, end = run_one(engine, ask(max_tokens=3, stop_ids=frozenset({299})))
    assert end.token_ids == (0, 0, 0)


def test_a_repeated_prompt_is_cached_and_gives_the_same_reply() -> None:
    engine = engine_for(HashRule(), cache_tokens=2048)
    request = ask([7 * i % 251 for i in range(600)], sampler=SamplerParams(seed=3))
    _, cold = run_one(engine, request)
    passes = engine.model.rows_of_pass  # type: ignore[attr-defined]
    before = len(passes)
    again = ask(request.prompt_ids, sampler=request.sampler)
    _, warm = run_one(engine, again)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 599)
    assert passes[before] == 1, "cached tokens are not computed again"
    assert warm.token_ids == cold.token_ids
    _, other = run_one(engine, ask([9, *request.prompt_ids[1:]], sampler=request.sampler))
    assert other.cached_tokens == 0


def test_live_requests_share_the_pages_of_a_common_prefix() -> None:
    engine = engine_for(HashRule(), cache_tokens=2048)
    prompt = [3 * i % 250 for i in range(520)]
    for tail in (1, 2):
        engine.submit(ask([*prompt, tail], max_tokens=40))
    for _ in range(6):
        engine.step()
    assert sorted(engine.pool.held_pages.values()) == [1, 1, 2, 2]


def test_a_reply_is_cached_for_the_next_chat_turn() -> None:
    engine = engine_for(HashRule(), cache_tokens=2048)
    prompt = list(b"x" * 250)
    _, first = run_one(engine, ask(prompt, max_tokens=20, stop_ids=frozenset()))
    _, second = run_one(engine, ask([*prompt, *first.token_ids, 65], max_tokens=1))
    assert second.cached_tokens == 269, (
        "all but the last token, which was sampled and never computed"
    )


@pytest.mark.parametrize(
    "kv_format", [KVFormat.FP32, KVFormat.FP16]
)  # exact for the scripted model
def test_every_cache_format_works(kv_format: KVFormat) -> None:
    _, end = run_one(engine_for(reply_with("ok"), kv_format=kv_format), ask())
    assert end.text == "ok"


def test_preemption_delays_requests_and_does_not_change_replies() -> None:
    prompts = [[10 + i] * 200 for i in range(4)]
    alone = [
        run_one(engine_for(HashRule()), ask(p, max_tokens=100, stop_ids=frozenset()))[1].token_ids
        for p in prompts
    ]
    engine = engine_for(HashRule(), cache_tokens=4 * 256)  # 2 pages each: 8 needed, 4 available
    requests = [ask(p, max_tokens=100, stop_ids=frozenset()) for p in prompts]
    for request in requests:
        engine.submit(request)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    assert [ends[r.request_id].token_ids for r in requests] == alone
    assert engine.scheduler.num_requeued > 0, "or this tested nothing"


def test_a_preempted_request_whose_time_is_over_ends_while_it_waits() -> None:
    now = 0.0

    def rule(history: Sequence[int]) -> Tensor:
        nonlocal now
        now += 1.0
        return certain(97)

    options = EngineOptions(cache_tokens=3 * 256)
    engine = Engine(ScriptedModel(rule), ByteTokenizer(), options, clock=lambda: now)
    old, young = (ask([10 + i] * 250, max_tokens=100, max_time_s=50.0) for i in range(2))
    engine.submit(old)
    engine.submit(young)
    while not engine.scheduler.num_requeued:
        assert not any(isinstance(event, FinishEvent) for event in engine.step())
    running = len(engine.token_ids_of(young.request_id)) - 250
    assert 0 < running < 20

    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]

    assert [end.request_id for end in ends] == [old.request_id, young.request_id]
    assert [end.reason for end in ends] == [FinishReason.TIME] * 2
    assert len(ends[0].token_ids) > 20
    assert len(ends[1].token_ids) == running and ends[1].text == "a" * running
    assert not engine.pool.held_pages


def test_cancel_during_prefill_and_during_decode() -> None:
    engine = engine_for(reply_with("hello there"), prefill_chunk=100)
    long = ask([65] * 1000)
    engine.submit(long)
    engine.step()
    assert engine.cancel(long.request_id)
    assert not engine.cancel(long.request_id)
    (end,) = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert (end.reason, end.text, end.token_ids) == (FinishReason.CANCELLED, "", ())
    assert not engine.pool.held_pages
    chat = ask(stop_strings=("lox",))
    engine.submit(chat)
    events = [event for _ in range(5) for event in without_progress(engine.step())]
    assert engine.cancel(chat.request_id)
    (end,) = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert end.text == "".join(e.text for e in events if isinstance(e, TextEvent)) == "hel"
    assert bytes(end.token_ids) == b"hello", "'lo' is held back and not emitted"
    assert not engine.pool.held_pages
    assert engine.cancel("unknown") is False


def test_prefill_progress_increases_and_recomputation_is_not_reported() -> None:
    engine = engine_for(always(certain(97)), cache_tokens=5 * 256, prefill_chunk=60)
    requests = [ask([65 + i] * 250, max_tokens=30) for i in range(2)]
    requests.append(ask([67] * 500, max_tokens=2))  # preempted when the others need new pages
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while not engine.is_idle:
        events += engine.step()
    assert engine.scheduler.num_requeued == 1, "or this tested nothing"
    rows = engine.model.rows_of_pass  # type: ignore[attr-defined]
    assert sum(rows) > 2 * 279 + 501, "or nothing was recomputed"
    starts = [event.request_id for event in events if isinstance(event, StartEvent)]
    assert starts == [request.request_id for request in requests]
    last = requests[-1].request_id
    progress = [e for e in events if isinstance(e, PrefillEvent) and e.request_id == last]
    done = [event.done for event in progress]
    assert done == sorted(set(done))
    assert 256 < done[-1] < 500
    assert {event.total for event in progress} == {500}


def test_cancel_a_waiting_request() -> None:
    engine = engine_for(reply_with("hello"), max_batch=1)
    first, second = ask(), ask()
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.cancel(second.request_id)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    assert ends[first.request_id].text == "hello"
    assert ends[second.request_id].reason is FinishReason.CANCELLED


@pytest.mark.parametrize("error", [ValueError("boom"), MemoryError(), KeyboardInterrupt()])
def test_the_engine_is_usable_after_a_failed_pass(error: BaseException) -> None:
    engine = engine_for(HashRule(), max_batch=2)
    prompts = [[i] * 300 for i in range(3)]
    model = engine.model
    assert isinstance(model, ScriptedModel)
    ids = [engine.submit(ask(p, max_tokens=5, stop_ids=frozenset())).request_id for p in prompts]
    engine.step()
    engine.step()
    model.failure = error
    with pytest.raises(type(error)):
        engine.step()
    assert not engine.pool.held_pages
    assert engine.pool.num_available == engine.pool.num_pages
    assert engine.live_requests == {ids[2]}, "the waiting request is still live"
    events = run_all(engine)
    failed = [e for e in events if isinstance(e, FailEvent)]
    assert [(e.request_id, e.error) for e in failed] == [(i, error) for i in ids[:2]]
    for prompt in prompts:  # pages written by the failed pass must not be reused
        _, end = run_one(engine, ask(prompt, max_tokens=5, stop_ids=frozenset()))
        _, fresh = run_one(engine_for(HashRule()), ask(prompt, max_tokens=5, stop_ids=frozenset()))
        assert end.token_ids == fresh.token_ids


def test_a_request_that_the_failed_step_preempted_goes_on() -> None:
    engine = engine_for(HashRule(), cache_tokens=768, max_batch=2)
    requests = [ask([i] * 250, max_tokens=20, stop_ids=frozenset()) for i in range(2)]
    first, second = (engine.submit(request).request_id for request in requests)
    assert isinstance(engine.model, ScriptedModel)
    engine.step()
    while engine.scheduler.running[0].past_len < 256:
        engine.step()
    assert len(engine.scheduler.running) == 2  # both need a second page now, and one is left
    engine.model.failure = RuntimeError("scripted")
    with pytest.raises(RuntimeError, match="scripted"):
        engine.step()
    assert engine.live_requests == {second}
    failed, finished = (e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent))
    assert (type(failed), failed.request_id) == (FailEvent, first)
    assert (type(finished), finished.request_id) == (FinishEvent, second)


def test_an_interrupt_between_the_queues_loses_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KeyboardInterrupt may arrive after a request left the queue and before it runs."""
    engine = engine_for(reply_with("hello"))
    lost, waiting = ask(), ask()
    engine.submit(lost)
    engine.submit(waiting)

    def interrupted() -> None:
        engine.scheduler.waiting.popleft()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine.live_requests == {waiting.request_id}
    ends = [e for e in run_all(engine) if isinstance(e, FailEvent | FinishEvent)]
    assert [(type(e), e.request_id) for e in ends] == [
        (FailEvent, lost.request_id),
        (FinishEvent, waiting.request_id),
    ]


def test_nan_logits_fail_their_request_only() -> None:
    def rule(history: Sequence[int]) -> Tensor:
        bad = torch.full((VOCAB_SIZE,), math.nan)
        return bad if history[0] == 66 and len(history) > 300 else certain(97)

    engine = engine_for(rule)
    good, bad = ask([65] * 299, max_tokens=4), ask([66] * 299, max_tokens=4)
    engine.submit(good)
    engine.submit(bad)
    ends = {e.request_id: e for e in run_all(engine) if not isinstance(e, TextEvent)}
    end = ends[good.request_id]
    assert isinstance(end, FinishEvent)
    assert end.text == "aaaa"
    failure = ends[bad.request_id]
    assert isinstance(failure, FailEvent)
    assert isinstance(failure.error, LogitsError)
    _, again = run_one(engine, ask([66] * 299, max_tokens=1))
    assert again.cached_tokens == 0, "pages that led to NaN are not reused"
    _, again = run_one(engine, ask([65] * 299, max_tokens=1))
    assert again.cached_tokens == 298


def test_a_step_of_an_idle_engine_runs_no_pass() -> None:
    engine = engine_for(reply_with("x"))
    assert engine.is_idle
    assert engine.step() == []
    assert engine.model.rows_of_pass == []  # type: ignore[attr-defined]


def test_decoding_continues_during_the_prefill_of_another_request() -> None:
    engine = engine_for(always(certain(97)), prefill_chunk=64)
    engine.submit(ask("Q", max_tokens=30))
    engine.step()
    engine.submit(ask([66] * 640, max_tokens=1))
    events = [without_progress(engine.step()) for _ in range(9)]
    assert all(events), "every step of a decoding request returns text"
    assert engine.model.rows_of_pass[1:10] == [65] * 9  # type: ignore[attr-defined]


def test_times_are_measured_with_the_given_clock() -> None:
    now = 0.0

    def clock() -> float:
        return now

    def rule(history: Sequence[int]) -> Tensor:
        nonlocal now
        now += 2.0 if len(history) == 10 else 0.5  # duration of prefill, then of each token
        return certain(97)

    model = ScriptedModel(rule)
    engine = Engine(model, ByteTokenizer(), EngineOptions(cache_tokens=256), clock=clock)
    engine.submit(ask([65] * 10, max_tokens=5))
    now = 7.0
    end = run_all(engine)[-1]
    assert isinstance(end, FinishEvent)
    assert (end.queued_s, end.prefill_s, end.decode_s) == (7.0, 2.0, 2.0)
    assert (end.prefill_tok_s, end.decode_tok_s) == (5.0, 2.0)


@pytest.mark.parametrize(("limit_s", "length"), [(1.0, 1), (2.0, 1), (2.4, 2), (3.0, 3), (99.0, 5)])
def test_max_time_s_ends_the_reply_after_at_least_one_token(limit_s: float, length: int) -> None:
    """Text that was held back for a stop string is emitted at the end."""
    now = 0.0

    def rule(history: Sequence[int]) -> Tensor:
        nonlocal now
        now += 2.0 if len(history) == 10 else 0.5
        return certain(97)

    model = ScriptedModel(rule)
    engine = Engine(model, ByteTokenizer(), EngineOptions(cache_tokens=256), clock=lambda: now)
    engine.submit(ask([65] * 10, max_tokens=5, max_time_s=limit_s, stop_strings=("aaaaaaa",)))
    now = 7.0  # time in the queue does not count
    end = run_all(engine)[-1]
    assert isinstance(end, FinishEvent)
    assert end.reason is (FinishReason.TIME if length < 5 else FinishReason.LENGTH)
    assert end.text == "a" * length and end.held_text == ""
    with pytest.raises(RequestError, match="max_time_s"):
        ask([65], max_time_s=0.0)
