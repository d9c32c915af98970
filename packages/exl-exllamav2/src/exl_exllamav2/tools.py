"""Small helpers of old programs: a timer, progress bars, and lists of live tensors."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class Timer:
    """`with Timer() as t: ...`; then `t.interval` is the time in seconds."""

    start_time: float
    end_time: float
    interval: float

    def __enter__(self) -> Timer:
        self.start_time = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_time = time.perf_counter()
        self.interval = self.end_time - self.start_time


class BasicProgress:
    """A progress bar on stderr. Prints nothing if that is no terminal."""

    def __init__(self) -> None:
        self._tasks: list[tuple[str, float]] = []

    def __enter__(self) -> BasicProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def add_task(self, description: str, total: float = 100.0, **_: Any) -> int:
        self._tasks.append((description, total))
        return len(self._tasks) - 1

    def update(self, task: int, completed: float = 0.0, **_: Any) -> None:
        if sys.stderr.isatty():
            description, total = self._tasks[task]
            share = min(1.0, completed / total) if total else 1.0
            print(f"\r{description} {share:4.0%}", end="", file=sys.stderr, flush=True)


def get_basic_progress() -> BasicProgress:
    return BasicProgress()


def list_live_tensors() -> None:
    """Print shape, dtype and device of every tensor in this process."""
    for found in gc.get_objects():
        if isinstance(found, Tensor):
            print(found.dtype, tuple(found.shape), found.device)


def print_vram_usage() -> None:
    """Print the memory that torch holds on each GPU."""
    for i in range(torch.cuda.device_count()):
        held = torch.cuda.memory_allocated(i) / 2**20
        print(f"cuda:{i}: {held:.0f} MiB allocated")


def safe_move_tensor(tensors: Any, device: Any, non_blocking: bool = False) -> Any:
    """The tensor, or each tensor of a tuple, on `device`."""
    if isinstance(tensors, tuple | list):
        return tuple(safe_move_tensor(one, device, non_blocking) for one in tensors)
    return tensors.to(device, non_blocking=non_blocking)


def pairs(items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Neighbouring items."""
    return pairwise(items)


def get_tokens(num_rows: int, length: int, filename: str, tokenizer: Any) -> Tensor:
    """The first rows of a parquet file's text, int64 [num_rows, length].

    The columns are joined by blanks, the rows follow each other without a border.
    """
    from datasets import Dataset

    ids: list[int] = []
    for row in Dataset.from_parquet(filename):
        ids += tokenizer.encode(" ".join(str(v) for v in row.values())).view(-1).tolist()
        if len(ids) >= num_rows * length:
            break
    rows = min(num_rows, len(ids) // length)
    return torch.tensor(ids[: rows * length], dtype=torch.long).view(rows, length)
