"""Token healing: the last prompt token is sampled again; limits and text start after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from exl_core.constrain.choice import OneOf
from exl_core.constrain.foreign import Foreign
from exl_core.constrain.regex import Regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent, FinishReason, SampledToken, TextEvent
from exl_core.engine.request import Report, Request
from exl_core.errors import ConstraintError
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.ngram import NgramDrafter
from support.constraints import SelectObject
from support.driving import GREEDY, ask, engine_for, run_all, run_one, run_to_failure
from support.scripted import (
    BOS_ID,
    EOS_ID,
    HashRule,
    PieceTokenizer,
    reply_with,
)

PIECES = ("http", "http:", "http://", "://", " He", " Hello", "Hello", "lo")
TOKENIZER = PieceTokenizer(*PIECES)
SIZE = TOKENIZER.vocab_size


def engine_saying(*reply: int | str, tokenizer: PieceTokenizer = TOKENIZER) -> Engine:
    """Engine that replies with these tokens: pieces by text, bytes and special tokens by id."""
    ids = [tokenizer.id_of(i) if isinstance(i, str) else i for i in reply]
    return engine_for(reply_with(ids, EOS_ID, SIZE), tokenizer=tokenizer)


def heal(prompt: str | Sequence[int], **rest: object) -> Request:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return ask(ids, token_healing=True, **rest)  # type: ignore[arg-type]


def test_the_last_token_is_replaced_and_only_new_bytes_are_text() -> None:
    engine = engine_saying("http://", *b"x.y")
    request = heal("see http:")
    assert request.prompt_ids[-1] == TOKENIZER.id_of("http:")
    texts, end = run_one(engine, request)
    assert texts == ["//", "x", ".", "y"]
    assert end.token_ids == (*b"x.y", EOS_ID), "without the healed token"
    assert end.healed_id == TOKENIZER.id_of("http://")
    assert end.prompt_tokens == len(request.prompt_ids)


def test_the_healed_token_may_be_the_original() -> None:
    texts, end = run_one(engine_saying("http:", *b"ok"), heal("see http:"))
    assert (texts, end.healed_id) == (["o", "k"], TOKENIZER.id_of("http:"))


@pytest.mark.parametrize("seed", range(4))
def test_the_healed_token_begins_with_the_removed_text(seed: int) -> None:
    """Random logits: the first token must begin with `http`, later tokens are free."""
    engine = engine_for(HashRule(seed, vocab_size=SIZE), tokenizer=TOKENIZER)
    sampler = SamplerParams(seed=seed)
    request = heal("see http", sampler=sampler, max_tokens=20, stop_ids=frozenset())
    _, end = run_one(engine, request)
    assert end.healed_id in {TOKENIZER.id_of(piece) for piece in ("http", "http:", "http://")}
    assert len(end.token_ids) == 20
    assert end.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "prompt", [[TOKENIZER.id_of("http")], [65, BOS_ID], [65, EOS_ID]], ids=["one", "bos", "eos"]
)
def test_prompts_that_cannot_be_healed_are_unchanged(prompt: list[int]) -> None:
    texts, end = run_one(engine_saying(*b"ok"), heal(prompt))
    assert (texts, end.healed_id) == (["o", "k"], None)
    assert end.token_ids == (*b"ok", EOS_ID)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_max_tokens_does_not_count_the_healed_token(max_tokens: int) -> None:
    _, end = run_one(engine_saying("http://", *b"xyz"), heal("a http", max_tokens=max_tokens))
    assert end.token_ids == tuple(b"xyz")[:max_tokens]
    assert end.text == ("://" + "xyz"[:max_tokens] if max_tokens else "")


def test_min_tokens_does_not_count_the_healed_token() -> None:
    def rule(history: Sequence[int]) -> Tensor:
        logits = reply_with([TOKENIZER.id_of("http:")], EOS_ID, SIZE)(history)
        logits[97] = 40.0  # second to EOS
        return logits

    for min_tokens, first in ((0, EOS_ID), (1, 97)):
        request = heal("a http", min_tokens=min_tokens, max_tokens=1)
        _, end = run_one(engine_for(rule, tokenizer=TOKENIZER), request)
        assert end.token_ids == (first,)


@pytest.mark.parametrize(
    ("stop", "text"), [(":/", ""), ("/x", ":/"), ("//x.", ":"), ("http", "://x.y"), (":", "")]
)
def test_stop_strings_match_new_text_only(stop: str, text: str) -> None:
    """They may begin in the healed token, but not in the text of the removed token."""
    engine = engine_saying("http://", *b"x.y")
    _, end = run_one(engine, heal("see http", stop_strings=(stop,)))
    assert end.text == text
    assert end.stopped_by == (EOS_ID if stop == "http" else stop)


def test_a_stop_string_in_the_healed_token_alone() -> None:
    _, end = run_one(engine_saying("http://", *b"x"), heal("see http", stop_strings=("://",)))
    assert (end.text, end.token_ids, end.stopped_by) == ("", (), "://")


def test_healing_of_a_cached_prompt() -> None:
    prompt = TOKENIZER.encode("x" * 300 + " http")
    engine = engine_saying("http://", *b"yes")
    cold = run_one(engine, heal(prompt))[1]
    warm = run_one(engine, heal(prompt))[1]
    assert (cold.text, warm.text) == ("://yes",) * 2
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(prompt) - 2)
    plain = run_one(engine, ask(prompt, max_tokens=3))[1]
    assert plain.cached_tokens == len(prompt) - 1, "without the last token, which was replaced"


def test_constraints_start_after_the_healed_token() -> None:
    engine = engine_saying("http://", *b"xy")
    request = heal("see http", constraints=(OneOf(["xy", "z"]),))
    _, end = run_one(engine, request)
    assert (end.text, end.reason) == ("://xy", FinishReason.CONSTRAINT)
    _, end = run_one(engine, heal("see http", constraints=(Regex("[a-x]+"),), max_tokens=4))
    assert end.text.startswith("://x")
    assert "y" not in end.text


class FromPrompt(SelectObject):
    """`SelectObject` whose options begin with the last token of the prompt."""

    def begin(self, prefix: str) -> None:
        assert prefix == "http"
        super().begin("")


def test_an_object_may_see_the_healed_token() -> None:
    vocabulary = Vocabulary(TOKENIZER, SIZE)
    engine = engine_saying("http://", *b"xy")

    def request(option: str) -> Request:
        wrapped = FromPrompt(vocabulary, [option])
        return heal("see http", constraints=(Foreign(wrapped, healed="http"),))

    for option, text in (("http://x", "://x"), ("http:x", ":x"), ("http", "")):
        _, end = run_one(engine, request(option))
        assert (end.text, end.reason) == (text, FinishReason.CONSTRAINT)
    with pytest.raises(ConstraintError, match=r"last prompt token .+\. Turn token healing off"):
        raise run_to_failure(engine, request("://x"))


def test_banned_strings_do_not_reach_into_the_prompt() -> None:
    engine = engine_saying("http://", *b"xy")
    _, end = run_one(engine, heal("see http", banned_strings=("http://", "//"), max_tokens=2))
    assert end.text == "://xy"


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_leading_space_belongs_to_the_prompt(dropped: int) -> None:
    """Also if the tokenizer drops the space at the start of a text."""
    tokenizer = PieceTokenizer(*PIECES, leading_spaces_dropped=dropped)
    engine = engine_saying(" Hello", *b" you", tokenizer=tokenizer)
    request = heal([BOS_ID, tokenizer.id_of(" He")])
    texts, end = run_one(engine, request)
    assert (texts[0], end.text) == ("llo", "llo you")
    _, end = run_one(engine_saying(*b" you", tokenizer=tokenizer), ask([BOS_ID]))
    assert end.text == (" you" if dropped == 0 else "you")


def test_an_incomplete_character_is_healed_by_bytes() -> None:
    tokenizer = PieceTokenizer("é!")
    engine = engine_for(
        reply_with([tokenizer.id_of("é!"), 97], EOS_ID, tokenizer.vocab_size), tokenizer=tokenizer
    )
    texts, _ = run_one(engine, heal([65, "é".encode()[0]]))
    assert texts == ["é!", "a"], "its first byte belongs to the prompt"


def test_hooks_reports_and_drafts_start_after_the_healed_token() -> None:
    seen: list[int] = []

    def hook(token: SampledToken) -> None:
        seen.append(token.token_id)

    engine = engine_for(
        reply_with([TOKENIZER.id_of("http://"), *b"abababababab"], EOS_ID, SIZE),
        tokenizer=TOKENIZER,
        drafter=NgramDrafter(min_match=1),
    )
    request = replace(heal("see http"), hooks=(hook,), report=Report(probabilities=True))
    engine.submit(request)
    *events, end = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert bytes(seen[:-1]) == b"abababababab"
    reported = [token for e in events if isinstance(e, TextEvent) for token in e.tokens]
    assert bytes(token.token_id for token in reported) == b"abababababab"
    assert [token.probability for token in reported] == [1.0] * len(reported)
    assert isinstance(events[0], TextEvent)
    assert (events[0].text, events[0].token_ids) == ("://", ())


def test_cancel_before_the_healed_token_is_sampled() -> None:
    engine = engine_for(reply_with(b"x", EOS_ID, SIZE), tokenizer=TOKENIZER, prefill_chunk=100)
    request = heal([65] * 300 + [TOKENIZER.id_of("http")], sampler=GREEDY)
    engine.submit(request)
    engine.step()
    engine.cancel(request.request_id)
    (end,) = run_all(engine)
    assert isinstance(end, FinishEvent)
    assert (end.token_ids, end.text, end.healed_id) == ((), "", None)
