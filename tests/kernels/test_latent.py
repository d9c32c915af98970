"""Latent attention: the absorbed form on every backend against the expanded one in float64."""

from __future__ import annotations

from typing import NamedTuple, cast

import pytest
import torch
from kernel_support import is_gpu, normal
from paged_support import PagedBatch, batch_of
from test_attention_fused import angles, bound_batch, slots_of
from torch import Tensor

from exl_core.ops.attention import CacheLayer, Scoring
from exl_core.ops.backends.cpu import latent
from exl_core.ops.backends.cpu.table import CpuTable
from exl_core.ops.backends.reference.latent import ReferenceLatentOps
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.cache_rows import decode_rows
from exl_core.ops.checks import OpInputError
from exl_core.ops.latent import HeadUp
from exl_core.ops.table import OpTable

MIXED = [(0, 1), (299, 1), (0, 37), (131, 2), (600, 1), (5, 0), (0, 9)]
PROMPTS = [(0, 70), (300, 400), (17, 1), (520, 300), (6000, 64)]  # 64 rows, 6000: absorbed
SCALE = 0.1


class Sizes(NamedTuple):
    heads: int
    plain: int
    rotated: int
    rank: int
    value: int


TINY = Sizes(heads=3, plain=24, rotated=32, rank=96, value=40)
MISTRAL4 = Sizes(heads=20, plain=64, rotated=64, rank=256, value=128)
DEEPSEEK = Sizes(heads=16, plain=128, rotated=64, rank=512, value=128)


class Operands(NamedTuple):
    q: Tensor
    latent: Tensor
    key: Tensor
    up: HeadUp


def operands(table: OpTable, rng: torch.Generator, rows: int, sizes: Sizes) -> Operands:
    """Values that float16 holds, because a GPU rounds to it."""

    def values(*shape: int) -> Tensor:
        return normal(rng, *shape).half().float()

    keys = values(sizes.heads, sizes.rank, sizes.plain) / 16
    mixed = values(sizes.heads, sizes.value, sizes.rank) / 16
    return Operands(
        values(rows, sizes.heads * (sizes.plain + sizes.rotated)),
        values(rows, sizes.rank),
        values(rows, sizes.rotated),
        table.new_latent_up(keys.half(), mixed.half()),
    )


def shared(batch: PagedBatch) -> CacheLayer:
    keys = batch.key_cache.clone()
    return CacheLayer(keys, keys)


def attend(
    table: OpTable,
    given: Operands,
    batch: PagedBatch,
    cache: CacheLayer,
    rotation: tuple[Tensor, Tensor],
) -> Tensor:
    bound = bound_batch(table, batch, slots_of(batch), *rotation)
    scoring = Scoring(SCALE)
    return cast(Tensor, table.attend_latent(*given, batch=bound, cache=cache, scoring=scoring))


