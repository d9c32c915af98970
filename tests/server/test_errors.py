"""Refused requests: every error has OpenAI's format and names the parameter."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import time
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError

from exl_cli.server.app import Access, create_app
from exl_cli.server.errors import json_reply
from exl_cli.server.limits import Gate, Limits, check_bind, hosts_of
from exl_cli.server.log_limit import FIRST_LINES, PERIOD_S, LineLimit
from exl_cli.server.models import ModelHost
from exl_cli.server.page import content_policy
from exl_core.errors import RequestError
from support.scripted import reply_with
from support.server import LIMIT_S, Running, error_of, running, scripted_runtime

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def one() -> Any:
    limits = Limits(body_bytes=20_000, header_s=0.5, body_s=0.5)
    with running(scripted_runtime(reply_with("hello"), ctx_size=256), limits=limits) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        (TEXT, {"prompt": "a", "mirostat": 3}, "mirostat", "invalid_value"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
        (TEXT, {"prompt": "a", "num_beams": 2}, "num_beams", "unsupported_parameter"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature", "invalid_value"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature", "invalid_value"),
        (TEXT, {"prompt": "a", "n": 0}, "n", "invalid_value"),
        (TEXT, {"prompt": "a", "stop": ["a" * 2000]}, "stop", "invalid_value"),
        (TEXT, {"prompt": "a", "guidance_scale": 2}, "guidance_scale", "invalid_value"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        (TEXT, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": []}, "prompt", "invalid_value"),
        (TEXT, {"prompt": ["a", ""]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [258]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [True]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [65.5]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [[65.0], [65.5]]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (TEXT, {}, "prompt", "missing_required_parameter"),
        (TEXT, {"prompt": "a" * 300}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": HI, "functions": [{}]}, "functions", "unsupported_parameter"),
        (CHAT, {"messages": HI * 200}, "messages", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "robot"}]}, "messages.0.role", "invalid_value"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", None),
        (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens", "invalid_value"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "xml"}},
            "response_format",
            "invalid_value",
        ),
        (CHAT, [], None, "invalid_json"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "invalid_value"),
    ],
)
def test_error_names_the_wrong_field(
    one: Running, path: str, body: Any, param: str | None, code: str | None
) -> None:
    error = error_of(one.post(path, body), 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"


def test_image_is_refused_with_its_location(one: Running) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = error_of(one.post(CHAT, {"messages": [{"role": "user", "content": parts}]}), 400)
    assert error["param"] == "messages.0.content"
    assert "'image_url' is not supported" in error["message"] and "'text'" in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "\xff"}', b"[" * 15_000, b"NaN"])
def test_body_that_is_not_json_is_refused(one: Running, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(one.http.post(TEXT, content=body, headers=headers), 400)


def test_deep_schema_is_not_a_server_error(one: Running) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    answer = one.post(CHAT, {"messages": HI, "response_format": wanted, "max_tokens": 5})
    assert answer.status_code in (200, 400), answer.text


def test_lone_surrogate_gets_a_valid_error(one: Running) -> None:
    body = '{"prompt": "\\ud800"}'
    headers = {"content-type": "application/json"}
    error = error_of(one.http.post(TEXT, content=body, headers=headers), 400)
    assert "surrogate" in error["message"]
    error_of(one.http.post(TEXT, content='{"prompt": "a", "\\ud800": 1}', headers=headers), 400)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"prompt":', "Expecting value"),
        (b'{"prompt": "\xff"}', "byte 0xff"),
        (b'{"prompt": ' + b"[" * 5000, "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
    ids=["cut", "not UTF-8", "deep", "digits"],
)
def test_body_that_is_not_json_is_refused_with_the_reason(
    one: Running, body: bytes, said: str
) -> None:
    headers = {"content-type": "application/json"}
    error = error_of(one.http.post(TEXT, content=body, headers=headers), 400)
    assert error["code"] == "invalid_json" and said in error["message"]


def test_wrong_paths_methods_and_content_types(one: Running) -> None:
    assert "no such path" in error_of(one.http.get("/v1/nothing"), 404)["message"]
    assert error_of(one.http.get("/v1/models/none"), 404)["code"] == "model_not_found"
    assert "GET" in error_of(one.http.get(TEXT), 405)["message"]
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        for browser in ({"origin": "http://other.site"}, {"sec-fetch-site": "cross-site"}):
            headers = {"content-type": kind, **browser}
            error_of(one.http.post(TEXT, content=b'{"prompt": "a"}', headers=headers), 415)
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):  # curl -d
        sent = one.http.post(TEXT, content=b'{"prompt": "a"}', headers=headers)
        assert sent.status_code == 200, "as in the examples of ollama and llama.cpp"
        error_of(one.http.post(TEXT, content=b"prompt=a", headers=headers), 400)
    error_of(one.http.get("/docs"), 404)
    long = one.http.get("/health", headers={"x-long": "a" * 66_000})
    error_of(long, 431)
    for name in ("../../etc/passwd", "/etc/passwd", "..", ""):
        answer = one.post(TEXT, {"prompt": "a", "model": name})
        assert answer.status_code == 200 and answer.json()["model"] == "scripted"


def test_a_compressed_body_is_refused_as_such(one: Running) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert "'gzip'" in error_of(one.http.post(TEXT, content=body, headers=headers), 415)["message"]
    headers["content-encoding"] = "identity"
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert one.http.post(TEXT, content=body, headers=headers).status_code == 200


def test_head_request_has_the_headers_of_get(one: Running) -> None:
    for path in ("/", "/health", "/v1/models", "/v1/models/scripted", "/metrics", "/openapi.json"):
        plain = {"accept-encoding": "identity"}
        got, head = one.http.get(path, headers=plain), one.http.head(path, headers=plain)
        assert (head.status_code, head.content) == (200, b""), path
        if path != "/metrics":
            assert head.headers["content-length"] == str(len(got.content))
        assert head.headers["content-type"] == got.headers["content-type"]
    assert one.http.head("/v1/nothing").status_code == 404
    assert one.http.head(TEXT).status_code == 405
    assert one.http.get("/health").json()["status"] == "ok", "on the same connection"


def test_body_limit(one: Running) -> None:
    headers = {"content-type": "application/json"}
    for content in (b" " * 30_000, iter([b" " * 10_000] * 3)):
        error = error_of(one.http.post(TEXT, content=content, headers=headers), 413)
        assert "20000" in error["message"]


def raw(one: Running, data: bytes) -> bytes:
    """Send these bytes. Returns all received bytes until the server closes the connection."""
    host, port = one.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_slow_clients_are_disconnected(one: Running) -> None:
    started = time.monotonic()
    assert raw(one, b"") == b""
    head = raw(one, b"GET /health HTTP/1.1\r\nHost: x")
    assert head.startswith(b"HTTP/1.1 408")
    body = raw(
        one,
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
    )
    assert body.startswith(b"HTTP/1.1 408")
    assert json.loads(body.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("length", "sent"),
    [
        (b"Transfer-Encoding: chunked", b"fffffffff\r\n"),
        (b"Transfer-Encoding: chunked", b"fffffffff\r\nabc"),
        (b"Content-Length: 99999999", b"abc"),
    ],
)
def test_announced_bodies_that_are_too_long_are_refused_in_a_second(
    length: bytes, sent: bytes
) -> None:
    limits = Limits(body_bytes=20_000, body_s=LIMIT_S)
    with running(scripted_runtime(reply_with("x")), limits=limits) as one:
        started = time.monotonic()
        answer = raw(
            one,
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\n" + length + b"\r\n\r\n" + sent,
        )
        assert answer.startswith(b"HTTP/1.1 413")
        assert time.monotonic() - started < 6


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80@evil", 403),
        ("localhost:evil", 403),
        ("localhost:80:80", 403),
        ("localhost/", 403),
        ("[::1", 403),
        ("[::1]evil", 403),
        ("[localhost]", 403),
        ("evil", 403),
        ("", 403),
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:", 200),
        ("[::1]:80", 200),
    ],
)
def test_the_whole_host_header_counts(host: str, status: int) -> None:
    access = Access(hosts=hosts_of("127.0.0.1", ()))
    answers: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await json_reply({})({"type": "http"}, _receive, send)

    async def send(message: Any) -> None:
        answers.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "query_string": b"",
        "headers": [(b"host", host.encode())],
    }
    gate = Gate(app, limits=Limits(), hosts=access.hosts)
    asyncio.run(gate(scope, receive, send))
    assert answers[0]["status"] == status


def test_bad_requests_cannot_flood_the_log() -> None:
    now = 0.0
    limit = LineLimit(lambda: now)
    shown: list[str] = []

    def log(text: str) -> None:
        record = logging.LogRecord("x", logging.WARNING, "", 0, text, (), None)
        if limit.filter(record):
            shown.append(record.getMessage())

    for _ in range(1000):
        log("bad")
    log("other")
    assert shown == ["bad"] * FIRST_LINES + ["other"]
    now = PERIOD_S
    log("bad")
    left = 1000 - FIRST_LINES
    assert shown[-1] == f"bad ({left} more lines like this were left out)"
    for number in range(2000):
        log(f"kind {number}")
    assert len(shown) < 1000


def test_input_that_is_not_http_is_logged_a_few_times(
    one: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3 * FIRST_LINES):
        assert raw(one, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    lines = [record for record in caplog.records if "Invalid HTTP" in record.getMessage()]
    assert len(lines) <= FIRST_LINES


def test_input_that_is_not_http_gets_a_json_error(one: Running) -> None:
    answer = raw(one, b"\x16\x03\x01 nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    chunk = raw(
        one,
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    )
    assert chunk.startswith(b"HTTP/1.1 400")
    assert json.loads(chunk.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    flood = raw(one, b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 300_000)
    assert flood.startswith(b"HTTP/1.1 431")


def test_other_sites_cannot_use_a_server_without_a_key() -> None:
    access = Access(hosts=hosts_of("127.0.0.1", ()))
    with running(scripted_runtime(reply_with("x")), access=access) as one:
        assert one.http.get("/v1/models").status_code == 200
        error = error_of(one.http.get("/v1/models", headers={"host": "evil.example"}), 403)
        assert "evil.example" in error["message"]
        answer = one.http.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_keys() -> None:
    access = Access(frozenset({"sesame", "second"}))
    with running(scripted_runtime(reply_with("x")), access=access) as one:
        with pytest.raises(AuthenticationError) as caught:
            one.openai(api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        for key in ("sesame", "second"):
            assert one.openai(api_key=key).models.list().data[0].id == "scripted"
        error_of(one.http.get("/metrics"), 401)
        error_of(one.http.get("/openapi.json"), 401)
        error_of(one.http.get("/health/"), 401)
        assert one.http.get("/health").status_code == 200
        assert one.http.get("/").status_code == 200


def test_binding_beyond_this_machine_needs_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_bind(host, has_key=False)
    check_bind("0.0.0.0", has_key=True)
    for host in ("0.0.0.0", "::", "not a host"):
        with pytest.raises(RequestError):
            check_bind(host, has_key=False)


def test_errors_map_to_the_exceptions_of_openais_client(one: Running) -> None:
    client = one.openai()
    with pytest.raises(NotFoundError, match="no model"):
        client.models.retrieve("gpt-5")
    with pytest.raises(BadRequestError, match="suffix: the tokenizer"):
        client.completions.create(model="scripted", prompt="a", suffix="b")


def test_internal_error_does_not_stop_the_server(one: Running, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("oops")

    with monkeypatch.context() as patched:
        patched.setattr("exl_cli.server.service.make_requests", fail)
        error = error_of(one.post(TEXT, {"prompt": "a"}), 500)
        assert error["message"] == "internal error"
    assert one.post(TEXT, {"prompt": "a"}).status_code == 200


def test_openapi_document_is_complete(one: Running) -> None:
    document = one.http.get("/openapi.json").json()
    assert {TEXT, CHAT, "/tokenize", "/health", "/v1/models/{name}"} <= set(document["paths"])
    responses = document["paths"][TEXT]["post"]["responses"]
    assert "422" not in responses and {"400", "401", "413", "429"} <= set(responses)
    body = document["components"]["schemas"]["CompletionBody"]
    assert {"prompt", "temperature", "dry_multiplier", "best_of"} <= set(body["properties"])
    assert "settings" not in str(sorted(body["properties"]))


def test_page_policy_allows_only_its_own_scripts(one: Running) -> None:
    answer = one.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    found = content_policy("<style>a{}</style><script>x()</script>")
    assert "script-src 'sha256-" in found and "style-src 'sha256-" in found


def test_page_is_compressed_and_sent_once(one: Running) -> None:
    plain = one.http.get("/", headers={"accept-encoding": "identity"})
    packed = one.http.get("/", headers={"accept-encoding": "gzip, br"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip" and packed.text == plain.text
    assert int(packed.headers["content-length"]) < len(plain.content) * 0.6
    again = one.http.get("/", headers={"if-none-match": plain.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_create_app_needs_only_a_model() -> None:
    app = create_app(ModelHost(scripted_runtime(reply_with("x"))))
    assert app.title == "exl"
