"""Routes of other servers' APIs: Anthropic, OpenAI's responses, ollama, llama.cpp, tabbyAPI.

Each route reads a body as a JSON object, converts it into a chat request or a completion, and
answers in its own form. Everything else is that of the routes in `app.py`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request, Response

from exl_cli.server import anthropic, llama_cpp, ollama, responses
from exl_cli.server.conversation import chat_prompt, num_chars
from exl_cli.server.embeddings import Embeddings, EmbeddingsBody, RerankBody, rerank
from exl_cli.server.engine_request import refusing_long_prompts
from exl_cli.server.errors import ApiError, json_reply
from exl_cli.server.models import ModelFacts, Resident, about
from exl_cli.server.record import record_of
from exl_cli.server.schema import ChatBody, CompletionBody, GenerationBody, parsed
from exl_cli.server.service import Service
from exl_cli.server.streaming import EVENTS_WITHOUT_END, ClientGoneError, unless_gone
from exl_cli.server.tools import format_of
from exl_core.prompt.reasoning import find_tags

JsonObject = Annotated[dict[str, Any], Body()]
Answer = Callable[[Any, GenerationBody, Request], Coroutine[Any, Any, Response]]
_TAG = "other APIs"
_OLLAMA_VERSION = "0.14.2"
"""The first version with `/v1/messages`. Copilot Chat in VS Code wants 0.6.4 or newer."""


def add_dialects(app: FastAPI, service: Service, answer: Answer) -> None:
    _add_anthropic(app, service, answer)
    _add_openai(app, service, answer)
    _add_rerank(app, service)
    _add_ollama(app, service, answer)
    _add_ollama_models(app, service)
    _add_llama_cpp(app, service, answer)


def _accepted(service: Service, request: Request, body: GenerationBody) -> None:
    service.accept(body, record_of(request.scope))


def _add_anthropic(app: FastAPI, service: Service, answer: Answer) -> None:
    @app.post("/v1/messages", tags=[_TAG])
    async def messages(body: JsonObject, request: Request) -> Response:
        """Answer a conversation, by Anthropic's API."""
        chat = anthropic.chat_body(body)
        _accepted(service, request, chat)
        return await answer(anthropic.Messages(service, chat), chat, request)

    @app.post("/v1/messages/count_tokens", tags=[_TAG])
    async def count_tokens(body: JsonObject, request: Request) -> Response:
        """Number of tokens of a conversation's prompt, by Anthropic's API."""
        chat = anthropic.chat_body(body)
        _accepted(service, request, chat)
        return json_reply({"input_tokens": len(await _prompt_of(service, chat))})


def _add_openai(app: FastAPI, service: Service, answer: Answer) -> None:
    @app.post("/v1/responses", tags=[_TAG])
    async def create_response(body: JsonObject, request: Request) -> Response:
        """Answer a conversation, by OpenAI's responses API, without stored state."""
        chat = responses.chat_body(body)
        _accepted(service, request, chat)
        return await answer(responses.Responses(service, chat, body), chat, request)

    @app.post("/v1/embeddings", tags=[_TAG])
    async def embeddings(body: JsonObject, request: Request) -> Response:
        """Vectors of texts: pooled hidden states of the loaded model."""
        return await _embedded(service, body, request, lambda found: found)


def _add_rerank(app: FastAPI, service: Service) -> None:
    @app.post("/v1/rerank", tags=[_TAG])
    async def reranked(body: RerankBody, request: Request) -> Response:
        """Order documents by their similarity to a query, by the API of Jina and Cohere."""
        service.accept(body, record_of(request.scope))
        try:
            return json_reply(await unless_gone(request, rerank(service, body)))
        except ClientGoneError:
            return Response(status_code=499)


