"""csrc/setup.py with a fake compiler: reuse of objects, contents of packages, one-line errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata, util
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

# Fake compiler: answers the probe with $STANDARD. Otherwise it logs its arguments and writes an
# empty output.
PRETENDER = """#!/bin/sh
case " $* " in
*" -dM "*)
    printf '#define __cplusplus %sL\\n#define __VERSION__ "%s"\\n' "$STANDARD" "$RELEASE"
    exit 0 ;;
esac
echo "$*" >> "$NOTES"
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""

PRETENDER_NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 12.4, V12.4.1" ;;
--list-gpu-arch) echo compute_90 ;;
*) while [ $# -gt 0 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done ;;
esac
"""


def setuptools_version() -> int:
    if not all(util.find_spec(name) for name in ("setuptools", "pybind11")):
        return 0
    return int(metadata.version("setuptools").split(".")[0])


pytestmark = pytest.mark.skipif(
    setuptools_version() < 77, reason="needs the build tools of csrc: setuptools >= 77, pybind11"
)


class Tree:
    """A copy of csrc to build in."""

    def __init__(self, root: Path) -> None:
        self.csrc = root / "csrc"
        self.notes = root / "notes"
        self.compiler = root / "pretend-g++"
        self.compiler.write_text(PRETENDER)
        self.compiler.chmod(0o755)
        shutil.copytree(CSRC, self.csrc, ignore=shutil.ignore_patterns("build", "*.so"))

    def build(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS")}
        fixed = {"CXX": str(self.compiler), "NOTES": str(self.notes)}
        defaults = {"STANDARD": "202002", "RELEASE": "12.2.0", "EXL_CUDA_ARCH": "none"}
        return subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", *options],
            cwd=self.csrc,
            env={**clean, **fixed, **defaults, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def compiled(self, **env: str) -> int:
        """Number of objects that a build compiles."""
        self.notes.write_text("")
        done = self.build(**env)
        assert done.returncode == 0, done.stderr
        lines = self.notes.read_text().splitlines()
        assert sum(" -shared " in f" {line} " for line in lines) == 1
        return sum(" -c " in f" {line} " for line in lines)

    def set_version(self, version: str) -> None:
        file = self.csrc / "pyproject.toml"
        text = file.read_text()
        assert 'version = "0.1.0"' in text
        file.write_text(text.replace('version = "0.1.0"', f'version = "{version}"'))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how a link looks")
def test_objects_are_reused_by_a_build_of_the_same_kind_only(tree: Tree) -> None:
    every = tree.compiled()
    assert every > 10
    assert tree.compiled() == 0
    assert tree.compiled(LDFLAGS="-Wl,-O1") == 0
    assert tree.compiled(CXXFLAGS="-fsanitize=address") == every
    assert tree.compiled(RELEASE="13.1.0") == every
    assert tree.compiled() == 0
    tree.set_version("0.1.1")
    assert tree.compiled() == every


@pytest.mark.thorough
def test_a_bad_cuda_setting_is_reported_before_anything_is_compiled(tree: Tree) -> None:
    done = tree.build(EXL_CUDA_ARCH="tomorrow")
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "EXL_CUDA_ARCH is a list such as" in line
    assert not tree.notes.exists()


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how a link looks")
def test_the_cuda_library_comes_beside_the_extension(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tree.csrc.parent / "tools"
    tools.mkdir()
    (tools / "nvcc").write_text(PRETENDER_NVCC)
    (tools / "nvcc").chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_HOME": ""}
    tree.compiled(EXL_CUDA_ARCH="9.0", **env)
    (library,) = tree.csrc.glob("build/lib*/exl_kernels/libexl_cuda.so")
    assert list(library.parent.glob("_C*.so"))
    tree.compiled(EXL_CUDA_ARCH="none", **env)  # files in this folder go into the next wheel
    assert not library.exists()


@pytest.mark.thorough
def test_a_build_in_place_has_the_cuda_library_too(tree: Tree) -> None:
    nvcc = tree.csrc.parent / "nvcc"
    nvcc.write_text(PRETENDER_NVCC)
    nvcc.chmod(0o755)
    env = {"PATH": f"{nvcc.parent}:{os.environ['PATH']}", "CUDA_HOME": ""}
    package = tree.csrc / "python/exl_kernels"
    for architectures, has_library in (("9.0", True), ("none", False)):
        done = tree.build("--inplace", EXL_CUDA_ARCH=architectures, **env)
        assert done.returncode == 0, done.stderr
        assert list(package.glob("_C*.so"))
        assert (package / "libexl_cuda.so").exists() is has_library


@pytest.mark.thorough
def test_an_editable_install_has_the_cuda_library_too(tree: Tree) -> None:
    nvcc = tree.csrc.parent / "nvcc"
    nvcc.write_text(PRETENDER_NVCC)
    nvcc.chmod(0o755)
    script = "import sys, build_backend; build_backend.build_editable(sys.argv[1])"
    clean = {k: v for k, v in os.environ.items() if not k.endswith("FLAGS")}
    env = {
        "PYTHONPATH": str(tree.csrc),
        "PATH": f"{nvcc.parent}:{os.environ['PATH']}",
        "CXX": str(tree.compiler),
        "NOTES": str(tree.notes),
        "STANDARD": "202002",
        "RELEASE": "12.2.0",
        "CUDA_HOME": "",
        "EXL_CUDA_ARCH": "9.0",
    }
    out = tree.csrc.parent / "wheels"
    out.mkdir()
    subprocess.run(
        [sys.executable, "-c", script, out],
        cwd=tree.csrc,
        env=clean | env,
        capture_output=True,
        timeout=60,
        check=True,
    )
    package = tree.csrc / "python/exl_kernels"
    assert list(package.glob("_C*.so"))
    assert (package / "libexl_cuda.so").exists()


@pytest.mark.thorough
def test_objects_have_debug_information_only_on_request(tree: Tree) -> None:
    """It would be 50 of the 55 MB of the extension."""
    for flags, has_it in (("", False), ("-O1 -g -fsanitize=address", True)):
        tree.compiled(CXXFLAGS=flags)
        objects = [line for line in tree.notes.read_text().splitlines() if " -c " in line]
        assert objects
        assert all((" -g0 " not in line) is has_it for line in objects)


@pytest.mark.thorough
def test_a_source_distribution_can_build_all(tree: Tree) -> None:
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", "dist", "--formats=tar"]
    subprocess.run(command, cwd=tree.csrc, check=True, capture_output=True, timeout=60)
    (archive,) = tree.csrc.glob("dist/*.tar")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    wanted = ("setup.py", "*.cpp", "*.h", "*.cu", "*.cuh", "build_*.py")
    sources = {
        str(path.relative_to(tree.csrc)) for pattern in wanted for path in tree.csrc.rglob(pattern)
    }
    assert not sources - names


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"CXX": "/nowhere/g++"}, "/nowhere/g++ cannot be run (No such file or directory)"),
        ({"STANDARD": "201709", "RELEASE": "10.2.1"}, "is too old (10.2.1)"),
        ({"CXX": "false"}, "false failed (exit status 1)"),
    ],
    ids=["missing", "too-old", "broken"],
)
def test_a_missing_compiler_ends_the_build_with_one_line(
    tree: Tree, env: dict[str, str], says: str
) -> None:
    done = tree.build(**env)
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "exl-kernels: needs a C++20 compiler (GCC 11 or newer" in done.stderr
    assert says in done.stderr
    assert "apt install g++" in done.stderr
    assert not tree.notes.exists(), "compiled something"
