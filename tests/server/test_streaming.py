"""Bytes of event streams: events built from templates equal fully serialized ones, over HTTP 1.0,
HTTP 1.1 and plain ASGI. Clients that do not read are disconnected."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from exl_cli.server import streaming
from exl_cli.server.app import create_app
from exl_cli.server.errors import to_json
from exl_cli.server.limits import Limits
from exl_cli.server.models import ModelHost
from exl_cli.server.streaming import TextEvents
from support.profiles import first_by_default
from support.scripted import always, certain, reply_with
from support.server import LIMIT_S, Running, running, scripted_runtime

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SAID = 'A "quote", a \\ and a\nline, é, €, 💥, \u2028 and \x7f.'
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def ask(path: str, *, n: int = 1, **fields: Any) -> bytes:
    asked = {"messages": [{"role": "user", "content": "Q"}]} if path == CHAT else {"prompt": "Q"}
    return json.dumps({**asked, "stream": True, "n": n, **fields}).encode()


def connect(one: Running, path: str, body: bytes, version: bytes = b"1.1") -> socket.socket:
    """A socket that has sent the request and read nothing."""
    host, port = one.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect((host, int(port)))
    connection.sendall(
        b"POST %b HTTP/%b\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), version, len(body), body)
    )
    return connection


def answer_to(one: Running, path: str, body: bytes, version: bytes = b"1.1") -> tuple[bytes, bytes]:
    """Head and undecoded body of the answer."""
    with connect(one, path, body, version) as connection:
        answer = rest_of(connection)
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.lower(), rest


def rest_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def joined(chunked: bytes) -> bytes:
    """Decode a chunked body."""
    body = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        chunked = rest[length + 2 :]
    return body


def events_of(body: bytes) -> list[bytes]:
    *events, end = body.split(b"\n\n")
    assert end == b"" and events[-1] == b"data: [DONE]"
    return [event.removeprefix(b"data: ") for event in events[:-1]]


@given(st.text(st.characters()), st.text(st.characters()))
def test_text_events_equal_fully_serialized_events(text: str, model: str) -> None:
    def event(text: str) -> dict[str, object]:
        return {"model": model, "choices": [{"delta": {"content": text}, "logprobs": None}]}

    assert TextEvents(event).of(text) == to_json(event(text))


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("n", first_by_default([2, 1]))
def test_events_of_both_serializers_are_equal(path: str, n: int) -> None:
    """Events with log probabilities use the full serializer, others use templates. Apart from the
    log probabilities they are equal."""
    reply = f"<think>why{SAID}</think>{SAID}"
    with running(scripted_runtime(reply_with(reply), template=TEMPLATE)) as one:

        def events(**fields: object) -> list[dict[str, Any]]:
            body = ask(path, n=n, max_tokens=200, stream_options={"include_usage": True}, **fields)
            *events, _usage = map(json.loads, events_of(joined(answer_to(one, path, body)[1])))
            return sorted(events, key=lambda event: event["choices"][0]["index"])

        quick, long = events(), events(logprobs=True if path == CHAT else 0)
    assert len(quick) == len(long) > 2 * n
    for event, other in zip(quick, long, strict=True):
        choice, expected = event["choices"][0], other["choices"][0]
        assert list(event) == list(other) and list(choice) == list(expected)
        assert choice["logprobs"] is None
        assert {**choice, "logprobs": 0} == {**expected, "logprobs": 0}
    name = "text" if path == TEXT else "delta"
    first = [event["choices"][0] for event in quick if event["choices"][0]["index"] == 0]
    if path == TEXT:
        assert "".join(one[name] for one in first) == reply
    else:
        assert "".join(one[name].get("content", "") for one in first) == SAID
        assert "".join(one[name].get("reasoning_content", "") for one in first) == f"why{SAID}"


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_http_1_0_client_gets_events_without_chunks(path: str) -> None:
    with running(scripted_runtime(reply_with(SAID))) as one:
        head, body = answer_to(one, path, ask(path, max_tokens=100), b"1.0")
        assert b"chunked" not in head and b"connection: close" in head
        in_chunks, chunked = answer_to(one, path, ask(path, max_tokens=100))
        assert b"transfer-encoding: chunked" in in_chunks
    texts = [
        [json.loads(event)["choices"] for event in events_of(one)]
        for one in (body, joined(chunked))
    ]
    assert texts[0] == texts[1]


def test_events_over_plain_asgi_messages() -> None:
    runtime = scripted_runtime(reply_with(SAID))
    body = ask(TEXT, max_tokens=100)
    with running(runtime) as one:
        expected = events_of(joined(answer_to(one, TEXT, body)[1]))
    host = ModelHost(scripted_runtime(reply_with(SAID)))
    coming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return coming.pop() if coming else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario() -> None:
        scope = {"type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode()}
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope |= {"query_string": b"", "headers": headers, "scheme": "http", "http_version": "1.1"}
        await create_app(host)(scope, receive, send)
        await host.close()

    asyncio.run(scenario())
    assert sent[0]["status"] == 200
    assert [one["more_body"] for one in sent[1:]] == [True] * (len(sent) - 2) + [False]
    events = events_of(b"".join(one["body"] for one in sent[1:]))
    assert [json.loads(event)["choices"] for event in events] == [
        json.loads(event)["choices"] for event in expected
    ]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_pieces_hold_back_partial_characters_and_stop_strings(path: str) -> None:
    """One token per byte: most characters and the stop string span several tokens."""
    with running(scripted_runtime(reply_with("é€💥 a STOP is no ST💥P b"))) as one:
        body = ask(path, max_tokens=100, stop=["never", "ST💥P"])
        events = map(json.loads, events_of(joined(answer_to(one, path, body)[1])))
        choices = [event["choices"][0] for event in events]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    ]
    assert "".join(texts) == "é€💥 a STOP is no "
    assert "ST" not in texts and "S" not in texts
    assert choices[-1]["finish_reason"] == "stop"


def slowly(history: Any) -> Any:
    """Takes its time, as a long prompt on a CPU does."""
    time.sleep(0.15)
    return reply_with("ok")(history)


@pytest.mark.parametrize(
    "path", [TEXT, CHAT, "/v1/messages", "/v1/responses", "/completion", "/api/chat"]
)
def test_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Proxies close a connection that is silent for a minute. Lines of JSON have no comments."""
    monkeypatch.setattr(streaming, "PING_S", 0.03)
    body = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 9, "stream": True}
    if path in (TEXT, "/completion"):
        body = {"prompt": "Q", "max_tokens": 9, "stream": True}
    elif path == "/v1/responses":
        body = {"input": "Q", "stream": True}
    with running(scripted_runtime(slowly, template=TEMPLATE)) as one:
        text = one.post(path, body).text
        if path == CHAT:
            made: Any = one.openai().chat.completions.create(model="x", **body)  # type: ignore[call-overload]
            said = [piece.choices[0].delta.content or "" for piece in made]
            assert "".join(said) == "ok", "the client ignores comments"
    assert text.count(": ping\n\n") >= 3 or path == "/api/chat"
    assert (": ping" in text) == (path != "/api/chat")


