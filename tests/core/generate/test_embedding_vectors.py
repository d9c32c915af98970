"""Embedding vectors in the streaming and the dynamic generator: streams, batches, shared pages."""

from __future__ import annotations

import pytest
import torch

from exl_core.generate.dynamic import DynamicGenerator
from exl_core.generate.streaming import StreamingGenerator
from exl_core.model.embedded import EmbeddedSpan
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support import tiny_models
from support.generators import GREEDY, SMALL

COUNT = 12
IMAGE = "<image>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_models.save(tiny_models.tiny_llama(), tmp_path_factory.mktemp("tiny"))
    return load_model(folder, LoadOptions(device="cpu"))


def span_of(loaded: LoadedModel, text: str) -> EmbeddedSpan:
    """The vectors of the text's own tokens."""
    return EmbeddedSpan(loaded.model.embed(torch.tensor(loaded.tokenizer.encode(text))))


def streamed(generator: StreamingGenerator, prompt: str, **settings: object) -> list[int]:
    generator.begin(prompt, stop=(), sampler=GREEDY, max_tokens=COUNT, **settings)  # type: ignore[arg-type]
    ids: list[int] = []
    while True:
        result = generator.step()
        ids += result.token_ids
        if result.is_end:
            return ids


def test_a_stream_reads_vectors_like_the_tokens_they_belong_to(tiny: LoadedModel) -> None:
    generator = StreamingGenerator(tiny, SMALL)
    spans = {IMAGE: span_of(tiny, "middle")}
    plain = streamed(generator, "firstmiddlelast")
    assert len(plain) == COUNT
    assert streamed(generator, f"first{IMAGE}last", embeddings=spans) == plain
    again = streamed(generator, f"first{IMAGE}last", embeddings=spans)
    assert again == plain, "the cached span is found by its ids"
    other = {IMAGE: span_of(tiny, "xxxxxx")}
    changed = streamed(generator, f"first{IMAGE}last", embeddings=other)
    assert changed == streamed(generator, "firstxxxxxxlast"), "another span shares no page"


def test_a_batch_mixes_spans_and_texts(tiny: LoadedModel) -> None:
    generator = DynamicGenerator(tiny, SMALL)
    spans = {IMAGE: span_of(tiny, "middle"), "<other>": span_of(tiny, "thing")}
    prompts = [f"first{IMAGE}last", f"{IMAGE}<other>!", "no vectors", f"a{IMAGE}b{IMAGE}c"]
    texts = ["firstmiddlelast", "middlething!", "no vectors", "amiddlebmiddlec"]
    replies = generator.generate(
        prompts, max_tokens=COUNT, sampler=GREEDY, embeddings=spans, completion_only=True
    )
    plain = generator.generate(texts, max_tokens=COUNT, sampler=GREEDY, completion_only=True)
    assert replies == plain


def test_jobs_that_share_a_span_share_its_pages(tiny: LoadedModel) -> None:
    generator = DynamicGenerator(tiny, SMALL)
    spans = {IMAGE: span_of(tiny, "word " * 80)}
    first, second = (
        generator.generate(
            f"{IMAGE}end", max_tokens=4, sampler=GREEDY, embeddings=spans, completion_only=True
        )
        for _ in range(2)
    )
    assert first == second
    finish = generator.last_jobs[0].finish
    assert finish is not None
    assert finish.cached_pages >= 1