def _add_ollama(app: FastAPI, service: Service, answer: Answer) -> None:
    @app.post("/api/chat", tags=[_TAG])
    async def chat(body: JsonObject, request: Request) -> Response:
        """Answer a conversation, by ollama's API."""
        if body.get("messages") == []:
            return await _load(service, body, request)
        made = ollama.chat_body(body)
        _accepted(service, request, made)
        return await answer(ollama.OllamaChat(service, made), made, request)

    @app.post("/api/generate", tags=[_TAG])
    async def generate(body: JsonObject, request: Request) -> Response:
        """Answer a prompt, by ollama's API."""
        if not body.get("prompt"):
            return await _load(service, body, request)
        resident = service.host.resident
        has_template = resident is None or resident.style.has_template
        made = ollama.generate_body(body, has_template=has_template)
        _accepted(service, request, made)
        if isinstance(made, CompletionBody):
            return await answer(ollama.OllamaCompletion(service, made), made, request)
        return await answer(ollama.OllamaChat(service, made, is_generate=True), made, request)

    @app.post("/api/embed", tags=[_TAG])
    async def embed(body: JsonObject, request: Request) -> Response:
        """Vectors of texts, by ollama's API."""
        return await _embedded(
            service,
            body,
            request,
            lambda found: {
                "model": found["model"],
                "embeddings": [one["embedding"] for one in found["data"]],
                "prompt_eval_count": found["usage"]["prompt_tokens"],
            },
        )

    @app.post("/api/embeddings", tags=[_TAG])
    async def old_embeddings(body: JsonObject, request: Request) -> Response:
        """The vector of one text, by ollama's older API."""
        left = {name: value for name, value in body.items() if name != "prompt"}
        return await _embedded(
            service,
            {**left, "input": body.get("prompt")},
            request,
            lambda found: {"embedding": found["data"][0]["embedding"]},
        )


async def _embedded(
    service: Service,
    body: Mapping[str, Any],
    request: Request,
    shape: Callable[[dict[str, Any]], object],
) -> Response:
    """Vectors in the form of one API. A client that leaves ends the work."""
    made = parsed(EmbeddingsBody, body)
    service.accept(made, record_of(request.scope))
    try:
        found = await unless_gone(request, Embeddings(service, made).whole())
    except ClientGoneError:
        return Response(status_code=499)
    return json_reply(shape(found))


async def _load(service: Service, body: Mapping[str, Any], request: Request) -> Response:
    """Loads a model: ollama's clients send a request without a prompt for it. `keep_alive` 0, with
    which they unload one, has no effect."""
    name = body.get("model")
    if not isinstance(name, str):
        raise ApiError(400, "model: a name is expected", param="model", code="invalid_value")

    async def load() -> str:
        async with AsyncExitStack() as stack:
            return (await service.enter(stack, name, 1)).name

    is_loading = body.get("keep_alive") not in (0, "0", "0s")
    try:
        found = await unless_gone(request, load()) if is_loading else name[:200]
    except ClientGoneError:
        return Response(status_code=499)
    return json_reply(
        {
            "model": found,
            "created_at": ollama.created_at(),
            "message": {"role": "assistant", "content": ""},
            "response": "",
            "done": True,
            "done_reason": "load",
        }
    )


def _add_ollama_models(app: FastAPI, service: Service) -> None:
    host = service.host

    @app.get("/api/tags", tags=[_TAG])
    async def tags() -> Response:
        """The models, by ollama's API."""
        return json_reply({"models": [_model_json(host.resident, name) for name in host.names]})

    @app.get("/api/ps", tags=[_TAG])
    async def running_models() -> Response:
        """The loaded model, by ollama's API."""
        resident = host.resident
        return json_reply({"models": [] if resident is None else [_running_json(resident)]})

    @app.get("/api/version", tags=[_TAG])
    async def api_version() -> Response:
        """Version of ollama whose API this is. Clients refuse to work with older ones."""
        return json_reply({"version": _OLLAMA_VERSION})

    @app.post("/api/show", tags=[_TAG])
    async def show(body: JsonObject) -> Response:
        """Describe a model, by ollama's API. Loads no model."""
        name = body.get("model", body.get("name"))
        if not isinstance(name, str):
            raise ApiError(400, "model: a name is expected", param="model")
        facts, defaults = await host.describe(name)
        family = facts.architecture
        return json_reply(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{k} {v}" for k, v in defaults.items()),
                "template": facts.template,
                "details": _details(facts),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.context_length": facts.ctx_size,
                },
                "capabilities": _capabilities(facts.template),
            }
        )


def _capabilities(template: str) -> list[str]:
    """Abilities of a model, read from its chat template.

    ollama names embedding only for models that do nothing else, and clients then offer no chat.
    """
    found = ["completion"]
    if format_of(template) is not None:
        found.append("tools")
    if find_tags(template)[1] in template:
        found.append("thinking")
    return found


def _details(facts: ModelFacts | None) -> dict[str, object]:
    family = "" if facts is None else facts.architecture
    is_gguf = facts is not None and facts.is_gguf
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _model_json(resident: Resident | None, name: str) -> dict[str, object]:
    """A model in ollama's lists. Only the loaded one has details; the digest is one of its name."""
    is_loaded = resident is not None and resident.name == name
    size = resident.runtime.loaded.weights_bytes if resident is not None and is_loaded else 0
    return {
        "name": name,
        "model": name,
        "modified_at": ollama.created_at(),
        "size": size,
        "digest": hashlib.sha256(name.encode("utf-8", "replace")).hexdigest(),
        "details": _details(resident.facts if resident is not None and is_loaded else None),
    }


