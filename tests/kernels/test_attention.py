"""Paged attention over caches of values and of codes: decode, prefill and both mixed."""

from __future__ import annotations

import pytest
import torch
from kernel_support import assert_within, attention_input, is_gpu, normal, strided_rows
from paged_support import (
    PagedBatch,
    attention,
    batch_of,
    check_attention,
)
from torch import Tensor

from exl_core.ops.table import OpTable
from support.kv_caches import FORMATS
from support.profiles import first_by_default

MIXED = [(0, 1), (7, 1), (299, 1), (0, 37), (45, 70), (131, 2), (600, 1), (0, 9)]
CODED = ["fp8", "q8", "q6", "q4"]
CODED_MIX = [(0, 1), (7, 1), (299, 1), (45, 70), (131, 2), (0, 9)]


@pytest.mark.parametrize("name", ["f16", "f32"])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(9, 3, 64), (4, 1, 256), (2, 2, 72)])
def test_decode_and_prefill_mix_in_one_call(
    *,
    table: OpTable,
    rng: torch.Generator,
    name: str,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    d: int,
) -> None:
    batch = batch_of(rng, name, MIXED, (kv_heads, d, page_size))
    check_attention(table, attention_input(table, rng, batch.rows, q_heads, d), batch)


@pytest.mark.parametrize("d", [1, 8, 20, 37, 96, 120, 128, 512])
def test_any_head_dim_works(cpu_table: OpTable, rng: torch.Generator, d: int) -> None:
    batch = batch_of(rng, "f16", [(70, 1), (3, 21)], (2, d, 16))
    check_attention(cpu_table, strided_rows(rng, batch.rows, 4, d), batch)


# Smaller than a page, across pages, off the 64-key blocks by one, larger than any sequence.
@pytest.mark.parametrize("window", first_by_default([1, 63, 64, 200, 5, 16, 65, 10_000], 4))
@pytest.mark.parametrize("page_size", [16, 64])
def test_window_hides_older_keys(
    table: OpTable, rng: torch.Generator, window: int, page_size: int
) -> None:
    batch = batch_of(rng, "f16", MIXED, (1, 24, page_size))
    check_attention(table, attention_input(table, rng, batch.rows, 3, 24), batch, window=window)


@pytest.mark.parametrize("window", [0, 40])
def test_softcap_applies_before_the_mask(
    cpu_table: OpTable, rng: torch.Generator, window: int
) -> None:
    batch = batch_of(rng, "f32", MIXED, (2, 32, 32))
    q = 20 * strided_rows(rng, batch.rows, 4, 32)
    check_attention(cpu_table, q, batch, window=window, softcap=15.0)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("name", ["f32", "f16", *CODED])
def test_sinks_take_weight_from_the_keys(
    table: OpTable, rng: torch.Generator, name: str, window: int
) -> None:
    heads = 6
    batch = batch_of(rng, name, CODED_MIX, (2, 32, 16))
    sinks = 3 * normal(rng, heads)
    q = attention_input(table, rng, batch.rows, heads, 32)
    check_attention(table, q, batch, window=window, sinks=sinks)


def test_sinks_count_once_where_keys_are_split(table: OpTable, rng: torch.Generator) -> None:
    batch = batch_of(rng, "f16", [(5000, 1), (3000, 40)], (1, 16, 64))
    sinks = torch.tensor([9.0, -2.0])  # about the logarithm of the number of keys
    check_attention(table, attention_input(table, rng, batch.rows, 2, 16), batch, sinks=sinks)


def test_sinks_far_from_the_scores(cpu_table: OpTable, rng: torch.Generator) -> None:
    batch = batch_of(rng, "f32", CODED_MIX, (2, 16, 16))
    q = normal(rng, batch.rows, 4, 16)
    sinks = torch.tensor([1e30, -1e30, 200.0, -200.0])

    y = attention(cpu_table, q, batch, sinks=sinks).view(q.shape)

    plain = attention(cpu_table, q, batch).view(q.shape)
    assert torch.equal(y[:, [1, 3]], plain[:, [1, 3]])
    assert not y[:, [0, 2]].abs().gt(1e-30).any()


def test_sinks_of_another_number_of_heads_are_refused(
    cpu_table: OpTable, rng: torch.Generator
) -> None:
    batch = batch_of(rng, "f32", [(5, 1)], (2, 16, 16))
    with pytest.raises(ValueError, match="sinks"):
        attention(cpu_table, normal(rng, 1, 4, 16), batch, sinks=torch.zeros(2))


@pytest.mark.parametrize("rows", first_by_default([1, 2, 17, 65, 300, 5, 33, 64, 130], 5))
def test_every_chunk_length_matches(table: OpTable, rng: torch.Generator, rows: int) -> None:
    """Dot products, tiles and split keys, and the limits between them."""
    batch = batch_of(rng, "f16", [(1500, rows)], (1, 16, 64))
    check_attention(table, normal(rng, rows, 2, 16), batch)


