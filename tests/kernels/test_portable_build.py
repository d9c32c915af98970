"""csrc/build_portable.py: libraries that this machine builds run on older systems."""

from __future__ import annotations

import ctypes
import importlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
HAS_TOOLS = all(shutil.which(tool) for tool in ("g++", "objcopy", "objdump", "nm"))
IS_GLIBC = sys.platform == "linux" and platform.machine() == "x86_64"

# Uses of the names that GCC 12 and glibc 2.36 bind to newer versions.
SOURCE = """
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>
extern "C" __attribute__((visibility("default"))) double count(double x, int n) {
    static std::once_flag once;
    std::call_once(once, [] {});
    std::shared_ptr<int> shared = std::make_shared<int>(n);
    std::exception_ptr kept;
    for (int i = 0; i < n; ++i) {
        try { throw std::runtime_error("x"); } catch (...) { kept = std::current_exception(); }
        std::exception_ptr copy = kept;
        try { std::rethrow_exception(copy); } catch (const std::runtime_error&) { x += 1; }
    }
    try { std::unique_ptr<double[]> all(new double[(unsigned long)n << 62]); }
    catch (const std::bad_alloc&) { x += 100; }
    return std::log(std::exp(x)) + *shared - n;
}
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CSRC)
    return importlib.import_module("build_portable")


def test_versions_that_are_too_new_are_found(script: ModuleType) -> None:
    lines = [
        "0000      DF *UND*\t0000 (GLIBC_2.34) pthread_once",
        "0000      DF *UND*\t0000 (GLIBC_2.2.5) memcpy",
        "0000  w   DF *UND*\t0000  GLIBC_2.29  exp",
        "0000 g    DF .text\t0000  GLIBC_2.34  defined_here",
        "0000      DF *UND*\t0000 (CXXABI_1.3.13) one",
        "0000      DF *UND*\t0000 (CXXABI_1.3) two",
    ]
    assert script.too_new(lines) == [
        "exp@GLIBC_2.29",
        "one@CXXABI_1.3.13",
        "pthread_once@GLIBC_2.34",
    ]
    assert not script.is_wanted({})
    assert not script.is_wanted({"EXL_PORTABLE": "0"})
    assert script.is_wanted({"EXL_PORTABLE": "1"})


@pytest.mark.thorough
@pytest.mark.skipif(not (IS_GLIBC and HAS_TOOLS), reason="for x86-64 Linux with GNU binutils")
def test_a_linked_library_is_older_than_its_compiler(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "uses.cpp").write_text(SOURCE)
    flags = ["-O1", "-fPIC", "-fvisibility=hidden", "-std=c++20", "-Wall", "-Werror", "-c"]
    objects = []
    for source in (tmp_path / "uses.cpp", CSRC / script.SOURCE):
        made = tmp_path / f"{source.stem}.o"
        warnings = [] if source.parent != tmp_path else ["-Wno-alloc-size-larger-than"]
        subprocess.run(["g++", *flags, *warnings, str(source), "-o", str(made)], check=True)
        objects.append(str(made))
    renames = script.older_versions(["g++"]) | script.REPLACEMENTS
    copies = script.lowered(objects, tmp_path / "lowered", renames)
    library = tmp_path / "lib.so"
    options = f"-Wl,{','.join(script.LINKER_OPTIONS)}"
    subprocess.run(["g++", "-shared", *copies, "-o", str(library), options], check=True)
    script.check(library)  # raises SystemExit for a version that is too new

    count = ctypes.CDLL(str(library)).count
    count.restype, count.argtypes = ctypes.c_double, [ctypes.c_double, ctypes.c_int]
    assert count(1.0, 50) == pytest.approx(151.0)
