"""Cache writes and attention on the GPU.

Two implementations share the work. The library's kernels read every cache format and serve
sequences with few rows. torch's attention is faster for sequences with many rows over a float16
cache. The batch-invariant mode uses the library's kernels only.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from exl_core.ops.attention import (
    MANY_QUERIES,
    NO_HEAD_NORMS,
    AttentionBatch,
    AttentionRows,
    CacheLayer,
    HeadNorms,
    KeySmoothing,
    Scoring,
)
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.matmul import CudaInputs, Linears
from exl_core.ops.backends.cuda.trellis import CudaTrellisInputs
from exl_core.ops.cache_rows import head_dim_of, queries_of
from exl_core.ops.checks import OpInputError
from exl_core.ops.linear import Inputs
from exl_kernels import cuda

GATHERED_BYTES = 128 << 20
"""Limit for the copy of one sequence's keys and values that torch's attention needs, because it
cannot read pages. Longer sequences use the library's kernel."""

MAX_NARROW_HEAD = 256
"""Larger heads have a kernel of their own, which does not write prepared inputs."""

MET = 2
"""Number of times that a row count has to occur before cuDNN is used for it. cuDNN takes half the
time of flash attention, but first spends 40 ms on a plan for exactly this row count."""

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LongSegment(NamedTuple):
    """Many rows of sequence `seq`, rows first .. last - 1 of the batch, for torch's attention.

    `past_len` is the number of tokens cached before them. `may_use_cudnn` says whether this row
    count has occurred often enough for cuDNN.
    """

    seq: int
    first: int
    last: int
    past_len: int
    may_use_cudnn: bool


@dataclass(frozen=True, slots=True, eq=False)
class CudaBatch:
    """Operands of `attention_batch` on the GPU, and their bounds."""

    rows: AttentionRows
    slots: Tensor
    cos: Tensor
    sin: Tensor
    max_rows: int  # of one sequence
    max_keys: int  # of one sequence; an upper bound
    long: tuple[LongSegment, ...] = ()  # sequences with many rows, if all others precede them
    short: CudaBatch | None = None  # the sequences before them

    @property
    def can_permute_output(self) -> bool:
        """Whether attention can write its result as prepared inputs of the next linear."""
        return self.slots.shape[0] <= cuda.TILE_ROWS


