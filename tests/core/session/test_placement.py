"""Which devices a model fits on: every expected number is computed by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from exl_core.arch.layers import KVShape, StateShape
from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.need import CacheNeed
from exl_core.session.placement import GPU_OVERHEAD, DeviceMemory, Fit, device_memory, fit_all


class Shape(NamedTuple):
    kv_shapes: tuple[KVShape | None, ...] = (KVShape(2, 64),) * 4
    state_shapes: tuple[StateShape | None, ...] = (None,) * 4
    max_seq_len: int = 4096

    @property
    def state_bytes(self) -> int:
        return sum(shape.size_bytes for shape in self.state_shapes if shape is not None)


STATE = StateShape((3, 100), (2, 50, 50))  # 4 * (300 + 5000) bytes
HYBRID = Shape((KVShape(2, 64), None, None), (None, STATE, STATE))
RECURRENT = Shape((None,), (STATE,))


FP16_PAGE = 4 * 2 * 64 * 2 * 2 * PAGE_SIZE  # layers, heads, d, key and value, bytes


def fit_on_gpu(free: int | None, ctx: int = 1024) -> Fit:
    return fit_all(1000, Shape(), CacheNeed(ctx), [DeviceMemory("cuda:0", "a GPU", free)])[0]


def test_needed_bytes_are_weights_overhead_and_whole_pages() -> None:
    fit = fit_on_gpu(1 << 40, ctx=1000)
    assert fit.needed_bytes == 1000 + GPU_OVERHEAD + 4 * FP16_PAGE
    assert fit.fits is True
    assert fit.advice == ""


def test_longest_contexts_are_whole_pages_up_to_the_models_maximum() -> None:
    fit = fit_on_gpu(1000 + GPU_OVERHEAD + 3 * FP16_PAGE + 17)
    assert fit.contexts[KVFormat.FP16] == 3 * PAGE_SIZE
    assert fit.contexts[KVFormat.FP8] == 6 * PAGE_SIZE
    assert fit.contexts[KVFormat.Q4] == 10 * PAGE_SIZE  # 4.5 bits an element
    assert fit_on_gpu(1 << 40).contexts[KVFormat.FP16] == 4096


def test_advice_names_options_that_would_fit() -> None:
    fit = fit_on_gpu(1000 + GPU_OVERHEAD + 3 * FP16_PAGE)
    assert fit.fits is False
    assert fit.advice == "--cache-type fp8 or q8 or q6 or q4 or --ctx-size 768"


def test_nothing_fits_if_the_weights_alone_are_too_large() -> None:
    fit = fit_on_gpu(GPU_OVERHEAD)
    assert fit.fits is False
    assert set(fit.contexts.values()) == {0}
    assert fit.advice == "nothing"


def test_unknown_memory_stays_unknown() -> None:
    fit = fit_on_gpu(None)
    assert fit.fits is None
    assert set(fit.contexts.values()) == {None}
    assert fit.advice == ""


def test_states_of_sequences_and_snapshots_are_needed() -> None:
    """Two sequences, of 8 pages with 65536 bytes each: their memory holds 12 states of 42400
    bytes, but 8 pages have 8 snapshots at most. A GPU has a slot beside."""
    need = CacheNeed(2048, max_batch=2)
    memories = [DeviceMemory("cpu", "", None), DeviceMemory("cuda:0", "", None)]
    cpu, gpu = fit_all(1000, HYBRID, need, memories)
    assert (cpu.state_bytes, gpu.state_bytes) == (10 * 42400, 11 * 42400)
    for fit in (cpu, gpu):
        cache = 8 * 2 * 64 * 2 * 2 * PAGE_SIZE
        assert fit.needed_bytes == 1000 + fit.memory.overhead_bytes + cache + fit.state_bytes


@pytest.mark.parametrize("shape", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
@pytest.mark.parametrize("max_batch", [1, 7])
@pytest.mark.parametrize("room", [0, 300_000, 700_001, 1_234_567, 10**7])
def test_longest_context_of_a_hybrid_fits_and_one_page_more_does_not(
    shape: Shape, max_batch: int, room: int
) -> None:
    memory = DeviceMemory("cuda:0", "", 1000 + GPU_OVERHEAD + room)
    fit = fit_all(1000, shape, CacheNeed(256, max_batch=max_batch), [memory])[0]
    for kind, most in fit.contexts.items():
        assert most is not None
        pages = pages_for(most)
        sizes = [
            CacheNeed(PAGE_SIZE * count, kind, max_batch).total_bytes(shape, has_spare=True)
            for count in (pages, pages + 1)
        ]
        assert pages == 0 or sizes[0] <= room
        assert most == shape.max_seq_len or sizes[1] > room


def test_the_cpu_is_always_listed() -> None:
    assert device_memory()[0].device == "cpu"
