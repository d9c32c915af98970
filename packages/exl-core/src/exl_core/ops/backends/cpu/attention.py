"""Cache writes and attention of the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from exl_core.ops.attention import (
    NO_HEAD_NORMS,
    AttentionBatch,
    AttentionRows,
    CacheLayer,
    HeadNorms,
    KeySmoothing,
    Scoring,
)
from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.cache_rows import queries_of
from exl_core.ops.linear import Inputs


@dataclass(frozen=True, slots=True, eq=False)
class CpuBatch:
    """Operands of `attention_batch`, and `bound`, the copy that the kernels read. `divided` keeps
    what latent attention derives from them (`latent.py`), by the sizes of a head."""

    bound: exl_kernels.Table.AttentionBatch
    rows: AttentionRows
    slots: Tensor
    cos: Tensor
    sin: Tensor
    num_pages: int
    page_size: int
    divided: dict[tuple[int, ...], object] = field(default_factory=dict)


class CpuAttentionOps:
    """AttentionOps of the CPU kernels."""

    _ops: exl_kernels.Table

    def write_kv(self, key: Tensor, value: Tensor, cache: CacheLayer, slots: Tensor) -> None:
        self._ops.write_kv(key, value, cache.keys, cache.values, slots)

    def paged_attention(
        self,
        q: Tensor,
        cache: CacheLayer,
        rows: AttentionRows,
        scoring: Scoring,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_rows, heads, head_dim = q.shape
        out = torch.empty(num_rows, heads * head_dim, dtype=torch.float32)
        self._ops.paged_attention(
            q,
            cache.keys,
            cache.values,
            rows.page_table,
            rows.row_starts,
            rows.past_lens,
            scoring.scale,
            scoring.window,
            scoring.softcap,
            out,
            **_optional(sinks),
        )
        return out

    def attention_batch(
        self,
        rows: AttentionRows,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_pages: int,
        page_size: int,
    ) -> CpuBatch:
        bound = exl_kernels.Table.AttentionBatch(
            rows.page_table,
            rows.row_starts,
            rows.past_lens,
            slots,
            cos,
            sin,
            num_pages,
            page_size,
        )
        return CpuBatch(bound, rows, slots, cos, sin, num_pages, page_size)

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
        self._ops.attend_(
            qkv,
            cast(CpuBatch, batch).bound,
            cache.keys,
            cache.values,
            norms.q,
            norms.k,
            norms.eps,
            scoring.scale,
            scoring.window,
            scoring.softcap,
            None if smoothing is None else smoothing.scale,
            None if smoothing is None else smoothing.shift,
            **_optional(sinks),
        )
        return queries_of(qkv, cache) if out is None else out


def _optional(sinks: Tensor | None) -> dict[str, Tensor]:
    """The operand that few families have."""
    return {} if sinks is None else {"sinks": sinks}
