"""`--tensor-parallel auto`: the choice from sizes, free memory and access between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat, kv_bytes_per_token
from exl_core.cache.need import CacheNeed
from exl_core.cache.state import SPARE_SLOTS, default_snapshots
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.parallel.plan import Rank, parse_ranks, share_config
from exl_core.session import ranks
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_model
from exl_core.session.placement import CPU_OVERHEAD, GPU_OVERHEAD, DeviceMemory
from exl_core.session.ranks import (
    RankRoom,
    check_ranks,
    choose_ranks,
    device_of,
    rank_buffer_bytes,
    rank_cache_bytes,
    ranks_for,
)
from exl_core.session.reserve import Reserve
from exl_core.session.split import LayerSizes
from exl_kernels.cuda_exchange import MAX_PEERS, REDUCE_BLOCKS, STAGES
from support.tiny_hybrids import tiny_lfm2, tiny_qwen35
from support.tiny_models import save, tiny_llama

GB = 10**9
NEED = CacheNeed(256)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_model(save(tiny_llama(), tmp_path_factory.mktemp("tiny"))).config


def sizes(config: ModelConfig, weights_gb: float, cache_gb: float = 0.0) -> LayerSizes:
    count = config.num_layers
    each = (int(weights_gb * GB) // count,) * count
    return LayerSizes(each, (int(cache_gb * GB) // count,) * count, embedding=0, head=0)


def gpus(*gigabytes: float | None) -> list[DeviceMemory]:
    return [
        DeviceMemory(f"cuda:{i}", "", None if size is None else int(size * GB) + GPU_OVERHEAD)
        for i, size in enumerate(gigabytes)
    ]


def choice(config: ModelConfig, weights: float, free: Sequence[float | None]) -> tuple[int, str]:
    found = ranks_for(sizes(config, weights), config, NEED, gpus(*free), lambda *_: True)
    return found.count, found.reason


@pytest.mark.parametrize(
    ("weights", "free", "count", "reason"),
    [
        (10, [24], 1, "there is no second GPU"),
        (10, [24, 24], 1, "the model fits one GPU"),
        (10, [8, None], 1, "the model fits one GPU"),
        (40, [24, 24], 2, "2 GPUs hold the 40.00 GB of weights and cache"),
        (40, [24, 8, 24], 2, "2 GPUs hold the 40.00 GB of weights and cache"),
        (46, [24, 24], 1, "2 GPUs do not hold equal shares of 46.00 GB"),
        (40, [30, 16], 1, "2 GPUs do not hold equal shares of 40.00 GB"),
    ],
)
def test_the_fewest_gpus_with_room_for_a_share(
    config: ModelConfig, weights: float, free: list[float | None], count: int, reason: str
) -> None:
    assert choice(config, weights, free) == (count, reason)


def test_more_ranks_than_heads_or_than_the_model_has_are_not_chosen(config: ModelConfig) -> None:
    count, reason = choice(config, 400, [24] * 32)
    assert count == 1
    assert reason.startswith("the model has too few heads for so many ranks")


def test_recurrent_layers_are_divided_among_gpus(tmp_path: Path) -> None:
    model = save(tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32), tmp_path)
    assert choice(open_model(model).config, 40, [24, 24])[0] == 2


def test_copies_of_key_value_heads_count(config: ModelConfig) -> None:
    """With more ranks than key-value heads, a rank has the cache of a whole head."""
    shapes = [shape for shape in config.kv_shapes if shape is not None]
    heads = max(shape.num_kv_heads for shape in shapes)
    each = kv_bytes_per_token([shape._replace(num_kv_heads=1) for shape in shapes], KVFormat.FP16)
    need = CacheNeed(24 * GB // each)
    whole = sizes(config, 0.1, cache_gb=24.0 * heads)
    for free, count in ((24.0, 1), (24.2, heads)):
        found = ranks_for(whole, config, need, gpus(*[free] * (heads + 1)), lambda *_: True)
        assert found.count == count


def test_recurrent_states_of_a_rank_count(tmp_path: Path) -> None:
    """Its part of each state, in as many slots as the engine of rank 0 has."""
    config = open_model(save(tiny_qwen35(), tmp_path)).config
    need = CacheNeed(10**6, max_batch=40_000, has_drafts=True)
    part = share_config(config, Rank(0, 2))
    slots = 2 * 40_000 + default_snapshots(
        need.kv_bytes(part.kv_shapes), part.state_bytes, need.num_pages, 40_000
    )
    cache = need.kv_bytes(part.kv_shapes) + part.state_bytes * (slots + SPARE_SLOTS)
    assert [rank_cache_bytes(config, need, Rank(rank, 2)) for rank in (0, 1)] == [cache] * 2
    whole = sizes(config, 40)
    fits = 21 + (cache + rank_buffer_bytes(config, 2)) / GB
    assert need.kv_bytes(part.kv_shapes) < cache / 3, "states are most of it"
    for free, count in ((fits - 0.01, 1), (fits + 0.01, 2)):
        assert ranks_for(whole, config, need, gpus(free, free), lambda *_: True).count == count


def test_buffers_of_ranks_count(config: ModelConfig) -> None:
    """A model as wide as Llama 70B: a third slice of 96 MiB, and twice 64 MiB for large sums in the
    buffer that the ranks share."""
    wide = replace(config, hidden_size=8192, vocab_size=128256)
    rows = 2 * (STAGES + 1) + STAGES  # partial sums of both ranks, and whole sums
    small = 64 * (8192 * rows + 1 + 128256) * 4
    flags = 4 * REDUCE_BLOCKS * (MAX_PEERS + 1)
    assert rank_buffer_bytes(wide, 2) == (96 + 2 * 32 << 20) + small + flags
    for free, count in ((21.2, 1), (21.3, 2)):  # shares of 21 GB
        found = ranks_for(sizes(wide, 40), wide, NEED, gpus(free, free), lambda *_: True)
        assert found.count == count


def test_a_reserve_is_no_room_for_ranks(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "device_memory", lambda: [None, *gpus(24, 24)])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for reserve, count in (("2", 2), ("0,4", 1), ("4", 1)):
        options = LoadOptions(device="auto", reserve=reserve)
        found = choose_ranks(options, "cuda", lambda: sizes(config, 40), config, NEED)
        assert found.count == count


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_rank_that_leaves_no_reserve_is_refused(
    config: ModelConfig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a CPU has all ranks, and a GPU has one of them, with its buffers."""
    need, device = CacheNeed(10**6), torch.device(kind)
    parts = [rank_cache_bytes(config, need, Rank(rank, 2)) for rank in (0, 1)]
    other = CPU_OVERHEAD if kind == "cpu" else GPU_OVERHEAD + rank_buffer_bytes(config, 2)
    needed = 5 * GB + (sum(parts) if kind == "cpu" else parts[0]) + other
    room = RankRoom(need, Reserve((GB,), is_on_gpus=kind == "cuda"))
    monkeypatch.setattr(ranks, "free_memory_bytes", lambda _: needed + GB)
    room.check(config, 5 * GB, Rank(0, 2), device)
    monkeypatch.setattr(ranks, "free_memory_bytes", lambda _: needed + GB - 1)
    with pytest.raises(OutOfMemoryError, match=f"does not leave the reserve free on {kind}"):
        room.check(config, 5 * GB, Rank(0, 2), device)
    RankRoom(need, Reserve()).check(config, 5 * GB, Rank(0, 2), device)  # as ever


