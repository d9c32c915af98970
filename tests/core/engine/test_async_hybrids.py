"""Async steps of hybrids: the same replies and logits; the state of an ended reply is reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FailEvent, FinishEvent, FinishReason, TextEvent
from exl_core.engine.request import Report, Request
from exl_core.errors import OutOfMemoryError
from exl_core.model.runner import NextPart, Runner
from exl_core.ops.open import available_isas
from exl_core.ops.sampling import PartLogits
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support.async_steps import AsyncRunner, enable_async_steps
from support.driving import ask, engine_for, run_one
from support.scripted import HashRule, ScriptedModel
from support.tiny_hybrids import tiny_granite_hybrid, tiny_kimi_linear, tiny_lfm2, tiny_qwen35
from support.tiny_models import save

RULE = HashRule(8, spread=1.5)
HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32),
    "qwen3.5": lambda: tiny_qwen35(hidden_size=96, head_dim=32, linear_value_head_dim=32),
    "granite4-hybrid": lambda: tiny_granite_hybrid(hidden_size=192, head_dim=32, mamba_d_head=64),
    "kimi-linear": lambda: tiny_kimi_linear(hidden_size=96),
}


def both(**options: Any) -> tuple[Engine, Engine, AsyncRunner]:
    """Two engines of a scripted hybrid, the second one with async steps."""
    plain, with_async = (
        engine_for(RULE, clock=lambda: 0.0, is_hybrid=True, **options) for _ in range(2)
    )
    return plain, with_async, enable_async_steps(with_async)


def check_unused(engine: Engine) -> None:
    states = engine.scheduler.memory.states
    assert states is not None
    assert not states.lent_slots, "no slot is lost"
    assert engine.pool.num_available == engine.pool.num_pages


def test_async_steps_run_the_same_passes() -> None:
    plain, with_async, runner = both()
    request = ask(max_tokens=20, stop_ids=frozenset())
    assert run_one(with_async, request) == run_one(plain, request)
    assert runner.launched == 19  # every pass but the prompt's
    assert isinstance(plain.model, ScriptedModel)
    assert isinstance(with_async.model, ScriptedModel)
    assert with_async.model.rows_of_pass == plain.model.rows_of_pass


def prompt_of(length: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt, and its greedy reply of `count` tokens, whose last token comes once."""
    for factor in range(3, 99, 2):
        prompt = tuple(factor * i % 200 for i in range(length))
        asked = ask(prompt, max_tokens=count, stop_ids=frozenset())
        reply = run_one(engine_for(RULE), asked)[1].token_ids
        if reply[-1] not in reply[:-1]:
            return prompt, reply
    raise AssertionError("no such prompt")


def stop_at(engine: Engine, prompt: tuple[int, ...], reply: tuple[int, ...]) -> None:
    """Ends a reply by its last token."""
    request = ask(prompt, max_tokens=len(reply) + 9, stop_ids=frozenset(reply[-1:]))
    _, end = run_one(engine, request)
    assert (end.reason, end.token_ids) == (FinishReason.STOP, reply)


def continued(engine: Engine, ids: tuple[int, ...]) -> int:
    """Checks the greedy reply to these ids. Returns how many of them were cached."""
    request = ask(ids, max_tokens=9, stop_ids=frozenset())
    _, end = run_one(engine, request)
    assert end.token_ids == run_one(engine_for(RULE), request)[1].token_ids
    check_unused(engine)
    return end.cached_tokens


@pytest.mark.parametrize("length", [20, PAGE_SIZE - 11, PAGE_SIZE - 10, 2 * PAGE_SIZE - 10])
def test_a_stopped_reply_goes_on_after_its_stop_token(length: int) -> None:
    """Its launched row is that of the stop token, also where this one is the last of a page."""
    plain, with_async, runner = both()
    prompt, reply = prompt_of(length, 10)
    cached = []
    for engine in (plain, with_async):
        stop_at(engine, prompt, reply)
        cached.append(continued(engine, (*prompt, *reply, 5, 6, 7)))
    assert cached == [length + 9, length + 10]
    assert runner.launched > 9


