"""`/v1/chat/completions` through OpenAI's client: conversations, JSON, reasoning, logprobs."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError

from support.scripted import ByteTokenizer, reply_with
from support.server import PLAIN_TEMPLATE, Running, running, scripted_runtime

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.openai()


def chat(client: Any, messages: Any = ASK, **settings: Any) -> Any:
    fields = {"model": None, "temperature": 0, "max_tokens": 24, **settings}
    return client.chat.completions.create(messages=messages, **fields)


def joined(chunks: Any, name: str = "content") -> str:
    return "".join(
        getattr(choice.delta, name, None) or "" for chunk in chunks for choice in chunk.choices
    )


def test_answer_to_a_question(client: Any) -> None:
    reply = chat(client)
    (choice,) = reply.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert reply.usage.completion_tokens > 3
    again = chat(
        client, [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    )
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert {"prompt_n", "prompt_ms", "predicted_ms", "cache_n"} <= set(again.timings)


def test_both_names_of_the_token_limit(client: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        reply = chat(client, **{"max_tokens": None, name: 2})
        assert reply.usage.completion_tokens == 2
        assert reply.choices[0].finish_reason == "length"
    with pytest.raises(BadRequestError, match="send one"):
        chat(client, max_tokens=2, max_completion_tokens=3)


def test_stream_joins_to_the_whole_reply(client: Any) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2, n=2)
    chunks = list(
        chat(
            client,
            logprobs=True,
            top_logprobs=2,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    for number, choice in enumerate(whole.choices):
        own = [one for chunk in chunks for one in chunk.choices if one.index == number]
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
        entries = [e.token for one in own if one.logprobs for e in one.logprobs.content]
        assert entries == [entry.token for entry in choice.logprobs.content]
    plain = list(chat(client, stream=True))
    assert joined(plain) == whole.choices[0].message.content
    assert plain[-1].timings["predicted_n"] == whole.usage.completion_tokens // 2


def test_logprobs_match_the_text(client: Any) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    said = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert said == choice.message.content, "a stop token is none of them"
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy took the likeliest"
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0 + 1e-5
    bare = chat(client, logprobs=True).choices[0]
    assert all(entry.top_logprobs == [] for entry in bare.logprobs.content)
    cut = chat(client, logprobs=True, stop=[" France"]).choices[0]
    said = "".join(entry.token for entry in cut.logprobs.content)
    assert said == cut.message.content == "The capital of"


@pytest.mark.thorough
def test_json_matches_the_schema(client: Any) -> None:
    ask = [{"role": "user", "content": "A person, as JSON."}]
    for seed in range(3):
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        reply = chat(
            client, ask, response_format=wanted, temperature=1, seed=seed, max_tokens=60
        ).choices[0]
        if reply.finish_reason == "stop":
            jsonschema.validate(json.loads(reply.message.content), PERSON)
        else:
            assert reply.finish_reason == "length"
    loose = chat(client, ask, response_format={"type": "json_object"}, max_tokens=20).choices[0]
    assert loose.message.content.lstrip().startswith("{")
    assert chat(client, response_format={"type": "text"}).choices[0].message.content


def test_invalid_schema_is_refused(client: Any) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(BadRequestError, match="schema"):
        chat(client, response_format=bad)


def test_a_schema_without_strict_is_a_best_effort(client: Any) -> None:
    listed = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}
    wanted: Any = {"name": "x", "schema": listed}
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
    reply = chat(client, response_format={"type": "json_schema", "json_schema": wanted}, **settings)
    assert set(json.loads(reply.choices[0].message.content)) <= {1, 2}
    strict = {**wanted, "strict": True}
    with pytest.raises(BadRequestError, match=r"not supported: .*uniqueItems"):
        chat(client, response_format={"type": "json_schema", "json_schema": strict}, **settings)


def test_reasoning_is_separate_from_the_answer() -> None:
    with running(scripted_runtime(reply_with("<think>\nHm, a.\n</think>\n\nIt is b."))) as one:
        client = one.openai()
        message = chat(client, max_tokens=100).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm, a.", "It is b.")
        chunks = list(chat(client, max_tokens=100, stream=True))
        assert (joined(chunks, "reasoning_content"), joined(chunks)) == ("Hm, a.", "It is b.")
        cut = chat(client, max_tokens=12).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("", "length")
        assert cut.message.reasoning_content == "Hm, "


def test_reasoning_opened_by_the_prompt() -> None:
    template = PLAIN_TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
    with running(scripted_runtime(reply_with("why</think>so"), template=template)) as one:
        message = chat(one.openai(), max_tokens=100).choices[0].message
        assert (message.reasoning_content, message.content) == ("why", "so")


class ThinkingTokenizer(ByteTokenizer):
    """Tokenizer whose reasoning tags are special tokens."""

    def __init__(self) -> None:
        super().__init__()
        special = {**self.special_tokens, "[THINK]": 258, "[/THINK]": 259}
        super(ByteTokenizer, self).__init__(self.control, special, "ThinkingTokenizer")

    @property
    def vocab_size(self) -> int:
        return 260


@pytest.mark.parametrize("opened", ["", "[THINK]"])
def test_reasoning_tags_come_from_the_template(opened: str) -> None:
    template = PLAIN_TEMPLATE.replace("[assistant]", "[assistant]" + opened)
    template += "{# a reply reasons between [THINK] and [/THINK] #}"
    said = [*([] if opened else [258]), *b"why <think>", 259, *b"so"]
    rule = reply_with(said, vocab_size=260)
    with running(scripted_runtime(rule, template=template, tokenizer=ThinkingTokenizer())) as one:
        body: Any = {"messages": [{"role": "user", "content": "Q"}]}
        message = one.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why <think>", "so")
        client = one.openai().chat.completions
        deltas = [
            chunk.choices[0].delta for chunk in client.create(**body, model="scripted", stream=True)
        ]
        assert "".join(delta.content or "" for delta in deltas) == "so"
        reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(reasoning) == "why <think>"


def test_json_reply_is_not_reasoning() -> None:
    template = PLAIN_TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
    with running(scripted_runtime(reply_with('{"a": 1}'), template=template)) as one:
        wanted = {"type": "json_object"}
        message = chat(one.openai(), response_format=wanted, max_tokens=50).choices[0].message
        assert json.loads(message.content) == {"a": 1}
        assert getattr(message, "reasoning_content", None) is None


def test_template_receives_messages_and_variables() -> None:
    """The developer role is the system role. Variables reach the template, and its exceptions
    reach the client."""
    template = (
        "{% if strict %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{{ mood }}"
    )

    def echo(history: Any) -> Any:
        seen.append(bytes(one for one in history if one < 256).decode())
        return rule(history)

    seen: list[str] = []
    rule = reply_with("k")
    with running(scripted_runtime(echo, template=template)) as one:
        client = one.openai()
        messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
        chat(client, messages, extra_body={"chat_template_kwargs": {"mood": "gently"}})
        assert seen[0] == "[system|be kind][user|hi]gently"
        with pytest.raises(BadRequestError, match="no system"):
            chat(client, ASK, extra_body={"chat_template_kwargs": {"strict": True}})
        with pytest.raises(BadRequestError, match="may not set messages"):
            chat(client, ASK, extra_body={"chat_template_kwargs": {"messages": []}})


def test_model_without_template_refuses_chat() -> None:
    runtime = scripted_runtime(reply_with("x"), template=None)
    with running(runtime) as one, pytest.raises(BadRequestError, match="no chat template"):
        chat(one.openai())
