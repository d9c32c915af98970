"""Builds `libexl_cuda.so`: compiles every CUDA source once for all architectures, then links.

The library has a C interface (`include/exl/cuda.h` and the headers in `include/exl/cuda/`) and
contains the CUDA runtime. It does not depend on Python or torch, so that neither is needed to build
it. `setup.py` calls this module. It also runs on its own:

    EXL_CUDA_ARCH=9.0 python csrc/build_cuda.py csrc/python/exl_kernels

EXL_CUDA_ARCH selects the architectures that get machine code:

    all        7.5, 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0, and PTX of 9.0 for later ones
    8.0;9.0    a list, separated by ';', ',' or spaces; 80 and 90 mean the same
    none       the library is not built

The default is `all` if there is an nvcc in CUDA_HOME/bin or on PATH. If nvcc comes from Python
packages, which `build_backend.py` requests on a machine with a GPU, the default is the GPUs of this
machine. Otherwise it is `none`. With any value but `none`, a missing nvcc is an error. Objects are
kept between builds, like those of the CPU sources. EXL_PORTABLE=1 links for older systems
(`build_portable.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import build_portable

ROOT = Path(__file__).resolve().parent
LIBRARY = "libexl_cuda.so"
VARIABLE = "EXL_CUDA_ARCH"

ALL = (75, 80, 86, 89, 90, 100, 120)
PTX = 90  # the driver compiles PTX for processors that are newer than this library
OLDEST = 75
OLDEST_NVCC = (12, 1)  # first version that knows all instructions of 9.0 that the sources use

# NVCC_APPEND_FLAGS=-lineinfo lets a profiler show source lines. It doubles the library's size.
FLAGS = [
    *("-std=c++17", "-O3", "-Iinclude", "-Isrc"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"),
    *("-Xfatbin", "-compress-all"),  # a quarter of the size
]
STRICT_FLAGS = ["-Werror", "all-warnings"]
SERIALIZED = "wgmma.mma_async instructions are serialized"
LINK_FLAGS = [
    *("-shared", "-cudart", "static", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
    *("-Xlinker", "--no-undefined"),
]

FORMS = f"{VARIABLE} is a list such as '8.0;9.0' or '80,90', of 7.5 or later, or 'all' or 'none'"


@dataclass(frozen=True)
class Target:
    """Compiler, and compute capabilities (times ten) to build for."""

    nvcc: str
    version: str  # output of nvcc --version
    capabilities: tuple[int, ...]
    has_ptx: bool

    @property
    def code_flags(self) -> list[str]:
        flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in self._names]
        if self.has_ptx:
            flags.append(f"-gencode=arch=compute_{PTX},code=compute_{PTX}")
        return flags

    @property
    def _names(self) -> list[str]:
        # 9.0a has the matrix instructions that only Hopper has. Its code runs on every 9.0 device.
        return ["90a" if one == 90 else str(one) for one in self.capabilities]


def parse_architectures(text: str) -> tuple[int, ...] | None:
    """Capabilities times ten, ascending; None for `all`, an empty tuple for `none`."""
    wanted = text.strip().lower()
    if wanted == "all":
        return None
    if wanted == "none":
        return ()
    found = set()
    for part in re.split(r"[;,\s]+", wanted):
        match = re.fullmatch(r"(\d{1,2})\.?(\d)", part)
        number = 10 * int(match[1]) + int(match[2]) if match else 0
        if number < OLDEST:
            raise SystemExit(f"exl-kernels: {FORMS}, but not {text[:100]!r}")
        found.add(number)
    return tuple(sorted(found))


def choose_target(environ: Mapping[str, str]) -> Target | None:
    """Target that the environment selects; None to build without CUDA.

    If that is not by request, prints one line with the reason.
    """
    requested = environ.get(VARIABLE) or None  # an empty value counts as unset
    wanted = None if requested is None else parse_architectures(requested)
    if wanted == ():
        return None
    nvcc = find_nvcc(environ) or packaged_nvcc()
    if nvcc is not None and requested is None and find_nvcc(environ) is None:
        wanted = gpu_capabilities() or None
    version = None if nvcc is None else nvcc_says(nvcc, "--version")
    if nvcc is None or version is None:
        place = "in CUDA_HOME/bin or on PATH" if nvcc is None else f"that runs ({nvcc} does not)"
        _without(requested, f"there is no nvcc {place}")
        return None
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or (int(release[1]), int(release[2])) < OLDEST_NVCC:
        said = release[0] if release else "an unknown release"
        oldest = ".".join(map(str, OLDEST_NVCC))
        _without(requested, f"{nvcc} is {said}, and {oldest} is the oldest supported")
        return None
    known = {int(name) for name in re.findall(r"compute_(\d+)$", _architectures(nvcc), re.M)}
    if wanted is None:
        kept = tuple(one for one in ALL if one in known)
        return Target(nvcc, version, kept, has_ptx=True)
    unknown = [f"{one / 10:.1f}" for one in wanted if one not in known]
    if unknown:
        makes = ", ".join(f"{one / 10:.1f}" for one in sorted(known))
        raise SystemExit(
            f"exl-kernels: {VARIABLE} asks for {', '.join(unknown)}, but {nvcc} makes code for "
            f"{makes or 'nothing'} only"
        )
    return Target(nvcc, version, wanted, has_ptx=False)


def _without(requested: str | None, why: str) -> None:
    """Ends the build if architectures were requested, otherwise prints why CUDA is left out."""
    if requested is not None:
        raise SystemExit(
            f"exl-kernels: {VARIABLE} is {requested!r}, but {why}. Install the CUDA toolkit, set "
            f"CUDA_HOME to it, or set {VARIABLE}=none to build without CUDA."
        )
    print(f"exl-kernels: without CUDA, since {why}")


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    home = environ.get("CUDA_HOME")
    named = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None
    return named or shutil.which("nvcc", path=environ.get("PATH", os.defpath))


def packaged_nvcc() -> str | None:
    """nvcc of the package nvidia-cuda-nvcc, from CUDA 13 on; None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        found = shutil.which("nvcc", path=str(Path(folder, "cu13", "bin")))
        if found is not None:
            return found
    return None


