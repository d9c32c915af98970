"""Who runs next: decided without tensors, so tested with small pages."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exl_core.cache.page_pool import PagePool
from exl_core.engine.plan import BatchPlan
from exl_core.engine.request import Request
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import Sequence
from exl_core.errors import RequestError
from exl_core.model.segment import LogitRows

PAGE = 4


def scheduler(pages: int, *, max_batch: int = 8, prefill_chunk: int = 8) -> Scheduler:
    pool = PagePool(pages)
    return Scheduler(pool, max_batch=max_batch, prefill_chunk=prefill_chunk, page_size=PAGE)


def sequence(prompt: list[int], more: int = 4) -> Sequence:
    return Sequence(Request(tuple(prompt)), len(prompt) + more, list(prompt))


def shape(plan: BatchPlan) -> list[tuple[str, int, int, LogitRows]]:
    return [
        (sequence.request_id, s.past_len, len(s.token_ids), s.logit_rows)
        for sequence, s in zip(plan.sequences, plan.segments, strict=True)
    ]


def test_a_long_prompt_goes_in_chunks_beside_decoding() -> None:
    s = scheduler(20, prefill_chunk=8)
    first, second = sequence([1, 2, 3]), sequence(list(range(10, 30)))
    s.add(first)
    s.add(second)
    a, b = first.request_id, second.request_id
    plan = s.plan()
    assert shape(plan) == [(a, 0, 3, LogitRows.LAST), (b, 0, 5, LogitRows.NONE)]
    s.advance(plan)
    first.token_ids.append(4)
    plan = s.plan()
    assert shape(plan) == [(a, 3, 1, LogitRows.LAST), (b, 5, 8, LogitRows.NONE)]
    assert plan.num_rows == 9
    s.advance(plan)
    first.token_ids.append(5)
    plan = s.plan()
    assert shape(plan)[1] == (b, 13, 7, LogitRows.LAST)
    assert plan.segments[1].token_ids == tuple(range(23, 30))


def test_sequences_start_in_order_and_none_overtakes() -> None:
    s = scheduler(4)
    for prompt in ([1] * 4, [2] * 12, [3] * 2):
        s.add(sequence(prompt))
    s.plan()
    assert len(s.running) == 1, "the second does not fit, and the small third waits behind it"
    s.remove(s.running[0])
    s.plan()
    assert [r.token_ids[0] for r in s.running] == [2]


def test_no_more_than_max_batch_run() -> None:
    s = scheduler(20, max_batch=2)
    for i in range(3):
        s.add(sequence([i]))
    assert len(s.plan().segments) == 2


def test_the_youngest_gives_way_and_comes_back_with_what_it_has() -> None:
    s = scheduler(4)
    old, young = sequence([1] * 7, more=9), sequence([2] * 3, more=9)
    s.add(old)
    s.add(young)
    for _ in range(2):
        plan = s.plan()
        s.advance(plan)
        for r in s.running:
            r.token_ids.append(9)
    # old: 9 tokens, 3 pages; young: 5 tokens, 2 pages; one page too few
    plan = s.plan()
    assert [r.request_id for r in s.running] == [old.request_id]
    assert list(s.waiting) == [young]
    assert (young.past_len, young.page_ids, young.token_ids[-2:]) == (0, [], [9, 9])
    assert s.num_requeued == 1
    s.remove(old)
    plan = s.plan()
    assert shape(plan) == [(young.request_id, 4, 1, LogitRows.LAST)], "its full page was kept"


def test_a_known_prefix_is_not_computed_again_but_for_its_last_token() -> None:
    s = scheduler(10, prefill_chunk=64)
    first, same = sequence(list(range(8))), sequence(list(range(8)))
    longer = sequence(list(range(11)))
    s.add(first)
    s.advance(s.plan())
    first.token_ids.append(77)
    s.add(same)
    s.add(longer)
    plan = s.plan()
    assert [segment.past_len for segment in plan.segments] == [8, 4, 8]
    assert (same.cached_tokens, longer.cached_tokens) == (4, 8)
    assert longer.page_ids[:2] == first.page_ids[:2], "pages are shared while they are held"
    s.advance(plan)
    assert same.page_ids == first.page_ids[:2], "and again once their contents turn out equal"


def test_pages_that_are_not_full_are_not_shared() -> None:
    s = scheduler(10)
    s.add(sequence([1, 2, 3]))
    s.advance(s.plan())
    other = sequence([1, 2, 3])
    s.add(other)
    s.plan()
    assert other.cached_tokens == 0


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    s = scheduler(3)
    s.check_fits("r", 13)  # the last token is never cached
    with pytest.raises(RequestError) as caught:
        s.check_fits("r", 14)
    assert "14 tokens" in str(caught.value)
    assert "at most 13 tokens (3 pages)" in str(caught.value)


def test_a_failed_pass_frees_everything_and_keeps_those_that_wait() -> None:
    s = scheduler(4)
    for prompt in ([1] * 8, [2] * 9):
        s.add(sequence(prompt))
    s.plan()
    (failed,) = s.fail_running()
    assert failed.token_ids == [1] * 8
    assert s.pool.free_pages == set(range(4))
    assert [x.token_ids[0] for x in s.waiting] == [2]
    assert len(s.plan().segments) == 1


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert scheduler(1).plan().segments == ()


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, passes, cancellations and failures in any order. Tokens come from two letters, so
    that prefixes are shared all the time."""

    @initialize(
        pages=st.integers(2, 8), max_batch=st.integers(1, 4), prefill_chunk=st.integers(1, 9)
    )
    def start(self, pages: int, max_batch: int, prefill_chunk: int) -> None:
        self.s = scheduler(pages, max_batch=max_batch, prefill_chunk=prefill_chunk)
        self.live: list[Sequence] = []
        self.arrivals: dict[str, int] = {}

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), more=st.integers(1, 12))
    def arrive(self, prompt: list[int], more: int) -> None:
        new = sequence(prompt, more)
        try:
            self.s.check_fits(new.request_id, new.max_len)
        except RequestError:
            assert new.max_len - 1 > self.s.capacity
            return
        self.arrivals[new.request_id] = len(self.arrivals)
        self.live.append(new)
        self.s.add(new)

    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        plan = self.s.plan()
        assert bool(plan.segments) == bool(self.live), "never idle while there is work"
        self.check_plan(plan)
        self.s.advance(plan)
        for runner, segment in zip(plan.sequences, plan.segments, strict=True):
            if segment.logit_rows is LogitRows.LAST:
                runner.token_ids.append(token)
                if len(runner.token_ids) == runner.max_len:
                    self.s.remove(runner)
                    self.live.remove(runner)

    def check_plan(self, plan: BatchPlan) -> None:
        written = Counter[int]()
        prefill_rows = 0
        for runner, segment in zip(plan.sequences, plan.segments, strict=True):
            end = segment.past_len + len(segment.token_ids)
            assert segment.past_len == runner.past_len
            assert list(segment.token_ids) == runner.token_ids[segment.past_len : end]
            assert len(segment.page_ids) == -(-end // PAGE)
            is_end = end == len(runner.token_ids)
            assert (segment.logit_rows is LogitRows.LAST) == is_end
            if runner.num_missing > 1:
                prefill_rows += len(segment.token_ids)
            for position in range(segment.past_len, end):
                page = segment.page_ids[position // PAGE]
                written[page * PAGE + position % PAGE] += 1
                assert self.s.pool.held_pages[page] == 1, "nobody writes into a shared page"
                assert self.s.pool.key_of(page) is None, "nor into one that others may find"
        assert all(count == 1 for count in written.values())
        assert prefill_rows <= self.s.prefill_chunk
        oldest = min(self.arrivals[r.request_id] for r in self.live) if self.live else None
        if oldest is not None:
            assert oldest in {self.arrivals[x.request_id] for x in plan.sequences}

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_trusted=st.booleans())
    def cancel(self, data: st.DataObject, is_trusted: bool) -> None:
        gone = data.draw(st.sampled_from(self.live))
        self.s.remove(gone, is_trusted=is_trusted)
        self.live.remove(gone)

    @rule()
    def fail(self) -> None:
        self.s.plan()
        for gone in self.s.fail_running():
            self.live.remove(gone)

    @invariant()
    def pages_are_held_by_those_that_run_and_once_each(self) -> None:
        pool = self.s.pool
        counts = Counter(page for r in self.s.running for page in r.page_ids)
        assert dict(pool.held_pages) == dict(counts)
        everywhere = [*pool.free_pages, *pool.cached_pages, *pool.held_pages]
        assert sorted(everywhere) == list(range(pool.num_pages))
        assert not any(r.page_ids or r.past_len for r in self.s.waiting)

    @invariant()
    def order_is_kept(self) -> None:
        queue = [*self.s.running, *self.s.waiting]
        places = [self.arrivals[r.request_id] for r in queue]
        assert places == sorted(places)
        assert len(self.s.running) <= self.s.max_batch
        assert {r.request_id for r in queue} == {r.request_id for r in self.live}

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.step(0)
        assert not self.live, "everything ends"
        assert self.s.pool.num_available == self.s.pool.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
