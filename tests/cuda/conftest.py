"""The GPU, its op table, and random numbers of which each test has its own."""

from __future__ import annotations

import pytest
import torch

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.open import get_table


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def ops() -> CudaTable:
    table = get_table("cuda", threads=1)
    assert isinstance(table, CudaTable)
    return table


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))
