"""Contract of all generators: the reply to one prompt, its end, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from exl_core.constrain.choice import OneOf
from exl_core.constrain.regex import Regex
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import SampledToken
from exl_core.engine.request import Report
from exl_core.errors import ExlError, RequestError
from exl_core.generate.base import BaseGenerator
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.generate.streaming import StreamingGenerator
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError
from support.generators import GREEDY, WAYS, Counter, Driver, assert_empty, driver, loaded_around
from support.scripted import EOS_ID, HashRule, Rule, reply_with

Make = Callable[[Rule], Driver]
DETAILED = [way for way in WAYS if way != "base"]  # generators that return more than the text


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest) -> Make:
    return partial(driver, request.param)


@pytest.fixture
def hello(make: Make) -> Driver:
    return make(reply_with("hello"))


@pytest.mark.parametrize("kind", [BaseGenerator, StreamingGenerator, DynamicGenerator])
def test_wrong_arguments_of_a_generator_are_named(kind: type[Any]) -> None:
    with pytest.raises(RequestError, match=r"loaded .*LoadedModel, got 'smollm2'.*load_model"):
        kind("smollm2")
    with pytest.raises(RequestError, match=r"options .*expected EngineOptions or None.*got 4096"):
        kind(loaded_around(reply_with("hello")), 4096)
    with pytest.raises(RequestError, match=r"engine .*expected Engine or None.*got 5"):
        kind(loaded_around(reply_with("hello")), engine=5)
    other = kind(loaded_around(reply_with("hello"))).engine
    with pytest.raises(RequestError, match="the engine is that of another model"):
        kind(loaded_around(reply_with("hello")), engine=other)


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_generators_of_one_engine_get_their_own_results(num_tokens: int) -> None:
    dynamic = DynamicGenerator(loaded_around(HashRule()), EngineOptions(cache_tokens=4096))
    other = DynamicGenerator(dynamic.loaded, engine=dynamic.engine)
    streaming = StreamingGenerator(dynamic.loaded, engine=dynamic.engine)
    limits: Any = {"stop": (), "sampler": GREEDY}
    alone = dynamic.generate("Q:", max_tokens=num_tokens, completion_only=True, **limits)
    streaming.begin("Q:", max_tokens=num_tokens, **limits)
    first = streaming.step().chunk
    job = other.enqueue(other.request("Q:", max_tokens=num_tokens, **limits))
    assert dynamic.generate("R:", max_tokens=12, **limits) is not None
    assert first + "".join(result.chunk for result in streaming) == alone
    while other.num_remaining_jobs:
        other.iterate()
    assert job.text == alone
    assert_empty(dynamic)


def test_a_reply_ends_at_eos_and_its_id_is_free_again(hello: Driver) -> None:
    for _ in range(2):
        assert hello.reply("Q:", sampler=GREEDY, request_id="mine").text == "hello"
        assert_empty(hello.generator)


def test_max_tokens_and_stop_tokens_end_a_reply(hello: Driver) -> None:
    assert hello.reply("Q:", max_tokens=3).text == "hel"
    assert hello.reply("Q:", stop=ord("l")).text == "he"
    text = hello.reply("Q:", stop=(), max_tokens=9).text
    assert text == "hellohel", "without stop conditions EOS adds no text and does not end the reply"


@pytest.mark.parametrize("make", DETAILED, indirect=True)
def test_chunks_join_to_the_whole_reply(make: Make) -> None:
    reply = make(reply_with("aé!")).reply("Q:", sampler=GREEDY)
    assert reply.finish is not None
    assert reply.text == reply.finish.text == "aé!"
    assert bytes(reply.token_ids).decode() == "aé!"
    assert reply.finish.token_ids == (*"aé!".encode(), EOS_ID)


@pytest.mark.parametrize("make", DETAILED, indirect=True)
def test_a_prompt_may_be_token_ids(hello: Driver) -> None:
    assert hello.reply(list(b"Q:")).text == "hello"
    for wrong in ([1.5], ["a"], [-1], 7, None):
        with pytest.raises(RequestError):
            hello.reply(wrong)
    assert_empty(hello.generator)


def test_hooks_see_and_replace_tokens(hello: Driver) -> None:
    seen: list[int] = []

    def shout(token: SampledToken) -> int | None:
        seen.append(token.token_id)
        return ord("L") if token.token_id == ord("l") else None

    text = hello.reply("Q:", max_tokens=4, hooks=[shout, lambda _: None]).text
    assert text == "heLh", "the scripted model restarts after a token that it did not produce"
    assert bytes(seen) == b"helh"


def test_constraints_restrict_and_end_the_reply(make: Make) -> None:
    one = make(HashRule(2))
    text = one.reply("Q:", constraints=Regex("[0-9]{4}")).text
    assert text.isdigit()
    assert len(text) == 4
    both = (Regex("[a-z]+"), OneOf(("yes", "No", "maybe")))
    assert one.reply("Q:", constraints=both).text in ("yes", "maybe")


def test_a_banned_string_is_suppressed(make: Make) -> None:
    def rule(history: Sequence[int]) -> Any:
        logits = reply_with("so BAD it is")(history)
        logits[ord("-")] = 40.0
        return logits

    one = make(rule)
    reply = one.reply("Q:", sampler=GREEDY, banned_strings="bad", max_tokens=8)
    assert reply.text.startswith("so -")
    assert "BAD" not in reply.text
    if one.name in ("streaming", "dynamic", "async"):
        assert reply.suppressed == ("BAD",)
        assert bytes(reply.token_ids).decode() == reply.text


def test_healing_returns_only_text_beyond_the_removed_token(hello: Driver) -> None:
    assert hello.reply("Q:", token_healing=True, sampler=GREEDY).text == "hello"


@pytest.mark.parametrize("make", DETAILED, indirect=True)
def test_reports_have_probabilities_top_tokens_and_logits(make: Make) -> None:
    report = Report(probabilities=True, top_tokens=3, logits=True)
    reply = make(reply_with("hi")).reply("Q:", sampler=SamplerParams(seed=1), report=report)
    assert reply.finish is not None
    assert [token.token_id for token in reply.tokens] == list(b"hi")
    for token in reply.tokens:
        assert token.token_id == token.top[0][0]
        assert token.probability == pytest.approx(1.0)
        assert len(token.top) == 3
        assert token.logits is not None
        assert token.logits[token.token_id] == 50.0
    assert [token.token_id for token in reply.finish.tokens] == [EOS_ID]


def test_the_next_turn_computes_only_new_tokens(hello: Driver) -> None:
    prompt = "x" * 300 + "Q:"
    text = hello.reply(prompt, sampler=GREEDY).text
    hello.model.rows_of_pass.clear()
    reply = hello.reply(f"{prompt}{text} Q:", sampler=GREEDY)
    assert hello.model.rows_of_pass[0] < 10, "the partly filled page is copied, not computed"
    if reply.finish is not None:
        assert reply.finish.cached_tokens >= len(prompt)
        new = reply.finish.prompt_tokens - reply.finish.cached_tokens
        assert hello.model.rows_of_pass[0] == new


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
def test_a_failed_pass_is_raised_and_the_next_reply_is_correct(
    hello: Driver, error: BaseException
) -> None:
    def fail() -> None:
        hello.model.failure = error

    wrapped = hello.name == "async" and isinstance(error, KeyboardInterrupt)
    with pytest.raises(ExlError if wrapped else type(error)):
        hello.reply("Q:", sampler=GREEDY, hooks=Counter(2, fail))
    assert_empty(hello.generator)
    assert hello.reply("Q:", sampler=GREEDY).text == "hello"


def test_a_failed_request_raises_its_own_error(make: Make) -> None:
    def rule(history: Sequence[int]) -> Any:
        return reply_with("hello")(history) * (
            float("nan") if history[-2:] == [ord("!"), ord("h")] else 1.0
        )

    one = make(rule)
    with pytest.raises(LogitsError, match="NaN"):
        one.reply("!", sampler=GREEDY)
    assert_empty(one.generator)
    assert one.reply("Q:", sampler=GREEDY).text == "hello"


def test_warmup_leaves_no_state_and_refuses_a_busy_engine(hello: Driver) -> None:
    hello.generator.warmup()
    assert_empty(hello.generator)
    assert hello.generator.engine.pool.describe() == "...."
    hello.generator.engine.submit(hello.generator.request("other", request_id="other"))
    with pytest.raises(RequestError, match="busy"):
        hello.generator.warmup()
    assert hello.generator.engine.live_requests == {"other"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"constraints": Regex("((")}, "regular expression"),
        ({"temprature": 1}, "sampler=SamplerParams.temperature="),
        ({"top_p": 0.5}, "sampler=SamplerParams.top_p="),
        ({"banned_string": "x"}, "Did you mean 'banned_strings'"),
        ({"filters": ()}, "no such setting: filters"),
        ({"stop_ids": ()}, "no such setting"),
        ({"prompt_ids": ()}, "no such setting"),
        ({"stop_conditions": []}, "no such setting"),
        ({"sampler": {"temperature": 0}}, "a SamplerParams"),
        ({"sampler": None}, "a SamplerParams"),
        ({"report": True}, "a Report"),
        ({"constraints": "[0-9]"}, "constraints has the wrong type"),
        ({"constraints": Regex}, "constraints has the wrong type"),
        ({"adapters": "folder"}, "load_adapter"),
        ({"hooks": 5}, "callables"),
        ({"banned_strings": 5}, "strings"),
        ({"banned_strings": ("",)}, "at least one character"),
        ({"token_healing": "yes"}, "a bool"),
        ({"prefer_eos": True, "stop": ()}, "prefer_eos"),
        ({"max_tokens": -1}, "(max|num)_tokens is out of range"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is more"),
        ({"request_id": 3}, "a str"),
        ({"sampler": SamplerParams(cfg_scale=2.0)}, "guidance"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_at_the_call(
    hello: Driver, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        hello.reply("Q:", **settings)
    assert_empty(hello.generator)
    assert hello.reply("Q:", max_tokens=5).text == "hello"