def test_sixteen_query_heads_share_one_kv_head(table: OpTable, rng: torch.Generator) -> None:
    batch = batch_of(rng, "f16", MIXED, (1, 16, 16))
    check_attention(table, attention_input(table, rng, batch.rows, 16, 16), batch)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "d", "page_size"),
    first_by_default(
        [(9, 3, 64, 256), (2, 2, 96, 48), (6, 2, 32, 16), (2, 1, 256, 16), (8, 2, 128, 64)], 3
    ),
)
def test_decode_and_prefill_mix_over_codes(
    *,
    cpu_table: OpTable,
    rng: torch.Generator,
    name: str,
    q_heads: int,
    kv_heads: int,
    d: int,
    page_size: int,
) -> None:
    batch = batch_of(rng, name, CODED_MIX, (kv_heads, d, page_size))
    check_attention(cpu_table, strided_rows(rng, batch.rows, q_heads, d), batch)


@pytest.mark.parametrize("d", [1, 20, 80])
def test_fp8_takes_any_head_dim(cpu_table: OpTable, rng: torch.Generator, d: int) -> None:
    batch = batch_of(rng, "fp8", [(70, 1), (3, 21)], (2, d, 16))
    check_attention(cpu_table, strided_rows(rng, batch.rows, 4, d), batch)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("window", first_by_default([63, 200, 1, 64], 2))
def test_window_and_softcap_apply_to_codes(
    cpu_table: OpTable, rng: torch.Generator, name: str, window: int
) -> None:
    batch = batch_of(rng, name, CODED_MIX, (1, 64, 16))
    q = 5 * strided_rows(rng, batch.rows, 3, 64)
    check_attention(cpu_table, q, batch, window=window, softcap=15.0)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("rows", first_by_default([1, 17, 130, 5, 65], 3))
def test_every_chunk_length_matches_over_codes(
    table: OpTable, rng: torch.Generator, name: str, rows: int
) -> None:
    batch = batch_of(rng, name, [(1100, rows)], (1, 32, 64))
    check_attention(table, normal(rng, rows, 2, 32), batch)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("rows", [1, 40])
def test_nan_scales_of_codes_reach_the_result(
    cpu_table: OpTable, rng: torch.Generator, name: str, rows: int
) -> None:
    batch = batch_of(rng, name, [(5, rows)], (1, 32, 16))
    batch.key_cache.view(torch.uint8)[int(batch.page_table[0, 0]), 0, 2] = 255

    y = attention(cpu_table, normal(rng, rows, 2, 32), batch)

    assert y.isnan().all()


def test_large_scores_do_not_overflow(cpu_table: OpTable, rng: torch.Generator) -> None:
    batch = batch_of(rng, "f32", MIXED, (1, 16, 16))
    y = attention(cpu_table, 1e4 * normal(rng, batch.rows, 2, 16), batch)
    assert y.isfinite().all()


