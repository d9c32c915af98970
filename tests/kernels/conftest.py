"""The op table as a fixture: the reference and every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch

from exl_core.ops.open import available_isas, get_table
from exl_core.ops.table import OpTable

TABLES = ["reference", *(f"cpu-{isa}" for isa in available_isas())]


@pytest.fixture(scope="session", params=TABLES)
def table(request: pytest.FixtureRequest) -> OpTable:
    name, _, isa = request.param.partition("-")
    return get_table(name, isa=isa or None, threads=2)


@pytest.fixture(scope="session", params=[name for name in TABLES if name != "reference"])
def kernels(request: pytest.FixtureRequest) -> OpTable:
    """Compiled tables only."""
    return get_table("cpu", isa=request.param.removeprefix("cpu-"), threads=2)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Fresh numbers for every test, the same on every run."""
    return torch.Generator().manual_seed(hash_of(request.node.nodeid))


def hash_of(text: str) -> int:
    value = 0
    for char in text:
        value = (value * 31 + ord(char)) % 2**31
    return value
