"""Request bodies, field by field. An unknown field is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 16
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class Body(BaseModel):
    # strict: no type conversion. Lists use fail_fast: a million wrong elements are one error.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="Send the usage so far with every event, for clients that stop early."
    )


class SamplingFields(Body):
    """Fields that completions and chat share. A missing field has OpenAI's default, so that the
    sampler uses the model's unchanged distribution."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=2048
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Has no effect: the server does not track users.")


class CompletionBody(SamplingFields):
    prompt: (
        str
        | Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, description="Default: 16, as in OpenAI's API.")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Literal[1] | None = None
    add_special_tokens: bool = Field(
        True, description="Add BOS to a text if the tokenizer adds it by default."
    )


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCallField(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallField] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatBody(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_special: bool | None = Field(
        None,
        description="Whether text of messages that spells special tokens becomes these tokens. "
        "Without it: as --allow-special says.",
    )


class TokenizeBody(Body):
    prompt: str
    add_special_tokens: bool = True
    model: str | None = None


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
