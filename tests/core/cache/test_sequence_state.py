"""The operations on the memory of one sequence: share, extend, rewind, release."""

from __future__ import annotations

from collections.abc import Iterable

from exl_core.cache.page_pool import PageCopy, PagePool
from exl_core.cache.sequence_state import CacheMemory, Prefix, SequenceState
from exl_core.cache.state import StatePool

PAGE = 4


def memory(pages: int = 8) -> CacheMemory:
    return CacheMemory(PagePool(pages), PAGE)


def started(cache: CacheMemory, token_ids: Iterable[int]) -> SequenceState:
    """A sequence with memory for all its tokens, on the known prefix."""
    state = SequenceState(cache, list(token_ids))
    found = state.known_prefix(len(state.token_ids) - 1)
    state.share(found, len(state.token_ids) - 1)
    assert state.extend(state.num_wanted())
    return state


def computed(cache: CacheMemory, token_ids: Iterable[int]) -> SequenceState:
    """A started sequence after its prompt's pass, which sampled token 9."""
    state = started(cache, token_ids)
    count = len(state.token_ids) - state.past_len
    state.token_ids.append(9)
    state.advance(count, is_prompt=True)
    return state


def test_extend_gets_all_pages_or_none() -> None:
    cache = memory(pages=2)
    state = SequenceState(cache, [1] * 5)
    assert (state.num_wanted(), state.num_wanted(more=4)) == (2, 3)

    assert not state.extend(3)
    assert (state.page_ids, cache.pool.num_available) == ([], 2)
    assert state.extend(2)
    assert (len(state.page_ids), state.capacity, state.past_len) == (2, 3, 0)


def test_share_holds_full_pages_and_copies_a_part_of_the_next_one() -> None:
    cache = memory()
    first = computed(cache, range(7))
    assert (first.past_len, cache.copies) == (7, [])

    second = started(cache, [0, 1, 2, 3, 4, 5, 8, 8])
    assert second.page_ids[0] == first.page_ids[0]
    assert second.page_ids[1] != first.page_ids[1]
    assert cache.pool.held_pages[first.page_ids[0]] == 2
    assert cache.copies == [PageCopy(first.page_ids[1], second.page_ids[1], 2)]
    assert second.past_len == 6


def test_share_finds_nothing_under_another_root() -> None:
    cache = memory()
    computed(cache, range(7))
    other = SequenceState(cache, list(range(7)), key_root=b"adapter")
    assert other.known_prefix(6) == Prefix()


def test_extend_copies_only_after_share() -> None:
    cache = memory()
    computed(cache, range(7))
    state = started(cache, range(5))
    cache.copies.clear()
    state.token_ids.append(5)
    state.rewind(2)
    assert state.extend(1)
    assert (state.past_len, len(state.page_ids)) == (1, 2)
    assert cache.copies == [PageCopy(0, state.page_ids[0], 1)], "of the shared page, by rewind"


def test_rewind_drops_tokens_and_the_pages_behind_them() -> None:
    cache = memory()
    state = computed(cache, range(10))
    kept = state.page_ids[:2]
    state.rewind(6)
    assert (state.token_ids, state.past_len, state.page_ids) == (list(range(6)), 5, kept)
    assert cache.pool.contents_of(kept[1]) is None, "it will be written again"


def test_rewind_into_a_shared_page_goes_back_to_its_start_if_no_page_is_free() -> None:
    cache = memory(pages=2)
    first, second = computed(cache, range(5)), SequenceState(cache, list(range(4)))
    second.share(Prefix((first.page_ids[0],)), 4)
    first.rewind(3)
    assert (first.past_len, len(first.page_ids)) == (2, 1), "its second page became free"

    third = SequenceState(cache, list(range(4)))
    third.share(Prefix(tuple(second.page_ids)), 4)
    third.token_ids.append(9)
    second.rewind(3)
    assert (second.past_len, second.page_ids) == (0, [])


def test_released_contents_are_found_again_only_if_they_are_trusted() -> None:
    for is_trusted in (True, False):
        cache = memory()
        state = computed(cache, range(7))
        state.release(is_trusted=is_trusted)
        assert (state.page_ids, state.past_len) == ([], 0)
        assert cache.pool.num_available == cache.pool.num_pages
        assert len(started(cache, range(7)).known_prefix(6).page_ids) == (1 if is_trusted else 0)


def test_a_release_without_trust_forgets_only_what_the_sequence_wrote() -> None:
    """Shared pages of the prefix stay known, and a page that took the place of an equal one."""
    cache = memory(pages=12)
    first = computed(cache, range(10))
    second = computed(cache, [*range(8), *range(20, 26)])
    assert second.page_ids[:2] == first.page_ids[:2]
    own = second.page_ids[2:]
    second.release(is_trusted=False)
    assert [cache.pool.contents_of(page) for page in own] == [None] * 2
    assert len(started(cache, range(10)).known_prefix(9).page_ids) == 2

    equal = SequenceState(cache, list(range(10)))
    assert equal.extend(3)
    written = equal.page_ids[:2]
    equal.token_ids.append(9)
    equal.advance(10, is_prompt=True)
    assert equal.page_ids[:2] == first.page_ids[:2] != written
    equal.release(is_trusted=False)
    assert len(started(cache, range(10)).known_prefix(9).page_ids) == 2
    assert len(first.known_prefix(9).page_ids) == 2


def test_a_shared_page_that_was_written_again_is_not_trusted() -> None:
    cache = memory()
    computed(cache, range(5)).release()
    state = started(cache, range(8))
    page = state.page_ids[0]
    state.rewind(3)
    state.token_ids += [3, 5]
    state.advance(3, is_prompt=True)
    assert state.page_ids[0] == page
    assert cache.pool.contents_of(page) is not None
    state.release(is_trusted=False)
    assert cache.pool.contents_of(page) is None


def test_a_release_without_trust_drops_the_snapshots_that_the_sequence_took() -> None:
    """Its pages took the place of equal ones of another sequence, whose snapshots are gone."""
    states = StatePool(num_slots=6, num_sequences=2)
    cache = CacheMemory(PagePool(12), PAGE, states)
    first = started(cache, range(10))
    first.advance(8, is_prompt=True)
    ((key, _),) = states.snapshots.items()
    states.drop_after(key.pages)

    second = started(cache, range(10))
    assert second.past_len == 0, "there was no snapshot"
    second.advance(8, is_prompt=True)
    assert second.page_ids[:2] == first.page_ids[:2]
    assert list(states.snapshots) == [key]
    second.release(is_trusted=False)
    assert not states.snapshots
    assert cache.pool.contents_of(first.page_ids[0]) is not None

    third = started(cache, range(10))
    third.advance(8, is_prompt=True)
    fourth = started(cache, range(10))
    assert fourth.past_len == 8
    fourth.release(is_trusted=False)
    assert list(states.snapshots) == [key], "of another sequence"


def test_a_reset_cache_has_all_pages_and_forgotten_sequences_have_none() -> None:
    cache = memory()
    states = [computed(cache, range(7)), started(cache, range(8))]
    assert cache.copies
    cache.reset()
    for state in states:
        state.forget()
    assert (cache.copies, len(cache.pool.free_pages)) == ([], cache.pool.num_pages)
    assert not any(state.page_ids or state.past_len for state in states)
