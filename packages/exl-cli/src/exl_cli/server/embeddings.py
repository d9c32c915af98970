"""`POST /v1/embeddings`: vectors of texts, from the hidden states of the loaded model.

A vector is the mean of the states after the last layer over all tokens, each state scaled to a root
mean square of 1, and the result scaled to length 1. Models that were not trained for it give
vectors that tell topics apart, no more.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from exl_cli.server.completions import as_prompt
from exl_cli.server.engine_request import refusing_long_prompts
from exl_cli.server.errors import ApiError
from exl_cli.server.models import Resident
from exl_cli.server.schema import MAX_PROMPTS, Body, Texts, TokenIds, parsed
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
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


def embeddings_body(body: Mapping[str, Any]) -> EmbeddingsBody:
    left = {name: value for name, value in body.items() if value is not None}
    return parsed(EmbeddingsBody, left)


class TextVector:
    """The vector of one text, computed in steps of `CHUNK_TOKENS`."""

    def __init__(self, model: Transformer, token_ids: list[int]) -> None:
        self._model = model
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
        states = recorder.layers[last].double()  # [rows, hidden]
        scale = states.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        self._sum = self._sum + (states / scale).sum(0).cpu()  # [hidden]

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
        async with AsyncExitStack() as stack:
            resident = await self._service.enter(stack, body.model, 1)
            prompts = await self._encode(resident, listed)
            data = []
            for number, token_ids in enumerate(prompts):
                vector = await self._vector(resident, token_ids)
                data.append({"object": "embedding", "index": number, "embedding": vector})
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": resident.name, "usage": usage}

    async def _encode(self, resident: Resident, listed: list[Any]) -> list[list[int]]:
        runtime = resident.runtime
        tokenizer, most = runtime.loaded.tokenizer, runtime.ctx_size - 1
        with refusing_long_prompts(runtime.ctx_size, "input"):
            prompts = await self._service.in_thread(
                lambda: [
                    as_prompt(tokenizer, one, add_bos=None, max_tokens=most).token_ids
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

    async def _vector(self, resident: Resident, token_ids: list[int]) -> object:
        work = TextVector(resident.runtime.loaded.model, token_ids)
        while not work.is_done:
            await resident.jobs.between_steps(work.step)
        vector = work.vector()
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
