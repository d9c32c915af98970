"""`POST /v1/completions`: continues texts, with log probabilities on request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from exl_cli.server.errors import ApiError
from exl_cli.server.logprobs import LegacyLogprobs
from exl_cli.server.schema import CompletionBody
from exl_cli.server.service import (
    Service,
    check_stream,
    extra_fields,
    figures_of,
    make_requests,
    refusing_long_prompts,
    results_of,
    timings_of,
    wants_usage_chunk,
)
from exl_cli.server.streaming import Event, TextEvents
from exl_core.engine.events import FinishEvent, FinishReason
from exl_core.engine.request import Report
from exl_core.errors import ContextLengthError
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result
from exl_core.tokenizer.base import Tokenizer

DEFAULT_MAX_TOKENS = 16
END_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.CONSTRAINT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME: "length",
    FinishReason.CANCELLED: "stop",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt. `text`: shown by `echo`. `hides_bos`: the first token is a BOS that does
    not occur in the text."""

    token_ids: list[int]
    text: str
    hides_bos: bool = False


class Completion:
    """One completion request: validates the body, starts its replies, collects the choices."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        check_stream(body)
        self._service = service
        self._body = body
        self._n = body.n or 1
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = ""
        self._prompts: list[Prompt] = []
        self._scores_only = _is_scores_only(body)

    async def start(self, stack: AsyncExitStack) -> list[_Choice]:
        """Start the replies. They run until the stack is closed."""
        body = self._body
        given = _listed(body)
        resident = await self._service.enter(stack, body.model, len(given) * self._n)
        self._model = resident.name
        tokenizer = resident.runtime.loaded.tokenizer
        add_bos = None if body.add_special_tokens else False
        ctx_size = resident.runtime.ctx_size
        with refusing_long_prompts(ctx_size, "prompt"):
            self._prompts = await self._service.in_thread(
                lambda: [
                    as_prompt(tokenizer, one, add_bos=add_bos, max_tokens=ctx_size - 1)
                    for one in given
                ],
                sum(map(len, given)),
            )
        vocab_size = resident.runtime.engine.vocab_size
        for prompt in self._prompts:
            if prompt.token_ids and max(prompt.token_ids) >= vocab_size:
                raise ApiError(
                    400,
                    f"prompt: the largest token id is {vocab_size - 1}",
                    param="prompt",
                    code="invalid_value",
                )
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        is_echoed = bool(body.echo) and body.logprobs is not None
        requests = make_requests(
            resident,
            body,
            [prompt.token_ids for prompt in self._prompts],
            max_tokens=1 if self._scores_only else max_tokens,
            max_time_s=self._service.limits.reply_s,
            report=Report(log_probs=body.logprobs, prompt=is_echoed),
        )
        jobs = await self._service.submit(stack, resident, requests)
        return [
            _Choice(i, job, self._prompts[i // self._n], body, tokenizer)
            for i, job in enumerate(jobs)
        ]

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        choices = await self.start(stack)
        async for number, result in results_of([choice.job for choice in choices]):
            choices[number].take(result)
        return {
            **self.head(),
            "choices": [choice.as_json(choice.take_text()) for choice in choices],
            **self.figures(choices),
        }

    async def stream(self, stack: AsyncExitStack) -> _CompletionStream:
        """Start the replies and return their events."""
        return _CompletionStream(self, self._body, await self.start(stack))

    def figures(self, choices: Sequence[_Choice]) -> dict[str, object]:
        return figures_of(self.ends(choices), self._n, no_reply=self._scores_only)

    def ends(self, choices: Sequence[_Choice]) -> list[FinishEvent]:
        return self._service.ends_of([choice.end for choice in choices])

    def head(self) -> dict[str, object]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }


class _CompletionStream:
    """Server-sent events of a completion request."""

    def __init__(
        self, completion: Completion, body: CompletionBody, choices: Sequence[_Choice]
    ) -> None:
        self.jobs = [choice.job for choice in choices]
        self._completion = completion
        self._choices = choices
        self._left = len(choices)
        self._wants_usage = wants_usage_chunk(body)
        self._extra = extra_fields(body, self.jobs)
        self._templates: list[TextEvents] = []
        if body.logprobs is None and not self._extra():
            self._templates = [TextEvents(partial(self._chunk, choice)) for choice in choices]

    def begin(self) -> Iterable[Event]:
        return ()

    def on_result(self, number: int, result: Result) -> Iterable[Event]:
        choice = self._choices[number]
        choice.take(result)
        if not choice.has_output:
            return
        text = choice.take_text()
        if self._templates and choice.end is None:
            yield self._templates[number].of(text)
            return
        chunk = self._chunk(choice, text)
        self._left -= choice.end is not None
        if not self._left and not self._wants_usage:
            chunk["timings"] = timings_of(self._completion.ends(self._choices))
        yield chunk

    def end(self) -> Iterable[Event]:
        if self._wants_usage or self._left:
            figures = self._completion.figures(self._choices)
            yield {**self._completion.head(), "choices": [], **figures}

    def _chunk(self, choice: _Choice, text: str) -> dict[str, object]:
        return {**self._completion.head(), "choices": [choice.as_json(text)], **self._extra()}


class _Choice:
    """One reply, reported whole or in pieces."""

    def __init__(
        self,
        index: int,
        job: AsyncJob,
        prompt: Prompt,
        body: CompletionBody,
        tokenizer: Tokenizer,
    ) -> None:
        self.job = job
        self.end: FinishEvent | None = None
        self._index = index
        self._text = prompt.text if body.echo else ""
        self._scores_only = _is_scores_only(body)
        self._logprobs: LegacyLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = LegacyLogprobs(tokenizer, body.logprobs, prompt.token_ids)
            if body.echo:
                self._logprobs.begin_echo(is_hidden=prompt.hides_bos)

    @property
    def has_output(self) -> bool:
        return bool(self._text) or self.end is not None

    def take(self, result: Result) -> None:
        if result.finish is not None:
            self.end = result.finish
        if self._logprobs is not None:
            self._logprobs.echo(result.scores)
        if self._scores_only:
            return
        self._text += result.text
        if self._logprobs is not None:
            self._logprobs.add(result.tokens)
            if self.end is not None:
                self._logprobs.add(self.end.tokens)

    def take_text(self) -> str:
        """Text since the previous call."""
        text, self._text = self._text, ""
        return text

    def as_json(self, text: str) -> dict[str, object]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": None if self.end is None else END_REASONS[self.end.reason],
        }


def as_prompt(
    tokenizer: Tokenizer, given: str | list[int], *, add_bos: bool | None, max_tokens: int
) -> Prompt:
    """Tokenize a prompt. Token ids stay unchanged.

    A text may spell out special tokens. BOS is added if the tokenizer adds one by default and the
    text does not begin with it. More than `max_tokens` tokens, not counting an added BOS, raise
    ContextLengthError.
    """
    if not isinstance(given, str):
        if len(given) > max_tokens:
            raise ContextLengthError(len(given), max_tokens)
        return Prompt(given, tokenizer.decode(given, skip_special=False))
    ids = tokenizer.encode(given, allow_special=True, add_bos=False, max_tokens=max_tokens)
    wants_bos = tokenizer.adds_bos if add_bos is None else add_bos
    bos = tokenizer.bos_id
    if not wants_bos or bos is None or ids[:1] == [bos]:
        return Prompt(ids, given)
    return Prompt([bos, *ids], given, hides_bos=True)


def _is_scores_only(body: CompletionBody) -> bool:
    """Does the request want only log probabilities of its prompt? One token is generated for it,
    because the engine scores a prompt only together with a reply. The token is not shown."""
    return body.max_tokens == 0 and bool(body.echo) and body.logprobs is not None


def _listed(body: CompletionBody) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[one for one in prompt if isinstance(one, int)]]
    return prompt
