"""Random bodies generated from the OpenAPI document, hostile clients and hostile templates.

Each gets a well-formed answer and causes no internal error, and the server keeps running.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from exl_cli.server.app import create_app
from exl_cli.server.models import ModelHost
from exl_cli.server.settings import COMPLETION
from support.profiles import examples
from support.scripted import reply_with
from support.server import LIMIT_S, Running, error_of, running, scripted_runtime

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CTX_SIZE = 96
DOCUMENT = create_app(ModelHost(scripted_runtime(reply_with("x")))).openapi()
SERVED: dict[str, Any] = {
    "/detokenize": {"tokens": [104, 105]},
    "/tokenize": {"content": "hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/token/decode": {"tokens": [104, 105]},
    "/v1/token/encode": {"text": "hi"},
    "/api/chat": {"messages": HI},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/api/generate": {"prompt": "hi"},
    "/api/show": {"model": "scripted"},
    "/apply-template": {"messages": HI},
    "/completion": {"prompt": "hi"},
    "/infill": {"input_prefix": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho", {"text": "hey"}]},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "hi"},
}
EXPECTED = {"/infill": {400}, "/v1/model/load": {403}, "/v1/model/unload": {403}}
"""Answers of paths that serve nothing here: without tokens for filling in, without an admin key."""
EMBEDDINGS = {"/api/embed", "/api/embeddings", "/v1/embeddings", "/v1/rerank"}
"""Paths that need a model with states."""
OPENAI_STREAMS = ("/v1/completions", "/v1/chat/completions")
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
FIELDS = (
    *("stream", "system", "tools", "tool_choice", "options", "format", "think", "thinking", "raw"),
    *("text", "reasoning", "instructions", "images", "suffix", "input_suffix", "stop_sequences"),
)
POST_PATHS = sorted(
    path for path, item in DOCUMENT["paths"].items() if "post" in item and path not in EMBEDDINGS
)
NASTY_TEXTS = st.sampled_from(["", "\0", "\ud800", "💥", "<eos>", "../..", "{{ 1 }}", "a" * 200])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NASTY_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NASTY_TEXTS, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.thorough)],
    ids=["", "strict"],
)
def one(request: pytest.FixtureRequest) -> Iterator[Running]:
    runtime = scripted_runtime(reply_with("hello"), ctx_size=CTX_SIZE)
    with running(runtime, is_strict=request.param) as server:
        yield server


def values(schema: dict[str, Any]) -> SearchStrategy[Any]:
    """Values that the schema allows and, in one of 25 draws at any depth, arbitrary ones."""
    return st.integers(0, 24).flatmap(lambda n: JUNK if n == 0 else _valid(schema))


def _valid(schema: dict[str, Any]) -> SearchStrategy[Any]:
    if "$ref" in schema:
        return values(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    members = schema.get("anyOf") or schema.get("oneOf")
    if members:
        return st.one_of([values(member) for member in members])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "type" not in schema:
        return JUNK
    low, high, kind = schema.get("minimum"), schema.get("maximum"), schema["type"]
    if kind in ("object", "array"):
        return _objects(schema) if kind == "object" else _lists(schema)
    return {
        "string": st.text(min_size=schema.get("minLength", 0), max_size=12) | NASTY_TEXTS,
        "boolean": st.booleans(),
        "integer": st.integers(-1 if low is None else low, min(high or 300, 300)),
        "number": st.floats(low, high, allow_nan=False),
        "null": st.none(),
    }[kind]


def _lists(schema: dict[str, Any]) -> SearchStrategy[Any]:
    return st.lists(values(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)


def _objects(schema: dict[str, Any]) -> SearchStrategy[Any]:
    if "properties" not in schema:
        inner = schema.get("additionalProperties")
        names = st.text(max_size=4) | st.integers(0, 300).map(str)
        return st.dictionaries(
            names, values(inner) if isinstance(inner, dict) else JUNK, max_size=3
        )
    fields = {name: values(one) for name, one in schema["properties"].items()}
    needed = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(needed, optional=fields).flatmap(_fewer)


def _fewer(body: dict[str, Any]) -> SearchStrategy[dict[str, Any]]:
    """Keep at most four optional fields. With all fields, one would almost always be wrong."""
    few = st.sets(st.sampled_from(sorted(body)), max_size=4) if body else st.just(set())
    needed = {"prompt", "messages", "tokens", "role", "content", "type", "text", "name", "id"}
    return few.map(lambda kept: {k: v for k, v in body.items() if k in kept | needed})


def object_bodies(path: str) -> SearchStrategy[dict[str, Any]]:
    """Bodies of another server's API: the served one with a few fields changed or added."""
    settings_table = {name: _valid(one) for name, one in COMPLETION.properties().items()}
    changed = dict.fromkeys((*SERVED.get(path, ()), *FIELDS), JUNK)
    added = st.fixed_dictionaries({}, optional={**settings_table, **changed}).flatmap(_few)
    return added.map(lambda fields: {**SERVED.get(path, {}), **fields})


def _few(body: dict[str, Any]) -> SearchStrategy[dict[str, Any]]:
    kept = st.sets(st.sampled_from(sorted(body)), max_size=3) if body else st.just(set())
    return kept.map(lambda names: {name: body[name] for name in names})


