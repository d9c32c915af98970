"""Replies of models divided among processes: the text of one process, for codecs, recurrent layers
and long contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.model.context import Context
from exl_core.session.load import LoadedModel, load_model
from support import tiny_hybrids as hybrids
from support.driving import GREEDY, run_all, submit
from support.quantized_models import METHODS, quantized_llama
from support.rank_failures import nothing_left
from support.rank_processes import loaded_ranks, replies
from support.thread_ranks import logits_of, mean_kl
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nothing_left(monkeypatch, tmp_path):
        yield


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_of_quantized_weights(method: str, tmp_path: Path) -> None:
    path = quantized_llama(method, tmp_path / "model")
    whole = load_model(path, device="cpu", threads=2)
    expected, text = logits_of(whole.model)[1], replies(whole, 32)
    for count in (2, 3):
        with loaded_ranks(path, count) as divided:
            assert replies(divided, 32) == text
            assert mean_kl(expected, logits_of(divided.model)[1]) <= 1e-5


def prompt(seed: int, length: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randint(3, 258) for _ in range(length))


def fed(loaded: LoadedModel, ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits after a prompt in chunks of these lengths, and of steps after it."""
    context, first = Context(loaded.model, len(ids) + 8, kv_format=KVFormat.FP32), 0
    for length in chunks:
        found = [context.feed([list(ids[first : first + length])])[0][-1]]
        first += length
    assert first == len(ids)
    found += [context.feed([[one]])[0][-1] for one in (7, 40, 9, 200)]
    return torch.stack(found)


def ends_of(engine: Engine, *requests: Request) -> list[FinishEvent]:
    for request in requests:
        submit(engine, request)
    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    return sorted(ends, key=lambda end: end.request_id)


def engine_of(loaded: LoadedModel, **more: Any) -> Engine:
    options = EngineOptions(**{"max_batch": 4, "kv_format": KVFormat.FP32, **more})
    return Engine(loaded.model, loaded.tokenizer, options)


def preempted(loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Replies to four prompts for which the cache has too few pages."""
    engine = engine_of(loaded, cache_tokens=1280, prefill_chunk=100)
    requests = [
        Request(prompt(30 + i, 250), max_tokens=30, sampler=GREEDY, request_id=str(i))
        for i in range(4)
    ]
    ends = ends_of(engine, *requests)
    assert engine.scheduler.num_requeued > 0
    return [end.token_ids for end in ends]


def rewound(loaded: LoadedModel, banned: str, **more: Any) -> tuple[int, ...]:
    """A reply that goes back to before a string that it may not contain."""
    engine = engine_of(loaded, **more)
    request = Request(prompt(50, 270), max_tokens=20, sampler=GREEDY, banned_strings=(banned,))
    (end,) = ends_of(engine, request)
    assert banned not in end.text
    return end.token_ids


@pytest.mark.parametrize(
    "make",
    [hybrids.tiny_qwen35, hybrids.tiny_granite_hybrid, hybrids.tiny_lfm2],
    ids=["delta-net", "mamba-2", "short-conv"],
)
def test_recurrent_states_of_ranks(make: Callable[[], Any], tmp_path: Path) -> None:
    """Chunks of a prompt, a rewind to a snapshot or to the start, and preemption."""
    path, ids = save(make(), tmp_path / "model"), prompt(1, 300)
    whole = load_model(path, device="cpu", exact=True, threads=2)
    plain = Request(prompt(50, 270), max_tokens=20, sampler=GREEDY)
    banned = ends_of(engine_of(whole), plain)[0].text[4:7]
    with loaded_ranks(path, exact=True) as divided:
        expected = fed(whole, ids, [300])
        for chunks in ([300], [1, 64, 7, 128, 100], [256, 44]):
            found = fed(divided, ids, chunks)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        replied = rewound(whole, banned)
        assert rewound(divided, banned) == replied
        assert rewound(divided, banned, snapshots=0, prefill_chunk=64) == replied
        assert preempted(divided) == preempted(whole)


def test_a_long_context(tmp_path: Path) -> None:
    """32,000 tokens in 16 passes."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_llama(**sizes, **heads, max_position_embeddings=33_000)
    path, ids = save(model, tmp_path / "model"), prompt(9, 32_000)

    def reply(loaded: LoadedModel) -> tuple[int, ...]:
        options = EngineOptions(cache_tokens=32_512, max_batch=1, prefill_chunk=2000)
        engine = Engine(loaded.model, loaded.tokenizer, options)
        request = Request(ids, max_tokens=16, sampler=GREEDY, stop_ids=frozenset())
        return ends_of(engine, request)[0].token_ids

    with loaded_ranks(path) as divided:
        found = reply(divided)
    assert len(found) == 16
    assert found == reply(load_model(path, device="cpu", threads=2))
