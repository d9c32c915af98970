"""ExLlamaV2WebSocketServer: JSON messages of old clients, answered by one streaming generator.

A message is an object with `action`: echo, estimate_token, lefttrim_token, infer or stop. Its
`request_id` and `response_id` come back with the answer. Replies are generated one at a time; the
other actions are answered meanwhile. The package websockets is imported by `serve`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl_core.errors import ExlError
from exl_exllamav2.cache import ExLlamaV2CacheBase
from exl_exllamav2.errors import OldValueError, refuse
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.settings import Settings
from exl_exllamav2.streaming import ExLlamaV2StreamingGenerator
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

Message = dict[str, Any]

_SETTINGS: tuple[tuple[str, str, float], ...] = (
    ("top_k", "top_k", 100),
    ("top_p", "top_p", 0.8),
    ("top_a", "top_a", 0.0),
    ("min_p", "min_p", 0.0),
    ("typical", "typical", 0.0),
    ("temperature", "temperature", 0.9),
    ("skew", "skew", 0.0),
    ("rep_pen", "token_repetition_penalty", 1.05),
    ("freq_pen", "token_frequency_penalty", 0.0),
    ("pres_pen", "token_presence_penalty", 0.0),
)
"""Key of a message, sampler setting, and its default."""


class ExLlamaV2WebSocketServer:
    """A server for one model. `serve` blocks; `run` does the same in an event loop."""

    def __init__(
        self,
        ip: str,
        port: int,
        model: ExLlamaV2,
        tokenizer: ExLlamaV2Tokenizer,
        cache: ExLlamaV2CacheBase,
    ) -> None:
        self.ip = ip
        self.port = port
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
        self.stop_signal = threading.Event()
        self.model_lock = asyncio.Lock()
        self.active_requests: list[asyncio.Task[None]] = []
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="exl-engine")
        """All passes of the model run here, so that messages are read meanwhile."""

    def serve(self) -> None:
        """Serve until the process is interrupted."""
        print(f" -- Starting WebSocket server on {self.ip} port {self.port}", flush=True)
        asyncio.run(self.run())

    async def run(self) -> None:
        """Serve until this coroutine is cancelled."""
        try:
            from websockets.asyncio.server import serve
        except ImportError:
            refuse(
                "exllamav2.server",
                "the package websockets is not installed",
                "Install it ('pip install websockets'), or use 'exl serve'.",
            )
        async with serve(self.main, self.ip, self.port) as server:
            await server.serve_forever()

    async def main(self, websocket: Any, path: str | None = None) -> None:
        """Answer the messages of one connection, each in a task of its own."""
        async for text in websocket:
            task = asyncio.create_task(_answer(text, websocket, self))
            self.active_requests = [one for one in self.active_requests if not one.done()]
            self.active_requests.append(task)


async def _answer(text: str | bytes, websocket: Any, server: ExLlamaV2WebSocketServer) -> None:
    """Dispatch one message. A message that cannot be answered gets an answer with `error`."""
    known: Message = {}
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or "action" not in found:
            raise OldValueError("a message is no object with 'action'", got=repr(text)[:100])
        known = found
        await dispatch(known, websocket, server)
    except (ExlError, ValueError, KeyError, TypeError) as error:
        what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        await websocket.send(json.dumps({**_header(known), "error": what}))


async def dispatch(request: Message, ws: Any, server: ExLlamaV2WebSocketServer) -> None:
    """Run the action of a message and send its answer. An unknown action is only printed."""
    response = _header(request)
    match request["action"]:
        case "echo":
            pass
        case "estimate_token":
            ids = server.tokenizer.cached_encode_str(request["text"])
            response["num_tokens"] = ids.shape[-1]
        case "lefttrim_token":
            ids = server.tokenizer.encode(request["text"], encode_special_tokens=True)
            length = int(request["trimmed_length"])
            response["trimmed_text"] = request["text"]
            if ids.shape[-1] > length:
                kept = ids[:, ids.shape[-1] - length :]
                response["trimmed_text"] = server.tokenizer.decode(kept, True)[0]
        case "infer":
            async with server.model_lock:
                await _infer(request, response, ws, server)
        case "stop":
            server.stop_signal.set()
        case _:
            print(f" ## Unknown request from client: {request}")
            return
    await ws.send(json.dumps(response))


def _header(request: Message) -> Message:
    """Keys of a message that its answers repeat."""
    names = ("action", "request_id", "response_id")
    return {name: request[name] for name in names if name in request}


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt of a reply after trimming: ids int64 [1, n], and their text."""

    ids: Tensor
    text: str


def _prompt(request: Message, server: ExLlamaV2WebSocketServer) -> _Prompt:
    """The last tokens of the text that leave room for the reply, after `customBos`."""
    tokenizer = server.tokenizer
    first: str = request.get("customBos", "")
    bos = tokenizer.encode(first, encode_special_tokens=True)
    ids = tokenizer.cached_encode_str(request["text"])
    capacity = server.model.config.max_seq_len - int(request["max_new_tokens"]) - bos.shape[-1]
    text = request["text"]
    if ids.shape[-1] > max(1, capacity):
        ids = ids[:, -max(1, capacity) :]
        text = tokenizer.decode(ids)[0]
    return _Prompt(torch.cat([bos, ids], dim=-1), first + text)


def _settings(request: Message, tokenizer: ExLlamaV2Tokenizer) -> Settings:
    settings = Settings()
    for key, name, default in _SETTINGS:
        setattr(settings, name, type(default)(request.get(key, default)))
    banned = request.get("bann_bann")
    if banned is not None:
        settings.disallow_tokens(tokenizer, banned if isinstance(banned, list) else [banned])
    return settings


async def _infer(
    request: Message, response: Message, ws: Any, server: ExLlamaV2WebSocketServer
) -> None:
    """Generate a reply into `response`; with `stream` send it piece by piece as well."""
    loop = asyncio.get_running_loop()
    server.stop_signal.clear()
    max_tokens, is_streamed = int(request["max_new_tokens"]), bool(request["stream"])
    if "tag" in request:
        response["tag"] = request["tag"]
    stops = request.get("stop_conditions", [])
    stops = stops if isinstance(stops, list) else [stops]
    prompt = _prompt(request, server)
    generator = server.generator
    generator.set_stop_conditions([*_ends(server.tokenizer), *stops])
    settings = _settings(request, server.tokenizer)
    heals = bool(request.get("token_healing", False))

    def begin() -> None:
        generator.begin_stream(prompt.ids, settings, token_healing=heals)

    await loop.run_in_executor(server.thread, begin)
    response |= {"util_text": prompt.text, "response_type": "chunk"}
    reply, reason, num_tokens = "", None, 0
    while reason is None:
        chunk, is_end, *_ = await loop.run_in_executor(server.thread, generator.stream)
        reply += chunk
        num_tokens += 1
        if is_streamed and chunk:
            whole = {"response": reply} if request.get("stream_full") else {}
            await ws.send(json.dumps({**response, "chunk": chunk, **whole}))
        if is_end:
            reason = "eos"
        elif num_tokens >= max_tokens or generator.full():
            reason = "num_tokens"
        elif server.stop_signal.is_set():
            reason = "interrupted"
    server.stop_signal.clear()
    response |= {
        "chunk": "",
        "response_type": "full",
        "response": reply,
        "stop_reason": reason,
    }


def _ends(tokenizer: ExLlamaV2Tokenizer) -> list[int]:
    """Tokens that end every reply."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
