"""`--tensor-parallel auto`: the choice from sizes, free memory and access between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from exl_core.arch.spec import ModelConfig
from exl_core.errors import RequestError
from exl_core.parallel.plan import Rank, parse_ranks
from exl_core.session import ranks
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_model
from exl_core.session.placement import GPU_OVERHEAD, DeviceMemory
from exl_core.session.ranks import check_ranks, choose_ranks, device_of, ranks_for
from exl_core.session.split import LayerSizes
from support.tiny_hybrids import tiny_lfm2
from support.tiny_models import save, tiny_llama

GB = 10**9


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
    found = ranks_for(sizes(config, weights), config, gpus(*free), lambda *_: True)
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
    heads = max(shape.num_kv_heads for shape in config.kv_shapes if shape is not None)
    whole = sizes(config, 0.1, cache_gb=24.0 * heads)
    found = ranks_for(whole, config, gpus(*[23.9] * (heads + 1)), lambda *_: True)
    assert found.count == 1
    found = ranks_for(whole, config, gpus(*[24.2] * (heads + 1)), lambda *_: True)
    assert found.count == heads


def test_every_pair_of_gpus_needs_access(config: ModelConfig) -> None:
    whole, four = sizes(config, 40), gpus(24, 24, 0, 0)
    found = ranks_for(whole, config, four, lambda one, other: (one, other) != (1, 0))
    assert str(found) == (
        "--tensor-parallel auto: 1 process, because cuda:1 has no access to the memory of cuda:0"
    )
    assert ranks_for(whole, config, four, lambda one, other: max(one, other) < 2).count == 2


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
    found = choose_ranks(LoadOptions(device=asked), "cuda", lambda: sizes(config, 40), config)
    assert found.count == 1
    assert found.reason.startswith(reason)


def test_two_gpus_are_two_ranks(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "device_memory", lambda: [None, *gpus(24, 24)])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    found = choose_ranks(LoadOptions(device="auto"), "cuda", lambda: sizes(config, 40), config)
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
