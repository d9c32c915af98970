"""Helpers that run a real server on a thread of the test process, with clients for it."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2
from openai import DefaultHttpx2Client, OpenAI

from exl_cli.server.app import Access, create_app
from exl_cli.server.limits import Limits
from exl_cli.server.models import ModelFacts, ModelHost
from exl_cli.server.run import Server, listen, make_server, url_of
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.prompt.template import ChatTemplate
from exl_core.session.load import LoadedModel
from exl_core.session.runtime import Runtime
from exl_core.tokenizer.base import Tokenizer
from support.scripted import (
    EOS_ID,
    ByteTokenizer,
    Rule,
    ScriptedModel,
    ScriptedShape,
)

LIMIT_S = 30.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS context shared by all clients. Each client would otherwise spend 0.05 s on reading the
system's certificates."""
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Shape(ScriptedShape):
    eos_ids: tuple[int, ...] = (EOS_ID,)


def scripted_runtime(
    rule: Rule,
    *,
    template: str | None = PLAIN_TEMPLATE,
    name: str = "scripted",
    tokenizer: Tokenizer | None = None,
    ctx_size: int = 1024,
    max_batch: int = 8,
    cache_tokens: int = 8192,
    **options: Any,
) -> Runtime:
    """A scripted model that follows `rule`, as `open_runtime` would return it."""
    tokenizer = tokenizer or ByteTokenizer()
    shape = _Shape(tokenizer.vocab_size, max_seq_len=ctx_size)
    made = None
    if template is not None:
        made = ChatTemplate(template, bos_token="<bos>", eos_token="<eos>", where=name)
    loaded = LoadedModel(
        name=name,
        path=Path(name),
        config=cast(Any, shape),
        model=cast(Any, ScriptedModel(rule, shape)),
        tokenizer=tokenizer,
        template=made,
        weights_bytes=0,
        load_s=0.0,
    )
    sizes = {"max_batch": max_batch, "cache_tokens": cache_tokens}
    return runtime_of(loaded, ctx_size=ctx_size, **sizes, **options)


def runtime_of(
    loaded: LoadedModel,
    *,
    ctx_size: int,
    max_batch: int = 8,
    cache_tokens: int = 8192,
    **options: Any,
) -> Runtime:
    known = EngineOptions(cache_tokens=cache_tokens, max_batch=max_batch, **options)
    return Runtime(loaded, Engine(loaded.model, loaded.tokenizer, known), ctx_size)


@dataclass
class Opening:
    """Opener whose models `load` makes. `check` runs first, while the former model is loaded."""

    load: Callable[[Path], Runtime]
    check: Callable[[Path], object] = lambda _: None
    facts: Callable[[Path], ModelFacts] | None = None

    def describe(self, path: Path) -> ModelFacts:
        assert self.facts is not None, "no model is described"
        return self.facts(path)

    def prepare(self, path: Path, replaced: Runtime | None) -> Callable[[], Runtime]:
        self.check(path)
        return lambda: self.load(path)


@dataclass
class Running:
    """A running server at `url`, with an HTTP client."""

    url: str
    host: ModelHost
    server: Server
    http: httpx2.Client = field(init=False)
    clients: ExitStack = field(init=False, default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.http = httpx2.Client(base_url=self.url, timeout=LIMIT_S, verify=NO_TLS)

    def openai(self, **options: Any) -> OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": LIMIT_S, **options}
        http = DefaultHttpx2Client(verify=NO_TLS)
        return self.clients.enter_context(
            OpenAI(base_url=f"{self.url}/v1", http_client=http, **settings)
        )

    def post(self, path: str, body: object) -> httpx2.Response:
        return self.http.post(path, json=body)

    def is_idle(self) -> bool:
        resident = self.host.resident
        return resident is not None and not resident.jobs.num_remaining_jobs

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.is_idle():
            assert time.monotonic() < deadline, "requests still run"
            time.sleep(0.01)


@contextmanager
def running(
    served: Runtime | ModelHost,
    *,
    limits: Limits | None = None,
    access: Access | None = None,
    port: int = 0,
    **options: Any,
) -> Iterator[Running]:
    """`options`: further arguments of `create_app`."""
    host = served if isinstance(served, ModelHost) else ModelHost(served)
    limits = limits or Limits()
    listening = listen("127.0.0.1", port)
    server = make_server(create_app(host, limits=limits, access=access, **options), limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        url = url_of(listening)
        deadline = time.monotonic() + LIMIT_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server does not start"
            time.sleep(0.005)
        one = Running(url, host, server)
        with one.http, one.clients:
            yield one
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server does not end"


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object of a response, after checks of its status and of OpenAI's format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    found: dict[str, Any] = body["error"]
    return found
