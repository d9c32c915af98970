"""Memory that grows on a GPU, by the driver: addresses stay, memory is as used and returns."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from exl_core import EngineOptions, SamplerParams
from exl_core.arch.layers import KVShape
from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.cache.memory import free_memory_bytes
from exl_core.cache.store import KVStore
from exl_core.engine.engine import Engine
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.model.runner import store_for
from exl_core.ops.backends.cuda.growing import driver_memory
from exl_core.session.load import LoadOptions, load_model
from support import tiny_models

pytestmark = pytest.mark.cuda

SHAPES = [KVShape(8, 128)] * 4
GREEDY = SamplerParams(temperature=0.0)


def _used_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.Q4])
def test_memory_is_taken_as_used_and_returns(kv_format: KVFormat) -> None:
    device = torch.device("cuda", 0)
    memory = driver_memory(device)
    assert memory is not None
    before, free_before = _used_bytes(), free_memory_bytes(device)
    assert free_before is not None
    store = KVStore(kv_format, SHAPES, 256, device=device, grows=True)
    first = _used_bytes() - before
    assert first <= 8 * 3 * memory.granule + (8 << 20)
    free = free_memory_bytes(device)
    assert free is not None
    assert abs(free_before - free - store.size_bytes) < 64 << 20  # the rest is promised
    addresses = [store.layer(i).keys.data_ptr() for i in store.cached_layers]
    store.layer(2).keys[0] = 1
    last = 0
    for pages in (10, 64, 150, 256):
        store.grow(pages)
        taken = _used_bytes() - before
        assert last < taken <= 1.3 * pages * store.bytes_per_token * PAGE_SIZE + first + (8 << 20)
        store.layer(1).values[pages - 1] = 1
        last = taken
    assert [store.layer(i).keys.data_ptr() for i in store.cached_layers] == addresses
    assert store.layer(2).keys[0].eq(1).all()
    assert not store.layer(3).keys[: store.num_pages].any()
    kept = store.layer(0).keys[:2]
    del store
    assert kept.sum() == 0  # a tensor keeps its own memory
    del kept
    assert _used_bytes() - before < 8 << 20


def test_an_engine_replies_the_same_from_a_growing_cache(tmp_path: Path) -> None:
    """Long replies with captured graphs, which began when the memory was small."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    tiny_models.save(tiny_models.tiny_llama(max_position_embeddings=8192, **sizes), tmp_path)
    loaded = load_model(tmp_path, LoadOptions(device="cuda"))
    options = EngineOptions(cache_tokens=64 * PAGE_SIZE, max_batch=8)

    def replies(grows: bool) -> list[tuple[int, ...]]:
        store = store_for(loaded.model, KVFormat.FP16, 64, grows=grows)
        engine = Engine(loaded.model, loaded.tokenizer, options, store=store)
        assert (store.held_bytes < store.size_bytes) is grows
        for i in range(8):
            prompt = tuple((7 * i + j) % 200 + 3 for j in range(300 + 40 * i))
            request = Request(prompt, max_tokens=700, sampler=GREEDY, request_id=str(i))
            engine.submit(request)
        found: dict[str, tuple[int, ...]] = {}
        while not engine.is_idle:
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    found[event.request_id] = event.token_ids
        return [found[str(i)] for i in range(8)]

    whole = replies(grows=False)
    assert {len(one) for one in whole} == {700}
    assert replies(grows=True) == whole
