"""StreamingGenerator: `begin`, then one result per step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from exl_core.constrain.regex import Regex
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishReason
from exl_core.errors import RequestError
from exl_core.generate.streaming import StreamingGenerator, StreamResult
from exl_core.session.load import LoadedModel
from exl_core.speculate.drafter import Draft, DraftJob
from exl_core.speculate.stats import DraftStats
from support.generators import GREEDY, SMALL, loaded_around
from support.scripted import EOS_ID, Rule, certain, reply_with


def streaming(rule: Rule, **more: Any) -> StreamingGenerator:
    return StreamingGenerator(loaded_around(rule), SMALL, **more)


def rest(generator: StreamingGenerator) -> list[StreamResult]:
    results: list[StreamResult] = []
    while not results or not results[-1].is_end:
        results.append(generator.step())
        assert len(results) < 500
    return results


def chunks(results: Sequence[StreamResult]) -> list[str]:
    return [result.chunk for result in results]


def test_a_stream_is_iterable_up_to_its_end() -> None:
    generator = streaming(reply_with("hello"))
    generator.begin("Q:", max_tokens=9)
    results = list(generator)
    assert "".join(chunks(results)) == "hello"
    assert [result.is_end for result in results].index(True) == len(results) - 1
    with pytest.raises(RequestError, match="no stream runs"):
        next(iter(generator))


class Script:
    """Drafter that proposes the bytes of `text` as the reply to the prompt `Q:`, right or wrong."""

    max_tokens = 4

    def __init__(self, text: str) -> None:
        self._text = text.encode()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        (job,) = jobs
        done = len(job.token_ids) - 2
        return [Draft(tuple(self._text[done : done + job.max_tokens]))]

    def forget(self, request_id: str) -> None:
        pass

    def moved(self, moves: object) -> None:
        pass


@pytest.fixture
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in every round. Normally a controller measures whether drafts pay."""
    monkeypatch.setattr(
        "exl_core.speculate.controller.DraftController.length",
        lambda self, max_tokens, **_: min(max_tokens, self.max_tokens),
    )


def test_a_step_gives_one_token_and_the_end_is_a_separate_step() -> None:
    generator = streaming(reply_with("hello"))
    generator.begin("Q:", sampler=GREEDY)
    results = rest(generator)
    assert chunks(results) == [*"hello", ""]
    assert [result.token_ids for result in results[:-1]] == [(byte,) for byte in b"hello"]
    end = results[-1]
    assert (end.token_ids, end.reason) == ((), FinishReason.STOP)
    assert end.finish is not None
    assert (end.finish.text, end.finish.stopped_by) == ("hello", EOS_ID)
    assert all(result.reason is None and result.finish is None for result in results[:-1])
    assert generator.sequence_ids == (*b"Q:hello", EOS_ID)


def test_length_and_constraint_end_with_the_last_token() -> None:
    generator = streaming(reply_with("hello"))
    generator.begin("Q:", sampler=GREEDY, max_tokens=3)
    results = rest(generator)
    assert chunks(results) == ["h", "e", "l"]
    assert results[-1].reason is FinishReason.LENGTH
    generator.begin("Q:", sampler=GREEDY, constraints=Regex("he"))
    results = rest(generator)
    assert chunks(results) == ["h", "e"]
    assert results[-1].reason is FinishReason.CONSTRAINT


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    generator = streaming(reply_with("one EN two END three"))
    generator.begin("Q:", sampler=GREEDY, stop=["END"])
    results = rest(generator)
    held = chunks(results)
    assert held[:8] == ["o", "n", "e", " ", "", "", "EN ", "t"]
    assert "".join(held) == "one EN two "
    assert results[-1].finish is not None
    assert (results[-1].finish.stopped_by, results[-1].finish.held_text) == ("END", "END")
    ids = [i for result in results for i in result.token_ids]
    assert bytes(ids) == b"one EN two ", "ids match the returned text"


def test_a_stop_token_releases_held_text_with_the_end() -> None:
    generator = streaming(reply_with("one EN"))
    generator.begin("Q:", sampler=GREEDY, stop=["END", EOS_ID])
    results = rest(generator)
    assert chunks(results) == ["o", "n", "e", " ", "", "", "EN"]
    assert results[-1].token_ids[:2] == tuple(b"EN")
    assert results[-1].is_end


