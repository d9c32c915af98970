"""Messages in the shapes that clients send back as history, and replies that continue one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.scripted import reply_with
from support.server import Running, error_of, running, scripted_runtime

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
    "{{ c.function.arguments.city }}>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[reply]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}"
    "{# tools <tool_call> #}"
)
SEEN: list[str] = []


def remember(history: Any) -> Any:
    SEEN.append(bytes(one for one in history if one < 256).decode())
    return reply_with("ok")(history)


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running(scripted_runtime(remember, template=TEMPLATE)) as server:
        yield server


def prompt_of(one: Running, messages: Any, **fields: Any) -> tuple[str, str]:
    """The prompt that the model received, and the header of ignored fields."""
    del SEEN[:]
    answer = one.post(CHAT, {"messages": messages, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return SEEN[0], answer.headers.get("x-exl-ignored", "")


HI = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "index": 0}
ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            # openai 3: ChatCompletionMessage.model_dump()
            {
                **{"role": "assistant", "content": "a", "refusal": None, "annotations": []},
                **{"audio": None, "function_call": None, "tool_calls": None},
            },
            "[assistant]a",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": ROME}]},
            "[assistant]<weather Rome>",
        ),
        (  # the arguments as an object, as ollama's clients send them
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
            },
            "[assistant]<weather Rome>",
        ),
        (
            {"role": "assistant", "content": None, "function_call": ROME},
            "[assistant]<weather Rome>",
        ),
        (  # nulls for absent values, as typed languages write them
            {
                **{"role": "assistant", "content": None, "name": None, "reasoning": None},
                "tool_calls": [{"id": None, "type": None, "index": None, "function": ROME}],
            },
            "[assistant]<weather Rome>",
        ),
        ({"role": "function", "name": "weather", "content": "sunny"}, "[tool]sunny"),
        ({"role": "assistant", "content": "a", "reasoning": "r"}, "[assistant](r)a"),
        ({"role": "assistant", "content": "a", "thinking": "r"}, "[assistant](r)a"),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "b", "cache_control": {}}]},
            "[user]b",
        ),
        (  # LangChain keeps reasoning and refusals as parts
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "c"}],
            },
            "[assistant]c",
        ),
    ],
)
def test_history_of_clients_is_understood(one: Running, message: Any, shown: str) -> None:
    assert prompt_of(one, [message, HI]) == (f"{shown}[user]hi[reply]", "")


def test_nulls_inside_of_a_body_are_absent(one: Running) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    assert prompt_of(one, [HI], stream_options=options) == ("[user]hi[reply]", "")
    nulls = dict.fromkeys(("tools", "tool_choice", "system", "stop_sequences", "thinking"))
    assert one.post("/v1/messages", {"messages": [HI], **nulls}).status_code == 200
    item = {"type": None, "id": None, "status": None, **HI}
    assert one.post("/v1/responses", {"input": [item], "tools": None}).status_code == 200


def test_settings_of_reasoning_reach_the_template(one: Running) -> None:
    assert prompt_of(one, [HI], enable_thinking=False)[0].endswith("[reply]False")
    assert prompt_of(one, [HI], reasoning_effort="high")[0].endswith("[reply]high")
    assert prompt_of(one, [HI], reasoning_effort="none")[0].endswith("[reply]Falsenone")
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_of(one, [HI], **extra)[0].endswith("[reply]True")


def test_reply_continues_a_message(one: Running) -> None:
    begun = {"role": "assistant", "content": "It <eos>is"}
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([HI, {**begun, "prefix": True}], {}),
        ([HI, begun], {"continue_final_message": True, "add_generation_prompt": False}),
        ([HI], {"response_prefix": "It <eos>is"}),
    ]
    for messages, fields in cases:
        assert prompt_of(one, messages, **fields)[0] == "[user]hi[reply]It <eos>is"
    assert prompt_of(one, [HI], add_generation_prompt=False)[0] == "[user]hi"
    for message in (HI, begun):
        error_of(one.post(CHAT, {"messages": [{**message, "prefix": True}]}), 400)


def test_continued_answer_follows_the_reasoning_that_a_template_opens() -> None:
    template = TEMPLATE.replace("[reply]", "[reply]<think>\n") + "{# </think> #}"
    answer = {"role": "assistant", "content": "It is", "prefix": True}
    with running(scripted_runtime(remember, template=template)) as one:
        assert prompt_of(one, [HI, answer])[0] == "[user]hi[reply]<think>\n\n</think>\n\nIt is"
        thought = {**answer, "reasoning_content": "hm <eos>"}
        assert prompt_of(one, [HI, thought])[0].endswith("<think>\nhm <eos>\n</think>\n\nIt is")
        whole = {**answer, "content": "so</think>It is"}
        assert prompt_of(one, [HI, whole])[0].endswith("<think>\nso</think>It is")
