"""Environment variables of the alias. Only this module of the package reads or writes them.

The launcher passes its options to the program, and to the processes that the program starts, in
`EXL_ALIAS_*` variables.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

_MODELS = "EXL_ALIAS_MODELS"
_STRICT = "EXL_ALIAS_STRICT"
_DEVICE = "EXL_ALIAS_DEVICE"
_CUDA_NOOP = "EXL_ALIAS_CUDA_NOOP"


def model_paths() -> dict[str, str]:
    """Model paths in a program, and the models that replace them (`--model OLD=NEW`)."""
    text = os.environ.get(_MODELS)
    return dict(json.loads(text)) if text else {}


def is_strict() -> bool:
    """Settings without effect are errors (`--strict`)."""
    return _STRICT in os.environ


def device() -> str:
    """Device of all models (`--device`)."""
    return os.environ.get(_DEVICE) or "auto"


def is_cuda_noop() -> bool:
    """Calls to torch.cuda that need a GPU do nothing (`--cuda-noop`)."""
    return _CUDA_NOOP in os.environ


def is_set(name: str) -> bool:
    """Whether one of exllamav2's own switches, such as EXLLAMA_NO_GRAPHS, is set."""
    return name in os.environ


def store_options(
    *,
    models: dict[str, str] | None = None,
    strict: bool = False,
    device: str | None = None,
    threads: int | None = None,
    cuda_noop: bool = False,
) -> None:
    """Set the options of this process and of its child processes."""
    if models:
        os.environ[_MODELS] = json.dumps({**model_paths(), **models})
    if strict:
        os.environ[_STRICT] = "1"
    if device is not None:
        os.environ[_DEVICE] = device
    if threads is not None:
        os.environ["EXL_THREADS"] = str(threads)
    if cuda_noop:
        os.environ[_CUDA_NOOP] = "1"


def put_on_python_path(*folders: Path) -> None:
    """Let child processes search these folders for modules.

    Python still searches the folder of a child's script first, with -c the current folder: a
    checkout of the original there wins.
    """
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = [str(folder) for folder in folders]
    kept = [folder for folder in known if folder and folder not in added]
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *kept])
