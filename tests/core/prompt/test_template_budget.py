"""Budget of templates: every known way to use more time or memory is stopped."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from exl_core.errors import TemplateError
from exl_core.prompt import budget
from exl_core.prompt.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
DOUBLING = (
    "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {next} %}}"
)
LARGEST_BYTES = 400 * 2**20  # 64 Mi characters of four bytes each, and a copy


SLOW_LOOPS = {"recursive", "macro"}
SLOW_VALUES = {"percent many", "percent widths", "sum", "block", "join"}


def some_thorough(sources: dict[str, str], slow: set[str]) -> list[Any]:
    """Sources as test parameters; those that take longest to refuse are marked thorough."""
    return [
        pytest.param(source, marks=pytest.mark.thorough if name in slow else ())
        for name, source in sources.items()
    ]


def render(source: str) -> str:
    return ChatTemplate(source, bos_token="", eos_token="", where="made").render(USER)


def doubling(start: str, following: str, after: str = "{{ ns.x | length }}") -> str:
    return DOUBLING.format(start=start, next=following) + "{% endfor %}" + after


LOOPS = {
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "condition": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "recursive": "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}"
    "{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}"
    "{% endfor %}",
    "lists": "{% set l = range(99999) | list %}{% for i in l %}{% for j in l %}{% endfor %}"
    "{% endfor %}",
    "kept": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}text"
    "{% endfor %}{% endfor %}{% endset %}",
}


@pytest.mark.parametrize("source", some_thorough(LOOPS, SLOW_LOOPS), ids=LOOPS)
def test_endless_loops_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_STEPS", 200_000)  # for speed; the next test uses the real one
    with pytest.raises(TemplateError, match=r"steps|makes more than"):
        render(source)


@pytest.mark.thorough
def test_the_real_limits_end_a_loop_in_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError, match="2000000 steps"):
        render(LOOPS["nested"])
    assert time.monotonic() - start < budget.MAX_SECONDS


def test_slow_templates_are_stopped_by_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateError, match="takes longer"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}")


VALUES = {
    "bigint": doubling("10", "ns.x * ns.x"),
    "bigint sum": doubling("2", "ns.x * (2 * ns.x + 1)"),
    "text": doubling("'aaaaaaaaaa'", "ns.x + ns.x"),
    "tilde": doubling("'aaaaaaaaaa'", "ns.x ~ ns.x"),
    "list": doubling("[1, 2]", "ns.x + ns.x"),
    "repeat": doubling("'ab'", "ns.x * 7"),
    "shared list": doubling("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "shared tuple": doubling("(1,)", "(ns.x, ns.x)", "{{ ns.x == 1 }}"),
    "shared dict": doubling("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "shared dict()": doubling("{}", "dict(a=ns.x, b=ns.x)", "{{ ns.x | tojson }}"),
    "shared view": doubling("{}", "{'a': [ns.x, ns.x]}.values()", "{{ ns.x }}"),
    "shared filter": doubling(
        "[1]", "[{}, {}] | map(attribute='a', default=ns.x) | list", "{{ ns.x }}"
    ),
    "shared batch": doubling("[1]", "[1] | batch(9, ns.x) | list", "{{ ns.x }}"),
    "varargs": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}"
    "{% endif %}{% endmacro %}{{ f(60, 1, 1) }}",
    "block": doubling("'ab'", "ns.x").replace(
        "{% set ns.x = ns.x %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "format": "{{ '{:>1500000000}'.format(1) | length }}",
    "format map": "{{ '{a:>1500000000}'.format_map({'a': 1}) | length }}",
    "format nested": "{{ '{:{w}}'.format(1, w=1500000000) | length }}",
    "format precision": "{{ '{:.1500000000f}'.format(1.5) | length }}",
    "format many": "{{ ('{0}' * 1000000).format('a' * 1000000) | length }}",
    "format item": "{{ ''['format'] and '{:>1500000000}'['format'](1) }}",
    "format by filter": "{{ ('{:>1500000000}' | attr('format'))(1) }}",
    "percent": "{{ '%1500000000d' % 1 }}",
    "percent precision": "{{ '%.1500000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1500000000, 1) }}",
    "percent key": "{{ '%(a)1500000000d' % {'a': 1} }}",
    "percent brackets": "{{ '%((a))1500000000d' % {'(a)': 1} }}",
    "percent many": "{{ ('%(a)s' * 1000000) % {'a': 'a' * 1000000} }}",
    "percent widths": "{{ ('%9999d' * 99999) % ([1] * 99999) }}",
    "format filter": "{{ '%1500000000d' | format(1) }}",
    "center": "{{ 'a'.center(1500000000) }}",
    "ljust": "{{ 'a'.ljust(1500000000) }}",
    "rjust": "{{ 'a'.rjust(1500000000, 'x') }}",
    "zfill": "{{ 'a'.zfill(1500000000) }}",
    "center filter": "{{ 'a' | center(1500000000) }}",
    "center filter named": "{{ 'a' | center(width=1500000000) }}",
    "indent": "{{ 'a\nb' | indent(1500000000) }}",
    "indent lines": "{{ ('a\n' * 999999) | indent(9999) }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "replace nothing": "{{ ('a' * 999999).replace('', 'b' * 999999) }}",
    "replace filter": "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "join": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "join filter": "{{ range(99999) | join('a' * 99999) }}",
    "sum": "{{ range(99999) | map('string') | map('list') | sum(start=[]) | length }}"
    "{{ ([[1] * 1000] * 1000) | sum(start=[]) | length }}",
    "tojson indent": "{{ [1, 2] | tojson(indent=1500000000) }}",
    "tojson separators": "{{ [1, 2] | tojson(separators=('a' * 1000, ':')) }}",
    "round": "{{ 1 | round(1500000000, 'ceil') }}",
    "round down": "{{ 7 | round(-1500000000) }}",
    "batch": "{{ [1] | batch(1500000000, 1) | list }}",
    "slice": "{{ [1] | slice(1500000000) | list }}",
    "date": "{{ strftime_now('%1500000000Y') }}",
}


@pytest.mark.parametrize("source", some_thorough(VALUES, SLOW_VALUES), ids=VALUES)
def test_values_beyond_the_size_limit_are_refused(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"SecurityError: (the|a chat) template") as caught:
        render(source)
    assert "takes longer" not in str(caught.value)
    assert time.monotonic() - start < budget.MAX_SECONDS
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth_kib * 1024 < LARGEST_BYTES


@pytest.mark.parametrize(
    "expression",
    [
        "'x'.expandtabs(9)",
        "'x'.translate({120: 'xxxx'})",
        "'x'.encode()",
        "(5).to_bytes(10)",
        "{}.fromkeys([1], 2)",
        "lipsum()",
    ],
)
def test_names_that_templates_do_not_need_are_undefined(expression: str) -> None:
    with pytest.raises(TemplateError, match=r"unsafe|undefined"):
        render("{{ " + expression + " }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 'a' | center(1500000000) }}" + "{% if %}",
        "{{ 'x' | urlize }}",
        "x" * (256 * 1024 + 1),
    ],
    ids=["digits", "brackets", "syntax", "filter", "long"],
)
def test_a_source_that_cannot_be_compiled_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match=r"not valid|too long"):
        render(source)


def test_control_characters_in_a_refusal_are_escaped() -> None:
    with pytest.raises(TemplateError, match="no") as caught:
        render("{{ raise_exception('no \x1b[31m') }}")
    assert "\x1b" not in str(caught.value)
    assert r"no \x1b[31m" in str(caught.value)


LLAMA3_TOOLS = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson }}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' + (arg_val | string) + '"' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}{{- message.content | tojson }}{%- endif %}
{%- endfor %}"""
QWEN3 = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set reason = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {{- reason.strip('\n') ~ '|' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
{%- endfor %}
{{- ns.last_query_index }}"""
MISTRAL = """{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0, found=[]) %}
{%- for message in messages %}
    {%- if message.role in ["user", "assistant"] and not message.get("tool_calls") %}
        {%- set ns.index = ns.index + 1 %}{%- set ns.found = ns.found + [message] %}
    {%- endif %}
    {%- for role, group in messages | groupby('role') %}{{- role ~ group | length }}{%- endfor %}
{%- endfor %}
{%- for key, value in messages[0].items() if key != "role" and value is not none %}
    {{- '"' + key + '": ' + value | tojson + (", " if not loop.last else "") }}
{%- endfor %}
{{- "[INST]%s[/INST]{}" % user_messages[-1]["content"] }}{{- '{:>5}|{!r}'.format(3, 'x') }}
{{- ns.found | map(attribute='role') | join(', ') | indent(2) | replace('user', 'U') }}
{{- (messages | groupby('role') | first).grouper }}{{- [1, 2] | sum + 2 * 3 }}
{{- "%05.2f %-8s|" | format(3.14159, 'left') }}{{- 'a'.center(5, '*') }}{{ namespace(a=1).a }}"""
CALLS = [{"function": {"name": "f", "arguments": {"x": 1, "y": "zwei"}}}]
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": {"result": [1, 2]}},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 3."},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("source", [LLAMA3_TOOLS, QWEN3, MISTRAL], ids=["llama3", "qwen3", "mist"])
def test_templates_of_real_models_stay_within_the_budget(source: str) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}
    ]
    expected = render_jinja_template(
        [TOOL_CHAT], tools=tools, chat_template=source, bos_token="<s>", eos_token="</s>"
    )[0][0]
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", where="made")
    assert template.render(TOOL_CHAT, tools=tools, add_generation_prompt=False) == expected


def test_a_very_long_conversation_is_rendered() -> None:
    turns = [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "ok"}]
    template = ChatTemplate(QWEN3, bos_token="", eos_token="", where="made")
    assert len(template.render(turns * 1000)) > 2_500_000