def test_every_pair_of_gpus_needs_access(config: ModelConfig) -> None:
    whole, four = sizes(config, 40), gpus(24, 24, 0, 0)
    found = ranks_for(whole, config, NEED, four, lambda one, other: (one, other) != (1, 0))
    assert str(found) == (
        "--tensor-parallel auto: 1 process, because cuda:1 has no access to the memory of cuda:0"
    )
    assert ranks_for(whole, config, NEED, four, lambda one, other: max(one, other) < 2).count == 2


@pytest.mark.parametrize(
    ("asked", "free", "reason"),
    [
        ("cuda:1", [24, 24], "--device cuda:1 is one GPU"),
        ("auto", [24], "there is no second GPU"),
        ("auto", [24, 8, 24], "the first 2 GPUs do not hold equal shares"),
    ],
)
def test_reasons_for_one_rank_on_gpus(
    config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    free: list[float],
    reason: str,
) -> None:
    monkeypatch.setattr(ranks, "device_memory", lambda: [None, *gpus(*free)])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    found = choose_ranks(LoadOptions(device=asked), "cuda", lambda: sizes(config, 40), config, NEED)
    assert found.count == 1
    assert found.reason.startswith(reason)


def test_two_gpus_are_two_ranks(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "device_memory", lambda: [None, *gpus(24, 24)])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    found = choose_ranks(
        LoadOptions(device="auto"), "cuda", lambda: sizes(config, 40), config, NEED
    )
    assert str(found) == (
        "--tensor-parallel auto: 2 processes, because 2 GPUs hold the 40.00 GB of weights and cache"
    )


@pytest.mark.parametrize(
    ("device", "count", "refusal"),
    [
        ("cuda", 2, None),
        ("cpu", 3, None),
        ("cuda", 3, "every rank needs a GPU of its own .expected at most 2 ranks"),
        (
            "cuda:1",
            2,
            "every rank has a GPU of its own, rank 0 the first one .*got --device cuda:1",
        ),
    ],
)
def test_every_rank_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, refusal: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = LoadOptions(device=device, tensor_parallel=count)
    if refusal is None:
        check_ranks(options, device)
        found = [device_of(device, Rank(index, count)) for index in range(count)]
        assert found == (["cuda:0", "cuda:1"] if device == "cuda" else ["cpu"] * count)
        return
    with pytest.raises(RequestError, match=refusal) as caught:
        check_ranks(options, device)
    assert "\n" not in str(caught.value)


def test_a_machine_without_gpus_has_one_rank(tmp_path: Path) -> None:
    path = save(tiny_llama(), tmp_path / "tiny")
    loaded = load_model(path, device="cpu", tensor_parallel="auto")
    assert str(loaded.ranks) == (
        "--tensor-parallel auto: 1 process, because on the CPU one process is faster than several"
    )


def test_numbers_of_ranks_are_read() -> None:
    assert [parse_ranks(text) for text in ("auto", "1", "64")] == ["auto", 1, 64]
    for text in ("", "0", "65", "-1", "two", "1.0", "\u0662"):
        with pytest.raises(RequestError, match="not a number of ranks"):
            parse_ranks(text)