def check(one: Running, path: str, body: Any) -> int:
    content = json.dumps(body).encode()
    answer = one.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    kind = answer.headers["content-type"]
    if answer.status_code != 200:
        if path.startswith("/api/") or path.startswith("/v1/messages"):
            assert "error" in answer.json()
        else:
            error_of(answer, answer.status_code)
    elif kind.startswith("application/x-ndjson"):
        assert json.loads(answer.text.splitlines()[-1])["done"]
    elif kind.startswith("text/event-stream") and path not in OPENAI_STREAMS:
        last = json.loads(answer.text.strip().rpartition("data: ")[2])
        assert last.get("stop") or last["type"] in LAST_EVENTS
    elif kind.startswith("text/event-stream"):
        *events, last = answer.text.strip().split("\n\n")
        decoded = [json.loads(event.removeprefix("data: ")) for event in events]
        assert last == "data: [DONE]" and not any("error" in event for event in decoded), last
    else:
        assert answer.json() is not None
        assert "error" not in answer.json() or answer.json()["error"] is None
    return answer.status_code


@pytest.mark.hypothesis
@pytest.mark.parametrize("path", POST_PATHS)
def test_bodies_from_the_openapi_schema_cause_no_server_error(one: Running, path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    schema: dict[str, Any] = {"type": "object"}
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
    is_open = schema.get("type") == "object"  # a body of another server's API
    statuses: list[int] = []

    @settings(max_examples=examples(60), derandomize=True, database=None)
    @given(object_bodies(path) if is_open else values(schema))
    @example(SERVED.get(path, {}))
    @example(None)
    def ask(body: Any) -> None:
        statuses.append(check(one, path, body))

    ask()
    expected = EXPECTED.get(path, {200, 400})
    assert set(statuses) >= expected, "some are served, and some are refused"
    assert one.http.get("/health").status_code == 200
    one.wait_until_idle()


def raw(one: Running, *lines: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to a raw head, which no client library would send."""
    host, port = one.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(b"\r\n".join((*lines, b"Connection: close", b"", b"")))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "path",
    [
        b"/..%2f..%2fetc/passwd",
        b"/../../etc/passwd",
        b"//etc/passwd",
        b"//",
        b"/%2e%2e/%2e%2e/etc/passwd",
        b"/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        b"/v1/models//etc/passwd",
        b"/v1/models/%00",
        b"/v1/models/\\..\\..",
        b"/page.html",
        b"/%ff%fe",
        b"/health/..;/metrics",
        b"/?/../../etc/passwd%00" + b"/",
    ],
)
def test_path_tricks_reach_no_files(one: Running, path: bytes) -> None:
    status, body = raw(one, b"GET " + path + b" HTTP/1.1", b"Host: 127.0.0.1")
    assert b"root:x:" not in body
    if path.startswith(b"/?"):
        assert status == 200 and body.startswith(b"<!doctype html>")
    else:
        assert status in (400, 404)
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "headers",
    [
        [b"X-%d: a" % number for number in range(20_000)],
        [b"Authorization: Bearer x"] * 4_000,
        [b"Cookie: " + b"a=b; " * 20_000],
    ],
    ids=["many", "same", "long"],
)
def test_floods_of_headers_are_refused(one: Running, headers: list[bytes]) -> None:
    status, body = raw(one, b"GET /v1/models HTTP/1.1", b"Host: 127.0.0.1", *headers)
    assert status == 431
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert one.http.get("/v1/models").status_code == 200


@pytest.mark.thorough
@pytest.mark.parametrize("prompt", [[1] * 1_000_000, "a " * 1_000_000], ids=["ids", "text"])
def test_prompt_of_a_million_tokens_is_refused(one: Running, prompt: Any) -> None:
    error = error_of(one.post("/v1/completions", {"prompt": prompt}), 400)
    assert error["code"] == "context_length_exceeded"
    assert one.is_idle()


def test_body_of_100_megabytes_is_refused(one: Running) -> None:
    pieces = iter([b" " * 2**20] * 100)
    headers = {"content-type": "application/json"}
    error = error_of(one.http.post(CHAT, content=pieces, headers=headers), 413)
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"99999999999999999999999", b"1, 2"])
def test_invalid_content_lengths(one: Running, length: bytes) -> None:
    status, body = raw(
        one,
        b"POST /v1/completions HTTP/1.1",
        b"Host: 127.0.0.1",
        b"Content-Type: application/json",
        b"Expect: 100-continue",
        b"Content-Length: " + length,
    )
    assert status in (400, 413) and "error" in json.loads(body)


ESCAPES = [
    "{{ x.__class__.__mro__[1].__subclasses__() }}",
    "{{ (x|attr('__class__'))['__mro__'] }}",
    "{{ '{0.__class__.__mro__}'.format(x).y.z }}",
    "{% include '/etc/passwd' %}",
    "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**12 }}",
    "{{ 9**9**9**9 }}",
    "{{ messages.append(messages).y.z }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_hostile_template_is_a_request_error(template: str) -> None:
    with running(scripted_runtime(reply_with("hello"), template=template)) as one:
        answer = one.post(CHAT, {"messages": HI, "chat_template_kwargs": {"x": "y"}})
        message = error_of(answer, 400)["message"]
        assert "root:" not in message and "<class" not in message
        assert one.http.get("/health").json()["status"] == "ok"


TEMPLATE = (
    "{{ range(2)|list|length }}{{ raise_exception is defined }}{{ x }}{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("name", "status"),
    [("x", 200), ("raise_exception", 200), ("range", 400), ("self", 400), ("messages", 400)],
)
def test_template_variables_are_plain_text(name: str, status: int) -> None:
    with running(scripted_runtime(reply_with("hello"), template=TEMPLATE)) as one:
        hostile = {name: "{{ ''.__class__ }}{% include '/etc/passwd' %}"}
        answer = one.post(CHAT, {"messages": HI, "chat_template_kwargs": hostile})
        assert answer.status_code == status, answer.text
        if status != 200:
            error_of(answer, status)
