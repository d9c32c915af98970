"""How precisely keys and values are cached, and how many bytes that takes.

Sizes only: the tensors are `store.py`, the bookkeeping of pages is `page_pool.py`. No torch here:
a description of a model says what its cache will cost before anything is loaded.
"""

from __future__ import annotations

from enum import Enum

PAGE_SIZE = 256
"""Positions per page: large enough that a page table is short, small enough to share prefixes."""


class KVFormat(Enum):
    """Storage of one cached number."""

    FP32 = "fp32"
    FP16 = "fp16"

    @property
    def bytes_per_value(self) -> int:
        return _BYTES_PER_VALUE[self]

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of one head's key and value at one position."""
        return 2 * head_dim * self.bytes_per_value


_BYTES_PER_VALUE = {KVFormat.FP32: 4, KVFormat.FP16: 2}


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, kv_format: KVFormat
) -> int:
    """Bytes of all layers' keys and values at one position."""
    return num_layers * num_kv_heads * kv_format.bytes_per_head(head_dim)


def pages_for(num_tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Pages that hold this many tokens."""
    return -(-num_tokens // page_size)
