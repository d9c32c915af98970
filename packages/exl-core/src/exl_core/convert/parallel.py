"""Worker threads of a conversion, with results that do not depend on the number of threads.

torch's own threads synchronize after every small step, and split sums by their number. Here each
piece of work runs on one thread, and results are combined in the order of the pieces. On a GPU the
pieces are larger and run one after the other. Workers check for a stop request between pieces and
within long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from exl_core.convert.events import ConversionStopped
from exl_core.settings import read_settings

Item = TypeVar("Item")
Result = TypeVar("Result")

GPU_ROWS = 8  # calibration rows in one piece of work on a GPU


class Workers:
    """Threads of a conversion, made by `worker_pool`. `rows_per_piece` is the number of calibration
    rows in one piece of work."""

    def __init__(self, pool: ThreadPoolExecutor | None, should_stop: Callable[[], bool]) -> None:
        self._pool = pool
        self._should_stop = should_stop
        self.rows_per_piece = GPU_ROWS if pool is None else 1

    def check(self) -> None:
        """Raises ConversionStopped if the conversion has been asked to stop."""
        if self._should_stop():
            raise ConversionStopped

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of `items`. Raises the first exception in this order."""
        has_grad = torch.is_grad_enabled()  # each thread has its own gradient mode

        def run(item: Item) -> Result:
            self.check()
            with torch.set_grad_enabled(has_grad):
                return work(item)

        if self._pool is None:
            return [run(item) for item in items]
        return list(self._pool.map(run, items))


@contextmanager
def worker_pool(device: torch.device, should_stop: Callable[[], bool]) -> Iterator[Workers]:
    """Workers for the block, in which torch uses one thread per call. At its end the old number
    of threads is restored. After an exception, running pieces are completed and pending ones are
    cancelled."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(read_settings().threads) if device.type == "cpu" else None
    try:
        yield Workers(pool, should_stop)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


@contextmanager
def allow_bfloat16_matmul() -> Iterator[None]:
    """Allows float32 products in the block to round factors to bfloat16; sums stay float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
