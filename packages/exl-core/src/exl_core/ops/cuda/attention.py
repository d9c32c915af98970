"""Cache writing and attention on the GPU.

A few rows of a sequence and any past go to the library's kernels, which read every cache format. A
long first chunk over a float16 cache goes to torch's attention, which is faster there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from exl_core.ops.cuda.library import TYPES, Gpu
from exl_core.ops.cuda.linear import CudaInputs
from exl_core.ops.reference_cache import head_dim_of
from exl_kernels import cuda

MANY_QUERIES = 256
"""From so many rows of one sequence on, torch's attention is faster where it can be used."""


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
    starts: tuple[int, ...] | None = None  # first rows, where no sequence has anything cached


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
        starts = row_starts.tolist()
        counts = [last - first for first, last in pairwise(starts)]
        lengths = [past + n for past, n in zip(past_lens.tolist(), counts, strict=True)]

        def upload(x: Tensor) -> Tensor:
            return x.to(self._gpu.device, non_blocking=True)

        return CudaBatch(
            page_table=upload(page_table),
            row_starts=upload(row_starts),
            past_lens=upload(past_lens),
            slots=upload(slots),
            cos=upload(cos),
            sin=upload(sin),
            max_rows=max(counts, default=0),
            max_keys=max(lengths, default=0),
            starts=tuple(starts) if lengths == counts else None,
        )

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
        is_plain = key_cache.dtype is qkv.dtype and not scoring.softcap
        sees_all = scoring.window == 0 or scoring.window >= batch.max_rows
        if is_plain and sees_all and batch.starts is not None and batch.max_rows >= MANY_QUERIES:
            heads = qkv.view(rows, -1, head_dim)
            _attend_from_start(heads, q_heads, kv_heads, batch.starts, scoring.scale)
            return
        queries = qkv[:, : q_heads * head_dim]
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


def _attend_from_start(
    heads: Tensor, q_heads: int, kv_heads: int, starts: Sequence[int], scale: float
) -> None:
    """heads [rows, q_heads + 2 kv_heads, d]: each sequence by itself; results replace queries.

    The keys and values of this pass are all there are, and are cached as they lie here.
    """
    for first, last in pairwise(starts):
        if first == last:
            continue
        own = heads[first:last].transpose(0, 1).unsqueeze(0)  # [1, heads, rows, d]
        q, k, v = own[:, :q_heads], own[:, q_heads:-kv_heads], own[:, -kv_heads:]
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q_heads > kv_heads
        )
        q.copy_(mixed)


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
