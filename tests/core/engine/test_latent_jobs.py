"""Latent attention in the engine: replies in every cache format are those of a single request.

The models are batch-invariant, so that rows of the cache have the same bits whichever pass writes
them. Otherwise a code that is rounded the other way would change later tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from support.driving import ask, run_all, submit
from support.profiles import first_by_default
from support.random_jobs import run_jobs
from support.tiny_hybrids import tiny_kimi_linear
from support.tiny_latent import tiny_deepseek2, tiny_deepseek3, tiny_glm4_moe_lite, tiny_mistral4
from support.tiny_models import VOCAB_SIZE, save

SIZES = {"hidden_size": 96, "kv_lora_rank": 56}  # rows of 64 elements, which all formats take
BUILDERS: dict[str, Callable[[], Any]] = {
    "deepseek2": lambda: tiny_deepseek2(**SIZES),
    "glm4.7-flash": lambda: tiny_glm4_moe_lite(**SIZES),
    "kimi-linear": lambda: tiny_kimi_linear(**SIZES),
    "deepseek3": lambda: tiny_deepseek3(**SIZES),
    "mistral-small-4": lambda: tiny_mistral4(**SIZES),
}
FORMATS = (KVFormat.FP16, KVFormat.Q8, KVFormat.Q4, KVFormat.Q6, KVFormat.FP8)
FIRST = ("deepseek2 fp16", "deepseek2 q8", "deepseek2 q4", "glm4.7-flash q8", "kimi-linear q4")
CASES = [f"{name} {kv_format.value}" for name in BUILDERS for kv_format in FORMATS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    known: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in known:
            folder = save(BUILDERS[name](), tmp_path_factory.mktemp("latent") / name)
            options = LoadOptions(device="cpu", batch_invariant=True)
            known[name] = load_model(str(folder), options)
        return known[name]

    return get


@pytest.fixture(
    params=first_by_default([*FIRST, *(one for one in CASES if one not in FIRST)], len(FIRST))
)
def case(
    request: pytest.FixtureRequest, models: Callable[[str], LoadedModel]
) -> tuple[LoadedModel, KVFormat]:
    name, kv_format = request.param.split()
    return models(name), KVFormat(kv_format)


def engine_of(
    case: tuple[LoadedModel, KVFormat], drafter: Drafter | None = None, **changes: Any
) -> Engine:
    loaded, kv_format = case
    fields = {"cache_tokens": 4096, "max_batch": 4, "prefill_chunk": 300, **changes}
    options = EngineOptions(**fields, kv_format=kv_format)
    return Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)


def greedy(ids: tuple[int, ...], length: int = 12, **more: Any) -> Request:
    return ask(ids, max_tokens=length, stop_ids=frozenset(), **more)


def finished(engine: Engine, *requests: Request) -> list[FinishEvent]:
    """Ends of these requests, which run concurrently."""
    for request in requests:
        submit(engine, request)
    ends = {one.request_id: one for one in run_all(engine) if isinstance(one, FinishEvent)}
    return [ends[request.request_id] for request in requests]


def alone(case: tuple[LoadedModel, KVFormat], ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    (end,) = finished(engine_of(case, max_batch=1, prefill_chunk=2048), greedy(ids, length))
    return end.token_ids


def prompt(seed: int, length: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randint(3, VOCAB_SIZE - 1) for _ in range(length))


def test_random_jobs_have_the_replies_of_single_ones(case: tuple[LoadedModel, KVFormat]) -> None:
    """Shared prefixes, drafts, preemptions and cancellations. `run_jobs` checks the pages."""
    loaded, kv_format = case
    found = run_jobs(loaded, 60, kv_format=kv_format)
    assert len(found) == 54
    expected: dict[tuple[bytes, int], tuple[int, ...]] = {}
    for reply in found.values():
        key = reply.prompt, len(reply.token_ids)
        if key not in expected:
            expected[key] = alone(case, tuple(reply.prompt), len(reply.token_ids))
        assert reply.token_ids == expected[key]


def test_replies_survive_preemption(case: tuple[LoadedModel, KVFormat]) -> None:
    prompts = [prompt(30 + i, 250) for i in range(4)]
    engine = engine_of(case, cache_tokens=1280)
    ends = finished(engine, *(greedy(ids, 40) for ids in prompts))
    assert engine.scheduler.num_requeued > 0
    assert [end.token_ids for end in ends] == [alone(case, ids, 40) for ids in prompts]


def test_a_conversation_goes_on_from_its_cached_rows(case: tuple[LoadedModel, KVFormat]) -> None:
    engine, ids, cached = engine_of(case), prompt(8, 300), 0
    for turn in range(3):
        (end,) = finished(engine, greedy(ids))
        assert end.token_ids == alone(case, ids, 12)
        assert end.cached_tokens == cached
        cached = len(ids) + len(end.token_ids) - 1
        ids = ids + end.token_ids + prompt(20 + turn, 50)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafts_do_not_change_the_reply(case: tuple[LoadedModel, KVFormat], kind: str) -> None:
    loaded, _ = case
    ids = prompt(40, 50) * 3
    drafter: Drafter = NgramDrafter(min_match=1)
    if kind == "model":
        if any(shape is not None for shape in loaded.config.state_shapes):
            pytest.skip("a draft model has no recurrent layers")
        drafter = ModelDrafter(loaded.model, vocab_size=VOCAB_SIZE, num_pages=8)
    (end,) = finished(engine_of(case, drafter, adapt_drafts=False), greedy(ids, 40))
    assert end.token_ids == alone(case, ids, 40)
    assert end.drafting is not None
    assert end.drafting.rounds > 0


def test_a_banned_string_goes_back_in_the_cache(case: tuple[LoadedModel, KVFormat]) -> None:
    """The engine that computed the text before the string has the reply of one that did not."""
    ids = prompt(50, 270)
    (plain,) = finished(engine_of(case), greedy(ids, 20))
    banned = plain.text[4:7]
    (first,), (again,) = (
        finished(engine_of(case, prefill_chunk=size), greedy(ids, 20, banned_strings=(banned,)))
        for size in (300, 64)
    )
    assert banned not in first.text
    assert first.token_ids == again.token_ids
