"""Ranks of tensor parallelism as threads of one process, and passes that compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.model.context import Context
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.ops.open import get_table
from exl_core.parallel.model import RankTransformer
from exl_core.parallel.plan import Rank
from exl_core.session.load import LoadOptions, checkpoint_of, load_model, with_options
from exl_core.session.open import open_model
from exl_core.session.ranks import sharded
from exl_core.session.weights import Loading

T = TypeVar("T")
PROMPT, STEPS = 45, 6


class ThreadExchange:
    """Exchange between threads: sums in rank order, as between processes."""

    def __init__(self, rank: Rank, parts: list[Tensor | None], barrier: Barrier) -> None:
        self.rank = rank
        self._parts = parts
        self._barrier = barrier

    def sum(self, part: Tensor) -> Tensor:
        first, *others = self._all(part)
        total = first.clone()
        for other in others:
            total += other
        self._barrier.wait()  # nobody overwrites its part before all have read it
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        found = [one.clone() for one in self._all(part)]
        assert [one.shape[1] for one in found] == list(widths)
        self._barrier.wait()
        return found if self.rank.index == 0 else [part]

    def spread_(self, values: Tensor) -> Tensor:
        values.copy_(self._all(values.clone())[0])
        self._barrier.wait()
        return values

    def _all(self, part: Tensor) -> list[Tensor]:
        self._parts[self.rank.index] = part
        self._barrier.wait()
        found = [one for one in self._parts if one is not None]
        assert len({(one.shape, one.dtype) for one in found}) == 1 or found[0].dim() == 2
        return found


def on_ranks(count: int, work: Callable[[ThreadExchange], T]) -> list[T]:
    """Results of `work` by rank. Raises the error of a rank that fails."""
    parts: list[Tensor | None] = [None] * count
    barrier = Barrier(count, timeout=60)

    def run(index: int) -> T:
        try:
            return work(ThreadExchange(Rank(index, count), parts, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(run, index) for index in range(count)]
    return [job.result() for job in jobs]


def rank_model(path: Path, exchange: ThreadExchange, options: LoadOptions) -> RankTransformer:
    """One rank's part of a model."""
    files = open_model(path)
    config = with_options(files.config, options)
    checkpoint = checkpoint_of(files, config, options)
    ops = get_table(options.device, threads=1)
    tensors, own = sharded(checkpoint, config, exchange.rank)
    weights = Loading(own, tensors, path, 1, None).whole(ops, None)
    return RankTransformer(
        config, weights, ops, exchange, shares=tensors.shares, sample_ids=files.sample_ids
    )


def logits_of(model: Transformer, kv_format: KVFormat = KVFormat.FP16) -> tuple[Tensor, Tensor]:
    """Logits of a prompt of one sequence in two chunks, and of decode steps of two sequences."""
    has_states = bool(model.config.state_bytes)
    store = store_for(model, kv_format, 2, num_states=2 if has_states else 0)
    generator = torch.Generator().manual_seed(5)
    size = min(model.config.vocab_size, 259)
    ids = torch.randint(3, size, (2, PROMPT + STEPS), generator=generator).tolist()

    def run(*parts: tuple[int, int, int], rows: LogitRows) -> Tensor:
        segments = [
            Segment(
                *(tuple(ids[one][first:last]), first, (one,), rows),
                state_slot=one if has_states else None,
            )
            for one, first, last in parts
        ]
        return model.forward(make_batch(segments, PAGE_SIZE), store)

    prompt = [run((0, 0, 30), rows=LogitRows.ALL)]
    run((1, 0, PROMPT), rows=LogitRows.NONE)
    prompt.append(run((0, 30, PROMPT), rows=LogitRows.ALL))
    steps = [
        run((0, at, at + 1), (1, at, at + 1), rows=LogitRows.LAST)
        for at in range(PROMPT, PROMPT + STEPS)
    ]
    return torch.cat(prompt), torch.cat(steps)


def logits_on_ranks(
    path: Path, count: int, options: LoadOptions, kv_format: KVFormat = KVFormat.FP16
) -> tuple[Tensor, Tensor]:
    """The same logits from `count` ranks."""
    return on_ranks(
        count, lambda exchange: logits_of(rank_model(path, exchange, options), kv_format)
    )[0]


def logits_on_one(
    path: Path, options: LoadOptions, kv_format: KVFormat = KVFormat.FP16
) -> tuple[Tensor, Tensor]:
    """The same logits from one process without ranks."""
    return logits_of(load_model(path, replace(options, threads=1)).model, kv_format)


def mean_kl(expected: Tensor, found: Tensor) -> float:
    """Mean Kullback-Leibler divergence of the distributions of `found` from `expected`, nats."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_alike(
    model: Transformer, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> None:
    """Greedy replies with the same tokens up to the first difference, where both tokens are almost
    equally likely under the undivided model."""
    pairs = enumerate(zip(expected, found, strict=False))
    first = next((at for at, (one, other) in pairs if one != other), None)
    if first is None:
        assert len(expected) == len(found)
        return
    known = torch.tensor([[*prompt, *expected[:first]]])
    logits = Context(model, known.shape[1]).forward(known)[0][-1].cpu()
    assert logits[expected[first]] - logits[found[first]] < 0.02 * logits.std(), f"token {first}"


def assert_logits_of_one_process(path: Path, options: LoadOptions) -> None:
    """Two and three ranks have the logits of one process, in float32."""
    expected = logits_on_one(path, options)
    for count in (2, 3):
        found = logits_on_ranks(path, count, options)
        for one, other in zip(expected, found, strict=True):
            assert mean_kl(one, other) < 1e-7
            torch.testing.assert_close(other, one, atol=2e-3, rtol=1e-3)
