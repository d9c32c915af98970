"""Other servers' APIs: Anthropic, OpenAI's responses and embeddings, ollama, llama.cpp."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from exl_cli.server.app import Access
from exl_cli.server.models import ModelHost
from exl_core.session.load import load_model
from support import tiny_models
from support.scripted import ByteTokenizer, reply_with
from support.server import (
    PLAIN_TEMPLATE,
    Opening,
    Running,
    error_of,
    running,
    runtime_of,
    scripted_runtime,
)

SAID = '<think>hm</think>Yes.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEMPLATE = PLAIN_TEMPLATE + "{# tools <tool_call> #}"
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with running(scripted_runtime(reply_with("hello"))) as one:
        yield one


@pytest.fixture(scope="module")
def full() -> Iterator[Running]:
    """The model thinks, answers and calls a function."""
    with running(scripted_runtime(reply_with(SAID), template=TEMPLATE)) as one:
        yield one


def events_of(answer: Any) -> list[dict[str, Any]]:
    """Named events of a stream, whose names are the types of their data."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


ANTHROPIC_TOOL = {"name": "f", "description": "d", "input_schema": PARAMETERS}


def test_messages_have_content_blocks(full: Running) -> None:
    body = {"model": "claude", "max_tokens": 200, "messages": HI, "tools": [ANTHROPIC_TOOL]}
    message = full.post("/v1/messages", body).json()
    thinking, text, call = message["content"]
    assert thinking["thinking"] == "hm" and text["text"].strip() == "Yes."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"x": 1})
    assert message["stop_reason"] == "tool_use" and message["model"] == "scripted"
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] > 5
    events = events_of(full.post("/v1/messages", {**body, "stream": True}))
    assert events[0]["message"]["role"] == "assistant"
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "hm"
    assert "".join(d.get("text", "") for d in deltas).strip() == "Yes."
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"x": 1}
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == message["usage"]["output_tokens"]


def test_messages_end_like_anthropics() -> None:
    with running(scripted_runtime(reply_with("one two three"))) as one:
        body = {"max_tokens": 100, "messages": HI}
        whole = one.post("/v1/messages", body).json()
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        cut = one.post("/v1/messages", {**body, "max_tokens": 2}).json()
        assert cut["stop_reason"] == "max_tokens"
        stopped = one.post("/v1/messages", {**body, "stop_sequences": [" three"]}).json()
        assert stopped["content"][0]["text"] == "one two"
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " three")
        counted = one.post("/v1/messages/count_tokens", body).json()
        assert counted["input_tokens"] == len("[user]hi[assistant]")


def test_models_and_errors_for_anthropics_clients(plain: Running) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = plain.http.get("/v1/models", headers=headers).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (
        False,
        "scripted",
        "scripted",
    )
    (model,) = listed["data"]
    assert (model["type"], model["display_name"]) == ("model", "scripted")
    assert model["created_at"].endswith("Z")
    assert plain.http.get("/v1/models/scripted", headers=headers).json() == model
    assert "has_more" not in plain.http.get("/v1/models").json()
    error = plain.http.get("/v1/messages/batches").json()
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")


def test_messages_history_and_prefill_reach_the_template() -> None:
    seen: list[str] = []

    def echo(history: Any) -> Any:
        seen.append(bytes(one for one in history if one < 256).decode())
        return reply_with("ok")(history)

    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "5"}],
                },
                {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    with running(scripted_runtime(echo, template=TEMPLATE)) as one:
        system = [{"type": "text", "text": "be kind"}]
        body = {"max_tokens": 1, "messages": messages, "system": system, "metadata": {}}
        answer = one.post("/v1/messages", body)
        assert answer.status_code == 200 and "x-exl-ignored" not in answer.headers
    expected = "[system]be kind[user]hi[assistant]look[tool]5[user]go[assistant]It is"
    assert seen[0] == expected


def test_messages_errors_have_anthropics_form(plain: Running) -> None:
    for body in (
        {"max_tokens": 1},
        {"max_tokens": 1, "messages": [1]},
        {"max_tokens": 1, "messages": HI, "tools": [{"type": "web_search_20250305"}]},
        {"max_tokens": 1, "messages": HI, "tool_choice": {"type": "x"}},
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"max_tokens": 1, "messages": HI, "n": 2},
    ):
        answer = plain.post("/v1/messages", body)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"


RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS}


def test_responses_have_output_items(full: Running) -> None:
    body = {"model": "gpt", "input": "hi", "tools": [RESPONSES_TOOL]}
    response = full.post("/v1/responses", body).json()
    thinking, message, call = response["output"]
    assert thinking["content"][0]["text"] == "hm"
    assert message["content"][0]["text"].strip() == "Yes."
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"x": 1})
    assert (response["status"], response["object"]) == ("completed", "response")
    assert response["usage"]["total_tokens"] > response["usage"]["output_tokens"] > 10
    events = events_of(full.post("/v1/responses", {**body, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(texts) == last["response"]["output"][1]["content"][0]["text"]
    assert last["response"]["output"][2]["arguments"] == call["arguments"]
    done = [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call"]


def test_responses_have_log_probabilities_and_say_what_was_cut(plain: Running) -> None:
    body = {"model": "gpt", "input": "hi", "max_output_tokens": 3}
    body["include"] = ["message.output_text.logprobs"]
    (item,) = plain.post("/v1/responses", body).json()["output"]
    entries = item["content"][0]["logprobs"]
    assert (item["status"], len(entries)) == ("incomplete", 3)
    events = events_of(plain.post("/v1/responses", {**body, "stream": True}))
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [one for part in deltas for one in part] == entries
    (done,) = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done["content"][0]["logprobs"] == entries
    assert done["status"] == "incomplete"
    assert events[-1]["response"]["output"] == [done]


def test_responses_join_the_parts_of_a_reply() -> None:
    seen: list[Any] = []
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}|"
        "{{ m.tool_calls | length if m.tool_calls else 0 }}]{% endfor %}"
    )

    def echo(history: Any) -> Any:
        seen.append(bytes(one for one in history if one < 256).decode())
        return reply_with("ok")(history)

    thought = {"type": "reasoning_text", "text": "hm"}
    said = {"type": "output_text", "text": "look", "annotations": []}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [said]},
        {**call, "id": "fc_1", "call_id": "c1"},
        {**call, "id": "fc_2", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "function_call_output", "call_id": "c2", "output": "6"},
    ]
    with running(scripted_runtime(echo, template=template)) as one:
        body = {"input": items, "instructions": "kind", "max_output_tokens": 1, "store": True}
        answer = one.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "incomplete"
        assert "x-exl-ignored" not in answer.headers
    assert seen[0] == "[system||kind|0][user||hi|0][assistant|hm|look|2][tool||5|0][tool||6|0]"


def test_responses_refuse_stored_state(plain: Running) -> None:
    for body in (
        {"input": "hi", "previous_response_id": "resp_1"},
        {"input": "hi", "background": True},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": "hi", "tools": [{"type": "web_search"}]},
        {},
    ):
        error_of(plain.post("/v1/responses", body), 400)
    assert plain.post("/v1/responses", {"input": "hi", "previous_response_id": None}).is_success


