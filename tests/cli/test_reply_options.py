"""Minimum length, healing, banned texts, bias and guidance of `exl generate` and `exl chat`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_cli.reply_options import ReplyOptions
from exl_core.engine.engine import Engine
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from support.scripted import ByteTokenizer
from support.tiny_models import byte_tokenizer

GREEDY = ("--temp", "0")
ALL = ("--min-tokens", 3, "--ban", "xyz", "--ban", "Qq", "--bias", "A=2", "--bias", "9=-inf")
GUIDANCE = ("--negative-prompt", "No.", "--guidance-scale", 1.5)


@pytest.fixture
def generate(exl: Any, tiny_llama_dir: Path) -> Callable[..., Any]:
    """`generate(*args)` on the tiny model, whose tokens are bytes."""
    return lambda *args, **rest: exl("generate", "-m", tiny_llama_dir, "-p", "Hello", *args, **rest)


@pytest.fixture
def answer(generate: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def run(*args: object) -> dict[str, Any]:
        done = generate("--json", *args)
        assert (done.code, done.err) == (0, "")
        return dict(json.loads(done.out))

    return run


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that an engine gets."""
    seen: list[Request] = []
    submit = Engine.submit

    def remember(engine: Engine, request: Request, *rest: Any) -> Any:
        seen.append(request)
        return submit(engine, request, *rest)

    monkeypatch.setattr(Engine, "submit", remember)
    return seen


def test_options_reach_the_request(
    generate: Callable[..., Any], requests: list[Request], exl: Any, tiny_llama_dir: Path
) -> None:
    assert generate("-n", 5, *ALL, "--token-healing").code == 0
    assert exl("chat", tiny_llama_dir, "-n", 5, *ALL, "--token-healing", stdin=b"Hi\n").code == 0
    assert len(requests) == 2
    for request in requests:
        assert request.min_tokens == 3
        assert request.banned_strings == ("xyz", "Qq")
        assert request.token_healing
        assert sorted(request.sampler.token_bias.values()) == [float("-inf"), 2.0]
        assert request.sampler.token_bias[9] == float("-inf")
        assert request.negative_prompt_ids is None


def test_a_banned_text_does_not_occur(answer: Callable[..., dict[str, Any]]) -> None:
    whole = answer("-n", 24, *GREEDY)["text"]
    banned = whole[3:5]
    other = answer("-n", 24, *GREEDY, "--ban", banned)["text"]
    assert banned.lower() in whole.lower()
    assert banned.lower() not in other.lower()


@pytest.mark.parametrize("token", ["A", None], ids=["text", "id"])
def test_a_bias_decides_the_token(token: str | None, answer: Callable[..., Any]) -> None:
    whole = answer("-n", 6, *GREEDY)
    wanted = token or str((whole["token_ids"][0] + 1) % 200 + 3)
    biased = answer("-n", 6, *GREEDY, "--bias", f"{wanted}=1e6")
    if token is None:
        assert biased["token_ids"] == [int(wanted)] * 6
    else:
        assert biased["text"] == token * 6
    first = whole["token_ids"][0]
    assert first not in answer("-n", 6, *GREEDY, "--bias", f"{first}=-inf")["token_ids"]


def test_minimum_length_holds_off_the_end(answer: Callable[..., dict[str, Any]]) -> None:
    eos = ("--bias", "2=1e6")  # </s> of the tiny model
    assert answer("-n", 9, *GREEDY, *eos)["token_ids"] in ([], [2])
    assert answer("-n", 9, *GREEDY, *eos, "--min-tokens", 6)["usage"]["completion_tokens"] >= 6


def test_a_full_context_ends_a_reply_below_its_minimum(answer: Callable[..., Any]) -> None:
    short = answer("-n", 400, "-c", 40, *GREEDY, "--min-tokens", 300)
    assert short["usage"]["total_tokens"] == 40


def test_a_chat_drops_turns_until_the_minimum_is_reached(
    exl: Any, tiny_llama_dir: Path, requests: list[Request]
) -> None:
    """The second reply fills the context. It goes on without the first turn, in both prompts."""
    args = ("-c", 120, "-n", 60, *GREEDY, *GUIDANCE, "--min-tokens", 60)
    assert exl("chat", tiny_llama_dir, *args, stdin=b"Hello\nAgain\n").code == 0
    assert len(requests) >= 2
    for request in requests:
        assert request.negative_prompt_ids is not None
        difference = len(request.negative_prompt_ids) - len(request.prompt_ids)
        assert difference == len("[system]No.")
        assert request.min_tokens == request.max_tokens


