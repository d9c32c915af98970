"""The Python side of the CUDA library's interface, compared with the C headers.

A library with another interface number does not load, and a structure with another layout passes
wrong operands. Neither shows without a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from exl_kernels import cuda, cuda_exchange, cuda_latent, cuda_recurrent, cuda_trellis

INCLUDE = Path(__file__).parents[2] / "csrc/include"
MODULES = (cuda, cuda_exchange, cuda_latent, cuda_recurrent, cuda_trellis)
RENAMED = {("ExlHeadCopy", "source"): "from"}  # keywords of Python
COMPILER = shutil.which("cc") or shutil.which("gcc")


def structures() -> dict[str, type[ctypes.Structure]]:
    """Structures of the Python side by their names in C."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, ctypes.Structure):
                found[f"Exl{name}"] = value
    found.pop("ExlStructure")
    return found


def layout(structure: type[ctypes.Structure]) -> dict[str, int]:
    """Offset of each field, and the size of the whole, in bytes."""
    offsets = {field[0]: getattr(structure, field[0]).offset for field in structure._fields_}
    return offsets | {"": ctypes.sizeof(structure)}


def run_c(tmp_path: Path, statements: list[str]) -> list[str]:
    """Lines that the statements print, as a C program with the interface's headers."""
    assert COMPILER is not None
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    headers = ["stddef.h", "stdio.h", "exl/cuda.h"]
    headers += sorted(str(one.relative_to(INCLUDE)) for one in (INCLUDE / "exl/cuda").glob("*.h"))
    lines = [*(f"#include <{header}>" for header in headers), "int main() {"]
    source.write_text("\n".join([*lines, *statements, "}"]))
    subprocess.run([COMPILER, f"-I{INCLUDE}", source, "-o", program], check=True, timeout=60)
    done = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_numbers_and_layouts_are_those_of_the_headers(tmp_path: Path) -> None:
    wanted = {"EXL_CUDA_ABI": cuda.ABI}
    statements = ['printf("EXL_CUDA_ABI %d\\n", EXL_CUDA_ABI);']
    for name, structure in structures().items():
        for field, offset in layout(structure).items():
            wanted[f"{name}.{field}"] = offset
            in_c = RENAMED.get((name, field), field)
            value = f"offsetof({name}, {in_c})" if field else f"sizeof({name})"
            statements.append(f'printf("{name}.{field} %zu\\n", {value});')
    assert len(wanted) > 300
    found = dict(line.split() for line in run_c(tmp_path, statements))
    assert {name: int(value) for name, value in found.items()} == wanted
