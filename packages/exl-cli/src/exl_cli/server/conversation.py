"""Converts the messages, tools and response format of a chat request into a prompt and the
constraints of its reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exl_cli.server.bodies import LONG_BYTES, check_structure
from exl_cli.server.engine_request import constraints_of, uses_guidance
from exl_cli.server.errors import ApiError
from exl_cli.server.prompt_style import PromptStyle
from exl_cli.server.schema import (
    AllowedChoice,
    ChatBody,
    Function,
    Message,
    NamedTool,
    TextPart,
)
from exl_cli.server.settings import Settings
from exl_cli.server.tools import ToolFormat, format_of, required_calls, strict_calls
from exl_core.constrain.filter import Constraint
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.triggered import AnswerOrCalls, Triggered
from exl_core.prompt.reasoning import ends_inside
from exl_core.prompt.tracked import TrackedText, template_text
from exl_core.session.load import LoadedModel

_ROLES = {"developer": "system", "function": "tool"}
_UNSEEN_PARTS = frozenset({"thinking", "redacted_thinking", "refusal"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt, and the rules for parsing its reply.

    tools           names of the functions that the reply may call
    is_call         the reply is constrained to a tool call
    tags            opening and closing tag of reasoning
    begins_inside   the prompt ends inside an opened reasoning
    constraints     rules that the reply matches, as a whole or in its calls
    negative_ids    prompt that guidance steers away from
    """

    token_ids: list[int]
    tags: tuple[str, str]
    tool_format: ToolFormat | None = None
    tools: tuple[str, ...] = ()
    is_call: bool = False
    begins_inside: bool = False
    constraints: tuple[Constraint, ...] = ()
    negative_ids: list[int] | None = None

    @property
    def is_constrained(self) -> bool:
        return _is_whole(self.constraints)


def num_chars(body: ChatBody) -> int:
    """Number of characters in the messages."""
    return sum(
        len(_text_of(message.content))
        + len(message.reasoned or "")
        + sum(len(call.function.arguments or "") for call in message.tool_calls or ())
        for message in body.messages
    )


def chat_prompt(
    style: PromptStyle, body: ChatBody, max_tokens: int, *, allow_special: bool = False
) -> ChatPrompt:
    """Render and tokenize a conversation, which takes long for long ones.

    More than `max_tokens` tokens raise ContextLengthError. `allow_special` holds for a body that
    does not choose: text of messages, tools and template variables may spell special tokens.
    """
    source = style.source
    offered, is_call = _offered(body)
    tool_format = _tool_format(source, body) if body.tools else None
    _check_last_message(style.loaded, body, max_tokens)
    text = _rendered(style, body, offered)
    tags = style.tags
    begins_inside = ends_inside(text, tags[0])
    constraints = constraints_of(body.settings)
    if offered and tool_format is not None:
        only_one = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        if is_call:
            calls: Constraint = required_calls(offered, tool_format, only_one=only_one)
        else:
            calls = strict_calls(
                offered, tool_format, only_one=only_one, reasoning=tags, begins_inside=begins_inside
            )
        is_limited = isinstance(body.tool_choice, AllowedChoice)  # the prompt has the other tools
        is_strict = is_call or is_limited or any(one.strict for one in offered)
        constraints = _with_calls(constraints, calls, is_strict=is_strict)
    if begins_inside and _is_whole(constraints):  # the constrained JSON comes after it
        text, begins_inside = text + template_text(f"\n{tags[1]}\n\n"), False
    if is_call and tool_format is not None:
        text += template_text(tool_format.opening)
    trusts_all = allow_special if body.allow_special is None else body.allow_special
    negative_ids = None
    if uses_guidance(body.settings):
        negative = _rendered(style, _with_negative_system(body), offered)
        negative_ids = style.encode(negative, max_tokens, trusts_all=trusts_all)
    return ChatPrompt(
        style.encode(text, max_tokens, trusts_all=trusts_all),
        tags,
        tool_format=tool_format if offered else None,
        tools=tuple(one.name for one in offered),
        is_call=is_call,
        begins_inside=begins_inside,
        constraints=constraints,
        negative_ids=negative_ids,
    )


def _with_calls(
    given: Sequence[Constraint], calls: Constraint, *, is_strict: bool
) -> tuple[Constraint, ...]:
    """Rules for a reply that may be calls, or must be. `given` are the rules of an answer.

    `calls` is a JsonSchema if a call is required. No answer follows then, so that a schema of the
    answer does not matter.
    """
    if not given:
        return (calls,) if is_strict else ()
    answer = given[0]
    if len(given) > 1 or not isinstance(answer, JsonSchema):
        raise ApiError(
            400,
            "a grammar, a pattern or a choice leaves no place for calls of tools; tool_choice "
            "'none' turns tools off",
            param="tools",
            code="unsupported_parameter",
        )
    return (AnswerOrCalls(answer, calls) if isinstance(calls, Triggered) else calls,)


