"""Independent pieces of work on all cores, with results that do not depend on how many there are.

torch's own threads wait for each other after every small step, and split sums by their number. Here
each piece has one thread, and what pieces give is put together in their order. On a GPU the pieces
are larger and run one after the other. Between pieces, and within long ones, it is asked whether to
stop.
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


GPU_ROWS = 8


class Workers:
    """Threads of a conversion; see `workers`. `rows_at_once`: of calibration rows, how many make
    one piece of work."""

    def __init__(self, pool: ThreadPoolExecutor | None, should_stop: Callable[[], bool]) -> None:
        self._pool = pool
        self._should_stop = should_stop
        self.rows_per_piece = GPU_ROWS if pool is None else 1

    def check(self) -> None:
        """Raises ConversionStopped where the conversion has been asked to stop."""
        if self._should_stop():
            raise ConversionStopped

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of `items`; the first exception of any is raised."""
        has_grad = torch.is_grad_enabled()  # threads have a mode of their own

        def run(item: Item) -> Result:
            self.check()
            with torch.set_grad_enabled(has_grad):
                return work(item)

        if self._pool is None:
            return [run(item) for item in items]
        return list(self._pool.map(run, items))


@contextmanager
def worker_pool(device: torch.device, should_stop: Callable[[], bool]) -> Iterator[Workers]:
    """Within it torch has one thread for each call; what it had before comes back. An exception
    waits for pieces that run, and drops the others."""
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
    """Within it float32 products may round their factors to bfloat16; sums stay float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
