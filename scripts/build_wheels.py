"""Build the wheels that would be published, into a folder. Usage: build_wheels.py FOLDER
[PYTHON...].

exl-kernels is built once per Python (default: the running one and every python3.N on PATH that the
packages support), the others once for all. csrc/build_portable.py links it for manylinux_2_28 with
the compiler of this machine; auditwheel checks that and writes the tag. A wheel for newer systems
only is an error. The last line of the output is JSON: the size of each wheel in bytes.

pybind11 has no stable-ABI form, so there is one wheel per Python (docs/decisions.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PURE = ("exl-core", "exl-eval", "exl-cli", "exl")
PROMISED = "manylinux_2_28_x86_64"
OLDEST_PYTHON = 11
NEWEST_PYTHON = 14

MAX_BYTES = {"kernels": 3_000_000, "kernels with CUDA": 20_000_000, "pure": 1_500_000}
"""Limits on the size of one wheel. exl-kernels without CUDA has 1.2 MB: three quarters of it are
the kernels of five instruction sets. Its CUDA library adds 11.5 MB, compressed already."""


def pythons() -> list[str]:
    """The running Python, and others that are supported, one per minor version."""
    found = {sys.version_info.minor: sys.executable}
    for minor in range(OLDEST_PYTHON, NEWEST_PYTHON + 1):
        path = shutil.which(f"python3.{minor}")
        works = path is not None and _runs(path)
        if path is not None and works:
            found.setdefault(minor, path)
    return [found[minor] for minor in sorted(found)]


def _runs(python: str) -> bool:
    """Whether a command of this name is a Python: pyenv has commands for those that are absent."""
    done = subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False)
    return done.returncode == 0


def build_kernels(python: str, folder: Path) -> Path:
    """One repaired wheel of exl-kernels."""
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch, "raw")
        venv = Path(scratch, "venv")
        run(python, "-m", "venv", venv)
        pip = (venv / "bin/python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", raw)
        run(*pip, ROOT / "csrc", EXL_PORTABLE="1")
        (wheel,) = raw.glob("*.whl")
        fixed = Path(scratch, "fixed")
        repair = ("repair", "--strip", "--plat", PROMISED, "-w", fixed, wheel)
        run(sys.executable, "-m", "auditwheel", *repair)
        (repaired,) = fixed.glob("*.whl")
        return Path(shutil.move(repaired, folder / repaired.name))


def build_pure(name: str, folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, name)  # a copy: setuptools would take deleted files from `build`
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / "packages" / name, source, ignore=ignored)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", scratch, source)
        (wheel,) = Path(scratch).glob("*.whl")
        return Path(shutil.move(wheel, folder / wheel.name))


def oldest_glibc(wheel: Path) -> tuple[int, int]:
    """glibc version in the wheel's platform tag."""
    versions = re.findall(r"manylinux_(\d+)_(\d+)", wheel.name)
    return min((int(major), int(minor)) for major, minor in versions)


def size_problems(wheels: list[Path], *, has_cuda: bool) -> list[str]:
    """Wheels above their limit."""
    problems = []
    for wheel in wheels:
        kind = "pure"
        if wheel.name.startswith("exl_kernels"):
            kind = "kernels with CUDA" if has_cuda else "kernels"
        if wheel.stat().st_size > MAX_BYTES[kind]:
            problems.append(f"{wheel.name}: {wheel.stat().st_size}, at most {MAX_BYTES[kind]}")
    return problems


def run(*command: object, **environ: str) -> None:
    parts = [str(part) for part in command]
    subprocess.run(parts, check=True, cwd=ROOT, env={**os.environ, **environ})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("python", nargs="*", help="interpreters to build exl-kernels for")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.whl"):
        stale.unlink()
    wheels = [build_pure(name, folder) for name in PURE]
    for python in args.python or pythons():
        wheels.append(build_kernels(python, folder))
    has_cuda = os.environ.get("EXL_CUDA_ARCH", "none") != "none"
    problems = size_problems(wheels, has_cuda=has_cuda)
    problems += [
        f"{wheel.name} is not {PROMISED}"
        for wheel in wheels
        if wheel.name.startswith("exl_kernels") and oldest_glibc(wheel) > (2, 28)
    ]
    print(json.dumps({"wheels": {wheel.name: wheel.stat().st_size for wheel in wheels}}))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
