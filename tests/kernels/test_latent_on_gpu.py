"""Latent attention of prompts on a GPU: the expanded form against float64, and the absorbed form.

The batch-invariant mode has the absorbed form only. In the other mode, long sequences behind short
ones take the expanded form.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from device_table import DeviceTable
from paged_support import batch_of
from test_attention_fused import angles
from test_latent import DEEPSEEK, MISTRAL4, TINY, Sizes, attend, expanded, operands, shared

from exl_core.ops.backends.cuda import latent
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable

pytestmark = pytest.mark.cuda

SEQUENCES = [(17, 1), (0, 40), (0, 300), (300, 400), (1500, 256)]
GLM = Sizes(heads=5, plain=192, rotated=64, rank=512, value=256)
UNEVEN = Sizes(heads=7, plain=24, rotated=16, rank=112, value=72)  # values longer than keys
MANY = Sizes(heads=128, plain=32, rotated=64, rank=512, value=32)
WIDER = Sizes(heads=20, plain=48, rotated=64, rank=512, value=64)

# Ends of tiles, one tile, several that one block adds, and several that blocks add in two steps.
FEW_ROWS_EACH = {
    "tile": [(127, 1)],
    "tile-and-row": [(128, 1)],
    "nine-parts": [(1100, 1)],
    "most-parts": [(9000, 1)],
    "drafts": [(1100, 2), (126, 3), (0, 4)],
    "batch": [(past, 1) for past in (0, 1, 63, 127, 128, 300, 511, 1500) * 5],
}


def open_table(*, batch_invariant: bool = False) -> OpTable:
    opened = get_table("cuda", isa=None, threads=2, batch_invariant=batch_invariant)
    return cast(OpTable, DeviceTable(opened))


@pytest.mark.parametrize(
    "sizes",
    [TINY, UNEVEN, MISTRAL4, DEEPSEEK, GLM],
    ids=["tiny", "uneven", "mistral4", "deepseek", "glm"],
)
@pytest.mark.parametrize("kv_format", ["f32", "f16", "fp8", "q8", "q4"])
def test_prompts_in_the_expanded_form(
    *, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator, kv_format: str, sizes: Sizes
) -> None:
    monkeypatch.setattr(latent, "LEAST_SAVING_S", -1.0)  # also for few rows
    batch = batch_of(rng, kv_format, SEQUENCES, (1, sizes.rotated + sizes.rank, 256))
    rotation = angles(rng, batch.rows, sizes.rotated // 2)
    state = rng.get_state()
    reference = cast(OpTable, ReferenceTable(1))
    wanted = shared(batch)
    exact = expanded(
        operands(reference, rng.set_state(state), batch.rows, sizes), batch, wanted, rotation
    )
    results, written = [], []
    for is_invariant in (False, True):
        table = open_table(batch_invariant=is_invariant)
        cache = shared(batch)
        given = operands(table, rng.set_state(state), batch.rows, sizes)
        results.append(attend(table, given, batch, cache, rotation).float())
        written.append(cache.keys)
    # Few heads at a time.
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 4 << 20)
    table = open_table()
    given = operands(table, rng.set_state(state), batch.rows, sizes)
    parts = attend(table, given, batch, shared(batch), rotation).float()

    long = int(batch.row_starts[2])
    assert torch.equal(written[0].view(torch.uint8), written[1].view(torch.uint8))
    assert not torch.equal(results[0][long:], results[1][long:]), "long sequences are expanded"
    for y in (*results, parts):
        assert (y - exact).abs().max() <= 1e-2 * exact.abs().max()


@pytest.mark.parametrize(
    ("kv_format", "sizes"),
    [(name, DEEPSEEK) for name in ("f32", "f16", "fp8", "q8", "q4")]
    + [("f16", WIDER), ("q8", WIDER), ("f16", MANY)],
    ids=lambda x: x if isinstance(x, str) else f"{x.heads}-heads",
)
@pytest.mark.parametrize("sequences", FEW_ROWS_EACH.values(), ids=FEW_ROWS_EACH)
@pytest.mark.parametrize("is_invariant", [False, True], ids=["normal", "invariant"])
def test_few_rows_over_many_keys(
    *,
    rng: torch.Generator,
    kv_format: str,
    sizes: Sizes,
    sequences: list[tuple[int, int]],
    is_invariant: bool,
) -> None:
    batch = batch_of(rng, kv_format, sequences, (1, sizes.rotated + sizes.rank, 256))
    rotation = angles(rng, batch.rows, sizes.rotated // 2)
    state = rng.get_state()
    reference, table = cast(OpTable, ReferenceTable(1)), open_table(batch_invariant=is_invariant)
    plain = operands(reference, rng.set_state(state), batch.rows, sizes)
    given = operands(table, rng.set_state(state), batch.rows, sizes)
    exact = expanded(plain, batch, shared(batch), rotation)
    cache = shared(batch)
    first = attend(table, given, batch, cache, rotation).float()
    again = attend(table, given, batch, cache, rotation).float()  # counters are zero again
    assert torch.equal(first, again)
    assert (first - exact).abs().max() <= 1e-2 * exact.abs().max()


def test_prompts_are_expanded_where_that_is_faster() -> None:
    sizes = latent.Sizes(*DEEPSEEK)
    saved = latent.LEAST_SAVING_S
    assert sizes.saving_s(2048, 0) > saved
    assert sizes.saving_s(2048, 14_336) > saved
    assert sizes.saving_s(512, 0) < saved  # measured
    short = sizes._replace(rank=64)
    assert short.saving_s(2048, 0) < saved, "a cached row is shorter than a key"
