"""A failed request is an error of its own client. The streams of other clients run to their end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exl_core.engine.stop import StopMatcher
from support.scripted import reply_with
from support.server import Running, error_of, running, scripted_runtime

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
REPLY = "A reply of many tokens, one for each of its letters. " * 6


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running(scripted_runtime(reply_with(REPLY), ctx_size=1024)) as server:
        yield server


def body(path: str, **fields: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "Q"}], **fields}
    return {"prompt": "Q", "max_tokens": 500, **fields}


def neighbour_of(one: Running, disturb: Callable[[], None]) -> str:
    """Text of a stream that is running while `disturb` is called. It must end with `[DONE]`."""
    text, is_done = "", False
    with one.http.stream("POST", TEXT, json=body(TEXT, stream=True)) as stream:
        for i, line in enumerate(line for line in stream.iter_lines() if line):
            data = line.removeprefix("data: ")
            is_done = data == "[DONE]"
            if not is_done:
                text += "".join(c["text"] for c in json.loads(data).get("choices", []))
            if i == 3:
                disturb()
    assert is_done
    return text


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_invalid_logit_bias_does_not_stop_other_streams(one: Running, path: str) -> None:
    bad = ("-1", "258", "4294967296", "1.5", "1e2", "+1", " 1", "1_0", "01", "\u0661", "", "9" * 99)

    def disturb() -> None:
        for key in bad:
            error = error_of(one.post(path, body(path, logit_bias={key: 1})), 400)
            assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")
            assert "token ids" in error["message"]
        error_of(one.post(path, body(path, logit_bias={"-1": 1}, stream=True)), 400)

    assert neighbour_of(one, disturb) == REPLY


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("kind", [ZeroDivisionError, MemoryError, GeneratorExit])
def test_exception_in_one_reply_does_not_stop_other_streams(
    one: Running, path: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = StopMatcher.feed

    def broken(matcher: StopMatcher, text: str) -> Any:
        if matcher._strings == ("broken",):
            raise kind("scripted")
        return feed(matcher, text)

    monkeypatch.setattr(StopMatcher, "feed", broken)

    def disturb() -> None:
        asked = body(path, stop="broken")
        assert error_of(one.post(path, asked), 500)["type"] == "server_error"
        answer = one.post(path, {**asked, "stream": True})
        assert answer.status_code == 200
        *_, last = [line for line in answer.text.split("\n\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "scripted" not in error["message"] or kind is GeneratorExit

    assert neighbour_of(one, disturb) == REPLY
    one.wait_until_idle()
