"""Precisions of the key-value cache, and the bytes that they take.

Sizes only: `store.py` has the tensors, `page_pool.py` the bookkeeping of pages. This module does
not import torch, so that a model's description can state the cache's cost before anything is
loaded.

Codes of 8 and 4 bits are rounded in units of 64 elements. Each unit is rotated (Hadamard transform)
so that no element is an outlier, and each 32 elements have a float16 scale. Units do not cross
heads. If a head is not a multiple of 64, its last 32 elements are a unit of their own (two
interleaved transforms of 16 points, with factor 1/16 in place of 1/32). A head that is not a
multiple of 32 cannot be cached as codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from exl_core.arch.layers import KVShape
from exl_core.errors import RequestError

PAGE_SIZE = 256
"""Positions per page: large enough for short page tables, small enough for prefix sharing."""

SCALE_GROUP = 32
"""Elements of a head that share a scale in caches of codes."""


class RowFormat(Enum):
    """Storage of one head's key or value at one position. The enum's value is the number of bits
    per element, negative for codes."""

    FP32 = 32
    FP16 = 16
    FP8 = 8
    CODES8 = -8
    CODES4 = -4

    @property
    def has_scales(self) -> bool:
        return self.value < 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one row, scales included."""
        if not self.has_scales:
            return head_dim * self.value // 8
        if head_dim % SCALE_GROUP != 0:
            raise RequestError(
                "a cache of codes cannot hold heads of this size",
                expected=f"a head_dim that is a multiple of {SCALE_GROUP}",
                got=head_dim,
                next_step="Take --cache-type fp16 or fp8.",
            )
        return head_dim * -self.value // 8 + head_dim // SCALE_GROUP * 2


class KVFormat(Enum):
    """Precision of a cache. The values are the names of `--cache-type`, except fp32.

    FP8 is E4M3, rounded to nearest and saturated at 448. Q6 has 8-bit keys and 4-bit values.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    FP8 = "fp8"
    Q8 = "q8"
    Q6 = "q6"
    Q4 = "q4"

    @property
    def key_rows(self) -> RowFormat:
        return _ROWS[self][0]

    @property
    def value_rows(self) -> RowFormat:
        return _ROWS[self][1]

    def bytes_per_head(self, head_dim: int, *, is_shared: bool = False) -> int:
        """Bytes of one head's key and value at one position. If `is_shared`, they are one row,
        stored like a key."""
        key = self.key_rows.row_bytes(head_dim)
        return key if is_shared else key + self.value_rows.row_bytes(head_dim)


_ROWS = {
    KVFormat.FP32: (RowFormat.FP32, RowFormat.FP32),
    KVFormat.FP16: (RowFormat.FP16, RowFormat.FP16),
    KVFormat.FP8: (RowFormat.FP8, RowFormat.FP8),
    KVFormat.Q8: (RowFormat.CODES8, RowFormat.CODES8),
    KVFormat.Q6: (RowFormat.CODES8, RowFormat.CODES4),
    KVFormat.Q4: (RowFormat.CODES4, RowFormat.CODES4),
}

CACHE_TYPES = tuple(kind.value for kind in KVFormat if kind is not KVFormat.FP32)
"""Values of `--cache-type`."""


def parse_cache_type(name: str) -> KVFormat:
    """The format called `name`. Raises RequestError, with all names, if there is none."""
    if name not in CACHE_TYPES:
        raise RequestError(
            "no such cache type", expected=" or ".join(CACHE_TYPES), got=name or "nothing"
        )
    return KVFormat(name)


def kv_bytes_per_token(kv_shapes: Iterable[KVShape | None], kv_format: KVFormat) -> int:
    """Bytes of all layers' keys and values at one position. None: a layer without any."""
    cached = (shape for shape in kv_shapes if shape is not None)
    return sum(
        one.num_kv_heads * kv_format.bytes_per_head(one.head_dim, is_shared=one.is_shared)
        for one in cached
    )


def final_itemsize(kv_format: KVFormat) -> int:
    """Bytes of a value of the states after the final norm that a cache keeps for a layer for
    multi-token prediction: float32 beside a cache in float32, otherwise bfloat16."""
    return 4 if kv_format is KVFormat.FP32 else 2


def pages_for(num_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // page_size)