class Attention:
    """Attention ops of one GPU. Operands are those of `OpTable`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.has_flash = torch.cuda.get_device_capability(gpu.device) >= (8, 0)  # torch's
        self._row_counts: Counter[int] = Counter()  # of long segments without cached tokens

    def bind(self, rows: AttentionRows, slots: Tensor, cos: Tensor, sin: Tensor) -> CudaBatch:
        """Makes a batch from tensors on the CPU: reads their bounds, then uploads them."""
        starts, pasts = rows.row_starts.tolist(), rows.past_lens.tolist()
        counts = [last - first for first, last in pairwise(starts)]
        lengths = [past + n for past, n in zip(pasts, counts, strict=True)]

        def upload(x: Tensor) -> Tensor:
            return x.to(self._gpu.device, non_blocking=True)

        batch = CudaBatch(
            rows=AttentionRows(
                upload(rows.page_table), upload(rows.row_starts), upload(rows.past_lens)
            ),
            slots=upload(slots),
            cos=upload(cos),
            sin=upload(sin),
            max_rows=max(counts, default=0),
            max_keys=max(lengths, default=0),
        )
        cut = next((i for i, n in enumerate(counts) if n >= MANY_QUERIES), len(counts))
        if self._gpu.is_invariant or cut == len(counts) or min(counts[cut:]) < MANY_QUERIES:
            return batch
        long = []
        for i in range(cut, len(counts)):
            may_use_cudnn = pasts[i] == 0 and self._row_counts[counts[i]] >= MET
            if pasts[i] == 0:
                self._row_counts[counts[i]] += 1
            long.append(LongSegment(i, starts[i], starts[i + 1], pasts[i], may_use_cudnn))
        short = None
        if starts[cut]:
            short = replace(
                batch,
                rows=AttentionRows(
                    batch.rows.page_table[:cut],
                    batch.rows.row_starts[: cut + 1],
                    batch.rows.past_lens[:cut],
                ),
                max_rows=max(counts[:cut]),
                max_keys=max(lengths[:cut]),
            )
        return replace(batch, long=tuple(long), short=short)

    def write(self, key: Tensor, value: Tensor, cache: CacheLayer, slots: Tensor) -> None:
        self._gpu.call(
            "write_kv",
            _pages_of(cache),
            key.data_ptr(),
            value.data_ptr(),
            TYPES[key.dtype],
            key.stride(0),
            slots.data_ptr(),
            key.shape[0],
        )

    def rope_write(
        self,
        qkv: Tensor,
        batch: CudaBatch,
        cache: CacheLayer,
        *,
        norms: HeadNorms = NO_HEAD_NORMS,
        smoothing: KeySmoothing | None = None,
    ) -> None:
        """Rotates queries and keys in place, and writes the cache. There may be no queries."""
        rows, width = qkv.shape
        args = cuda.RopeWrite(
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            qkv_dtype=TYPES[qkv.dtype],
            rows=rows,
            q_heads=width // head_dim_of(cache.keys) - cache.heads_per_row,
            rotary_half=batch.cos.shape[1],
            cos=batch.cos.data_ptr(),
            sin=batch.sin.data_ptr(),
            q_norm=_pointer(norms.q),
            k_norm=_pointer(norms.k),
            head_scale=None if smoothing is None else smoothing.scale.data_ptr(),
            head_shift=None if smoothing is None else smoothing.shift.data_ptr(),
            eps=norms.eps,
            slots=batch.slots.data_ptr(),
        )
        self._gpu.call("rope_write", args, _pages_of(cache))

    def read_keys(self, cache: CacheLayer, pages: Tensor, count: int) -> Tensor:
        """Keys of a sequence's first `count` positions: float16 [count, kv_heads, d]."""
        shape = count, cache.keys.shape[1], head_dim_of(cache.keys)
        keys = self._gpu.empty(*shape, dtype=torch.float16)
        self._gpu.call("read_keys", _pages_of(cache), pages.data_ptr(), count, keys.data_ptr())
        return keys

    def attend(
        self,
        qkv: Tensor,
        batch: CudaBatch,
        cache: CacheLayer,
        scoring: Scoring,
        *,
        norms: HeadNorms,
        smoothing: KeySmoothing | None,
        sinks: Tensor | None,
        to: CudaInputs | None,
    ) -> None:
        self.rope_write(qkv, batch, cache, norms=norms, smoothing=smoothing)
        head_dim, kv_heads = head_dim_of(cache.keys), cache.keys.shape[1]
        rows, q_heads = qkv.shape[0], qkv.shape[1] // head_dim - cache.heads_per_row
        queries = qkv[:, : q_heads * head_dim]
        # torch's attention knows no sinks.
        may_use_torch = sinks is None and not cache.is_shared
        if may_use_torch and _can_use_torch(batch, scoring, qkv, cache.keys, self.has_flash):
            if batch.short is not None:
                q = queries[: batch.long[0].first]
                self.paged_attention(q, q, batch.short, cache, scoring, heads=q_heads)
            heads = qkv.view(rows, -1, head_dim)
            for segment in batch.long:
                own = heads[segment.first : segment.last]
                if segment.past_len:
                    pages = batch.rows.page_table[segment.seq]
                    q = own[:, :q_heads]
                    _attend_with_past(q, cache, pages, segment, scoring)
                else:
                    _attend_without_past(own, q_heads, kv_heads, segment, scoring)
            return
        self.paged_attention(
            queries, queries, batch, cache, scoring, heads=q_heads, sinks=sinks, to=to
        )

    def paged_attention(
        self,
        q: Tensor,
        out: Tensor,
        batch: CudaBatch,
        cache: CacheLayer,
        scoring: Scoring,
        *,
        heads: int,
        sinks: Tensor | None = None,
        to: CudaInputs | None = None,
    ) -> None:
        """Attention of q over the cache: out [rows, heads * d].

        q [rows, ...] has heads d apart and may be the same memory as `out`. With `to`, the result
        is written there as prepared inputs, and `out` is left unchanged.
        """
        if sinks is not None:
            _check_sinks(sinks, heads, head_dim_of(cache.keys))
        rows = out.shape[0]
        is_invariant = self._gpu.is_invariant
        workspace = self._gpu.workspace("attention", is_invariant, head_dim_of(cache.keys))
        args = cuda.Attention(
            q=q.data_ptr(),
            q_stride=q.stride(0),
            out=out.data_ptr() if to is None else to.memory.data_ptr(),
            inverse_permutation=None if to is None else to.inverse_permutation,
            out_stride=out.stride(0),
            dtype=TYPES[out.dtype],
            rows=rows,
            q_heads=heads,
            seqs=batch.rows.past_lens.shape[0],
            page_table=batch.rows.page_table.data_ptr(),
            row_starts=batch.rows.row_starts.data_ptr(),
            past_lens=batch.rows.past_lens.data_ptr(),
            table_stride=batch.rows.page_table.shape[1],
            max_rows=batch.max_rows,
            max_keys=batch.max_keys,
            window=scoring.window,
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=_pointer(sinks),
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
            is_invariant=is_invariant,
        )
        self._gpu.call("attention", args, _pages_of(cache))


