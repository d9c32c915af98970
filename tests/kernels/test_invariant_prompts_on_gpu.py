"""The prompt kernel of the batch-invariant mode: near float64, with the decode kernel's bits.

Rows of a long part run in the prompt kernel, the same rows in parts of at most 16 in the decode
kernel. Wide heads and shared rows have one kernel, in two shapes for few and many rows. Shapes of
batches are random: head sizes that the kernels pad, groups that do not divide a block's vectors,
windows, soft-caps, sinks, pages, and lengths around the partitions of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_support import assert_norm_within
from paged_support import GPU_BOUND, PagedBatch, batch_of, exact_attention
from torch import Tensor

from exl_core.ops.attention import AttentionRows, Scoring
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from support.kv_caches import FORMATS

pytestmark = pytest.mark.cuda

SHARED = 576
PARTITIONS = (0, 448, 512, 3900, 4096, 12_250)  # keys before which partitions or chains end


@pytest.fixture(scope="module")
def table() -> OpTable:
    return get_table("cuda", isa=None, threads=1, batch_invariant=True)


def _integer(rng: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=rng))


@dataclass(frozen=True)
class Case:
    """A batch on the GPU, queries [rows, heads, d] and what they attend with."""

    batch: PagedBatch
    q: Tensor
    scoring: Scoring
    sinks: Tensor | None

    def attend(self, table: OpTable) -> Tensor:
        rows = self.batch.attention_rows
        y = table.paged_attention(self.q, self.batch.cache, rows, self.scoring, self.sinks)
        return self._with_values(y)

    def _with_values(self, y: Tensor) -> Tensor:
        """The results that are computed: of shared rows not those of the first 64 elements."""
        heads, d = self.q.shape[1:]
        return y.view(-1, heads, d)[..., 64 if d == SHARED else 0 :]

    def part(self, table: OpTable, seq: int, first: int, last: int) -> Tensor:
        """Rows first .. last - 1 of one sequence by themselves."""
        alone, start = self.batch.only(seq), int(self.batch.row_starts[seq])
        seen = AttentionRows(
            alone.page_table,
            torch.tensor([0, last - first], dtype=torch.int32),
            alone.past_lens + first,
        )
        q = self.q[start + first : start + last]
        y = table.paged_attention(q, alone.cache, seen, self.scoring, self.sinks)
        return self._with_values(y)


def _case(rng: torch.Generator, name: str, width: int, long: tuple[int, int]) -> Case:
    """Heads for kernels of `width`; the second sequence is `long`, the others are short. A width of
    576 stands for shared rows."""
    d = width - (0 if _integer(rng, 0, 1) else 32 * _integer(rng, 1, 1 if width == 64 else 3))
    d = width if width == SHARED else d
    page = (256, 64, 16)[_integer(rng, 0, 2)]
    kv_heads, group = _integer(rng, 1, 2), _integer(rng, 1, 16)
    sequences = [(_integer(rng, 0, 700), _integer(rng, 1, 40)), long, (3, 1), (0, 19)]
    batch = batch_of(rng, name, sequences, (kv_heads, d, page))
    q = torch.randn(batch.rows, kv_heads * group, d, generator=rng).cuda()
    window = (0, 0, 100, 1500)[_integer(rng, 0, 3)]
    scoring = Scoring(d**-0.5, window, 5.0 * _integer(rng, 0, 1))
    has_sinks = width <= 256 and _integer(rng, 0, 1)
    sinks = torch.randn(kv_heads * group, generator=rng).cuda() if has_sinks else None
    keys = batch.key_cache.cuda()
    on_gpu = PagedBatch(
        keys,
        keys if width == SHARED else batch.value_cache.cuda(),
        batch.page_table,
        batch.row_starts,
        batch.past_lens,
        batch.rows,
    )
    return Case(on_gpu, q.half() if _integer(rng, 0, 1) else q, scoring, sinks)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("width", [64, 128, 256, 512, SHARED])
@pytest.mark.parametrize("name", FORMATS)
def test_prompts_have_the_bits_of_decode(
    table: OpTable, rng: torch.Generator, name: str, width: int
) -> None:
    if width == SHARED and name == "q6":
        pytest.skip("shared rows are stored in one format")
    for before in PARTITIONS:
        past, rows = before + _integer(rng, 0, 70), _integer(rng, 17, 150)
        case = _case(rng, name, width, (past, rows))
        whole = case.attend(table)
        first = int(case.batch.row_starts[1])
        whole = whole[first : first + rows]
        described = f"{past} + {rows}, {tuple(case.q.shape[1:])}, {case.scoring}"
        assert whole.isfinite().all(), described
        starts = [0, rows - 16, *(_integer(rng, 0, rows - 16) for _ in range(3))]
        parts = [(start, start + _integer(rng, 1, 16)) for start in starts]
        parts += [(0, rows), (1, rows), (_integer(rng, 2, 10), rows)]
        for start, end in parts:
            got = case.part(table, 1, start, end)
            assert torch.equal(_bits(got), _bits(whole[start:end])), f"{described}: {start}, {end}"


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_prompts_equal_float64(table: OpTable, rng: torch.Generator, name: str, width: int) -> None:
    for past, rows in ((0, 150), (501, 40), (4090, 33)):
        case = _case(rng, name, width, (past, rows))
        got = case.attend(table).cpu()
        sinks = None if case.sinks is None else case.sinks.cpu()
        batch = case.batch.to(torch.device("cpu"))
        exact, _ = exact_attention(case.q.cpu().float(), batch, case.scoring, sinks)
        assert_norm_within(got, exact.view(got.shape), GPU_BOUND)
