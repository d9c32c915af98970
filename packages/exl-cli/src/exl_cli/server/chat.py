"""`POST /v1/chat/completions`: conversations, tools, JSON, reasoning apart from the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from exl_cli.server.completions import END_REASONS
from exl_cli.server.conversation import ChatPrompt, chat_prompt
from exl_cli.server.errors import ApiError
from exl_cli.server.logprobs import chat_entry, tokens_of_text
from exl_cli.server.schema import ChatBody
from exl_cli.server.service import (
    Service,
    check_stream,
    figures_of,
    in_thread,
    make_requests,
    results_of,
    timings_of,
    told_with_each,
    wants_usage_chunk,
)
from exl_cli.server.streaming import Event, TextEvents
from exl_cli.server.tools import ToolCall, ToolSplitter
from exl_core.engine.events import FinishEvent, SampledToken
from exl_core.engine.request import Report
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result
from exl_core.prompt.reasoning import ReasoningSplitter
from exl_core.tokenizer.base import Tokenizer

Delta = dict[str, object]
"""One field, and its value."""
_TEXTS = ("content", "reasoning_content")


class Chat:
    """One request, from its body to its choices."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs without logprobs", param="top_logprobs")
        check_stream(body)
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens are the same; send one",
                param="max_tokens",
            )
        self._service = service
        self._body = body
        self._n = body.n or 1
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = ""

    async def start(self, stack: AsyncExitStack) -> list[_Choice]:
        """Its choices, at work until the stack is closed."""
        body = self._body
        resident = await self._service.enter(stack, body.model, self._n)
        self._model = resident.name
        loaded = resident.runtime.loaded
        prompt = await in_thread(lambda: chat_prompt(loaded, body))
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        requests = make_requests(
            resident,
            body,
            [prompt.token_ids],
            max_tokens=body.max_completion_tokens or body.max_tokens,
            max_time_s=self._service.limits.reply_s,
            report=Report(log_probs=num_top),
            constraints=prompt.constraints,
            show_special=prompt.tool_format is not None  # its marks may be special tokens
            or any(tag in loaded.tokenizer.special_tokens for tag in prompt.tags),
        )
        jobs = await self._service.submit(stack, resident, requests)
        only_one = body.parallel_tool_calls is False
        return [
            _Choice(i, job, prompt, loaded.tokenizer, num_top, only_one=only_one)
            for i, job in enumerate(jobs)
        ]

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        choices = await self.start(stack)
        async for number, result in results_of([choice.job for choice in choices]):
            choices[number].take(result)
        return {
            **self._head("chat.completion"),
            "choices": [choice.message() for choice in choices],
            **figures_of(self._ends(choices), self._n),
        }

    async def events(self, choices: Sequence[_Choice]) -> AsyncIterator[Event]:
        head = self._head("chat.completion.chunk")
        jobs = [choice.job for choice in choices]
        beside = told_with_each(self._body, jobs)

        def chunk(choice: _Choice, delta: Delta, *, is_last: bool = False) -> dict[str, object]:
            return {**head, "choices": [choice.chunk(delta, is_last=is_last)], **beside()}

        def quick_of(choice: _Choice, name: str) -> TextEvents:
            return TextEvents(lambda text: chunk(choice, {name: text}))

        for choice in choices:
            yield chunk(choice, {"role": "assistant", "content": ""})
        quick: list[dict[str, TextEvents]] = []
        if not self._body.logprobs and not beside():
            quick = [{name: quick_of(choice, name) for name in _TEXTS} for choice in choices]
        left = len(choices)
        wants_usage = wants_usage_chunk(self._body)
        async for number, result in results_of(jobs):
            choice = choices[number]
            for delta in choice.take(result):
                ((name, value),) = delta.items()
                if quick and isinstance(value, str):
                    yield quick[number][name].of(value)
                else:
                    yield chunk(choice, delta)
            if choice.end is not None:
                left -= 1
                last = chunk(choice, {}, is_last=True)
                if not left and not wants_usage:
                    last["timings"] = timings_of(self._ends(choices))
                yield last
        if wants_usage or left:
            yield {**head, "choices": [], **figures_of(self._ends(choices), self._n)}

    def _ends(self, choices: Sequence[_Choice]) -> list[FinishEvent]:
        return self._service.ends_of([choice.end for choice in choices])

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


class _Choice:
    """One reply: text, reasoning and calls apart, in pieces as they become certain."""

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
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._entries: list[dict[str, object]] = []  # of log-probabilities
        self._untold = 0  # from this entry on
        self._splitter: ReasoningSplitter | None = None
        if not prompt.is_constrained:
            self._splitter = ReasoningSplitter(*prompt.tags, prompt.begins_inside)
        self._tools: ToolSplitter | None = None
        if prompt.tool_format is not None:
            self._tools = ToolSplitter(
                prompt.tool_format, prompt.tools, begins_inside=prompt.is_call
            )

    @property
    def finish_reason(self) -> str | None:
        if self.end is None:
            return None
        reason = END_REASONS[self.end.reason]
        return "tool_calls" if self._calls and reason == "stop" else reason

    def take(self, result: Result) -> list[Delta]:
        """The deltas that come of it."""
        self._note(result.tokens)
        deltas = self._read(result.text, is_end=False) if result.text else []
        if result.finish is not None:
            self.end = result.finish
            self._note(tokens_of_text(self._tokenizer, result.finish))
            deltas += self._read("", is_end=True)
        return deltas

    def chunk(self, delta: Delta, *, is_last: bool = False) -> dict[str, object]:
        told: dict[str, object] | None = None
        if self._num_top is not None and (is_last or "content" in delta):
            told = {"content": self._entries[self._untold :]}
            self._untold = len(self._entries)
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": told,
            "finish_reason": self.finish_reason if is_last else None,
        }

    def message(self) -> dict[str, object]:
        content = "".join(self._content)
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if self._calls and not content.strip() else content,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.told() for call in self._calls]
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._num_top is None else {"content": self._entries},
            "finish_reason": self.finish_reason,
        }

    def _note(self, tokens: Sequence[SampledToken]) -> None:
        if self._num_top is not None:
            self._entries += [chat_entry(self._tokenizer, one, self._num_top) for one in tokens]

    def _read(self, text: str, *, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        answers = [text]
        if self._splitter is not None:
            pieces = self._splitter.finish() if is_end else self._splitter.feed(text)
            answers = [piece.text for piece in pieces if not piece.is_reasoning]
            for piece in pieces:
                if piece.is_reasoning:
                    self._reasoning.append(piece.text)
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
                self._content.append(part)
                deltas.append({"content": part})
            elif not (self._only_one and self._calls):
                self._calls.append(part)
                deltas.append({"tool_calls": [part.told(len(self._calls) - 1)]})
        return deltas
