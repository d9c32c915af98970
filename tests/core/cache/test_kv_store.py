"""Memory of the cache: its size is known in advance and checked against the free memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.arch.layers import KVShape, StateShape
from exl_core.cache.format import (
    PAGE_SIZE,
    KVFormat,
    kv_bytes_per_token,
    pages_for,
    parse_cache_type,
)
from exl_core.cache.memory import available_memory_bytes
from exl_core.cache.page_pool import PageCopy
from exl_core.cache.state_store import StateStore
from exl_core.cache.store import KVStore
from exl_core.errors import OutOfMemoryError, RequestError
from support.profiles import examples


def resident_bytes() -> int:
    """Resident bytes of this process, shared pages excluded."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * 4096


def test_bytes_per_token_and_page_counts() -> None:
    assert kv_bytes_per_token([KVShape(3, 64)] * 30, KVFormat.FP16) == 30 * 3 * 64 * 2 * 2
    assert kv_bytes_per_token([KVShape(1, 8)], KVFormat.FP32) == 64
    assert [pages_for(n) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]


# Bits per element of key and value, including 1/32 of a 16-bit scale.
BITS = {
    KVFormat.FP32: (32, 32),
    KVFormat.FP16: (16, 16),
    KVFormat.FP8: (8, 8),
    KVFormat.Q8: (8.5, 8.5),
    KVFormat.Q6: (8.5, 4.5),
    KVFormat.Q4: (4.5, 4.5),
}


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_row_bytes_follow_the_bits_per_element(kv_format: KVFormat, head_dim: int) -> None:
    key, value = (bits * head_dim / 8 for bits in BITS[kv_format])
    assert kv_format.key_rows.row_bytes(head_dim) == key
    assert kv_format.value_rows.row_bytes(head_dim) == value
    assert kv_bytes_per_token([KVShape(3, head_dim)] * 7, kv_format) == 7 * 3 * (key + value)


@pytest.mark.parametrize("kv_format", [KVFormat.Q8, KVFormat.Q6, KVFormat.Q4])
@pytest.mark.parametrize("head_dim", [16, 40, 80])
def test_codes_need_heads_that_are_multiples_of_the_scale_group(
    kv_format: KVFormat, head_dim: int
) -> None:
    with pytest.raises(RequestError, match=rf"multiple of 32, got {head_dim}.*fp16 or fp8"):
        kv_bytes_per_token([KVShape(1, head_dim)], kv_format)
    with pytest.raises(RequestError, match="multiple of 32"):
        KVStore(kv_format, [KVShape(1, head_dim)], 1)
    assert KVStore(KVFormat.FP8, [KVShape(1, head_dim)], 1).bytes_per_token == 2 * head_dim


def test_cache_types_are_parsed_by_name() -> None:
    names = ("fp16", "fp8", "q8", "q6", "q4")
    assert [parse_cache_type(name).value for name in names] == list(names)
    for name in ("fp32", "Q8", "q5", ""):
        with pytest.raises(RequestError, match="fp16 or fp8 or q8 or q6 or q4"):
            parse_cache_type(name)


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_tensors_have_the_documented_shape_and_size(kv_format: KVFormat) -> None:
    store = KVStore(kv_format, [KVShape(3, 64)] * 2, num_pages=4)
    tensors = [x for i in (0, 1) for x in (store.layer(i).keys, store.layer(i).values)]
    sizes = {torch.int8: 68, torch.uint8: 36}
    for tensor in tensors:
        assert tensor.shape == (4, 3, PAGE_SIZE, sizes.get(tensor.dtype, 64))
        assert tensor.is_contiguous()
    assert sum(t.nbytes for t in tensors) == store.size_bytes
    assert store.size_bytes == 4 * PAGE_SIZE * kv_bytes_per_token(store.kv_shapes, kv_format)
    as_bytes = [tensor.view(torch.uint8) for tensor in tensors]
    as_bytes[0][1, 2, 3, 4] = 7
    assert int(as_bytes[0].sum()) == 7, "unwritten memory reads as zero"
    assert not any(t.any() for t in as_bytes[1:])


def test_layers_that_cache_nothing_take_no_memory() -> None:
    shape = KVShape(2, 32)
    store = KVStore(KVFormat.FP16, [None, shape, None], num_pages=3)
    assert store.cached_layers == (1,)
    assert store.layer(1).keys.shape == (3, 2, PAGE_SIZE, 32)
    assert store.size_bytes == KVStore(KVFormat.FP16, [shape], num_pages=3).size_bytes
    store.copy_pages([PageCopy(0, 2, 5)])
    store.move_pages([(0, 1)])
    with pytest.raises(RequestError, match="layer"):
        KVStore(KVFormat.FP16, [None], num_pages=3)


def test_a_store_of_inference_mode_is_used_outside_of_it() -> None:
    """A program may load its model and make its cache in torch.inference_mode."""
    with torch.inference_mode():
        store = KVStore(KVFormat.FP16, [KVShape(2, 32)], num_pages=3)
        tensors_of(store)[0][0] = 1
    store.copy_pages([PageCopy(0, 1, 256)])
    store.move_pages([(1, 2)])
    assert bool((tensors_of(store)[0][2] == 1).all())


