"""Scheduler decisions, tested without tensors and with small pages."""

from __future__ import annotations

import pytest

from exl_core.cache.page_pool import PageCopy
from exl_core.engine.scheduler import WORTH_WAITING
from exl_core.errors import RequestError
from exl_core.model.segment import LogitRows
from support.scheduling import finish, run, scheduler, sequence, shape, use


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    s = scheduler(20, prefill_chunk=8)
    first, second = sequence(s, [1, 2, 3]), sequence(s, range(10, 30))
    s.add(first)
    s.add(second)
    a, b = first.request_id, second.request_id
    plan = s.plan()
    assert shape(plan) == [(a, 0, 3, LogitRows.LAST), (b, 0, 5, LogitRows.NONE)]
    finish(s, plan)
    plan = s.plan()
    assert shape(plan) == [(a, 3, 1, LogitRows.LAST), (b, 5, 8, LogitRows.NONE)]
    assert plan.num_rows == 9
    finish(s, plan)
    plan = s.plan()
    assert shape(plan)[1] == (b, 13, 7, LogitRows.LAST)
    assert plan.segments[1].token_ids == tuple(range(23, 30))


def test_sequences_start_in_order_and_none_overtakes() -> None:
    s = scheduler(4)
    for prompt in ([1] * 4, [2] * 12, [3] * 2):
        s.add(sequence(s, prompt))
    s.plan()
    assert len(s.running) == 1, "the second does not fit, and the third does not overtake it"
    s.remove(s.running[0])
    s.plan()
    assert [r.token_ids[0] for r in s.running] == [2]


def test_at_most_max_batch_sequences_run() -> None:
    s = scheduler(20, max_batch=2)
    for i in range(3):
        s.add(sequence(s, [i]))
    assert len(s.plan().segments) == 2


def test_the_youngest_is_preempted_and_resumes_with_its_tokens() -> None:
    s = scheduler(4, prefill_chunk=16)
    old, young = sequence(s, [1] * 7, more=9), sequence(s, [2] * 3, more=9)
    s.add(old)
    s.add(young)
    run(s, 2)
    # old: 9 tokens, 3 pages; young: 5 tokens, 2 pages; one page too few
    plan = s.plan()
    assert [r.request_id for r in s.running] == [old.request_id]
    assert list(s.waiting) == [young]
    assert (young.past_len, young.page_ids, young.token_ids[-2:]) == (0, [], [9, 9])
    assert s.num_requeued == 1
    finish(s, plan)
    s.remove(old)
    plan = s.plan()
    assert shape(plan) == [(young.request_id, 4, 1, LogitRows.LAST)], "its full page was kept"


def test_only_the_last_token_of_a_cached_prompt_is_computed() -> None:
    s = scheduler(10, prefill_chunk=64)
    first, same, longer = sequence(s, range(8)), sequence(s, range(8)), sequence(s, range(11))
    s.add(first)
    finish(s, s.plan(), token=77)
    s.add(same)
    s.add(longer)
    plan = s.plan()
    assert [segment.past_len for segment in plan.segments] == [8, 7, 8]
    assert (same.cached_tokens, longer.cached_tokens) == (7, 8)
    assert (same.cached_pages, longer.cached_pages) == (1, 2)
    assert longer.page_ids[:2] == first.page_ids[:2], "pages are shared while they are held"
    finish(s, plan)
    assert same.page_ids[:2] == first.page_ids[:2], "and again when their contents are found equal"


def test_a_sequence_waits_for_a_prefix_that_is_being_computed() -> None:
    s = scheduler(400, prefill_chunk=80)
    prompts = [range(200), range(200), [*range(150), *range(500, 540)], range(300, 500)]
    first, same, alike, other = (sequence(s, prompt) for prompt in prompts)
    for one in (first, same, alike, other):
        s.add(one)
    rows = 0
    while any(one.num_missing > 1 for one in (first, same, alike, other)):
        plan = s.plan()
        assert same not in plan.sequences or first.num_missing <= WORTH_WAITING
        rows += plan.num_rows
        finish(s, plan)
    decoded = sum(len(one.token_ids) for one in (first, same, alike, other)) - 200 * 3 - 190 - 4
    assert rows <= 200 + WORTH_WAITING + 190 - 80 + WORTH_WAITING + 200 + decoded
    assert same.cached_tokens is not None and same.cached_tokens >= 200 - WORTH_WAITING


