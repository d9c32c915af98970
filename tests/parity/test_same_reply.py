"""A greedy reply is the same alone, in a batch, from the prompt cache, in chunks and with drafts.

On the exact path all tokens agree. On the fast path rounding depends on the batch size, so the
first different token, if any, must be a near tie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from support.paged import PagedRun

pytestmark = pytest.mark.thorough

GREEDY = SamplerParams(temperature=0)
LENGTH = 10
PROMPTS = (
    "The three primary colours are",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\ndef multiply(",
    "1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3,",
    "Once upon a time there was a small house at the edge of a large forest. " * 5,
)
NEAR_TIE = 0.1  # difference of logits; int8 activations change a logit by some hundredths


@pytest.fixture(scope="module", params=["exact", "fast"])
def loaded(request: pytest.FixtureRequest, smollm2: LoadedModel, smollm2_path: Path) -> LoadedModel:
    if request.param == "fast":
        return smollm2
    return load_model(str(smollm2_path), LoadOptions(exact=True))


def engine_of(
    loaded: LoadedModel, drafter: Drafter | None = None, prefill_chunk: int = 512
) -> Engine:
    options = EngineOptions(
        cache_tokens=16384, kv_format=KVFormat.FP32, prefill_chunk=prefill_chunk
    )
    return Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)


def replies(
    engine: Engine, prompts: list[list[int]], length: int = LENGTH
) -> list[tuple[int, ...]]:
    """Replies to all prompts, which run concurrently."""
    requests = [Request(tuple(ids), max_tokens=length, sampler=GREEDY) for ids in prompts]
    for request in requests:
        engine.submit(request)
    ended: dict[str, FinishEvent] = {}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, FinishEvent):
                ended[event.request_id] = event
    return [ended[request.request_id].token_ids for request in requests]


def model_drafter(loaded: LoadedModel) -> Drafter:
    return ModelDrafter(
        loaded.model, vocab_size=loaded.config.vocab_size, num_pages=64, max_tokens=3
    )


def crowd(loaded: LoadedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    others = [[*ids[i + 1 :], *ids[: i + 1]] for i in range(3) for ids in prompts]
    return replies(engine_of(loaded), [*prompts, *others])[: len(prompts)]


def cached(loaded: LoadedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    engine = engine_of(loaded)
    replies(engine, prompts, length=1)
    return [replies(engine, [ids])[0] for ids in prompts]


def one_by_one(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [replies(engine, [ids])[0] for ids in prompts]


WAYS: dict[str, Callable[[LoadedModel, list[list[int]]], list[tuple[int, ...]]]] = {
    "in a batch of 16": crowd,
    "from the prompt cache": cached,
    "in chunks": lambda loaded, prompts: one_by_one(engine_of(loaded, prefill_chunk=7), prompts),
    "with n-gram drafts": lambda loaded, prompts: one_by_one(
        engine_of(loaded, NgramDrafter(max_tokens=6)), prompts
    ),
    "with a draft model": lambda loaded, prompts: one_by_one(
        engine_of(loaded, model_drafter(loaded)), prompts
    ),
}


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    prompts = [loaded.tokenizer.encode(text) for text in PROMPTS]
    return prompts, [replies(engine_of(loaded), [ids])[0] for ids in prompts]


@pytest.mark.parametrize("way", WAYS)
def test_the_reply_equals_that_of_the_request_alone(
    loaded: LoadedModel, alone: tuple[list[list[int]], list[tuple[int, ...]]], way: str
) -> None:
    prompts, expected = alone
    for ids, want, got in zip(prompts, expected, WAYS[way](loaded, prompts), strict=True):
        assert len(got) == LENGTH
        if got == want:
            continue
        first = next(i for i in range(LENGTH) if got[i] != want[i])
        gap = gap_between(loaded, [*ids, *want[:first]], want[first], got[first])
        message = f"{way}: token {first} is {got[first]}, alone {want[first]}; gap {gap:.4f}"
        assert not loaded.exact, message
        print(message)
        assert gap < NEAR_TIE, message


def gap_between(loaded: LoadedModel, ids: list[int], one: int, other: int) -> float:
    """Absolute difference of the logits of two tokens after `ids`."""
    run = PagedRun(loaded.model, num_seqs=1, max_len=len(ids))
    feed = partial(run.feed, {0: ids})
    with torch.inference_mode():
        logits = feed()[0][-1]
    return abs(float(logits[one] - logits[other]))
