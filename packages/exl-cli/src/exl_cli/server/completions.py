"""`POST /v1/completions`: continues texts, with log probabilities on request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from exl_cli.server.engine_request import (
    Wanted,
    constraints_of,
    refusing_long_prompts,
    uses_guidance,
)
from exl_cli.server.errors import ApiError
from exl_cli.server.logprobs import LegacyLogprobs
from exl_cli.server.record import Record
from exl_cli.server.schema import CompletionBody
from exl_cli.server.service import (
    Service,
    extra_fields,
    figures_of,
    results_of,
    timings_of,
    wants_usage_chunk,
)
from exl_cli.server.settings import Settings
from exl_cli.server.streaming import EVENTS, Event, EventStream, TextEvents
from exl_core.constrain.filter import Constraint
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

FILL_IN_ORDERS = (
    ("<|fim_prefix|>", "before", "<|fim_suffix|>", "after", "<|fim_middle|>"),  # Qwen, Granite
    ("<fim_prefix>", "before", "<fim_suffix>", "after", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "before", "<｜fim▁hole｜>", "after", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    ("▁<PRE>", "before", "▁<SUF>", "after", "▁<MID>"),  # Code Llama
    ("<PRE>", "before", "<SUF>", "after", "<MID>"),
    ("[SUFFIX]", "after", "[PREFIX]", "before"),  # Codestral
    ("<|code_prefix|>", "before", "<|code_suffix|>", "after", "<|code_middle|>"),  # GLM
)
"""Special tokens around the text before a gap and the text after it, in order."""


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
        self.record = Record()
        self._service = service
        self._body = body
        self._settings = body.settings
        self._n = self._settings.n
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.model = ""
        self._prompts: list[Prompt] = []

    async def start(self, stack: AsyncExitStack) -> list[Choice]:
        """Start the replies. They run until the stack is closed."""
        body, settings = self._body, self._settings
        given = _listed(body)
        resident = await self._service.enter(stack, body.model, len(given) * self._n)
        self.model = resident.name
        tokenizer = resident.runtime.loaded.tokenizer
        most = resident.runtime.ctx_size - 1

        def encode() -> tuple[list[Prompt], list[int] | None, tuple[Constraint, ...]]:
            prompts = [
                fill_in(tokenizer, one, body.suffix, max_tokens=most)
                if isinstance(one, str) and body.suffix
                else as_prompt(tokenizer, one, add_bos=settings.add_bos, max_tokens=most)
                for one in given
            ]
            negative = None
            if uses_guidance(settings):
                text = settings.negative_prompt
                negative = as_prompt(tokenizer, text, add_bos=settings.add_bos, max_tokens=most)
            ids = None if negative is None else negative.token_ids
            return prompts, ids, constraints_of(settings)

        with refusing_long_prompts(most + 1, "prompt"):
            self._prompts, negative_ids, constraints = await self._service.in_thread(
                encode, sum(map(len, given))
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
        jobs = await self._service.submit(
            stack,
            resident,
            settings,
            [prompt.token_ids for prompt in self._prompts],
            Wanted(
                param="prompt",
                max_tokens=self.limit(),
                max_time_s=self._service.limits.reply_s,
                report=Report(
                    log_probs=settings.logprobs,
                    prompt=settings.echo and settings.logprobs is not None,
                ),
                negative_ids=negative_ids,
                constraints=constraints,
            ),
        )
        return [
            Choice(i, job, self._prompts[i // self._n], settings, tokenizer)
            for i, job in enumerate(jobs)
        ]

    def limit(self) -> int:
        """Token limit of each reply."""
        limit = self._settings.max_tokens
        return DEFAULT_MAX_TOKENS if limit is None else limit

    async def collect(self, stack: AsyncExitStack) -> list[Choice]:
        """The complete replies."""
        choices = await self.start(stack)
        async for number, result in results_of([choice.job for choice in choices]):
            choices[number].take(result)
        return choices

    async def whole(self, stack: AsyncExitStack) -> dict[str, object]:
        choices = await self.collect(stack)
        return {
            **self.head(),
            "choices": [choice.as_json(choice.take_text()) for choice in choices],
            **self.figures(choices),
        }

    async def stream(self, stack: AsyncExitStack) -> EventStream:
        """Start the replies and return their events."""
        return _CompletionStream(self, self._body, await self.start(stack))

    def figures(self, choices: Sequence[Choice]) -> dict[str, object]:
        return figures_of(self.ends(choices), self._n)

    def ends(self, choices: Sequence[Choice]) -> list[FinishEvent]:
        ends = self._service.ends_of([choice.end for choice in choices])
        self.record.ends = ends
        return ends

    def head(self) -> dict[str, object]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model,
        }


class _CompletionStream:
    """Server-sent events of a completion request."""

    framing = EVENTS

    def __init__(
        self, completion: Completion, body: CompletionBody, choices: Sequence[Choice]
    ) -> None:
        self.jobs = [choice.job for choice in choices]
        self._completion = completion
        self._choices = choices
        self._left = len(choices)
        self._wants_usage = wants_usage_chunk(body)
        self._extra = extra_fields(body, self.jobs)
        self._templates: list[TextEvents] = []
        if body.settings.logprobs is None and not self._extra():
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

    def _chunk(self, choice: Choice, text: str) -> dict[str, object]:
        return {**self._completion.head(), "choices": [choice.as_json(text)], **self._extra()}


class Choice:
    """One reply, reported whole or in pieces."""

    def __init__(
        self,
        index: int,
        job: AsyncJob,
        prompt: Prompt,
        settings: Settings,
        tokenizer: Tokenizer,
    ) -> None:
        self.job = job
        self.end: FinishEvent | None = None
        self.index = index
        self._text = prompt.text if settings.echo else ""
        self._logprobs: LegacyLogprobs | None = None
        if settings.logprobs is not None:
            self._logprobs = LegacyLogprobs(tokenizer, settings.logprobs, prompt.token_ids)
            if settings.echo:
                self._logprobs.begin_echo(is_hidden=prompt.hides_bos)

    @property
    def has_output(self) -> bool:
        return bool(self._text) or self.end is not None

    def take(self, result: Result) -> None:
        if result.finish is not None:
            self.end = result.finish
        if self._logprobs is not None:
            self._logprobs.echo(result.scores)
        self._text += result.text
        if self._logprobs is not None:
            self._logprobs.add(result.tokens)
            if self.end is not None:
                self._logprobs.add(self.end.tokens)

    def take_text(self) -> str:
        """Text since the previous call."""
        text, self._text = self._text, ""
        return text

    def probabilities(self) -> dict[str, object]:
        """Log probabilities since the previous call, by llama.cpp's name; empty without them."""
        if self._logprobs is None:
            return {}
        taken: Any = self._logprobs.take()
        pieces = zip(taken["tokens"], taken["token_logprobs"], taken["top_logprobs"], strict=True)
        return {
            "completion_probabilities": [
                {
                    "token": token,
                    "logprob": value,
                    "top_logprobs": [
                        {"token": one, "logprob": of_one} for one, of_one in (top or {}).items()
                    ],
                }
                for token, value, top in pieces
            ]
        }

    def as_json(self, text: str) -> dict[str, object]:
        return {
            "index": self.index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": None if self.end is None else END_REASONS[self.end.reason],
        }