def lines_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_ollama_chat(full: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
    body = {"model": "llama3", "messages": HI, "tools": [tool], "options": {"num_ctx": 4096}}
    lines = lines_of(full.post("/api/chat", body))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    assert "".join(one["content"] for one in messages).strip() == "Yes."
    assert "".join(one.get("thinking", "") for one in messages) == "hm"
    (call,) = [call for one in messages for call in one.get("tool_calls", ())]
    assert call["function"] == {"name": "f", "arguments": {"x": 1}}
    last = lines[-1]
    assert last["done_reason"] == "stop" and last["eval_count"] > 10 and last["eval_duration"] > 0
    whole = full.post("/api/chat", {**body, "stream": False}).json()
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert whole["eval_count"] == last["eval_count"] and whole["done"]


def test_ollama_generate(plain: Running) -> None:
    lines = lines_of(plain.post("/api/generate", {"model": "x", "prompt": "hi"}))
    assert "".join(line["response"] for line in lines) == "hello"
    raw = plain.post("/api/generate", {"prompt": "Q", "raw": True, "stream": False}).json()
    assert raw["response"] == "hello" and raw["prompt_eval_count"] == 1
    assert plain.post("/api/generate", {"model": "x"}).json()["done_reason"] == "load"
    limited = {"prompt": "hi", "stream": False, "options": {"num_predict": 2}}
    cut = plain.post("/api/generate", limited).json()
    assert (cut["response"], cut["done_reason"]) == ("he", "length")
    refused = plain.post("/api/generate", {"prompt": "hi", "images": ["x"]})
    assert refused.status_code == 400 and "images" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/chat", {"messages": HI}),
        ("/api/generate", {"prompt": "Q"}),
        ("/api/generate", {"prompt": "Q", "raw": True}),
    ],
    ids=["chat", "generate", "raw"],
)
def test_ollama_log_probabilities(plain: Running, path: str, asked: dict[str, Any]) -> None:
    body = {**asked, "model": "scripted", "logprobs": True, "top_logprobs": 2}
    whole = plain.post(path, {**body, "stream": False}).json()
    assert "".join(one["token"] for one in whole["logprobs"][:5]) == "hello"
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) >= 2 for one in whole["logprobs"])
    lines = [json.loads(line) for line in plain.post(path, body).text.splitlines()]
    parts = [part for line in lines for part in line.get("logprobs", ())]
    assert parts == whole["logprobs"]
    assert sum("logprobs" in line for line in lines) >= 5, "each line has those of its tokens"
    for without in ({"logprobs": False}, {"logprobs": None}):
        left = plain.post(path, {**body, **without, "top_logprobs": None, "stream": False}).json()
        assert "logprobs" not in left


def test_ollama_models(plain: Running) -> None:
    (model,) = plain.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "scripted" and len(model["digest"]) == 64
    (loaded,) = plain.http.get("/api/ps").json()["models"]
    assert loaded["name"] == "scripted" and loaded["context_length"] == 1024
    assert datetime.fromisoformat(loaded["expires_at"]) > datetime.now(UTC), "else it is not loaded"
    # Copilot Chat in VS Code refuses versions below 0.6.4.
    found = plain.http.get("/api/version").json()["version"]
    assert tuple(map(int, found.split("."))) >= (0, 6, 4)
    shown = plain.post("/api/show", {"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion"] and shown["template"] == PLAIN_TEMPLATE
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 1024


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models", None),
        ("/models/scripted", None),
        ("/model", None),
        ("/props", None),
        ("/slots", None),
        ("/tokenizer_info", None),
        ("/completions", {"prompt": "a", "max_tokens": 1}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/apply-template", {"messages": HI}),
        ("/messages", {"messages": HI, "max_tokens": 1}),
        ("/messages/count_tokens", {"messages": HI}),
        ("/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/tokenize", {"content": "a"}),
        ("/detokenize", {"tokens": [97]}),
        ("/token/encode", {"text": "a"}),
        ("/token/decode", {"tokens": [97]}),
        ("/api/chat", {"messages": HI, "stream": False, "max_tokens": 1}),
        ("/api/tags", None),
    ],
)
def test_paths_work_with_and_without_v1(plain: Running, path: str, body: Any) -> None:
    for spelling in (path, f"/v1{path}"):
        answer = plain.http.get(spelling) if body is None else plain.post(spelling, body)
        assert answer.status_code == 200, (spelling, answer.text)


