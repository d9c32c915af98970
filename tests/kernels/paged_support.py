"""Random batches over a paged cache, and attention over them in float64 with error bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kernel_support import UNIT, activation_types, assert_within, is_gpu
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.cache_rows import decode_rows, encode_rows, row_size
from exl_core.ops.table import OpTable
from support.kv_caches import CODES4, CODES8, F16, F32, FORMATS

GPU_BOUND = 2e-3
"""Error of attention on a GPU: queries, weights and results are rounded to float16."""


@dataclass(frozen=True)
class PagedBatch:
    """Sequences of (past length, rows) with pages in random order."""

    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor
    rows: int

    def rows_of(self, cache: Tensor, seq: int, end: int) -> Tensor:
        """Decoded rows of the first `end` positions of a sequence: float64 [kv_heads, end, d]."""
        return decode_rows(self.stored_rows_of(cache, seq, end))

    def stored_rows_of(self, cache: Tensor, seq: int, end: int) -> Tensor:
        """The same rows as stored: [kv_heads, end, row]."""
        at, page_size = torch.arange(end, device=cache.device), cache.shape[2]
        pages = self.page_table[seq].long()[at // page_size]
        rows = cache.view(torch.uint8)[pages, :, at % page_size]
        return rows.transpose(0, 1).contiguous().view(cache.dtype)

    @property
    def cache(self) -> CacheLayer:
        return CacheLayer(self.key_cache, self.value_cache)

    @property
    def attention_rows(self) -> AttentionRows:
        return AttentionRows(self.page_table, self.row_starts, self.past_lens)

    def to(self, device: torch.device) -> PagedBatch:
        return PagedBatch(
            self.key_cache.to(device),
            self.value_cache.to(device),
            self.page_table.to(device),
            self.row_starts.to(device),
            self.past_lens.to(device),
            self.rows,
        )

    def only(self, seq: int) -> PagedBatch:
        """One of the sequences, by itself."""
        rows = int(self.row_starts[seq + 1] - self.row_starts[seq])
        return replace(
            self,
            page_table=self.page_table[seq : seq + 1].contiguous(),
            row_starts=torch.tensor([0, rows], dtype=torch.int32),
            past_lens=self.past_lens[seq : seq + 1],
            rows=rows,
        )


def paged_batch(
    rng: torch.Generator,
    sequences: list[tuple[int, int]],
    *,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype | None = None,
) -> PagedBatch:
    """Random rows in pages of random order. Rows that no sequence has written are NaN.

    `value_dtype` is the type of the value cache if it differs from the type of the key cache.
    """
    counts = [-(-(past + rows) // page_size) for past, rows in sequences]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=rng).int()
    page_table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    caches = []
    for cache_type in (dtype, value_dtype or dtype):
        shape = (num_pages, kv_heads, page_size, row_size(cache_type, head_dim))
        # Bytes of ones are NaN in every type, and in the scales of codes.
        ones = torch.full((*shape[:3], shape[3] * cache_type.itemsize), 255, dtype=torch.uint8)
        caches.append(ones.view(cache_type))
    used = 0
    for seq, (past, rows) in enumerate(sequences):
        pages = order[used : used + counts[seq]]
        used += counts[seq]
        page_table[seq, : len(pages)] = pages
        at = torch.arange(past + rows)
        for cache in caches:
            values = torch.randn(past + rows, kv_heads, head_dim, generator=rng)
            place = pages.long()[at // page_size], slice(None), at % page_size
            cache.view(torch.uint8)[place] = encode_rows(values, cache.dtype).view(torch.uint8)
    starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0)
    return PagedBatch(
        caches[0],
        caches[1],
        page_table,
        starts.int(),
        torch.tensor([past for past, _ in sequences], dtype=torch.int32),
        int(starts[-1]),
    )


def batch_of(
    rng: torch.Generator,
    name: str,
    sequences: list[tuple[int, int]],
    shape: tuple[int, int, int],
) -> PagedBatch:
    """`paged_batch` in one of the `FORMATS`; `shape` is kv heads, head size, page size."""
    key_type, value_type = FORMATS[name]
    kv_heads, head_dim, page_size = shape
    return paged_batch(
        rng,
        sequences,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=key_type,
        value_dtype=value_type,
    )


def hadamard(points: int) -> Tensor:
    """Hadamard matrix in Sylvester's order: (-1)^(number of ones that both indices share)."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(points)] for i in range(points)],
        dtype=torch.float64,
    )


