"""How a conversation becomes tokens, and what ends a reply: by the model's template, or by name.

Knows messages and the loaded model; neither terminal nor turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from exl_core.engine.request import Request
from exl_core.errors import TemplateError
from exl_core.load import LoadedModel
from exl_core.prompt.formats import PromptFormat
from exl_core.prompt.reasoning import ReasoningSplitter, ends_inside, find_tags

Messages = Sequence[Mapping[str, object]]

_PROBE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you?"},
)
_EXCERPT = 40


class PromptStyle:
    """`prompt_format` None: the template that the model brings."""

    def __init__(self, loaded: LoadedModel, prompt_format: PromptFormat | None) -> None:
        if prompt_format is None and loaded.template is None:
            raise TemplateError(
                "the model has no chat template",
                where=loaded.path,
                next_step="It may be a base model. --format NAME writes the conversation in a "
                "format that you choose; 'exl chat --list-formats' shows them.",
            )
        self._tokenizer = loaded.tokenizer
        self._template = loaded.template
        self._format = prompt_format
        if prompt_format is not None:
            self._tags = prompt_format.reasoning
        else:
            self._tags = find_tags("" if loaded.template is None else loaded.template.source)

    def text(self, messages: Messages) -> str:
        """Up to where the model replies."""
        if self._format is not None:
            return self._format.render(messages)
        assert self._template is not None
        return self._template.render(messages, add_generation_prompt=True)

    def encode(self, messages: Messages, *, max_tokens: int | None = None) -> list[int]:
        """More than `max_tokens` raise ContextLengthError."""
        text = self.text(messages)
        is_special, wants_bos = True, False
        if self._format is not None:
            is_special = self._format.special
            wants_bos = self._format.bos and self._tokenizer.bos_id is not None
        return self._tokenizer.encode(
            text, allow_special=is_special, add_bos=wants_bos, max_tokens=max_tokens
        )

    def splitter(self, messages: Messages) -> ReasoningSplitter:
        """For the reply to these messages."""
        opening, closing = self._tags
        return ReasoningSplitter(opening, closing, ends_inside(self.text(messages), opening))

    def adapt(self, request: Request) -> Request:
        """The request with what ends a reply here, and with the tags of reasoning visible."""
        special = self._tokenizer.special_tokens  # a tag is one, or is made of several
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
        """What a format says where nobody says anything; a template has its own default inside."""
        return None if self._format is None else self._format.default_system

    def no_system(self) -> str | None:
        """The system prompt that stands for none: empty where the template has one of its own."""
        if self._format is not None:
            return None
        user = {"role": "user", "content": "Hello"}
        try:
            empty = self.text([{"role": "system", "content": ""}, user])
        except TemplateError:  # it knows no system role, so there is none to suppress
            return None
        return "" if len(empty) < len(self.text([user])) else None

    def usable(self, system: str) -> str:
        """The same; raises TemplateError where the template knows no system role."""
        self.text([{"role": "system", "content": system}, {"role": "user", "content": "Hello"}])
        return system

    def disagreement(self, *, uses_default: bool) -> str | None:
        """How the format differs from the model's own template; None if it does not, or if the
        template writes no such conversation: that may be why a format is asked for.

        Looked at with a system prompt, and where the default of either `uses_default`, with that.
        """
        if self._format is None or self._template is None:
            return None
        default = self._format.default_system
        ours = [] if default is None else [{"role": "system", "content": default}]
        probes: list[tuple[Messages, Messages]] = [(_PROBE, _PROBE)]
        if uses_default:
            probes.append(((*ours, *_PROBE[1:]), _PROBE[1:]))
        for for_format, for_template in probes:
            with suppress(TemplateError):  # some know no system role
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
            f"conversation, from token {at + 1} on, the one has {excerpts[0]}, the other "
            f"{excerpts[1]}. Without --format the template is followed."
        )
