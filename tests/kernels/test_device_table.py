"""`DeviceTable` over a CPU backend: the copies of memory change no result and lose no write."""

from __future__ import annotations

import pytest
import torch
from device_table import DeviceTable
from kernel_support import normal, packed

from exl_core.ops.attention import CacheLayer
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable

EPS = 1e-5


@pytest.fixture
def direct() -> OpTable:
    return get_table("cpu", threads=1)


def test_results_are_those_of_the_table_on_strided_operands(
    direct: OpTable, rng: torch.Generator
) -> None:
    x, norm = normal(rng, 5, 40)[:, 3:27], RmsNorm(normal(rng, 24), EPS)
    y = DeviceTable(direct).rms_norm(x, norm)
    assert torch.equal(y, direct.rms_norm(x, norm))


def test_in_place_ops_change_their_operand_and_no_gap(
    direct: OpTable, rng: torch.Generator
) -> None:
    fused, norm = normal(rng, 5, 40), RmsNorm(normal(rng, 8), EPS)
    expected = fused.clone()
    direct.rms_norm_heads_(expected[:, 3:27].view(5, 3, 8), norm)
    DeviceTable(direct).rms_norm_heads_(fused[:, 3:27].view(5, 3, 8), norm)
    assert torch.equal(fused, expected)


def test_an_output_operand_is_returned_itself(direct: OpTable, rng: torch.Generator) -> None:
    table = DeviceTable(direct)
    w, x = packed(direct, normal(rng, 6, 24)), normal(rng, 3, 24)
    norm = RmsNorm(normal(rng, 24), EPS)
    out = torch.full((3, 6), torch.nan)
    assert table.norm_linear(x, norm, w, out) is out
    assert torch.equal(out, direct.norm_linear(x, norm, w))


def test_operands_that_share_memory_share_it_on_the_device(
    direct: OpTable, rng: torch.Generator
) -> None:
    qkv, caches = normal(rng, 4, 3 * 16), [torch.zeros(2, 1, 4, 16) for _ in range(4)]
    _, key, value = torch.split(qkv.view(4, 3, 16), [1, 1, 1], dim=1)
    slots = torch.tensor([5, 0, 3, 6])
    direct.write_kv(key, value, CacheLayer(*caches[:2]), slots)
    DeviceTable(direct).write_kv(key, value, CacheLayer(*caches[2:]), slots)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
