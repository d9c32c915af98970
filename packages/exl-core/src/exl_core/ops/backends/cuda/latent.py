"""Latent attention on the GPU: attention by our kernels or torch's, products of each head by torch,
or for few rows by a kernel that also copies what is not multiplied.

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
    flash_attention,
)
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.matmul import CudaInputs, Linears
from exl_core.ops.backends.latent import AbsorbedLatentOps, attend_absorbed
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.latent import DenseHeads, HeadMatrices, HeadOps, HeadUp, LatentUp
from exl_core.ops.linear import Inputs, PackedLinear
from exl_kernels import cuda, cuda_latent

FIXED_ROWS = 64
"""Rows of torch's products in the batch-invariant mode. The order in which it sums depends on the
number of rows."""

FEW_ROWS = 32
"""Most rows of which the kernel computes the products of each head: it reads the matrices once for
every 8 rows, and a launch of it is shorter than those of torch."""

EXPANDED_BYTES = 256 * 1024 * 1024
"""Memory for keys and values of a part of the heads, which are expanded and attended together."""

MAX_EXPANDED_HEAD = 256  # of torch's flash attention

ABSORBED_RATE, FLASH_RATE, PRODUCT_RATE = 90e12, 300e12, 500e12
"""Operations per second of our attention over latent rows, of torch's attention and of the products
that expand keys and values, about, on an H100."""

LEAST_SAVING_S = 200e-6
"""Least time that the expanded form has to save. It takes some eight launches more, and the host is
the slower side of short passes (docs/experiments/cuda-attention.md)."""


class Sizes(NamedTuple):
    """Heads, and elements: n without and p with RoPE, r of a latent vector, v of a value."""

    heads: int
    plain: int
    rotated: int
    rank: int
    value: int

    @property
    def wide(self) -> int:
        """Elements of an expanded key and of a value, the shorter of which is padded."""
        return max(self.plain + self.rotated, self.value)

    def saving_s(self, rows: int, past: int) -> float:
        """Time that the expanded form saves for the rows of a sequence."""
        pairs = rows * past + rows * (rows + 1) // 2
        absorbed = 2 * pairs * (self.rotated + 2 * self.rank) / ABSORBED_RATE
        expansion = 2 * (past + rows) * self.rank * (self.plain + self.value) / PRODUCT_RATE
        return self.heads * (absorbed - expansion - 4 * pairs * self.wide / FLASH_RATE)


class Operands(NamedTuple):
    """Operands of a layer that all sequences share."""

    up: HeadUp
    sizes: Sizes
    scale: float


class _Table(AttendOps, HeadOps, Protocol):
    _gpu: Gpu
    _attention: Attention
    _linears: Linears

    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor: ...
    def activations(self, rows: int, columns: int) -> Tensor: ...


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

    def attend_latent(  # type: ignore[override] # results may be prepared
        self: _Table,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: LatentUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        norm: RmsNorm | None = None,
        to: PackedLinear | None = None,
    ) -> Inputs:
        heads, bound = cast(HeadUp, up), cast(CudaBatch, batch)
        if not self._gpu.is_invariant and _takes_few(q, latent, heads):
            few = _Few(self, heads, norm)
            if few.can_cache(key, bound, cache):
                mixed = few.cache_and_queries(q, latent, key, bound, cache)  # [R, H * (p + r)]
                count = heads.keys.num_heads
                self._attention.paged_attention(mixed, mixed, bound, cache, scoring, heads=count)
            else:
                qkv = few.queries(q, latent, key)
                mixed = cast(Tensor, self.attend_(qkv, batch, cache, scoring))
            return few.results(mixed, None if to is None else self._linears.inputs_for(to, len(q)))
        latent = latent if norm is None else self.rms_norm(latent, norm)
        num_heads, rotated = heads.keys.num_heads, key.shape[1]
        value = cast(DenseHeads, heads.values).weight.shape[1]
        plain = q.shape[1] // num_heads - rotated
        sizes = Sizes(num_heads, plain, rotated, latent.shape[1], value)
        attend = partial(attend_absorbed, self, up=heads, cache=cache, scoring=scoring)
        if not self._attention.has_flash or not _is_expanded(bound, sizes, scoring):
            return attend(q, latent, key, batch=bound)
        out = self.activations(q.shape[0], num_heads * value)
        first = bound.long[0].first
        if bound.short is not None:
            out[:first] = attend(q[:first], latent[:first], key[:first], batch=bound.short)
        cos, sin = bound.cos[first:], bound.sin[first:]
        row = self.activations(q.shape[0] - first, rotated + sizes.rank)
        row[:, :rotated] = key[first:]
        row[:, rotated:] = latent[first:]
        own = replace(bound, slots=bound.slots[first:], cos=cos, sin=sin)
        self._attention.rope_write(row, own, cache)
        queries = self.activations(len(row), num_heads * sizes.wide)
        queries = queries.view(-1, num_heads, sizes.wide)
        queries[..., : plain + rotated] = q[first:].view(len(row), num_heads, -1)
        if plain + rotated < sizes.wide:
            queries[..., plain + rotated :] = 0.0
        _rotate(self._gpu, queries, plain, cos, sin)
        operands = Operands(heads, sizes, scoring.scale)
        for segment in bound.long:
            end = segment.past_len + segment.last - segment.first
            held = self._attention.read_keys(cache, bound.rows.page_table[segment.seq], end)
            results = out[segment.first : segment.last].view(-1, num_heads, value)
            some = queries[segment.first - first : segment.last - first]
            _attend_expanded(some, held[:, 0], operands, results)
        return out


def _takes_few(q: Tensor, latent: Tensor, up: HeadUp) -> bool:
    """Whether the kernel of few rows computes the products of each head."""
    sizes = [cast(DenseHeads, w).weight.shape for w in (up.keys, up.values)]
    fits = all(n % 4 == 0 and k <= cuda_latent.MAX_HEAD_K for _, n, k in sizes)
    return len(q) <= FEW_ROWS and latent.shape[1] <= cuda_latent.MAX_NORMED and fits


class _Few(NamedTuple):
    """The absorbed form of few rows: what comes before attention and after it, in a launch each."""

    table: _Table
    up: HeadUp
    norm: RmsNorm | None  # of the latent vectors

    def can_cache(self, key: Tensor, batch: CudaBatch, cache: CacheLayer) -> bool:
        """Whether the first launch can rotate and write the cache, too: not codes, and RoPE of all
        elements of `key` or of none."""
        has_type = cache.keys.dtype is torch.float16
        return has_type and 2 * batch.cos.shape[1] in (0, key.shape[1])

    def cache_and_queries(
        self, q: Tensor, latent: Tensor, key: Tensor, batch: CudaBatch, cache: CacheLayer
    ) -> Tensor:
        """Writes the cache. Returns queries [R, H * (p + r)] after RoPE."""
        width = key.shape[1] + latent.shape[1]
        queries = self._empty(len(q), self.up.keys.num_heads, width)
        args = self._operands(q, latent, key, queries, cache.keys.view(-1, 1, width))
        if batch.cos.shape[1]:
            for rotated in args.copies[:2]:
                rotated.cos, rotated.sin = batch.cos.data_ptr(), batch.sin.data_ptr()
        for cached in args.copies[1:]:
            cached.slots = batch.slots.data_ptr()
        self.table._gpu.call("head_products", args)
        return queries.flatten(1)

    def queries(self, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Queries, and the row that the cache gets, [R, (H + 1) * (p + r)], before RoPE."""
        heads = self.up.keys.num_heads
        qkv = self._empty(len(q), heads + 1, key.shape[1] + latent.shape[1])
        args = self._operands(q, latent, key, qkv[:, :heads], qkv[:, heads:])
        self.table._gpu.call("head_products", args)
        return qkv.flatten(1)

    def _empty(self, rows: int, heads: int, width: int) -> Tensor:
        return self.table.activations(rows, heads * width).view(rows, heads, width)

    def _operands(
        self, q: Tensor, latent: Tensor, key: Tensor, queries: Tensor, row: Tensor
    ) -> cuda_latent.HeadProducts:
        """Operands that fill `queries` [R, H, p + r] and `row` [R, 1, p + r]."""
        rotated, q = key.shape[1], q.view(*queries.shape[:2], -1)  # [R, H, n + p]
        plain = q.shape[2] - rotated
        args = _products(q[..., :plain], self.up.keys, queries[..., rotated:])
        args.copies[0] = _copy(q[..., plain:], queries[..., :rotated])
        args.copies[1] = _copy(key[:, None], row[..., :rotated])
        args.copies[2] = _copy(latent[:, None], row[..., rotated:], self.norm)
        return args

    def results(self, mixed: Tensor, to: object) -> Inputs:
        """Values of each head [R, H * v], for sums of latent vectors in mixed [R, H * (p + r)];
        where possible as the prepared inputs `to`."""
        gpu, rows, heads = self.table._gpu, len(mixed), self.up.values.num_heads
        value, rank = cast(DenseHeads, self.up.values).weight.shape[1:]
        out = gpu.empty(rows, heads, value, dtype=torch.float16)
        args = _products(mixed.view(rows, heads, -1)[..., -rank:], self.up.values, out)
        if isinstance(to, CudaInputs):
            args.y, args.inverse_permutation = to.memory.data_ptr(), to.inverse_permutation
            to.is_by_rows = rows > cuda.TILE_ROWS
        gpu.call("head_products", args)
        return to if isinstance(to, CudaInputs) else out.flatten(1)


