"""Real clients against the server. Each is optional: `nox -s thorough` installs the light ones."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from exl_core.prompt.template import ChatTemplate
from exl_core.session.load import LoadOptions, load_model
from support.real_models import smollm2_gguf
from support.scripted import BOS_ID, HashRule, reply_with
from support.server import Running, running, runtime_of, scripted_runtime

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # from the clients and their libraries
]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}{{ c.function.arguments.city }}>{% endfor %}{% endfor %}[assistant]"
    "{# tools <tool_call> #}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": PARAMETERS}
QUESTION = "Weather in Rome?"


class Person(BaseModel):
    """A reply with a schema."""

    name: str
    age: int


def calls_then_answers(history: Any) -> Any:
    """Calls the tool, and answers once the conversation has its result. Asks again after that."""
    text = bytes(one for one in history if one < 256).decode()
    turn = text.rpartition("[tool]")[2] if "[tool]" in text else ""
    return reply_with("It is sunny." if turn else CALL)(history)


@pytest.fixture(autouse=True)
def clients_are_collected() -> Iterator[None]:
    """Some clients leave sockets to the garbage collector. Its warnings are ignored here only."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with running(scripted_runtime(reply_with("Hello there."), ctx_size=4096)) as one:
        yield one


@pytest.fixture(scope="module")
def caller() -> Iterator[Running]:
    runtime = scripted_runtime(calls_then_answers, template=TEMPLATE, ctx_size=4096)
    with running(runtime) as one:
        yield one


@pytest.fixture(scope="module")
def person() -> Iterator[Running]:
    with running(scripted_runtime(reply_with('{"name": "Ann", "age": 7}'))) as one:
        yield one


def test_openai_uses_tools_over_three_turns_with_its_own_history(caller: Running) -> None:
    client = caller.openai()
    messages: list[Any] = []
    for _ in range(3):
        messages.append({"role": "user", "content": QUESTION})
        for _ in range(2):
            tools: Any = [{"type": "function", "function": FUNCTION}]
            reply = client.chat.completions.create(model="x", messages=messages, tools=tools)
            message: Any = reply.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Rome"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        assert message.content == "It is sunny."


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    days: int


WRONG = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Ro'


def begins_a_call(history: Any) -> Any:
    """Begins a call of `Weather`; the mask alone decides how it goes on."""
    said = bytes(one for one in history if one < BOS_ID).rpartition(b"[assistant]")[2]
    return (reply_with(WRONG) if len(said) < len(WRONG) else HashRule(5))(history)


def test_clients_with_strict_tools_receive_valid_arguments() -> None:
    runtime = scripted_runtime(begins_a_call, template=TEMPLATE, ctx_size=4096)
    messages: Any = [{"role": "user", "content": QUESTION}]
    with running(runtime) as one:
        client = one.openai()
        tool = pydantic_function_tool(Weather)
        assert tool["function"]["strict"] is True
        settings: Any = {"model": "x", "messages": messages, "temperature": 1}
        settings |= {"max_tokens": 200, "parallel_tool_calls": False}
        for seed in range(3):
            reply: Any = client.chat.completions.parse(**settings, tools=[tool], seed=seed)
            (call,) = reply.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
        with client.chat.completions.stream(**settings, tools=[tool]) as stream:
            reply = stream.get_final_completion()
        (call,) = reply.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        flat: Any = [{"type": "function", **tool["function"]}]
        response = client.responses.parse(
            model="x", input=QUESTION, tools=flat, parallel_tool_calls=False, temperature=0
        )
        (item,) = [item for item in response.output if item.type == "function_call"]
        assert isinstance(Weather.model_validate_json(item.arguments), Weather)
        both = client.responses.parse(  # as OpenAI's agents ask, in every turn
            model="x",
            input=QUESTION,
            tools=flat,
            text_format=Person,
            parallel_tool_calls=False,
            temperature=0,
        )
        (item,) = [item for item in both.output if item.type == "function_call"]
        assert isinstance(Weather.model_validate_json(item.arguments), Weather)
        openai = pytest.importorskip("langchain_openai", reason="langchain-openai is optional")
        chat = openai.ChatOpenAI(base_url=f"{one.url}/v1", api_key="x", model="x", temperature=0)
        bound = chat.bind_tools([Weather], strict=True, parallel_tool_calls=False)
        (made,) = bound.invoke(QUESTION).tool_calls
        assert isinstance(Weather(**made["args"]), Weather)


