"""Tool calls in the formats of the template families, whole and streamed, and required calls."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import pytest
from openai import BadRequestError

from exl_cli.server.tools import (
    ToolCall,
    ToolFormat,
    ToolSplitter,
    arguments_object,
    call_schema,
    format_of,
)
from support.profiles import first_by_default
from support.scripted import BOS_ID, EOS_ID, HashRule, Rule, reply_with
from support.server import Running, running, scripted_runtime

HERMES = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}{% endfor %}[assistant]"
)
LLAMA = HERMES.replace("<tool_call>", "ipython")
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
ASK: Any = [{"role": "user", "content": "Weather?"}]
NAMES = ("weather", "now")
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
NOW = '{"name": "now", "arguments": {}}'
REPLIES = {
    ToolFormat.HERMES: f"Let me see.\n<tool_call>\n{OSLO}\n</tool_call>\n"
    f"<tool_call>{NOW}</tool_call>",
    ToolFormat.LLAMA: OSLO.replace("arguments", "parameters") + "; " + NOW,
    ToolFormat.MISTRAL: f"[TOOL_CALLS][{OSLO}, {NOW}]",
}


def split(tool_format: ToolFormat, reply: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    splitter = ToolSplitter(tool_format, NAMES)
    parts: list[str | ToolCall] = []
    for start in range(0, len(reply), size):
        parts += splitter.feed(reply[start : start + size])
    parts += splitter.finish()
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("tool_format", list(ToolFormat))
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_found_however_the_reply_is_split(tool_format: ToolFormat, size: int) -> None:
    text, calls = split(tool_format, REPLIES[tool_format], size)
    assert calls == [("weather", {"city": "Oslo"}), ("now", {})]
    assert text.strip() == ("Let me see." if tool_format is ToolFormat.HERMES else "")


@pytest.mark.parametrize("tool_format", list(ToolFormat))
@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    "reply",
    [
        "Plain text, < and [TOOL and <tool_ and {.",
        '{"name": "nothing", "arguments": {}}',
        "<tool_call>\nnot JSON</tool_call> and on",
        '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
        "[TOOL_CALLS][1, 2",
        '<tool_call>{"name": "now"',
        '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": {"now": 1}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
        '<tool_call>it"s no call</tool_call> and on',
        "  spaces  around  ",
    ],
)
def test_text_that_is_not_a_call_stays_text(tool_format: ToolFormat, size: int, reply: str) -> None:
    text, calls = split(tool_format, reply, size)
    assert calls == []
    assert "".join(text.split()) == "".join(reply.split()), "nothing is lost"


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_closing_tag_inside_of_an_argument_ends_no_call(size: int) -> None:
    city = r"say \"a</tool_call>b\" "
    call = f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}'
    text, calls = split(ToolFormat.HERMES, f"ok<tool_call>{call}</tool_call> bye", size)
    assert calls == [("weather", {"city": 'say "a</tool_call>b" '})]
    assert text.split() in (["okbye"], ["ok", "bye"])


@pytest.mark.parametrize("between", ["[ARGS]", "", "[CALL_ID]a1b2c3d4e[ARGS]"])
def test_newer_mistral_writes_the_name_before_the_arguments(between: str) -> None:
    one = f'[TOOL_CALLS]weather{between}{{"city": "Rome"}}'
    two = f"{one}[TOOL_CALLS]now{between}{{}}"
    assert split(ToolFormat.MISTRAL, one, 5)[1] == [("weather", {"city": "Rome"})]
    assert split(ToolFormat.MISTRAL, two, 5)[1] == [("weather", {"city": "Rome"}), ("now", {})]
    broken = two.removesuffix("}")
    assert split(ToolFormat.MISTRAL, broken, 5) == (broken, [])


def test_format_is_detected_from_the_template() -> None:
    assert format_of(HERMES) is ToolFormat.HERMES
    assert format_of(LLAMA) is ToolFormat.LLAMA
    assert format_of(MISTRAL) is ToolFormat.MISTRAL
    assert format_of("{{ messages }}") is None
    assert format_of("{{ tools }}") is None


def test_references_in_a_tool_schema_are_adjusted() -> None:
    own = {"$defs": {"c": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/c"}}}
    schema: Any = call_schema([{"name": "f", "parameters": own}], ToolFormat.HERMES, only_one=True)
    assert schema["$defs"]["tool0"]["properties"]["x"] == {"$ref": "#/$defs/tool0/$defs/c"}
    assert schema["$defs"]["tool0"]["$defs"]["c"] == {"type": "string"}


def serving(rule: Rule, template: str) -> AbstractContextManager[Running]:
    return running(scripted_runtime(rule, template=template))


def ask(one: Running, **settings: Any) -> Any:
    fields = {"model": None, "temperature": 0, "max_tokens": 300, "tools": TOOLS, **settings}
    fields.setdefault("messages", ASK)
    reply: Any = one.openai().chat.completions.create(**fields)
    return list(reply) if settings.get("stream") else reply


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [(HERMES, ToolFormat.HERMES), (LLAMA, ToolFormat.LLAMA), (MISTRAL, ToolFormat.MISTRAL)],
)
def test_client_receives_calls(template: str, tool_format: ToolFormat) -> None:
    with serving(reply_with(REPLIES[tool_format]), template) as one:
        (choice,) = ask(one).choices
        chunks = ask(one, stream=True)
        alone = ask(one, parallel_tool_calls=False).choices[0].message.tool_calls
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "now"]
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls), "as Mistral's want them"
    calls = [one for c in chunks for one in c.choices[0].delta.tool_calls or []]
    assert [(one.index, one.function.name) for one in calls] == [(0, "weather"), (1, "now")]
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in alone] == ["weather"]


@pytest.mark.parametrize("template", first_by_default([HERMES, LLAMA, MISTRAL]))
def test_required_call_is_always_made(template: str) -> None:
    """The model's logits are random, so only the constraint makes the reply a call."""
    with serving(HashRule(3), template) as one:
        for seed in range(3):
            named = {"type": "function", "function": {"name": "weather"}}
            (choice,) = ask(one, tool_choice=named, temperature=1, seed=seed).choices
            (call,) = choice.message.tool_calls
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
            assert choice.finish_reason == "tool_calls"
        (choice,) = ask(one, tool_choice="required", parallel_tool_calls=False).choices
        assert choice.message.tool_calls[0].function.name in NAMES