def _running_json(resident: Resident) -> dict[str, object]:
    """The loaded model in ollama's list of running ones. It never expires."""
    shown = _model_json(resident, resident.name)
    on_gpu = about(resident.runtime.loaded)["device"] == "cuda"
    return {
        **shown,
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": shown["size"] if on_gpu else 0,
        "context_length": resident.runtime.ctx_size,
    }


def _add_llama_cpp(app: FastAPI, service: Service, answer: Answer) -> None:
    async def completed(body: CompletionBody, request: Request) -> Response:
        _accepted(service, request, body)
        return await answer(llama_cpp.LlamaCompletion(service, body), body, request)

    @app.post("/completion", tags=[_TAG])
    async def completion(body: JsonObject, request: Request) -> Response:
        """Continue a text, by llama.cpp's API."""
        return await completed(llama_cpp.completion_body(body), request)

    @app.post("/infill", tags=[_TAG])
    async def infill(body: JsonObject, request: Request) -> Response:
        """Fill in the text between two others, by llama.cpp's API."""
        return await completed(llama_cpp.infill_body(body), request)

    @app.post("/apply-template", tags=[_TAG])
    async def apply_template(body: JsonObject, request: Request) -> Response:
        """The prompt of a conversation as text, by llama.cpp's API."""
        chat = parsed(ChatBody, body)
        _accepted(service, request, chat)
        ids = await _prompt_of(service, chat)
        async with service.host.use(chat.model) as resident:
            tokenizer = resident.runtime.loaded.tokenizer
            text = await service.in_thread(
                lambda: tokenizer.decode(ids, skip_special=False), len(ids)
            )
        return json_reply({"prompt": text})

    @app.get("/slots", tags=[_TAG])
    async def slots() -> Response:
        """Places for concurrent replies, by llama.cpp's API."""
        resident = service.host.resident
        if resident is None:
            return json_reply([])
        busy = len(resident.runtime.engine.scheduler.running)
        n_ctx = resident.runtime.ctx_size
        return json_reply(
            [
                {"id": number, "n_ctx": n_ctx, "is_processing": number < busy}
                for number in range(resident.max_batch)
            ]
        )


def add_tabby_models(app: FastAPI, service: Service, admin_keys: Collection[str]) -> None:
    """tabbyAPI's loading and unloading of models, for holders of an admin key."""
    host = service.host

    def check_admin(request: Request) -> None:
        given = request.headers.get("x-admin-key", "").encode()
        # Compares with all keys, so that the time reveals nothing about them.
        matches = [hmac.compare_digest(key.encode(), given) for key in admin_keys]
        if not any(matches):
            message = "an admin key is required: x-admin-key: KEY, of --admin-key"
            raise ApiError(403, message, code="invalid_admin_key")

    @app.get("/v1/model/list", tags=[_TAG])
    async def list_models() -> Response:
        """The models, by tabbyAPI's API."""
        models = [{"id": name, "object": "model", "owned_by": "exl"} for name in host.names]
        return json_reply({"object": "list", "data": models})

    @app.post("/v1/model/load", tags=[_TAG])
    async def load(body: JsonObject, request: Request) -> Response:
        """Load a model of the folder, by tabbyAPI's API."""
        check_admin(request)
        name = body.get("model_name", body.get("name"))
        if not isinstance(name, str):
            raise ApiError(400, "model_name: a name is expected", param="model_name")
        async with host.use(name) as resident:
            event = {"model_type": "model", "module": 1, "modules": 1, "status": "finished"}
            data = EVENTS_WITHOUT_END.frame({**event, "model": resident.name})
        return Response(data, media_type=EVENTS_WITHOUT_END.media_type)

    @app.post("/v1/model/unload", tags=[_TAG])
    async def unload(request: Request) -> Response:
        """Free the loaded model, by tabbyAPI's API."""
        check_admin(request)
        await host.unload()
        return json_reply({"status": "ok"})


async def _prompt_of(service: Service, chat: ChatBody) -> list[int]:
    """Token ids of a conversation's prompt."""
    async with service.host.use(chat.model) as resident:
        ctx_size = resident.runtime.ctx_size
        with refusing_long_prompts(ctx_size, "messages"):
            prompt = await service.in_thread(
                lambda: chat_prompt(
                    resident.style, chat, ctx_size - 1, allow_special=service.allow_special
                ),
                num_chars(chat),
            )
    return prompt.token_ids
