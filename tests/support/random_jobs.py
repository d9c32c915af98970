"""Random jobs for an engine: shared prefixes, drafts, adapters, cancellations, few pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.model.adapters import AdapterUse
from exl_core.session.load import LoadedModel
from exl_core.speculate.ngram import NgramDrafter
from support.driving import ask, submit


class Reply(NamedTuple):
    """`choice`: index of the adapter that the job used; 0 for none. `prompt`: its token ids, as
    bytes because a test keeps thousands of them."""

    prompt: bytes
    choice: int
    token_ids: tuple[int, ...]


def run_jobs(
    loaded: LoadedModel,
    count: int,
    adapters: tuple[AdapterUse, ...] = (),
    after_tenth: Callable[[int], None] = lambda _: None,
    *,
    max_batch: int = 4,
    kv_format: KVFormat = KVFormat.FP16,
) -> dict[str, Reply]:
    """Replies of the jobs that were not cancelled, by name. Each job uses a random one of
    `adapters`, or none. `after_tenth` is called with the number of jobs begun after each tenth.

    Twice as many jobs as `max_batch` compete for 512 tokens of cache per sequence of a batch.
    """
    rng = random.Random(11)
    options = EngineOptions(cache_tokens=512 * max_batch, max_batch=max_batch, kv_format=kv_format)
    engine = Engine(loaded.model, loaded.tokenizer, options, drafter=NgramDrafter())
    choices = ((), *((use,) for use in adapters))
    cancelled = set(map(str, rng.sample(range(count), count // 10)))
    begun_jobs: list[tuple[bytes, int]] = []
    found: dict[str, Reply] = {}
    begun = 0
    while begun < count or not engine.is_idle:
        while begun < count and len(engine.live_requests) < 2 * max_batch:
            prefix = [rng.randrange(2)] * rng.choice([3, 280])
            ids = [3 + one for one in (*prefix, *(rng.randrange(200) for _ in range(5)))]
            choice = rng.randrange(len(choices))
            begun_jobs.append((bytes(ids), choice))
            request = ask(
                ids,
                max_tokens=rng.choice([1, 4, 12, 30]),
                stop_ids=frozenset(),
                adapters=choices[choice],
                request_id=str(begun),
            )
            submit(engine, request)
            begun += 1
            if begun % (count // 10) == 0:
                after_tenth(begun)
        for event in engine.step():
            if isinstance(event, FinishEvent):
                found[event.request_id] = Reply(*begun_jobs[int(event.request_id)], event.token_ids)
        for name in sorted(engine.live_requests & cancelled):
            engine.cancel(name)
    assert engine.pool.num_available == engine.pool.num_pages
    return {name: reply for name, reply in found.items() if name not in cancelled}