def _products(x: Tensor, w: HeadMatrices, y: Tensor) -> cuda_latent.HeadProducts:
    """y [m, H, n] float16 = x [m, H, k], each head times its matrix, without copies."""
    weight = cast(DenseHeads, w).weight.transpose(1, 2)  # [H, k, n], contiguous
    return cuda_latent.HeadProducts(
        x=x.data_ptr(),
        row_stride=x.stride(0),
        head_stride=x.stride(1),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        y_row_stride=y.stride(0),
        y_head_stride=y.stride(1),
        dtype=TYPES[x.dtype],
        m=len(x),
        heads=x.shape[1],
        k=x.shape[2],
        n=y.shape[2],
    )


def _copy(source: Tensor, to: Tensor, norm: RmsNorm | None = None) -> cuda_latent.HeadCopy:
    """A copy of [m, heads, width] to float16, of one head after a norm if there is one."""
    return cuda_latent.HeadCopy(
        norm=None if norm is None else norm.weight.data_ptr(),
        eps=0.0 if norm is None else norm.eps,
        source=source.data_ptr(),
        row_stride=source.stride(0),
        head_stride=source.stride(1),
        to=to.data_ptr(),
        to_row_stride=to.stride(0),
        to_head_stride=to.stride(1),
        dtype=TYPES[source.dtype],
        heads=source.shape[1],
        width=source.shape[2],
    )