def _is_whole(constraints: Sequence[Constraint]) -> bool:
    """Whether all of the reply is constrained, which leaves no place for reasoning."""
    return not all(isinstance(one, Triggered) for one in constraints)


def _rendered(style: PromptStyle, body: ChatBody, offered: Sequence[Function]) -> TrackedText:
    """The conversation as text, up to the place of the reply.

    A last message that the reply continues is written after the opening of a reply, without the
    template's end of a turn.
    """
    settings, messages = body.settings, body.messages
    begun = settings.prefix
    is_begun = settings.continues or bool(messages[-1].prefix)
    thought = ""
    if is_begun and messages[-1].role != "assistant":
        raise ApiError(400, "only a message of the assistant can be continued", param="messages")
    if is_begun:
        thought = messages[-1].reasoned or ""
        messages, begun = messages[:-1], _text_of(messages[-1].content) + begun
    if not messages:
        raise ApiError(400, "there is no message before the reply", param="messages")
    tools = [{"type": "function", "function": _as_tool(one.function)} for one in body.tools or ()]
    text = style.render(
        [as_message(message) for message in messages],
        adds_turn=settings.adds_turn or is_begun,
        tools=tools if offered else None,
        variables=_variables(settings),
    )
    opening, closing = style.tags
    if begun.strip() and closing not in begun and ends_inside(text, opening):
        # The template opens a reasoning, and the text that goes on is an answer.
        text = text + thought + template_text(f"\n{closing}\n\n")
    joined: TrackedText = text + begun if begun else text
    return joined


def _variables(settings: Settings) -> dict[str, Any]:
    """Variables of the template. Without effort there is no thinking, unless a request says so."""
    variables = {**settings.template, **settings.variables}
    if variables.get("reasoning_effort") == "none":
        variables.setdefault("enable_thinking", False)
    return variables


def _as_tool(function: Function) -> dict[str, object]:
    """A function for templates: without absent and unknown fields."""
    unknown = set(function.model_extra or ())
    return function.model_dump(exclude_none=True, exclude=unknown)


def _with_negative_system(body: ChatBody) -> ChatBody:
    """The conversation with the negative prompt as its system prompt, as in `exl chat`."""
    system = Message.model_validate({"role": "system", "content": body.settings.negative_prompt})
    turns = [one for one in body.messages if one.role not in ("system", "developer")]
    return body.model_copy(update={"messages": [system, *turns]})


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
        "role": _ROLES.get(message.role, message.role),
        "content": _text_of(message.content),
    }
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoned,
        "tool_call_id": message.tool_call_id,
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
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
    return "".join(part.text for part in content if part.type not in _UNSEEN_PARTS)


def _arguments(text: str | dict[str, Any] | None) -> object:
    if isinstance(text, dict):
        return text
    text = text or "{}"
    if len(text) > LONG_BYTES:
        check_structure(text.encode("utf-8", "surrogatepass"), 0)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text  # what a model has written; agents send it back with an error as the result
    return value if isinstance(value, Mapping) else text


def _offered(body: ChatBody) -> tuple[list[Function], bool]:
    """Functions that the reply may call, and whether it must call one."""
    choice = body.tool_choice
    functions = [tool.function for tool in body.tools or ()]
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice without tools", param="tool_choice")
        return [], False
    if choice == "none":
        return [], False
    if isinstance(choice, NamedTool):
        return _named(functions, [choice])[:1], True
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return _named(functions, allowed.tools), allowed.mode == "required"
    return functions, choice == "required"


def _named(functions: Sequence[Function], tools: Sequence[NamedTool]) -> list[Function]:
    """The functions that `tools` name, each of which must be among them."""
    names = {tool.function.name for tool in tools}
    for name in sorted(names - {one.name for one in functions}):
        raise ApiError(400, f"tool_choice: no tool {name[:64]!r}", param="tool_choice")
    return [one for one in functions if one.name in names]


def _tool_format(source: str, body: ChatBody) -> ToolFormat | None:
    if body.tool_choice == "none":
        return None
    found = format_of(source)
    if found is None:
        raise ApiError(
            400,
            "this model's chat template has no tools, or writes them in an unknown format",
            param="tools",
            code="unsupported_parameter",
        )
    return found
