"""Latent attention on the GPU: products of each head by torch, attention by our kernels or torch's.

Sequences with many rows take the expanded form, in which torch's attention runs over keys and
values of all heads. They are computed from the cached rows, so that a prompt in chunks attends to
what the cache holds. Other sequences, and all in the batch-invariant mode, take the absorbed form.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from exl_core.ops.attention import AttendOps, AttentionBatch, CacheLayer, Scoring
from exl_core.ops.backends.cuda.attention import (
    Attention,
    CudaBatch,
    LongSegment,
    flash_attention,
)
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.latent import AbsorbedLatentOps, attend_absorbed
from exl_core.ops.cache_rows import decode_rows
from exl_core.ops.latent import DenseHeads, HeadMatrices, HeadOps, HeadUp, LatentUp

FIXED_ROWS = 64
"""Rows of torch's products in the batch-invariant mode. The order in which it sums depends on the
number of rows."""

EXPANDED_BYTES = 256 * 1024 * 1024
"""Memory for keys and values of a part of the heads, which are expanded and attended together."""

MAX_EXPANDED_HEAD = 256  # of torch's flash attention


class Sizes(NamedTuple):
    """Elements of a head: n without and p with RoPE, v of a value."""

    plain: int
    rotated: int
    value: int

    @property
    def wide(self) -> int:
        """Elements of an expanded key and of a value, the shorter of which is padded."""
        return max(self.plain + self.rotated, self.value)


class Operands(NamedTuple):
    """Operands of a layer that all sequences share."""

    up: HeadUp
    sizes: Sizes
    scale: float


class _Table(AttendOps, HeadOps, Protocol):
    _gpu: Gpu
    _attention: Attention

    def activations(self, rows: int, columns: int) -> Tensor: ...
    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None: ...


class CudaLatentOps(AbsorbedLatentOps):
    """LatentOps and HeadOps of one GPU."""

    _gpu: Gpu

    def new_head_linear(self, weight: Tensor) -> DenseHeads:
        # Products read [heads, k, n].
        packed = weight.transpose(1, 2).to(self._gpu.device, torch.float16).contiguous()
        return DenseHeads(packed.transpose(1, 2))

    def head_linear(self, x: Tensor, w: HeadMatrices, out: Tensor | None = None) -> Tensor:
        weight = cast(DenseHeads, w).weight.transpose(1, 2)  # [H, k, n]
        x = x.to(torch.float16)
        if self._gpu.is_invariant:
            y = torch.cat([_fixed_product(part, weight) for part in torch.split(x, FIXED_ROWS)])
        else:
            y = torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)  # [m, H, n]
        return y if out is None else out.copy_(y)

    def attend_latent(
        self: _Table,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: LatentUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
    ) -> Tensor:
        heads, bound = cast(HeadUp, up), cast(CudaBatch, batch)
        num_heads, rotated = heads.keys.num_heads, key.shape[1]
        value = cast(DenseHeads, heads.values).weight.shape[1]
        sizes = Sizes(q.shape[1] // num_heads - rotated, rotated, value)
        attend = partial(attend_absorbed, self, up=heads, cache=cache, scoring=scoring)
        if not self._attention.has_flash or not _can_expand(bound, sizes, scoring):
            return attend(q, latent, key, batch=bound)
        out = self.activations(q.shape[0], num_heads * value)
        first = bound.long[0].first
        if bound.short is not None:
            out[:first] = attend(q[:first], latent[:first], key[:first], batch=bound.short)
        cos, sin = bound.cos[first:], bound.sin[first:]
        row = torch.cat([key[first:], latent[first:]], 1).to(torch.float16)
        self._attention.rope_write(
            row, replace(bound, slots=bound.slots[first:], cos=cos, sin=sin), cache
        )
        split = q[first:].view(len(row), num_heads, -1)
        turned = split[..., sizes.plain :].to(torch.float16).contiguous()
        self.rope_(turned, cos, sin)
        queries = torch.zeros(
            *split.shape[:2], sizes.wide, dtype=torch.float16, device=self._gpu.device
        )
        queries[..., :rotated] = turned
        queries[..., rotated : rotated + sizes.plain] = split[..., : sizes.plain]
        operands = Operands(heads, sizes, scoring.scale)
        for segment in bound.long:
            own = slice(segment.first - first, segment.last - first)
            held = _held(cache, bound.rows.page_table[segment.seq], segment)
            results = out[segment.first : segment.last].view(-1, num_heads, value)
            _attend_expanded(queries[own], held, operands, results)
        return out


def _can_expand(batch: CudaBatch, sizes: Sizes, scoring: Scoring) -> bool:
    if not batch.long or scoring.softcap or sizes.wide > MAX_EXPANDED_HEAD or sizes.wide % 8:
        return False
    most = max(s.last - s.first + s.past_len for s in batch.long)
    return scoring.window == 0 or scoring.window >= most


def _held(cache: CacheLayer, pages: Tensor, segment: LongSegment) -> Tensor:
    """Cached rows of a sequence, those of this pass included: float16 [keys, p + r]."""
    count = segment.past_len + segment.last - segment.first
    pages = pages[: -(-count // cache.keys.shape[2])].long()
    stored = cache.keys.view(torch.uint8).index_select(0, pages).view(cache.keys.dtype)
    rows = stored.flatten(0, 2)[:count]
    return rows if rows.dtype is torch.float16 else decode_rows(rows, torch.float32).half()


def _attend_expanded(queries: Tensor, held: Tensor, operands: Operands, out: Tensor) -> None:
    """Rotated queries [R, H, wide] attend to the keys and values of cached rows [T, p + r].

    Writes out [R, H, v].
    """
    up, sizes, scale = operands
    # [H, n, r] and [H, r, v], both contiguous.
    to_keys = cast(DenseHeads, up.keys).weight.transpose(1, 2)
    to_values = cast(DenseHeads, up.values).weight.transpose(1, 2)
    keys, (plain, rotated, value), wide = held.shape[0], sizes, sizes.wide
    latents, num_heads = held[:, rotated:], queries.shape[1]
    step = min(num_heads, max(1, EXPANDED_BYTES // (4 * keys * wide)))
    both = queries.new_empty(2, step, keys, wide)
    both[0, ..., :rotated] = held[:, :rotated]
    both[0, ..., rotated + plain :] = 0.0
    both[1, ..., value:] = 0.0
    for first in range(0, num_heads, step):
        part = slice(first, min(first + step, num_heads))
        count = part.stop - first
        k, v = both[0, :count], both[1, :count]
        shared = latents.expand(count, -1, -1)
        torch.bmm(shared, to_keys[part].transpose(1, 2), out=k[..., rotated : rotated + plain])
        torch.bmm(shared, to_values[part], out=v[..., :value])
        q = queries[:, part].transpose(0, 1)[None]
        y = flash_attention(q, k[None], v[None], scale)[0]
        out[:, part] = y.transpose(0, 1)[..., :value]


def _fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, H, k] times weight [H, k, n], as the first of exactly FIXED_ROWS rows: [m, H, n]."""
    padded = x.new_zeros(FIXED_ROWS, *x.shape[1:])
    padded[: len(x)] = x
    return torch.bmm(padded.transpose(0, 1), weight).transpose(0, 1)[: len(x)]