def test_no_pass_is_launched_before_the_snapshot_at_a_border_is_taken() -> None:
    plain, with_async, runner = both()
    prompt, reply = prompt_of(PAGE_SIZE - 9, 10)
    for engine in (plain, with_async):
        stop_at(engine, prompt, reply)
        continued(engine, (*prompt, *reply, 5, 6, 7))
    assert runner.launched == 9 + 8, "not behind the pass that fills the page"


def test_another_end_than_the_stop_token_goes_on_from_a_border() -> None:
    plain, with_async, _ = both()
    prompt, reply = prompt_of(300, 10)
    cached = []
    for engine in (plain, with_async):
        stop_at(engine, prompt, reply)
        cached.append(continued(engine, (*prompt, *reply[:-1], 1, 2, 3)))
    assert cached == [309, PAGE_SIZE]


def test_replies_survive_launches_that_run_out_of_memory() -> None:
    """The failed launch has changed the states."""
    plain, with_async, runner = both(max_batch=3)
    assert with_async.store.states is not None
    states = with_async.store.states.layer(0).inputs
    working = runner.run_on

    def run_on(part: NextPart) -> PartLogits:
        if len(runner.model.rows_of_pass) % 7 == 3:  # type: ignore[attr-defined]
            with torch.inference_mode():
                states[[one.state_slot for one in part.segments]] = -1
            raise OutOfMemoryError("scripted")
        return working(part)

    runner.run_on = run_on  # type: ignore[method-assign]
    requests = [
        ask([60 + i] * (200 + 50 * i), sampler=SamplerParams(seed=i), max_tokens=90)
        for i in range(3)
    ]
    found = []
    for engine in (plain, with_async):
        for request in requests:
            engine.submit(request)
        ends: dict[str, FinishEvent] = {}
        while not engine.is_idle:
            ends |= {e.request_id: e for e in engine.step() if isinstance(e, FinishEvent)}
        found.append([ends[request.request_id].token_ids for request in requests])
        check_unused(engine)
    assert found[0] == found[1]
    assert runner.launched > 30


@dataclass
class Job:
    """A request of a conversation. It is cancelled at `cancel_at` tokens of its reply."""

    request: Request
    cancel_at: int
    next_tail: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    logits: list[Tensor] = field(default_factory=list)
    end: tuple[object, ...] = ()