def test_a_sequence_does_not_wait_for_a_short_prefix() -> None:
    s = scheduler(400, prefill_chunk=300)
    first, second = (
        sequence(s, [*range(60), *range(100, 200)]),
        sequence(s, [*range(60), *range(300, 400)]),
    )
    s.add(first)
    s.add(second)
    assert s.plan().sequences == (first, second)


def test_a_waiting_sequence_starts_if_the_computing_one_is_removed() -> None:
    s = scheduler(400, prefill_chunk=80)
    first, same = sequence(s, range(200)), sequence(s, range(200))
    s.add(first)
    s.add(same)
    finish(s, s.plan())
    assert list(s.waiting) == [same]
    s.remove(first)
    assert shape(s.plan()) == [(same.request_id, 80, 80, LogitRows.NONE)]


def test_lengths_that_never_fit_are_refused_with_numbers() -> None:
    s = scheduler(3)
    s.check_fits("r", 13)  # the last token is never cached
    with pytest.raises(RequestError) as caught:
        s.check_fits("r", 14)
    assert "14 tokens" in str(caught.value)
    assert "at most 13 tokens (3 pages)" in str(caught.value)
    s.check_fits("r", 9, negative_tokens=5)
    with pytest.raises(RequestError, match="15 tokens") as caught:
        s.check_fits("r", 9, negative_tokens=6)
    assert "15 (4 pages)" in str(caught.value)
    with pytest.raises(RequestError, match="max_batch"):
        scheduler(3, max_batch=1).check_fits("r", 2, negative_tokens=2)


def test_a_failed_pass_frees_all_pages_and_keeps_waiting_sequences() -> None:
    s = scheduler(4)
    for prompt in ([1] * 8, [2] * 9):
        s.add(sequence(s, prompt))
    s.plan()
    (failed,) = s.fail_running()
    assert failed.token_ids == [1] * 8
    assert s.pool.free_pages == set(range(4))
    assert [x.token_ids[0] for x in s.waiting] == [2]
    assert len(s.plan().segments) == 1


def test_without_sequences_the_plan_is_empty() -> None:
    assert scheduler(1).plan().segments == ()


def test_pages_of_other_adapters_are_not_reused() -> None:
    s = scheduler(20)
    one, half, two = (use(1),), (use(1, 0.5),), (use(1), use(2))
    for adapters in ((), one, half, two):
        cold = sequence(s, range(8), adapters=adapters)
        s.add(cold)
        plan = s.plan()
        assert (cold.cached_tokens, plan.segments[0].adapters) == (0, adapters)
        finish(s, plan)
        s.remove(cold)
        warm = sequence(s, range(8), adapters=adapters)
        s.add(warm)
        run(s)
        assert warm.cached_tokens == 7
        s.remove(warm)


def test_an_incomplete_page_is_copied_for_the_next_turn() -> None:
    s = scheduler(10, prefill_chunk=64)
    first = sequence(s, [1, 2, 3, 4, 5], more=3)
    s.add(first)
    run(s, 3)
    assert first.token_ids == [1, 2, 3, 4, 5, 9, 9, 9]
    source = first.page_ids[1]
    s.remove(first)
    second = sequence(s, [1, 2, 3, 4, 5, 9, 9, 9, 7, 7])
    s.add(second)
    plan = s.plan()
    assert plan.copies == (PageCopy(source, second.page_ids[1], 3),), "the last was not computed"
    assert plan.segments[0].past_len == second.cached_tokens == 7
    assert second.cached_pages == 1
    finish(s, plan)
    assert s.plan().copies == ()
    assert source in s.pool.free_pages, "what is in the longer page is not kept twice"


def test_the_longest_common_continuation_is_copied() -> None:
    s = scheduler(20)
    for tail in ([5, 5, 5, 5, 1], [5, 6, 7, 7, 1], [5, 6, 6, 6, 1]):
        s.add(sequence(s, [1, 2, 3, 4, *tail]))
        run(s)
        s.remove(s.running[0])
    new = sequence(s, [1, 2, 3, 4, 5, 6, 7, 8])
    s.add(new)
    plan = s.plan()
    assert new.past_len == 7
    (copy,) = plan.copies
    known = s.pool.contents_of(copy.source)
    assert known is not None
    assert known.token_ids == (5, 6, 7, 7)
    finish(s, plan)
    short = sequence(s, [1, 2, 3, 4, 5, 8, 8])
    s.add(short)
    assert s.plan().copies == (), "one position is not worth a copy"
    assert short.past_len == 4