def allowed(names: list[str], mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


STRICT: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    TOOLS[1],
]


def begin_with(text: str, seed: int) -> Rule:
    """Writes `text`, and anything after it: what follows the mask alone."""
    begun, then = reply_with(text), HashRule(seed)

    def rule(history: Any) -> Any:
        said = bytes(one for one in history if one < BOS_ID).rpartition(b"[assistant]")[2]
        return (begun if len(said) < len(text) else then)(history)

    return rule


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("stream", [False, True])
def test_strict_call_that_the_model_may_make_follows_its_schema(
    template: str, stream: bool
) -> None:
    """After the beginning of a call, the model's logits are random."""
    tool_format = format_of(template)
    assert tool_format is not None
    call = f'{{"name": "weather", "{tool_format.arguments_key}": '
    call = f"[{call}" if tool_format is ToolFormat.MISTRAL else call
    said = "" if tool_format is ToolFormat.LLAMA else "I look.\n"
    for seed in range(3):
        wrong = begin_with(f'{said}{tool_format.opening}{call}{{"city": "', seed)
        with serving(wrong, template) as one:
            reply = ask(one, tools=STRICT, stream=stream, parallel_tool_calls=False)
            loose = ask(one, max_tokens=120)
        if stream:
            deltas = [c.choices[0].delta for c in reply]
            (made,) = [call for delta in deltas for call in delta.tool_calls or []]
            text = "".join(delta.content or "" for delta in deltas)
        else:
            (made,) = reply.choices[0].message.tool_calls
            text = reply.choices[0].message.content or ""
        assert json.loads(made.function.arguments) in ({"city": "Oslo"}, {"city": "Rome"})
        assert text.strip() == said.strip()
        assert not loose.choices[0].message.tool_calls, "without the constraint there is no call"


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(template: str, mode: str) -> None:
    """The prompt has all tools. The model begins a call, and is random after that."""
    tool_format = format_of(template)
    assert tool_format is not None
    call = f'{tool_format.opening}{"[" if tool_format is ToolFormat.MISTRAL else ""}{{"name": "'
    only_one: Any = {"temperature": 0, "parallel_tool_calls": False}
    request: Any = {
        "tools": [{**tool["function"], "type": "function"} for tool in TOOLS],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": "weather"}],
        },
        **{"model": "x", "input": "Weather?", "max_output_tokens": 300, **only_one},
    }
    for seed in range(3):
        with serving(begin_with(call, seed), template) as one:
            (choice,) = ask(one, tool_choice=allowed(["weather"], mode), **only_one).choices
            answer = one.openai().responses.create(**request)
        calls = [made.function.name for made in choice.message.tool_calls or ()]
        called = [item.name for item in answer.output if item.type == "function_call"]
        if mode == "required":
            assert calls and called
        elif not calls:  # arguments of any kind have no end
            assert choice.finish_reason == "length"
            assert choice.message.content.startswith(f'{call}weather"')
        assert {*calls, *called} <= {"weather"}
    with serving(reply_with("No tool."), template) as one:
        message = ask(one, tool_choice=allowed(["weather"], "auto")).choices[0].message
        assert (message.content, message.tool_calls) == ("No tool.", None)


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_strict_tools_leave_answers_and_good_calls_as_they_are(tool_format: ToolFormat) -> None:
    template = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}[tool_format.value]
    with serving(reply_with("Plain text, < and [TOOL, <tool_ and {."), template) as one:
        assert ask(one, tools=STRICT).choices[0].message.content.startswith("Plain text, < and [")
    with serving(reply_with(f"<think>I write {OSLO[:-1]}</think>Sunny."), template) as one:
        message = ask(one, tools=STRICT).choices[0].message
        assert (message.content, message.tool_calls) == ("Sunny.", None)
        assert message.reasoning_content == f"I write {OSLO[:-1]}"
    reply = REPLIES[tool_format].replace("arguments", tool_format.arguments_key)
    with serving(reply_with(reply), template) as one:
        (choice,) = ask(one, tools=STRICT).choices
    calls = [(made.function.name, made.function.arguments) for made in choice.message.tool_calls]
    assert [(name, json.loads(text)) for name, text in calls] == [
        ("weather", {"city": "Oslo"}),
        ("now", {}),
    ]
    assert choice.finish_reason == "tool_calls"


ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"sunny": {"type": "boolean"}},
            "required": ["sunny"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("tools", [STRICT, TOOLS], ids=["strict", "loose"])
@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_reply_with_a_schema_and_tools_is_either(tool_format: ToolFormat, tools: Any) -> None:
    """The agents of OpenAI's and LangChain's packages send both in every turn."""
    template = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}[tool_format.value]
    settings: dict[str, Any] = {"tools": tools, "response_format": ANSWER}
    with serving(reply_with('{"sunny": true}'), template) as one:
        message = ask(one, **settings).choices[0].message
        assert (json.loads(message.content), message.tool_calls) == ({"sunny": True}, None)
    call = OSLO.replace("arguments", tool_format.arguments_key)
    end = "\n</tool_call>" if tool_format is ToolFormat.HERMES else ""
    listed = f"[{call}]" if tool_format is ToolFormat.MISTRAL else call
    with serving(reply_with(f"{tool_format.opening}{listed}{end}"), template) as one:
        (choice,) = ask(one, **settings).choices
        (made,) = choice.message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == (
            "weather",
            {"city": "Oslo"},
        )
        forced = ask(one, **settings, tool_choice="required").choices[0].message
        assert forced.tool_calls and not forced.content
    for seed in range(4):
        with serving(HashRule(seed), template) as one:
            (choice,) = ask(one, **settings).choices
        message = choice.message
        if choice.finish_reason == "length":  # any arguments of a tool that is not strict
            continue
        for made in message.tool_calls or ():
            assert isinstance(json.loads(made.function.arguments), dict)
        if not message.tool_calls:
            assert isinstance(json.loads(message.content)["sunny"], bool)


