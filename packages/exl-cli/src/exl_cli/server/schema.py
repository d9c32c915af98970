"""Request bodies: their structured fields. `settings.py` has the settings of generation.

Unknown fields are kept in `model_extra`, so that the server can name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from exl_cli.server.errors import refusal
from exl_cli.server.fields import Table, all_as_whole, as_whole
from exl_cli.server.settings import CHAT, COMPLETION, Settings, read_settings

MAX_PROMPTS = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Whole = Annotated[int, BeforeValidator(as_whole)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(all_as_whole)]
SomeTokenIds = Annotated[
    list[TokenId], Field(min_length=1, fail_fast=True), BeforeValidator(all_as_whole)
]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    # strict: no type conversion. Lists use fail_fast: a million wrong elements are one error.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    inert: ClassVar[frozenset[str]] = frozenset()
    """Names of known fields that have no effect here."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: object) -> object:
        """Null counts as absent: clients of typed languages send it for each field without a
        value."""
        if not isinstance(body, Mapping):
            return body
        return {name: value for name, value in body.items() if value is not None}

    def unknown_fields(self, prefix: str = "") -> Iterator[str]:
        """Names of the fields that this server does not know, with their path."""
        for name, value in (self.model_extra or {}).items():
            if name not in self.inert and value is not None:
                yield prefix + name
        for name in self.model_fields_set:
            value = getattr(self, name, None)
            if isinstance(value, Body):
                yield from value.unknown_fields(f"{prefix}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for one in value:
                    yield from one.unknown_fields(f"{prefix}{name}[].")


B = TypeVar("B", bound=Body)


def parsed(kind: type[B], body: Mapping[str, object]) -> B:
    """A body that another API's body was converted into. Raises ApiError for a wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise refusal(problems) from error


class StreamOptions(Body):
    inert = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="Send the usage so far with every event, for clients that stop early."
    )


def _with_settings(schema: dict[str, Any], body: type[GenerationBody]) -> None:
    """Adds the settings to the OpenAPI document of a body."""
    schema["properties"] = {**schema["properties"], **body.table.properties()}


class GenerationBody(Body):
    """Fields that completions and chat share. A missing setting has the server's default."""

    model_config = ConfigDict(json_schema_extra=_with_settings)
    table: ClassVar[Table] = Table()

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    settings: SkipJsonSchema[SkipValidation[Settings]] = Field(Settings(), alias="exl.settings")

    @model_validator(mode="before")
    @classmethod
    def _read_settings(cls, body: object) -> object:
        if not isinstance(body, Mapping):
            return body
        settings, others = read_settings(cls.table, body)
        return {**others, "exl.settings": settings}


class CompletionBody(GenerationBody):
    table = COMPLETION

    prompt: (
        str
        | Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
        | SomeTokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    suffix: str | None = Field(
        None, description="Text after the reply: the model fills the gap, if its tokenizer can."
    )


class TextPart(Body):
    inert = frozenset(
        {"cache_control", "annotations", "logprobs", "citations", "signature", "data", "id"}
        | {"thinking", "refusal"}
    )

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"]
    text: str = ""


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallField(Body):
    inert = frozenset({"index", "cache_control", "extra_content"})

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message, in the shapes that clients send back as history."""

    inert = frozenset(
        {"annotations", "audio", "refusal", "cache_control", "reasoning_details", "id", "status"}
        | {"metadata", "provider_specific_fields", "timestamp", "function_call"}
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCallField] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = Field(None, description="The reply continues this last message.")

    @model_validator(mode="before")
    @classmethod
    def _old_function_call(cls, message: object) -> object:
        """The call of a function as it was before tools."""
        if not isinstance(message, dict):
            return message
        called = message.get("function_call")
        if isinstance(called, dict) and not message.get("tool_calls"):
            return {**message, "tool_calls": [{"function": called}]}
        return message

    @property
    def reasoned(self) -> str | None:
        return self.reasoning_content or self.reasoning or self.thinking


class Function(Body):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    inert = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedChoice(Body):
    """Some of the tools; with the mode `required`, the reply must call one of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatBody(GenerationBody):
    table = CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    allow_special: bool | None = Field(
        None,
        description="Whether text of messages that spells special tokens becomes these tokens. "
        "Without it: as --allow-special says.",
    )


class TokenizeBody(Body):
    """vLLM's `prompt`, with BOS by default, or llama.cpp's `content`, without.

    parse_special      text that spells a special token becomes that token
    with_pieces        each token is an object with its text, as in llama.cpp
    return_token_strs  the tokens as the vocabulary spells them, as in vLLM
    """

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False
    model: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> TokenizeBody:
        if self.text is None:
            raise ValueError("prompt, or content as in llama.cpp, is missing")
        return self

    @property
    def text(self) -> str | None:
        return self.content if self.prompt is None else self.prompt

    @property
    def adds_special(self) -> bool:
        given = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if given is None else given


class DetokenizeBody(Body):
    tokens: TokenIds
    model: str | None = None


class TokenBody(Body):
    """tabbyAPI accepts all three settings when encoding and when decoding. Each direction uses only
    its own."""

    add_bos_token: bool = True
    encode_special_tokens: bool = True
    decode_special_tokens: bool = True


class TokenEncodeBody(TokenBody):
    text: str


class TokenDecodeBody(TokenBody):
    tokens: TokenIds
