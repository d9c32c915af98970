"""How precisely keys and values are cached, and how many bytes that takes.

Sizes only: the tensors are `store.py`, the bookkeeping of pages is `page_pool.py`. No torch here:
a description of a model says what its cache will cost before anything is loaded.

Codes of 8 and 4 bits are rounded in units of 64 elements, each rotated so that no element stands
out, with a float16 scale for every 32. Units stay inside a head; where a head is no multiple of 64,
its last 32 elements are a unit of their own (two interleaved transforms of 16 points, and 1/16 in
place of 1/32). A head that is no multiple of 32 cannot be cached so.
"""

from __future__ import annotations

from enum import Enum

from exl_core.errors import RequestError

PAGE_SIZE = 256
"""Positions per page: large enough that a page table is short, small enough to share prefixes."""

SCALE_GROUP = 32
"""Elements of a head that share a scale, where codes are cached."""


class RowFormat(Enum):
    """Storage of one head's key or value at one position; the value is the bits of an element."""

    FP32 = 32
    FP16 = 16
    FP8 = 8
    CODES8 = -8
    CODES4 = -4

    @property
    def has_scales(self) -> bool:
        return self.value < 0

    def row_bytes(self, head_dim: int) -> int:
        """Of one row, its scales included."""
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
    """Precision of a cache; the names are those of `--cache-type`, but for fp32.

    FP8 is E4M3, the nearest value, at most 448; Q6 has keys of 8 bits and values of 4.
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

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of one head's key and value at one position."""
        return self.key_rows.row_bytes(head_dim) + self.value_rows.row_bytes(head_dim)


_ROWS = {
    KVFormat.FP32: (RowFormat.FP32, RowFormat.FP32),
    KVFormat.FP16: (RowFormat.FP16, RowFormat.FP16),
    KVFormat.FP8: (RowFormat.FP8, RowFormat.FP8),
    KVFormat.Q8: (RowFormat.CODES8, RowFormat.CODES8),
    KVFormat.Q6: (RowFormat.CODES8, RowFormat.CODES4),
    KVFormat.Q4: (RowFormat.CODES4, RowFormat.CODES4),
}

CACHE_TYPES = tuple(kind.value for kind in KVFormat if kind is not KVFormat.FP32)
"""What a user may ask for."""


def parse_cache_type(name: str) -> KVFormat:
    """RequestError, listing the names, for any other."""
    if name not in CACHE_TYPES:
        raise RequestError(
            "no such cache type", expected=" or ".join(CACHE_TYPES), got=name or "nothing"
        )
    return KVFormat(name)


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, kv_format: KVFormat
) -> int:
    """Bytes of all layers' keys and values at one position."""
    return num_layers * num_kv_heads * kv_format.bytes_per_head(head_dim)


def pages_for(num_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // page_size)
