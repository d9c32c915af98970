"""Tokenizer routes under vLLM's and tabbyAPI's paths, and routes that describe the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.scripted import BOS_ID, EOS_ID, reply_with
from support.server import PLAIN_TEMPLATE, Running, error_of, running, scripted_runtime


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running(scripted_runtime(reply_with("x"))) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/tokenize", {"prompt": "ab<eos>"}, {"tokens": [97, 98, EOS_ID], "count": 3}),
        (
            "/tokenize",
            {"content": "aé<eos>", "with_pieces": True},
            {
                "tokens": [
                    {"id": 97, "piece": "a"},
                    {"id": 195, "piece": [195]},
                    {"id": 169, "piece": [169]},
                    {"id": EOS_ID, "piece": "<eos>"},
                ],
                "count": 4,
            },
        ),
        (
            "/tokenize",
            {"content": "<eos>", "parse_special": False},
            {"tokens": list(b"<eos>"), "count": 5},
        ),
        (
            "/tokenize",
            {"prompt": "ab", "return_token_strs": True},
            {"tokens": [97, 98], "count": 2, "token_strs": ["a", "b"]},
        ),
        ("/detokenize", {"tokens": [BOS_ID, 195, 169]}, {"prompt": "<bos>é", "content": "<bos>é"}),
        ("/detokenize", {"tokens": [195.0, 169]}, {"prompt": "é", "content": "é"}),
        ("/v1/token/encode", {"text": "ab"}, {"tokens": [BOS_ID, 97, 98], "length": 3}),
        ("/v1/token/encode", {"text": "<bos>a"}, {"tokens": [BOS_ID, 97], "length": 2}),
        (
            "/v1/token/encode",
            {"text": "<bos>", "add_bos_token": False, "encode_special_tokens": False},
            {"tokens": list(b"<bos>"), "length": 5},
        ),
        ("/v1/token/decode", {"tokens": [BOS_ID, 97]}, {"text": "<bos>a"}),
        ("/v1/token/decode", {"tokens": [BOS_ID], "decode_special_tokens": False}, {"text": ""}),
    ],
)
def test_texts_and_tokens(one: Running, path: str, body: Any, expected: dict[str, Any]) -> None:
    answer = one.post(path, body).json()
    assert {name: answer[name] for name in expected} == expected
    assert set(answer) - set(expected) <= {"max_model_len"}


def test_a_body_without_text_is_refused_by_the_name_of_the_field(one: Running) -> None:
    refused = error_of(one.post("/tokenize", {"messages": []}), 400)
    assert refused["message"] == "prompt, or content as in llama.cpp, is missing"


@pytest.mark.parametrize("path", ["/detokenize", "/v1/token/decode"])
def test_token_ids_beyond_the_vocabulary_are_refused(one: Running, path: str) -> None:
    assert error_of(one.post(path, {"tokens": [258]}), 400)["param"] == "tokens"


def test_props_and_tokenizer_info(one: Running) -> None:
    model = one.http.get("/v1/model").json()
    assert model == one.http.get("/v1/models/scripted").json()
    assert (model["id"], model["max_model_len"]) == ("scripted", 1024)
    assert one.http.get("/props").json() == {
        "total_slots": 8,
        "chat_template": PLAIN_TEMPLATE,
        "default_generation_settings": {"n_ctx": 1024},
    }
