"""Attention over a paged cache of keys and values, and writes to that cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from exl_core.ops.linear import PreparedInputs


class AttentionBatch(Protocol):
    """Rows of one forward pass, prepared for `attend_`; only the table that made it can read it."""


class AttentionOps(Protocol):
    """Writes keys and values to the cache, and attends to them."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        """key, value [rows, kv_heads, d] strided rows -> caches [pages, kv_heads, page_size, row].

        slots int64 [rows] are page_id * page_size + offset. The type of a cache determines how it
        stores a row: float32, float16 and float8_e4m3fn as d values; int8 and uint8 as codes of 8
        and 4 bits with their scales (csrc/include/exl/formats/kv.h). Both caches have the same
        type, except that 8-bit keys may be combined with 4-bit values. Codes are bit-identical in
        every table.
        """
        ...

    def paged_attention(  # noqa: PLR0917 - the op has as many operands as its formula
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """q [rows, q_heads, d] strided rows -> [rows, q_heads * d]; decode and prefill mixed.

        page_table int32 [seqs, pages], row_starts int32 [seqs + 1], past_lens int32 [seqs]. Row r
        of sequence s has position p = past_lens[s] + r - row_starts[s] and attends to keys j <= p;
        if window > 0, only to keys j > p - window. Scores are scaled, then capped to
        softcap * tanh(score / softcap) if softcap > 0, then masked. Query head h reads kv head
        h // (q_heads // kv_heads). The keys and values of this pass are already in the cache, as
        `write_kv` stores them. Codes are dequantized exactly, without the roundings of a decoder.
        """
        ...

    def attention_batch(  # noqa: PLR0917 - the parts of a batch
        self,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
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

        On a GPU, operands that are already on the device are neither copied nor checked. They
        describe sequences of one row each, of any length that fits the page table. A captured CUDA
        graph therefore reads the values that are written to them later.
        """
        ...

    def attend_(  # noqa: PLR0917 - the op has as many operands as its parts
        self,
        qkv: Tensor,
        batch: AttentionBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        head_scale: Tensor | None = None,
        head_shift: Tensor | None = None,
        out: PreparedInputs | None = None,
    ) -> None:
        """All of attention between its two projections.

        The result replaces the queries, or goes to `out` if given (a buffer from `inputs_for`).

        qkv [rows, (q_heads + 2 kv_heads) * d] strided rows: queries, keys, values. Steps, in this
        order: rms_norm_heads_ of queries and of keys, where a norm [d] is given; rope_ of both;
        x * head_scale + head_shift of both, where these are given (float32
        [(q_heads + kv_heads) * d], both or neither); write_kv; paged_attention. Leaves keys and
        values in qkv undefined.
        """
        ...
