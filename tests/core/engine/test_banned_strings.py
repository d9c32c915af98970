"""Banned strings: what comes up is taken back, and another way is found, or a clear end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_core.constrain.choice import OneOf
from exl_core.constrain.regex import Regex
from exl_core.engine.banned import BannedStrings, fold
from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent, FinishReason, RewindEvent, TextEvent
from exl_core.errors import RequestError
from support.driving import ask, engine_for, run_all, run_one, run_to_failure, submit
from support.profiles import examples
from support.scripted import EOS_ID, VOCAB_SIZE, Rule

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def wishes(*texts: str) -> Rule:
    """Continue with the first of the texts that the reply so far begins; where it was led away from
    all of them, end. The prompt ends with the colon that the texts do not have."""
    scripts = [(*text.encode(), EOS_ID) for text in texts]

    def rule(history: Sequence[int]) -> Tensor:
        start = len(history) - list(reversed(history)).index(58)
        reply = tuple(history[start:])
        logits = torch.full((VOCAB_SIZE,), -9.0)
        logits[EOS_ID] = 0.0
        for rank, script in enumerate(scripts):
            if script[: len(reply)] == reply:
                logits[script[len(reply)]] = max(50.0 - rank, float(logits[script[len(reply)]]))
        return logits

    return rule


def run(engine: Engine, banned: tuple[str, ...], **rest: Any) -> tuple[list[Any], FinishEvent]:
    """Rewinds and end. The texts are those of the tokens, event by event."""
    engine.submit(ask(rest.pop("prompt", "Q:"), banned_strings=banned, **rest))
    events = run_all(engine)
    end = events[-1]
    assert isinstance(end, FinishEvent)
    texts = [event for event in events if isinstance(event, TextEvent)]
    ids = [token_id for event in texts for token_id in event.token_ids]
    assert tuple(ids) == end.token_ids[: len(ids)]
    assert "".join(event.text for event in texts) == end.text
    spoken = [token_id for token_id in end.token_ids if token_id != EOS_ID]
    if "stop_strings" not in rest:
        assert bytes(spoken).decode(errors="replace") == end.text
    assert not engine.pool.held_pages
    return [event for event in events if isinstance(event, RewindEvent)], end


@pytest.mark.parametrize("chunk", [512, 3])
def test_another_way_is_taken_where_a_banned_string_began(chunk: int) -> None:
    engine = engine_for(wishes("say no way", "say yes"), prefill_chunk=chunk)
    (rewind,), end = run(engine, ("no way",))
    assert (end.text, end.reason) == ("say yes", STOP)
    assert (rewind.text, bytes(rewind.token_ids)) == ("no way", b"no way")


def test_upper_and_lower_case_are_the_same() -> None:
    rewinds, end = run(engine_for(wishes("a NO Way", "a YES")), ("no wAY",))
    assert (end.text, rewinds[0].text) == ("a YES", "NO Way")
    _, end = run(engine_for(wishes("a ÀÉ", "a Ñ")), ("àé",))
    assert end.text == "a Ñ"


def test_several_ways_in_a_row_and_then_none() -> None:
    texts = [f"x{letter}z" for letter in "abcd"]
    rewinds, end = run(engine_for(wishes(*texts, "xyz")), ("az", "bz", "cz", "dz"))
    assert end.text == "xyz"
    assert [rewind.text for rewind in rewinds] == ["az", "bz", "cz", "dz"]
    engine = engine_for(wishes(*texts))
    sampler = ask().sampler
    request = ask(banned_strings=("az", "bz"), constraints=(Regex("x[ab]z"),), sampler=sampler)
    error = run_to_failure(engine, request)
    assert isinstance(error, RequestError)
    assert "banned string begins with each of the 2 tokens that may come" in str(error)
    assert f"{request.request_id}, token 1 of the reply" in str(error)
    assert run_one(engine, ask())[1].text == "xaz", "the engine goes on"


def test_a_string_is_not_pieced_together_from_what_stayed() -> None:
    """`cx` is taken back from `abcx`: the `ab` before may still become `abcd`."""
    rewinds, end = run(engine_for(wishes("abcx", "abq")), ("abcd", "cx"))
    assert [rewind.text for rewind in rewinds] == ["cx"]
    assert end.text == "abq"
    banned = BannedStrings[int](("abcd", "cx"))
    assert [banned.feed(place, text, place) for place, text in enumerate("abc")] == [""] * 3
    assert banned.feed(3, "x", 3) == (2, 2, "cx")
    assert banned.feed(2, "cd", 2) == (0, 0, "abcd")


def test_what_was_harmless_only_for_what_is_taken_back_was_not_shown() -> None:
    """The first `a` of `aab` begins no `aba`; once the second one is gone, it may."""
    banned = BannedStrings[int](("aba",))
    assert [banned.feed(place, text, place) for place, text in enumerate(["a", "ab"])] == [""] * 2
    assert banned.feed(2, "a", 2) == (1, 1, "aba")
    assert banned.feed(1, "ba", 1) == (0, 0, "aba")


@pytest.mark.parametrize("length", [250, 253, 254, 255, 256, 257, 510])
@pytest.mark.parametrize("is_known", [False, True])
def test_over_the_borders_of_pages(length: int, is_known: bool) -> None:
    """And, where the prompt is known, into pages that others can find."""
    prompt = [*[65] * (length - 1), 58]
    engine = engine_for(wishes("a bad word here", "a good one"), cache_tokens=2048)
    if is_known:
        run_one(engine, ask(prompt, max_tokens=8))
        run_one(engine, ask([*prompt, *b"a b"], max_tokens=4))
    (rewind,), end = run(engine, ("bad word",), prompt=prompt)
    assert (end.text, rewind.text) == ("a good one", "bad word")
    _, free = run_one(engine, ask(prompt))
    assert free.text == "a bad word here", "what was taken back is not another's"


def test_beside_one_that_shares_the_pages() -> None:
    engine = engine_for(wishes("a bad word here", "a good one"), cache_tokens=2048)
    prompt = [*[65] * 250, 58]
    free, held = ask(prompt), ask(prompt, banned_strings=("bad word",))
    for request in (free, held, ask(prompt), ask(prompt, banned_strings=("word",))):
        engine.submit(request)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    assert ends[free.request_id].text == "a bad word here"
    assert ends[held.request_id].text == "a good one"


@pytest.mark.parametrize("max_tokens", [5, 6])
def test_on_the_very_last_token(max_tokens: int) -> None:
    """`no` is complete with the fifth token: it is taken back, and the reply goes on from there."""
    (rewind,), end = run(engine_for(wishes("an noo", "an yes")), ("no",), max_tokens=max_tokens)
    assert (end.text, rewind.text) == ("an yes"[:max_tokens], "no")
    assert end.reason is LENGTH
    assert len(end.token_ids) == max_tokens
    rewinds, end = run(engine_for(wishes("an noo", "an yes")), ("noo",), max_tokens=max_tokens)
    assert end.text == ("an no" if max_tokens == 5 else "an yes"), "half of it may stand at the end"
    assert len(rewinds) == max_tokens - 5


@pytest.mark.parametrize(
    ("texts", "banned", "stop", "text", "cause"),
    [
        (("one STOP two",), "STOP!", "STOP", "one ", "STOP"),  # held back, then free to stop
        (("one STOP!", "one more"), "STOP!", "STOP", "one more", EOS_ID),  # banned, never there
        (("one END no", "x"), "no", "END", "one ", "END"),  # stopped before it came up
        (("abcd",), "cd", "ab", "", "ab"),
        (("abcxy", "abq"), "cxy", "bc", "abq", EOS_ID),
    ],
)
def test_with_stop_strings(
    texts: tuple[str, ...], banned: str, stop: str, text: str, cause: object
) -> None:
    _, end = run(engine_for(wishes(*texts)), (banned,), stop_strings=(stop,))
    assert (end.text, end.stopped_by) == (text, cause)


def test_a_stop_string_before_what_is_taken_back_ends_the_reply() -> None:
    """`ab` was held back because `abcX` might have come, and is still there at the end."""
    engine = engine_for(wishes("abcd"))
    (rewind,), end = run(engine, ("abcX", "cd"), stop_strings=("ab",))
    assert rewind.text == "cd"
    assert (end.text, end.stopped_by, end.held_text) == ("", "ab", "ab")
    assert end.token_ids == (*b"ab", EOS_ID)


def test_constraints_go_back_too() -> None:
    request = ask(banned_strings=("red",), constraints=(OneOf(["dark red", "dark blue"]),))
    engine = engine_for(wishes("dark red", "dark blue"))
    submit(engine, request)
    *_, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert (end.text, end.reason) == ("dark blue", FinishReason.CONSTRAINT)


def test_half_a_character_inside() -> None:
    """The second byte completes the banned character: it alone is taken back."""
    e_acute, e_grave = "é".encode(), "è".encode()
    assert e_acute[0] == e_grave[0]
    (rewind,), end = run(engine_for(wishes("caf\u00e9!", "caf\u00e8?")), ("é",))
    assert (end.text, rewind.text, bytes(rewind.token_ids)) == ("cafè?", "é", e_acute[1:])
    (rewind,), end = run(engine_for(wishes("naïve", "nope")), ("aïve",))
    assert (end.text, rewind.text) == ("nope", "aïve")


def test_min_tokens_end_with_a_rewind_as_anywhere() -> None:
    """The stop token is kept away until so many tokens stand, whatever was tried on the way."""
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[EOS_ID], logits[97], logits[98] = 9.0, 8.0, 7.0
    _, end = run(engine_for(lambda _: logits), ("aaa",), min_tokens=4, max_tokens=8)
    assert end.text == "bbaa"
    assert end.stopped_by == EOS_ID


def test_what_is_held_at_a_cancel_is_told() -> None:
    engine = engine_for(wishes("so bad", "x"))
    request = ask(banned_strings=("bad",), stop_strings=("o x",))
    engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.cancel(request.request_id)
    (end,) = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert (end.text, bytes(end.token_ids), end.held_text) == ("s", b"so ba", "o ba")


@given(
    pieces=st.lists(st.sampled_from(["a", "A", "b", "ab", "aC", "c", "", "bcD", "d"]), max_size=14),
    strings=st.lists(st.text("abC", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=examples(150))
def test_whatever_is_banned_never_shows(pieces: list[str], strings: list[str]) -> None:
    """Pieces of any length; what is taken back is tried again with another piece."""
    banned = BannedStrings[int](tuple(strings))
    kept: list[str] = []
    shown = ""
    for piece in pieces:
        found = banned.feed(len(kept), piece, len(kept))
        kept.append(piece)
        if isinstance(found, str):
            shown += found
        else:
            assert "".join(kept[found.position :]) == found.text
            assert found.state == found.position
            del kept[found.position :]
        held = banned.held
        assert shown + held == "".join(kept)
        assert held == "".join(kept[len(kept) - banned.num_held :])
        assert not any(fold(string) in fold(shown + held) for string in strings)
