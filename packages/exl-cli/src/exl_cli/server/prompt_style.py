"""How a served model's conversations become prompts: its chat template, or a named format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exl_cli.server.errors import ApiError
from exl_core.prompt.formats import PromptFormat
from exl_core.prompt.reasoning import find_tags
from exl_core.prompt.tracked import TrackedText
from exl_core.session.load import LoadedModel
from exl_core.tokenizer.special_text import Trust


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """A prompt format bound to a model; None is the model's chat template."""

    loaded: LoadedModel
    prompt_format: PromptFormat | None = None

    @property
    def has_template(self) -> bool:
        return self.prompt_format is not None or self.loaded.template is not None

    @property
    def source(self) -> str:
        """All text that the template or the format itself writes. Raises ApiError without one."""
        if self.prompt_format is not None:
            return self.prompt_format.source
        if self.loaded.template is None:
            raise ApiError(
                400,
                f"the model {self.loaded.name!r} has no chat template; /v1/completions takes plain "
                "text, and --format gives the server a prompt format",
                param="messages",
                code="no_chat_template",
            )
        return self.loaded.template.source

    @property
    def tags(self) -> tuple[str, str]:
        """Opening and closing tag of reasoning."""
        if self.prompt_format is not None:
            return self.prompt_format.reasoning
        return find_tags(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        adds_turn: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> TrackedText:
        """The conversation as text. A format has no variables, and no tools (`_tool_format`)."""
        if self.prompt_format is not None:
            return self.prompt_format.render(messages)
        assert self.loaded.template is not None, "`source` was read before"
        return self.loaded.template.render(
            messages, add_generation_prompt=adds_turn, tools=tools, **variables
        )

    def encode(self, text: TrackedText, max_tokens: int, *, trusts_all: bool) -> list[int]:
        """Token ids. More than `max_tokens` raise ContextLengthError."""
        tokenizer, style = self.loaded.tokenizer, self.prompt_format
        return tokenizer.encode(
            text,
            allow_special=style is None or style.special,
            add_bos=style is not None and style.bos and tokenizer.bos_id is not None,
            max_tokens=max_tokens,
            trust=None if trusts_all else Trust(text.trusted, self.source),
        )

    @property
    def stops(self) -> tuple[int | str, ...]:
        """Tokens and texts that end a reply besides EOS."""
        if self.prompt_format is None:
            return ()
        ids, texts = self.prompt_format.stops(self.loaded.tokenizer.special_tokens)
        return (*ids, *texts)
