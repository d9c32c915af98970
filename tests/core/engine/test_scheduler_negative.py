"""Guided pairs, drafts and rewinding in the scheduler."""

from __future__ import annotations

import pytest

from exl_core.cache.page_pool import PageCopy
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import RequestSequence
from exl_core.model.segment import LogitRows
from support.scheduling import finish, run, scheduler, sequence, shape


def add_pair(
    s: Scheduler, prompt: list[int], negative: list[int], more: int = 8
) -> tuple[RequestSequence, RequestSequence]:
    one = sequence(s, prompt, more)
    two = s.new_sequence(one.request, negative, len(negative) + more)
    s.add(one, two)
    return one, two


@pytest.mark.parametrize("prefill_chunk", range(1, 10))
@pytest.mark.parametrize(("num", "num_negative"), [(5, 2), (2, 5), (1, 1), (1, 4), (4, 1)])
def test_rows_with_logits_of_a_pair_are_in_one_pass(
    prefill_chunk: int, num: int, num_negative: int
) -> None:
    s = scheduler(10, prefill_chunk=prefill_chunk)
    one, two = add_pair(s, [1] * num, [2] * num_negative)
    for _ in range(10):
        plan = s.plan()
        rows = [segment.logit_rows for segment in plan.segments]
        if LogitRows.LAST in rows:
            assert rows == [LogitRows.LAST, LogitRows.LAST]
            assert plan.sequences == (one, two)
        finish(s, plan)
    assert len(one.token_ids) - num == len(two.token_ids) - num_negative
    assert len(one.token_ids) > num


def test_a_pair_counts_as_two_and_starts_as_one() -> None:
    s = scheduler(20, max_batch=3)
    s.add(sequence(s, [1]))
    one, _ = add_pair(s, [2], [3])
    other, _ = add_pair(s, [4], [5])
    s.add(sequence(s, [6]))
    assert len(s.plan().segments) == 3
    assert next(iter(s.waiting)) is other, "and no sequence overtakes it"
    s.remove(one)
    assert [x.token_ids[0] for x in s.plan().sequences] == [1, 4, 5]


def test_a_pair_is_preempted_and_removed_as_one() -> None:
    s = scheduler(5, prefill_chunk=16)
    old = sequence(s, [1] * 7, more=9)
    s.add(old)
    one, two = add_pair(s, [2] * 3, [3] * 2)
    run(s, 2)
    finish(s, s.plan())
    assert list(s.waiting) == [one]
    assert (one.page_ids, two.page_ids, one.past_len, two.past_len) == ([], [], 0, 0)
    s.remove(old)
    assert s.plan().sequences == (one, two)
    s.remove(one)
    assert not s.pool.held_pages


def test_a_draft_follows_the_newest_token_and_rejected_tokens_are_dropped() -> None:
    s = scheduler(10)
    a = sequence(s, [1, 2, 3], more=20)
    s.add(a)
    assert s.drafting() == [], "its prompt is not computed yet"
    run(s)
    assert s.drafting() == [a]
    assert s.reserve(a, 6) == 6
    assert len(a.page_ids) == 3
    plan = s.plan({a.request_id: (5, 6, 7, 8, 8, 8)})
    assert shape(plan) == [(a.request_id, 3, 7, LogitRows.ALL)]
    assert plan.segments[0].token_ids == (9, 5, 6, 7, 8, 8, 8)
    a.token_ids.extend([5, 6, 4])  # two accepted, then another token
    s.advance(plan)
    assert a.past_len == 6
    assert len(a.page_ids) == 2, "pages that the draft did not fill are released"
    run(s, 2)
    s.remove(a)
    warm = sequence(s, [1, 2, 3, 9, 5, 6, 4, 9, 1], more=1)
    s.add(warm)
    s.plan()
    assert warm.cached_tokens == 8, "the page after the draft is cached like any other"


def test_a_draft_never_exceeds_max_len() -> None:
    s = scheduler(10)
    a = sequence(s, [1, 2, 3], more=4)
    s.add(a)
    run(s)
    assert s.reserve(a, 6) == 2, "room for two drafted tokens and the one that follows"
    plan = s.plan({a.request_id: (5, 5, 5, 5)})
    assert len(plan.segments[0].token_ids) == 3
    finish(s, plan)
    run(s)
    assert s.reserve(a, 6) == 0
    assert s.plan({a.request_id: (5,)}).segments[0].logit_rows is LogitRows.LAST


