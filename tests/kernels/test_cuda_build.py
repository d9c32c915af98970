"""csrc/build_cuda.py: choice of architectures, one-line errors, reuse of objects."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.thorough

CSRC = Path(__file__).parents[2] / "csrc"

# Fake nvcc: logs its arguments and writes an empty output. $RELEASE and $KNOWN are its answers.
PRETENDER = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release $RELEASE, V$RELEASE.1"; exit 0 ;;
--list-gpu-arch) for one in $KNOWN; do echo "compute_$one"; done; exit 0 ;;
esac
echo "$*" >> "$NOTES"
[ -z "$SAYS" ] || echo "$SAYS"
[ -z "$FAILS" ] || { echo "a.cu(1): error: identifier is undefined"; exit 2; }
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CSRC)
    return importlib.import_module("build_cuda")


class Tree:
    """A copy of the CUDA sources, and a fake nvcc."""

    def __init__(self, root: Path) -> None:
        self.root, self.csrc, self.out = root, root / "csrc", root / "out"
        self.notes = root / "notes"
        self.notes.touch()
        shutil.copytree(CSRC / "include", self.csrc / "include")
        shutil.copytree(CSRC / "src/cuda", self.csrc / "src/cuda")
        for name in ("build_cuda.py", "build_portable.py"):
            shutil.copy(CSRC / name, self.csrc)
        nvcc = root / "toolkit/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(PRETENDER)
        nvcc.chmod(0o755)
        self.sources = len(list(self.csrc.glob("src/cuda/**/*.cu")))

    def build(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "CUDA_HOME": str(self.root / "toolkit"),
            "NOTES": str(self.notes),
            "RELEASE": "12.4",
            "KNOWN": "75 80 86 89 90",
            "PATH": "/usr/bin:/bin",
        }
        self.notes.write_text("")
        return subprocess.run(
            [sys.executable, self.csrc / "build_cuda.py", self.out, *options],
            env=settings | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def commands(self, *options: str, **env: str) -> tuple[list[str], str]:
        """Logged command lines: one per compiled source, and the link."""
        done = self.build(*options, **env)
        assert done.returncode == 0, done.stderr
        lines = self.notes.read_text().splitlines()
        (link,) = [line for line in lines if "-shared" in line.split()]
        return [line for line in lines if "-c" in line.split()], link


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8.0;9.0", (80, 90)),
        ("90", (90,)),
        ("9.0, 80 7.5", (75, 80, 90)),
        ("12.0;8.9;8.9", (89, 120)),
        (" All ", None),
        ("none", ()),
    ],
)
def test_forms_of_a_list(script: ModuleType, text: str, found: tuple[int, ...] | None) -> None:
    assert script.parse_architectures(text) == found


@pytest.mark.parametrize("text", ["7.0", "9", "sm_90", "9.0a", "8.0+PTX", "8.0;all", "80;", "-8.0"])
def test_other_forms_are_refused_in_one_line(tree: Tree, text: str) -> None:
    done = tree.build(EXL_CUDA_ARCH=text)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "EXL_CUDA_ARCH is a list such as '8.0;9.0' or '80,90'" in line
    assert repr(text) in line
    assert not tree.notes.read_text()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"CUDA_HOME": "/nowhere"}, "there is no nvcc in CUDA_HOME/bin or on PATH"),
        ({"RELEASE": "12.0"}, "is release 12.0, and 12.1 is the oldest"),
    ],
    ids=["missing", "too-old"],
)
def test_without_a_usable_nvcc(tree: Tree, env: dict[str, str], says: str) -> None:
    """An error if CUDA was requested, otherwise one line. An outdated library is deleted."""
    asked = tree.build(EXL_CUDA_ARCH="all", **env)
    assert asked.returncode != 0
    (line,) = asked.stderr.splitlines()
    assert says in line
    assert "EXL_CUDA_ARCH=none" in line

    tree.out.mkdir()
    (tree.out / "libexl_cuda.so").touch()
    done = tree.build(**env)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("exl-kernels: without CUDA, since ")
    assert says in line
    assert not list(tree.out.iterdir())


def test_architectures_unknown_to_nvcc_are_named(tree: Tree) -> None:
    done = tree.build(EXL_CUDA_ARCH="8.0;13.7")
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "asks for 13.7" in line
    assert "7.5, 8.0, 8.6, 8.9, 9.0 only" in line


def test_nvcc_of_python_packages_builds_for_the_gpus_of_this_machine(tree: Tree) -> None:
    packaged = tree.root / "site/nvidia/cu13"
    packaged.parent.mkdir(parents=True)
    (tree.root / "toolkit").rename(packaged)
    smi = tree.root / "tools/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf '9.0\\n8.9\\n9.0\\n'\n")
    smi.chmod(0o755)
    env = {"PYTHONPATH": str(tree.root / "site"), "PATH": f"{smi.parent}:/usr/bin:/bin"}
    compiled, link = tree.commands(CUDA_HOME="", **env)
    assert re.findall(r",code=(\w+)", compiled[0]) == ["sm_89", "sm_90a"]
    assert f"-L{packaged / 'lib'}" in link.split()


@pytest.mark.parametrize(
    ("env", "is_needed"),
    [
        ({}, False),
        ({"EXL_CUDA_ARCH": "9.0"}, True),
        ({"EXL_CUDA_ARCH": "none", "SMI": "1"}, False),
        ({"SMI": "1"}, True),
        ({"SMI": "1", "CUDA_HOME": "toolkit"}, False),
    ],
    ids=["no GPU", "requested", "refused", "GPU", "GPU and nvcc"],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the packages are for x86-64")
def test_nvcc_is_requested_from_the_index_where_it_is_needed(
    tree: Tree, env: dict[str, str], is_needed: bool
) -> None:
    smi = tree.root / "tools/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 9.0\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:/usr/bin:/bin" if "SMI" in env else "/usr/bin:/bin"
    home = str(tree.root / "toolkit") if "CUDA_HOME" in env else ""
    script = "import build_backend as b; print(*b.get_requires_for_build_wheel())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(CSRC), **env, "PATH": path, "CUDA_HOME": home},
        cwd=CSRC,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("nvidia-cuda-nvcc==" in done.stdout) is is_needed


def test_nothing_is_built_for_none(tree: Tree) -> None:
    done = tree.build(EXL_CUDA_ARCH="none")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not tree.out.exists()


def test_the_default_is_code_for_all_and_ptx_for_later_devices(tree: Tree) -> None:
    compiled, link = tree.commands(KNOWN="80 86 89 90 100 103")
    codes = re.findall(r"-gencode=arch=(\w+),code=(\w+)", compiled[0])
    assert codes == [
        *[(f"compute_{name}", f"sm_{name}") for name in ("80", "86", "89", "90a", "100")],
        ("compute_90", "compute_90"),
    ]
    assert len(compiled) == tree.sources > 0
    device = next(line for line in compiled if "device.cu" in line)
    assert '-DEXL_CUDA_ARCHITECTURES="80 86 89 90 100"' in device
    assert sum("-DEXL_CUDA" in line for line in compiled) == 1
    assert "--no-undefined" in link
    assert "-cudart static" in link
    assert len(re.findall(r"\.o\b", link)) == tree.sources
    assert (tree.out / "libexl_cuda.so").is_file()


def test_objects_are_reused_by_a_build_of_the_same_kind_only(tree: Tree) -> None:
    ninety = {"EXL_CUDA_ARCH": "9.0"}
    every, _ = tree.commands(**ninety)
    assert len(every) == tree.sources
    assert "code=sm_90a" in every[0]
    assert "compute_80" not in every[0]
    assert tree.commands(**ninety)[0] == []
    assert len(tree.commands(EXL_CUDA_ARCH="8.0")[0]) == tree.sources
    assert len(tree.commands(RELEASE="13.0", **ninety)[0]) == tree.sources
    assert len(tree.commands("--strict", **ninety)[0]) == tree.sources
    assert tree.commands(**ninety)[0] == []
    later = (tree.root / "notes").stat().st_mtime + 10
    os.utime(tree.csrc / "src/cuda/common/device.cu", (later, later))
    assert len(tree.commands(**ninety)[0]) == 1


def test_a_failed_compilation_is_shown_and_leaves_nothing(tree: Tree) -> None:
    done = tree.build(EXL_CUDA_ARCH="9.0", FAILS="1")
    assert done.returncode != 0
    assert "error: identifier is undefined" in done.stderr
    assert re.search(
        r"exl-kernels: nvcc failed on src/cuda/[\w/]+\.cu \(exit status 2\)", done.stderr
    )
    assert not tree.out.exists()


def test_serialized_products_fail_a_strict_build(tree: Tree) -> None:
    said = "ptxas info: (C7512) wgmma.mma_async instructions are serialized due to registers"
    assert tree.build(EXL_CUDA_ARCH="9.0", SAYS=said).returncode == 0
    done = tree.build("--strict", EXL_CUDA_ARCH="9.0", SAYS=said)
    assert done.returncode != 0
    assert re.search(r"exl-kernels: matrix products of src/cuda/[\w/]+\.cu are serial", done.stderr)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_real_nvcc_makes_a_library_that_loads_without_a_gpu(tree: Tree) -> None:
    """Built from one small source. Loading needs no GPU, no driver and no torch."""
    for source in tree.csrc.glob("src/cuda/**/*.cu"):
        if source.name != "device.cu":
            source.unlink()
    env = {"CUDA_HOME": "", "PATH": os.environ["PATH"], "EXL_CUDA_ARCH": "8.0;9.0"}
    done = tree.build("--strict", **env)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(tree.out / "libexl_cuda.so"))
    library.exl_cuda_architectures.restype = ctypes.c_char_p
    assert library.exl_cuda_architectures() == b"80 90"
    assert not hasattr(library, "cudaMalloc")  # the static runtime is not exported
