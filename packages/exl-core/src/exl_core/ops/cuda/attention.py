"""Cache writing and attention on the GPU.

A few rows of a sequence and any past go to the library's kernels, which read every cache format.
Many rows over a float16 cache go to torch's attention, which is faster there.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from exl_core.ops.cuda.library import TYPES, Gpu
from exl_core.ops.cuda.linear import CudaInputs
from exl_core.ops.reference_cache import head_dim_of
from exl_kernels import cuda

MANY_QUERIES = 256
"""From so many rows of one sequence on, torch's attention is faster where it can be used."""

GATHERED_BYTES = 128 << 20
"""Most memory for the keys and values of one sequence that are brought together from their pages
for it; with more than that behind them, rows go to the library's kernel."""

MET = 2
"""So often a number of rows has come before cuDNN may take them: half the time of flash attention,
once it has spent 40 ms on a plan for just that number."""

UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Long(NamedTuple):
    """Many rows of one sequence: `place` in the batch, first row and the one after the last, tokens
    cached before them, and whether as many have come before."""

    place: int
    first: int
    last: int
    past: int
    is_met: bool


@dataclass(frozen=True, slots=True, eq=False)
class CudaBatch:
    """What `attention_batch` was given, on the GPU, and its bounds."""

    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    max_rows: int  # of one sequence
    max_keys: int  # of one sequence, or more
    long: tuple[Long, ...] = ()  # the sequences of many rows, where only those come last
    short: CudaBatch | None = None  # those before them

    @property
    def can_be_placed(self) -> bool:
        """Whether attention can leave its result prepared for the linear behind it."""
        return self.slots.shape[0] <= cuda.TILE_ROWS


@dataclass(frozen=True, slots=True)
class Scoring:
    """What becomes of the product of a query and a key."""

    scale: float
    window: int = 0
    softcap: float = 0.0