def _is_expanded(batch: CudaBatch, sizes: Sizes, scoring: Scoring) -> bool:
    if not batch.long or scoring.softcap or sizes.wide > MAX_EXPANDED_HEAD or sizes.wide % 8:
        return False
    counts = [(s.last - s.first, s.past_len) for s in batch.long]
    sees_all = scoring.window == 0 or scoring.window >= max(map(sum, counts))
    return sees_all and all(sizes.saving_s(*count) >= LEAST_SAVING_S for count in counts)


def _rotate(gpu: Gpu, queries: Tensor, first: int, cos: Tensor, sin: Tensor) -> None:
    """RoPE of the elements of each head from `first` on, in place. queries [R, H, wide]."""
    rows, heads, wide = queries.shape
    at = queries[..., first:].data_ptr(), TYPES[queries.dtype], queries.stride(0)
    gpu.call("rope", *at, cos.data_ptr(), sin.data_ptr(), cos.shape[1], rows, heads, wide)


def _attend_expanded(queries: Tensor, held: Tensor, operands: Operands, out: Tensor) -> None:
    """Rotated queries [R, H, wide] attend to the keys and values of cached rows [T, p + r].

    Writes out [R, H, v].
    """
    up, sizes, scale = operands
    plain, rotated, value, wide = sizes.plain, sizes.rotated, sizes.value, sizes.wide
    # [H, n, r] and [H, r, v], both contiguous.
    to_keys = cast(DenseHeads, up.keys).weight.transpose(1, 2)
    to_values = cast(DenseHeads, up.values).weight.transpose(1, 2)
    keys, latents = held.shape[0], held[:, rotated:]
    step = min(sizes.heads, max(1, EXPANDED_BYTES // (4 * keys * wide)))
    both = queries.new_empty(2, step, keys, wide)
    both[0, ..., plain : plain + rotated] = held[:, :rotated]
    if plain + rotated < wide:
        both[0, ..., plain + rotated :] = 0.0
    if value < wide:
        both[1, ..., value:] = 0.0
    for first in range(0, sizes.heads, step):
        part = slice(first, min(first + step, sizes.heads))
        k, v = both[:, : part.stop - first]
        shared = latents.expand(len(k), -1, -1)
        torch.bmm(shared, to_keys[part].transpose(1, 2), out=k[..., :plain])
        torch.bmm(shared, to_values[part], out=v[..., :value])
        y = flash_attention(queries[:, part].transpose(0, 1)[None], k[None], v[None], scale)
        out[:, part] = y[0].transpose(0, 1)[..., :value]


def _fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, H, k] times weight [H, k, n], as the first of exactly FIXED_ROWS rows: [m, H, n]."""
    padded = x.new_zeros(FIXED_ROWS, *x.shape[1:])
    padded[: len(x)] = x
    return torch.bmm(padded.transpose(0, 1), weight).transpose(0, 1)[: len(x)]
