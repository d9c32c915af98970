"""Converts the messages, tools and response format of a chat request into a prompt and the
constraints of its reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exl_cli.server.bodies import LONG_BYTES, check_structure
from exl_cli.server.errors import ApiError
from exl_cli.server.schema import (
    ChatBody,
    Function,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    TextPart,
)
from exl_cli.server.tools import ToolFormat, call_schema, format_of
from exl_core.constrain.filter import Constraint
from exl_core.constrain.json_schema import JsonSchema
from exl_core.prompt.reasoning import ends_inside, find_tags
from exl_core.prompt.template import ChatTemplate
from exl_core.prompt.tracked import template_text
from exl_core.session.load import LoadedModel
from exl_core.tokenizer.special_text import Trust

_RESERVED = ("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt, and the rules for parsing its reply.

    tools           names of the functions that the reply may call
    is_call         the reply is constrained to a tool call
    tags            opening and closing tag of reasoning
    begins_inside   the prompt ends inside an opened reasoning
    is_constrained  the whole reply is JSON
    """

    token_ids: list[int]
    tags: tuple[str, str]
    tool_format: ToolFormat | None = None
    tools: tuple[str, ...] = ()
    is_call: bool = False
    begins_inside: bool = False
    constraints: tuple[Constraint, ...] = ()

    @property
    def is_constrained(self) -> bool:
        return bool(self.constraints)


def num_chars(body: ChatBody) -> int:
    """Number of characters in the messages."""
    return sum(
        len(_text_of(message.content))
        + len(message.reasoning_content or "")
        + sum(len(call.function.arguments) for call in message.tool_calls or ())
        for message in body.messages
    )


def chat_prompt(
    loaded: LoadedModel, body: ChatBody, max_tokens: int, *, allow_special: bool = False
) -> ChatPrompt:
    """Render and tokenize a conversation, which takes long for long ones.

    More than `max_tokens` tokens raise ContextLengthError. `allow_special` holds for a body that
    does not choose: text of messages, tools and template variables may spell special tokens.
    """
    if loaded.template is None:
        raise ApiError(
            400,
            f"the model {loaded.name!r} has no chat template; /v1/completions takes plain text",
            param="messages",
            code="no_chat_template",
        )
    extra = body.chat_template_kwargs or {}
    for name in _RESERVED:
        if name in extra:
            raise ApiError(
                400, f"chat_template_kwargs may not set {name}", param="chat_template_kwargs"
            )
    offered, is_call = _offered(body)
    tool_format = _tool_format(loaded.template, body) if body.tools else None
    _check_last_message(loaded, body, max_tokens)
    text = loaded.template.render(
        [as_message(message) for message in body.messages],
        add_generation_prompt=True,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        if offered
        else None,
        **extra,
    )
    constraints = _format_constraints(body, has_tools=bool(offered))
    if is_call:
        assert tool_format is not None, "tools are offered"
        functions = [one.model_dump(exclude_none=True) for one in offered]
        only_one = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        schema = call_schema(functions, tool_format, only_one=only_one)
        constraints = (JsonSchema(schema),)
    tags = find_tags(loaded.template.source)
    begins_inside = ends_inside(text, tags[0])
    if begins_inside and constraints:  # the constrained JSON comes after it
        text, begins_inside = text + template_text(f"\n{tags[1]}\n\n"), False
    if is_call and tool_format is not None:
        text += template_text(tool_format.opening)
    trusts_all = allow_special if body.allow_special is None else body.allow_special
    trust = None if trusts_all else Trust(text.trusted, loaded.template.source)
    return ChatPrompt(
        loaded.tokenizer.encode(
            text, allow_special=True, add_bos=False, max_tokens=max_tokens, trust=trust
        ),
        tags,
        tool_format=tool_format if offered else None,
        tools=tuple(one.name for one in offered),
        is_call=is_call,
        begins_inside=begins_inside,
        constraints=constraints,
    )


def _check_last_message(loaded: LoadedModel, body: ChatBody, max_tokens: int) -> None:
    """Refuses a last user message that exceeds the context, before the template is rendered.

    The length of other messages proves nothing: templates drop some of them, or parts such as
    earlier reasoning. They always write the last user message, at most trimmed.
    """
    last = body.messages[-1]
    if last.role == "user":
        loaded.tokenizer.check_length(_text_of(last.content).strip(), max_tokens)


def as_message(message: Message) -> dict[str, object]:
    """A message as templates expect it: its text as one string, arguments of calls as values."""
    fields: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message.content),
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _text_of(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _arguments(text: str) -> object:
    if len(text) > LONG_BYTES:
        check_structure(text.encode("utf-8", "surrogatepass"), 0)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, "arguments of a tool call are not JSON", param="messages", code="invalid_value"
        ) from error
    return value if isinstance(value, Mapping) else text


def _offered(body: ChatBody) -> tuple[list[Function], bool]:
    """Functions that the reply may call, and whether it must call one."""
    choice = body.tool_choice
    functions = [tool.function for tool in body.tools or ()]
    if not functions:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice without tools", param="tool_choice")
        if body.parallel_tool_calls is not None:
            raise ApiError(400, "parallel_tool_calls without tools", param="parallel_tool_calls")
        return [], False
    if choice == "none":
        return [], False
    is_free = choice in (None, "auto")
    if is_free and any(one.strict for one in functions):
        raise ApiError(
            400,
            "strict: arguments follow their schema where a call is required (tool_choice "
            "'required', or a tool by name); a call that the model may make is only parsed",
            param="tools",
            code="unsupported_parameter",
        )
    if isinstance(choice, NamedTool):
        named = [one for one in functions if one.name == choice.function.name]
        if not named:
            raise ApiError(
                400, f"tool_choice: no tool {choice.function.name[:64]!r}", param="tool_choice"
            )
        return named[:1], True
    return functions, choice == "required"


def _tool_format(template: ChatTemplate, body: ChatBody) -> ToolFormat | None:
    if body.tool_choice == "none":
        return None
    found = format_of(template.source)
    if found is None:
        raise ApiError(
            400,
            "this model's chat template has no tools, or writes them in an unknown format",
            param="tools",
            code="unsupported_parameter",
        )
    return found


def _format_constraints(body: ChatBody, *, has_tools: bool) -> tuple[Constraint, ...]:
    wanted = body.response_format
    if not isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
        return ()
    if has_tools:
        raise ApiError(
            400,
            "response_format and tools contradict each other; tool_choice 'none' turns tools off",
            param="response_format",
        )
    if isinstance(wanted, JsonObjectFormat):
        return (JsonSchema({"type": "object"}),)
    return (JsonSchema(wanted.json_schema.json_schema),)
