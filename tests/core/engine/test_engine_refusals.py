"""Refusals of the engine: at the call, with numbers, and without effect on later requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_core.arch.layers import KVShape
from exl_core.constrain.choice import StartsWith
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Report, Request
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.compatible import check_same_vocabulary
from support.driving import ask, engine_for, run_all, run_one
from support.scripted import (
    EOS_ID,
    ByteTokenizer,
    PieceTokenizer,
    ScriptedModel,
    ScriptedShape,
    reply_with,
)

SPAN, WIDE = EmbeddedSpan(torch.zeros(2, 1)), EmbeddedSpan(torch.zeros(2, 3))
GUIDANCE = {"sampler": SamplerParams(cfg_scale=2), "negative_prompt_ids": (1,)}


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (ask([65] * 100), ("100 tokens", "context 100", "at most 99")),
        (ask([65, 258]), ("prompt token 1", "below 258", "258")),
        (ask([65, SPAN.first_id + 2]), ("prompt token 1", "stands for no vector")),
        (ask(SPAN.token_ids), ("prompt token 0", "Give the span with the request")),
        (ask(SPAN.token_ids, embeddings=(WIDE,)), ("prompt token 0", "stands for no vector")),
        (ask(WIDE.token_ids, embeddings=(WIDE,)), ("another model", "[n, 1]", "[2, 3]")),
        (ask(sampler=SamplerParams(allowed_tokens=frozenset({300}))), ("allowed", "below 258")),
        (
            ask(sampler=SamplerParams(allowed_tokens=[1, 258], banned_tokens=[1])),  # type: ignore[arg-type]
            ("allowed", "below 258"),
        ),
        (ask(sampler=SamplerParams(allowed_tokens=frozenset({1, 258}))), ("allowed", "258")),
        (ask(sampler=SamplerParams(token_bias={1: 1.0, 258: 1.0})), ("token_bias", "below 258")),
        (ask(sampler=SamplerParams(banned_tokens=frozenset({258}))), ("banned_tokens", "258")),
        (ask(sampler=SamplerParams(dry_breakers=frozenset({258}))), ("dry_breakers", "258")),
        (ask(sampler=SamplerParams(xtc_protected=frozenset({258}))), ("xtc_protected", "258")),
        (ask(stop_ids=frozenset({EOS_ID, 258})), ("stop_ids", "below 258", "got 258")),
        (ask(constraints=(Regex("["),)), ("regular expression",)),
        (ask(constraints=(JsonSchema("{"),)), ("JSON",)),
        (ask(constraints=(StartsWith("a"), Regex("("))), ("regular expression",)),
    ],
    ids=[
        "longer than the context",
        "outside the vocabulary",
        "behind a span",
        "no span",
        "another span",
        "wide vectors",
        "nothing allowed",
        "nothing left of what is allowed",
        "one allowed too many",
        "unknown bias",
        "unknown ban",
        "unknown breaker",
        "unknown protected",
        "unknown stop",
        "no regex",
        "no schema",
        "one of two",
    ],
)
def test_requests_that_the_model_cannot_serve_are_refused(
    request_: Request, numbers: tuple[str, ...]
) -> None:
    engine = engine_for(reply_with("ok"), max_seq_len=100)
    calls = (engine.compile,) if request_.constraints else (engine.check, engine.submit)
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call(request_)
        for number in numbers:
            assert number in str(caught.value)
    assert engine.is_idle
    assert run_one(engine, ask())[1].text == "ok"


def test_settings_may_not_hold_ids_of_vocabulary_padding() -> None:
    """A stop token in the padding is harmless and accepted."""
    model = ScriptedModel(reply_with("ok", vocab_size=262), ScriptedShape(262))
    engine = Engine(model, ByteTokenizer())
    with pytest.raises(RequestError, match=r"token_bias holds a token id .*below 258.*260"):
        engine.submit(ask(sampler=SamplerParams(token_bias={260: 1.0})))
    assert run_one(engine, ask(stop_ids=frozenset({EOS_ID, 261})))[1].text == "ok"
    with pytest.raises(RequestError, match=r"stop_ids holds a token id .*below 262"):
        engine.submit(ask(stop_ids=frozenset({262})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_strings": ("",)}, "stop_strings .* no text can match"),
        ({"stop_strings": ("a", 5)}, "stop_strings .* no text can match"),
        ({"banned_strings": ("ok", "")}, "banned_strings .* no text can match"),
        ({"max_tokens": -1}, "max_tokens is out of range"),
        ({"max_tokens": 2.5}, "max_tokens is out of range"),
        ({"max_tokens": True}, "max_tokens is out of range"),
        ({"min_tokens": -1}, "min_tokens is out of range"),
        ({"min_tokens": 51}, "min_tokens is more than max_tokens"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [-1]}, "no token id"),
        ({"prompt": [1.0]}, "no token id"),
        ({"stop_ids": frozenset({-5})}, "stop_ids holds"),
        ({"stop_ids": frozenset({True})}, "stop_ids holds"),
        ({"stop_ids": ("5",)}, "stop_ids holds"),
        ({"hooks": (3,)}, "hooks has the wrong type"),
        ({"prefer_eos": True, "stop_ids": frozenset()}, "no stop token to prefer"),
        ({"negative_prompt_ids": (1,)}, "negative prompt and a scale"),
        ({"sampler": SamplerParams(cfg_scale=2)}, "negative prompt and a scale"),
        ({**GUIDANCE, "negative_prompt_ids": ()}, "prompt is empty"),
        ({**GUIDANCE, "token_healing": True}, "healing does not go with guidance"),
    ],
)
def test_invalid_requests_are_refused_at_construction(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(**settings)
    with pytest.raises(TypeError, match="max_tokenz"):
        ask(max_tokenz=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatur": 1.0}, "unknown setting 'temperatur'.*temperature"),
        ({"temperature": -1}, "temperature is out of range"),
        ({"top_p": 0}, "top_p is out of range"),
        ({"top_p": float("nan")}, "top_p is out of range"),
        ({"seed": "7"}, "seed is out of range"),
        ({"cfg_scale": float("inf")}, "cfg_scale is out of range"),
        ({"allowed_tokens": []}, "allowed_tokens is out of range"),
        ({"token_bias": {"a": 1}}, "token_bias is out of range"),
    ],
)
def test_invalid_sampler_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplerParams.from_mapping(settings)
    if "token_bias" not in settings:  # `from_mapping` takes ids as text
        with pytest.raises(RequestError, match=message):
            SamplerParams(**settings)
    with pytest.raises(RequestError, match="top_tokens is out of range"):
        Report(top_tokens=-1)


def test_a_prompt_with_its_embedded_span_is_served() -> None:
    request = ask([65, *SPAN.token_ids, 66], embeddings=(SPAN,), token_healing=True)
    _, end = run_one(engine_for(reply_with("Bok")), request)
    assert (end.text, end.prompt_tokens) == ("ok", 4)


def test_a_draft_model_with_another_vocabulary_is_refused() -> None:
    check_same_vocabulary(PieceTokenizer("ab", "cd"), PieceTokenizer("ab"))
    with pytest.raises(RequestError, match="another vocabulary: token 258 differs"):
        check_same_vocabulary(PieceTokenizer("ab"), PieceTokenizer("ba"))


@pytest.mark.parametrize("max_tokens", [None, 1, 300])
def test_requests_that_never_fit_the_cache_are_refused(max_tokens: int | None) -> None:
    engine = engine_for(reply_with("ok"), cache_tokens=512)
    prompt = [65] * (513 if max_tokens != 300 else 300)
    with pytest.raises(RequestError, match="do not fit the cache") as caught:
        engine.submit(ask(prompt, max_tokens=max_tokens))
    assert "at most 513 tokens (2 pages)" in str(caught.value)
    assert engine.is_idle


def test_the_id_of_a_live_request_is_refused() -> None:
    engine = engine_for(reply_with("ok"))
    request = ask()
    engine.submit(request)
    with pytest.raises(RequestError, match="has not ended"):
        engine.submit(request)
    engine.cancel(request.request_id)
    with pytest.raises(RequestError, match="has not ended"):
        engine.submit(request)  # its end was not returned yet
    run_all(engine)
    engine.submit(request)
    assert isinstance(run_all(engine)[-1], FinishEvent)


def test_the_cache_cannot_be_cleared_while_requests_run() -> None:
    engine = engine_for(reply_with("ok"))
    request = ask()
    engine.submit(request)
    for call in (engine.defragment, engine.forget_cache):
        with pytest.raises(RequestError, match="cache is in use"):
            call()
    run_all(engine)
    engine.forget_cache()
    assert engine.defragment() == 0
    assert run_one(engine, ask())[1].cached_tokens == 0


@pytest.mark.parametrize(
    "options",
    [
        {"cache_tokens": 255},
        {"cache_tokens": 0},
        {"cache_tokens": "512"},
        {"max_batch": 0},
        {"prefill_chunk": 0},
        {"snapshots": -1},
        {"lazy_cache": "no"},
        {"adapt_drafts": None},
        {"kv_format": "q8"},
        {"compile_limits": 5},
    ],
)
def test_invalid_engine_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        EngineOptions(**options)


def test_a_cache_larger_than_the_memory_is_refused_with_numbers() -> None:
    shape = ScriptedShape(kv_shapes=(KVShape(64, 256),) * 80)
    with pytest.raises(OutOfMemoryError, match="MiB"):
        Engine(
            ScriptedModel(reply_with("x"), shape),
            ByteTokenizer(),
            EngineOptions(cache_tokens=2**20),
        )