def as_prompt(
    tokenizer: Tokenizer,
    given: str | list[int],
    *,
    add_bos: bool | None,
    max_tokens: int,
    allow_special: bool = True,
) -> Prompt:
    """Tokenize a prompt. Token ids stay unchanged.

    A text may spell out special tokens, if `allow_special`. BOS is added if the tokenizer adds one
    by default and the text does not begin with it. More than `max_tokens` tokens, not counting an
    added BOS, raise ContextLengthError.
    """
    if not isinstance(given, str):
        if len(given) > max_tokens:
            raise ContextLengthError(len(given), max_tokens)
        return Prompt(given, tokenizer.decode(given, skip_special=False))
    ids = tokenizer.encode(given, allow_special=allow_special, add_bos=False, max_tokens=max_tokens)
    wants_bos = tokenizer.adds_bos if add_bos is None else add_bos
    bos = tokenizer.bos_id
    if not wants_bos or bos is None or ids[:1] == [bos]:
        return Prompt(ids, given)
    return Prompt([bos, *ids], given, hides_bos=True)


def fill_in(tokenizer: Tokenizer, before: str, after: str, *, max_tokens: int) -> Prompt:
    """Prompt for the text between two others, with the tokens that the model was trained on.

    Neither text becomes a special token. Raises ApiError if the tokenizer has no such tokens.
    """
    special = tokenizer.special_tokens
    for order in FILL_IN_ORDERS:
        if all(mark in special for mark in order if mark not in ("before", "after")):
            break
    else:
        raise ApiError(
            400,
            "suffix: the tokenizer of this model has no tokens for filling in text",
            param="suffix",
            code="unsupported_parameter",
        )
    texts = {"before": before, "after": after}
    ids = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    for part in order:
        if part in texts:
            ids += tokenizer.encode(texts[part], add_bos=False, max_tokens=max_tokens)
        else:
            ids.append(special[part])
    if len(ids) > max_tokens:
        raise ContextLengthError(len(ids), max_tokens)
    return Prompt(ids, before)


def _listed(body: CompletionBody) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[one for one in prompt if isinstance(one, int)]]
    return prompt
