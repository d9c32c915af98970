"""Banned strings: the reply is rewound and continues with another token, or fails clearly."""

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
from exl_core.engine.request import Report
from exl_core.errors import RequestError
from support.driving import ask, engine_for, run_all, run_one, run_to_failure, submit
from support.profiles import examples
from support.scripted import EOS_ID, VOCAB_SIZE, Rule

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def preferring(*texts: str) -> Rule:
    """Rule that prefers to continue the first text that starts with the reply so far.

    If no text does, it prefers EOS. The prompt ends with a colon, which no text contains.
    """
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
    """Run a request; return its rewinds and its end after checking texts against tokens."""
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
def test_the_reply_is_rewound_to_the_start_of_a_banned_string(chunk: int) -> None:
    engine = engine_for(preferring("say no way", "say yes"), prefill_chunk=chunk)
    (rewind,), end = run(engine, ("no way",))
    assert (end.text, end.reason) == ("say yes", STOP)
    assert (rewind.text, bytes(rewind.token_ids)) == ("no way", b"no way")


def test_matching_ignores_case() -> None:
    rewinds, end = run(engine_for(preferring("a NO Way", "a YES")), ("no wAY",))
    assert (end.text, rewinds[0].text) == ("a YES", "NO Way")
    _, end = run(engine_for(preferring("a ÀÉ", "a Ñ")), ("àé",))
    assert end.text == "a Ñ"


def test_several_tokens_are_tried_and_the_request_fails_after_the_last() -> None:
    texts = [f"x{letter}z" for letter in "abcd"]
    rewinds, end = run(engine_for(preferring(*texts, "xyz")), ("az", "bz", "cz", "dz"))
    assert end.text == "xyz"
    assert [rewind.text for rewind in rewinds] == ["az", "bz", "cz", "dz"]
    engine = engine_for(preferring(*texts))
    sampler = ask().sampler
    request = ask(banned_strings=("az", "bz"), constraints=(Regex("x[ab]z"),), sampler=sampler)
    error = run_to_failure(engine, request)
    assert isinstance(error, RequestError)
    assert "banned string begins with each of the 2 tokens that may come" in str(error)
    assert f"{request.request_id}, token 1 of the reply" in str(error)
    assert run_one(engine, ask())[1].text == "xaz", "the engine still works"


def test_text_before_a_rewind_can_still_complete_a_banned_string() -> None:
    """`cx` is removed from `abcx`; the `ab` before it may still become `abcd`."""
    rewinds, end = run(engine_for(preferring("abcx", "abq")), ("abcd", "cx"))
    assert [rewind.text for rewind in rewinds] == ["cx"]
    assert end.text == "abq"
    banned = BannedStrings[int](("abcd", "cx"))
    assert [banned.feed(position, text, position) for position, text in enumerate("abc")] == [
        ""
    ] * 3
    assert banned.feed(3, "x", 3) == (2, 2, "cx")
    assert banned.feed(2, "cd", 2) == (0, 0, "abcd")


def test_text_that_only_removed_tokens_made_harmless_stays_held() -> None:
    """The first `a` of `aab` cannot begin `aba`. Once `ab` is removed, it can."""
    banned = BannedStrings[int](("aba",))
    assert [banned.feed(position, text, position) for position, text in enumerate(["a", "ab"])] == [
        ""
    ] * 2
    assert banned.feed(2, "a", 2) == (1, 1, "aba")
    assert banned.feed(1, "ba", 1) == (0, 0, "aba")


@pytest.mark.parametrize("length", [250, 253, 254, 255, 256, 257, 510])
@pytest.mark.parametrize("is_known", [False, True])
def test_rewinding_over_page_borders(length: int, is_known: bool) -> None:
    """If the prompt is cached, also into pages that are registered for sharing."""
    prompt = [*[65] * (length - 1), 58]
    engine = engine_for(preferring("a bad word here", "a good one"), cache_tokens=2048)
    if is_known:
        run_one(engine, ask(prompt, max_tokens=8))
        run_one(engine, ask([*prompt, *b"a b"], max_tokens=4))
    (rewind,), end = run(engine, ("bad word",), prompt=prompt)
    assert (end.text, rewind.text) == ("a good one", "bad word")
    _, free = run_one(engine, ask(prompt))
    assert free.text == "a bad word here", "rewinding does not change pages of other requests"


def test_rewinding_beside_requests_that_share_the_pages() -> None:
    engine = engine_for(preferring("a bad word here", "a good one"), cache_tokens=2048)
    prompt = [*[65] * 250, 58]
    free, held = ask(prompt), ask(prompt, banned_strings=("bad word",))
    for request in (free, held, ask(prompt), ask(prompt, banned_strings=("word",))):
        engine.submit(request)
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent)}
    assert ends[free.request_id].text == "a bad word here"
    assert ends[held.request_id].text == "a good one"


