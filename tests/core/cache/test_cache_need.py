"""Memory of a cache from numbers alone: that which the engine's store has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exl_core.cache import state_store
from exl_core.cache.format import KVFormat, final_itemsize
from exl_core.cache.need import CacheNeed
from exl_core.cache.state_store import StateStore
from exl_core.cache.store import final_dtype
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.errors import OutOfMemoryError
from exl_core.session.load import LoadedModel, load_model
from exl_core.speculate.ngram import NgramDrafter
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_kimi_linear,
    tiny_lfm2,
    tiny_nemotron_h,
    tiny_qwen35,
)
from support.tiny_models import save, tiny_llama

HYBRIDS = [tiny_lfm2, tiny_qwen35, tiny_granite_hybrid, tiny_nemotron_h, tiny_kimi_linear]


@pytest.fixture(scope="module", params=[*HYBRIDS, tiny_llama], ids=lambda make: make.__name__)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    make: Callable[[], Any] = request.param
    folder = save(make(), tmp_path_factory.mktemp("model"))
    return load_model(folder, device="cpu", threads=1)


@pytest.mark.parametrize(
    ("tokens", "max_batch", "has_drafts", "snapshots"),
    [(256, 1, False, None), (4000, 3, True, None), (9000, 16, False, None), (700, 2, True, 5)],
)
def test_an_engine_has_the_cache_of_its_need(
    loaded: LoadedModel, tokens: int, max_batch: int, has_drafts: bool, snapshots: int | None
) -> None:
    options = EngineOptions(cache_tokens=tokens, max_batch=max_batch, snapshots=snapshots)
    drafter = NgramDrafter(max_tokens=4) if has_drafts else None
    store = Engine(loaded.model, loaded.tokenizer, options, drafter=drafter).store
    need = CacheNeed(tokens, max_batch=max_batch, has_drafts=has_drafts, snapshots=snapshots)
    assert need.kv_bytes(loaded.config.kv_shapes) == store.size_bytes
    states = store.states
    slots, size = (0, 0) if states is None else (states.num_slots, states.size_bytes)
    assert need.slots(loaded.config) == slots
    assert need.snapshots_of(loaded.config) == max(0, slots - max_batch * (1 + has_drafts))
    assert sum(need.state_bytes(loaded.config, has_spare=False)) == size
    assert need.total_bytes(loaded.config, has_spare=False) == store.size_bytes + size


@pytest.mark.parametrize("loaded", HYBRIDS, indirect=True, ids=lambda make: make.__name__)
def test_layers_on_a_gpu_have_a_slot_beside(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tensors of a device that is not the CPU."""
    shapes, need = loaded.config.state_shapes, CacheNeed(4000, max_batch=3)
    sizes = need.state_bytes(loaded.config, has_spare=True)
    monkeypatch.setattr(state_store, "free_memory_bytes", lambda _: sum(sizes))
    devices = [torch.device("meta")] * len(shapes)
    store = StateStore(shapes, need.slots(loaded.config), devices)
    for layer, size in enumerate(sizes):
        tensors = store.layer(layer) if size else ()
        assert sum(one.nbytes for one in tensors if one is not None) == size
    monkeypatch.setattr(state_store, "free_memory_bytes", lambda _: sum(sizes) - 1)
    with pytest.raises(OutOfMemoryError, match="sequences and snapshots take"):
        StateStore(shapes, need.slots(loaded.config), devices)


@pytest.mark.parametrize("kind", KVFormat)
def test_size_of_a_final_state_is_that_of_its_type(kind: KVFormat) -> None:
    assert final_itemsize(kind) == final_dtype(kind).itemsize
    assert CacheNeed(300, kind).final_bytes(64) == 512 * 64 * final_itemsize(kind)
