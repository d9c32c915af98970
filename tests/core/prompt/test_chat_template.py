"""Chat templates: same text as transformers renders, and no escape from the sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from exl_core.errors import TemplateError
from exl_core.prompt.template import MAX_CHARACTERS, ChatTemplate

USER = [{"role": "user", "content": "Hi <b>\n there"}]
CONVERSATION = [
    {"role": "user", "content": "  Hi  "},
    {"role": "assistant", "content": "Hello, 世界!"},
    {"role": "user", "content": "And 'then' \"what\"?"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *CONVERSATION]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
EVERYTHING = """{# all features that templates on the hub use #}
{% set ns = namespace(count=0, last='') %}
{% macro show(m) %}<{{ m.role | upper }}:{{ m['content'] | trim | length }}>{% endmacro %}
{% for message in messages %}
    {% if loop.index0 > 5 %}{% break %}{% endif %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {{ show(message) }}
{% endfor %}
{{ ns.count }} {{ tools | tojson }} {{ messages | tojson(indent=2) }}
{% generation %}said{% endgeneration %}
{{ dict(a=1, b='ü') | tojson }} {{ missing is defined }} [{{ missing }}] {{ 3 * 4 }} {{ '=' * 5 }}
{{ messages | map(attribute='role') | join(',') }} {{ messages[-1].content.split(' ') | last }}
{{ strftime_now('%Y') | length }} {{ thinking | default(false) }}
"""


def template(source: str, *, bos: str = "<bos>", eos: str = "<eos>") -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos, eos_token=eos, where="made")


@pytest.mark.parametrize("messages", [USER, CONVERSATION, WITH_SYSTEM], ids=["one", "three", "sys"])
@pytest.mark.parametrize("source", [SMOLLM2, GEMMA3, EVERYTHING], ids=["smollm2", "gemma3", "all"])
@pytest.mark.parametrize("prompt", [True, False])
def test_rendered_text_equals_that_of_transformers(
    source: str, messages: list[dict[str, object]], prompt: bool
) -> None:
    tools: list[Any] = [{"name": "f", "parameters": {"x": "<int>"}}]
    expected = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<bos>",
        eos_token="<eos>",
        thinking=True,
    )[0][0]
    ours = template(source).render(
        messages, add_generation_prompt=prompt, tools=tools, thinking=True
    )
    assert ours == expected


def test_the_template_adds_its_default_system_prompt() -> None:
    text = template(SMOLLM2).render(USER)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    with_system = template(SMOLLM2).render(WITH_SYSTEM)
    assert "helpful AI assistant" not in with_system
    assert with_system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_bos_and_eos_are_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert template(source).render([{"role": "user", "content": "x"}]) == "<bos>x<eos>"
    assert template(source, bos="", eos="").render([{"role": "user", "content": "x"}]) == "x"


def test_a_refusal_of_the_template_is_reported_in_its_words() -> None:
    twice = [*USER, *USER]
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        template(GEMMA3).render(twice)
    assert caught.value.where == "made"
    assert caught.value.got is not None
    assert caught.value.got.startswith("Conversation roles")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% endfor %}", "{{ x | nofilter }}", "{% y %}"]
)
def test_an_invalid_template_is_refused_at_construction(source: str) -> None:
    with pytest.raises(TemplateError, match=r"not valid, line 1"):
        template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ().__class__.__base__ }}{{ x.y }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ namespace.__init__.__globals__['check'] }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__x__ = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ .datetime }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__'))['__mro__'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ x.y }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].__setitem__('role', 'x') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'base' %}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ 'x' + 1 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
    ],
)
def test_a_hostile_or_broken_template_is_a_template_error(source: str) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateError, match="refused the conversation"):
        template(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("escape", ["''.__class__", "''|attr('__class__')", "messages.__init__"])
def test_names_outside_the_sandbox_are_undefined(escape: str) -> None:
    assert template(f"[{{{{ {escape} is defined }}}}]").render(USER) == "[False]"


def test_unbounded_output_is_stopped() -> None:
    line = "x" * 1000
    source = f"{{% for i in range(99999) %}}{line}{{{{ i }}}}{{% endfor %}}"
    assert 99999 * len(line) > MAX_CHARACTERS
    with pytest.raises(TemplateError, match="writes without end"):
        template(source).render(USER)


@pytest.mark.parametrize("messages", [[], [{}], [{"content": "x"}], [{"role": 1}], [{"role": ""}]])
def test_messages_without_a_role_are_refused(messages: list[dict[str, object]]) -> None:
    with pytest.raises(TemplateError, match=r"no role|no messages"):
        template(SMOLLM2).render(messages)


@pytest.mark.parametrize("source", [SMOLLM2, EVERYTHING], ids=["smollm2", "all"])
@pytest.mark.parametrize("kind", [iter, tuple, lambda rows: (row for row in rows)])
def test_messages_may_come_from_any_iterable(source: str, kind: Any) -> None:
    made = template(source)
    assert made.render(kind(CONVERSATION)) == made.render(CONVERSATION)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        *((given, "conversation is no list") for given in ("hi", b"hi", None, 5, USER[0])),
        *(([*USER, given], "message 1 is no mapping") for given in (None, 5, "hi", ["user", "hi"])),
    ],
)
def test_a_conversation_of_another_type_is_refused(messages: Any, what: str) -> None:
    with pytest.raises(TemplateError, match=f"^made: .*{what}.*expected mappings such as"):
        template(SMOLLM2).render(messages)