def test_log_says_that_a_client_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "exl.server")
    with running(scripted_runtime(always(certain(ord("a"))))) as one:
        body = json.loads(ask(TEXT, max_tokens=1000))
        with one.http.stream("POST", TEXT, json=body) as answer:
            next(answer.iter_lines())
        one.wait_until_idle()
        end = time.monotonic() + LIMIT_S
        while not caplog.records:
            assert time.monotonic() < end
            time.sleep(0.01)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("POST /v1/completions 200") and line.endswith("the client left")


def test_client_that_does_not_read_is_disconnected_and_frees_its_pages() -> None:
    """Covers a stream, a complete answer that the client does not read, and the server's end."""
    with running(
        scripted_runtime(always(certain(ord("a")))),
        limits=Limits(send_s=0.5),
    ) as one:
        for listening in one.server.servers[0].sockets:  # accepted sockets inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        long = ask(TEXT, max_tokens=300, logprobs=20, n=4)
        whole = long.replace(b'"stream": true', b'"stream": false')
        with connect(one, TEXT, long) as streaming, connect(one, TEXT, whole) as waiting:
            assert one.http.get("/health").status_code == 200
            one.wait_until_idle()
            deadline = time.monotonic() + LIMIT_S
            while len(one.server.server_state.connections) > 1:  # the one of `one.http` stays
                assert time.monotonic() < deadline
                time.sleep(0.01)
            taken = [rest_of(streaming), rest_of(waiting)]
            assert not taken[0].endswith(b"0\r\n\r\n") and b"[DONE]" not in taken[0]
            assert not taken[1].endswith(b"}")
        resident = one.host.resident
        assert resident is not None
        pool = resident.runtime.engine.pool
        assert pool.num_available == pool.num_pages
