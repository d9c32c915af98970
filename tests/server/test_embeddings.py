"""An embedding model beside the served one, and `/v1/rerank`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_cli.server.models import Embedder, ModelHost, Resident
from exl_cli.server.pooling import Pooling, pooling_of
from exl_core.errors import ModelError
from exl_core.session.load import LoadedModel, load_model
from support import tiny_models
from support.scripted import reply_with
from support.server import Running, error_of, running, runtime_of, scripted_runtime

EMBED = "/v1/embeddings"


@pytest.fixture(scope="module")
def theirs() -> Any:
    return tiny_models.tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(theirs, tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="reference")


def resident_of(one: Running) -> Resident:
    assert one.host.embedder is not None
    return one.host.embedder.resident


@pytest.fixture(params=["mean", "last"])
def one(request: pytest.FixtureRequest, loaded: LoadedModel) -> Iterator[tuple[Running, str]]:
    host = ModelHost(scripted_runtime(reply_with("hello")))
    resident = Resident("embedder", runtime_of(loaded, ctx_size=1024))
    host.embedder = Embedder(resident, Pooling(request.param))
    with running(host) as server:
        yield server, request.param


def test_vectors_are_those_of_transformers(one: tuple[Running, str], theirs: Any) -> None:
    server, kind = one
    rng = torch.Generator().manual_seed(1)
    lengths = (1, 7, 256, 257, 600)
    size = resident_of(server).runtime.engine.vocab_size
    inputs = [torch.randint(0, size, (n,), generator=rng).tolist() for n in lengths]
    answer = server.post(EMBED, {"input": inputs}).json()
    assert "error" not in answer, answer
    assert answer["model"] == "embedder"
    for ids, found in zip(inputs, answer["data"], strict=True):
        with torch.no_grad():
            states = theirs.model(torch.tensor([ids])).last_hidden_state[0].double()
        exact = states[-1] if kind == "last" else states.mean(0)
        vector = torch.tensor(found["embedding"], dtype=torch.float64)
        # Keys and values are cached in half precision: 2**-11 relative, over a few layers.
        torch.testing.assert_close(vector, exact / exact.norm(), atol=5e-3, rtol=0)
    assert server.post("/v1/completions", {"prompt": "Q"}).json()["model"] == "scripted"


def test_ending_of_the_tokenizer_ends_texts_only(loaded: LoadedModel) -> None:
    host = ModelHost(scripted_runtime(reply_with("hello")))
    resident = Resident("embedder", runtime_of(loaded, ctx_size=64))
    host.embedder = Embedder(resident, Pooling("last", ending=(2, 3)))
    with running(host) as server:
        ids = loaded.tokenizer.encode("a cat", add_bos=None)
        by_text = server.post(EMBED, {"input": "a cat"}).json()
        by_ids = server.post(EMBED, {"input": [*ids, 2, 3]}).json()
        assert by_text["data"] == by_ids["data"]
        assert by_text["usage"] == by_ids["usage"]
        error_of(server.post(EMBED, {"input": [1] * 62}), 400)


def test_pooling_comes_from_the_files(folder: Path, loaded: LoadedModel) -> None:
    assert pooling_of(loaded, "auto").kind == "mean"
    assert pooling_of(loaded, "last").kind == "last"
    config = folder / "1_Pooling/config.json"
    config.parent.mkdir()
    dimension = {"word_embedding_dimension": 64}
    config.write_text(json.dumps({**dimension, "pooling_mode_lasttoken": True}))
    assert pooling_of(loaded, "auto").kind == "last"
    assert pooling_of(loaded, "mean").kind == "mean"
    config.write_text(json.dumps({**dimension, "pooling_mode_cls_token": True}))
    with pytest.raises(ModelError, match="pooling_mode_cls_token"):
        pooling_of(loaded, "auto")


def test_rerank_orders_by_the_cosine_of_the_vectors(one: tuple[Running, str]) -> None:
    server, _ = one
    documents: list[Any] = ["a dog", {"text": "a cat"}, "the sea", "a cat"]
    texts = ["a cat", "a dog", "a cat", "the sea", "a cat"]
    data = server.post(EMBED, {"input": texts}).json()["data"]
    vectors = torch.tensor([item["embedding"] for item in data])
    exact = vectors[1:] @ vectors[0]
    body = {"query": "a cat", "documents": documents}
    answer = server.post("/v1/rerank", body).json()
    results = answer["results"]
    order = [item["index"] for item in results]
    assert order[:2] == [1, 3] and sorted(order) == [0, 1, 2, 3]
    for item in results:
        assert item["relevance_score"] == pytest.approx(float(exact[item["index"]]), abs=1e-5)
        assert item["document"] == {"text": texts[1 + item["index"]]}
    few = server.post("/rerank", {**body, "top_n": 2.0, "return_documents": False}).json()[
        "results"
    ]
    assert [item["index"] for item in few] == [1, 3] and "document" not in few[0]
    assert answer["usage"]["total_tokens"] > 5
    for wrong in (
        {"query": "a"},
        {**body, "documents": []},
        {**body, "top_n": 0},
        {**body, "top_n": 1.5},
    ):
        error_of(server.post("/v1/rerank", wrong), 400)
    assert server.post("/v1/rerank", {**body, "mood": 1}).headers["x-exl-ignored"] == "mood"


def test_rerank_without_an_embedding_model_uses_the_loaded_one(loaded: LoadedModel) -> None:
    with running(runtime_of(loaded, ctx_size=64)) as server:
        body = {"query": "a cat", "documents": ["the sea", "a cat"], "model": "x"}
        answer = server.post("/v1/rerank", body).json()
        assert answer["model"] == loaded.name and answer["results"][0]["index"] == 1
        assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)
