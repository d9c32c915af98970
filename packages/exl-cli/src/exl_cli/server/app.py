"""The ASGI application: its routes and their answers. The caller loads the model.

    app = create_app(ModelHost(runtime))

Knows neither command-line options nor sockets (`run.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from exl_cli.server import anthropic, metrics
from exl_cli.server.bodies import long_body_route
from exl_cli.server.chat import Chat
from exl_cli.server.completions import Completion
from exl_cli.server.dialects import add_dialects, add_tabby_models
from exl_cli.server.errors import ApiError, install_handlers, json_reply
from exl_cli.server.limits import Gate, Limits
from exl_cli.server.models import ModelHost, about
from exl_cli.server.page import add_page
from exl_cli.server.paths import BothPaths
from exl_cli.server.record import RequestLog, record_of
from exl_cli.server.schema import ChatBody, CompletionBody, GenerationBody
from exl_cli.server.service import Service
from exl_cli.server.streaming import (
    ClientGoneError,
    EventStream,
    EventStreamResponse,
    closing,
    unless_gone,
)
from exl_cli.server.tokenizing import add_tokenizer

_CLIENT_GONE = 499  # nginx's status for a closed connection; no client receives it
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, what in (
        (400, "The request is invalid or unsupported"),
        (401, "The key is missing or wrong"),
        (403, "The server does not answer to this host name"),
        (404, "No such model or path"),
        (408, "The body did not arrive in time"),
        (413, "The body is too large"),
        (415, "The content type of the body is not JSON"),
        (429, "The queue is full"),
        (431, "The head is too long"),
        (500, "A failure while running"),
        (503, "Out of memory, stalled or shutting down"),
    )
}


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send requests. `api_keys` empty: everyone. `hosts`: host names that the server
    answers to; None: any. `origins`: sites whose pages may use it. `admin_keys`: may also load and
    unload models."""

    api_keys: frozenset[str] = frozenset()
    hosts: Collection[str] | None = None
    origins: Collection[str] = ()
    admin_keys: frozenset[str] = frozenset()


def create_app(
    host: ModelHost,
    *,
    limits: Limits | None = None,
    access: Access | None = None,
    allow_special: bool = False,
    is_strict: bool = False,
    logs_prompts: bool = False,
) -> FastAPI:
    limits, access = limits or Limits(), access or Access()
    service = Service(
        host,
        limits,
        allow_special=allow_special,
        is_strict=is_strict,
        logs_prompts=logs_prompts,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        await host.close()

    app = FastAPI(
        title="exl",
        description="OpenAI-compatible API over one model.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=_REFUSALS,
        redirect_slashes=False,
    )
    app.router.route_class = long_body_route(service)
    install_handlers(app)
    _add_generation(app, service)
    _add_models(app, service)
    add_tokenizer(app, service)
    add_dialects(app, service, _answer)
    add_tabby_models(app, service, access.admin_keys)
    _add_watching(app, service)
    add_page(app)
    _without_422(app)
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    app.add_middleware(
        Gate,
        limits=limits,
        api_keys=access.api_keys | access.admin_keys if access.api_keys else (),
        hosts=access.hosts,
        origins=access.origins,
    )
    app.add_middleware(metrics.CountAnswers, metrics=service.metrics, paths=paths)
    app.add_middleware(BothPaths, paths=paths)
    app.add_middleware(RequestLog)
    return app


async def _answer(work: Chat | Completion, body: GenerationBody, request: Request) -> Response:
    """The answer, whole or as a stream. A client that leaves ends the work."""
    work.record = record_of(request.scope)
    stack = AsyncExitStack()

    async def open_stream() -> EventStream:
        return await work.stream(stack)

    try:
        if body.stream:
            opening = closing(stack, open_stream)
            return EventStreamResponse(await unless_gone(request, opening), stack)
        async with stack:
            return json_reply(await unless_gone(request, work.whole(stack)))
    except ClientGoneError:
        return Response(status_code=_CLIENT_GONE)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", tags=["generation"], responses=_ANSWERS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one or several texts."""
        service.accept(body, record_of(request.scope))
        return await _answer(Completion(service, body), body, request)

    @app.post("/v1/chat/completions", tags=["generation"], responses=_ANSWERS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer the last message of a conversation."""
        service.accept(body, record_of(request.scope))
        return await _answer(Chat(service, body), body, request)


def _add_models(app: FastAPI, service: Service) -> None:
    host = service.host

    def model_json(name: str, request: Request | None = None) -> dict[str, object]:
        resident = host.resident
        is_loaded = resident is not None and resident.name == name
        model: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": host.created,
            "owned_by": "exl",
            "loaded": is_loaded,
        }
        if resident is not None and is_loaded:
            model["max_model_len"] = resident.runtime.ctx_size
            model |= about(resident.runtime.loaded)
        if request is not None and _is_anthropic(request):
            model |= anthropic.model_fields(name, host.created)
        return model

    @app.get("/v1/models", tags=["models"])
    async def models(request: Request) -> Response:
        """List the models that this server can run."""
        names = host.names
        page = anthropic.page_fields(names) if _is_anthropic(request) else {}
        data = [model_json(name, request) for name in names]
        return json_reply({"object": "list", "data": data, **page})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str, request: Request) -> Response:
        """Describe one model."""
        if name not in host.names:
            raise ApiError(404, f"no model {name[:200]!r}", param="model", code="model_not_found")
        return json_reply(model_json(name, request))

    @app.get("/v1/model", tags=["models"])
    async def current_model() -> Response:
        """Describe the loaded model, by tabbyAPI's path."""
        async with host.use(None) as resident:
            return json_reply(model_json(resident.name))

    @app.get("/props", tags=["models"])
    async def props() -> Response:
        """Properties of the loaded model, as llama.cpp and tabbyAPI report them."""
        async with host.use(None) as resident:
            runtime, slots = resident.runtime, resident.max_batch
        template = runtime.loaded.template
        return json_reply(
            {
                "total_slots": slots,
                "chat_template": None if template is None else template.source,
                "default_generation_settings": {"n_ctx": runtime.ctx_size},
            }
        )


def _is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API sent the request. Both APIs have /v1/models."""
    return "anthropic-version" in request.headers


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["watching"])
    async def health() -> Response:
        """200 while generation is idle or makes progress, 503 once it is stuck."""
        resident = service.host.resident
        if resident is None:
            return json_reply({"status": "loading" if service.host.is_loading else "unloaded"})
        stalled_s = resident.jobs.stalled_s
        if stalled_s > service.limits.stall_s:
            raise ApiError(
                503,
                f"generation has made no progress for {stalled_s:.0f} s",
                kind="server_error",
                code="stalled",
            )
        return json_reply({"status": "ok", "model": resident.name})

    @app.get("/metrics", tags=["watching"], response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        """Metrics for Prometheus."""
        service.observe()
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)


def _without_422(app: FastAPI) -> None:
    """Removes 422 from the API document: like OpenAI, the server answers invalid requests with
    400."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
