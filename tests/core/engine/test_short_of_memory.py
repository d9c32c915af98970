"""Passes that run out of memory are repeated with fewer rows, and no request is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor

from exl_core.cache.store import KVStore
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import Event, FailEvent, FinishEvent
from exl_core.errors import OutOfMemoryError
from exl_core.model.batch import Batch
from exl_core.speculate.drafter import Drafter
from support.driving import ask, run_all
from support.guessing import ScriptedDrafter, right
from support.scripted import ByteTokenizer, HashRule, ScriptedModel

RULE = HashRule(5)
PROMPTS = [tuple((7 * i + j) % 250 for j in range(10 + 90 * i)) for i in range(4)]


@dataclass
class SmallModel(ScriptedModel):
    """Model with memory for `most_rows` rows in one pass."""

    most_rows: int = 1 << 30
    refused: int = 0

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        if len(batch.token_ids) > self.most_rows:
            self.refused += 1
            self.failure = OutOfMemoryError("too many rows")
        return super().forward(batch, store)


def small_engine(most_rows: int = 1 << 30, drafter: Drafter | None = None) -> Engine:
    options = EngineOptions(cache_tokens=8192, max_batch=4, prefill_chunk=512)
    return Engine(SmallModel(RULE, most_rows=most_rows), ByteTokenizer(), options, drafter=drafter)


def model_of(engine: Engine) -> SmallModel:
    assert isinstance(engine.model, SmallModel)
    return engine.model


def replies(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Replies of all prompts, served at once, in order."""
    ids = [engine.submit(ask(prompt, max_tokens=20)).request_id for prompt in prompts]
    ends = ends_of(run_all(engine))
    assert engine.pool.num_available == engine.pool.num_pages
    return [ends[request_id] for request_id in ids]


def ends_of(events: Sequence[Event]) -> dict[str, tuple[int, ...]]:
    assert not [event for event in events if isinstance(event, FailEvent)]
    return {e.request_id: e.token_ids for e in events if isinstance(e, FinishEvent)}


@pytest.mark.parametrize("most_rows", [300, 40, 36])
def test_prompts_are_computed_in_smaller_chunks(most_rows: int) -> None:
    engine = small_engine(most_rows)
    assert replies(engine) == replies(small_engine())
    assert 1 <= model_of(engine).refused <= 8


@pytest.mark.parametrize("most_rows", [35, 34, 33])
def test_sequences_are_preempted_if_the_smallest_chunk_does_not_fit(most_rows: int) -> None:
    """A preempted sequence is recomputed as a prompt, in chunks of 32 tokens."""
    prompts = [(i + 1,) for i in range(4)]
    engine = small_engine()
    ids = [engine.submit(ask(prompt, max_tokens=40)).request_id for prompt in prompts]
    events = engine.step()
    model_of(engine).most_rows = 3
    events += engine.step()
    model_of(engine).most_rows = most_rows
    ends = ends_of(events + run_all(engine))
    alone = [replies(small_engine(), [prompt])[0] for prompt in prompts]
    assert [ends[request_id][:20] for request_id in ids] == alone
    assert model_of(engine).refused


def test_one_sequence_that_does_not_fit_fails() -> None:
    engine = small_engine(0)
    engine.submit(ask(PROMPTS[1]))
    with pytest.raises(OutOfMemoryError, match="too many rows"):
        run_all(engine)
    (failed,) = engine.step()
    assert isinstance(failed, FailEvent)
    model_of(engine).most_rows = 600
    assert replies(engine) == replies(small_engine())


def test_drafts_continue_after_passes_without_memory() -> None:
    engine = small_engine(60, ScriptedDrafter(right(RULE)))
    assert replies(engine) == replies(small_engine())
    assert model_of(engine).refused