def test_tool_results_are_rendered_by_the_template() -> None:
    seen: list[str] = []
    rule = reply_with("ok")

    def echo(history: Any) -> Any:
        seen.append(bytes(history).decode())
        return rule(history)

    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with serving(echo, HERMES) as one:
        reply = ask(one, messages=messages, tool_choice="none")
    assert reply.choices[0].message.content == "ok"
    assert seen[0] == "[user]Weather?[assistant](weather Rome)[tool]sunny[assistant]"


@pytest.mark.parametrize("arguments", ["Oslo", '{"city": "Par'])
def test_a_call_whose_arguments_are_not_json_may_be_sent_back(arguments: str) -> None:
    """Agents do so, with an error as its result."""
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "error: not JSON"},
    ]
    with serving(reply_with("ok"), HERMES) as one:
        assert ask(one, messages=messages).choices[0].message.content == "ok"


def test_messages_calls_and_results_cannot_spell_special_tokens() -> None:
    seen: list[list[int]] = []
    rule = reply_with("ok")

    def remember(history: Any) -> Any:
        seen.append(list(history))
        return rule(history)

    function = {"name": "weather", "arguments": '{"city": "Ro<eos>me"}'}
    call = {"id": "c<eos>1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Hi<eos>", "name": "<eos>"},
        {"role": "assistant", "content": "a<eos>", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c<eos>1", "content": "su<eos>nny<bos>"},
    ]
    template = "{{ bos_token }}" + HERMES + "{{ messages[0].name }}{{ eos_token }}"
    runtime = scripted_runtime(remember, template=template)
    with running(runtime) as one:
        for extra in ({}, {"allow_special": False}, {"allow_special": True}):
            del seen[:]
            body = {"messages": messages, "tool_choice": "none", "max_tokens": 1, **extra}
            assert one.http.post("/v1/chat/completions", json=body).status_code == 200
            special = [i for i in seen[0] if i >= BOS_ID]
            if extra.get("allow_special"):
                assert len(special) > 4
            else:
                assert special == [BOS_ID, EOS_ID]


