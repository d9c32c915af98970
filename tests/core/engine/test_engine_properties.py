"""Whatever else is in the engine, a request gets what it gets alone.

The reference below is a loop of its own: one sequence, no pages, no chunks, no batch. It shares the
sampler's steps (held to their formulas elsewhere) and the tokenizer with the engine, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import Event, FailEvent, FinishEvent, FinishReason, TextEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.sampling.chain import steps_for
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.steps import draw, greedy, weights
from support.driving import news
from support.scripted import EOS_ID, VOCAB_SIZE, ByteTokenizer, Rule, ScriptedModel, ScriptedShape

MAX_SEQ_LEN = 1200
LETTERS = [*b"ab \xc3\xa9", EOS_ID]  # 0xc3 0xa9 is e with an acute accent, in two tokens


def letter_rule() -> Rule:
    """Replies over few letters, so that stop strings occur and prefixes are shared; they depend on
    the whole history."""
    generator = torch.Generator().manual_seed(1)
    table = torch.full((211, VOCAB_SIZE), -40.0)
    table[:, LETTERS] = torch.randn(211, len(LETTERS), generator=generator) * 2
    table[:, EOS_ID] -= 4
    factor = torch.randint(1, 211, (MAX_SEQ_LEN,), generator=generator)

    def rule(history: object) -> torch.Tensor:
        ids = torch.tensor(history)
        return table[int((ids * factor[: len(ids)]).sum() % 211)]

    return rule


RULE = letter_rule()


def leftmost_stop(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    for start in range(len(text)):
        here = sorted((s for s in strings if text.startswith(s, start)), key=len)
        if here:
            return text[:start], here[0]
        if any(s.startswith(text[start:]) for s in strings):
            break  # cannot be told yet
    return text, None


def alone(request: Request) -> tuple[tuple[int, ...], str, FinishReason, object]:
    """Token ids, text, reason and cause of the end, one token at a time."""
    params = request.sampler
    generator = torch.Generator().manual_seed(params.seed or 0)
    history = list(request.prompt_ids)
    room = MAX_SEQ_LEN - len(history)
    limit = room if request.max_tokens is None else min(room, request.max_tokens)
    reply: list[int] = []
    tokenizer = ByteTokenizer()
    while len(reply) < limit:
        banned = request.stop_ids if len(reply) < request.min_tokens else frozenset()
        logits = RULE(history)
        for step in steps_for(params, history, banned):
            logits = step(logits)
        if params.is_greedy:
            token = greedy(logits)
        else:
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            token = draw(weights(logits), uniform)
        reply.append(token)
        history.append(token)
        if token in request.stop_ids:
            text, cause = last_stop(tokenizer.decode(reply[:-1]), request.stop_strings)
            return tuple(reply), text, FinishReason.STOP, token if cause is None else cause
        certain = tokenizer.stream_decoder().feed_all(reply)
        text, cause = leftmost_stop(certain, request.stop_strings)
        if cause is not None:
            return tuple(reply), text, FinishReason.STOP, cause
    text, cause = last_stop(tokenizer.decode(reply), request.stop_strings)
    reason = FinishReason.LENGTH if cause is None else FinishReason.STOP
    return tuple(reply), text, reason, cause


def last_stop(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    """In a text that will not go on."""
    hits = [(text.find(s), len(s), s) for s in strings if s in text]
    return (text[: min(hits)[0]], min(hits)[2]) if hits else (text, None)


prompts = st.builds(
    lambda letter, length, tail: [letter] * length + tail,
    st.sampled_from([97, 98]),
    st.sampled_from([240, 0, 249, 252, 255, 400, 500, 509, 512]),
    st.lists(st.sampled_from([97, 98, 32]), min_size=1, max_size=3),
)
samplers = st.builds(
    SamplerParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    penalty_range=st.sampled_from([None, 5]),
    seed=st.integers(0, 3),
)
stop_strings = st.lists(st.sampled_from(["ab", "b a", "é", "aab", "é b", "  b"]), max_size=2).map(
    tuple
)

lengths = st.sampled_from([(25, 40), (0, 40), (0, 9), (4, 30), (2, 2), (0, 1), (0, 0)])
arrivals = st.builds(
    lambda lengths, **rest: dict(min_tokens=lengths[0], max_tokens=lengths[1], **rest),
    lengths,
    prompt_ids=prompts,
    sampler=samplers,
    stop_strings=stop_strings,
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.sampled_from([3, 3, 4, 5, 7]),
        max_batch=st.integers(2, 5),
        prefill_chunk=st.sampled_from([256, 61, 100, 2000]),
    )
    def start(self, pages: int, max_batch: int, prefill_chunk: int) -> None:
        self.model = ScriptedModel(RULE, ScriptedShape(max_seq_len=MAX_SEQ_LEN))
        options = EngineOptions(pages * 256, max_batch=max_batch, prefill_chunk=prefill_chunk)
        self.engine = Engine(self.model, ByteTokenizer(), options)
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.text: dict[str, str] = {}

    @rule(requests=st.lists(arrivals, min_size=1, max_size=3))
    def arrive(self, requests: list[dict[str, Any]]) -> None:
        for arguments in requests:
            request = Request(stop_ids=frozenset({EOS_ID}), **arguments)
            self.engine.submit(request)
            self.requests[request.request_id] = request
            self.text[request.request_id] = ""

    @rule(steps=st.integers(1, 20))
    def turn(self, steps: int) -> None:
        for _ in range(steps):
            self.take(news(self.engine.step()))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), luck=st.integers(0, 3))
    def cancel(self, data: st.DataObject, luck: int) -> None:
        if luck < 3:
            self.turn(luck)
            return
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.engine.cancel(request_id):
            self.cancelled.add(request_id)

    @rule(luck=st.integers(0, 9))
    def fail(self, luck: int) -> None:
        if luck < 9:
            self.turn(luck)  # mostly things go well
            return
        self.model.failure = RuntimeError("scripted")
        running = {s.request_id for s in self.engine.scheduler.running}
        try:
            self.take(news(self.engine.step()))
        except RuntimeError as error:
            assert str(error) == "scripted"
            assert running <= self.requests.keys() - self.engine.live_requests
        self.model.failure = None

    def take(self, events: list[Event]) -> None:
        for event in events:
            request = self.requests[event.request_id]  # an id that has ended says nothing more
            if isinstance(event, TextEvent):
                self.text[event.request_id] += event.text
                continue
            del self.requests[event.request_id]
            if isinstance(event, FailEvent):
                assert isinstance(event.error, RuntimeError)
                continue
            self.check_end(request, event)

    def check_end(self, request: Request, end: FinishEvent) -> None:
        token_ids, text, reason, cause = alone(request)
        assert end.text == self.text[end.request_id]
        if end.request_id in self.cancelled:
            assert end.reason is FinishReason.CANCELLED
            assert token_ids[: end.completion_tokens] == end.token_ids
            assert text.startswith(end.text)
            return
        assert end.token_ids == token_ids
        assert (end.text, end.reason, end.stopped_by) == (text, reason, cause)
        assert end.prompt_tokens == len(request.prompt_ids)
        assert end.cached_tokens < end.prompt_tokens

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not hasattr(self, "engine"):
            return
        pool = self.engine.pool
        everywhere = [*pool.free_pages, *pool.cached_pages, *pool.held_pages]
        assert sorted(everywhere) == list(range(pool.num_pages))
        if not self.engine.live_requests:
            assert not pool.held_pages

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20000):
            if self.engine.is_idle:
                break
            self.take(news(self.engine.step()))
        assert self.engine.is_idle
        assert not self.requests, "every request got its end"
        assert self.engine.pool.num_available == self.engine.pool.num_pages


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_the_reference_and_the_engine_refuse_alike() -> None:
    """The state machine above submits nothing that could be refused; this is why it may not be."""
    engine = Engine(ScriptedModel(RULE), ByteTokenizer(), EngineOptions(cache_tokens=768))
    engine.submit(Request((97,) * 515, max_tokens=30))
    try:
        engine.submit(Request((97,) * 740, max_tokens=30))
    except RequestError as error:
        assert "do not fit the cache" in str(error)
    else:
        raise AssertionError("770 tokens fit into 768")
