"""The cache's memory: one key and one value tensor per layer, cut into pages.

Knows shapes and precision, neither sequences nor which page holds what (`page_pool.py`). The memory
reads as zero and takes up room only once it is written: a cache for a long context costs what is
used of it. Asking for more than the machine has is an error before anything is taken.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token
from exl_core.cache.memory import available_memory_bytes
from exl_core.errors import OutOfMemoryError, RequestError

_DTYPES = {KVFormat.FP32: torch.float32, KVFormat.FP16: torch.float16}
_MIB = 1024 * 1024


class KVStore:
    """Keys and values of `num_pages` pages in every layer."""

    def __init__(
        self,
        kv_format: KVFormat,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        *,
        available_bytes: int | None = None,
    ) -> None:
        """`available_bytes`: memory that may be taken; by default the system is asked."""
        if min(num_layers, num_kv_heads, head_dim, num_pages) < 1:
            raise RequestError(
                "a cache needs at least one page, layer, head and dimension",
                got=f"{num_pages} pages, {num_layers} layers, {num_kv_heads} heads of {head_dim}",
            )
        self.kv_format = kv_format
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.bytes_per_token = kv_bytes_per_token(num_layers, num_kv_heads, head_dim, kv_format)
        self.size_bytes = self.bytes_per_token * num_pages * PAGE_SIZE
        _check_fits(self, available_bytes)
        shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
        dtype = _DTYPES[kv_format]
        self._keys = tuple(_zeros_when_touched(shape, dtype) for _ in range(num_layers))
        self._values = tuple(_zeros_when_touched(shape, dtype) for _ in range(num_layers))

    def key(self, layer: int) -> Tensor:
        return self._keys[layer]  # [num_pages, num_kv_heads, page_size, head_dim]

    def value(self, layer: int) -> Tensor:
        return self._values[layer]  # [num_pages, num_kv_heads, page_size, head_dim]


def _check_fits(store: KVStore, available_bytes: int | None) -> None:
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available is None or store.size_bytes <= available:
        return
    tokens = store.num_pages * PAGE_SIZE
    affordable = available // store.bytes_per_token // PAGE_SIZE * PAGE_SIZE
    raise OutOfMemoryError(
        f"a {store.kv_format.value} cache of {tokens} tokens takes "
        f"{store.size_bytes / _MIB:.0f} MiB ({store.bytes_per_token} bytes a token)",
        where="cache",
        expected=f"at most {available / _MIB:.0f} MiB, which is what is free",
        next_step=f"A cache of {affordable} tokens would fit."
        if affordable
        else "Free some memory, or take a smaller model.",
    )


def _zeros_when_touched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that are not resident until written; `torch.zeros` would write them all at once.

    `torch.empty` is lazy too, but may hand out what an earlier tensor left: NaN times a weight of
    zero is NaN, so an attention that masks by multiplying would be wrong now and then.
    """
    count = 1
    for size in shape:
        count *= size
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