class Jobs:
    """Random conversations of two turns over a few prompts, the same ones for each engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = Random(seed)
        self.prefixes = [self.ids(280) for _ in range(2)]
        self.all: list[Job] = []
        self.live: dict[str, Job] = {}
        self.is_interrupted = 0

    def ids(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.randint(3, 258) for _ in range(length))

    def job(self) -> Job:
        random = self.random
        prompt = random.choice(self.prefixes)[: random.choice([3, 200, 250, 280])]
        prompt += self.ids(random.randint(1, 30))
        kinds: dict[str, Any] = {
            "stop_ids": frozenset(self.ids(random.choice([0, 6, 20]))),
            "stop_strings": tuple(
                map(chr, random.choices(range(97, 123), k=random.choice([0, 3])))
            ),
            "banned_strings": ("e", "q") if random.random() < 0.15 else (),
            "token_healing": random.random() < 0.15,
        }
        sampler = SamplerParams(
            temperature=random.choice([0.0, 1.0]), seed=random.randint(0, 5), top_k=40
        )
        report = Report(logits=True)
        request = Request(
            prompt, max_tokens=random.choice([1, 9, 40]), sampler=sampler, report=report, **kinds
        )
        cancel_at = random.randint(1, 20) if random.random() < 0.2 else 1000
        return Job(request, cancel_at, self.ids(random.randint(1, 9)))

    def submit(self, job: Job) -> None:
        self.all.append(job)
        self.live[job.request.request_id] = job
        self.engine.submit(job.request)

    def step(self) -> None:
        engine = self.engine
        for event in engine.step():
            job = self.live[event.request_id]
            if isinstance(event, FailEvent):  # its random settings leave no token
                del self.live[event.request_id]
                job.end = (str(event.error), None)
            if isinstance(event, TextEvent | FinishEvent):
                job.logits += [one.logits for one in event.tokens if one.logits is not None]
            if isinstance(event, FinishEvent):
                del self.live[event.request_id]
                job.token_ids = event.token_ids
                job.end = (event.text, event.reason, event.stopped_by, event.healed_id)
        for name in engine.live_requests:
            job, known = self.live[name], engine.token_ids_of(name)
            if len(known) - len(job.request.prompt_ids) >= job.cancel_at:
                job.cancel_at = 1000
                assert engine.cancel(name)
                self.is_interrupted += 1

    def run(self, rounds: int) -> None:
        """Each round has four first turns, then a second turn of each of them."""
        for _ in range(rounds):
            first = [self.job() for _ in range(4)]
            second = [self.job() for _ in first]
            for job in first:
                self.submit(job)
            self.drain()
            for before, job in zip(first, second, strict=True):
                text = (*before.request.prompt_ids, *before.token_ids, *before.next_tail)
                job.request = Request(
                    text,
                    max_tokens=8,
                    sampler=SamplerParams(temperature=0),
                    report=Report(logits=True),
                )
                self.submit(job)
            self.drain()
        check_unused(self.engine)

    def drain(self) -> None:
        while not self.engine.is_idle:
            self.step()


@pytest.fixture(scope="module", params=HYBRIDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """In the mode whose logits do not depend on how texts are divided into passes."""
    folder = save(HYBRIDS[request.param](), tmp_path_factory.mktemp("hybrid"))
    options = LoadOptions(device="cpu", isa=available_isas()[-1], threads=2, batch_invariant=True)
    return load_model(str(folder), options)


@pytest.mark.parametrize("tokens", [1024, 8192], ids=["preempting", "roomy"])
def test_random_jobs_have_the_same_text_and_logits(loaded: LoadedModel, tokens: int) -> None:
    runs = []
    for _ in range(2):
        options = EngineOptions(tokens, max_batch=3, prefill_chunk=100, snapshots=4)
        engine = Engine(loaded.model, loaded.tokenizer, options)
        runs.append(Jobs(engine, seed=tokens))
    runner = enable_async_steps(runs[1].engine)
    for run in runs:
        run.run(rounds=3)
    assert runs[0].is_interrupted == runs[1].is_interrupted > 0
    assert {job.end[1] for job in runs[0].all} >= {
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.CANCELLED,
    }
    assert runner.launched > 50
    for one, other in zip(runs[0].all, runs[1].all, strict=True):
        assert (one.token_ids, one.end) == (other.token_ids, other.end)
        assert len(one.logits) == len(other.logits)
        for a, b in zip(one.logits, other.logits, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1024, 8192], ids=["preempting", "roomy"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_random_jobs_on_a_gpu_have_the_same_text(
    name: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With captured graphs. Rows round differently if a text is divided into other passes, so that
    logits may differ a little, and with them a token whose rival is almost as likely."""
    folder = save(HYBRIDS[name](), tmp_path)
    loaded = load_model(str(folder), LoadOptions(device="cuda", batch_invariant=True))
    launches: list[int] = []
    run_on = Runner.run_on

    def counted(runner: Runner, part: NextPart) -> PartLogits:
        launches.append(len(part.segments))
        return run_on(runner, part)

    monkeypatch.setattr(Runner, "run_on", counted)
    runs = []
    for has_async in (False, True):
        options = EngineOptions(tokens, max_batch=3, prefill_chunk=100, snapshots=4)
        jobs = Jobs(Engine(loaded.model, loaded.tokenizer, options), seed=tokens)
        with monkeypatch.context() as patch:
            if not has_async:
                patch.setattr(Runner, "next_pass", lambda *_: None)
            jobs.run(rounds=3)
        assert bool(launches) == has_async
        runs.append(jobs)
    pairs = list(zip(runs[0].all, runs[1].all, strict=True))
    for one, other in pairs:
        if one.request.prompt_ids != other.request.prompt_ids:
            continue  # the turn before differs
        both_ids = zip(one.token_ids, other.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both_ids))
        for a, b in zip(one.logits[: same + 1], other.logits[: same + 1], strict=False):
            # Twice the bound of `tests/cuda/test_recurrent_models.py` against float64 ops.
            assert (a - b).norm() <= 6e-3 * b.norm()
    same_text = sum(one.end == other.end for one, other in pairs)
    assert same_text >= 0.8 * len(pairs)
