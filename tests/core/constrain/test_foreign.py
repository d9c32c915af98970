"""Filter objects of exllamav2: minimal, cloning, masking and failing ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.constrain.filter_set import FilterSet
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError
from support.constraints import CloneObject, SelectObject, assert_agrees, vocabularies, without_eos
from support.profiles import examples
from support.scripted import EOS_ID

OPTIONS = ["ab", "abc", "ca", "öa"]
VOCABULARIES = vocabularies()


class UncopyableObject(SelectObject):
    """`SelectObject` with an attribute that cannot be copied; `begin` restarts it."""

    def __init__(self, vocabulary: Vocabulary, options: Sequence[str]) -> None:
        super().__init__(vocabulary, options)
        self.generator = (i for i in range(3))


def test_an_object_in_place_keeps_the_state_of_the_reply() -> None:
    vocabulary = next(iter(VOCABULARIES.values()))
    wrapped = CloneObject(vocabulary, OPTIONS)
    found = Foreign(wrapped, in_place=True).filter(vocabulary)
    assert found.wrapped is wrapped
    tokens = [i for i, text in enumerate(vocabulary.token_bytes) if text == b"c"]
    found.mask()
    found.accept(tokens[0])
    assert found.wrapped is wrapped
    before = found.mask()
    found.rewind(1)
    found.mask()
    found.accept(tokens[0])
    after = found.mask()
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


class MaskObject(CloneObject):
    """Object that masks logits itself, in the background; `next` must not be called."""

    def clone(self, made: CloneObject | None = None) -> CloneObject:
        return super().clone(made or MaskObject.__new__(MaskObject))

    def use_background_worker(self) -> bool:
        return True

    def can_mask_logits(self) -> bool:
        return True

    def prepare_logit_mask(self) -> bool:
        self.ids = sorted(SelectObject.next(self)[0])
        return True

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, float("-inf"))
        masked[self.ids] = logits[self.ids]
        return masked

    def next(self) -> NoReturn:
        raise AssertionError("its own masks are used")


@given(
    make=st.sampled_from([SelectObject, CloneObject, UncopyableObject]),
    kind=st.sampled_from(sorted(VOCABULARIES)),
    steps=st.lists(st.integers(-3, 1000), max_size=8),
)
@settings(max_examples=examples(80))
def test_every_kind_of_object_filters_and_rewinds(
    make: type[SelectObject], kind: str, steps: list[int]
) -> None:
    vocabulary = VOCABULARIES[kind]
    f = Foreign(make(vocabulary, OPTIONS)).filter(vocabulary)
    ids: list[int] = []
    for step in steps:
        if step < 0:
            count = min(-step, len(ids))
            f.rewind(count)
            del ids[len(ids) - count :]
        elif not f.is_finished:
            mask = f.mask()
            assert mask is not None
            allowed = without_eos(vocabulary.ids_of(mask), vocabulary)
            ids.append(allowed[step % len(allowed)])
            f.accept(ids[-1])
        text = b"".join(vocabulary.token_bytes[i] for i in ids)
        assert_agrees(f, vocabulary, OPTIONS, text)


def test_a_rewind_beyond_the_snapshots_replays_the_reply() -> None:
    vocabulary = VOCABULARIES["bytes"]
    word = "a" * 80 + "b"
    f = Foreign(CloneObject(vocabulary, [word])).filter(vocabulary)
    for char in word[:70].encode():
        f.accept(char)
    f.rewind(60)
    assert_agrees(f, vocabulary, [word], b"a" * 10)
    for char in word[10:].encode():
        f.accept(char)
    assert f.is_finished
    f.rewind(1)
    assert not f.is_finished


def test_each_reply_has_its_own_readable_copy() -> None:
    vocabulary = VOCABULARIES["bytes"]
    original = SelectObject(vocabulary, OPTIONS)
    first, second = (Foreign(original).filter(vocabulary) for _ in range(2))
    first.accept(ord("c"))
    second.accept(ord("a"))
    assert (first.wrapped.text, second.wrapped.text) == (b"c", b"a")
    assert original.text == b"not begun"
    assert first.wrapped.tokenizer is vocabulary


def test_masks_of_the_object_are_used_and_only_eos_ends_the_reply() -> None:
    vocabulary = VOCABULARIES["bytes"]
    f = Foreign(MaskObject(vocabulary, OPTIONS)).filter(vocabulary)
    assert f.runs_in_background
    for char in b"abc":
        mask = f.mask()
        assert mask is not None
        assert char in vocabulary.ids_of(mask)
        f.accept(char)
    assert (f.is_complete, f.is_finished) == (True, False)
    mask = f.mask()
    assert mask is not None
    assert vocabulary.ids_of(mask) == [EOS_ID]
    f.rewind(2)
    mask = f.mask()
    assert mask is not None
    assert vocabulary.ids_of(mask) == [ord("b")]


class Unconstrained:
    """Object that allows every token and ends the reply at a full stop."""

    def begin(self, prefix: str) -> None: ...

    def feed(self, token: torch.Tensor) -> None:
        assert ["x"][token[0] - token[0]] == "x", "a token is an index of a list"

    def next(self) -> tuple[None, set[int]]:
        return None, {ord(".")}


def test_an_object_that_allows_everything_ends_at_its_end_token() -> None:
    vocabulary = VOCABULARIES["bytes"]
    f = FilterSet([Foreign(Unconstrained()).filter(vocabulary)], [EOS_ID], vocabulary)
    for token_id in (5, 256):
        assert f.mask() is None
        f.accept(token_id)
    assert not f.is_finished
    f.accept(ord("."))
    assert f.is_finished
    f.rewind(1)
    assert not f.is_finished
    assert f.mask() is None


@pytest.mark.parametrize("method", ["begin", "feed", "next"])
def test_an_exception_of_the_object_is_a_constraint_error(method: str) -> None:
    vocabulary = VOCABULARIES["bytes"]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("its own fault")

    broken = type("Broken", (SelectObject,), {method: fail})
    with pytest.raises(ConstraintError, match=f"Broken failed in {method}.*its own fault"):
        Foreign(broken(vocabulary, OPTIONS)).filter(vocabulary).accept(ord("a"))


def test_an_object_without_filter_methods_is_refused() -> None:
    with pytest.raises(ConstraintError, match="str without begin, feed, next"):
        Foreign("text").filter(VOCABULARIES["bytes"])


def test_sampling_with_the_masks_reaches_every_option() -> None:
    vocabulary = VOCABULARIES["made"]
    replies = set()
    for seed in range(60):
        rng = random.Random(seed)
        made = Foreign(SelectObject(vocabulary, OPTIONS)).filter(vocabulary)
        filters = FilterSet([made], vocabulary.eos_ids, vocabulary)
        ids: list[int] = []
        while not filters.is_finished:
            mask = filters.mask()
            assert mask is not None
            token_id = rng.choice(vocabulary.ids_of(mask))
            if token_id in vocabulary.eos_ids:
                break
            filters.accept(token_id)
            ids.append(token_id)
        replies.add(b"".join(vocabulary.token_bytes[i] for i in ids).decode())
    assert replies == set(OPTIONS)
