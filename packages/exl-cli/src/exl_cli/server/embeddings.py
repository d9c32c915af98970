"""Vectors of texts from hidden states: `POST /v1/embeddings`, and `POST /v1/rerank` by them.

With an embedding model (`--embedding-model`) a vector is pooled as that model was trained. Without
one, it is the mean of the loaded model's states after the last layer over all tokens, each state
scaled to a root mean square of 1: such vectors tell topics apart, no more. All vectors are scaled
to length 1.
"""

from __future__ import annotations

import base64
import uuid
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from exl_cli.server.completions import as_prompt
from exl_cli.server.engine_request import refusing_long_prompts
from exl_cli.server.errors import ApiError
from exl_cli.server.fields import as_whole
from exl_cli.server.models import Resident
from exl_cli.server.pooling import Pooling
from exl_cli.server.schema import MAX_PROMPTS, Body, SomeTokenIds, Texts, TokenIds, Whole
from exl_cli.server.service import Service
from exl_core.model.context import Context
from exl_core.model.observe import StateRecorder
from exl_core.model.segment import LogitRows
from exl_core.model.transformer import Transformer

MAX_TOKENS = 256 * 1024
"""Maximum number of tokens of all texts of a request together."""
CHUNK_TOKENS = 256
"""Tokens of one pass. Replies that stream wait for as long."""


class EmbeddingsBody(Body):
    inert = frozenset({"user", "keep_alive", "truncate", "options", "input_type"})

    model: str | None = None
    input: (
        str
        | Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
        | SomeTokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None


class TextVector:
    """The vector of one text, computed in steps of `CHUNK_TOKENS`."""

    def __init__(
        self, model: Transformer, token_ids: list[int], pooling: Pooling | None = None
    ) -> None:
        self._model = model
        self._pooling = pooling
        self._left = token_ids
        self._count = len(token_ids)
        self._context: Context | None = None
        self._sum = torch.zeros(())

    @property
    def is_done(self) -> bool:
        return not self._left

    def step(self) -> None:
        """One pass. Runs on the engine's thread."""
        if self._context is None:
            self._context = Context(self._model, self._count)
        chunk, self._left = self._left[:CHUNK_TOKENS], self._left[CHUNK_TOKENS:]
        last = self._model.config.num_layers - 1
        recorder = StateRecorder((last,))
        self._context.feed([chunk], LogitRows.NONE, observe=recorder)
        states = recorder.layers[last]  # [rows, hidden]
        if self._pooling is None:
            scale = states.double().square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
            states = states.double() / scale
        else:
            states = self._model.final_states(states)
        if self._pooling is not None and self._pooling.kind == "last":
            self._sum = states[-1].double().cpu()
        else:
            self._sum = self._sum + states.double().sum(0).cpu()  # [hidden]

    def vector(self) -> Tensor:
        """float32 [hidden_size], of length 1."""
        mean = self._sum / self._count
        length = float(mean.norm())
        return (mean / max(length, 1e-12)).float()


class Embeddings:
    """One request for vectors. Each text is computed in chunks between the steps of replies."""

    def __init__(self, service: Service, body: EmbeddingsBody) -> None:
        self._service = service
        self._body = body

    async def whole(self) -> dict[str, Any]:
        body = self._body
        given = body.input
        if isinstance(given, str):
            listed: list[Any] = [given]
        else:
            listed = [given] if isinstance(given[0], int) else [*given]
        name, prompts, vectors = await self.vectors(listed)
        data = [
            {"object": "embedding", "index": number, "embedding": self._shown(vector)}
            for number, vector in enumerate(vectors)
        ]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": name, "usage": usage}

    async def vectors(self, listed: list[Any]) -> tuple[str, list[list[int]], list[Tensor]]:
        """Name of the model, token ids, and the vectors of the texts."""
        embedder = self._service.host.embedder
        async with AsyncExitStack() as stack:
            if embedder is None:
                resident = await self._service.enter(stack, self._body.model, 1)
            else:
                stack.enter_context(self._service.admit(1))
                resident = embedder.resident
            pooling = None if embedder is None else embedder.pooling
            prompts = await self._encode(resident, listed, pooling)
            vectors = [await self._vector(resident, ids, pooling) for ids in prompts]
        return resident.name, prompts, vectors

    async def _encode(
        self, resident: Resident, listed: list[Any], pooling: Pooling | None
    ) -> list[list[int]]:
        runtime = resident.runtime
        ending = () if pooling is None else pooling.ending
        tokenizer, most = runtime.loaded.tokenizer, runtime.ctx_size - 1 - len(ending)
        with refusing_long_prompts(runtime.ctx_size, "input"):
            prompts = await self._service.in_thread(
                lambda: [
                    as_prompt(tokenizer, one, add_bos=None, max_tokens=most).token_ids
                    + (list(ending) if isinstance(one, str) else [])
                    for one in listed
                ],
                sum(map(len, listed)),
            )
        count = sum(map(len, prompts))
        if count > max(MAX_TOKENS, runtime.ctx_size):
            message = f"input: the texts have {count} tokens together; at most {MAX_TOKENS}"
            raise ApiError(413, message, param="input", code="request_too_large")
        vocab_size = runtime.engine.vocab_size
        for ids in prompts:
            if not ids or max(ids) >= vocab_size:
                message = f"input: texts, or token ids from 0 to {vocab_size - 1}, are expected"
                raise ApiError(400, message, param="input", code="invalid_value")
        return prompts

    async def _vector(
        self, resident: Resident, token_ids: list[int], pooling: Pooling | None
    ) -> Tensor:
        work = TextVector(resident.runtime.loaded.model, token_ids, pooling)
        while not work.is_done:
            await resident.jobs.between_steps(work.step)
        return work.vector()

    def _shown(self, vector: Tensor) -> object:
        wanted = self._body.dimensions
        if wanted is not None and wanted != len(vector):
            raise ApiError(
                400,
                f"dimensions: this model has {len(vector)}",
                param="dimensions",
                code="unsupported_parameter",
            )
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.numpy().tobytes()).decode()
        return vector.tolist()


class RerankText(Body):
    text: str


class RerankBody(Body):
    inert = frozenset({"user", "truncate_prompt_tokens", "priority"})

    model: str | None = None
    query: str
    documents: Annotated[
        list[str | RerankText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=1), BeforeValidator(as_whole)] | None = None
    return_documents: bool | None = None


async def rerank(service: Service, body: RerankBody) -> dict[str, Any]:
    """Documents by their similarity to the query: the cosine of their vectors, best first, in the
    form of Jina's, Cohere's and vLLM's API."""
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    work = Embeddings(service, EmbeddingsBody(input=texts, model=body.model))
    name, prompts, vectors = await work.vectors([body.query, *texts])
    scores = [float(vectors[0] @ vector) for vector in vectors[1:]]
    order = sorted(range(len(texts)), key=lambda number: -scores[number])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": number, "relevance_score": scores[number]} for number in order
    ]
    if body.return_documents is not False:
        for one in results:
            one["document"] = {"text": texts[one["index"]]}
    count = sum(map(len, prompts))
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "results": results,
    }
