"""`POST /v1/messages`: Anthropic's API, as another form of a chat request.

The body becomes that of a chat request; fields that both APIs have keep their names. The reply
becomes content blocks, whole or as Anthropic's events. Knows nothing of prompts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

from exl_cli.server.chat import Choice, Delta, OneReplyChat
from exl_cli.server.errors import ApiError
from exl_cli.server.schema import ChatBody, parsed
from exl_cli.server.service import Service
from exl_cli.server.streaming import NAMED_EVENTS, Event
from exl_cli.server.tools import arguments_object
from exl_core.engine.events import FinishEvent
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result

Json = dict[str, Any]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REFUSED = ("mcp_servers", "container")
_INERT = ("context_management", "betas", "inference_geo", "cache_control", "speed")


def model_fields(name: str, created: int) -> Json:
    """Fields of a model in Anthropic's lists, which other APIs do not have."""
    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "display_name": name, "created_at": at}


def page_fields(names: Sequence[str]) -> Json:
    """Fields of a list of models. All of them are on one page."""
    return {"has_more": False, "first_id": names[0], "last_id": names[-1]}


def chat_body(body: Mapping[str, Any]) -> ChatBody:
    """The chat request that a request of Anthropic's clients stands for."""
    left = {name: value for name, value in body.items() if value is not None}
    for name in _REFUSED:
        if left.pop(name, None):
            raise ApiError(400, f"{name}: not supported", param=name, code="unsupported_parameter")
    for name in _INERT:
        left.pop(name, None)
    messages = list(_messages(left.pop("system", None), _list(left, "messages")))
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        messages[-1]["prefix"] = True  # the reply continues it
    chat: Json = {"messages": messages, "stop": left.pop("stop_sequences", None)}
    if "tools" in left:
        chat["tools"] = [_tool(tool) for tool in _list(left, "tools")]
    chosen = left.pop("tool_choice", None)
    if chosen is not None:
        chat |= _tool_choice(chosen)
    thinking = left.pop("thinking", None)
    if isinstance(thinking, dict):
        chat["enable_thinking"] = thinking.get("type") != "disabled"
    left |= _output(left.pop("output_config", None), left.pop("output_format", None))
    return parsed(ChatBody, {**left, **chat})


def _output(config: object, shape: object) -> Json:
    found: Json = {}
    given = config if isinstance(config, dict) else {}
    if given.get("effort") is not None:
        found["reasoning_effort"] = given["effort"]
    shape = given.get("format") or shape
    if shape is not None:
        found["response_format"] = shape
    return found


def _list(body: Json, name: str) -> list[Any]:
    value = body.pop(name, None)
    if not isinstance(value, list):
        raise ApiError(400, f"{name}: a list is expected", param=name, code="invalid_value")
    return value


def _messages(system: object, given: list[Any]) -> Iterator[Json]:
    if system:
        yield {"role": "system", "content": system}
    for number, message in enumerate(given):
        where = f"messages.{number}"
        if not isinstance(message, dict):
            raise ApiError(400, f"{where}: an object is expected", param=where)
        content = message.get("content")
        if not isinstance(content, list):
            yield {"role": message.get("role"), "content": content}
        elif message.get("role") == "assistant":
            yield _assistant(content)
        else:
            yield from _user(str(message.get("role")), content)


def _assistant(content: list[Any]) -> Json:
    message: Json = {"role": "assistant"}
    parts, thoughts, calls = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id") or "", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            parts.append(block)
    message["content"] = parts or None
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, content: list[Any]) -> Iterator[Json]:
    """The blocks in their order. Each result of a tool is a message of its own."""
    parts: list[Any] = []
    for block in content:
        if not (isinstance(block, dict) and block.get("type") == "tool_result"):
            parts.append(block)
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        result = block.get("content")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    if parts:
        yield {"role": role, "content": parts}


