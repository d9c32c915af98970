"""Schemas that would take minutes to compile are refused and do not delay other clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from exl_core.constrain.limits import CompileLimits
from support.schemas import SLOW_SCHEMA
from support.scripted import always, certain
from support.server import Running, error_of, running, scripted_runtime

CHAT = "/v1/chat/completions"
TIME_S = 1.5
MAX_GAP_S = 0.5
"""Limit with a margin for busy machines. Before the fix, compiling a slow schema delayed other
streams by minutes."""


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    limits = CompileLimits(time_s=TIME_S)
    runtime = scripted_runtime(
        always(certain(ord("1"))), ctx_size=100_000, cache_tokens=200_000, compile_limits=limits
    )
    runtime.engine.vocabulary.prepare()
    with running(runtime) as server:
        yield server


def body_of(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "response_format": wanted, "max_tokens": 20}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "multipleOf": 62615533}, "#/multipleOf"),
        ({"type": "array", "items": {"minLength": 10**12}}, "#/items/minLength"),
        ({"type": "string", "pattern": "a{10000000}"}, "#/pattern"),
    ],
)
def test_error_names_the_exploding_keyword(
    one: Running, schema: dict[str, Any], place: str
) -> None:
    error = error_of(one.post(CHAT, body_of(schema)), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert error["message"].startswith(f"{place}: ")
    assert "expected at most" in error["message"]


class Stream:
    """A running stream. `longest_s`: longest time between two of its pieces."""

    def __init__(self, one: Running) -> None:
        self.longest_s = 0.0
        self.is_ready, self._stop = threading.Event(), threading.Event()
        self._one = one
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Stream:
        self._thread.start()
        assert self.is_ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _read(self) -> None:
        body = {"prompt": "hi", "max_tokens": 90_000, "stream": True}
        with (
            httpx2.Client(base_url=self._one.url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            last = time.monotonic()
            for line in reply.iter_lines():
                if self._stop.is_set():
                    return
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if self.is_ready.is_set():
                        self.longest_s = max(self.longest_s, now - last)
                    self.is_ready.set()
                    last = now


def test_compiling_a_slow_schema_does_not_delay_other_clients(one: Running) -> None:
    answers: list[httpx2.Response] = []
    slow = threading.Thread(target=lambda: answers.append(one.post(CHAT, body_of(SLOW_SCHEMA))))
    with Stream(one) as stream:
        slow.start()
        slowest_s = 0.0
        while slow.is_alive():
            started = time.monotonic()
            assert one.http.get("/health").json()["status"] == "ok"
            slowest_s = max(slowest_s, time.monotonic() - started)
            time.sleep(0.02)
        slow.join()
        quick = one.post(CHAT, body_of({"type": "integer", "maximum": 999, "minimum": 100}))
    error = error_of(answers[0], 400)
    assert "takes too long to compile (expected at most 1.5 s)" in error["message"]
    assert json.loads(quick.json()["choices"][0]["message"]["content"]) == 111
    assert slowest_s < MAX_GAP_S
    assert stream.longest_s < MAX_GAP_S