def transform(d: int) -> Tensor:
    """Matrix [d, d] that decodes a row: x = y @ matrix."""
    matrix = torch.zeros(d, d, dtype=torch.float64)
    for start in range(0, d, 64):
        size = min(64, d - start)
        for parity in (0, 1):
            at = torch.arange(start + parity, start + size, 2)
            matrix[at[:, None], at] = hadamard(size // 2) * 2 / size
    return matrix


def scaled_codes(rows: Tensor, d: int) -> Tensor:
    """(code - h) * scale of rows [..., row], float64 [..., d]."""
    bits = 8 if rows.dtype == CODES8 else 4
    raw = rows.contiguous().view(torch.uint8)
    codes, scales = raw[..., : d * bits // 8].long(), raw[..., d * bits // 8 :].contiguous()
    if bits == 4:
        codes = torch.stack((codes % 16, codes // 16), dim=-1).flatten(-2)
    scale = scales.view(torch.float16).double().repeat_interleave(32, dim=-1)
    scaled: Tensor = (codes.double() - 2 ** (bits - 1)) * scale
    return scaled


def magnitudes(rows: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """|elements| that are multiplied, and the matrix that spreads errors in them, both float64."""
    if rows.dtype not in {CODES8, CODES4}:
        return rows.double().abs(), torch.eye(d, dtype=torch.float64, device=rows.device)
    return scaled_codes(rows, d).abs(), transform(d).abs().to(rows.device)


def exact_attention(
    q: Tensor, batch: PagedBatch, scoring: Scoring, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in float64, and the error bound of float32 kernels: [rows, heads * d] each.

    Without a cap on scores, torch's own attention computes the result.
    """
    scale, window, softcap = scoring.scale, scoring.window, scoring.softcap
    rows, heads, d = q.shape
    result, bound = (
        torch.empty(rows, heads, d, dtype=torch.float64, device=q.device) for _ in "ab"
    )
    starts = batch.row_starts.tolist()
    is_coded = batch.key_cache.dtype not in {F32, F16}
    for seq, past in enumerate(batch.past_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        end = past + last - first
        stored = [batch.stored_rows_of(c, seq, end) for c in (batch.key_cache, batch.value_cache)]
        group = heads // stored[0].shape[0]
        keys, values = (decode_rows(x).repeat_interleave(group, dim=0) for x in stored)
        (key_size, key_spread), (value_size, value_spread) = (magnitudes(x, d) for x in stored)
        key_size, value_size = (x.repeat_interleave(group, dim=0) for x in (key_size, value_size))
        queries = q[first:last].double().transpose(0, 1)
        at = torch.arange(end, device=q.device)
        ages = at[past:, None] - at
        seen = (ages >= 0) & (ages < (window or end))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        attended = weights @ values
        if softcap == 0.0:
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scale
            )
        if sinks is not None:  # the share of the keys in the sum of all weights
            log_sums = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
            attended = attended * torch.sigmoid(log_sums - sinks.double()[:, None])[..., None]
        # A score is off by d + 3 roundings of its terms (and of itself, capped). With codes, a
        # query is rounded six times more before the product. The error of a score scales every
        # weight by e^error. The sums over keys add a rounding per key, exp a few, and with codes
        # the transform of the result six.
        terms = (queries.abs() @ key_spread) @ key_size.transpose(1, 2) * scale
        roundings = d + (9 if is_coded else 3)
        score_error = (roundings * UNIT * terms).amax(-1) + 4 * UNIT * scores.abs().amax(-1)
        relative = 2 * score_error + (2 * end + (22 if is_coded else 16)) * UNIT
        spread = (weights @ value_size) @ value_spread
        result[first:last] = attended.transpose(0, 1)
        bound[first:last] = (relative[..., None] * spread).transpose(0, 1)
    return result.view(rows, heads * d), bound.view(rows, heads * d)


def attention(
    table: OpTable,
    q: Tensor,
    batch: PagedBatch,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with the usual scale."""
    scoring = Scoring(q.shape[2] ** -0.5, window, softcap)
    return table.paged_attention(q, batch.cache, batch.attention_rows, scoring, sinks)


def check_attention(
    table: OpTable,
    q: Tensor,
    batch: PagedBatch,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    gpu_bound: float = GPU_BOUND,
) -> None:
    """Compares `paged_attention` with float64, on a GPU for both types of activations."""
    for dtype in activation_types(table):
        queries = torch.empty_strided(q.shape, q.stride(), dtype=dtype).copy_(q)
        y = attention(table, queries, batch, window=window, softcap=softcap, sinks=sinks)
        assert y.dtype == dtype
        device = table.device
        exact, bound = (
            x.cpu()
            for x in exact_attention(
                queries.to(device),
                batch.to(device),
                Scoring(q.shape[2] ** -0.5, window, softcap),
                None if sinks is None else sinks.to(device),
            )
        )
        if is_gpu(table):
            assert_vectors_within(y.view(q.shape), exact.view(q.shape), gpu_bound)
        else:
            assert_within(y, exact, bound)


def assert_vectors_within(got: Tensor, exact: Tensor, bound: float) -> None:
    """The error of the whole result is within the bound, and that of no vector above 6 times it."""
    error = got.double() - exact
    assert error.norm() <= bound * exact.norm(), float(error.norm() / exact.norm())
    each = error.norm(dim=-1) / exact.norm(dim=-1)
    assert each.max() <= 6 * bound, float(each.max())
