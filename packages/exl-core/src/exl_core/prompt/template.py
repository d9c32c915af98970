"""Chat templates, which turn a list of messages into the text format that a model was trained on.

A template is an untrusted program. It runs in jinja2's immutable sandbox, without file access, and
within a budget of steps, memory and time (`sandbox.py`, `budget.py`). All its exceptions become
`TemplateError`. The settings and the few extra functions are those that templates on the Hugging
Face hub expect. This module handles neither files (`detect.py`) nor tokens: the caller encodes the
text without adding BOS, which the template writes, and lets only trusted text become special tokens
(`tracked.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from exl_core.errors import TemplateError
from exl_core.prompt.budget import new_budget
from exl_core.prompt.tracked import TrackedText, concat, template_text, tracked

if TYPE_CHECKING:
    from jinja2 import Template

# No real conversation comes near it; a template that writes more is broken or hostile.
MAX_CHARACTERS = 64 * 1024 * 1024
MAX_SOURCE_CHARACTERS = 256 * 1024  # ten times the largest known templates
MAX_REASON_CHARACTERS = 500  # of a template's own error message

Message = Mapping[str, object]
_ROLE = re.compile(r"[A-Za-z0-9_-]+")
_EXPECTED_MESSAGES = 'mappings such as {"role": "user", "content": "Hi"}, in a list'


class ChatTemplate:
    """Compiled template with the texts of the model's BOS and EOS tokens."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, where: str) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.where = where
        self._template = _compile(source, where)

    def render(
        self,
        messages: Iterable[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> TrackedText:
        """Conversation as text; with `add_generation_prompt`, up to the place of the next reply.

        `kwargs` become variables of the template (`enable_thinking`, `documents`, ...). The result
        is a `TrackedText`: the template's own text, BOS, EOS and roles are trusted; contents of
        messages, tools and `kwargs` are not.
        """
        checked = _checked_messages(messages, self.where)
        variables = {
            "bos_token": template_text(self.bos_token),
            "eos_token": template_text(self.eos_token),
            **kwargs,
        }
        try:
            with new_budget():
                pieces = self._template.generate(
                    messages=[_with_trusted_role(message) for message in checked],
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                )
                return _join(pieces, self.where)
        except TemplateError:
            raise
        # A template can raise any exception: it divides, indexes and recurses.
        except Exception as error:
            raise TemplateError(
                "the chat template refused the conversation",
                where=self.where,
                got=_reason(error),
                next_step="Check the roles and their order, or leave the template out",
            ) from error


def _reason(error: Exception) -> str:
    """Text of an exception, without its type if the template raised it by `raise_exception`."""
    from jinja2 import TemplateError as JinjaError

    text = str(error) if type(error) is JinjaError else f"{type(error).__name__}: {error}"
    return text[:MAX_REASON_CHARACTERS]


def _join(pieces: Iterable[str], where: str) -> TrackedText:
    parts: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(
                "the chat template writes without end",
                where=where,
                expected=f"at most {MAX_CHARACTERS} characters",
            )
        parts.append(piece)
    return tracked(concat(parts))


def _with_trusted_role(message: Message) -> dict[str, object]:
    """Templates join roles to special tokens, as in `<|{{ role }}|>`. A role is a plain name."""
    role = message["role"]
    assert isinstance(role, str), "checked before"
    return {**message, "role": template_text(role) if _ROLE.fullmatch(role) else role}


def _checked_messages(messages: object, where: str) -> list[Message]:
    """The messages as a list. An iterator can be read only once."""
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise TemplateError(
            "the conversation is no list of messages",
            where=where,
            expected=_EXPECTED_MESSAGES,
            got=repr(messages)[:100],
        )
    checked: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(
                f"message {index} is no mapping",
                where=where,
                expected=_EXPECTED_MESSAGES,
                got=repr(message)[:100],
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise TemplateError(
                f"message {index} has no role", where=where, expected="a text", got=repr(role)
            )
        checked.append(message)
    if not checked:
        raise TemplateError("the conversation has no messages", where=where)
    return checked


def _compile(source: str, where: str) -> Template:
    from exl_core.prompt.sandbox import Sandbox

    if len(source) > MAX_SOURCE_CHARACTERS:
        raise TemplateError(
            "the chat template is too long",
            where=where,
            expected=f"at most {MAX_SOURCE_CHARACTERS} characters",
            got=len(source),
        )
    try:
        with new_budget():  # compilation evaluates constant expressions
            template: Template = Sandbox().from_string(source)
    # The compiler raises many types too: for long literals, deep brackets, filters of constants.
    except Exception as error:
        line = getattr(error, "lineno", None)
        raise TemplateError(
            "the chat template is not valid" + ("" if line is None else f", line {line}"),
            where=where,
            got=str(error)[:MAX_REASON_CHARACTERS],
            next_step="Fix the template, or leave it out",
        ) from error
    return template
