"""Parses tool calls in a reply, in the format of the model's chat template.

There are three formats. Hermes and Qwen write JSON between `<tool_call>` tags, Llama 3.1 writes a
bare JSON object, Mistral writes a marker and a list. Text that resembles a call but is not valid
stays text, so that nothing is lost. Knows neither tokens nor HTTP.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from exl_cli.server.schema import Function
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.triggered import Triggered


class ToolFormat(Enum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"

    @property
    def opening(self) -> str:
        """Text before the JSON of a call. The prompt ends with it if a call is required."""
        return {"hermes": "<tool_call>\n", "llama": "", "mistral": "[TOOL_CALLS]"}[self.value]

    @property
    def closing(self) -> str:
        """Text after the JSON of a call, which free text may follow. "": the reply ends there."""
        return "</tool_call>" if self is ToolFormat.HERMES else ""

    @property
    def arguments_key(self) -> str:
        return "parameters" if self is ToolFormat.LLAMA else "arguments"


_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_STARTS = ("{", _PYTHON_TAG)


def format_of(template: str) -> ToolFormat | None:
    """Tool format of a chat template, from the markers in its source. None: the template has no
    tools, or an unknown format."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "<function=" not in template:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "ipython" in template or _PYTHON_TAG in template:
        return ToolFormat.LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments` is JSON text, as in OpenAI's API."""

    name: str
    arguments: str
    # Ids have nine characters: Mistral's templates refuse other lengths, others accept any.
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])

    def as_json(self, index: int | None = None) -> dict[str, object]:
        call: dict[str, object] = {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


def arguments_object(text: str) -> dict[str, Any]:
    """Arguments of a call, for APIs that give them as an object.

    A model that writes without a constraint may write anything. Text that is no JSON object becomes
    the value of `arguments`.
    """
    try:
        found = _DECODER.decode(text or "{}")
    except (ValueError, RecursionError):
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""JSON without Python's NaN and Infinity, which no client reads."""


_CLOSING = "</tool_call>"
_ESCAPES = re.compile(r"\\.", re.DOTALL)


class ToolSplitter:
    """Separates tool calls from text while a reply streams. `names`: the available tools."""

    def __init__(
        self, tool_format: ToolFormat, names: Sequence[str], *, begins_inside: bool = False
    ) -> None:
        """`begins_inside`: the prompt already ends with the opening of a call."""
        self._format = tool_format
        self._names = frozenset(names)
        self._marker = tool_format.opening.strip()
        self._is_inside = begins_inside
        self._wrote_marker = not begins_inside
        self._held = ""
        self._has_text = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Add text of the reply. Returns parts that further text cannot change."""
        self._held += text
        if self._format is ToolFormat.LLAMA:
            return self._feed_llama()
        return list(self._feed_marked())

    def finish(self) -> list[str | ToolCall]:
        """End of the reply. Returns the parts held back so far."""
        held, self._held = self._held, ""
        if not held:
            return []
        if not self._is_inside and self._format is not ToolFormat.LLAMA:
            return [held]
        if self._format is ToolFormat.LLAMA and not held.lstrip().startswith(_LLAMA_STARTS):
            return [held]
        calls = self._parsed(held.strip().removeprefix(_PYTHON_TAG))
        if not calls:
            return [self._as_text(held)]
        return list(calls)

    def _feed_llama(self) -> list[str | ToolCall]:
        """A reply is either a call or text, which its first characters decide."""
        said = self._held.lstrip()
        may_be_call = any(said.startswith(one) or one.startswith(said) for one in _LLAMA_STARTS)
        if not self._has_text and may_be_call:
            return []
        self._has_text = True
        text, self._held = self._held, ""
        return [text] if text else []

    def _feed_marked(self) -> Iterator[str | ToolCall]:
        while self._held:
            if not self._is_inside:
                text, found, rest = self._held.partition(self._marker)
                if not found:
                    size = len(self._held) - self._may_begin_marker()
                    text, self._held = self._held[:size], self._held[size:]
                    if text:
                        yield text
                    return
                if text.strip():
                    yield text
                self._held, self._is_inside, self._wrote_marker = rest, True, True
            if self._format is ToolFormat.MISTRAL:
                return  # the list of calls ends with the reply
            end = _end_of_call(self._held)
            if end is None:
                return
            inside, rest = self._held[:end], self._held[end + len(_CLOSING) :]
            calls = self._parsed(inside.strip())
            yield from calls
            if not calls:
                yield self._as_text(inside + _CLOSING)
            self._held, self._is_inside = rest.lstrip(), False

    def _may_begin_marker(self) -> int:
        """Number of characters at the end of the held text that may begin the marker, including
        whitespace before it."""
        for size in range(min(len(self._marker) - 1, len(self._held)), 0, -1):
            if self._marker.startswith(self._held[-size:]):
                kept = self._held[: len(self._held) - size]
                return len(self._held) - len(kept.rstrip())
        return len(self._held) - len(self._held.rstrip())

    def _as_text(self, held: str) -> str:
        return (self._marker if self._wrote_marker else "") + held

    def _parsed(self, text: str) -> list[ToolCall]:
        """The calls in the text. Empty unless all of the text is valid calls of available tools."""
        is_named = self._format is ToolFormat.MISTRAL and not text.startswith(("[", "{"))
        values = _named_values(text) if is_named else _values_of(text)
        calls = [self._call(one) for one in values or ()]
        known = [call for call in calls if call is not None]
        return known if len(known) == len(calls) else []

    def _call(self, value: object) -> ToolCall | None:
        name = value.get("name") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get(self._format.arguments_key, value.get("arguments", {}))
        if isinstance(arguments, str):
            return ToolCall(name, arguments)
        if not isinstance(arguments, Mapping):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def call_schema(
    tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat, *, only_one: bool
) -> dict[str, object]:
    """JSON schema of a call of one of these functions, in the given format.

    References inside a function's schema are adjusted to the place that the schema moves to.
    """
    definitions: dict[str, object] = {}
    calls: list[dict[str, object]] = []
    for number, tool in enumerate(tools):
        home = f"#/$defs/tool{number}"
        schema = tool.get("parameters") or _NO_ARGUMENTS
        # Arguments are an object, even if the schema does not say so.
        definitions[f"tool{number}"] = _moved({"type": "object", **schema}, home)
        key = tool_format.arguments_key
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, key: {"$ref": home}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    one: dict[str, object] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if tool_format is not ToolFormat.MISTRAL:
        return {**one, "$defs": definitions}
    listed: dict[str, object] = {"type": "array", "items": one, "minItems": 1}
    if only_one:
        listed["maxItems"] = 1
    return {**listed, "$defs": definitions}


def required_calls(
    tools: Sequence[Function], tool_format: ToolFormat, *, only_one: bool
) -> JsonSchema:
    """Constraint of a reply that must call functions. Without `strict`, the schema of a function is
    a best effort."""
    shown = [{"name": one.name, "parameters": one.parameters} for one in tools]
    loose = [f"#/$defs/tool{number}" for number, one in enumerate(tools) if not one.strict]
    return JsonSchema(call_schema(shown, tool_format, only_one=only_one), loose=loose)


def strict_calls(
    tools: Sequence[Function],
    tool_format: ToolFormat,
    *,
    only_one: bool,
    reasoning: tuple[str, str],
    begins_inside: bool,
) -> Triggered:
    """Constraint of a reply that may call functions: arguments of strict ones follow the schema.

    Arguments of the other functions are any JSON object. `reasoning` holds the tags, and
    `begins_inside` states that the prompt ends inside them.
    """
    loose = {"type": "object"}
    shown = [
        {"name": one.name, "parameters": one.parameters if one.strict else loose} for one in tools
    ]
    is_llama = tool_format is ToolFormat.LLAMA
    return Triggered(
        call_schema(shown, tool_format, only_one=only_one),
        _PYTHON_TAG if is_llama else tool_format.opening.strip(),
        closing="" if only_one else tool_format.closing,
        separator=";" if is_llama and not only_one else "",
        begins=is_llama,
        reasoning=reasoning,
        begins_inside=begins_inside,
    )


def _moved(schema: object, home: str) -> object:
    if isinstance(schema, Mapping):
        return {
            key: home + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, home)
            for key, value in schema.items()
        }
    return [_moved(one, home) for one in schema] if isinstance(schema, list) else schema


def _end_of_call(text: str) -> int | None:
    """Characters before the tag that closes a call: the first one outside of JSON strings. None: it
    has not come yet."""
    begin = 0
    while (at := text.find(_CLOSING, begin)) >= 0:
        if not _ends_in_string(text[:at]):
            return at
        begin = at + 1
    return None


def _ends_in_string(text: str) -> bool:
    """Whether JSON that begins with this text is inside a string at its end."""
    return _ESCAPES.sub("", text).count('"') % 2 == 1


def _values_of(text: str) -> list[object] | None:
    """Consecutive JSON values, optionally separated by semicolons. A list counts as its elements.
    None if the text is not valid JSON."""
    values: list[object] = []
    text = text.strip()
    try:
        while text:
            value, end = _DECODER.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:].lstrip().removeprefix(";").lstrip()
    except (ValueError, RecursionError):
        return None
    return values


def _named_values(text: str) -> list[object] | None:
    """Calls in the format of newer Mistral models: `name[ARGS]{...}`, with the marker before each
    further call."""
    values: list[object] = []
    for part in text.split(ToolFormat.MISTRAL.opening):
        name = part.partition("{")[0]
        arguments = _values_of(part[len(name) :])
        if arguments is None or len(arguments) != 1:
            return None
        bare = name.partition("[ARGS]")[0].partition("[CALL_ID]")[0]
        values.append({"name": bare.strip(), "arguments": arguments[0]})
    return values