@pytest.mark.parametrize("max_tokens", [5, 6])
def test_a_banned_string_completed_by_the_last_token(max_tokens: int) -> None:
    """`no` is completed by the fifth token. It is removed, and the reply continues."""
    (rewind,), end = run(engine_for(preferring("an noo", "an yes")), ("no",), max_tokens=max_tokens)
    assert (end.text, rewind.text) == ("an yes"[:max_tokens], "no")
    assert end.reason is LENGTH
    assert len(end.token_ids) == max_tokens
    rewinds, end = run(engine_for(preferring("an noo", "an yes")), ("noo",), max_tokens=max_tokens)
    assert end.text == ("an no" if max_tokens == 5 else "an yes"), (
        "the beginning of a banned string may end the reply"
    )
    assert len(rewinds) == max_tokens - 5


@pytest.mark.parametrize(
    ("texts", "banned", "stop", "text", "cause"),
    [
        (("one STOP two",), "STOP!", "STOP", "one ", "STOP"),  # held back, then a stop
        (
            ("one STOP!", "one more"),
            "STOP!",
            "STOP",
            "one more",
            EOS_ID,
        ),  # banned, so never completed
        (("one END no", "x"), "no", "END", "one ", "END"),  # stopped before the banned string
        (("abcd",), "cd", "ab", "", "ab"),
        (("abcxy", "abq"), "cxy", "bc", "abq", EOS_ID),
    ],
)
def test_with_stop_strings(
    texts: tuple[str, ...], banned: str, stop: str, text: str, cause: object
) -> None:
    _, end = run(engine_for(preferring(*texts)), (banned,), stop_strings=(stop,))
    assert (end.text, end.stopped_by) == (text, cause)


def test_a_held_stop_string_before_a_rewind_ends_the_reply() -> None:
    """`ab` is held back because it may become `abcX`; it is still held at the end."""
    engine = engine_for(preferring("abcd"))
    (rewind,), end = run(engine, ("abcX", "cd"), stop_strings=("ab",))
    assert rewind.text == "cd"
    assert (end.text, end.stopped_by, end.held_text) == ("", "ab", "ab")
    assert end.token_ids == (*b"ab", EOS_ID)


def test_constraints_are_rewound_too() -> None:
    request = ask(banned_strings=("red",), constraints=(OneOf(["dark red", "dark blue"]),))
    engine = engine_for(preferring("dark red", "dark blue"))
    submit(engine, request)
    *_, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert (end.text, end.reason) == ("dark blue", FinishReason.CONSTRAINT)


def test_a_banned_string_that_ends_inside_a_token_of_a_character() -> None:
    """The second byte completes the banned character; only its token is removed."""
    e_acute, e_grave = "é".encode(), "è".encode()
    assert e_acute[0] == e_grave[0]
    (rewind,), end = run(engine_for(preferring("caf\u00e9!", "caf\u00e8?")), ("é",))
    assert (end.text, rewind.text, bytes(rewind.token_ids)) == ("cafè?", "é", e_acute[1:])
    (rewind,), end = run(engine_for(preferring("naïve", "nope")), ("aïve",))
    assert (end.text, rewind.text) == ("nope", "aïve")


def test_min_tokens_counts_tokens_that_remain_after_a_rewind() -> None:
    """The stop token is excluded until `min_tokens` tokens remain, whatever was rewound."""
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[EOS_ID], logits[97], logits[98] = 9.0, 8.0, 7.0
    _, end = run(engine_for(lambda _: logits), ("aaa",), min_tokens=4, max_tokens=8)
    assert end.text == "bbaa"
    assert end.stopped_by == EOS_ID


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_the_time_limit_ends_a_reply_that_goes_back(is_hybrid: bool) -> None:
    """The removed tokens are part of neither the reply nor the sequence."""
    now = 0.0
    texts = [f"so x{letter}z" for letter in "abcdefgh"]
    banned = tuple(f"{letter}z" for letter in "abcdefgh")
    preferred = preferring(*texts)

    def rule(history: Sequence[int]) -> Tensor:
        nonlocal now
        now += 1.0
        return preferred(history)

    engine = engine_for(rule, clock=lambda: now, is_hybrid=is_hybrid)
    # The eighth pass completes the second banned string.
    request = ask(banned_strings=banned, max_time_s=8.0, report=Report(log_probs=0))
    sequence = engine.submit(request)
    *others, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert [event.text for event in others if isinstance(event, RewindEvent)] == ["az", "bz"]
    assert (end.reason, end.text, end.held_text) == (FinishReason.TIME, "so x", "")
    assert (bytes(end.token_ids), bytes(sequence.token_ids)) == (b"so x", b"Q:so x")
    tokens = [token for event in others if isinstance(event, TextEvent) for token in event.tokens]
    assert bytes(token.token_id for token in (*tokens, *end.tokens)) == b"so x"
    assert engine.pool.num_available == engine.pool.num_pages
    assert run_one(engine, ask())[1].text == texts[0]


def test_held_text_is_reported_when_a_request_is_cancelled() -> None:
    engine = engine_for(preferring("so bad", "x"))
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
def test_banned_strings_are_never_emitted(pieces: list[str], strings: list[str]) -> None:
    """Pieces of any length; after a rewind the next piece takes the place of the removed ones."""
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
