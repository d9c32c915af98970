"""Cache writes and attention of the CPU kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from exl_core.ops.attention import AttentionBatch
from exl_core.ops.backends.cpu.library import exl_kernels
from exl_core.ops.linear import PreparedInputs


class CpuAttentionOps:
    """AttentionOps of the CPU kernels."""

    _ops: exl_kernels.Table

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> None:
        self._ops.write_kv(key, value, key_cache, value_cache, slots)

    def paged_attention(  # noqa: PLR0917 - the op's operands
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
        rows, heads, head_dim = q.shape
        out = torch.empty(rows, heads * head_dim, dtype=torch.float32)
        self._ops.paged_attention(
            q,
            key_cache,
            value_cache,
            page_table,
            row_starts,
            past_lens,
            scale,
            window,
            softcap,
            out,
        )
        return out

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
        return exl_kernels.Table.AttentionBatch(
            page_table, row_starts, past_lens, slots, cos, sin, num_pages, page_size
        )

    def attend_(  # noqa: PLR0917 - the op's operands
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
        out: PreparedInputs | None = None,  # noqa: ARG002 - this table never makes one
    ) -> None:
        bound = cast(exl_kernels.Table.AttentionBatch, batch)
        self._ops.attend_(
            qkv,
            bound,
            key_cache,
            value_cache,
            q_norm,
            k_norm,
            eps,
            scale,
            window,
            softcap,
            head_scale,
            head_shift,
        )
