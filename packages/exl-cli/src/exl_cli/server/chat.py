"""`POST /v1/chat/completions`: conversations, tools, JSON, reasoning separated from the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack

from exl_cli.server.completions import END_REASONS
from exl_cli.server.conversation import ChatPrompt, chat_prompt, num_chars
from exl_cli.server.engine_request import Wanted, refusing_long_prompts
from exl_cli.server.errors import ApiError
from exl_cli.server.logprobs import chat_entry, tokens_of_text
from exl_cli.server.record import Record
from exl_cli.server.schema import ChatBody
from exl_cli.server.service import (
    Service,
    extra_fields,
    figures_of,
    results_of,
    timings_of,
    wants_usage_chunk,
)
from exl_cli.server.streaming import EVENTS, Event, EventStream, TextEvents
from exl_cli.server.tools import ToolCall, ToolSplitter
from exl_core.engine.events import FinishEvent, SampledToken
from exl_core.engine.request import Report
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result
from exl_core.prompt.reasoning import ReasoningSplitter
from exl_core.tokenizer.base import Tokenizer

Delta = dict[str, object]
"""One field of a message with its new text or value."""
_TEXTS = ("content", "reasoning_content")


class Chat:
    """One chat request: validates the body, starts its replies, collects the choices."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        settings = body.settings
        if settings.top_logprobs and not settings.logprobs:
            raise ApiError(400, "top_logprobs without logprobs", param="top_logprobs")
        self.record = Record()
        self._service = service
        self._body = body
        self._n = settings.n
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = ""

    async def start(self, stack: AsyncExitStack) -> list[Choice]:
        """Start the replies. They run until the stack is closed."""
        body, settings = self._body, self._body.settings
        resident = await self._service.enter(stack, body.model, self._n)
        self.model = resident.name
        loaded = resident.runtime.loaded
        ctx_size = resident.runtime.ctx_size
        with refusing_long_prompts(ctx_size, "messages"):
            prompt = await self._service.in_thread(
                lambda: chat_prompt(
                    resident.style, body, ctx_size - 1, allow_special=self._service.allow_special
                ),
                num_chars(body),
            )
        num_top = (settings.top_logprobs or 0) if settings.logprobs else None
        jobs = await self._service.submit(
            stack,
            resident,
            settings,
            [prompt.token_ids],
            Wanted(
                param="messages",
                max_tokens=settings.max_tokens,
                max_time_s=self._service.limits.reply_s,
                report=Report(log_probs=num_top),
                negative_ids=prompt.negative_ids,
                constraints=prompt.constraints,
                stop=resident.style.stops,
                show_special=prompt.tool_format is not None  # its markers may be special tokens
                or any(tag in loaded.tokenizer.special_tokens for tag in prompt.tags),
            ),
        )
        only_one = body.parallel_tool_calls is False
        return [
            Choice(i, job, prompt, loaded.tokenizer, num_top, only_one=only_one)
            for i, job in enumerate(jobs)
        ]

    async def collect(self, stack: AsyncExitStack) -> list[Choice]:
        """The complete replies."""
        choices = await self.start(stack)
        async for number, result in results_of([choice.job for choice in choices]):
            choices[number].take(result)
        return choices

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        choices = await self.collect(stack)
        return {
            **self.head("chat.completion"),
            "choices": [choice.message() for choice in choices],
            **self.figures(choices),
        }

    async def stream(self, stack: AsyncExitStack) -> EventStream:
        """Start the replies and return their events."""
        return _ChatStream(self, self._body, await self.start(stack))

    def ends(self, choices: Sequence[Choice]) -> list[FinishEvent]:
        ends = self._service.ends_of([choice.end for choice in choices])
        self.record.ends = ends
        return ends

    def figures(self, choices: Sequence[Choice]) -> dict[str, object]:
        return figures_of(self.ends(choices), self._n)

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self.created, "model": self.model}


