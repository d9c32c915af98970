"""Failure isolation: a failing request ends alone, and its neighbours get unchanged tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.arch.layers import StateShape
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FailEvent, FinishEvent, SampledToken
from exl_core.engine.request import Report, Request
from exl_core.errors import ConstraintError, DeviceError, ExlError, OutOfMemoryError
from exl_core.ops.checks import OpInputError
from exl_core.ops.sampling import NextStep, Sampled
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError
from exl_core.speculate.drafter import Draft, DraftJob
from support.async_steps import enable_async_steps
from support.driving import ask, engine_for, run_all, run_one, run_to_failure, submit
from support.faults import (
    POINTS,
    VICTIM_TOP_K,
    Fault,
    FaultyTable,
    break_functions,
    break_request,
)
from support.guessing import ScriptedDrafter, right
from support.profiles import examples
from support.reference_loop import Changing
from support.scripted import ByteTokenizer, HashRule, ScriptedModel, ScriptedShape

RULE = HashRule(3, spread=1.5)
SEEDED = SamplerParams(temperature=0.9, top_k=30, seed=7)
CHANGING = Changing((97, 98, 99), 14)
UNSTOPPED: dict[str, Any] = {"stop_ids": frozenset(), "max_tokens": 14}


class PanicException(BaseException):
    """Stands for a panic in a Rust extension, whose class does not derive from `Exception`."""


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("scripted"),
    lambda: TypeError("scripted"),
    lambda: KeyError(1),
    lambda: IndexError("scripted"),
    lambda: AttributeError("scripted"),
    lambda: ZeroDivisionError("scripted"),
    lambda: OverflowError("scripted"),
    lambda: AssertionError("scripted"),
    lambda: RecursionError("scripted"),
    MemoryError,
    lambda: StopIteration("scripted"),
    lambda: OSError(5, "scripted"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "scripted"),
    lambda: ExceptionGroup("scripted", [ValueError("inner")]),
    lambda: OpInputError("scripted"),
    lambda: ConstraintError("scripted"),
    lambda: LogitsError("scripted"),
    lambda: OutOfMemoryError("scripted"),
    lambda: ExlError("scripted"),
]
BARE_ERRORS: list[Callable[[], BaseException]] = [
    lambda: PanicException("scripted"),
    lambda: asyncio.CancelledError("scripted"),
    lambda: GeneratorExit("scripted"),
]

VICTIMS: dict[str, dict[str, Any]] = {
    "plain": {"stop_strings": ("qq",), "banned_strings": tuple("abcdefghijklmnopq")},
    "hooked": {"hooks": (lambda _: None,)},
    "mirostat": {
        "sampler": {"mirostat_tau": 3.0},
        "banned_strings": tuple("abcdefghijklm\x01\x02"),
    },
    "reported": {"report": Report(True, 3, True, VICTIM_TOP_K, prompt=True)},
    "constrained": {"constraints": (CHANGING,), "banned_strings": ("ab",), "min_tokens": 2},
    "healed": {"token_healing": True},
    "guided": {"sampler": {"cfg_scale": VICTIM_TOP_K}, "negative_prompt_ids": (66, 67)},
}
MODES = ("plain", "drafts", "sampled drafts", "async", "async hybrid")


def neighbours(mode: str) -> list[Request]:
    """Requests beside the victim. For async steps, only those that need sampler settings alone."""
    kinds: list[dict[str, Any]] = [
        {"sampler": SEEDED},
        {},
        {"sampler": SEEDED, "constraints": (CHANGING,)},
        {"sampler": SamplerParams(seed=2, min_p=0.02), "banned_strings": tuple("abcdefgh\x01")},
    ]
    if "async" not in mode:
        kinds += [
            {"sampler": SamplerParams(seed=4, cfg_scale=1.5), "negative_prompt_ids": (66, 67)},
            {"sampler": SamplerParams(seed=1, repetition_penalty=1.2), "token_healing": True},
        ]
    return [
        ask(f"N{i}:", request_id=f"neighbour {i}", **{**UNSTOPPED, **one})
        for i, one in enumerate(kinds)
    ]


def victim(kind: str, fault: Fault | None = None) -> Request:
    given_ = dict(VICTIMS[kind])
    sampler = SamplerParams(**{"top_k": VICTIM_TOP_K, "seed": 5, **given_.pop("sampler", {})})
    if fault is not None and "hooks" in given_:
        given_["hooks"] = (lambda _: fault.use("hook", "call"),)
    return ask("V:", request_id="victim", sampler=sampler, **{**UNSTOPPED, **given_})


class SampledDrafts(ScriptedDrafter):
    """Samples drafts from a fixed distribution.

    Drafts, and therefore replies, depend on the history alone, not on other requests.
    """

    spread = torch.softmax(torch.linspace(0, 2, 258), 0)

    def __init__(self) -> None:
        super().__init__(right(RULE))

    def _propose(self, job: DraftJob) -> Draft:
        generator = torch.Generator().manual_seed(sum(job.token_ids))
        sampled = torch.multinomial(self.spread, job.max_tokens, True, generator=generator)
        return Draft(tuple(sampled.tolist()), (self.spread,) * job.max_tokens)


def engine_in(mode: str, fault: Fault | None = None) -> Engine:
    drafter = {"drafts": lambda: ScriptedDrafter(right(RULE)), "sampled drafts": SampledDrafts}
    states = (StateShape((1, 1)),) if "hybrid" in mode else ()
    engine = Engine(
        ScriptedModel(RULE, ScriptedShape(state_shapes=states), ops=FaultyTable(fault)),
        ByteTokenizer(),
        EngineOptions(max_batch=16, adapt_drafts=False),
        drafter=drafter[mode]() if mode in drafter else None,
        clock=lambda: 0.0,
    )
    if "async" in mode:
        enable_async_steps(engine)
    return engine


def outcome(end: FinishEvent) -> tuple[object, ...]:
    return end.token_ids, end.text, end.reason, end.stopped_by, end.healed_id


@cache
def undisturbed(mode: str) -> dict[str, tuple[object, ...]]:
    """Replies of the neighbours without a victim."""
    engine = engine_in(mode)
    for request in neighbours(mode):
        submit(engine, request)
    return {e.request_id: outcome(e) for e in run_all(engine) if isinstance(e, FinishEvent)}


def serve(engine: Engine, mode: str, kind: str, fault: Fault, index: int = 1) -> FailEvent | None:
    """Serve the victim among its neighbours, check these, and return the victim's failure."""
    requests = neighbours(mode)
    requests.insert(index, victim(kind, fault))
    with pytest.MonkeyPatch.context() as patch:
        break_functions(patch, "victim", fault)
        for request in requests:
            submit(engine, request)
        break_request(engine, "victim", fault)
        events = run_all(engine)
    ends = {e.request_id: e for e in events if isinstance(e, FinishEvent | FailEvent)}
    assert len([e for e in events if isinstance(e, FinishEvent | FailEvent)]) == len(requests)
    end = ends.pop("victim")
    assert {name: outcome(e) for name, e in ends.items() if isinstance(e, FinishEvent)} == (
        undisturbed(mode)
    )
    assert engine.pool.num_available == engine.pool.num_pages
    assert isinstance(end, FailEvent) == fault.has_fired
    return end if isinstance(end, FailEvent) else None


def causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@cache
def uses(mode: str, kind: str) -> dict[tuple[str, str], int]:
    """Number of uses of each injection point for such a victim, served alone."""
    counted = Fault()
    engine = engine_in(mode, counted)
    with pytest.MonkeyPatch.context() as patch:
        break_functions(patch, "victim", counted)
        submit(engine, victim(kind, counted))
        break_request(engine, "victim", counted)
        run_all(engine)
    return {point: count for point, count in counted.uses.items() if point in POINTS}


def test_every_injection_point_is_reached_by_some_victim() -> None:
    assert {point for mode in MODES for kind in VICTIMS for point in uses(mode, kind)} == {*POINTS}


@given(data=st.data())
@settings(max_examples=examples(200))
def test_a_failure_at_any_step_ends_its_request_alone(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(MODES))
    point = data.draw(st.sampled_from(POINTS))
    kinds = [kind for kind in VICTIMS if point in uses(mode, kind)]
    assume(kinds)
    kind = data.draw(st.sampled_from(kinds))
    nth = data.draw(st.integers(1, uses(mode, kind)[point]))
    errors = ERRORS if point[0] == "op" else ERRORS + BARE_ERRORS
    fault = Fault(point, nth, data.draw(st.sampled_from(errors))())
    engine = engine_in(mode, fault)
    index = data.draw(st.integers(0, len(neighbours(mode))))
    failure = serve(engine, mode, kind, fault, index)
    if failure is not None:
        assert fault.error in causes(failure.error)
    _, end = run_one(engine, ask("after", **UNSTOPPED))
    assert outcome(end) == outcome(run_one(engine_in("plain"), ask("after", **UNSTOPPED))[1])


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("name", ["mask", "accept", "is_complete"])
def test_a_filter_that_fails_in_the_background_ends_its_request_alone(name: str, nth: int) -> None:
    """Masks are computed on another thread; the failure is raised where the mask is read."""
    fault = Fault(("filter", name), nth, PanicException("scripted"))
    engine = engine_in("plain", fault)
    with ThreadPoolExecutor(1) as executor:
        engine.__dict__["_executor"] = executor
        failure = serve(engine, "plain", "constrained", fault)
    assert failure is not None and fault.error in causes(failure.error)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_all_running_requests(interrupt: type[BaseException]) -> None:
    engine = engine_in("plain")

    def hook(_: SampledToken) -> None:
        raise interrupt

    engine.submit(ask(request_id="other"))
    engine.submit(ask(request_id="interrupted", hooks=(hook,)))
    with pytest.raises(interrupt):
        engine.step()
    ends = [e for e in run_all(engine) if isinstance(e, FailEvent)]
    assert [e.request_id for e in ends] == ["other", "interrupted"]
    assert all(isinstance(e.error, interrupt) for e in ends)