def _tool(tool: object) -> Json:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        raise ApiError(
            400,
            f"tools: {str(kind or 'a tool without input_schema')[:60]} is not supported; tools are "
            "functions with an input_schema",
            param="tools",
            code="unsupported_parameter",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


def _tool_choice(chosen: object) -> Json:
    kind = chosen.get("type") if isinstance(chosen, dict) else None
    found: Json = {}
    if kind == "tool":
        named = {"name": chosen.get("name")} if isinstance(chosen, dict) else {}
        found["tool_choice"] = {"type": "function", "function": named}
    elif kind in _CHOICES:
        found["tool_choice"] = _CHOICES[str(kind)]
    else:
        raise ApiError(400, "tool_choice: auto, any, tool or none is expected", param="tool_choice")
    if isinstance(chosen, dict) and chosen.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


class Messages(OneReplyChat):
    """A request of Anthropic's clients: one reply, as content blocks."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body)
        self.id = f"msg_{uuid.uuid4().hex}"

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        (choice,) = await self.collect(stack)
        (end,) = self.ends([choice])
        blocks: list[Json] = []
        if choice.reasoning:
            blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.content.strip() or not choice.calls:
            blocks.append({"type": "text", "text": choice.content})
        for call in choice.calls:
            inputs = arguments_object(call.arguments)
            blocks.append(
                {"type": "tool_use", "id": call.call_id, "name": call.name, "input": inputs}
            )
        usage = usage_of(end)
        return {**self.message(usage), "content": blocks, **self.stop_of(choice, end)}

    async def stream(self, stack: AsyncExitStack) -> MessageEvents:
        return MessageEvents(self, await self.start(stack))

    def stop_of(self, choice: Choice, end: FinishEvent) -> Json:
        """Reason of the end. A text of the prompt format that ends a reply is the end of a turn,
        not a stop sequence of the request."""
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(str(choice.finish_reason))
        sequence = end.stopped_by if end.stopped_by in self._body.settings.stop else None
        found = reason or ("end_turn" if sequence is None else "stop_sequence")
        return {"stop_reason": found, "stop_sequence": sequence}

    def message(self, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


class MessageEvents:
    """Anthropic's events of one reply. Only one content block is open at a time."""

    framing = NAMED_EVENTS

    def __init__(self, work: Messages, choices: list[Choice]) -> None:
        self._work = work
        (self._choice,) = choices
        self._num_blocks = 0
        self._open: str | None = None  # type of the open block

    @property
    def jobs(self) -> list[AsyncJob]:
        return [self._choice.job]

    def begin(self) -> Iterable[Event]:
        prompt = len(self._choice.job.job.request.prompt_ids)
        usage = {"input_tokens": prompt, "output_tokens": 0}
        yield {"type": "message_start", "message": self._work.message(usage)}

    def on_result(self, _number: int, result: Result) -> Iterable[Event]:
        for delta in self._choice.take(result):
            yield from self._events(delta)

    def end(self) -> Iterable[Event]:
        (end,) = self._work.ends([self._choice])
        if not self._num_blocks:
            yield from self._begin("text", {"text": ""})
        yield from self._close()
        stop = self._work.stop_of(self._choice, end)
        yield {"type": "message_delta", "delta": stop, "usage": usage_of(end)}
        yield {"type": "message_stop"}

    def _events(self, delta: Delta) -> Iterator[Event]:
        ((name, value),) = delta.items()
        if name == "tool_calls":
            assert isinstance(value, list), "a list of calls"
            for call in value:
                function = call["function"]
                block = {"id": call["id"], "name": function["name"], "input": {}}
                yield from self._begin("tool_use", block)
                yield self._delta("input_json_delta", "partial_json", function["arguments"])
        elif name == "reasoning_content":
            if self._open != "thinking":
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", "thinking", value)
        else:
            if self._open != "text":
                yield from self._begin("text", {"text": ""})
            yield self._delta("text_delta", "text", value)

    def _begin(self, kind: str, block: Json) -> Iterator[Event]:
        yield from self._close()
        self._open = kind
        yield {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": {"type": kind, **block},
        }
        self._num_blocks += 1

    def _delta(self, kind: str, field: str, value: object) -> Event:
        delta = {"type": kind, field: value}
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = None


def usage_of(end: FinishEvent) -> Json:
    """Anthropic counts cached tokens of the prompt apart from the others."""
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "cache_read_input_tokens": end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": end.completion_tokens,
    }
