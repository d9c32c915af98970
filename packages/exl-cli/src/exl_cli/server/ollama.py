"""ollama's API, `/api/*`, as another form of chat requests and completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

from exl_cli.server.chat import Choice, Delta, OneReplyChat
from exl_cli.server.completions import END_REASONS, Completion
from exl_cli.server.errors import ApiError
from exl_cli.server.schema import ChatBody, CompletionBody, parsed
from exl_cli.server.service import Service
from exl_cli.server.settings import TOKEN_LIMITS
from exl_cli.server.streaming import JSON_LINES, Event
from exl_cli.server.tools import arguments_object
from exl_core.engine.events import FinishEvent
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result

Json = dict[str, Any]
_ENDLESS = -1


def chat_body(body: Mapping[str, Any]) -> ChatBody:
    """The chat request that `/api/chat` stands for."""
    left = _settings(body)
    messages = left.get("messages")
    if isinstance(messages, list):
        left["messages"] = [_message(message) for message in messages]
    return parsed(ChatBody, left)


def generate_body(body: Mapping[str, Any], *, has_template: bool) -> ChatBody | CompletionBody:
    """The request that `/api/generate` stands for: a chat of one message, unless `raw`."""
    left = _settings(body)
    for name in ("context", "template"):
        if left.pop(name, None):
            raise ApiError(
                400,
                f"{name}: not supported; /api/chat takes the whole conversation",
                param=name,
                code="unsupported_parameter",
            )
    system = left.pop("system", None)
    if left.pop("raw", None) or left.get("suffix") or not has_template:
        left.pop("enable_thinking", None)
        left.pop("reasoning_effort", None)
        num_top = left.pop("top_logprobs", None)
        if isinstance(left.get("logprobs"), bool):
            left["logprobs"] = (num_top or 0) if left["logprobs"] else None
        return parsed(CompletionBody, left)
    first = [{"role": "system", "content": system}] if system else []
    user = {"role": "user", "content": left.pop("prompt", ""), "images": left.pop("images", None)}
    left.pop("suffix", None)
    return parsed(ChatBody, {**left, "messages": [*first, _message(user)]})


def _settings(body: Mapping[str, Any]) -> Json:
    """The body with its options at the top, under the names of the settings table."""
    left = dict(body)
    options = left.pop("options", None) or {}
    if not isinstance(options, dict):
        raise ApiError(400, "options: an object is expected", param="options")
    shape = left.pop("format", None)
    if shape:
        is_any = shape == "json"
        left["response_format"] = {"type": "json_object"} if is_any else _schema(shape)
    think = left.pop("think", None)
    if isinstance(think, bool):
        left["enable_thinking"] = think
    elif think is not None:
        left["reasoning_effort"] = think
    left.setdefault("stream", True)
    found = {**options, **left}
    if not any(name in found for name in ("max_tokens", *TOKEN_LIMITS)):
        found["num_predict"] = _ENDLESS
    return found


def _schema(shape: object) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": shape}}


def _message(message: object) -> object:
    if not isinstance(message, dict):
        return message
    left = dict(message)
    if left.pop("images", None):
        raise ApiError(
            400, "images: this model takes text only", param="images", code="unsupported_parameter"
        )
    named = left.pop("tool_name", None)
    if named is not None:
        left.setdefault("name", named)
    return left


def created_at() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def counts_of(end: FinishEvent) -> Json:
    """Counts and times in nanoseconds."""
    times = {"prompt_eval_duration": end.prefill_s, "eval_duration": end.decode_s}
    total = end.queued_s + end.prefill_s + end.decode_s
    return {
        "total_duration": int(1e9 * total),
        "load_duration": 0,
        "prompt_eval_count": end.prompt_tokens,
        "eval_count": end.completion_tokens,
        **{name: int(1e9 * value) for name, value in times.items()},
    }


class OllamaChat(OneReplyChat):
    """`/api/chat`, or `/api/generate` with a template: one reply, whole or as lines of JSON."""

    def __init__(self, service: Service, body: ChatBody, *, is_generate: bool = False) -> None:
        super().__init__(service, body)
        self._is_generate = is_generate

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        (choice,) = await self.collect(stack)
        message: Json = {"content": choice.content}
        if choice.reasoning:
            message["thinking"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [_call(call.as_json()) for call in choice.calls]
        return {**self.line(message), **self.last(choice), **_logprobs(choice.take_entries())}

    async def stream(self, stack: AsyncExitStack) -> ChatLines:
        return ChatLines(self, await self.start(stack))

    def line(self, message: Mapping[str, Any]) -> Json:
        head = {"model": self.model, "created_at": created_at(), "done": False}
        if not self._is_generate:
            return {**head, "message": {"role": "assistant", "content": "", **message}}
        rest = {name: value for name, value in message.items() if name != "content"}
        return {**head, "response": message.get("content", ""), **rest}

    def last(self, choice: Choice) -> Json:
        (end,) = self.ends([choice])
        return _last(end)


class _Lines:
    """Lines of one reply."""

    framing = JSON_LINES

    def __init__(self, choices: Sequence[Any]) -> None:
        (self._choice,) = choices

    @property
    def jobs(self) -> list[AsyncJob]:
        return [self._choice.job]

    def begin(self) -> Iterable[Event]:
        return ()


class ChatLines(_Lines):
    """Lines of one chat reply; the last one has its counts."""

    def __init__(self, work: OllamaChat, choices: Sequence[Choice]) -> None:
        super().__init__(choices)
        self._work = work

    def on_result(self, _number: int, result: Result) -> Iterable[Event]:
        for delta in self._choice.take(result):
            yield {**self._work.line(_fields(delta)), **_logprobs(self._choice.take_entries())}

    def end(self) -> Iterable[Event]:
        rest = _logprobs(self._choice.take_entries())
        yield {**self._work.line({}), **self._work.last(self._choice), **rest}


def _logprobs(entries: Sequence[Mapping[str, object]]) -> Json:
    """Log probabilities of the tokens of a line. A line without them has no such field."""
    return {"logprobs": list(entries)} if entries else {}


def _last(end: FinishEvent) -> Json:
    """Fields that only the last line of a reply has."""
    return {"done": True, "done_reason": END_REASONS[end.reason], **counts_of(end)}


def _fields(delta: Delta) -> Json:
    ((name, value),) = delta.items()
    if name == "tool_calls":
        assert isinstance(value, list), "a list of calls"
        return {"tool_calls": [_call(call) for call in value]}
    return {"thinking" if name == "reasoning_content" else name: value}


def _call(call: Mapping[str, Any]) -> Json:
    """ollama has the arguments of a call as an object."""
    function = call["function"]
    arguments = arguments_object(function["arguments"])
    return {"id": call["id"], "function": {"name": function["name"], "arguments": arguments}}


class OllamaCompletion(Completion):
    """`/api/generate` without a template: the prompt as it is."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        super().__init__(service, body)
        body.settings.check_one_reply()

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        (choice,) = await self.collect(stack)
        (end,) = self.ends([choice])
        return {**self.line(choice.take_text()), **_last(end), **_of_completion(choice)}

    async def stream(self, stack: AsyncExitStack) -> CompletionLines:
        return CompletionLines(self, await self.start(stack))

    def line(self, text: str) -> Json:
        model = self.model
        return {"model": model, "created_at": created_at(), "response": text, "done": False}


class CompletionLines(_Lines):
    """Lines of one completion; the last one has its counts."""

    def __init__(self, work: OllamaCompletion, choices: Sequence[Any]) -> None:
        super().__init__(choices)
        self._work = work

    def on_result(self, _number: int, result: Result) -> Iterable[Event]:
        self._choice.take(result)
        text = self._choice.take_text()
        return [{**self._work.line(text), **_of_completion(self._choice)}] if text else []

    def end(self) -> Iterable[Event]:
        (end,) = self._work.ends([self._choice])
        yield {**self._work.line(""), **_last(end), **_of_completion(self._choice)}


def _of_completion(choice: Any) -> Json:
    return _logprobs(choice.probabilities().get("completion_probabilities", ()))