def test_an_incomplete_character_is_held_back() -> None:
    generator = streaming(reply_with("aé!"))
    generator.begin("Q:", sampler=GREEDY)
    results = rest(generator)
    assert chunks(results) == ["a", "", "é", "!", ""]
    assert results[2].token_ids == tuple("é".encode())


def test_stop_conditions_persist_until_set_again() -> None:
    generator = streaming(reply_with("hello"))
    assert generator.stop == (EOS_ID,)
    generator.stop = (letter for letter in ("l",))
    for _ in range(2):
        generator.begin("Q:", sampler=GREEDY)
        assert "".join(chunks(rest(generator))) == "he"
    generator.begin("Q:", sampler=GREEDY, stop=ord("o"))
    assert "".join(chunks(rest(generator))) == "hell"
    no_conditions: tuple[Any, ...] = ((), [], None)
    for nothing in no_conditions:
        generator.stop = nothing
        generator.begin("Q:", sampler=GREEDY, max_tokens=8)
        assert "".join(chunks(rest(generator))) == "hellohe"
    generator.stop = "lo"
    generator.begin("Q:", sampler=GREEDY)
    assert "".join(chunks(rest(generator))) == "hel"


@pytest.mark.parametrize("stop", [1.5, True, [None], b"x", ["a", b"b"], object()])
def test_invalid_stop_conditions_are_refused(stop: Any) -> None:
    generator = streaming(reply_with("hello"))
    with pytest.raises(RequestError, match="stop condition"):
        generator.stop = stop
    with pytest.raises(RequestError, match="stop condition"):
        generator.begin("Q:", stop=stop)
    assert generator.stop == (EOS_ID,)


def test_tokens_are_banned_for_one_step() -> None:
    def rule(history: Sequence[int]) -> Any:
        logits = certain(ord("a"))
        logits[ord("b")] = 40.0
        return logits

    generator = streaming(rule)
    generator.begin("Q:", sampler=GREEDY, max_tokens=4)
    first = [generator.step(ord("a")), generator.step(), generator.step(ban_tokens=[ord("a")])]
    assert chunks([*first, *rest(generator)]) == ["b", "a", "b", "a"]


@pytest.mark.usefixtures("always_drafting")
@pytest.mark.parametrize("draft", ["hello world", "help! world", "xxxxxxxxxxx"])
def test_drafts_change_neither_text_nor_number_of_steps(draft: str) -> None:
    plain = streaming(reply_with("hello world"))
    plain.begin("Q:", sampler=GREEDY)
    drafted = streaming(reply_with("hello world"), drafter=Script(draft))
    drafted.begin("Q:", sampler=GREEDY)
    expected, results = rest(plain), rest(drafted)
    assert [(r.chunk, r.token_ids, r.is_end) for r in results] == [
        (r.chunk, r.token_ids, r.is_end) for r in expected
    ]


@pytest.mark.usefixtures("always_drafting")
def test_with_several_tokens_a_step_returns_a_whole_pass() -> None:
    generator = streaming(reply_with("hello"), drafter=Script("hello"), several_tokens=True)
    generator.begin("Q:", sampler=GREEDY)
    results = rest(generator)
    assert chunks(results) == ["h", "ello"]
    assert results[1].token_ids == tuple(b"ello")
    assert results[1].is_end
    first = generator.draft_stats
    assert (first.rounds, first.drafted, first.accepted, first.emitted) == (2, 4, 4, 6)
    generator.begin("Q:", sampler=GREEDY)
    rest(generator)
    assert generator.draft_stats == first + first
    generator.begin("Q:", sampler=GREEDY)
    generator.step()
    generator.step()
    generator.draft_stats = DraftStats()
    generator.begin("Q:", sampler=GREEDY)
    generator.step()
    generator.cancel()
    assert generator.draft_stats.emitted == 1, "a cancelled stream counts too"


@pytest.mark.usefixtures("always_drafting")
def test_tokens_already_drafted_and_accepted_cannot_be_banned() -> None:
    generator = streaming(reply_with("hello"), drafter=Script("hello"))
    generator.begin("Q:", sampler=GREEDY)
    assert chunks([generator.step(), generator.step()]) == ["h", "e"]
    with pytest.raises(RequestError, match="allow_drafts=False"):
        generator.step(ban_tokens=[ord("l")])
    assert "".join(chunks(rest(generator))) == "llo", "the stream continues"
    generator.begin("Q:", sampler=GREEDY, allow_drafts=False)
    generator.step()
    generator.step(ban_tokens=[ord("e")])


