"""`POST /v1/responses`: OpenAI's newer API, as another form of a chat request.

Nothing is stored: a request has the whole conversation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from exl_cli.server.chat import Choice, Delta, OneReplyChat
from exl_cli.server.errors import ApiError
from exl_cli.server.schema import ChatBody, parsed
from exl_cli.server.service import Service, usage_of
from exl_cli.server.streaming import NAMED_EVENTS, Event
from exl_core.engine.events import FinishEvent
from exl_core.errors import printable
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result

Json = dict[str, Any]
_STORED = ("previous_response_id", "conversation", "prompt", "background")
_INERT = ("truncation", "max_tool_calls", "context_management")
_LOGPROBS = "message.output_text.logprobs"  # a value of `include`
_ECHOED = ("instructions", "temperature", "top_p", "metadata", "max_output_tokens")


def chat_body(body: Mapping[str, Any]) -> ChatBody:
    """The chat request that a request of this API stands for."""
    left = dict(body)
    for name in _STORED:
        if left.pop(name, None):
            raise ApiError(
                400,
                f"{name}: this server stores nothing; send the whole conversation as input",
                param=name,
                code="unsupported_parameter",
            )
    for name in _INERT:
        left.pop(name, None)
    messages = list(_messages(left.pop("instructions", None), left.pop("input", None)))
    chat: Json = {"messages": messages, "max_tokens": left.pop("max_output_tokens", None)}
    shown = left.pop("text", None)
    if isinstance(shown, dict):
        shape = shown.get("format")
        if isinstance(shape, dict):
            is_schema = shape.get("type") == "json_schema" and "json_schema" not in shape
            chat["response_format"] = {**shape, "json_schema": shape} if is_schema else shape
    reasoning = left.pop("reasoning", None)
    if isinstance(reasoning, dict):
        chat["reasoning_effort"] = reasoning.get("effort")
    if left.get("tools") is not None:
        chat["tools"] = [_tool(tool) for tool in _listed(left.pop("tools"), "tools")]
    chosen = left.get("tool_choice")
    if isinstance(chosen, dict) and "name" in chosen:
        left["tool_choice"] = _named_tool(chosen)
    if isinstance(chosen, dict) and chosen.get("type") == "allowed_tools" and "tools" in chosen:
        named = [_named_tool(tool) for tool in _listed(chosen["tools"], "tool_choice")]
        allowed = {"mode": chosen.get("mode"), "tools": named}
        left["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    included = left.pop("include", None)
    is_included = isinstance(included, list) and _LOGPROBS in included
    if left.get("top_logprobs") or is_included:
        chat["logprobs"] = True
    return parsed(ChatBody, {**left, **chat})


def _named_tool(tool: object) -> object:
    """A tool of `tool_choice` as chat completions name it."""
    if not isinstance(tool, dict) or "name" not in tool:
        return tool
    return {"type": tool.get("type", "function"), "function": {"name": tool["name"]}}


def _listed(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ApiError(400, f"{name}: a list is expected", param=name, code="invalid_value")
    return value


def _messages(instructions: object, given: object) -> Iterator[Json]:
    """Messages of the input items. The parts of one reply (reasoning, text, calls) are joined."""
    if instructions:
        yield {"role": "system", "content": instructions}
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    reply: Json | None = None
    for number, item in enumerate(_listed(items, "input")):
        message = _message(item, f"input.{number}")
        is_reply = message["role"] == "assistant"
        if reply is not None and is_reply and _continues(reply, message):
            calls = [*reply.get("tool_calls", ()), *message.pop("tool_calls", ())]
            reply |= message | ({"tool_calls": calls} if calls else {})
            continue
        if reply is not None:
            yield reply
        reply = message if is_reply else None
        if not is_reply:
            yield message
    if reply is not None:
        yield reply


def _continues(reply: Json, part: Json) -> bool:
    """Reasoning begins a reply; text follows reasoning only; calls follow anything."""
    if "tool_calls" in part:
        return True
    return "content" in part and not {"content", "tool_calls"} & reply.keys()


def _message(item: object, where: str) -> Json:
    """The message of one input item."""
    if not isinstance(item, dict):
        raise ApiError(400, f"{where}: an object is expected", param="input")
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _thought(item)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id") or "", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": item.get("output"),
        }
    raise ApiError(
        400,
        f"{where}: items of type {str(kind)[:60]!r} are not supported",
        param="input",
        code="unsupported_parameter",
    )


def _thought(item: Json) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _tool(tool: object) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise ApiError(
            400,
            f"tools: {str(kind)[:60]!r} is not supported; this server has functions only",
            param="tools",
            code="unsupported_parameter",
        )
    if "function" in tool:
        return tool
    named = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool.get(name) for name in named}}


class Responses(OneReplyChat):
    """A request of this API: one reply, as output items."""

    def __init__(self, service: Service, body: ChatBody, given: Mapping[str, Any]) -> None:
        super().__init__(service, body)
        self._given = given
        self._id = f"resp_{uuid.uuid4().hex}"

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        (choice,) = await self.collect(stack)
        (end,) = self.ends([choice])
        output: list[Json] = []
        if choice.reasoning:
            output.append(reasoning_item(choice.reasoning))
        if choice.content.strip() or not choice.calls:
            output.append(message_item(choice.content, choice.entries))
        output += [call_item(call.call_id, call.name, call.arguments) for call in choice.calls]
        return self.response(output, end)

    async def stream(self, stack: AsyncExitStack) -> ResponseEvents:
        return ResponseEvents(self, await self.start(stack))

    def response(self, output: list[Json], end: FinishEvent | None) -> Json:
        """The response object. `end` None: the reply has not ended."""
        given = self._given
        was_cut = end is not None and is_cut(end)
        status = "in_progress" if end is None else "incomplete" if was_cut else "completed"
        if was_cut and output:
            output[-1]["status"] = status
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None if end is None else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "model": self.model,
            "output": output,
            **{name: given.get(name) for name in _ECHOED},
            "metadata": given.get("metadata") or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "text": given.get("text") or {"format": {"type": "text"}},
            "reasoning": given.get("reasoning") or {"effort": None, "summary": None},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if end is None else _usage(end),
        }


def is_cut(end: FinishEvent) -> bool:
    """Whether a limit has ended the reply."""
    return end.reason.value in ("length", "time")


def _usage(end: FinishEvent) -> Json:
    counts: Json = usage_of([end], 1)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def text_part(text: str, logprobs: list[Any] | None = None) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message_item(text: str, logprobs: list[Any] | None = None) -> Json:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text_part(text, logprobs)],
    }


def reasoning_item(text: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{uuid.uuid4().hex}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": "completed",
    }


def call_item(call_id: str, name: str, arguments: str) -> Json:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


class ResponseEvents:
    """Events of one reply, with ascending sequence numbers. One output item is open at a time."""

    framing = NAMED_EVENTS

    def __init__(self, work: Responses, choices: list[Choice]) -> None:
        self._work = work
        (self._choice,) = choices
        self._output: list[Json] = []  # the items so far; the last one may be open
        self._is_open = False
        self._text: list[str] = []
        self._number = 0
        self._num_reported = 0  # log probabilities in the deltas so far

    @property
    def jobs(self) -> list[AsyncJob]:
        return [self._choice.job]

    def begin(self) -> Iterable[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._work.response([], None))

    def on_result(self, _number: int, result: Result) -> Iterable[Event]:
        for delta in self._choice.take(result):
            yield from self._events(delta)

    def end(self) -> Iterable[Event]:
        (end,) = self._work.ends([self._choice])
        if not self._output:
            yield from self._open(message_item(""))
        if is_cut(end):
            self._output[-1]["status"] = "incomplete"
        yield from self._close()
        response = self._work.response(self._output, end)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> Event:
        """The last event of a stream that fails."""
        said = {"code": error.code, "message": printable(error.message), "param": error.param}
        return self._event("error", **said)

    def _event(self, kind: str, **fields: object) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _events(self, delta: Delta) -> Iterator[Event]:
        ((name, value),) = delta.items()
        if name == "tool_calls":
            assert isinstance(value, list), "a list of calls"
            for call in value:
                function = call["function"]
                arguments = function["arguments"]
                yield from self._open(call_item(call["id"], function["name"], ""))
                place = self._place()
                kind = "response.function_call_arguments"
                yield self._event(f"{kind}.delta", **place, delta=arguments)
                yield self._event(
                    f"{kind}.done", **place, name=function["name"], arguments=arguments
                )
                self._output[-1]["arguments"] = arguments
            return
        kind = "reasoning" if name == "reasoning_content" else "message"
        if not (self._is_open and self._output[-1]["type"] == kind):
            made = reasoning_item("") if kind == "reasoning" else message_item("")
            yield from self._open(made)
        self._text.append(str(value))
        place = self._place(part=True)
        if kind == "message":
            place["logprobs"] = self._choice.entries[self._num_reported :]
            self._num_reported = len(self._choice.entries)
        yield self._event(f"{self._text_event()}.delta", **place, delta=value)

    def _text_event(self) -> str:
        is_message = self._output[-1]["type"] == "message"
        return "response.output_text" if is_message else "response.reasoning_text"

    def _place(self, *, part: bool = False) -> Json:
        item = self._output[-1]
        place: Json = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if part:
            place["content_index"] = 0
            if item["type"] == "message":
                place["logprobs"] = []
        return place

    def _open(self, item: Json) -> Iterator[Event]:
        yield from self._close()
        self._output.append(item)
        self._is_open = True
        empty = {**item, "status": "in_progress"}
        if "content" in item:
            empty["content"] = []
        index = len(self._output) - 1
        yield self._event("response.output_item.added", output_index=index, item=empty)
        if item["type"] == "message":
            yield self._part("added")

    def _part(self, what: str) -> Event:
        item = self._output[-1]
        place = {
            name: value for name, value in self._place(part=True).items() if name != "logprobs"
        }
        return self._event(f"response.content_part.{what}", **place, part=item["content"][0])

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        if "content" in item:
            text, self._text = "".join(self._text), []
            item["content"][0] = {**item["content"][0], "text": text}
            place = self._place(part=True)
            if item["type"] == "message":
                place["logprobs"] = item["content"][0]["logprobs"] = self._choice.entries
            yield self._event(f"{self._text_event()}.done", **place, text=text)
            if item["type"] == "message":
                yield self._part("done")
        index = len(self._output) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)
