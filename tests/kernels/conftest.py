"""Backends as fixtures: the reference, every instruction set of this machine's CPU, and a GPU.

The GPU is a parameter with the mark `cuda`, which the default tests deselect. Operands are on the
CPU for all backends; `device_table.py` copies those of the GPU.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from device_table import DeviceTable

from exl_core.ops.open import available_isas, get_table
from exl_core.ops.table import OpTable

COMPILED = [f"cpu-{isa}" for isa in available_isas()]
ON_GPU = pytest.param("cuda", marks=pytest.mark.cuda)


def open_table(name: str, threads: int = 2, *, batch_invariant: bool = False) -> OpTable:
    backend, _, isa = name.partition("-")
    opened = get_table(backend, isa=isa or None, threads=threads, batch_invariant=batch_invariant)
    return cast(OpTable, DeviceTable(opened)) if backend == "cuda" else opened


@pytest.fixture(scope="session", params=["reference", *COMPILED, ON_GPU])
def table(request: pytest.FixtureRequest) -> OpTable:
    """Every backend."""
    return open_table(request.param)


@pytest.fixture(scope="session", params=["reference", *COMPILED])
def cpu_table(request: pytest.FixtureRequest) -> OpTable:
    """Backends of the CPU. They check operands, and take shapes and values that no GPU takes."""
    return open_table(request.param)


@pytest.fixture(scope="session")
def reference() -> OpTable:
    return open_table("reference")


@pytest.fixture(scope="session", params=COMPILED)
def kernels(request: pytest.FixtureRequest) -> OpTable:
    """Compiled CPU backends."""
    return open_table(request.param)


@pytest.fixture(scope="session", params=[*COMPILED, ON_GPU])
def invariant_table(request: pytest.FixtureRequest) -> OpTable:
    """Compiled backends in the mode whose results do not depend on the batch."""
    return open_table(request.param, batch_invariant=True)


@pytest.fixture(scope="session", params=[ON_GPU])
def gpu_table(request: pytest.FixtureRequest) -> OpTable:
    """The GPU, for shapes and types that matter to its kernels only."""
    return open_table(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Generator seeded by the test's name: other numbers in every test, the same in every run."""
    return torch.Generator().manual_seed(hash_of(request.node.nodeid))


def hash_of(text: str) -> int:
    value = 0
    for char in text:
        value = (value * 31 + ord(char)) % 2**31
    return value
