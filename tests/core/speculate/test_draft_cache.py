"""A real draft model with a paged cache: its proposals equal those with an empty cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from exl_core.cache.format import KVFormat
from exl_core.cache.page_pool import page_keys
from exl_core.model.transformer import Transformer
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import load_model
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
