"""Checks of scripts/build_wheels.py: sizes and oldest systems of wheels."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("build_wheels")


def test_a_wheel_above_its_limit_is_named(script: ModuleType, tmp_path: Path) -> None:
    sizes = {
        "exl_kernels-1-cp311-cp311-linux.whl": 10_000_000,  # too large without CUDA only
        "exl_core-1-py3-none-any.whl": 1_000_000,
        "exl_cli-1-py3-none-any.whl": 2_000_000,
    }
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # sparse
    wheels = [tmp_path / name for name in sizes]
    found = script.size_problems(wheels, has_cuda=False)
    assert [line.partition(":")[0] for line in found] == [wheels[0].name, wheels[2].name]
    assert len(script.size_problems(wheels, has_cuda=True)) == 1


@pytest.mark.parametrize(
    ("name", "oldest"),
    [
        ("k-1-cp311-cp311-manylinux_2_28_x86_64.whl", (2, 28)),
        ("k-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", (2, 27)),
    ],
)
def test_the_oldest_system_is_read_from_the_tag(
    script: ModuleType, name: str, oldest: tuple[int, int]
) -> None:
    assert script.oldest_glibc(Path(name)) == oldest


def test_the_running_python_is_among_those_built_for(script: ModuleType) -> None:
    assert script.sys.executable in script.pythons()
