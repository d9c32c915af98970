"""Hybrids, whose layers keep a state: replies do not depend on what else the engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError, UnsupportedModelError
from exl_core.model.context import Context
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from support.families import save_family
from support.guessing import ScriptedDrafter
from support.paged import PagedRun
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_kimi_linear,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_nemotron_h,
    tiny_qwen3_next,
    tiny_qwen35,
    tiny_qwen35_moe,
)

GREEDY = SamplerParams(temperature=0)
BUILDERS: dict[str, Callable[[], object]] = {
    "lfm2": tiny_lfm2,
    "qwen3.5": tiny_qwen35,
    "granite4": tiny_granite_hybrid,
    "nemotron": tiny_nemotron_h,
}
OTHERS: dict[str, Callable[[], object]] = {
    "lfm2-moe": tiny_lfm2_moe,
    "qwen3.5-moe": tiny_qwen35_moe,
    "qwen3-next": tiny_qwen3_next,
    "kimi-linear": tiny_kimi_linear,
}
FAMILIES = (*BUILDERS, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS))


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    build = (BUILDERS | OTHERS)[request.param]
    folder = save_family(request.param, build(), tmp_path_factory.mktemp("hybrid"))
    return load_model(str(folder), LoadOptions(device="cpu", exact=True))


def engine_of(
    loaded: LoadedModel,
    *,
    tokens: int = 4096,
    max_batch: int = 4,
    prefill_chunk: int = 300,
    drafter: Drafter | None = None,
    snapshots: int | None = None,
) -> Engine:
    options = EngineOptions(
        tokens,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        kv_format=KVFormat.FP32,
        snapshots=snapshots,
    )
    return Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randint(3, 258) for _ in range(length))


def finished(engine: Engine, *requests: Request) -> list[FinishEvent]:
    """Events of the ends of these requests, which run concurrently."""
    for request in requests:
        engine.submit(request)
    ended: dict[str, FinishEvent] = {}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, FinishEvent):
                ended[event.request_id] = event
    return [ended[request.request_id] for request in requests]


def greedy(ids: tuple[int, ...], length: int = 12, **more: object) -> Request:
    return Request(ids, max_tokens=length, sampler=GREEDY, **more)  # type: ignore[arg-type]


def alone(loaded: LoadedModel, ids: tuple[int, ...], length: int = 12) -> tuple[int, ...]:
    """Greedy reply of the bare model, token by token."""
    run, reply = PagedRun(loaded.model, 1, len(ids) + length), list(ids)
    fed = 0
    for _ in range(length):
        logits = run.feed({0: reply[fed:]})[0]
        fed = len(reply)
        reply.append(int(logits[-1, : loaded.tokenizer.vocab_size].argmax()))
    return tuple(reply[len(ids) :])


def test_replies_are_those_of_the_bare_model(loaded: LoadedModel) -> None:
    prompts = [prompt(1, 700), prompt(2, 3), prompt(3, 256), prompt(4, 513)]
    expected = [alone(loaded, ids) for ids in prompts]
    ends = finished(engine_of(loaded), *(greedy(ids) for ids in prompts))
    assert [end.token_ids for end in ends] == expected


def test_a_shared_prefix_is_not_computed_again(loaded: LoadedModel) -> None:
    engine, shared = engine_of(loaded), prompt(5, 600)
    finished(engine, greedy(shared))
    for tail in (prompt(6, 40), prompt(7, 1)):
        ids = shared + tail
        (end,) = finished(engine, greedy(ids))
        assert end.token_ids == alone(loaded, ids)
        assert end.cached_tokens == 512, "the snapshot at the last page border"


def test_a_conversation_goes_on_from_the_end_of_the_reply(loaded: LoadedModel) -> None:
    engine, ids, cached = engine_of(loaded), prompt(8, 300), 0
    for turn in range(3):
        (end,) = finished(engine, greedy(ids))
        assert end.token_ids == alone(loaded, ids)
        assert end.cached_tokens == cached, f"all but the last token before turn {turn}"
        cached = len(ids) + len(end.token_ids) - 1
        ids = ids + end.token_ids + prompt(20 + turn, 50)


def test_replies_survive_preemption(loaded: LoadedModel) -> None:
    prompts = [prompt(30 + i, 250) for i in range(4)]
    engine = engine_of(loaded, tokens=1280)
    ends = finished(engine, *(greedy(ids, 40) for ids in prompts))
    assert engine.scheduler.num_requeued > 0
    assert [end.token_ids for end in ends] == [alone(loaded, ids, 40) for ids in prompts]


@pytest.mark.parametrize("kind", ["right", "wrong", "half", "ngram"])
def test_drafts_do_not_change_the_reply(loaded: LoadedModel, kind: str) -> None:
    ids = prompt(40, 250)
    expected = alone(loaded, ids, 24)
    text = ids + expected

    def guess(history: object) -> int:
        place = len(history)  # type: ignore[arg-type]
        wrong = kind == "wrong" or (kind == "half" and place % 3 == 0)
        return 5 if wrong or place >= len(text) else text[place]

    drafter: Drafter = NgramDrafter(min_match=1) if kind == "ngram" else ScriptedDrafter(guess)
    (end,) = finished(engine_of(loaded, drafter=drafter), greedy(ids, 24))
    assert end.token_ids == expected


def test_banned_strings_go_back_to_a_snapshot(loaded: LoadedModel) -> None:
    ids = prompt(50, 270)
    plain = finished(engine_of(loaded), greedy(ids, 20))[0]
    banned = plain.text[4:7]
    ends = [
        finished(engine, greedy(ids, 20, banned_strings=(banned,)))[0]
        for engine in (engine_of(loaded), engine_of(loaded, snapshots=0, prefill_chunk=64))
    ]
    assert banned not in ends[0].text
    assert ends[0].token_ids == ends[1].token_ids


def test_snapshots_are_bounded(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, snapshots=3)
    for seed in range(60, 64):
        ids = prompt(seed, 700)
        assert finished(engine, greedy(ids))[0].token_ids == alone(loaded, ids)
    states, pool = engine.store.states, engine.scheduler.memory.states
    assert states is not None
    assert pool is not None
    assert states.num_slots == 4 + 3
    assert len(pool.snapshots) <= states.num_slots
    assert pool.stats.evicted > 0
    engine.forget_cache()
    assert not pool.snapshots


def test_240_jobs_leave_nothing_behind(loaded: LoadedModel) -> None:
    random, engine = Random(7), engine_of(loaded, tokens=2048, snapshots=5)
    prefixes = [prompt(70 + i, 280) for i in range(3)]
    jobs = 240 if loaded.config.arch.name == "lfm2" else 60
    for _ in range(jobs // 6):
        batch = [
            greedy(
                random.choice(prefixes)[: random.randint(1, 280)] + prompt(random.randint(0, 9), 3),
                3,
            )
            for _ in range(6)
        ]
        for request in batch:
            engine.submit(request)
        engine.step()
        engine.cancel(batch[0].request_id)
        while not engine.is_idle:
            engine.step()
    pool, pages = engine.scheduler.memory.states, engine.pool
    assert pool is not None
    assert not pool.lent_slots
    assert not pages.held_pages
    ids = prefixes[0] + prompt(99, 2)
    assert finished(engine, greedy(ids))[0].token_ids == alone(loaded, ids)


def test_chunks_equal_token_by_token(loaded: LoadedModel) -> None:
    ids = prompt(90, 150)
    whole = PagedRun(loaded.model, 1, 150).feed({0: ids})[0]
    run = PagedRun(loaded.model, 1, 150)
    single = torch.cat([run.feed({0: [token_id]})[0] for token_id in ids])
    assert (whole - single).abs().max() <= 1e-4 * whole.abs().max()


def test_a_context_computes_rows_and_refuses_to_rewind(loaded: LoadedModel) -> None:
    ids = [list(prompt(91, 20)), list(prompt(92, 20))]
    context = Context(loaded.model, 40, batch_size=2, kv_format=KVFormat.FP32)
    first = context.feed([one[:15] for one in ids])
    copy = context.clone()
    rest = context.feed([one[15:] for one in ids])
    again = copy.feed([one[15:] for one in ids])
    for row, one in enumerate(ids):
        expected = PagedRun(loaded.model, 1, 20).feed({0: one})[0]
        found = torch.cat([first[row], rest[row]])
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(again[row], rest[row])
    with pytest.raises(RequestError, match="recurrent"):
        context.length = 3
    context.length = 0
    assert torch.equal(context.feed([one[:15] for one in ids])[0], first[0])


def test_a_store_without_states_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    from exl_core.model.runner import make_batch, store_for
    from exl_core.model.segment import LogitRows, Segment

    batch = make_batch([Segment((3, 4), 0, (0,), LogitRows.LAST)])
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        loaded.model.forward(batch, store_for(loaded.model, KVFormat.FP32, 1))


def test_uses_that_need_attention_everywhere_are_refused_by_name(loaded: LoadedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="draft model with recurrent layers"):
        ModelDrafter(loaded.model, vocab_size=loaded.config.vocab_size, num_pages=4)
    with pytest.raises(UnsupportedModelError, match="mixer"):
        _ = loaded.config.layers[0].attention