class CudaAttentionOps:
    """AttentionOps of one GPU."""

    _gpu: Gpu
    _linears: Linears
    _attention: Attention

    def write_kv(self, key: Tensor, value: Tensor, cache: CacheLayer, slots: Tensor) -> None:
        if key.shape[0] and (key.stride(0) != value.stride(0) or key.dtype is not value.dtype):
            raise OpInputError("write_kv: key and value (expected rows laid out alike)")
        self._attention.write(key, value, cache, slots)

    def paged_attention(
        self,
        q: Tensor,
        cache: CacheLayer,
        rows: AttentionRows,
        scoring: Scoring,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_rows, heads, head_dim = q.shape
        out = self._gpu.empty(num_rows, heads * head_dim, dtype=q.dtype)
        none = self._gpu.empty(0)
        batch = self._attention.bind(rows, none, none, none)
        if num_rows:
            self._attention.paged_attention(q, out, batch, cache, scoring, heads=heads, sinks=sinks)
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
    ) -> AttentionBatch:
        page_table = rows.page_table
        if page_table.is_cuda:
            num_rows, (seqs, pages) = slots.shape[0], page_table.shape
            max_keys = num_rows if rows.is_fresh else pages * page_size
            most = 1 if num_rows == seqs else num_rows, max_keys
            long: tuple[LongSegment, ...] = ()
            if rows.is_fresh and num_rows >= MANY_QUERIES and not self._gpu.is_invariant:
                long = (LongSegment(0, 0, num_rows, 0, may_use_cudnn=True),)
            return CudaBatch(rows, slots, cos, sin, *most, long)
        if page_table.numel() and int(page_table.amax()) >= num_pages:
            raise OpInputError(
                f"attention_batch: page_table (expected ids within [0, {num_pages}))"
            )
        return self._attention.bind(rows, slots, cos, sin)

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
        result = queries_of(qkv, cache) if out is None else out
        if qkv.shape[0] == 0:
            return result
        to, bound = result if isinstance(result, CudaInputs) else None, cast(CudaBatch, batch)
        is_wide = head_dim_of(cache.keys) > MAX_NARROW_HEAD
        can_permute = bound.can_permute_output and not is_wide and qkv.dtype is torch.float16
        writes_to_out = to is not None and can_permute
        self._attention.attend(
            qkv,
            bound,
            cache,
            scoring,
            norms=norms,
            smoothing=smoothing,
            sinks=sinks,
            to=to if writes_to_out else None,
        )
        if isinstance(result, CudaInputs | CudaTrellisInputs) and not writes_to_out:
            self._linears.prepare_for(result, qkv[:, : result.features])
        return result