@pytest.mark.parametrize(("past", "rows"), [(40, 1), (700, 1), (0, 60)])
def test_keys_outside_the_window_are_not_read(
    cpu_table: OpTable, rng: torch.Generator, past: int, rows: int
) -> None:
    """Another sequence may have reused the pages before the window."""
    batch = batch_of(rng, "f16", [(past, rows)], (1, 16, 16))
    q = normal(rng, rows, 2, 16)
    window = 21
    clean = attention(cpu_table, q, batch, window=window)
    for position in range(max(0, past - window + 1)):
        page = int(batch.page_table[0, position // 16])
        for cache in (batch.key_cache, batch.value_cache):
            cache[page, :, position % 16] = torch.nan

    assert torch.equal(attention(cpu_table, q, batch, window=window), clean)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
@pytest.mark.parametrize("d", [16, 64])
def test_nan_in_the_cache_reaches_the_result(
    table: OpTable, rng: torch.Generator, rows: int, which: str, d: int
) -> None:
    batch = batch_of(rng, "f16", [(5, rows)], (1, d, 16))
    getattr(batch, which)[int(batch.page_table[0, 0]), 0, 2, 3] = torch.nan

    y = attention(table, normal(rng, rows, 2, d), batch).view(rows, 2, d)

    hit = y if which == "key_cache" else y[..., 3]
    assert hit.isnan().all()


@pytest.mark.parametrize("rows", [1, 20])
def test_scores_of_minus_infinity_have_no_weight(
    cpu_table: OpTable, rng: torch.Generator, rows: int
) -> None:
    batch = batch_of(rng, "f32", [(300, rows)], (1, 16, 16))
    q = normal(rng, rows, 1, 16).abs()
    for position in range(130):  # the first blocks of keys, entirely
        page = int(batch.page_table[0, position // 16])
        batch.key_cache[page, :, position % 16] = -torch.inf

    y = attention(cpu_table, q, batch)

    assert_within(y, attention_without(batch, q, 130), 1e-4)


def attention_without(batch: PagedBatch, q: Tensor, hidden: int) -> Tensor:
    """Attention in float64 to all positions but the first `hidden`."""
    rows, past = q.shape[0], int(batch.past_lens[0])
    keys = batch.rows_of(batch.key_cache, 0, past + rows)[0, hidden:]
    values = batch.rows_of(batch.value_cache, 0, past + rows)[0, hidden:]
    ages = torch.arange(past, past + rows)[:, None] - torch.arange(hidden, past + rows)
    return torch.nn.functional.scaled_dot_product_attention(
        q[:, 0].double(), keys, values, attn_mask=ages >= 0
    )


def test_a_sequence_does_not_depend_on_its_neighbors(table: OpTable, rng: torch.Generator) -> None:
    """Bit for bit on the CPU. On a GPU the number of sequences decides how keys are split."""
    name, d = ("q8", 128) if is_gpu(table) else ("f16", 16)
    batch = batch_of(rng, name, MIXED, (1, d, 16))
    q = normal(rng, batch.rows, 2, d)
    together = attention(table, q, batch)
    starts = batch.row_starts.tolist()

    for seq in range(len(MIXED)):
        rows = slice(starts[seq], starts[seq + 1])
        alone = attention(table, q[rows].contiguous(), batch.only(seq))
        if is_gpu(table):
            assert (alone - together[rows]).double().norm() <= 1e-3 * alone.double().norm()
        else:
            assert torch.equal(alone, together[rows])


# ---- shapes that matter to the kernels of the GPU ------------------------------------------------

ONE_ROW = [(0, 1), (7, 1), (15, 1), (16, 1), (299, 1), (31, 1), (1500, 1), (63, 1)]
LONG_MIX = [*MIXED[:6], (9, 0), (600, 1), (0, 9), (3, 16), (250, 17), (1000, 3), (20, 130)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [64, 96, 128, 256, 288, 512])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (9, 3), (16, 1)], ids=str)
def test_one_row_of_each_sequence(
    gpu_table: OpTable, rng: torch.Generator, name: str, d: int, heads: tuple[int, int]
) -> None:
    batch = batch_of(rng, name, ONE_ROW, (heads[1], d, 256))
    check_attention(gpu_table, attention_input(gpu_table, rng, batch.rows, heads[0], d), batch)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [64, 96, 128, 256, 288, 512])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
def test_few_and_many_rows_in_one_call(
    gpu_table: OpTable, rng: torch.Generator, name: str, d: int, heads: tuple[int, int]
) -> None:
    batch = batch_of(rng, name, LONG_MIX, (heads[1], d, 16))
    check_attention(gpu_table, attention_input(gpu_table, rng, batch.rows, heads[0], d), batch)


@pytest.mark.parametrize("name", ["f32", "f16", "fp8"])
@pytest.mark.parametrize("d", [8, 72, 80, 120, 200, 264, 504])
def test_heads_of_other_sizes(gpu_table: OpTable, rng: torch.Generator, name: str, d: int) -> None:
    batch = batch_of(rng, name, LONG_MIX, (2, d, 64))
    check_attention(gpu_table, normal(rng, batch.rows, 4, d), batch)


@pytest.mark.parametrize("name", ["f16", "q6", "q4"])
@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("window", [1, 5, 16, 63, 64, 65, 200, 10_000])
@pytest.mark.parametrize("d", [64, 512])
def test_window_hides_older_keys_of_every_format(
    *, gpu_table: OpTable, rng: torch.Generator, name: str, page_size: int, window: int, d: int
) -> None:
    batch = batch_of(rng, name, LONG_MIX, (2, d, page_size))
    check_attention(gpu_table, normal(rng, batch.rows, 8, d), batch, window=window)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("name", ["f16", "q4"])
@pytest.mark.parametrize("d", [128, 512])
def test_softcap_applies_to_every_format(
    gpu_table: OpTable, rng: torch.Generator, name: str, window: int, d: int
) -> None:
    """Scores are up to 15, so that their roundings count for more."""
    batch = batch_of(rng, name, LONG_MIX, (2, d, 256))
    q = 8 * normal(rng, batch.rows, 8, d)
    check_attention(gpu_table, q, batch, window=window, softcap=15.0, gpu_bound=6e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("name", ["f16", "q4"])
@pytest.mark.parametrize("d", [128, 512])
def test_every_number_of_rows(
    gpu_table: OpTable, rng: torch.Generator, name: str, rows: int, d: int
) -> None:
    batch = batch_of(rng, name, [(1500, rows)], (2, d, 256))
    check_attention(gpu_table, normal(rng, rows, 8, d), batch)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("past", [4095, 9999])
@pytest.mark.parametrize("d", [128, 512])
def test_long_sequences_are_split_the_same_way_each_time(
    gpu_table: OpTable, rng: torch.Generator, name: str, past: int, d: int
) -> None:
    batch = batch_of(rng, name, [(past, 1)], (8, d, 256))
    q = normal(rng, 1, 32, d).half()
    check_attention(gpu_table, q, batch)
    first = attention(gpu_table, q, batch)
    for _ in range(20):
        assert torch.equal(attention(gpu_table, q, batch), first)
