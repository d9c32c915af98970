"""Async steps: the next pass is launched before its tokens are read, with the same replies."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from exl_core.cache.format import PAGE_SIZE
from exl_core.engine.engine import Engine
from exl_core.engine.events import FailEvent, FinishEvent, FinishReason
from exl_core.engine.logits import PassLogits
from exl_core.engine.request import Report, Request
from exl_core.engine.sequence import RequestSequence
from exl_core.errors import OutOfMemoryError
from exl_core.model.runner import NextPart
from exl_core.ops.sampling import PartLogits, SamplesInTurn, SamplingOps
from exl_core.sampling.params import SamplerParams
from support.async_steps import AsyncRunner, enable_async_steps
from support.driving import ask, engine_for, run_all, run_one
from support.guessing import ScriptedDrafter, right
from support.scripted import EOS_ID, HashRule, ScriptedModel, always, certain

RULE = HashRule(8, spread=1.5)
SEEDED = SamplerParams(temperature=0.9, top_k=30, seed=7)


def both(**options: Any) -> tuple[Engine, Engine, AsyncRunner]:
    plain, with_async = (engine_for(RULE, clock=lambda: 0.0, **options) for _ in range(2))
    return plain, with_async, enable_async_steps(with_async)


def ends(engine: Engine, requests: list[Request]) -> list[tuple[str, FinishReason, object]]:
    for request in requests:
        engine.submit(request)
    found = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    return [
        (found[r.request_id].text, found[r.request_id].reason, found[r.request_id].stopped_by)
        for r in requests
    ]


def passes_of(engine: Engine) -> list[int]:
    assert isinstance(engine.model, ScriptedModel)
    return engine.model.rows_of_pass


def test_async_steps_run_the_same_passes() -> None:
    plain, with_async, runner = both()
    request = ask(max_tokens=20, sampler=SEEDED, stop_ids=frozenset())
    assert run_one(with_async, request) == run_one(plain, request)
    assert passes_of(with_async) == passes_of(plain)
    assert runner.launched == 19  # every pass but the prompt's


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_a_launched_pass_may_begin_a_page(is_hybrid: bool) -> None:
    """Unless a snapshot of the state is copied at the border first."""
    plain, with_async, runner = both(cache_tokens=4 * PAGE_SIZE, is_hybrid=is_hybrid)
    length = 2 * PAGE_SIZE + 9
    request = ask(max_tokens=length, sampler=SEEDED, stop_ids=frozenset())
    assert run_one(with_async, request) == run_one(plain, request)
    assert runner.launched == length - 1 - 2 * is_hybrid
    assert with_async.pool.num_available == with_async.pool.num_pages


def test_a_launched_pass_takes_no_page_that_another_sequence_needs() -> None:
    """Two sequences reach the border in one pass, and one page is left."""
    plain, with_async, runner = both(cache_tokens=3 * PAGE_SIZE, max_batch=2)
    requests = [
        ask([65 + i] * (PAGE_SIZE - 9), sampler=SamplerParams(seed=i), max_tokens=40)
        for i in range(2)
    ]
    assert ends(with_async, requests) == ends(plain, requests)
    assert plain.scheduler.num_requeued == with_async.scheduler.num_requeued == 1
    assert runner.launched > 15, "none while a sequence waits"


def test_valid_rows_of_a_launched_pass_are_used_after_others_end() -> None:
    plain, with_async, runner = both(max_batch=8)
    requests = [
        ask(f"{i}?", sampler=SamplerParams(seed=i), max_tokens=100, stop_ids=frozenset(range(i)))
        for i in (0, 3, 9, 20, 40)
    ]
    assert ends(with_async, requests) == ends(plain, requests)
    assert {reason for _, reason, _ in ends(with_async, requests)} > {FinishReason.STOP}
    # Each sequence that stops has computed one extra row; no other row is computed twice.
    assert sum(passes_of(with_async)) <= 2 * (sum(passes_of(plain)) + len(requests))
    assert runner.launched > len(passes_of(plain)) // 2


def test_a_new_request_waits_for_the_launched_pass_only() -> None:
    engine = engine_for(RULE)
    runner = enable_async_steps(engine)
    engine.submit(ask("first", max_tokens=50, stop_ids=frozenset()))
    for _ in range(4):
        engine.step()
    launched = runner.launched
    engine.submit(ask("second", max_tokens=50, stop_ids=frozenset()))
    passes = len(passes_of(engine))
    engine.step()  # uses the launched pass; no new one is launched before the prompt
    assert runner.launched == launched
    assert len(passes_of(engine)) == passes
    engine.step()
    assert passes_of(engine)[passes] == len(b"second") + 1
    run_all(engine)


def test_cancel_while_the_next_pass_is_launched() -> None:
    engine = engine_for(RULE)
    enable_async_steps(engine)
    for name in ("a", "b"):
        engine.submit(ask(name, request_id=name, max_tokens=30, stop_ids=frozenset()))
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    text = next(
        e.text for e in run_all(engine) if isinstance(e, FinishEvent) and e.request_id == "b"
    )
    assert text == run_one(engine_for(RULE), ask("b", max_tokens=30, stop_ids=frozenset()))[1].text
    assert engine.pool.num_available == engine.pool.num_pages


def num_sequences() -> int:
    gc.collect()
    return sum(isinstance(one, RequestSequence) for one in gc.get_objects())


def test_an_idle_engine_drops_the_launched_pass() -> None:
    before = num_sequences()
    engine = engine_for(RULE)
    runner = enable_async_steps(engine)
    request = ask(sampler=SEEDED, max_tokens=100, stop_ids=frozenset(range(20)))
    _, end = run_one(engine, request)
    assert end.reason is FinishReason.STOP
    assert runner.launched == end.completion_tokens  # the last one is discarded
    assert num_sequences() == before


@pytest.mark.parametrize(
    "rest",
    [
        {"report": Report(logits=True)},
        {"report": Report(log_probs=3)},
        {"report": Report(top_tokens=5, probabilities=True)},
        {"banned_strings": ("a", "e")},
        {"sampler": SamplerParams(repetition_penalty=1.3, frequency_penalty=0.2, seed=3)},
    ],
    ids=["logits", "log-probs", "top", "banned", "penalties"],
)
def test_reports_use_the_logits_of_the_tokens_own_pass(rest: dict[str, Any]) -> None:
    plain, with_async, runner = both()
    request = ask(max_tokens=25, stop_ids=frozenset(), **rest)
    found = []
    for engine in (plain, with_async):
        engine.submit(request)
        found.append([str(e) for e in run_all(engine) if not isinstance(e, FinishEvent)])
    assert found[0] == found[1]
    assert runner.launched > 0


@pytest.mark.parametrize(
    "rest",
    [
        {"hooks": (lambda _: None,)},
        {"sampler": SamplerParams(cfg_scale=1.5, seed=1), "negative_prompt_ids": (1, 2)},
        {"sampler": SamplerParams(mirostat_tau=3.0, seed=1)},
    ],
    ids=["hooks", "guided", "mirostat"],
)
def test_no_async_pass_if_tokens_depend_on_more_than_settings(rest: dict[str, Any]) -> None:
    plain, with_async, runner = both()
    request = ask(max_tokens=10, stop_ids=frozenset(), **rest)
    assert ends(with_async, [request]) == ends(plain, [request])
    assert runner.launched == 0


def test_no_async_pass_with_drafts() -> None:
    engine = engine_for(RULE, drafter=ScriptedDrafter(right(RULE)))
    runner = enable_async_steps(engine)
    run_one(engine, ask(max_tokens=20, stop_ids=frozenset()))
    assert runner.launched == 0


def test_the_cause_of_a_failed_sample_is_read_from_its_own_pass() -> None:
    logits = certain(EOS_ID)
    engine = engine_for(always(logits))
    enable_async_steps(engine)
    engine.submit(ask(max_tokens=9, stop_ids=frozenset()))
    engine.step()
    logits.fill_(float("nan"))
    engine.step()  # its pass was launched before the fill
    failure = next(e for e in run_all(engine) if isinstance(e, FailEvent))
    assert "NaN" in str(failure.error)
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_failed_launch_fails_all_running_requests() -> None:
    engine = engine_for(RULE)
    enable_async_steps(engine)
    engine.submit(ask(max_tokens=9, stop_ids=frozenset()))
    engine.step()
    assert isinstance(engine.model, ScriptedModel)
    engine.model.failure = RuntimeError("scripted")
    with pytest.raises(RuntimeError, match="scripted"):
        engine.step()
    assert isinstance(run_all(engine)[0], FailEvent)
    _, end = run_one(engine, ask(max_tokens=9, stop_ids=frozenset()))
    assert end.completion_tokens == 9


@pytest.mark.parametrize(("owner", "failing"), [(PassLogits, "keep"), (AsyncRunner, "next_pass")])
def test_no_async_pass_without_memory_for_the_logits(
    owner: type, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OutOfMemoryError("none left")

    monkeypatch.setattr(owner, failing, fail)
    plain, with_async, runner = both()
    request = ask(max_tokens=10, stop_ids=frozenset())
    assert run_one(with_async, request) == run_one(plain, request)
    assert runner.launched == 0


def test_preemption_with_async_steps() -> None:
    plain, with_async, runner = both(cache_tokens=768, max_batch=3)
    requests = [
        ask([65 + i] * 200, sampler=SamplerParams(seed=i), max_tokens=220, stop_ids=frozenset())
        for i in range(3)
    ]
    assert ends(with_async, requests) == ends(plain, requests)
    assert with_async.scheduler.num_requeued > 0
    assert runner.launched > 100


def sampled_parts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Receives the numbers of rows of each call of `sample_parts`."""
    found: list[list[int]] = []

    def counted(ops: SamplingOps, parts: Any, rows: Any, next_steps: Any) -> Any:
        found.append([len(own) for own in rows])
        return SamplesInTurn.sample_parts(ops, parts, rows, next_steps)

    monkeypatch.setattr(type(engine.model.ops), "sample_parts", counted)
    return found


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_of_a_pass_are_sampled_one_after_the_other(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, with_async = (engine_for(RULE, max_batch=8) for _ in range(2))
    runner = enable_async_steps(with_async, num_parts)
    sampled = sampled_parts(with_async, monkeypatch)
    requests = [
        ask(f"{i}?", sampler=SamplerParams(seed=i), max_tokens=30 + 7 * i, stop_ids=frozenset())
        for i in range(7)
    ]
    assert ends(with_async, requests) == ends(plain, requests)
    sizes = {2: [4, 3], 3: [3, 3, 1]}
    assert sampled.count(sizes[num_parts]) > 25
    assert [2, 1] in sampled or [1, 1, 1] in sampled, "others have ended"
    assert runner.launched > 2 * len(sampled)


@pytest.mark.parametrize("report", [Report(logits=True), Report(log_probs=3)])
def test_logits_of_parts_are_read_row_by_row(report: Report) -> None:
    plain, with_async = (engine_for(RULE, max_batch=8) for _ in range(2))
    enable_async_steps(with_async, num_parts=2)
    requests = [ask(f"{i}?", max_tokens=20, stop_ids=frozenset(), report=report) for i in range(5)]
    found = []
    for engine in (plain, with_async):
        for request in requests:
            engine.submit(request)
        found.append([str(e) for e in run_all(engine) if not isinstance(e, FinishEvent)])
    assert found[0] == found[1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_without_memory_is_computed_after_the_tokens_are_read(failing: int) -> None:
    plain, with_async = (engine_for(RULE, max_batch=8) for _ in range(2))
    runner = enable_async_steps(with_async, num_parts=2)
    run_on, launches = runner.run_on, 0

    def counted(part: NextPart) -> PartLogits:
        nonlocal launches
        launches += 1
        if launches % 6 == failing:
            raise OutOfMemoryError("scripted")
        return run_on(part)

    runner.run_on = counted  # type: ignore[method-assign]
    requests = [
        ask(f"{i}?", sampler=SamplerParams(seed=i), max_tokens=40, stop_ids=frozenset())
        for i in range(6)
    ]
    assert ends(with_async, requests) == ends(plain, requests)
    assert launches > 30


def test_tokens_that_fail_after_a_launched_part_are_sampled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first part of the next pass has been launched when the second one fails."""
    plain, with_async = (engine_for(RULE, max_batch=8) for _ in range(2))
    enable_async_steps(with_async, num_parts=2)
    calls = 0

    def failing(ops: SamplingOps, parts: Any, rows: Any, next_steps: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            SamplesInTurn.sample_parts(ops, parts[:1], rows[:1], next_steps[:1])
            raise RuntimeError("scripted")
        return SamplesInTurn.sample_parts(ops, parts, rows, next_steps)

    monkeypatch.setattr(type(with_async.model.ops), "sample_parts", failing)
    requests = [
        ask(f"{i}?", sampler=SamplerParams(seed=i), max_tokens=40, stop_ids=frozenset())
        for i in range(6)
    ]
    assert ends(with_async, requests) == ends(plain, requests)
    assert calls > 8
