"""What the engine refuses, at the call and with numbers; it serves the next all the same."""

from __future__ import annotations

import pytest

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.errors import OutOfMemoryError, RequestError
from support.driving import ask, engine_for, run_all, run_one
from support.scripted import ByteTokenizer, ScriptedModel, ScriptedShape, reply_with


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (ask([65] * 100), ("100 tokens", "context 100", "at most 99")),
        (ask([65, 258]), ("prompt token 1", "below 258", "258")),
    ],
    ids=["longer than the context", "outside the vocabulary"],
)
def test_requests_that_the_model_cannot_serve(request_: Request, numbers: tuple[str, ...]) -> None:
    engine = engine_for(reply_with("ok"), max_seq_len=100)
    with pytest.raises(RequestError) as caught:
        engine.submit(request_)
    for number in numbers:
        assert number in str(caught.value)
    assert engine.is_idle
    assert run_one(engine, ask())[1].text == "ok"


@pytest.mark.parametrize("max_tokens", [None, 1, 300])
def test_requests_that_the_cache_can_never_hold(max_tokens: int | None) -> None:
    engine = engine_for(reply_with("ok"), cache_tokens=512)
    prompt = [65] * (513 if max_tokens != 300 else 300)
    with pytest.raises(RequestError, match="do not fit the cache") as caught:
        engine.submit(ask(prompt, max_tokens=max_tokens))
    assert "at most 513 tokens (2 pages)" in str(caught.value)
    assert engine.is_idle


def test_an_id_that_is_still_live_is_refused() -> None:
    engine = engine_for(reply_with("ok"))
    request = ask()
    engine.submit(request)
    with pytest.raises(RequestError, match="has not ended"):
        engine.submit(request)
    run_all(engine)
    engine.submit(request)
    assert isinstance(run_all(engine)[-1], FinishEvent)


@pytest.mark.parametrize(
    "options", [{"cache_tokens": 255}, {"cache_tokens": 0}, {"max_batch": 0}, {"prefill_chunk": 0}]
)
def test_options_that_make_no_engine(options: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        EngineOptions(**options)  # type: ignore[arg-type]


def test_a_cache_larger_than_the_memory_is_refused_with_numbers() -> None:
    shape = ScriptedShape(num_layers=80, num_kv_heads=64, head_dim=256)
    with pytest.raises(OutOfMemoryError, match="MiB"):
        Engine(
            ScriptedModel(reply_with("x"), shape),
            ByteTokenizer(),
            EngineOptions(cache_tokens=2**20),
        )
