"""Everything that the options of `exl generate` say about a model and its requests.

A job can be sent to another process, which opens the model and answers there. Imports no torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exl_cli import prompts
from exl_cli.model_options import print_warnings
from exl_cli.option_groups import PromptOptions, RunningOptions
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from exl_cli.chat.prompt_style import PromptStyle
    from exl_core.constrain.filter import Constraint
    from exl_core.engine.request import Request
    from exl_core.session.runtime import Runtime

Messages = Sequence[Mapping[str, object]]

UNLIMITED_REPLY = 256
"""Room that --truncate-left leaves for a reply without a limit, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """Options of a job. `limit`: most tokens of a reply; None: until the context is full."""

    spec: str | None
    limit: int | None
    is_chat: bool
    parse_special: bool
    truncates: bool
    stop: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    conversation: PromptOptions
    replying: ReplyOptions
    sampling: SamplingOptions
    running: RunningOptions

    def check(self) -> None:
        """Raises RequestError for options that no model can meet, before anything is loaded."""
        self.sampling.params()
        self.running.choices()
        self.replying.check(self.limit)
        prompts.check_texts(self.stop, "--stop")
        prompts.check_chat_options(
            self.is_chat,
            self.conversation.given,
            parse_special=self.parse_special,
            truncate_left=self.truncates,
        )
        self.conversation.checked_format()

    def with_seed(self) -> PromptJob:
        """The same job with a seed, drawn here if none was given."""
        if self.sampling.seed is not None:
            return self
        return replace(self, sampling=replace(self.sampling, seed=secrets.randbits(31)))

    def open(
        self, *, is_quiet: bool, max_batch: int = 1, cache_tokens: int | None = None
    ) -> PromptWriter:
        runtime = self.running.open(
            self.spec,
            self.running.choices(),
            is_quiet=is_quiet,
            has_guidance=self.replying.has_guidance,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
        )
        return PromptWriter(self, runtime)


class PromptWriter:
    """Turns prompts into requests for an open model."""

    def __init__(self, job: PromptJob, runtime: Runtime) -> None:
        self.runtime = runtime
        self._job = job
        tokenizer = runtime.loaded.tokenizer
        self._sampler = job.replying.sampler(job.sampling.params(tokenizer), tokenizer)
        self._style: PromptStyle | None = None
        self._system: str | None = None
        if job.is_chat:
            self._open_style()

    def request(
        self, prompt: str | Messages, *, number: int = 0, limit: int | None = None
    ) -> Request:
        """The request for a text, or for the messages of a conversation.

        `number`: place in a batch; each request has a seed of its own. `limit`: most tokens of this
        reply; None: the job's.
        """
        from exl_core.session.request_fields import seeded

        job = self._job
        style = self._style_of(prompt)
        negative, negative_ids = job.replying.negative_prompt, None
        if negative is not None:
            if style is None:
                negative_ids = self._encode(negative, None, None)
            else:
                negative_ids = self._encode(prompt, style.usable(negative), style)
        sampler = self._sampler
        request = self.runtime.request(
            self._encode(prompt, self._system, style),
            max_tokens=job.limit if limit is None else limit,
            sampler=seeded(sampler, sampler.seed, number),
            stop=job.stop,
            constraints=job.constraints,
            negative_ids=negative_ids,
            **job.replying.fields(),
        )
        return request if style is None else style.adapt(request)

    def _style_of(self, prompt: str | Messages) -> PromptStyle | None:
        """The prompt style of messages, and with --chat of texts."""
        if isinstance(prompt, str) and not self._job.is_chat:
            return None
        if self._style is None:
            self._open_style()
        return self._style

    def _open_style(self) -> None:
        self._style, self._system = self._job.conversation.style(self.runtime.loaded)

    def _encode(
        self, prompt: str | Messages, system: str | None, style: PromptStyle | None
    ) -> list[int]:
        runtime, job = self.runtime, self._job
        if style is not None:
            messages = prompts.as_messages(prompt, system)
            return style.encode(messages, max_tokens=runtime.max_prompt_tokens)
        assert isinstance(prompt, str), "conversations have a style"
        if job.truncates:
            return self._encode_end(prompt, job.limit or UNLIMITED_REPLY)
        return runtime.encode_prompt(prompt, parse_special=job.parse_special)

    def _encode_end(self, text: str, reply: int) -> list[int]:
        """Token ids of the end of a prompt that leaves room for `reply` tokens."""
        special, runtime = self._job.parse_special, self.runtime
        token_ids, dropped = runtime.encode_end(text, parse_special=special, reply=reply)
        if dropped:
            print_warnings(
                [
                    f"dropped {dropped} of the prompt's {len(token_ids) + dropped} tokens at its "
                    f"start, to leave room for {reply} tokens of reply in a context of "
                    f"{runtime.ctx_size}"
                ]
            )
        return token_ids
