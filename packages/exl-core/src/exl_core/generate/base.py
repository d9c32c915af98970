"""The simplest call: a prompt in, its completion out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Event as Flag
from typing import Literal, Unpack, overload

from torch import Tensor

from exl_core.engine.events import FailEvent, FinishEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.generator import Generator, RequestFields
from exl_core.model.embedded import EMBEDDED_FROM, EmbeddedSpan
from exl_core.sampling.params import SamplerParams

EMBED_MARKER = "{{EMBED_HERE}}"
"""Where `input_embeddings` go in a prompt; blanks and tabs around it are dropped."""

StopToken = int | Literal["eos"] | None


class BaseGenerator(Generator):
    """Synchronous, for one prompt or a list that is completed side by side."""

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
        """The prompt and what follows it, or with `completion_only` what follows alone.

        num_tokens        most tokens to generate. A prompt that leaves no room for them in the
                          context loses its beginning
        seed              prompt i gets `seed + i`
        stop_token        "eos": the model's; None: nothing stops it; an id: that one
        abort             cleared at first; once set, the text so far is what is returned
        input_embeddings  [prompts, n, hidden_size]: vectors in place of `EMBED_MARKER`, which each
                          prompt contains once; they have no text
        """
        if abort is not None:
            abort.clear()
        prompts = prompt if isinstance(prompt, list) else [prompt]
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
            settings["sampler"] = sampler if seed is None else replace(sampler, seed=seed + i)
            requests.append(
                self.request(
                    self._cut(ids, num_tokens),
                    stop=self._stops(stop_token),
                    embeddings=embeddings,
                    **settings,
                )
            )
        replies = self._run(requests, abort)
        self.sequence_ids = tuple(
            request.prompt_ids + reply.token_ids
            for request, reply in zip(requests, replies, strict=True)
        )
        texts = [
            reply.text if completion_only else self._shown(request) + reply.text
            for request, reply in zip(requests, replies, strict=True)
        ]
        return texts if isinstance(prompt, list) else texts[0]

    def full(self) -> bool:
        """The context has no room for another token of the last call's longest sequence."""
        longest = max((len(ids) for ids in self.sequence_ids), default=0)
        return longest >= self.loaded.config.max_seq_len

    def _cut(self, ids: list[int], num_tokens: int) -> list[int]:
        """The end of the prompt that leaves room for the reply."""
        room = self.loaded.config.max_seq_len - num_tokens
        if room < 1:
            raise RequestError(
                "num_tokens leaves no room for a prompt",
                expected=f"less than the context, {self.loaded.config.max_seq_len}",
                got=num_tokens,
            )
        return ids[-room:]

    def _stops(self, stop_token: StopToken) -> frozenset[int]:
        if stop_token is None:
            return frozenset()
        return self.eos_ids if stop_token == "eos" else frozenset((stop_token,))

    def _shown(self, request: Request) -> str:
        """The prompt as its tokens read; vectors have no text."""
        ids = (i for i in request.prompt_ids if i < EMBEDDED_FROM)
        return self.tokenizer.decode(ids, skip_special=not request.show_special)

    def _run(self, requests: Sequence[Request], abort: Flag | None) -> list[FinishEvent]:
        """All of them to their end, or to where `abort` stops them."""
        for request in requests:
            self.engine.check(request)
        finished: dict[str, FinishEvent] = {}
        try:
            for request in requests:
                self.engine.submit(request)
            while len(finished) < len(requests):
                if abort is not None and abort.is_set():
                    for request in requests:
                        self.engine.cancel(request.request_id)
                for event in self.engine.step():
                    if isinstance(event, FailEvent):
                        raise event.error
                    if isinstance(event, FinishEvent):
                        finished[event.request_id] = event
        finally:
            for request in requests:
                self.engine.cancel(request.request_id)
                self.engine.discard_events(request.request_id)
        return [finished[request.request_id] for request in requests]


def _spans(vectors: Tensor | None, prompts: Sequence[str]) -> list[dict[str, EmbeddedSpan] | None]:
    """One span for each prompt, by the text that stands for it."""
    if vectors is None:
        return [None] * len(prompts)
    if vectors.dim() != 3 or len(vectors) != len(prompts):
        raise RequestError(
            "input_embeddings has another shape",
            expected=f"[{len(prompts)}, n, hidden_size]",
            got=list(vectors.shape),
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
