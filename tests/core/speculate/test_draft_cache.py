"""A real draft model with a paged cache proposes what an empty cache gives, in every precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from exl_core.cache.format import KVFormat
from exl_core.cache.page_pool import page_keys
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.generate.driver import generate
from exl_core.model.transformer import Transformer
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, load_model
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Draft, DraftJob
from support import tiny_models

GREEDY = SamplerParams(temperature=0.0)
PAGE = 256


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    is_llama = request.param == "llama"
    tiny = tiny_models.tiny_llama() if is_llama else tiny_models.tiny_gemma3()
    return load_model(str(tiny_models.save(tiny, folder))).model


@pytest.fixture(scope="module")
def quantizable(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model with heads of 32, which every cache format can hold."""
    made = tiny_models.tiny_llama(head_dim=32)
    return load_model(str(tiny_models.save(made, tmp_path_factory.mktemp("heads"))))


def drafter_of(model: Transformer) -> ModelDrafter:
    return ModelDrafter(
        model,
        vocab_size=tiny_models.VOCAB_SIZE,
        num_pages=8,
        kv_format=KVFormat.FP32,
        max_tokens=6,
        min_probability=0.0,
    )


def job(name: str, tokens: Sequence[int], pages: Sequence[int]) -> DraftJob:
    return DraftJob(name, tokens, tuple(pages), page_keys(tokens), 6, GREEDY)


def fresh(model: Transformer, tokens: Sequence[int]) -> Draft:
    return drafter_of(model).propose([job("fresh", tokens, (0, 1, 2))])[0]


def test_shared_pages_rewinds_and_reuse_change_no_proposal(model: Transformer) -> None:
    drafter = drafter_of(model)
    prompt = [3 + (7 * i + i * i // 5) % 250 for i in range(2 * PAGE)]
    first, second = [*prompt, 11, 12, 13], [*prompt, 21]
    jobs = [
        job("a", first, (5, 1, 7)),
        job("b", second, (5, 1, 2)),
    ]  # two requests with the same prompt
    assert drafter.propose(jobs) == [fresh(model, first), fresh(model, second)]

    first += fresh(model, first).token_ids[:3]  # three guesses were accepted, the fourth was not
    first += [44]
    second += [45, 46]
    jobs = [job("a", first, (5, 1, 7)), job("b", second, (5, 1, 2))]
    assert drafter.propose(jobs) == [fresh(model, first), fresh(model, second)]

    del first[2 * PAGE - 20 :]  # rewind into a page shared with the other request
    first += [50, 51]
    drafter.forget("b")
    assert drafter.propose([job("a", first, (5, 3, 7))]) == [fresh(model, first)]

    third = [*prompt[:PAGE], *(99 - i % 90 for i in range(40))]
    jobs = [job("c", third, (5, 1))]  # page 1 belonged to the other request
    assert drafter.propose(jobs) == [fresh(model, third)]
    assert drafter.propose([job("b", second, (5, 1, 2))]) == [fresh(model, second)]


@pytest.mark.parametrize("kv_format", [f for f in KVFormat if f is not KVFormat.FP32])
def test_a_quantized_draft_cache_changes_no_reply(
    kv_format: KVFormat, quantizable: LoadedModel
) -> None:
    """The model drafts for itself. Its logits are nearly flat: 4 bits change some drafts."""
    vocab_size = tiny_models.VOCAB_SIZE
    drafter = ModelDrafter(
        quantizable.model,
        vocab_size=vocab_size,
        num_pages=4,
        kv_format=kv_format,
        max_tokens=4,
        min_probability=0.0,
    )
    options = EngineOptions(cache_tokens=4 * PAGE, adapt_drafts=False)
    prompts = [[3 + (7 * i + i * i // 5) % 250 for i in range(length)] for length in (40, 300)]
    ends = []
    for engine in (
        Engine(quantizable.model, quantizable.tokenizer, options),
        Engine(quantizable.model, quantizable.tokenizer, options, drafter=drafter),
    ):
        requests = [Request(tuple(ids), max_tokens=24, sampler=GREEDY) for ids in prompts]
        ends.append([generate(engine, request) for request in requests])
    assert [end.token_ids for end in ends[0]] == [end.token_ids for end in ends[1]]
    for end in ends[1]:
        assert end.drafting is not None
        share = end.drafting.accepted / end.drafting.drafted
        assert share >= (0.9 if kv_format is KVFormat.FP16 else 0.25)  # by chance: below 0.01
    assert drafter.store.kv_format is kv_format