def expanded(
    given: Operands, batch: PagedBatch, cache: CacheLayer, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    table = ReferenceTable(1)
    bound = bound_batch(cast(OpTable, table), batch, slots_of(batch), *rotation)
    return ReferenceLatentOps.attend_expanded(
        *given, batch=bound, cache=cache, scoring=Scoring(SCALE)
    )


@pytest.mark.parametrize("sizes", [TINY, MISTRAL4, DEEPSEEK], ids=["tiny", "mistral4", "deepseek"])
@pytest.mark.parametrize("kv_format", ["f32", "f16", "fp8", "q8", "q4"])
@pytest.mark.parametrize(
    "sequences", [[(17, 1)], [(0, 3)], MIXED], ids=["decode", "short-prompt", "mixed"]
)
def test_absorbed_form_equals_the_expanded_one(
    *,
    table: OpTable,
    rng: torch.Generator,
    sequences: list[tuple[int, int]],
    kv_format: str,
    sizes: Sizes,
) -> None:
    batch = batch_of(rng, kv_format, sequences, (1, sizes.rotated + sizes.rank, 16))
    rotation = angles(rng, batch.rows, sizes.rotated // 2)
    state = rng.get_state()
    reference = cast(OpTable, ReferenceTable(1))
    plain = operands(reference, rng.set_state(state), batch.rows, sizes)
    given = operands(table, rng.set_state(state), batch.rows, sizes)
    wanted, cache = shared(batch), shared(batch)

    expected = expanded(plain, batch, wanted, rotation)
    y = attend(table, given, batch, cache, rotation).float()

    # Rounding of the cached row may differ by one step where its input differs by one rounding.
    written = [decode_rows(one.keys).nan_to_num() for one in (cache, wanted)]
    step = {"f32": 1e-5, "f16": 2e-3, "fp8": 0.13, "q8": 0.05, "q4": 0.8}[kv_format]
    assert (written[0] - written[1]).abs().max() <= step * (1 + written[1].abs().max() / 4)
    tolerance = 1e-2 if is_gpu(table) else 1e-5
    if kv_format not in ("f32", "f16"):
        tolerance = max(tolerance, 2e-3)
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("sizes", [TINY, DEEPSEEK], ids=["tiny", "deepseek"])
@pytest.mark.parametrize("kv_format", ["f32", "f16", "fp8", "q8", "q4"])
def test_prompts_in_the_expanded_form_equal_the_absorbed_one(
    *,
    monkeypatch: pytest.MonkeyPatch,
    rng: torch.Generator,
    kv_format: str,
    sizes: Sizes,
) -> None:
    batch = batch_of(rng, kv_format, PROMPTS, (1, sizes.rotated + sizes.rank, 256))
    rotation = angles(rng, batch.rows, sizes.rotated // 2)
    invariant = cast(OpTable, CpuTable(None, 2, batch_invariant=True))
    plain = cast(OpTable, CpuTable(None, 2))
    state = rng.get_state()
    results, written = [], []
    for table in (invariant, plain):
        given = operands(table, rng.set_state(state), batch.rows, sizes)
        assert (given.up.expanded_keys is None) == table.is_batch_invariant
        cache = shared(batch)
        results.append(attend(table, given, batch, cache, rotation))
        written.append(cache.keys)
    # One head at a time, and as a part of the next pass.
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 1)
    alone = attend(plain, given, batch, shared(batch), rotation)

    assert torch.equal(written[0].view(torch.uint8), written[1].view(torch.uint8))
    assert torch.equal(alone, results[1])
    assert not torch.equal(*results), "some prompt is expanded"
    assert (results[1] - results[0]).abs().max() <= 1e-5 * results[0].abs().max()


def test_prompts_are_expanded_where_that_is_faster() -> None:
    sizes = latent.Sizes(*DEEPSEEK[1:])
    assert sizes.is_expanded(512, 0)
    assert sizes.is_expanded(512, 30_000)
    assert not sizes.is_expanded(1, 0)
    assert not sizes.is_expanded(192, 2048)  # measured
    short = latent.Sizes(plain=128, rotated=64, rank=64, value=128)
    assert not short.is_expanded(512, 0), "a cached row is shorter than a key"


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_head_linear_multiplies_each_head(table: OpTable, rng: torch.Generator, rows: int) -> None:
    weight = normal(rng, 3, 40, 24).half()
    x = normal(rng, rows, 3, 32).half().float()[..., 8:]  # heads farther apart than their length
    out = torch.zeros(rows, 3, 48)

    heads = table.new_head_linear(weight)
    y = table.head_linear(x, heads).float()
    table.head_linear(x, heads, out[..., :40])

    exact = torch.einsum("mhk,hnk->mhn", x.double(), weight.double())
    bound = 2e-3 if is_gpu(table) else 1e-6
    assert heads.num_heads == 3
    common = table.head_linear(x[:, :1].expand(-1, 3, -1), heads).float()
    first = torch.einsum("mk,hnk->mhn", x[:, 0].double(), weight.double())
    if rows:
        assert (common - first).abs().max() <= bound * exact.abs().max()
        assert (y - exact).abs().max() <= bound * exact.abs().max()
        assert (out[..., :40] - exact).abs().max() <= bound * exact.abs().max()
        assert not out[..., 40:].any()


def test_head_linear_refuses_heads_that_overlap(kernels: OpTable, rng: torch.Generator) -> None:
    heads = kernels.new_head_linear(normal(rng, 3, 8, 24))
    x = normal(rng, 4, 48).as_strided((4, 3, 24), (48, 12, 1))
    with pytest.raises(ValueError, match="head_linear: x"):
        kernels.head_linear(x, heads)


def test_other_head_counts_are_refused(rng: torch.Generator) -> None:
    table = ReferenceTable(1)
    heads = table.new_head_linear(normal(rng, 3, 8, 24))
    with pytest.raises(OpInputError, match="head_linear: x"):
        table.head_linear(normal(rng, 4, 2, 24), heads)
