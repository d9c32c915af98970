"""The cache's memory: its size is known beforehand, and asked of the system before it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token, pages_for
from exl_core.cache.memory import available_memory_bytes
from exl_core.cache.store import KVStore
from exl_core.errors import OutOfMemoryError, RequestError


def resident_bytes() -> int:
    """Of this process alone; shared pages do not count."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * 4096


def test_sizes_follow_the_shape() -> None:
    assert kv_bytes_per_token(30, 3, 64, KVFormat.FP16) == 30 * 3 * 64 * 2 * 2
    assert kv_bytes_per_token(1, 1, 8, KVFormat.FP32) == 64
    assert [pages_for(n) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_tensors_have_the_promised_shape_and_size(kv_format: KVFormat) -> None:
    store = KVStore(kv_format, num_layers=2, num_kv_heads=3, head_dim=16, num_pages=4)
    tensors = [store.key(0), store.key(1), store.value(0), store.value(1)]
    for tensor in tensors:
        assert tensor.shape == (4, 3, PAGE_SIZE, 16)
        assert tensor.element_size() == kv_format.bytes_per_value
        assert tensor.is_contiguous()
    assert sum(t.nbytes for t in tensors) == store.size_bytes
    assert store.size_bytes == 4 * PAGE_SIZE * kv_bytes_per_token(2, 3, 16, kv_format)
    store.key(0)[1, 2, 3, 4] = 1.5
    assert float(store.key(0).sum()) == 1.5, "what was not written reads as zero"
    assert all(float(t.sum()) == 0 for t in tensors[1:])


def test_memory_is_taken_when_written() -> None:
    before = resident_bytes()
    store = KVStore(KVFormat.FP16, num_layers=4, num_kv_heads=8, head_dim=128, num_pages=64)
    assert store.size_bytes == 256 * 2**20
    assert resident_bytes() - before < 16 * 2**20
    store.key(2)[:8] = torch.ones((), dtype=torch.float16)
    assert 3 * 2**20 < resident_bytes() - before < 64 * 2**20


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        KVStore(KVFormat.FP16, 32, 8, 128, 512, available_bytes=2**30)
    message = str(caught.value)
    for number in ("131072 tokens", "16384 MiB", "131072 bytes a token", "1024 MiB", "8192 tokens"):
        assert number in message
    with pytest.raises(OutOfMemoryError, match="smaller model"):
        KVStore(KVFormat.FP16, 32, 8, 128, 1, available_bytes=1000)


def test_a_cache_without_pages_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one page"):
        KVStore(KVFormat.FP16, 1, 1, 1, 0)


def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory_bytes(meminfo, tmp_path / "none") is None
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n", encoding="ascii")
    assert available_memory_bytes(meminfo, tmp_path / "none") == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("900000\n", encoding="ascii")
    assert available_memory_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n", encoding="ascii")
    assert available_memory_bytes(meminfo, tmp_path) == 100000
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 50000\n", encoding="ascii")
    assert available_memory_bytes(meminfo, tmp_path) == 150000
