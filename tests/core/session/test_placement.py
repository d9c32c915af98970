"""Which devices a model fits on: every expected number is computed by hand."""

from __future__ import annotations

from typing import NamedTuple

from exl_core.arch.layers import KVShape
from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.session.placement import GPU_OVERHEAD, DeviceMemory, Fit, device_memory, fit_all


class Shape(NamedTuple):
    kv_shapes: tuple[KVShape, ...] = (KVShape(2, 64),) * 4
    max_seq_len: int = 4096


FP16_PAGE = 4 * 2 * 64 * 2 * 2 * PAGE_SIZE  # layers, heads, d, key and value, bytes


def fit_on_gpu(free: int | None, ctx: int = 1024) -> Fit:
    return fit_all(1000, Shape(), ctx, [DeviceMemory("cuda:0", "a GPU", free)])[0]


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


def test_the_cpu_is_always_listed() -> None:
    assert device_memory()[0].device == "cpu"