def test_guidance_has_a_second_prompt(
    generate: Callable[..., Any], answer: Callable[..., Any], requests: list[Request]
) -> None:
    plain = answer("-n", 12, *GREEDY)["text"]
    neutral = answer("-n", 12, *GREEDY, "--negative-prompt", "No.", "--guidance-scale", 1)["text"]
    assert neutral == plain
    assert requests[-1].negative_prompt_ids is not None
    assert len(requests[-1].negative_prompt_ids) == len("No.")
    strong = ("--negative-prompt", "No.", "--guidance-scale", 4)
    assert answer("-n", 12, *GREEDY, *strong)["text"] != plain
    full = answer("-n", -1, "-c", 300, *strong, "--seed", 1, "--min-tokens", 295)
    assert full["usage"]["total_tokens"] == 300  # the cache holds two sequences


def test_guidance_in_a_conversation_replaces_the_system_prompt(
    exl: Any, tiny_llama_dir: Path, requests: list[Request]
) -> None:
    args = (tiny_llama_dir, "--system", "Yes.", "-n", 4, *GREEDY, *GUIDANCE)
    assert exl("chat", *args, stdin=b"Hi\nMore\n").code == 0
    assert exl("generate", "--chat", "-p", "Hi", *args).code == 0
    tokenizer = byte_tokenizer()

    def text(ids: tuple[int, ...] | None) -> str:
        assert ids is not None
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    prompt, negative = text(requests[0].prompt_ids), text(requests[0].negative_prompt_ids)
    assert "Yes." in prompt
    assert negative == prompt.replace("Yes.", "No.")
    later = text(requests[1].prompt_ids)
    assert text(requests[1].negative_prompt_ids) == later.replace("Yes.", "No.")
    assert requests[2].prompt_ids == requests[0].prompt_ids
    assert requests[2].negative_prompt_ids == requests[0].negative_prompt_ids


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--ban", ""), "--ban is empty"),
        (("--stop", "x", "--stop", ""), "--stop is empty"),
        (("--bias", "A"), "--bias is not a token and a number"),
        (("--bias", "=3"), "--bias is not a token and a number"),
        (("--bias", "A=nan"), "--bias is not a token and a number"),
        (("--bias", "A=inf"), "minus infinity"),
        (("--bias", "AB=1"), "the text 'AB' is not one token"),
        (("--bias", "99999=1"), "a token that the model does not have"),
        (("--bias", "A=1", "--bias", "A=2"), "names one token twice"),
        (("--negative-prompt", "x"), "--negative-prompt without --guidance-scale"),
        (("--guidance-scale", "2"), "--guidance-scale without --negative-prompt"),
        ((*GUIDANCE, "--token-healing"), "token healing does not go with guidance"),
        (("-n", "4", "--min-tokens", "5"), "--min-tokens is more than the limit"),
    ],
)
def test_bad_values(args: tuple[object, ...], expected: str, generate: Callable[..., Any]) -> None:
    assert expected in generate(*args).error_line(2)


def test_values_are_checked_before_a_model_is_loaded() -> None:
    for options in (
        ReplyOptions(bias=["A=x"]),
        ReplyOptions(ban=["\udcff"]),
        ReplyOptions(negative_prompt="\udcff", guidance_scale=2.0),
        ReplyOptions(negative_prompt="x", guidance_scale=float("nan")),
    ):
        with pytest.raises(RequestError):
            options.check(None)


def test_neutral_options_change_no_setting() -> None:
    params = SamplerParams(temperature=0.5, seed=1)
    assert ReplyOptions().sampler(params, ByteTokenizer()) == params


def test_a_continued_reply_is_not_healed_again() -> None:
    options = ReplyOptions(min_tokens=5, token_healing=True)
    assert options.fields() == {
        "min_tokens": 5,
        "banned_strings": (),
        "token_healing": True,
    }
    assert options.fields(3)["min_tokens"] == 2
    assert options.fields(9)["min_tokens"] == 0
    assert not options.fields(3)["token_healing"]


@pytest.mark.thorough
def test_healing_repairs_a_trailing_space(exl: Any) -> None:
    prompt = "The capital of France is Paris. The capital of Italy is "
    args = ("-p", prompt, "-n", 3, *GREEDY)
    assert not exl("generate", *args).out.startswith("Rome")
    assert exl("generate", *args, "--token-healing").out.startswith("Rome")
