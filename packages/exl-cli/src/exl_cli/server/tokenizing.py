"""Tokenizer routes: encode and decode, under vLLM's and tabbyAPI's paths."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Response

from exl_cli.server.completions import as_prompt
from exl_cli.server.errors import ApiError, json_reply
from exl_cli.server.schema import (
    DetokenizeBody,
    TokenDecodeBody,
    TokenEncodeBody,
    TokenizeBody,
)
from exl_cli.server.service import Service
from exl_core.tokenizer.base import Tokenizer

MAX_TOKENS = 64 * 1024
"""Maximum number of tokens of an encoded text, unless the context is longer."""


def add_tokenizer(app: FastAPI, service: Service) -> None:
    _add_vllm(app, service)
    _add_tabby(app, service)


def _add_vllm(app: FastAPI, service: Service) -> None:
    host = service.host

    @app.post("/tokenize", tags=["tokenizer"])
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text."""
        async with host.use(body.model) as resident:
            tokenizer, longest = resident.runtime.loaded.tokenizer, resident.runtime.ctx_size
            found = await service.in_thread(
                lambda: _tokenized(tokenizer, body, longest), len(body.text or "")
            )
        return json_reply(found)

    @app.post("/detokenize", tags=["tokenizer"])
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids, including special tokens."""
        async with host.use(body.model) as resident:
            text = await _text_of(service, resident.runtime.loaded.tokenizer, body.tokens)
        return json_reply({"prompt": text, "content": text})  # vLLM's name, llama.cpp's

    @app.get("/tokenizer_info", tags=["tokenizer"])
    async def tokenizer_info() -> Response:
        """Special tokens and chat template, for clients that build prompts."""
        async with host.use(None) as resident:
            loaded = resident.runtime.loaded
        tokenizer, template = loaded.tokenizer, loaded.template

        def text(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_text(token_id)

        return json_reply(
            {
                "bos_token": text(tokenizer.bos_id),
                "eos_token": text(next(iter(tokenizer.eos_ids), None)),
                "pad_token": text(tokenizer.pad_id),
                "unk_token": text(tokenizer.unk_id),
                "add_bos_token": tokenizer.adds_bos,
                "vocab_size": tokenizer.vocab_size,
                "chat_template": None if template is None else template.source,
            }
        )


def _add_tabby(app: FastAPI, service: Service) -> None:
    host = service.host

    @app.post("/v1/token/encode", tags=["tokenizer"])
    async def encode(body: TokenEncodeBody) -> Response:
        """Token ids of a text."""
        async with host.use(None) as resident:
            tokenizer = resident.runtime.loaded.tokenizer
            special = body.encode_special_tokens
            most = max(resident.runtime.ctx_size, MAX_TOKENS)
            ids = await service.in_thread(
                lambda: tokenizer.encode(body.text, allow_special=special, max_tokens=most),
                len(body.text),
            )
        bos = tokenizer.bos_id
        if body.add_bos_token and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return json_reply({"tokens": ids, "length": len(ids)})

    @app.post("/v1/token/decode", tags=["tokenizer"])
    async def decode(body: TokenDecodeBody) -> Response:
        """Text of token ids."""
        async with host.use(None) as resident:
            tokenizer = resident.runtime.loaded.tokenizer
            skip = not body.decode_special_tokens
            text = await _text_of(service, tokenizer, body.tokens, skip_special=skip)
        return json_reply({"text": text})


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody, longest: int) -> dict[str, object]:
    """Reply to /tokenize. `longest`: the context, in tokens."""
    prompt = as_prompt(
        tokenizer,
        body.text or "",
        add_bos=None if body.adds_special else False,
        max_tokens=max(longest, MAX_TOKENS),
        allow_special=body.parse_special,
    )
    ids = prompt.token_ids
    tokens = [_with_piece(tokenizer, one) for one in ids] if body.with_pieces else ids
    found: dict[str, object] = {"tokens": tokens, "count": len(ids), "max_model_len": longest}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.raw_token(one) for one in ids]
    return found


def _with_piece(tokenizer: Tokenizer, token_id: int) -> dict[str, object]:
    """A token with its text, by llama.cpp's API. Bytes that are no text are a list of numbers."""
    data = tokenizer.token_bytes(token_id, skip_special=False)
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}


async def _text_of(
    service: Service,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    skip_special: bool = False,
) -> str:
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        raise ApiError(
            400,
            f"tokens: the largest token id is {tokenizer.vocab_size - 1}",
            param="tokens",
            code="invalid_value",
        )
    return await service.in_thread(
        lambda: tokenizer.decode(token_ids, skip_special=skip_special), len(token_ids)
    )
