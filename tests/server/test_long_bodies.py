"""Bodies of 8 MB are refused in time and delay neither /health nor other streams."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import load_tokenizer
from support.scripted import Rule, always, certain
from support.server import LIMIT_S, Running, running, scripted_runtime

CTX_SIZE = 1024
SIZE = 8 * 1024 * 1024 - 64
MAX_DELAY_S = 0.5
"""Limit with a margin for busy machines; an idle one needs less than 0.1 s. Before texts were
bounded, one body of words delayed /health by seconds."""
WORDS = "the quick brown fox jumps over the lazy dog and then "


def filled(before: str, unit: str, after: str) -> bytes:
    """JSON of nearly `SIZE` bytes that repeats `unit`."""
    count = (SIZE - len(before) - len(after)) // len(unit.encode())
    return (before + unit * count + after).encode()


def text(field: str, unit: str) -> bytes:
    return filled(f'{{"{field}": "', unit, '"}')


def message(unit: str) -> bytes:
    return filled('{"messages": [{"role": "user", "content": "', unit, '"}]}')


CALL = '{"id": "x", "type": "function", "function": {"name": "f", "arguments": "['
BODIES: dict[str, tuple[str, bytes, int, str]] = {
    name: (path, body, status, code)
    for name, path, body, status, code in (
        ("words", "/v1/completions", text("prompt", WORDS), 400, "context_length_exceeded"),
        ("one word", "/v1/completions", text("prompt", "a"), 400, "context_length_exceeded"),
        ("newlines", "/v1/completions", text("prompt", "a\\n"), 400, "context_length_exceeded"),
        ("escapes", "/v1/completions", text("prompt", "\\u00e9"), 400, "context_length_exceeded"),
        ("spaces", "/v1/completions", text("prompt", " "), 400, "context_length_exceeded"),
        (
            "many texts",
            "/v1/completions",
            filled('{"prompt": ["', WORDS * 1000 + '", "', '"]}'),
            400,
            "context_length_exceeded",
        ),
        (
            "ids",
            "/v1/completions",
            filled('{"prompt": [1', ", 1", "]}"),
            400,
            "context_length_exceeded",
        ),
        ("chat", "/v1/chat/completions", message(WORDS), 400, "context_length_exceeded"),
        (
            "long turns",
            "/v1/chat/completions",
            filled(
                '{"messages": [',
                f'{{"role": "assistant", "content": "{WORDS * 2000}"}}, ',
                '{"role": "user", "content": "hi"}]}',
            ),
            400,
            "context_length_exceeded",
        ),
        (
            "many turns",
            "/v1/chat/completions",
            filled('{"messages": [', '{"role": "user", "content": ""}, ', "1]}"),
            413,
            "request_too_large",
        ),
        (
            "arguments",
            "/v1/chat/completions",
            filled(
                '{"messages": [{"role": "assistant", "tool_calls": [' + CALL, "[1], ", '1]"}}]}]}'
            ),
            413,
            "request_too_large",
        ),
        (
            "fields",
            "/v1/chat/completions",
            filled('{"messages": [{', '"a": 1, ', '"b": 1}]}'),
            413,
            "request_too_large",
        ),
        (
            "lists",
            "/v1/completions",
            filled('{"prompt": [', "[1],", "[1]]}"),
            413,
            "request_too_large",
        ),
        ("tokenize", "/tokenize", text("prompt", WORDS), 400, "context_length_exceeded"),
        ("encode", "/v1/token/encode", text("text", WORDS), 400, "context_length_exceeded"),
        (
            "decode",
            "/detokenize",
            filled('{"tokens": [1', ", 1", "]}"),
            400,
            "context_length_exceeded",
        ),
    )
}


def endless(token_id: int, vocab_size: int) -> Rule:
    rule = always(certain(token_id, vocab_size))

    def slow(history: Any) -> Any:
        time.sleep(0.005)
        return rule(history)

    return slow


@pytest.fixture(scope="module")
def one(smollm2_path: Path) -> Iterator[Running]:
    tokenizer: Tokenizer = load_tokenizer(smollm2_path)
    rule = endless(tokenizer.encode(" a")[0], tokenizer.vocab_size)
    with running(scripted_runtime(rule, tokenizer=tokenizer, ctx_size=CTX_SIZE)) as server:
        yield server


def post(one: Running, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Send a request over a raw socket. A client library in this process would itself hold the
    GIL."""
    host, port = one.url.removeprefix("http://").split(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode())
        connection.sendall(body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), json.loads(content)


@dataclass
class Watch:
    """Measurements of requests for /health every few milliseconds, and of a continuous stream.

    delays  seconds until /health answered
    gaps    seconds between two pieces of the stream
    """

    delays: list[float] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)
    gaps: list[float] = field(default_factory=list)


@contextmanager
def watching(one: Running) -> Iterator[Watch]:
    watch = Watch()
    is_over = threading.Event()

    def health() -> None:
        while not is_over.is_set():
            started = time.perf_counter()
            watch.statuses.add(one.http.get("/health").status_code)
            watch.delays.append(time.perf_counter() - started)
            time.sleep(0.005)

    def stream() -> None:
        while not is_over.is_set():
            body = {"prompt": "a", "max_tokens": 200, "stream": True}
            last = None
            with one.http.stream("POST", "/v1/completions", json=body) as reply:
                for line in reply.iter_lines():
                    now = time.perf_counter()
                    if last is not None and line:
                        watch.gaps.append(now - last)
                    last = now
                    if is_over.is_set():
                        break

    threads = [threading.Thread(target=work) for work in (health, stream)]
    for thread in threads:
        thread.start()
    try:
        while len(watch.gaps) < 5:
            time.sleep(0.01)
        yield watch
    finally:
        is_over.set()
        for thread in threads:
            thread.join(LIMIT_S)


@pytest.mark.parametrize("name", BODIES)
def test_long_body_does_not_delay_health_or_streams(one: Running, name: str) -> None:
    path, body, status, code = BODIES[name]
    with watching(one) as watch:
        found, answer = post(one, path, body)
        time.sleep(0.05)
    assert (found, answer["error"]["code"]) == (status, code), answer["error"]["message"][:300]
    assert watch.statuses == {200}
    assert max(watch.delays) < MAX_DELAY_S
    assert max(watch.gaps) < MAX_DELAY_S