def test_a_draft_takes_no_page_that_another_sequence_needs() -> None:
    s = scheduler(4)
    a, b = sequence(s, [1, 1], more=9), sequence(s, [2] * 3, more=9)
    s.add(a)
    s.add(b)
    run(s)
    assert (len(a.token_ids), len(b.token_ids)) == (3, 4)
    assert s.reserve(a, 8) == 5, "the last page is for the fifth token of the other sequence"
    assert len(a.page_ids) == 2
    assert s.reserve(b, 8) == 4
    finish(s, s.plan())
    assert s.num_requeued == 0


def test_rewinding_within_a_page() -> None:
    s = scheduler(10)
    a = sequence(s, [1, 2], more=20)
    s.add(a)
    run(s, 6)
    pages = list(a.page_ids)
    s.rewind(a, 6)
    assert (a.token_ids, a.past_len, a.page_ids) == ([1, 2, 9, 9, 9, 9], 5, pages)
    plan = s.plan()
    assert shape(plan) == [(a.request_id, 5, 1, LogitRows.LAST)], "computed again for its logits"
    assert plan.copies == ()


def test_rewinding_over_a_page_border_forgets_the_cut_contents() -> None:
    s = scheduler(10)
    a = sequence(s, [1, 2], more=20)
    s.add(a)
    run(s, 10)
    first = a.page_ids[0]
    s.rewind(a, 3)
    assert (a.past_len, a.page_ids) == (2, [first])
    assert s.pool.contents_of(first) is None, "it will be overwritten"
    run(s, 3, token=5)
    assert a.token_ids == [1, 2, 9, 5, 5, 5]
    s.remove(a)
    same = sequence(s, [1, 2, 9, 5, 5, 5, 0], more=1)
    s.add(same)
    s.plan()
    assert same.cached_tokens == 4


def test_rewinding_into_a_shared_page_continues_in_a_copy() -> None:
    s = scheduler(10)
    a = sequence(s, [1, 2], more=20)
    s.add(a)
    run(s, 5)
    b = sequence(s, a.token_ids[:6])
    s.add(b)
    finish(s, s.plan())
    shared = a.page_ids[0]
    assert b.page_ids[0] == shared
    s.rewind(a, 4)
    plan = s.plan()
    assert plan.copies == (PageCopy(shared, a.page_ids[0], 3),)
    assert a.page_ids[0] != shared
    assert shape(plan)[0] == (a.request_id, 3, 1, LogitRows.LAST)
    assert dict(s.pool.held_pages)[shared] == 1


def test_rewinding_to_the_start_of_a_shared_page_copies_nothing() -> None:
    s = scheduler(10)
    a, b = sequence(s, [1, 2], more=20), sequence(s, [1, 2], more=20)
    s.add(a)
    s.add(b)
    run(s, 7)
    assert a.page_ids == b.page_ids
    s.rewind(a, 5)
    plan = s.plan()
    assert plan.copies == ()
    assert shape(plan)[0] == (a.request_id, 4, 1, LogitRows.LAST)
    assert a.page_ids[0] == b.page_ids[0]
    assert a.page_ids[1] != b.page_ids[1]


def test_rewinding_into_a_shared_page_without_a_free_page() -> None:
    s = scheduler(4)
    a, b = sequence(s, [1, 2], more=9), sequence(s, [1, 2], more=9)
    s.add(a)
    s.add(b)
    run(s, 3)
    assert a.page_ids == b.page_ids, "both replies are equal so far"
    others = s.pool.allocate(s.pool.num_available) or []
    s.rewind(b, 4)
    assert (b.past_len, b.page_ids) == (0, []), "recomputed from the start of the page"
    s.pool.release(others)
    assert shape(s.plan())[1] == (b.request_id, 0, 4, LogitRows.LAST)


def test_a_negative_sequence_is_rewound_by_as_many_tokens() -> None:
    s = scheduler(10, prefill_chunk=64)
    one, two = add_pair(s, [1] * 3, [2] * 7)
    run(s, 4)
    s.rewind(one, 5)
    assert (len(one.token_ids), len(two.token_ids)) == (5, 9)
    assert (one.past_len, two.past_len) == (4, 8)
    assert s.plan().sequences == (one, two)
    with pytest.raises(AssertionError, match="no rewinding"):
        s.rewind(one, 6)
