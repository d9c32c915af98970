"""Models divided among hosts, with the test's process as rank 0: logits, and passes as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.open import get_table
from exl_core.parallel.peers import PeerExchange
from exl_core.parallel.plan import Grid
from exl_core.session.hosts import load_part
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_model
from support.host_models import logits_of_passes, on_hosts
from support.thread_ranks import ThreadExchange, logits_of, logits_on_one, mean_kl, on_ranks
from support.thread_sums import NoMemory, ThreadSums, act_like_a_gpu
from support.tiny_hybrids import tiny_qwen35
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

EXACT: dict[str, Any] = {"device": "cpu", "threads": 1, "exact": True}


@pytest.mark.parametrize(
    ("make", "grid", "kv_format"),
    [
        (tiny_llama, (2, 1), KVFormat.FP16),
        (tiny_llama, (2, 2), KVFormat.FP16),
        (lambda: tiny_qwen35(head_dim=32), (4, 1), KVFormat.Q4),
    ],
    ids=["llama-2x1", "llama-2x2", "qwen3.5-4x1-q4"],
)
def test_the_logits_of_one_process(
    make: Callable[[], Any], grid: tuple[int, int], kv_format: KVFormat, tmp_path: Path
) -> None:
    """Hosts without keys take part in the pass that measures the smoothing of 4-bit keys."""
    path = save(make(), tmp_path / "model")
    expected = logits_of_passes(load_model(path, **EXACT).model, kv_format)
    with on_hosts(path, *grid, **EXACT) as divided:
        assert mean_kl(expected, logits_of_passes(divided.model, kv_format)) < 1e-7


def test_a_pass_that_rank_0_replays(tmp_path: Path) -> None:
    """Rank 0 runs its layers between the transfers, as a graph does. The other host has no graph
    and computes the same pass without one."""
    path = save(tiny_llama(), tmp_path / "model")
    ids = tuple(torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(1)).tolist())
    segments = [
        [Segment(ids[:30], 0, (0,), LogitRows.NONE)],
        [
            Segment(ids[30:36], 30, (0,), LogitRows.LAST),
            Segment(ids[:5], 0, (1,), LogitRows.ALL),
        ],
        [Segment(ids[36:37], 36, (0,), LogitRows.LAST)],
    ]
    whole = load_model(path, **EXACT).model
    with on_hosts(path, 2, 1, **EXACT) as divided:
        model = divided.model
        assert not model.has_head
        stores = [store_for(one, KVFormat.FP16, 2) for one in (whole, model)]
        for parts in segments:
            batch = make_batch(parts)
            expected = whole.forward(batch, stores[0])
            with torch.inference_mode(), model.replaying(stores[1], parts) as received:
                assert received is None
                states = model.run_stage(0, batch, stores[1])
                assert states.shape == (len(batch.token_ids), model.config.hidden_size)
                found = model.replayed(states, parts)
            torch.testing.assert_close(found, expected)


class QueueHops:
    """Transfers between hosts that are threads, to the rank of the same place."""

    def __init__(self, grid: Grid, rank: int, queues: Sequence[Queue[Tensor]]) -> None:
        self.is_leader = rank == 0
        self.is_first = grid.host_of(rank) == 0
        self.is_last = grid.host_of(rank) == grid.hosts - 1
        self._sends_logits = self.is_last and grid.rank_in_host(rank).index == 0
        self._own, self._first = queues[rank], queues[0]
        self._next = None if self.is_last else queues[rank + grid.local]

    def receive(self, rows: int, width: int, _: torch.device) -> Tensor:
        found = self._own.get(timeout=60)
        assert found.shape == (rows, width)
        return found

    def pass_on(self, x: Tensor) -> None:
        assert self._next is not None
        self._next.put(x.clone())

    def return_logits(self, logits: Tensor) -> None:
        if self._sends_logits and len(logits):
            self._first.put(logits.clone())

    def returned_logits(self, rows: int, width: int, device: torch.device) -> Tensor:
        if not self.is_leader or not rows:
            return torch.empty(rows, width if self.is_leader else 0)
        return self.receive(rows, width, device)


class SynchronizedSums(ThreadSums):
    """Sums that check that each pass begins with an exchange that synchronizes the ranks."""

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.is_synchronized = False

    def embed(self, part: Tensor, is_own: Tensor) -> Tensor:
        self.is_synchronized = True
        return super().embed(part, is_own)

    def send(self, part: Tensor) -> None:
        assert self.is_synchronized
        super().send(part)


def test_ranks_of_each_host_share_memory(tmp_path: Path) -> None:
    path, options, grid = save(tiny_llama(), tmp_path / "model"), LoadOptions(**EXACT), Grid(2, 2)
    files, queues = open_model(path), [Queue[Tensor]() for _ in range(grid.count)]

    def run(host: int, exchange: ThreadExchange) -> tuple[Tensor, Tensor]:
        number = host * grid.local + exchange.rank.index
        ops = get_table("cpu", threads=1)
        layers = grid.layers(files.config, number)
        part = load_part(files, options, exchange.rank, ops, layers=layers)
        hops: Any = QueueHops(grid, number, queues)
        sums: Any = SynchronizedSums(exchange, files.config.hidden_size)
        sums.ops = act_like_a_gpu(ops)
        memory: Any = NoMemory()
        return logits_of(part.model(PeerExchange(exchange, sums, memory), (), hops))

    with ThreadPoolExecutor(grid.hosts) as pool:
        first, _ = pool.map(lambda host: on_ranks(2, partial(run, host)), range(grid.hosts))
    for one, other in zip(logits_on_one(path, options), first[0], strict=True):
        assert mean_kl(one, other) < 1e-7