class Attention:
    """Operands as `OpTable` has them."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._has_flash = torch.cuda.get_device_capability(gpu.device) >= (8, 0)  # torch's
        self._met: Counter[int] = Counter()  # numbers of rows, of sequences with nothing cached

    def bind(  # noqa: PLR0917 - what a batch is made of
        self,
        page_table: Tensor,
        row_starts: Tensor,
        past_lens: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> CudaBatch:
        """Of tensors on the CPU: looked at, then uploaded."""
        starts, pasts = row_starts.tolist(), past_lens.tolist()
        counts = [last - first for first, last in pairwise(starts)]
        lengths = [past + n for past, n in zip(pasts, counts, strict=True)]

        def upload(x: Tensor) -> Tensor:
            return x.to(self._gpu.device, non_blocking=True)

        batch = CudaBatch(
            page_table=upload(page_table),
            row_starts=upload(row_starts),
            past_lens=upload(past_lens),
            slots=upload(slots),
            cos=upload(cos),
            sin=upload(sin),
            max_rows=max(counts, default=0),
            max_keys=max(lengths, default=0),
        )
        cut = next((i for i, n in enumerate(counts) if n >= MANY_QUERIES), len(counts))
        if cut == len(counts) or min(counts[cut:]) < MANY_QUERIES:
            return batch
        long = []
        for i in range(cut, len(counts)):
            is_met = pasts[i] == 0 and self._met[counts[i]] >= MET
            if pasts[i] == 0:
                self._met[counts[i]] += 1
            long.append(Long(i, starts[i], starts[i + 1], pasts[i], is_met))
        short = None
        if starts[cut]:
            short = replace(
                batch,
                page_table=batch.page_table[:cut],
                row_starts=batch.row_starts[: cut + 1],
                past_lens=batch.past_lens[:cut],
                max_rows=max(counts[:cut]),
                max_keys=max(lengths[:cut]),
            )
        return replace(batch, long=tuple(long), short=short)

    def write(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        self._gpu.call(
            "write_kv",
            _cache(key_cache, value_cache),
            key.data_ptr(),
            value.data_ptr(),
            TYPES[key.dtype],
            key.stride(0),
            slots.data_ptr(),
            key.shape[0],
        )

    def attend(  # noqa: PLR0917 - the op's operands
        self,
        qkv: Tensor,
        batch: CudaBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        scoring: Scoring,
        fit: tuple[Tensor | None, Tensor | None],
        to: CudaInputs | None,
    ) -> None:
        rows, width = qkv.shape
        head_dim, kv_heads = head_dim_of(key_cache), key_cache.shape[1]
        q_heads = width // head_dim - 2 * kv_heads
        args = cuda.RopeWrite(
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            qkv_dtype=TYPES[qkv.dtype],
            rows=rows,
            q_heads=q_heads,
            rotary_half=batch.cos.shape[1],
            cos=batch.cos.data_ptr(),
            sin=batch.sin.data_ptr(),
            q_norm=_pointer(norms[0]),
            k_norm=_pointer(norms[1]),
            head_scale=_pointer(fit[0]),
            head_shift=_pointer(fit[1]),
            eps=eps,
            slots=batch.slots.data_ptr(),
        )
        self._gpu.call("rope_write", args, _cache(key_cache, value_cache))
        queries = qkv[:, : q_heads * head_dim]
        if _is_torchs(batch, scoring, qkv, key_cache, self._has_flash):
            if batch.short is not None:
                few = queries[: batch.long[0].first]
                self.mix(few, few, q_heads, batch.short, key_cache, value_cache, scoring)
            heads = qkv.view(rows, -1, head_dim)
            for one in batch.long:
                own = heads[one.first : one.last]
                if one.past:
                    pages = batch.page_table[one.place]
                    _attend_behind(own[:, :q_heads], key_cache, value_cache, pages, one, scoring)
                else:
                    _attend_from_start(own, q_heads, kv_heads, one, scoring)
            return
        self.mix(queries, queries, q_heads, batch, key_cache, value_cache, scoring, to)

    def mix(  # noqa: PLR0917 - the op's operands
        self,
        q: Tensor,
        out: Tensor,
        heads: int,
        batch: CudaBatch,
        key_cache: Tensor,
        value_cache: Tensor,
        scoring: Scoring,
        to: CudaInputs | None = None,
    ) -> None:
        """out [rows, heads * d]; q [rows, ...] with heads d apart, perhaps the same memory. With
        `to` the result is left there, and `out` stays as it is."""
        rows = out.shape[0]
        workspace = self._gpu.workspace("attention", rows, heads, head_dim_of(key_cache))
        args = cuda.Attention(
            q=q.data_ptr(),
            q_stride=q.stride(0),
            out=out.data_ptr() if to is None else to.memory.data_ptr(),
            places=None if to is None else to.places,
            out_stride=out.stride(0),
            dtype=TYPES[out.dtype],
            rows=rows,
            q_heads=heads,
            seqs=batch.past_lens.shape[0],
            page_table=batch.page_table.data_ptr(),
            row_starts=batch.row_starts.data_ptr(),
            past_lens=batch.past_lens.data_ptr(),
            table_stride=batch.page_table.shape[1],
            max_rows=batch.max_rows,
            max_keys=batch.max_keys,
            window=scoring.window,
            scale=scoring.scale,
            softcap=scoring.softcap,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )
        self._gpu.call("attention", args, _cache(key_cache, value_cache))


def _is_torchs(
    batch: CudaBatch, scoring: Scoring, qkv: Tensor, key_cache: Tensor, has_flash: bool
) -> bool:
    """Whether torch's attention can take the long sequences of a batch, and does not gather more
    than it may."""
    if not batch.long or key_cache.dtype is not qkv.dtype or scoring.softcap:
        return False
    behind = max((one.last - one.first + one.past for one in batch.long if one.past), default=0)
    key_bytes = key_cache.shape[1] * key_cache.shape[3] * key_cache.element_size()
    is_known = has_flash and key_cache.dtype is torch.float16
    if behind and not (is_known and 2 * behind * key_bytes <= GATHERED_BYTES):
        return False
    longest = max(behind, *(one.last - one.first for one in batch.long))
    return scoring.window == 0 or scoring.window >= longest


def _attend_from_start(
    heads: Tensor, q_heads: int, kv_heads: int, rows: Long, scoring: Scoring
) -> None:
    """heads [rows, q_heads + 2 kv_heads, d] of a sequence: results replace queries.

    The keys and values of this pass are all there are, and are cached as they lie here.
    """
    own = heads.transpose(0, 1).unsqueeze(0)  # [1, heads, rows, d]
    q, k, v = own[:, :q_heads], own[:, q_heads:-kv_heads], own[:, -kv_heads:]
    with nullcontext() if rows.is_met else sdpa_kernel(UNPLANNED):
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=q_heads > kv_heads
        )
    q.copy_(mixed)


def _attend_behind(  # noqa: PLR0917 - the operands of attention
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pages: Tensor,
    rows: Long,
    scoring: Scoring,
) -> None:
    """queries [rows, heads, d] of a sequence with `rows.past` tokens before them: results replace
    them. Keys and values are brought together from the sequence's pages."""
    page_size, count = key_cache.shape[2], rows.past + rows.last - rows.first
    pages = pages[: -(-count // page_size)].long()

    def gathered(cache: Tensor) -> Tensor:  # [1, kv_heads, keys, d]
        return cache.transpose(0, 1).index_select(1, pages).flatten(1, 2)[None, :, :count]

    q, k, v = queries.transpose(0, 1)[None], gathered(key_cache), gathered(value_cache)
    # Of a causal mask this op takes the last row to see the last key. torch.nn.attention.bias says
    # so in public, and takes seconds to import.
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    q.copy_(flash(q, k, v, is_causal=True, scale=scoring.scale)[0])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _cache(key_cache: Tensor, value_cache: Tensor) -> cuda.Cache:
    pages, kv_heads, page_size, _ = key_cache.shape
    return cuda.Cache(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        TYPES[key_cache.dtype],
        TYPES[value_cache.dtype],
        kv_heads,
        head_dim_of(key_cache),
        page_size,
        pages,
    )