def test_the_last_page_of_a_running_sequence_can_be_copied_from() -> None:
    s = scheduler(10)
    first, second = sequence(s, [1, 2, 3]), sequence(s, [1, 2, 5])
    s.add(first)
    run(s)
    s.add(second)
    plan = s.plan()
    assert plan.copies == (PageCopy(first.page_ids[0], second.page_ids[0], 2),)
    assert shape(plan)[1] == (second.request_id, 2, 1, LogitRows.LAST)


def test_copies_wait_for_a_pass() -> None:
    s = scheduler(10)
    s.add(sequence(s, [1, 2, 3]))
    run(s)
    second = sequence(s, [1, 2, 5])
    s.add(second)
    copies = s.plan().copies  # this plan never runs
    assert len(copies) == 1
    s.remove(second)
    s.add(sequence(s, [1, 2, 6]))
    assert s.plan().copies[0] == copies[0], "the page of the second sequence may be the next source"


def test_a_launched_pass_takes_no_page_while_copies_wait() -> None:
    """The pass would write the page before the copy does."""
    s = scheduler(10)
    first, second = sequence(s, [1, 2, 3], more=9), sequence(s, [1, 2, 5])
    s.add(first)
    run(s)
    plan = s.plan()
    segments = s.next_segments(plan)
    assert segments is not None
    (segment,) = segments
    assert (segment.past_len, len(segment.page_ids)) == (4, 2)
    finish(s, plan)
    run(s, 3)
    plan = s.plan()
    s.add(second)
    s.prepare()
    s.remove(second)  # its copy was listed, and its page is free again
    assert len(s.pending_copies) == 1
    assert s.next_segments(plan) is None
    finish(s, plan)
    plan = s.plan()
    assert len(plan.copies) == 1, "now it runs"
    assert s.next_segments(plan) is not None


def test_copies_are_in_order() -> None:
    s = scheduler(3)
    for token in (1, 2, 3):
        s.add(sequence(s, [token] * 3))
        run(s)
        s.remove(s.running[0])
    x, y = sequence(s, [1, 1, 9]), sequence(s, [3, 3, 9])
    s.add(x)
    s.prepare()
    s.add(y)
    first, second = s.plan().copies
    assert (first.target, second.target) == (x.page_ids[0], y.page_ids[0])
    assert first.source == second.target, "the first copy reads the page that the second one writes"


def test_the_target_of_a_dropped_copy_is_forgotten() -> None:
    s = scheduler(4)
    a, x = sequence(s, [1, 2, 3]), sequence(s, [1, 2, 9])
    s.add(a)
    run(s)
    s.add(x)
    s.prepare()
    s.remove(a, is_trusted=False)
    s.remove(x)
    assert (len(s.pending_copies), s.pool.describe().count("0")) == (1, 1)
    s.defragment(is_forced=True)
    assert (len(s.pending_copies), s.pool.describe()) == (0, "....")


def test_cached_pages_are_defragmented_when_idle() -> None:
    s = scheduler(8)
    a, b = sequence(s, [1] * 3, more=30), sequence(s, [2] * 3, more=30)
    s.add(a)
    s.add(b)
    run(s, 12)  # the two sequences allocate pages alternately
    assert a.state.num_jumps > 0
    assert s.defragment() == [], "not while they run"
    tokens = list(a.token_ids)
    s.remove(b)
    s.remove(a)
    assert s.defragment(), "all eight pages were allocated once"
    assert s.defragment() == [], "and not again, now"
    again = sequence(s, [*tokens, 5])
    s.add(again)
    plan = s.plan()
    assert again.page_ids[:3] == list(range(again.page_ids[0], again.page_ids[0] + 3))
    assert plan.copies[0].source == again.page_ids[0] + 3, "the incomplete page is moved too"
    assert again.cached_tokens == len(tokens) - 1