def _check_sinks(sinks: Tensor, heads: int, head_dim: int) -> None:
    if sinks.shape != (heads,) or sinks.dtype is not torch.float32:
        raise OpInputError(f"paged_attention: sinks (expected float32 [{heads}])")
    if head_dim > MAX_NARROW_HEAD:
        raise OpInputError(
            f"paged_attention: sinks of heads of {head_dim} values (expected at most"
            f" {MAX_NARROW_HEAD})"
        )


def _can_use_torch(
    batch: CudaBatch, scoring: Scoring, qkv: Tensor, key_cache: Tensor, has_flash: bool
) -> bool:
    """Whether torch's attention can take the long segments of a batch within `GATHERED_BYTES`."""
    if not batch.long or key_cache.dtype is not qkv.dtype or scoring.softcap:
        return False
    if key_cache.shape[3] > MAX_NARROW_HEAD:
        return False  # torch would compute all scores of a head at once
    gathered = (s.last - s.first + s.past_len for s in batch.long if s.past_len)
    max_gathered = max(gathered, default=0)  # keys
    key_bytes = key_cache.shape[1] * key_cache.shape[3] * key_cache.element_size()
    can_gather = has_flash and key_cache.dtype is torch.float16
    if max_gathered and not (can_gather and 2 * max_gathered * key_bytes <= GATHERED_BYTES):
        return False
    max_keys = max(max_gathered, *(s.last - s.first for s in batch.long))
    return scoring.window == 0 or scoring.window >= max_keys


def _attend_without_past(
    heads: Tensor, q_heads: int, kv_heads: int, segment: LongSegment, scoring: Scoring
) -> None:
    """Attention of one sequence without cached tokens. Results replace the queries.

    heads [rows, q_heads + 2 kv_heads, d]. The keys and values of this pass are all of the
    sequence's, and the cache stores them without rounding.
    """
    own = heads.transpose(0, 1).unsqueeze(0)  # [1, heads, rows, d]
    q, k, v = own[:, :q_heads], own[:, q_heads:-kv_heads], own[:, -kv_heads:]
    with nullcontext() if segment.may_use_cudnn else sdpa_kernel(WITHOUT_CUDNN):
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=q_heads > kv_heads
        )
    q.copy_(mixed)


def _attend_with_past(
    queries: Tensor, cache: CacheLayer, pages: Tensor, segment: LongSegment, scoring: Scoring
) -> None:
    """Attention of one sequence with cached tokens. Results replace the queries [rows, heads, d].

    Gathers the sequence's keys and values from its pages into contiguous tensors.
    """
    page_size = cache.keys.shape[2]
    count = segment.past_len + segment.last - segment.first
    pages = pages[: -(-count // page_size)].long()

    def gathered(x: Tensor) -> Tensor:  # [1, kv_heads, keys, d]
        return x.transpose(0, 1).index_select(1, pages).flatten(1, 2)[None, :, :count]

    q, k, v = queries.transpose(0, 1)[None], gathered(cache.keys), gathered(cache.values)
    q.copy_(flash_attention(q, k, v, scoring.scale))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [1, heads, rows, d] to k and v [1, kv_heads, keys, d].

    With fewer queries than keys, the last query sees the last key. The public way to say so,
    torch.nn.attention.bias, takes seconds to import.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return cast(Tensor, flash(q, k, v, is_causal=True, scale=scale)[0])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pages_of(cache: CacheLayer) -> cuda.Cache:
    pages, kv_heads, page_size, _ = cache.keys.shape
    return cuda.Cache(
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        TYPES[cache.keys.dtype],
        TYPES[cache.values.dtype],
        kv_heads,
        head_dim_of(cache.keys),
        page_size,
        pages,
    )