@pytest.mark.parametrize("mode", ["plain", "async", "async hybrid"])
def test_a_device_failure_during_sampling_ends_all_running_requests(mode: str) -> None:
    fault = Fault(("op", "sample_rows"), 3, DeviceError("scripted"))
    engine = engine_in(mode, fault)
    for request in (*neighbours("async"), victim("plain")):
        submit(engine, request)
    with pytest.raises(DeviceError):
        for _ in range(9):
            engine.step()
    assert all(isinstance(e, FailEvent) for e in run_all(engine))
    fault.nth = 1000
    assert outcome(run_one(engine, neighbours(mode)[0])[1]) == undisturbed(mode)["neighbour 0"]


@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "after-the-launch"])
@pytest.mark.parametrize("mode", ["plain", "async", "async hybrid"])
def test_a_failed_batch_is_sampled_again_row_by_row(mode: str, is_late: bool) -> None:
    """If every row can be sampled alone, all replies are unchanged. A pass may have been launched
    with other tokens before the failure."""

    class FailingBatches(FaultyTable):
        def sample_rows(  # type: ignore[override]
            self, logits: Tensor, rows: Any, next_step: NextStep | None = None
        ) -> Any:
            if len(rows) > 1:
                if is_late and next_step is not None:
                    next_step.launch_after([Sampled(77, 1.0, [])] * len(rows))
                raise RuntimeError("scripted")
            return super().sample_rows(logits, rows, next_step)

    engine = engine_in(mode)
    engine.model.ops = FailingBatches()  # type: ignore[misc]
    for request in neighbours(mode):
        submit(engine, request)
    ends = [e for e in run_all(engine) if isinstance(e, FinishEvent)]
    assert {e.request_id: outcome(e) for e in ends} == undisturbed(mode)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_a_failure_forgets_only_what_the_request_has_computed(is_hybrid: bool) -> None:
    """A prefix that others have computed stays in the cache, the pages behind it do not."""
    engine = engine_for(RULE, cache_tokens=4096, prefill_chunk=256, is_hybrid=is_hybrid)
    prefix = [i % 90 for i in range(520)]
    plain: dict[str, Any] = {"stop_ids": frozenset(), "max_tokens": 2}
    run_one(engine, ask(prefix, **plain))

    def hook(_: SampledToken) -> None:
        raise ValueError("scripted")

    longer = [*prefix, *(i % 80 for i in range(300))]
    run_to_failure(engine, ask(longer, hooks=(hook,), **plain))
    _, end = run_one(engine, ask(longer, **plain))
    assert end.cached_pages == 2
    _, again = run_one(engine, ask(longer, **plain))
    assert again.cached_pages == 3
    assert again.token_ids == end.token_ids


def test_cancel_removes_a_request_whose_state_fails() -> None:
    engine = engine_in("plain")
    engine.submit(victim("plain"))
    engine.step()
    fault = Fault(("_matcher", "held"), 1, RuntimeError("scripted"))
    break_request(engine, "victim", fault)
    assert engine.cancel("victim")
    (end,) = run_all(engine)
    assert isinstance(end, FailEvent)
    assert engine.is_idle


def test_a_draft_model_that_fails_for_one_request_drafts_nothing_for_it() -> None:
    from exl_core.speculate.draft_model import ModelDrafter

    small = ScriptedModel(RULE, ops=FaultyTable(Fault(("op", "sample"), 1, ValueError("scripted"))))
    drafter = ModelDrafter(small, num_pages=64, vocab_size=258, min_probability=0.0)
    engine = Engine(ScriptedModel(RULE), ByteTokenizer(), EngineOptions(64 * 256), drafter=drafter)
    engine.submit(victim("plain"))
    for request in neighbours("plain")[:4]:
        submit(engine, request)
    ends = {e.request_id: e for e in run_all(engine)}
    assert isinstance(ends["victim"], FinishEvent)


def bad_rows(history: Sequence[int]) -> Tensor:
    return RULE(history) * (torch.nan if history[0] == ord("V") else 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_nan_logits_of_one_request_do_not_disturb_others(mode: str) -> None:
    engine = engine_in(mode)
    assert isinstance(engine.model, ScriptedModel)
    engine.model.rule = bad_rows
    for request in (victim("plain"), *neighbours(mode)):
        submit(engine, request)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent | FailEvent)}
    failure = ends.pop("victim")
    assert isinstance(failure, FailEvent) and isinstance(failure.error, LogitsError)
    assert {n: outcome(e) for n, e in ends.items() if isinstance(e, FinishEvent)} == (
        undisturbed(mode)
    )
