"""NVLink multicast stays off: in the environment of every rank, in NCCL, and in the sources."""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import exl_core
import exl_kernels
from exl_core.parallel import nccl_library, processes

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables of NCCL's multicast (NVLS) and of that of torch's symmetric memory."""
MULTICAST = re.compile(r"multimem|multicast_ptr|symmetric_memory|symm_mem|cuMulticast|ncclMemAlloc")


@pytest.fixture(params=[None, "1"], ids=["unset", "on"])
def users_value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OFF:
        if request.param is None:
            monkeypatch.setenv(name, "")  # so that the test's end removes what the code sets
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, request.param)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


@pytest.mark.usefixtures("users_value")
def test_every_rank_starts_with_multicast_off() -> None:
    """The environment that a process is started with, whatever the user's says."""
    processes.start_ahead(3, may_use_gpu=False)
    try:
        assert len(processes._ahead) == 2
        for one in processes._ahead:
            variables = environment_of(one.process.pid)
            assert {name: variables.get(name) for name in OFF} == OFF
    finally:
        processes.drop_ahead()


def environment_of(process: int) -> dict[str, str]:
    """Empty for a moment after the process has started."""
    until_s = time.monotonic() + 10.0
    while not (data := Path(f"/proc/{process}/environ").read_bytes()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return dict(pair.split("=", 1) for pair in os.fsdecode(data).split("\0") if "=" in pair)


@pytest.mark.usefixtures("users_value")
def test_multicast_is_off_before_nccl_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, and processes that torchrun has started."""
    seen: list[dict[str, str | None]] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace()

    def opened(_: str) -> Library:
        seen.append({name: os.environ.get(name) for name in OFF})
        return Library()

    monkeypatch.setattr(ctypes, "CDLL", opened)
    nccl_library.load()
    assert seen == [OFF]


def test_no_source_uses_multicast_memory() -> None:
    """Ranks share memory of the driver, without torch's symmetric memory or NCCL's windows."""
    python, kernels = (Path(one.__file__ or "").parent for one in (exl_core, exl_kernels))
    csrc = kernels.parents[1]
    kinds = (".py", ".cu", ".cuh", ".cpp", ".h", ".hpp")
    folders = (python, kernels, csrc / "src", csrc / "include")
    sources = [one for folder in folders for one in folder.rglob("*") if one.suffix in kinds]
    assert len(sources) > 200
    found = {
        str(file): match[0]
        for file in sources
        for match in MULTICAST.finditer(file.read_text(encoding="utf-8"))
    }
    assert not found
