"""Attention over a paged cache of keys and values, and writes to that cache.

The operands that stay the same are built once: `CacheLayer` with the cache, `Scoring`, `HeadNorms`
and `KeySmoothing` per layer at load, `AttentionRows` and the batch per forward pass. A call then
passes references only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exl_core.ops.linear import Inputs

MANY_QUERIES = 256
"""Rows of one sequence from which torch's attention is faster on a GPU, where it can be used."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheLayer:
    """Keys and values of one layer, in pages: [pages, kv_heads, page_size, row] each.

    The type of a cache determines how it stores a row: float32, float16 and float8_e4m3fn as d
    values; int8 and uint8 as codes of 8 and 4 bits with their scales
    (csrc/include/exl/formats/kv.h). Both caches have the same type, except that 8-bit keys may be
    combined with 4-bit values.

    If both are the same memory, each row is a key and a value. It is stored once, and qkv has no
    values.
    """

    keys: Tensor
    values: Tensor

    @property
    def is_shared(self) -> bool:
        if self.keys is self.values:
            return True
        return self.keys.numel() > 0 and self.keys.data_ptr() == self.values.data_ptr()

    @property
    def heads_per_row(self) -> int:
        """Key and value heads in a row of qkv."""
        return self.keys.shape[1] * (1 if self.is_shared else 2)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Rows of each sequence, and the pages of its keys and values.

    page_table int32 [seqs, pages], row_starts int32 [seqs + 1], past_lens int32 [seqs]. Sequence s
    has the rows row_starts[s] to row_starts[s + 1] - 1, after past_lens[s] cached positions.

    `is_fresh` says that there is one sequence, without cached positions. Rows that follow its own
    are padding, whose results nobody reads. The host cannot read this from tensors on a GPU.
    """

    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Scoring:
    """Parameters that turn the dot product of a query and a key into an attention score.

    Scores are scaled, then capped to softcap * tanh(score / softcap) if softcap > 0, then masked.
    If window > 0, a query at position p attends only to keys at positions above p - window.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMS norms of each query head and of each key head by itself: float32 [d], None: no norm."""

    q: Tensor | None
    k: Tensor | None
    eps: float


NO_HEAD_NORMS = HeadNorms(None, None, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class KeySmoothing:
    """Affine map x * scale + shift of a layer's query and key heads, applied after RoPE.

    Both are float32 [(q_heads + kv_heads) * d], query heads first.
    """

    scale: Tensor
    shift: Tensor


class AttentionBatch(Protocol):
    """Rows of one forward pass, prepared for `attend_`; only the table that made it can read it."""


class AttendOps(Protocol):
    """Attention as the layers call it."""

    def attend_(
        self,
        qkv: Tensor,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        *,
        norms: HeadNorms = NO_HEAD_NORMS,
        smoothing: KeySmoothing | None = None,
        sinks: Tensor | None = None,
        out: Inputs | None = None,
    ) -> Inputs:
        """All of attention between its two projections: [rows, q_heads * d].

        The result replaces the queries in qkv, or goes to `out` if that is a `PreparedInputs`. A
        tensor as `out` is the view of the queries. Returns `out`, or else that view.

        qkv [rows, (q_heads + 2 kv_heads) * d] strided rows: queries, keys, values. With a shared
        cache it is [rows, (q_heads + kv_heads) * d], without values. Steps, in this order:
        rms_norm_heads_ of queries and of keys, where `norms` has one; rope_ of both; `smoothing` of
        both, if given; write_kv; paged_attention with `sinks`. Leaves keys and values in qkv
        undefined.
        """
        ...


class AttentionOps(AttendOps, Protocol):
    """Writes keys and values to the cache, and attends to them."""

    def write_kv(self, key: Tensor, value: Tensor, cache: CacheLayer, slots: Tensor) -> None:
        """key, value [rows, kv_heads, d] strided rows -> their slots of the cache.

        slots int64 [rows] are page_id * page_size + offset. Codes are bit-identical in every table.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        cache: CacheLayer,
        rows: AttentionRows,
        scoring: Scoring,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [rows, q_heads, d] strided rows -> [rows, q_heads * d]; decode and prefill mixed.

        Row r of sequence s has position p = past_lens[s] + r - row_starts[s] and attends to keys
        j <= p, or to fewer if `scoring` has a window. Query head h reads kv head
        h // (q_heads // kv_heads). The keys and values of this pass are already in the cache, as
        `write_kv` stores them. Codes are dequantized exactly, without the roundings of a decoder.
        `sinks`, float32 [q_heads], count as the score of one more key of each head, which has no
        value. They are neither scaled, capped nor masked.
        On a GPU every row of q, and of the qkv of `attend_`, begins at a multiple of 16 bytes.
        """
        ...

    def attention_batch(
        self,
        rows: AttentionRows,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_pages: int,
        page_size: int,
    ) -> AttentionBatch:
        """Operands of `rope_`, `write_kv` and `paged_attention` that all layers of a pass share.

        They are checked here, once, against caches of num_pages pages. The caller must not change
        them while the batch is in use, because not every table copies them.

        On a GPU, operands that are already on the device are neither copied nor checked. Their
        sequences may have any lengths that fit the page table; as many sequences as rows have one
        row each. A captured CUDA graph therefore reads the values that are written to them later.
        """
        ...
