"""Encoding of a conversation with the model's chat template or with a named prompt format.

Also sets the stop tokens of a reply. Knows messages and the loaded model; neither the terminal nor
the turns of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from exl_core.engine.request import Request
from exl_core.errors import TemplateError
from exl_core.prompt.formats import PromptFormat
from exl_core.prompt.reasoning import ReasoningSplitter, ends_inside, find_tags
from exl_core.prompt.tracked import TrackedText
from exl_core.session.load import LoadedModel
from exl_core.tokenizer.special_text import Trust

Messages = Sequence[Mapping[str, object]]

_PROBE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you?"},
)
_EXCERPT = 40


class PromptStyle:
    """A prompt format bound to a loaded model.

    prompt_format  None: the model's chat template
    allow_special  texts of messages may spell special tokens
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompt_format: PromptFormat | None,
        *,
        allow_special: bool = False,
    ) -> None:
        if prompt_format is None and loaded.template is None:
            raise TemplateError(
                "the model has no chat template",
                where=loaded.path,
                next_step="It may be a base model. --format NAME selects a prompt format; "
                "'exl chat --list-formats' lists them.",
            )
        self._tokenizer = loaded.tokenizer
        self._template = loaded.template
        self._format = prompt_format
        self._allow_special = allow_special
        if prompt_format is not None:
            self._tags = prompt_format.reasoning
        else:
            self._tags = find_tags("" if loaded.template is None else loaded.template.source)

    @property
    def source(self) -> str:
        """Source of the format or of the template."""
        if self._format is not None:
            return self._format.source
        return "" if self._template is None else self._template.source

    @property
    def format_name(self) -> str | None:
        """Name of the prompt format; None for the model's own template."""
        return None if self._format is None else self._format.name

    def text(self, messages: Messages) -> TrackedText:
        """Prompt text up to the point where the reply begins."""
        if self._format is not None:
            return self._format.render(messages)
        assert self._template is not None
        return self._template.render(messages, add_generation_prompt=True)

    def encode(self, messages: Messages, *, max_tokens: int | None = None) -> list[int]:
        """More than `max_tokens` raise ContextLengthError."""
        text = self.text(messages)
        is_special, wants_bos = True, False
        source = "" if self._template is None else self._template.source
        if self._format is not None:
            is_special, source = self._format.special, self._format.source
            wants_bos = self._format.bos and self._tokenizer.bos_id is not None
        return self._tokenizer.encode(
            text,
            allow_special=is_special,
            add_bos=wants_bos,
            max_tokens=max_tokens,
            trust=None if self._allow_special else Trust(text.trusted, source),
        )

    def splitter(self, messages: Messages) -> ReasoningSplitter:
        """Splitter of reasoning and answer for the reply to these messages."""
        opening, closing = self._tags
        return ReasoningSplitter(opening, closing, ends_inside(self.text(messages), opening))

    def adapt(self, request: Request) -> Request:
        """Add this format's stop tokens and stop strings to the request.

        Special tokens are shown if they are part of the reasoning tags, which the splitter needs.
        """
        special = self._tokenizer.special_tokens  # a tag is one of them, or contains some
        shows_tags = any(text in tag for tag in self._tags for text in special)
        if self._format is None:
            return replace(request, show_special=shows_tags)
        ids, texts = self._format.stops(self._tokenizer.special_tokens)
        return replace(
            request,
            stop_ids=request.stop_ids | ids,
            stop_strings=(*request.stop_strings, *texts),
            show_special=shows_tags,
        )

    def default_system(self) -> str | None:
        """Default system prompt of the format; None for a template, which inserts its own."""
        return None if self._format is None else self._format.default_system

    def no_system(self) -> str | None:
        """System prompt that suppresses the default one.

        It is empty if the template inserts a default when there is no system message, else None.
        """
        if self._format is not None:
            return None
        user = {"role": "user", "content": "Hello"}
        try:
            empty = self.text([{"role": "system", "content": ""}, user])
        except TemplateError:  # no system role, so there is no default to suppress
            return None
        return "" if len(empty) < len(self.text([user])) else None

    def usable(self, system: str) -> str:
        """Return `system`; raises TemplateError if the template does not support a system role."""
        self.text([{"role": "system", "content": system}, {"role": "user", "content": "Hello"}])
        return system

    def disagreement(self, *, uses_default: bool) -> str | None:
        """Description of the first difference between the format and the model's own template.

        None if there is no difference, or if the template rejects the sample conversation: that
        may be the reason for choosing a format. The sample has a system prompt. If `uses_default`,
        a second sample uses the default system prompts of the format and of the template.
        """
        if self._format is None or self._template is None:
            return None
        default = self._format.default_system
        ours = [] if default is None else [{"role": "system", "content": default}]
        probes: list[tuple[Messages, Messages]] = [(_PROBE, _PROBE)]
        if uses_default:
            probes.append(((*ours, *_PROBE[1:]), _PROBE[1:]))
        for for_format, for_template in probes:
            with suppress(TemplateError):  # some templates reject the system role
                text = self._template.render(for_template)
                theirs = self._tokenizer.encode(text, allow_special=True, add_bos=False)
                difference = self._first_difference(self.encode(for_format), theirs)
                if difference is not None:
                    return difference
        return None

    def _first_difference(self, ours: list[int], theirs: list[int]) -> str | None:
        if ours == theirs:
            return None
        assert self._format is not None
        at = next(
            (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
            min(len(ours), len(theirs)),
        )
        excerpts = [
            repr(self._tokenizer.decode(ids[at:], skip_special=False)[:_EXCERPT])
            for ids in (ours, theirs)
        ]
        return (
            f"--format {self._format.name} and the model's own template disagree: in a sample "
            f"conversation, from token {at + 1} on, the format has {excerpts[0]} and the template "
            f"has {excerpts[1]}. Without --format the template is used."
        )