def numbered_store(kv_format: KVFormat, num_pages: int) -> tuple[KVStore, dict[int, int]]:
    """A store whose page i has all bytes i + 1 in all layers, and a dict with the same values."""
    store = KVStore(kv_format, [KVShape(2, 32)] * 2, num_pages)
    for tensor in tensors_of(store):
        tensor.copy_(torch.arange(1, num_pages + 1).view(-1, 1, 1, 1).expand(tensor.shape))
    return store, {page: page + 1 for page in range(num_pages)}


def tensors_of(store: KVStore) -> list[torch.Tensor]:
    layers = store.cached_layers
    held = [store.layer(i) for i in layers]
    return [part.view(torch.uint8) for one in held for part in (one.keys, one.values)]


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_copies_of_page_starts_apply_to_every_layer_in_order(kv_format: KVFormat) -> None:
    store, _ = numbered_store(kv_format, 4)
    # Copies run in order: page 3 receives page 0's contents after the first copy.
    store.copy_pages([PageCopy(1, 0, 5), PageCopy(0, 3, 8), PageCopy(2, 2, 9), PageCopy(1, 2, 0)])
    for tensor in tensors_of(store):
        runs = [page.flatten(2)[0, :, 0].tolist() for page in tensor]
        assert runs == [
            [2] * 5 + [1] * (PAGE_SIZE - 5),
            [2] * PAGE_SIZE,
            [3] * PAGE_SIZE,
            [2] * 5 + [1] * 3 + [4] * (PAGE_SIZE - 8),
        ]
        assert all((page == page[:1, :, :1]).all() for page in tensor)


@given(st.data())
@settings(max_examples=examples(60))
def test_moves_are_simultaneous(data: st.DataObject) -> None:
    """Cycles, chains and plain copies, compared with a dictionary."""
    store, model = numbered_store(data.draw(st.sampled_from([KVFormat.FP8, KVFormat.Q6])), 8)
    pages = st.integers(0, 7)
    for _ in range(3):
        targets = data.draw(st.lists(pages, unique=True))
        sources = data.draw(st.lists(pages, min_size=len(targets), max_size=len(targets)))
        moves = list(zip(sources, targets, strict=True))
        store.move_pages(moves)
        model |= {target: model[source] for source, target in moves}
    for tensor in tensors_of(store):
        assert tensor[:, 0, 0, 0].tolist() == list(model.values())
        assert (tensor == tensor[:, :1, :1, :1]).all()


def test_page_ids_out_of_range_raise_value_error() -> None:
    store, _ = numbered_store(KVFormat.FP16, 2)
    for copy in (PageCopy(2, 0, 1), PageCopy(0, -1, 1), PageCopy(0, 1, 257), PageCopy(0, 1, -1)):
        with pytest.raises(ValueError, match=r"copy_pages|no such page"):
            store.copy_pages([copy])
    for moves in ([(0, 2)], [(-1, 0)], [(0, 1), (1, 1)]):
        with pytest.raises(ValueError, match=r"two moves|no such page"):
            store.move_pages(moves)


def test_memory_becomes_resident_when_written() -> None:
    before = resident_bytes()
    store = KVStore(KVFormat.FP16, [KVShape(8, 128)] * 4, num_pages=64)
    assert store.size_bytes == 256 * 2**20
    assert resident_bytes() - before < 16 * 2**20
    store.layer(2).keys[:8] = torch.ones((), dtype=torch.float16)
    assert 3 * 2**20 < resident_bytes() - before < 64 * 2**20


def test_a_cache_too_large_for_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        KVStore(KVFormat.FP16, [KVShape(8, 128)] * 32, 512, available_bytes=2**30)
    message = str(caught.value)
    for number in ("131072 tokens", "16384 MiB", "131072 bytes a token", "1024 MiB", "8192 tokens"):
        assert number in message
    with pytest.raises(OutOfMemoryError, match="smaller model"):
        KVStore(KVFormat.FP16, [KVShape(8, 128)] * 32, 1, available_bytes=1000)


def test_a_cache_leaves_memory_for_the_states_of_a_hybrid() -> None:
    """Both become resident when they are written, so neither is missing from the free memory."""
    pages = 4 * 256 * 2 * 2 * 64 * 2  # 4 pages of keys and values, 2 heads of 64, fp16
    states = StateStore([StateShape((3, 64), None), None], 8, [torch.device("cpu")] * 2)
    shapes = [None, KVShape(2, 64)]
    KVStore(KVFormat.FP16, shapes, 4, available_bytes=pages)
    both = pages + states.size_bytes
    KVStore(KVFormat.FP16, shapes, 4, available_bytes=both, states=states)
    with pytest.raises(OutOfMemoryError, match="A cache of 768 tokens would fit"):
        KVStore(KVFormat.FP16, shapes, 4, available_bytes=both - 1, states=states)


def test_a_cache_without_pages_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one page"):
        KVStore(KVFormat.FP16, [KVShape(1, 1)], 0)


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
