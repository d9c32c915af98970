"""Random operations on the engine: every reply equals that of the reference loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exl_core.arch.layers import StateShape
from exl_core.arch.spec import ModelConfig
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    RewindEvent,
    StartEvent,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.model.adapters import AdapterUse
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from support.async_steps import enable_async_steps
from support.driving import submit
from support.guessing import ScriptedDrafter, half_right, right
from support.profiles import examples
from support.reference_loop import Changing, ReferenceLoop
from support.scripted import EOS_ID, PieceTokenizer, Rule, ScriptedModel, ScriptedShape

MAX_SEQ_LEN = 1200
TOKENIZER = PieceTokenizer("ab", "ba ")
PIECES = [TOKENIZER.id_of("ab"), TOKENIZER.id_of("ba ")]
LETTERS = [*b"ab \xc3\xa9", *PIECES, EOS_ID]  # 0xc3 0xa9 is e with an acute accent


def letter_rule() -> Rule:
    """Rule over few letters, so that stop strings and shared prefixes are frequent.

    The logits depend on the whole history.
    """
    generator = torch.Generator().manual_seed(1)
    table = torch.full((211, TOKENIZER.vocab_size), -40.0)
    table[:, LETTERS] = torch.randn(211, len(LETTERS), generator=generator) * 2
    table[:, EOS_ID] -= 4
    factor = torch.randint(1, 211, (MAX_SEQ_LEN,), generator=generator)

    def rule(history: object) -> torch.Tensor:
        ids = torch.tensor(history)
        return table[int((ids * factor[: len(ids)]).sum() % 211)]

    return rule


RULE = letter_rule()
REFERENCE = ReferenceLoop(RULE, TOKENIZER, MAX_SEQ_LEN)
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "right": lambda: ScriptedDrafter(right(RULE)),
    "half right": lambda: ScriptedDrafter(half_right(RULE), excess=2),
    "repeating": lambda: ScriptedDrafter(lambda history: history[-2:][0], max_tokens=2),
    "n-gram": lambda: NgramDrafter(min_match=1),
}


@dataclass(frozen=True, eq=False)
class Mark:
    """An adapter without deltas; only its pages are distinct."""

    serial: int = 7
    ends: None = None
    path: Path = Path()
    digest: str = ""

    def fits(self, config: ModelConfig) -> bool:
        return True

    def deltas(self, layer: int, matrix: str) -> tuple[()]:
        return ()


MARK = AdapterUse(Mark())

prompts = st.builds(
    lambda letter, length, tail: [letter] * length + tail,
    st.sampled_from([97, 98]),
    st.sampled_from([240, 0, 249, 252, 255, 400, 500, 509, 512]),
    st.lists(st.sampled_from([97, 98, 32]), min_size=1, max_size=3),
)
samplers = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "penalty_range": st.sampled_from([None, 5]),
        "seed": st.integers(0, 3),
    }
)
stop_strings = st.lists(st.sampled_from(["ab", "b a", "é", "aab", "é b", "  b"]), max_size=2)
banned_strings = st.lists(st.sampled_from(["A", "bA", "é", "aba", " b", "bb"]), max_size=2)
constraints = st.builds(
    Changing, st.sampled_from([(97, 98), (97, 98, 32, *PIECES)]), st.sampled_from([4, 9])
)
rarely = st.sampled_from([False, False, True])
lengths = st.sampled_from([(25, 40), (0, 40), (0, 9), (4, 30), (2, 2), (0, 1), (0, 0)])


@st.composite
def arrivals(draw: st.DrawFn) -> dict[str, Any]:
    min_tokens, max_tokens = draw(lengths)
    sampler: dict[str, Any] = {**draw(samplers)}
    made: dict[str, Any] = {
        "prompt_ids": draw(prompts),
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "stop_strings": draw(stop_strings),
        "banned_strings": draw(banned_strings) if draw(rarely) else (),
        "constraints": (draw(constraints),) if draw(rarely) else (),
        "prefer_eos": draw(rarely),
        "adapters": (MARK,) if draw(rarely) else (),
    }
    if draw(rarely):
        made["negative_prompt_ids"] = draw(prompts)
        sampler["cfg_scale"] = 1.5
    else:
        made["token_healing"] = draw(rarely)
    return {**made, "sampler": SamplerParams(**sampler)}


@dataclass
class Seen:
    """Events of one request so far."""

    request: Request
    text: str = ""
    token_ids: tuple[int, ...] = ()
    start: StartEvent | None = None
    done: int = 0
    is_cancelled: bool = False


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.sampled_from([3, 3, 4, 5, 7]),
        max_batch=st.integers(2, 5),
        prefill_chunk=st.sampled_from([256, 61, 100, 2000]),
        drafter=st.sampled_from(["async steps", "async parts", *sorted(DRAFTERS)]),
        is_hybrid=st.booleans(),
    )
    def start(
        self, pages: int, max_batch: int, prefill_chunk: int, drafter: str, is_hybrid: bool
    ) -> None:
        shape = ScriptedShape(TOKENIZER.vocab_size, MAX_SEQ_LEN)
        if is_hybrid:  # its layer has a state, too
            shape = replace(shape, state_shapes=(StateShape((1, 1)),))
        self.model = ScriptedModel(RULE, shape)
        self.drafter = DRAFTERS.get(drafter, lambda: None)()
        self.engine = Engine(
            self.model,
            TOKENIZER,
            EngineOptions(pages * 256, max_batch=max_batch, prefill_chunk=prefill_chunk),
            drafter=self.drafter,
            clock=lambda: 0.0,
        )
        if drafter.startswith("async"):
            enable_async_steps(self.engine, num_parts=2 if drafter == "async parts" else 1)
        self.live: dict[str, Seen] = {}

    @rule(requests=st.lists(arrivals(), min_size=1, max_size=3))
    def arrive(self, requests: list[dict[str, Any]]) -> None:
        for arguments in requests:
            request = Request(stop_ids=frozenset({EOS_ID}), **arguments)
            try:
                submit(self.engine, request)
            except RequestError as error:
                assert "do not fit the cache" in str(error)
                assert request.negative_prompt_ids is not None, "one prompt always fits"
                continue
            self.live[request.request_id] = Seen(request)

    @rule(steps=st.integers(1, 20))
    def turn(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), luck=st.integers(0, 3))
    def cancel(self, data: st.DataObject, luck: int) -> None:
        if luck < 3:
            self.turn(luck)
            return
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        if self.engine.cancel(request_id):
            self.live[request_id].is_cancelled = True

    @rule(luck=st.integers(0, 9))
    def fail(self, luck: int) -> None:
        if luck < 9:
            self.turn(luck)  # failures are rare
            return
        if isinstance(self.drafter, ScriptedDrafter) and len(self.live) % 2:
            self.drafter.failure = RuntimeError("scripted")
        else:
            self.model.failure = RuntimeError("scripted")
        running = {s.request_id for s in self.engine.scheduler.running}
        try:
            self.take(self.engine.step())
        except RuntimeError as error:
            assert str(error) == "scripted"
            preempted = {s.request_id for s in self.engine.scheduler.waiting}  # by this step
            assert running - preempted <= self.live.keys() - self.engine.live_requests
        self.model.failure = None
        if isinstance(self.drafter, ScriptedDrafter):
            self.drafter.failure = None

    def take(self, events: list[Event]) -> None:
        for event in events:
            seen = self.live[event.request_id]  # KeyError for an event after the end
            match event:
                case StartEvent():
                    assert seen.start is None
                    assert (seen.text, seen.token_ids, seen.done) == ("", (), 0)
                    seen.start = event
                case PrefillEvent():
                    self.check_progress(seen, event)
                case TextEvent():
                    assert event.text
                    seen.text += event.text
                    seen.token_ids += event.token_ids
                case RewindEvent():
                    assert event.text
                    assert event.token_ids
                case FailEvent():
                    del self.live[event.request_id]
                    if not isinstance(event.error, RuntimeError):
                        assert isinstance(event.error, RequestError)
                        assert REFERENCE(seen.request) is None
                case FinishEvent():
                    del self.live[event.request_id]
                    self.check_end(seen, event)

    def check_progress(self, seen: Seen, event: PrefillEvent) -> None:
        request = seen.request
        total = len(request.prompt_ids) + len(request.negative_prompt_ids or ())
        is_healed = request.token_healing and len(request.prompt_ids) > 1
        assert seen.start is not None
        assert event.total == total - is_healed
        assert max(seen.done, seen.start.cached_tokens) < event.done < event.total
        assert not seen.token_ids
        seen.done = event.done

    def check_end(self, seen: Seen, end: FinishEvent) -> None:
        reply = REFERENCE(seen.request)
        assert end.text == seen.text
        assert seen.token_ids == end.token_ids[: len(seen.token_ids)]
        assert end.prompt_tokens == len(seen.request.prompt_ids)
        assert end.cached_tokens < end.prompt_tokens
        if seen.start is not None:
            assert end.cached_tokens == seen.start.cached_tokens
        if end.drafting is not None:
            assert end.drafting.emitted >= end.completion_tokens
        if seen.is_cancelled:
            assert end.reason is FinishReason.CANCELLED
            if reply is not None:  # emitted text is final
                assert reply.token_ids[: len(seen.token_ids)] == seen.token_ids
                assert reply.text.startswith(end.text)
            return
        assert reply is not None
        assert end.token_ids == reply.token_ids
        assert (end.text, end.reason, end.stopped_by) == (reply.text, reply.reason, reply.cause)
        assert end.healed_id == reply.healed_id

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not hasattr(self, "engine"):
            return
        pool = self.engine.pool
        everywhere = [*pool.free_pages, *pool.cached_pages, *pool.held_pages]
        assert sorted(everywhere) == list(range(pool.num_pages))
        states = self.engine.scheduler.memory.states
        if not self.engine.live_requests:
            assert not pool.held_pages
            assert states is None or not states.lent_slots
        if isinstance(self.drafter, ScriptedDrafter):
            assert self.drafter.known <= self.engine.live_requests

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20000):
            if self.engine.is_idle:
                break
            self.take(self.engine.step())
        assert self.engine.is_idle
        assert not self.live, "every request got its end"
        assert self.engine.pool.num_available == self.engine.pool.num_pages


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=examples(60),
    stateful_step_count=25,
)


def test_one_prompt_always_fits() -> None:
    """Assumption of the state machine above."""
    engine = Engine(ScriptedModel(RULE), TOKENIZER, EngineOptions(cache_tokens=768))
    engine.check(Request((97,) * 515, max_tokens=40))
