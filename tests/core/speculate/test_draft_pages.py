"""`DraftPages`: recorded contents of pages, compared with a model of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.cache.page_pool import page_keys
from exl_core.speculate.draft_pages import DraftPages
from support.profiles import examples

SIZE = 4
NUM_PAGES = 6


class Written:
    """`DraftPages` beside a model of the cache that stores the whole prefix of every slot."""

    def __init__(self) -> None:
        self.pages = DraftPages(NUM_PAGES, SIZE)
        self.slots: dict[int, tuple[int, ...]] = {}

    def cached(self, tokens: Sequence[int], page_ids: Sequence[int], known: int) -> int:
        keys = self.pages.keys_of(tokens, page_keys(tokens, SIZE)[:known])
        assert keys == page_keys(tokens, SIZE)
        return self.pages.num_cached(tokens, page_ids, keys)

    def write(self, tokens: Sequence[int], extra: Sequence[int], page_ids: Sequence[int]) -> None:
        """Write the missing tokens of the sequence and then guesses, as the drafter does."""
        keys = page_keys(tokens, SIZE)
        start = min(self.pages.num_cached(tokens, page_ids, keys), len(tokens) - 1)
        whole = [*tokens, *extra]
        for position in range(start, len(whole)):
            page_id = page_ids[position // SIZE]
            self.slots[page_id * SIZE + position % SIZE] = tuple(whole[: position + 1])
        self.pages.write(start, tokens[start:], page_ids, keys)
        for number, token in enumerate(extra, len(tokens)):
            self.pages.write(number, [token], page_ids, keys)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self.pages.moved(moves)
        old = dict(self.slots)
        for source, target in moves:
            for offset in range(SIZE):
                prefix = old.get(source * SIZE + offset, ())
                self.slots[target * SIZE + offset] = prefix

    def check(self, tokens: Sequence[int], page_ids: Sequence[int]) -> int:
        count = self.cached(tokens, page_ids, 99)
        for position in range(count):
            slot = page_ids[position // SIZE] * SIZE + position % SIZE
            assert self.slots[slot] == tuple(tokens[: position + 1])
        return count


tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=14)
orders = st.permutations(range(NUM_PAGES))


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(tokens_of, st.lists(st.integers(0, 1), max_size=5), orders, orders),
        min_size=1,
        max_size=12,
    )
)
def test_only_tokens_computed_after_this_prefix_count_as_cached(
    steps: list[tuple[list[int], list[int], list[int], list[int]]],
) -> None:
    written = Written()
    for tokens, extra, page_ids, order in steps:
        written.check(tokens, page_ids)
        written.write(tokens, extra, page_ids)
        assert written.check(tokens, page_ids) == len(tokens)
        full = (len(tokens) + len(extra)) // SIZE
        if full == len(tokens) // SIZE:  # no page was filled by a guess
            assert written.check([*tokens, *extra], page_ids) == len(tokens) + len(extra)
        moves = [(source, target) for target, source in enumerate(order) if source != target]
        written.move(moves)
        moved = [order.index(page_id) for page_id in page_ids]
        assert written.check(tokens, moved) == len(tokens)


def test_accepted_guesses_are_cached() -> None:
    written = Written()
    written.write([1, 2, 3], [4, 5], [0, 1])
    assert written.check([1, 2, 3, 4, 9], [0, 1]) == 4
    assert written.check([1, 2, 7, 8], [0, 1]) == 2


def test_a_page_after_one_filled_by_guesses_is_not_reused() -> None:
    written = Written()
    written.write([1, 2, 3], [4, 5], [0, 1])
    assert written.check([1, 2, 3, 4, 5], [0, 1]) == 4, "whose page 1 is, was not known then"


def test_missing_keys_are_computed() -> None:
    written = Written()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    written.write(tokens, [], [0, 1, 2])
    for known in range(3):
        assert written.cached(tokens, [0, 1, 2], known) == 9


def test_after_clearing_nothing_is_cached() -> None:
    written = Written()
    written.write([1, 2, 3], [], [0])
    written.pages.clear()
    assert written.cached([1, 2, 3], [0], 0) == 0