def test_both_spellings_of_a_path_need_the_key() -> None:
    runtime = scripted_runtime(reply_with("x"))
    with running(runtime, access=Access(api_keys=frozenset({"k"}))) as one:
        for path in ("/models", "/v1/models", "/v1/props", "/v1//", "/v1/v1/models"):
            assert one.http.get(path).status_code == 401
        for path in ("/health", "/v1/health"):
            assert one.http.get(path).status_code == 200
        headers = {"authorization": "Bearer k"}
        for path in ("/v1/", "/v1/nothing", "/nothing"):
            assert one.http.get(path, headers=headers).status_code == 404
        # A client that adds /v1 to a base URL that ends with it.
        assert one.http.get("/v1/v1/models", headers=headers).status_code == 200


def test_ollama_lists_what_a_template_can_do(full: Running) -> None:
    shown = full.post("/api/show", {"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    template = TEMPLATE + "{# </think> #}"
    with running(scripted_runtime(reply_with(SAID), template=template)) as one:
        shown = one.post("/api/show", {"name": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


def test_llama_cpp_completion(plain: Running) -> None:
    whole = plain.post("/completion", {"prompt": "Q", "n_probs": 2, "samplers": ["top_k"]}).json()
    assert (whole["content"], whole["stop_type"]) == ("hello", "eos")
    assert [one["token"] for one in whole["completion_probabilities"]][:5] == list("hello")
    assert whole["tokens_predicted"] == 6 and whole["timings"]["predicted_n"] == 6
    answer = plain.post("/completion", {"prompt": "Q", "stream": True, "n_predict": 3})
    events = [json.loads(one.removeprefix("data: ")) for one in answer.text.strip().split("\n\n")]
    assert "".join(event["content"] for event in events) == "hel"
    assert events[-1]["stop"] and events[-1]["stop_type"] == "limit"
    two = plain.post("/completion", {"prompt": ["Q", "R"], "stop": ["l"]}).json()
    assert [(one["index"], one["content"], one["stopping_word"]) for one in two] == [
        (0, "he", "l"),
        (1, "he", "l"),
    ]


def test_llama_cpp_tokens_and_templates(plain: Running) -> None:
    assert plain.post("/tokenize", {"content": "hi"}).json()["tokens"] == [104, 105]
    assert plain.post("/detokenize", {"tokens": [104, 105]}).json()["content"] == "hi"
    assert plain.post("/apply-template", {"messages": HI}).json()["prompt"] == "[user]hi[assistant]"
    slots = plain.http.get("/slots").json()
    assert len(slots) == 8 and not any(slot["is_processing"] for slot in slots)
    error_of(plain.post("/tokenize", {}), 400)


class FillTokenizer(ByteTokenizer):
    """Tokenizer with the tokens for filling in text."""

    def __init__(self) -> None:
        super().__init__()
        marks = {"<|fim_prefix|>": 258, "<|fim_suffix|>": 259, "<|fim_middle|>": 260}
        special = {**self.special_tokens, **marks}
        super(ByteTokenizer, self).__init__(self.control, special, "FillTokenizer")

    @property
    def vocab_size(self) -> int:
        return 261


def test_text_between_two_others_is_filled_in() -> None:
    seen: list[list[int]] = []

    def echo(history: Any) -> Any:
        seen.append(list(history))
        return reply_with("mid", vocab_size=261)(history)

    with running(scripted_runtime(echo, tokenizer=FillTokenizer())) as one:
        body = {"prompt": "a<|fim_middle|>", "suffix": "b"}
        assert one.post("/v1/completions", body).json()["choices"][0]["text"] == "mid"
        assert seen[0] == [258, *b"a<|fim_middle|>", 259, *b"b", 260], "no text becomes a mark"
        del seen[:]
        extra = {"input_prefix": "x", "input_suffix": "y", "prompt": "z"}
        assert one.post("/infill", extra).json()["content"] == "mid"
        assert seen[0] == [258, *b"xz", 259, *b"y", 260]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_models.save(tiny_models.tiny_llama(), tmp_path_factory.mktemp("tiny"))
    with running(runtime_of(load_model(str(folder)), ctx_size=512)) as one:
        yield one


def test_embeddings_are_unit_vectors_of_the_text(tiny: Running) -> None:
    client = tiny.openai()
    found = client.embeddings.create(model="x", input=["a cat", "a dog", "a cat"])
    vectors = [one.embedding for one in found.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert all(math.isclose(sum(x * x for x in v), 1.0, rel_tol=1e-5) for v in vectors)
    assert found.usage.prompt_tokens > 3
    body = {"input": "a cat", "encoding_format": "base64"}
    data = tiny.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    size = len(vectors[0])
    assert list(struct.unpack(f"<{size}f", base64.b64decode(data))) == pytest.approx(vectors[0])
    assert tiny.post("/api/embed", {"input": "a cat"}).json()["embeddings"][0] == vectors[0]
    old = tiny.post("/api/embeddings", {"prompt": "a cat"}).json()["embedding"]
    assert old == vectors[0]


def test_long_text_is_embedded_in_chunks_while_replies_run(tiny: Running) -> None:
    long = "word " * 80
    alone = tiny.post("/v1/embeddings", {"input": long}).json()["data"][0]["embedding"]
    reply = tiny.openai().completions.create(
        model="x", prompt="Q", max_tokens=60, temperature=0, stream=True
    )
    next(iter(reply))
    beside = tiny.post("/v1/embeddings", {"input": long}).json()["data"][0]["embedding"]
    assert beside == alone
    assert len(list(reply)) > 0


def test_wrong_embeddings_are_refused(tiny: Running) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": []},
        {"input": ""},
        {"input": [10**6]},
        {"input": "a", "dimensions": 3},
        {"input": "a" * 100_000},
        {},
    ]
    for body in bodies:
        error_of(tiny.post("/v1/embeddings", body), 400)


def admin(one: Running, path: str, body: Any, key: str | None) -> Any:
    headers = {} if key is None else {"x-admin-key": key}
    return one.http.post(path, json=body, headers=headers)


def test_models_are_loaded_and_unloaded_by_the_admin_alone() -> None:
    opened: list[str] = []

    def opener(path: Path) -> Any:
        opened.append(path.name)
        return scripted_runtime(reply_with("x"), name=path.name)

    others = {name: Path(name) for name in ("one", "two")}
    host = ModelHost(
        scripted_runtime(reply_with("x")), name="one", others=others, opener=Opening(opener)
    )
    access = Access(frozenset({"user"}), admin_keys=frozenset({"root"}))
    load, unload = "/v1/model/load", "/v1/model/unload"
    with running(host, access=access) as one:
        error_of(admin(one, load, {"model_name": "two"}, None), 401)
        one.http.headers["authorization"] = "Bearer user"
        error_of(admin(one, load, {"model_name": "two"}, None), 403)
        error_of(admin(one, load, {"model_name": "two"}, "guess"), 403)
        assert admin(one, load, {"model_name": "two"}, "root").status_code == 200
        assert one.http.get("/v1/model").json()["id"] == "two"
        assert admin(one, unload, {}, "root").json() == {"status": "ok"}
        assert one.host.resident is None
        assert one.post("/v1/completions", {"prompt": "Q"}).json()["model"] == "one"
        listed = one.http.get("/v1/model/list").json()["data"]
        assert [model["id"] for model in listed] == ["one", "two"]
        error_of(admin(one, load, {"name": "../two"}, "root"), 404)
        error_of(admin(one, load, {}, "root"), 400)
    assert opened == ["two", "one"]
    with running(scripted_runtime(reply_with("x"))) as alone:
        error_of(admin(alone, unload, {}, "root"), 403)
    access = Access(admin_keys=frozenset({"root"}))
    with running(scripted_runtime(reply_with("x")), access=access) as alone:
        error_of(admin(alone, unload, {}, "root"), 400)
