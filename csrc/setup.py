"""Builds the extension: CPU sources once per instruction set that they differ in, bindings once.

Where there is an nvcc, the CUDA library is built too (`build_cuda.py`).

Objects are compiled in parallel and kept. One is rebuilt when its source or any header is newer.
Each combination of compiler, flags and version has its own object folder, so that different kinds
of builds never share objects. The environment can name the compiler (CXX) and add flags (CXXFLAGS,
LDFLAGS; setuptools reads them); the sanitizer build is made this way. EXL_PORTABLE=1 links for
older systems (`build_portable.py`). The link step always runs.

There is no check whether a library built in place is older than its sources. exl-core compares
versions only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not search this file's folder

import build_cuda  # noqa: E402
import build_portable  # noqa: E402

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

COMMON_FLAGS = [
    *("-std=c++20", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"),
    # Kernels name each fused multiply-add. The compiler must not fuse others in one copy of a
    # function and not in another: rows would depend on the number of rows.
    "-ffp-contract=off",
]
X86_SETS = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        "-mprefer-vector-width=512",
        # GCC 12 warns about its own intrinsics' deliberately undefined operands (GCC bug 105593).
        *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    ],
}
# Sets that extend avx512. Only the quantized linears differ, so only their sources are recompiled.
VNNI_FLAGS = [*X86_SETS["avx512"], "-mavx512vnni"]
QUANT_SETS = {
    "avx512vnni": VNNI_FLAGS,
    "avx512vbmi": [*VNNI_FLAGS, "-mavx512vbmi", "-mavx512vbmi2"],
    "amx": [*VNNI_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
QUANT_KERNELS = [
    *("src/cpu/linear/quant_linear.cpp", "src/cpu/linear/quant_prefill.cpp"),
    "src/cpu/moe/experts.cpp",
]
# avx512vnni uses integers for any number of rows, except for FP8.
TRELLIS_KERNELS = ["src/cpu/linear/trellis_linear.cpp"]
QUANT_SOURCES = {
    "avx512vnni": QUANT_KERNELS + TRELLIS_KERNELS,
    "avx512vbmi": TRELLIS_KERNELS,
    "amx": QUANT_KERNELS,
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
SETS: dict[str, list[str]] = X86_SETS | QUANT_SETS if IS_X86 else {"scalar": []}

# Python's own flags ask for debug information, which is 50 of 55 MB. CXXFLAGS=-g brings it back.
if not re.search(r"(^|\s)-g", os.environ.get("CXXFLAGS", "")):
    COMMON_FLAGS.append("-g0")

# Compiled for the baseline machine: they run before the instruction set is known, or are shared by
# all sets.
BASE_SOURCES = [
    *("src/cpu/common/isa.cpp", "src/cpu/common/thread_pool.cpp"),
    *("src/cpu/linear/packed.cpp", "src/cpu/linear/quant_pack.cpp"),
    *("src/cpu/linear/trellis_pack.cpp", "src/cpu/moe/route.cpp"),
]

NEEDS_COMPILER = (
    "exl-kernels: needs a C++20 compiler (GCC 11 or newer, or Clang), but {command} {why}. Install "
    "one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install) or name one in CXX."
)


def compiler_macros(command: list[str]) -> str:
    """The compiler's predefined macros: its version, its target, its library's version.

    Ends the build with a one-line message if the compiler cannot compile C++20.
    """
    probe = [*command, "-std=c++20", "-E", "-dM", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            probe, input="#include <version>\n", capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise SystemExit(
            NEEDS_COMPILER.format(command=command[0], why=f"cannot be run ({error.strerror})")
        ) from error
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise SystemExit(NEEDS_COMPILER.format(command=command[0], why=f"failed ({said})"))
    standard = re.search(r"^#define __cplusplus (\d+)L$", done.stdout, re.MULTILINE)
    if standard is None or int(standard[1]) < 202002:
        version = re.search(r'^#define __VERSION__ "(.*)"$', done.stdout, re.MULTILINE)
        why = f"is too old ({version[1] if version else 'unknown version'})"
        raise SystemExit(NEEDS_COMPILER.format(command=command[0], why=why))
    return done.stdout


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


class BuildPerSet(build_ext):
    """One object per source and instruction set, then one link; then the CUDA library."""

    def build_extension(self, ext: Extension) -> None:
        os.chdir(ROOT)
        cuda = build_cuda.choose_target(os.environ)  # reports a bad setting before compiling
        object_dir = self._object_dir()
        newest_header = max(
            path.stat().st_mtime
            for path in [*ROOT.glob("include/**/*.h"), *ROOT.glob("src/**/*.h"), Path(__file__)]
        )
        base = BASE_SOURCES + sources("src/bindings/*.cpp")
        jobs: list[tuple[str, str, list[str]]] = [(name, "base", []) for name in base]
        for isa, flags in SETS.items():
            jobs += [
                (name, isa, [*flags, f"-DEXL_ISA={isa}", f"-DEXL_ISA_IS_{isa}=1"])
                for name in QUANT_SOURCES.get(isa, sources("src/cpu/**/*.cpp"))
                if name not in BASE_SOURCES
            ]
        # Largest sources first, so that the parallel compilers finish at about the same time.
        jobs.sort(key=lambda job: -Path(job[0]).stat().st_size)
        workers = min(build_cuda.usable_cores(), 8)
        with ThreadPoolExecutor(max_workers=workers) as pool:
            objects = list(
                pool.map(lambda job: self._compile(job, object_dir, newest_header), jobs)
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(target.name + ".new")
        fresh.unlink(missing_ok=True)  # left over from an interrupted build
        is_portable = build_portable.is_wanted(os.environ)
        options = ["-pthread"]
        if is_portable:
            support = self._compile((build_portable.SOURCE, "base", []), object_dir, newest_header)
            objects = self._lowered([*objects, support], object_dir / "portable")
            options.append(f"-Wl,{','.join(build_portable.LINKER_OPTIONS)}")
        self.compiler.link_shared_object(
            objects, str(fresh), extra_postargs=options, target_lang="c++"
        )
        if is_portable:
            build_portable.check(fresh)
        fresh.replace(target)  # atomic: a running process keeps the old library
        # CUDA objects do not depend on Python, so that all of its versions share them.
        object_root = Path(self.build_temp).absolute().parent
        build_cuda.build_library(
            target.parent.absolute(), object_root, cuda, jobs=workers, force=bool(self.force)
        )

    def _lowered(self, objects: list[str], folder: Path) -> list[str]:
        compiler = self.compiler.compiler_so_cxx[:1]
        renames = build_portable.older_versions(compiler) | build_portable.REPLACEMENTS
        return build_portable.lowered(objects, folder, renames)

    def copy_extensions_to_source(self) -> None:
        """Copies the CUDA library too. setuptools builds in place by building elsewhere first."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            library = built.with_name(build_cuda.LIBRARY)
            beside = ROOT / "python" / Path(*ext.name.split(".")[:-1]) / build_cuda.LIBRARY
            beside.unlink(missing_ok=True)  # an older library does not fit the new extension
            if library.is_file():
                shutil.copy2(library, beside)

    def _object_dir(self) -> Path:
        """One folder per compiler, flags and version. LDFLAGS do not affect objects."""
        command = self.compiler.compiler_so_cxx
        parts = [*command, *COMMON_FLAGS, VERSION, pybind11.__version__, compiler_macros(command)]
        parts += [f"{isa} {flags}" for isa, flags in SETS.items()]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return Path(self.build_temp) / f"flags-{digest[:12]}"

    def _compile(
        self, job: tuple[str, str, list[str]], object_dir: Path, newest_header: float
    ) -> str:
        name, isa, flags = job
        out_dir = object_dir / isa
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