CALLING = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Write <tool_call> and JSON.<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def test_small_model_writes_valid_arguments_of_strict_tools() -> None:
    """SmolLM2 copies the calls of the conversation, which break the schema, unless it is strict."""
    loaded = load_model(smollm2_gguf(), LoadOptions(device="cpu"))
    template = ChatTemplate(CALLING, bos_token="", eos_token="<|im_end|>", where="test")
    messages: list[Any] = []
    for number, city in enumerate(["Paris", "Berlin", "Madrid"]):
        function = {"name": "Weather", "arguments": json.dumps({"place": city})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": f"How is the weather in {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    messages.append({"role": "user", "content": "How is the weather in Vienna?"})
    tool = pydantic_function_tool(Weather)
    loose: Any = {"type": "function", "function": {**tool["function"], "strict": False}}
    found: dict[bool, list[str]] = {True: [], False: []}
    with running(runtime_of(replace(loaded, template=template), ctx_size=2048)) as one:
        client = one.openai()
        for seed in range(8):
            for is_strict, shown in ((True, tool), (False, loose)):
                reply = client.chat.completions.create(
                    model="x", messages=messages, tools=[shown], seed=seed, max_tokens=80
                )
                calls: Any = reply.choices[0].message.tool_calls or ()
                found[is_strict] += [call.function.arguments for call in calls]
    assert len(found[True]) > 2, "the model calls the function"
    for arguments in found[True]:
        Weather.model_validate_json(arguments)
    assert any("place" in arguments for arguments in found[False])


def test_openai_parses_replies_and_responses(person: Running, talker: Running) -> None:
    client = person.openai()
    chat = client.chat.completions.parse(
        model="x", messages=[{"role": "user", "content": "Who?"}], response_format=Person
    )
    assert chat.choices[0].message.parsed == Person(name="Ann", age=7)
    response = client.responses.parse(model="x", input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ann", age=7)
    other = talker.openai()
    first = other.responses.create(model="x", input="hi", instructions="Be kind.")
    assert first.output_text == "Hello there."
    history: Any = [{"role": "user", "content": "hi"}, *first.output]
    history.append({"role": "user", "content": "again"})
    with other.responses.stream(model="x", input=history) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "Hello there."
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_anthropic_streams_and_uses_tools(caller: Running, talker: Running) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is optional")
    client = anthropic.Anthropic(base_url=talker.url, api_key="none", max_retries=0)
    asked = [{"role": "user", "content": "hi"}]
    settings = {"model": "claude", "max_tokens": 100}
    message = client.messages.create(messages=asked, system="Be kind.", **settings)
    assert message.content[0].text == "Hello there." and message.stop_reason == "end_turn"
    with client.messages.stream(messages=asked, **settings) as stream:
        assert "".join(stream.text_stream) == "Hello there."
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    assert client.messages.count_tokens(model="claude", messages=asked).input_tokens > 2
    tools = [{"name": "weather", "description": "d", "input_schema": PARAMETERS}]
    client = anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(messages=messages, tools=tools, **settings) as stream:
        reply = stream.get_final_message()
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    assert call.input == {"city": "Rome"} and reply.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": reply.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages.append({"role": "user", "content": [result]})
    last = client.messages.create(messages=messages, tools=tools, **settings)
    assert last.content[0].text == "It is sunny."
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(messages=asked, model="claude", max_tokens=0)


def test_ollama_chats_generates_and_lists(caller: Running, talker: Running) -> None:
    ollama = pytest.importorskip("ollama", reason="ollama is optional")
    client = ollama.Client(host=talker.url)
    messages = [{"role": "user", "content": "hi"}]
    assert client.chat(model="x", messages=messages).message.content == "Hello there."
    pieces = client.chat(model="x", messages=messages, stream=True)
    assert "".join(piece.message.content for piece in pieces) == "Hello there."
    options = {"temperature": 0, "num_ctx": 2048, "repeat_last_n": 64, "seed": 1}
    done = client.generate(model="x", prompt="hi", options=options)
    assert done.response == "Hello there." and done.done_reason == "stop"
    assert client.list().models[0].model == "scripted"
    assert client.ps().models and "completion" in client.show("scripted").capabilities
    with pytest.raises(ollama.ResponseError, match="temperature"):
        client.generate(model="x", prompt="hi", options={"temperature": -1})
    client = ollama.Client(host=caller.url)
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": QUESTION}]
    reply = client.chat(model="x", messages=messages, tools=tools)
    assert reply.message.tool_calls[0].function.arguments == {"city": "Rome"}
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    again = client.chat(model="x", messages=[*messages, reply.message, result], tools=tools)
    assert again.message.content == "It is sunny."


def test_ollama_format_is_a_schema(person: Running) -> None:
    ollama = pytest.importorskip("ollama", reason="ollama is optional")
    client = ollama.Client(host=person.url)
    messages = [{"role": "user", "content": "Who?"}]
    reply = client.chat(model="x", messages=messages, format=Person.model_json_schema())
    assert Person.model_validate_json(reply.message.content) == Person(name="Ann", age=7)


def test_langchain_invokes_streams_and_uses_tools(caller: Running, person: Running) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is optional")
    messages = pytest.importorskip("langchain_core.messages")
    chat = openai.ChatOpenAI(base_url=f"{caller.url}/v1", api_key="none", model="x", max_retries=0)
    bound = chat.bind_tools([{"type": "function", "function": FUNCTION}])
    history: list[Any] = [messages.HumanMessage(QUESTION)]
    reply = bound.invoke(history)
    assert reply.tool_calls[0]["args"] == {"city": "Rome"}
    call_id = reply.tool_calls[0]["id"]
    history += [reply, messages.ToolMessage("sunny", tool_call_id=call_id)]
    assert bound.invoke(history).content == "It is sunny."
    assert "".join(piece.content for piece in bound.stream(history)) == "It is sunny."
    chat = openai.ChatOpenAI(base_url=f"{person.url}/v1", api_key="none", model="x", max_retries=0)
    assert chat.with_structured_output(Person).invoke("Who?") == Person(name="Ann", age=7)