def test_no_step_before_begin_or_after_the_end() -> None:
    generator = streaming(reply_with("hello"))
    with pytest.raises(RequestError, match="none was begun"):
        generator.step()
    generator.begin("Q:", sampler=GREEDY)
    rest(generator)
    with pytest.raises(RequestError, match="the last one has ended"):
        generator.step()
    generator.begin("Q:", sampler=GREEDY, max_tokens=0)
    (only,) = rest(generator)
    assert (only.chunk, only.is_end) == ("", True)
    generator.begin("Q:")
    generator.cancel()
    generator.cancel()
    with pytest.raises(RequestError, match="ended"):
        generator.step()
    assert generator.sequence_ids == tuple(b"Q:")


def test_begin_drops_the_running_stream_unless_refused() -> None:
    generator = streaming(reply_with("hello"))
    generator.begin("Q:", sampler=GREEDY)
    generator.step()
    for wrong in (
        {"prompt": ""},
        {"prompt": "x" * 2000},
        {"prompt": "Q:", "constraints": Regex("[")},
    ):
        with pytest.raises(RequestError):
            generator.begin(**cast(Any, wrong))
    assert generator.step().chunk == "e", "the running stream continues"
    generator.begin("Q:", sampler=GREEDY)
    assert len(generator.engine.live_requests) == 1
    assert "".join(chunks(rest(generator))) == "hello"
    assert not generator.engine.pool.held_pages


def test_abort_ends_a_reply_and_a_prompt() -> None:
    abort = threading.Event()
    loaded = loaded_around(reply_with("hello"))
    generator = StreamingGenerator(loaded, EngineOptions(cache_tokens=1024, prefill_chunk=8))
    generator.begin("Q:", sampler=GREEDY, abort=abort)
    assert generator.step().chunk == "h"
    abort.set()
    end = generator.step()
    assert (end.is_end, end.reason, end.chunk) == (True, FinishReason.CANCELLED, "")
    generator.begin("x" * 40 + "Q:", sampler=GREEDY, abort=abort)
    assert generator.step().reason is FinishReason.CANCELLED
    assert not generator.engine.pool.held_pages
    abort.clear()
    generator.begin("Q:", sampler=GREEDY, abort=abort)
    assert "".join(chunks(rest(generator))) == "hello"


@pytest.mark.thorough
def test_new_token_ids_exclude_the_healed_token(smollm2: LoadedModel) -> None:
    generator = StreamingGenerator(smollm2, SMALL)
    prompt = "The capital of France is Par"
    generator.begin(prompt, sampler=GREEDY, token_healing=True, max_tokens=3)
    assert generator.sequence_ids == tuple(smollm2.tokenizer.encode(prompt))
    results = rest(generator)
    text = "".join(chunks(results))
    assert text.startswith("is")
    assert smollm2.tokenizer.decode(generator.sequence_ids) == prompt + text
    ids = [i for result in results for i in result.token_ids]
    assert results[-1].finish is not None
    assert ids == list(results[-1].finish.token_ids)
    assert len(ids) == 3


def test_full_is_true_when_a_shorter_cache_is_used_up() -> None:
    loaded = loaded_around(reply_with("hello", then=ord("!")), max_seq_len=1024)
    generator = StreamingGenerator(loaded, EngineOptions(cache_tokens=256))
    generator.begin("Q:" * 125, sampler=GREEDY)
    while not generator.full():
        result = generator.step()
    assert result.is_end
    assert len(generator.sequence_ids) == 257


def test_full_is_true_when_the_context_is_used_up() -> None:
    loaded = loaded_around(reply_with("hello", then=ord("!")), max_seq_len=8)
    generator = StreamingGenerator(loaded, SMALL)
    generator.begin("Q:", sampler=GREEDY)
    while not generator.full():
        result = generator.step()
    assert result.is_end
    assert result.reason is FinishReason.LENGTH
    assert len(generator.sequence_ids) == 8
