"""Filter sets: several filters at once, the end of the reply, and masks in the background."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.constrain.choice import OneOf, StartsWith
from exl_core.constrain.filter import Constraint, Filter
from exl_core.constrain.filter_set import FilterSet
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError
from support.constraints import LANGUAGES, SelectObject, make_filter, vocabularies
from support.profiles import first_by_default
from support.scripted import BOS_ID, EOS_ID

BYTES = vocabularies()["bytes"]


def together(
    *constraints: Constraint, eos: tuple[int, ...] = (EOS_ID,), **options: Any
) -> FilterSet:
    return FilterSet([c.filter(BYTES) for c in constraints], eos, BYTES, **options)


def allowed(filters: FilterSet) -> list[int]:
    mask = filters.mask()
    assert mask is not None
    return BYTES.ids_of(mask)


def test_a_token_needs_every_filter_and_eos_needs_all_complete() -> None:
    filters = together(Regex("[a-d]{1,3}"), Regex("[b-e]*"), Regex("(..)*"))
    assert allowed(filters) == [*b"bcd"]
    filters.accept(ord("c"))
    assert allowed(filters) == [*b"bcd"]
    assert not filters.is_complete
    filters.accept(ord("d"))
    assert filters.is_complete
    assert allowed(filters) == [*b"bcd", EOS_ID]


def test_every_eos_of_the_reply_is_allowed_even_one_with_text() -> None:
    filters = together(Regex("a[!]?"), eos=(EOS_ID, BOS_ID, ord("!")))
    assert allowed(filters) == [ord("a")]
    filters.accept(ord("a"))
    assert allowed(filters) == [ord("!"), BOS_ID, EOS_ID]


def test_another_eos_is_allowed_once_complete_and_the_earlier_one_is_text() -> None:
    filters = together(Regex("a[!?]?"), eos=(EOS_ID, ord("!")))
    filters.accept(ord("a"))
    assert allowed(filters) == [ord("!"), ord("?"), EOS_ID]
    filters.set_eos((BOS_ID, ord("?")))
    assert allowed(filters) == [ord("!"), ord("?"), BOS_ID]
    filters.accept(ord("!"))
    assert filters.is_finished
    filters.rewind(1)
    filters.set_eos(())
    assert allowed(filters) == [ord("!"), ord("?")]


def test_prefer_eos_allows_only_eos_once_complete() -> None:
    filters = together(Regex("ab*"), prefer_eos=True)
    assert allowed(filters) == [ord("a")]
    filters.accept(ord("a"))
    assert allowed(filters) == [EOS_ID]
    free = together(StartsWith("a"), prefer_eos=True)
    free.accept(ord("a"))
    assert allowed(free) == [EOS_ID]
    without = together(Regex("ab*"), eos=(), prefer_eos=True)
    without.accept(ord("a"))
    assert allowed(without) == [ord("b")]


def test_filters_that_allow_everything_yield_no_mask() -> None:
    filters = together(StartsWith("a"))
    assert allowed(filters) == [ord("a")]
    filters.accept(ord("a"))
    assert filters.mask() is None
    assert together().mask() is None


def test_an_incomplete_filter_without_a_mask_excludes_eos() -> None:
    class Incomplete(SelectObject):
        def next(self) -> tuple[set[int], set[int]]:
            return set(range(BYTES.num_tokens)) - {EOS_ID}, set()

    filters = together(Foreign(Incomplete(BYTES, [])))
    assert allowed(filters) == [*range(257)]


class Fixed(Filter):
    """Filter with a constant mask."""

    is_complete = False
    is_finished = False

    def __init__(self, own: Tensor) -> None:
        self.own = own

    def mask(self) -> Tensor:
        return self.own

    def accept(self, token_id: int) -> None:
        """Has no effect."""

    def rewind(self, count: int) -> None:
        """Has no effect."""


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("ids", [{97}, {97, EOS_ID}, {97, BOS_ID}, {97, BOS_ID, EOS_ID}])
def test_the_mask_of_a_filter_is_not_written_to(ids: set[int], is_complete: bool) -> None:
    """With EOS in the mask and without: the filter owns the tensor."""
    fixed = Fixed(BYTES.mask_of(ids))
    fixed.is_complete = is_complete
    filters = FilterSet([fixed], (EOS_ID, BOS_ID), BYTES)
    assert allowed(filters) == [97, *sorted((EOS_ID, BOS_ID) if is_complete else ())]
    assert BYTES.ids_of(fixed.own) == sorted(ids)


def test_contradicting_filters_raise_when_no_token_is_allowed() -> None:
    filters = together(Regex("a[bc]"), Regex("a[de]"))
    assert allowed(filters) == [ord("a")]
    filters.accept(ord("a"))
    with pytest.raises(ConstraintError, match=r"token 1 .*: no token may come next"):
        filters.mask()
    filters.rewind(1)
    assert allowed(filters) == [ord("a")]


def test_the_first_finished_filter_ends_the_reply() -> None:
    filters = together(OneOf(["ab"]), Regex("[a-z]{2,}"))
    for char in b"ab":
        assert not filters.is_finished
        filters.accept(char)
    assert filters.is_finished
    assert filters.is_complete
    unmet = together(OneOf(["ab"]), Regex("[a-z]{3}"))
    for char in b"ab":
        unmet.accept(char)
    assert unmet.is_finished
    assert not unmet.is_complete


def test_rewind_undoes_eos_like_any_token() -> None:
    filters = together(Regex("ab?"))
    for token_id in (ord("a"), EOS_ID):
        filters.accept(token_id)
    filters.rewind(1)
    assert allowed(filters) == [ord("b"), EOS_ID]
    filters.accept(ord("b"))
    filters.accept(EOS_ID)
    filters.rewind(3)
    filters.rewind(0)
    assert allowed(filters) == [ord("a")]


@pytest.mark.parametrize("name", first_by_default(LANGUAGES, 8))
def test_background_masks_equal_foreground_masks(name: str, vocabulary: Vocabulary) -> None:
    rng = random.Random(name)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            walk(name, vocabulary, pool, rng)


def walk(name: str, vocabulary: Vocabulary, pool: Executor, rng: random.Random) -> None:
    eos = vocabulary.eos_ids
    here = FilterSet([make_filter(name, vocabulary)[0]], eos, vocabulary)
    there = FilterSet([make_filter(name, vocabulary)[0]], eos, vocabulary, executor=pool)
    length = 0
    for _ in range(20):
        for _ in range(rng.randrange(3)):
            there.start()
        if rng.random() < 0.25:
            count = rng.randint(0, length)
            length -= count
            here.rewind(count)
            there.rewind(count)
            continue
        assert here.is_finished == there.is_finished
        if here.is_finished:
            continue
        expected, found = here.mask(), there.mask()
        assert expected is not None
        assert found is not None
        assert torch.equal(expected, found)
        token_id = rng.choice(vocabulary.ids_of(expected))
        there.start()
        if token_id not in eos:
            length += 1
            here.accept(token_id)
            there.accept(token_id)


class Slow(Filter):
    """Filter that records its thread, waits for an event, and optionally fails."""

    def __init__(self, *, fails: bool = False, runs_in_background: bool = True) -> None:
        self.may_go_on = threading.Event()
        self.fails = fails
        self.runs_in_background = runs_in_background
        self.threads: list[threading.Thread] = []

    def mask(self) -> Tensor | None:
        self.threads.append(threading.current_thread())
        assert self.may_go_on.wait(20)
        if self.fails:
            raise ConstraintError("gave up")
        return None

    def accept(self, token_id: int) -> None:
        assert self.may_go_on.is_set(), "used while it computes"

    def rewind(self, count: int) -> None: ...

    is_complete = True
    is_finished = False


def test_start_does_not_block_and_only_background_filters_use_the_executor() -> None:
    slow, here = Slow(), Slow(runs_in_background=False)
    here.may_go_on.set()
    with ThreadPoolExecutor(1) as pool:
        filters = FilterSet([slow, here], [EOS_ID], BYTES, executor=pool)
        filters.start()
        slow.may_go_on.set()
        assert filters.mask() is None
        filters.start()  # the mask is computed already
    assert slow.threads != [threading.current_thread()]
    assert here.threads == [threading.current_thread()]
    assert len(slow.threads) == 1


def test_a_background_error_is_raised_by_mask_or_dropped() -> None:
    slow = Slow(fails=True)
    slow.may_go_on.set()
    with ThreadPoolExecutor(1) as pool:
        filters = FilterSet([slow], [EOS_ID], BYTES, executor=pool)
        filters.start()
        with pytest.raises(ConstraintError, match="gave up"):
            filters.mask()
        filters.start()
        filters.accept(5)
        slow.fails = False
        assert filters.mask() is None
