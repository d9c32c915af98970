"""Independent pieces of work on all cores, with results that do not depend on how many there are.

torch's own threads wait for each other after every small step, and split sums by their number. Here
each piece has one thread, and what pieces give is put together in their order. On a GPU the pieces
are larger and run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from exl_core.settings import read_settings

Item = TypeVar("Item")
Result = TypeVar("Result")


GPU_ROWS = 8


class Workers:
    """Threads of one stage; see `workers`. `rows_at_once`: of calibration rows, how many make one
    piece of work."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool
        self.rows_at_once = GPU_ROWS if pool is None else 1

    def each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results in the order of `items`; the first exception of any is raised."""
        if self._pool is None:
            return [work(item) for item in items]
        has_grad = torch.is_grad_enabled()  # threads have a mode of their own

        def run(item: Item) -> Result:
            with torch.set_grad_enabled(has_grad):
                return work(item)

        return list(self._pool.map(run, items))


@contextmanager
def workers(device: torch.device) -> Iterator[Workers]:
    """Within it torch has one thread for each call; what it had before comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if device.type == "cpu":
            with ThreadPoolExecutor(read_settings().threads) as pool:
                yield Workers(pool)
        else:
            yield Workers(None)
    finally:
        torch.set_num_threads(before)


@contextmanager
def coarse_products() -> Iterator[None]:
    """Within it float32 products may round their factors to bfloat16; sums stay float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
