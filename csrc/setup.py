"""Builds the extension: every CPU source once per instruction set, the bindings once.

Objects are compiled two at a time and only when a source, a header or the flags are newer, so a
rebuild in place is short. The environment can add flags through CXXFLAGS and LDFLAGS (setuptools
reads both), which is how the sanitizer build is made.
"""

from __future__ import annotations

import os
import platform
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

COMMON_FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
X86_SETS = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        "-mprefer-vector-width=512",
        # GCC 12 warns about its own intrinsics' deliberately undefined operands (GCC bug 105593).
        "-Wno-maybe-uninitialized",
    ],
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
SETS: dict[str, list[str]] = X86_SETS if IS_X86 else {"scalar": []}

# Compiled for the plain machine: they run before the instruction set is known, or between sets.
BASE_SOURCES = ["src/cpu/isa.cpp", "src/cpu/thread_pool.cpp", "src/cpu/packed.cpp"]


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


class BuildPerSet(build_ext):
    """One object per source and instruction set, then one link."""

    def build_extension(self, ext: Extension) -> None:
        os.chdir(ROOT)
        newest_header = max(
            path.stat().st_mtime
            for path in [*ROOT.glob("include/**/*.h"), *ROOT.glob("src/**/*.h"), Path(__file__)]
        )
        jobs = [(name, "base", []) for name in BASE_SOURCES + sources("src/bindings/*.cpp")]
        for isa, flags in SETS.items():
            jobs += [
                (name, isa, [*flags, f"-DEXL_ISA={isa}", f"-DEXL_ISA_IS_{isa}=1"])
                for name in sources("src/cpu/*.cpp")
                if name not in BASE_SOURCES
            ]
        # Slowest first, so that the two compilers finish together.
        jobs.sort(key=lambda job: -Path(job[0]).stat().st_size)
        with ThreadPoolExecutor(max_workers=min(len(os.sched_getaffinity(0)), 8)) as pool:
            objects = list(pool.map(lambda job: self._compile(job, newest_header), jobs))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(target.name + ".new")
        self.compiler.link_shared_object(
            objects, str(fresh), extra_postargs=["-pthread"], target_lang="c++"
        )
        fresh.replace(target)  # a running process keeps the old library

    def _compile(self, job: tuple[str, str, list[str]], newest_header: float) -> str:
        name, isa, flags = job
        out_dir = Path(self.build_temp) / isa
        built = out_dir / Path(name).with_suffix(".o")
        newest = max(newest_header, Path(name).stat().st_mtime)
        if built.exists() and built.stat().st_mtime > newest and not self.force:
            return str(built)
        made = self.compiler.compile(
            [name],
            output_dir=str(out_dir),
            include_dirs=["include", "src", pybind11.get_include(), *self.include_dirs],
            extra_postargs=[*COMMON_FLAGS, *flags, f'-DEXL_VERSION="{VERSION}"'],
        )
        return str(made[0])


setup(
    ext_modules=[Extension("exl_kernels._C", sources=[], language="c++")],
    cmdclass={"build_ext": BuildPerSet},
)
