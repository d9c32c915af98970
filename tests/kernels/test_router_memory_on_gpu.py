"""Memory that the router's kernels write: the caller keeps it until they are launched."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kernel_support import normal, packed
from test_moe_on_gpu import FORMS, Experts

from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.moe import ExpertLayer, Routing
from exl_core.ops.table import OpTable

pytestmark = pytest.mark.cuda

SIZES = (512, 1024, 2048, 4096)  # bytes of the blocks that torch's allocator gives to small tensors
MARK = 7


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_no_kernel_writes_to_freed_memory(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Other tensors take all free blocks before each launch, as those of another thread may."""
    experts, table = Experts(gpu_table, rng, FORMS["4-bits"], 8), cast(Any, gpu_table).on_device
    w = packed(gpu_table, normal(rng, 8, experts.d) / experts.d**0.5)
    norm = RmsNorm(torch.ones(experts.d, device=table.device), 1e-5)
    layer = ExpertLayer(norm, w, Routing(4), None, experts.mlp())
    x = (3 * normal(rng, rows, experts.d)).to(table.device)
    expected = table.add_experts_(x.clone(), layer)
    chosen = table.route(x, w, Routing(4))
    held: list[torch.Tensor] = []
    call = table._gpu.call

    def call_after_others(name: str, *operands: object) -> None:
        for size in SIZES:
            for _ in range(8):
                held.append(torch.full((size,), MARK, dtype=torch.uint8, device=table.device))
        call(name, *operands)

    monkeypatch.setattr(table._gpu, "call", call_after_others)
    found = table.add_experts_(x.clone(), layer)
    assert torch.equal(table.route(x, w, Routing(4)).weights, chosen.weights)
    assert torch.equal(found, expected)
    assert all(bool((one == MARK).all()) for one in held)