class OneReplyChat(Chat):
    """A chat request of an API that has one reply."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body)
        body.settings.check_one_reply()


class _ChatStream:
    """Server-sent events of a chat request."""

    framing = EVENTS

    def __init__(self, chat: Chat, body: ChatBody, choices: Sequence[Choice]) -> None:
        self.jobs = [choice.job for choice in choices]
        self._chat = chat
        self._head = chat.head("chat.completion.chunk")
        self._choices = choices
        self._left = len(choices)
        self._wants_usage = wants_usage_chunk(body)
        self._extra = extra_fields(body, self.jobs)
        self._uses_templates = not body.settings.logprobs and not self._extra()
        self._templates: list[dict[str, TextEvents]] = []

    def begin(self) -> Iterable[Event]:
        for choice in self._choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        if self._uses_templates:
            self._templates = [
                {name: self._texts(choice, name) for name in _TEXTS} for choice in self._choices
            ]

    def on_result(self, number: int, result: Result) -> Iterable[Event]:
        choice = self._choices[number]
        for delta in choice.take(result):
            ((name, value),) = delta.items()
            if self._templates and isinstance(value, str):
                yield self._templates[number][name].of(value)
            else:
                yield self._chunk(choice, delta)
        if choice.end is not None:
            self._left -= 1
            last = self._chunk(choice, {}, is_last=True)
            if not self._left and not self._wants_usage:
                last["timings"] = timings_of(self._chat.ends(self._choices))
            yield last

    def end(self) -> Iterable[Event]:
        if self._wants_usage or self._left:
            yield {**self._head, "choices": [], **self._chat.figures(self._choices)}

    def _chunk(self, choice: Choice, delta: Delta, *, is_last: bool = False) -> dict[str, object]:
        return {**self._head, "choices": [choice.chunk(delta, is_last=is_last)], **self._extra()}

    def _texts(self, choice: Choice, name: str) -> TextEvents:
        return TextEvents(lambda text: self._chunk(choice, {name: text}))


class Choice:
    """One reply, split into text, reasoning and tool calls. A piece is reported once no further
    token can change its kind."""

    def __init__(
        self,
        index: int,
        job: AsyncJob,
        prompt: ChatPrompt,
        tokenizer: Tokenizer,
        num_top: int | None,
        *,
        only_one: bool,
    ) -> None:
        self.job = job
        self.end: FinishEvent | None = None
        self._index = index
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._only_one = only_one
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self.calls: list[ToolCall] = []
        self.entries: list[dict[str, object]] = []  # log probabilities by token
        self._num_reported = 0  # number of entries taken so far
        self._splitter: ReasoningSplitter | None = None
        if not prompt.is_constrained:
            self._splitter = ReasoningSplitter(*prompt.tags, prompt.begins_inside)
        self._tools: ToolSplitter | None = None
        if prompt.tool_format is not None:
            self._tools = ToolSplitter(
                prompt.tool_format, prompt.tools, begins_inside=prompt.is_call
            )

    @property
    def content(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def finish_reason(self) -> str | None:
        if self.end is None:
            return None
        reason = END_REASONS[self.end.reason]
        return "tool_calls" if self.calls and reason == "stop" else reason

    def take(self, result: Result) -> list[Delta]:
        """Process a result of the engine. Returns the new deltas."""
        self._note(result.tokens)
        deltas = self._read(result.text, is_end=False) if result.text else []
        if result.finish is not None:
            self.end = result.finish
            self._note(tokens_of_text(self._tokenizer, result.finish))
            deltas += self._read("", is_end=True)
        return deltas

    def chunk(self, delta: Delta, *, is_last: bool = False) -> dict[str, object]:
        reported: dict[str, object] | None = None
        if self._num_top is not None and (is_last or "content" in delta):
            reported = {"content": self.take_entries()}
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": reported,
            "finish_reason": self.finish_reason if is_last else None,
        }

    def take_entries(self) -> list[dict[str, object]]:
        """Log probabilities of the tokens since the previous call, if the request asks for them."""
        taken = self.entries[self._num_reported :]
        self._num_reported = len(self.entries)
        return taken

    def message(self) -> dict[str, object]:
        content = self.content
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if self.calls and not content.strip() else content,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_json() for call in self.calls]
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._num_top is None else {"content": self.entries},
            "finish_reason": self.finish_reason,
        }

    def _note(self, tokens: Sequence[SampledToken]) -> None:
        if self._num_top is not None:
            self.entries += [chat_entry(self._tokenizer, one, self._num_top) for one in tokens]

    def _read(self, text: str, *, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        answers = [text]
        if self._splitter is not None:
            pieces = self._splitter.finish() if is_end else self._splitter.feed(text)
            answers = [piece.text for piece in pieces if not piece.is_reasoning]
            for piece in pieces:
                if piece.is_reasoning:
                    self._thoughts.append(piece.text)
                    deltas.append({"reasoning_content": piece.text})
        for answer in answers:
            deltas += self._answer(answer)
        if is_end and self._tools is not None:
            deltas += self._sorted(self._tools.finish())
        return deltas

    def _answer(self, text: str) -> list[Delta]:
        if not text:
            return []
        return self._sorted([text] if self._tools is None else self._tools.feed(text))

    def _sorted(self, parts: Sequence[str | ToolCall]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if isinstance(part, str):
                self._texts.append(part)
                deltas.append({"content": part})
            elif not (self._only_one and self.calls):
                self.calls.append(part)
                deltas.append({"tool_calls": [part.as_json(len(self.calls) - 1)]})
        return deltas