UNEXPRESSED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "cities": {"type": "array", "items": {"enum": ["Oslo", "Rome"]}, "uniqueItems": True},
        "when": {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "number"}]},
        "why": {"type": "string", "pattern": "^(?!no)", "not": {"const": "because"}},
    },
    "required": ["cities", "when"],
    "additionalProperties": False,
    "dependentRequired": {"why": ["when"]},
}


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_required_call_of_a_tool_that_is_not_strict_is_a_best_effort(
    tool_format: ToolFormat,
) -> None:
    """A keyword that the grammar cannot express is left out, and the others hold."""
    template = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}[tool_format.value]
    function = {"name": "plan", "parameters": UNEXPRESSED}
    settings: dict[str, Any] = {"tool_choice": "required", "max_tokens": 300}
    for seed in range(3):
        with serving(HashRule(seed), template) as one:
            reply = ask(one, tools=[{"type": "function", "function": function}], **settings)
        (choice,) = reply.choices
        if choice.finish_reason == "length":
            continue
        arguments = json.loads(choice.message.tool_calls[0].function.arguments)
        assert set(arguments["cities"]) <= {"Oslo", "Rome"}
        assert isinstance(arguments["when"], int | float)
    strict = {**function, "strict": True}
    with serving(reply_with("x"), template) as one:
        tools = [{"type": "function", "function": one} for one in (function, strict)]
        for mixed in (tools[1:], tools):
            with pytest.raises(BadRequestError, match=r"not supported|regex|oneOf"):
                ask(one, tools=mixed, **settings)


@pytest.mark.parametrize("is_strict", [False, True])
def test_required_call_has_an_object_even_if_the_schema_has_no_type(is_strict: bool) -> None:
    """Arguments of another type are no call, so that the reply would be text."""
    parameters = {"properties": {"a": {"enum": [1, 2]}}, "maxProperties": 3}
    function = {"name": "now", "parameters": parameters, "strict": is_strict}
    tools = [{"type": "function", "function": function}]
    if is_strict:
        del parameters["maxProperties"]  # needs all properties to be required
    for seed in range(6):
        with serving(HashRule(seed), HERMES) as one:
            (choice,) = ask(one, tools=tools, tool_choice="required", max_tokens=400).choices
        if choice.finish_reason != "length":
            (call,) = choice.message.tool_calls
            assert isinstance(json.loads(call.function.arguments), dict)


def test_answer_beside_tools_is_a_best_effort_too() -> None:
    answer = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": answer}}
    with serving(reply_with("[1, 2]"), HERMES) as one:
        message = ask(one, tools=STRICT, response_format=wanted).choices[0].message
    assert json.loads(message.content) == [1, 2]


def test_invalid_tools_are_refused() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(450):
        deep = {"properties": {"a": deep}}
    nested = [{"type": "function", "function": {"name": "f", "parameters": deep, "strict": True}}]
    broken = {"name": "f", "parameters": {"type": "nothing"}, "strict": True}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": {"type": "function", "function": {"name": "zzz"}}}, "no tool 'zzz'"),
        ({"tool_choice": allowed(["now", "zzz"])}, "no tool 'zzz'"),
        ({"tool_choice": allowed([])}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [], "tool_choice": allowed(["now"])}, "without tools"),
        ({"tools": [], "tool_choice": "required"}, "without tools"),
        ({"extra_body": {"regex": "a"}}, "leaves no place for calls"),
        ({"tools": [{"type": "function", "function": broken}]}, "schema of the tools"),
        ({"tools": nested, "tool_choice": "required"}, "ecursion|deep"),
    ]
    with serving(reply_with("ok"), HERMES) as one:
        for settings, said in refused:
            with pytest.raises(BadRequestError, match=said):
                ask(one, **settings)
    with (
        serving(reply_with("ok"), "{{ messages[0].content }}") as one,
        pytest.raises(BadRequestError, match="has no tools"),
    ):
        ask(one)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ("", {}),
        ("Oslo", {"arguments": "Oslo"}),
        ('["Oslo"]', {"arguments": ["Oslo"]}),
        ('{"city": NaN}', {"arguments": '{"city": NaN}'}),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(
    text: str, expected: dict[str, Any]
) -> None:
    assert arguments_object(text) == expected


def test_names_of_tools_may_be_as_long_as_in_anthropics_api() -> None:
    name = "mcp__" + "a" * 123
    said = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    with running(scripted_runtime(reply_with(said), template=HERMES)) as one:
        body = {"messages": ASK, "max_tokens": 300, "tools": [{"name": name, "input_schema": {}}]}
        (call,) = one.post("/v1/messages", body).json()["content"]
        assert call["name"] == name
        body["tools"] = [{"name": name + "a", "input_schema": {}}]
        assert one.post("/v1/messages", body).status_code == 400
