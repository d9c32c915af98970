"""Base generator: one call from a prompt to its completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event as Flag
from typing import Literal, Unpack, overload

from torch import Tensor

from exl_core.engine.events import FinishEvent, FinishReason
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.driver import running
from exl_core.generate.generator import Generator
from exl_core.model.embedded import EMBEDDED_FROM, EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.session.request_fields import RequestFields, check_names, seeded

EMBED_MARKER = "{{EMBED_HERE}}"
"""Marks the position of `input_embeddings` in a prompt; blanks and tabs around it are dropped."""

StopToken = int | Literal["eos"] | None


class BaseGenerator(Generator):
    """Synchronous generator for one prompt, or for a list of prompts that run as one batch."""

    sequence_ids: tuple[tuple[int, ...], ...] = ()
    """Prompt and completion of each prompt of the last call."""

    @overload
    def generate_simple(
        self,
        prompt: str,
        *,
        num_tokens: int,
        seed: int | None = ...,
        stop_token: StopToken = ...,
        add_bos: bool | None = ...,
        parse_special: bool = ...,
        completion_only: bool = ...,
        abort: Flag | None = ...,
        input_embeddings: Tensor | None = ...,
        **settings: Unpack[RequestFields],
    ) -> str: ...
    @overload
    def generate_simple(
        self,
        prompt: list[str],
        *,
        num_tokens: int,
        seed: int | None = ...,
        stop_token: StopToken = ...,
        add_bos: bool | None = ...,
        parse_special: bool = ...,
        completion_only: bool = ...,
        abort: Flag | None = ...,
        input_embeddings: Tensor | None = ...,
        **settings: Unpack[RequestFields],
    ) -> list[str]: ...
    def generate_simple(
        self,
        prompt: str | list[str],
        *,
        num_tokens: int,
        seed: int | None = None,
        stop_token: StopToken = "eos",
        add_bos: bool | None = False,
        parse_special: bool = False,
        completion_only: bool = False,
        abort: Flag | None = None,
        input_embeddings: Tensor | None = None,
        **settings: Unpack[RequestFields],
    ) -> str | list[str]:
        """Return the prompt with its completion; with `completion_only` the completion alone.

        num_tokens        most tokens to generate. If prompt and reply exceed the context or the
                          cache, the beginning of the prompt is cut, but not a BOS token
        seed              prompt i gets `seed + i`
        stop_token        "eos": the model's stop tokens; None: no stop token; or a token id
        abort             cleared at the start; once set, the call returns the text so far, and ""
                          for a prompt without a generated token
        input_embeddings  [prompts, n, hidden_size]: vectors that replace `EMBED_MARKER`, which each
                          prompt contains once; they have no text
        """
        if abort is not None:
            if not callable(getattr(abort, "clear", None)):
                raise RequestError(
                    "abort is no flag", expected="a threading.Event or None", got=repr(abort)[:100]
                )
            abort.clear()
        _check_settings(settings, self.generate_simple)
        prompts = _prompts(prompt)
        spans = _spans(input_embeddings, prompts)
        sampler = settings.get("sampler", SamplerParams())
        requests = []
        for i, (text, embeddings) in enumerate(zip(prompts, spans, strict=True)):
            ids = self.encode(
                _around_marker(text) if embeddings else text,
                add_bos=add_bos,
                parse_special=parse_special,
                embeddings=embeddings,
            )
            settings["max_tokens"] = num_tokens
            settings["sampler"] = seeded(sampler, seed, i)
            requests.append(
                self.request(
                    self._cut(ids, num_tokens),
                    stop=self._stops(stop_token),
                    embeddings=embeddings,
                    **settings,
                )
            )
        replies = self._run(requests, abort)
        texts = [
            self._text(request, reply, completion_only=completion_only)
            for request, reply in zip(requests, replies, strict=True)
        ]
        return texts if isinstance(prompt, list) else texts[0]

    def full(self) -> bool:
        """Whether the longest sequence of the last call has filled the context or the cache."""
        longest = max((len(ids) for ids in self.sequence_ids), default=0)
        return longest >= self._max_len

    def _cut(self, ids: list[int], num_tokens: int) -> list[int]:
        """Cut the beginning of the prompt behind BOS, so that the reply fits context and cache."""
        bos = [i for i in ids[:1] if i == self.tokenizer.bos_id]
        is_count = isinstance(num_tokens, int) and not isinstance(num_tokens, bool)
        excess = len(ids) + max(num_tokens, 1) - self._max_len if is_count else 0
        if not is_count or num_tokens < 0 or 0 < excess >= len(ids) - len(bos):
            raise RequestError(
                "num_tokens is out of range, or leaves no room for a prompt",
                expected=f"a whole number from 0, less than {self._max_len - len(bos)}, to leave "
                "room in the context and the cache",
                got=repr(num_tokens),
            )
        return ids if excess <= 0 else bos + ids[len(bos) + excess :]

    def _stops(self, stop_token: StopToken) -> frozenset[int]:
        if stop_token is None:
            return frozenset()
        if stop_token == "eos":
            return self.eos_ids
        if not isinstance(stop_token, int) or isinstance(stop_token, bool) or stop_token < 0:
            raise RequestError(
                "stop_token is no token",
                expected='"eos", None or a token id',
                got=repr(stop_token),
            )
        return frozenset((stop_token,))

    def _text(self, request: Request, reply: FinishEvent, *, completion_only: bool) -> str:
        if completion_only or (reply.reason is FinishReason.CANCELLED and not reply.token_ids):
            return reply.text
        ids = (i for i in request.prompt_ids if i < EMBEDDED_FROM)  # vectors have no text
        return self.tokenizer.decode(ids, skip_special=not request.show_special) + reply.text

    def _run(self, requests: Sequence[Request], abort: Flag | None) -> list[FinishEvent]:
        """Run all requests to their end, or until `abort` is set."""
        finished: dict[str, FinishEvent] = {}
        with running(self.engine, requests) as run:
            for event in run.events(None if abort is None else abort.is_set):
                if isinstance(event, FinishEvent):
                    finished[event.request_id] = event
        # Read from the sequences: a healed token has replaced the last token of the prompt.
        ids = [request.request_id for request in requests]
        self.sequence_ids = tuple(tuple(run.sequences[name].token_ids) for name in ids)
        return [finished[name] for name in ids]


def _check_settings(settings: RequestFields, call: Callable[..., object]) -> None:
    if "max_tokens" in settings:
        raise RequestError(
            "generate_simple has num_tokens for that", got=f"max_tokens={settings['max_tokens']!r}"
        )
    check_names(settings, call)


def _prompts(prompt: str | list[str]) -> list[str]:
    prompts = prompt if isinstance(prompt, list) else [prompt]
    for number, text in enumerate(prompts):
        if not isinstance(text, str):
            raise RequestError(f"prompt {number} is not a text", got=type(text).__name__)
    return prompts


def _spans(vectors: Tensor | None, prompts: Sequence[str]) -> list[dict[str, EmbeddedSpan] | None]:
    """One span per prompt, keyed by the marker that it replaces."""
    if vectors is None:
        return [None] * len(prompts)
    if not isinstance(vectors, Tensor) or vectors.dim() != 3 or len(vectors) != len(prompts):
        raise RequestError(
            "input_embeddings has another shape",
            expected=f"[{len(prompts)}, n, hidden_size]",
            got=list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__,
        )
    for number, text in enumerate(prompts):
        if text.count(EMBED_MARKER) != 1:
            raise RequestError(
                f"prompt {number} has no one place for its embeddings",
                expected=f"{EMBED_MARKER} once",
                got=f"{text.count(EMBED_MARKER)} times",
            )
    return [{EMBED_MARKER: EmbeddedSpan(one)} for one in vectors]


def _around_marker(text: str) -> str:
    before, _, after = text.partition(EMBED_MARKER)
    return before.rstrip(" \t") + EMBED_MARKER + after.lstrip(" \t")