def gpu_capabilities() -> tuple[int, ...]:
    """Compute capabilities (times ten) of this machine's GPUs, ascending; empty if unknown."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return ()
    found = re.findall(r"^(\d+)\.(\d)$", done.stdout, re.MULTILINE)
    return tuple(sorted({10 * int(major) + int(minor) for major, minor in found}))


def nvcc_says(nvcc: str, option: str) -> str | None:
    """Output of nvcc with one option; None if nvcc cannot be run or fails."""
    try:
        done = subprocess.run([nvcc, option], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _architectures(nvcc: str) -> str:
    return nvcc_says(nvcc, "--list-gpu-arch") or ""


def build_library(
    folder: Path,
    object_root: Path,
    target: Target | None,
    *,
    jobs: int,
    strict: bool = False,
    force: bool = False,
) -> Path | None:
    """Builds the library into `folder` and returns its path.

    Without a target, deletes a library of an earlier build, which would be out of date, and returns
    None. `strict` turns warnings into errors. If a compilation fails, the build ends with a
    one-line error.
    """
    library = folder / LIBRARY
    if target is None:
        library.unlink(missing_ok=True)
        return None
    flags = [*FLAGS, *target.code_flags, *(STRICT_FLAGS if strict else [])]
    objects = _object_dir(object_root, target, flags)
    objects.mkdir(parents=True, exist_ok=True)
    newest_header = max(
        path.stat().st_mtime
        for path in [*ROOT.glob("include/**/*.h"), *ROOT.glob("src/**/*.cuh"), Path(__file__)]
    )
    # Largest source first, so that the compilers finish at about the same time.
    sources = sorted(ROOT.glob("src/cuda/**/*.cu"), key=lambda path: -path.stat().st_size)

    def compiled(source: Path) -> str:
        made = objects / source.relative_to(ROOT / "src/cuda").with_suffix(".o")
        newest = max(newest_header, source.stat().st_mtime)
        if force or not made.exists() or made.stat().st_mtime <= newest:
            name = str(source.relative_to(ROOT))
            names = " ".join(map(str, target.capabilities))
            define = [f'-DEXL_CUDA_ARCHITECTURES="{names}"'] if source.stem == "device" else []
            made.parent.mkdir(parents=True, exist_ok=True)
            fresh = made.with_suffix(".new.o")  # an interrupted build leaves no partial object
            _run([target.nvcc, *flags, *define, "-c", name, "-o", str(fresh)], strict=strict)
            fresh.replace(made)
        return str(made)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        made = list(pool.map(compiled, sources))
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{LIBRARY}.new"
    flags = [*LINK_FLAGS, f"-L{Path(target.nvcc).parents[1] / 'lib'}"]  # in packages: the runtime
    is_portable = build_portable.is_wanted(os.environ)
    if is_portable:
        renames = build_portable.older_versions(["g++"])
        made = build_portable.lowered(
            [*made, str(cuda_runtime(target))], objects / "portable", renames
        )
        flags[flags.index("static")] = "none"
        flags += [part for one in build_portable.LINKER_OPTIONS for part in ("-Xlinker", one)]
    _run([target.nvcc, *flags, *target.code_flags, *made, "-o", str(fresh)])
    if is_portable:
        build_portable.check(fresh)
    fresh.replace(library)  # a running process keeps the old library
    return library


def cuda_runtime(target: Target) -> Path:
    """The archive of the CUDA runtime that nvcc links."""
    said = subprocess.run(
        [target.nvcc, "-dryrun", "-shared", "any.o"], capture_output=True, text=True, check=False
    )
    folders = re.findall(r'-L"?([^"\s]+)', said.stderr)
    for folder in (*folders, Path(target.nvcc).parents[1] / "lib"):
        found = Path(folder, "libcudart_static.a")
        if found.is_file():
            return found
    raise SystemExit(f"exl-kernels: there is no libcudart_static.a beside {target.nvcc}")


def _object_dir(root: Path, target: Target, flags: list[str]) -> Path:
    """Object folder for one compiler and its flags, including flags from the environment."""
    from_env = [os.environ.get(f"NVCC_{name}", "") for name in ("PREPEND_FLAGS", "APPEND_FLAGS")]
    parts = [target.nvcc, target.version, *flags, *from_env]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return root / f"cuda-{digest[:12]}"


def _run(command: list[str], *, strict: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    said = done.stdout + done.stderr
    sys.stderr.write(said)  # in one call, so that the output of two compilers does not mix
    source = next((one for one in command if one.endswith(".cu")), LIBRARY)
    # The assembler reports this as information only. It means that matrix products overlap with
    # nothing, for lack of registers.
    if strict and SERIALIZED in said:
        raise SystemExit(f"exl-kernels: matrix products of {source} are serialized (see above)")
    if done.returncode != 0:
        raise SystemExit(f"exl-kernels: nvcc failed on {source} (exit status {done.returncode})")


def usable_cores() -> int:
    # Some systems (macOS) do not report which cores a process may use.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help=f"target folder of {LIBRARY}")
    parser.add_argument("--objects", type=Path, default=ROOT / "build", help="object folder")
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    args = parser.parse_args()
    library = build_library(
        args.folder.resolve(),
        args.objects.resolve(),
        choose_target(os.environ),
        jobs=usable_cores(),
        strict=args.strict,
    )
    if library is not None:
        print(f"{library}: {library.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
