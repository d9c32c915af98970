"""Models in the hub's cache on this machine: list them, find one by name, remove one.

The folder is that of huggingface_hub, so models that other programs downloaded are listed too, and
models pulled by exl are found by them. Uses no network. Layout: `models--OWNER--NAME/` holds
`blobs/ETAG` (contents), `snapshots/COMMIT/FILE` (links to blobs) and `refs/BRANCH` (commits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import ExlError, ModelError
from exl_core.files import naming_disk_failures, read_json_object
from exl_core.session.names import (
    DEFAULT_BRANCH,
    HubName,
    ModelFileSet,
    matching_branch,
    matching_file_set,
    model_file_sets,
)

PART_SUFFIX = ".exl-part"
"""Ending of blobs whose download was interrupted; the next download continues them."""


@dataclass(frozen=True, slots=True)
class PulledModel:
    """One model in the cache."""

    name: str
    """`owner/name`, `owner/name:TAG` or `owner/name@REVISION`."""
    path: Path
    """Folder or first GGUF file, for a loader."""
    files: tuple[Path, ...]
    """Its links in the snapshot folder."""
    size_bytes: int
    format: str
    is_complete: bool
    modified_s: float
    """Time of its latest file, in seconds since 1970."""


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def pulled_models() -> list[PulledModel]:
    """All models in the cache, sorted by name."""
    folders = sorted(cache_folder().glob("models--*--*"))
    return sorted(
        (model for folder in folders for model in _models_of(folder)), key=lambda one: one.name
    )


def pulled_model(name: HubName) -> PulledModel | None:
    """The complete model in the cache that `name` means exactly, without asking the hub."""
    folder = repository_folder(name.repo)
    refs = _refs(folder)
    branch = name.revision or DEFAULT_BRANCH
    commit = refs.get(branch, branch)
    found = _file_sets(folder / "snapshots" / commit)
    if name.tag is not None:
        chosen = matching_file_set(found, name.tag)
        if chosen is None and name.revision is None:
            other = matching_branch(refs, name.tag)
            return None if other is None else pulled_model(HubName(name.repo, revision=other))
    else:
        chosen = default_file_set(found)
    if chosen is None:
        return None
    model = _described(name.repo, branch, folder / "snapshots" / commit, chosen)
    return model if model.is_complete else None


def default_file_set(found: Sequence[ModelFileSet]) -> ModelFileSet | None:
    """The model that a name without a tag means: safetensors, the only GGUF model, or Q4_K_M."""
    for one in found:
        if not one.is_gguf:
            return one
    if len(found) == 1:
        return found[0]
    return next((one for one in found if one.label == "Q4_K_M"), None)


def remove_model(model: PulledModel) -> int:
    """Deletes the model's files that no other model uses. Returns the number of bytes freed.

    Files in the same repository that belong to no model of ours stay.
    """
    snapshot = _snapshot_of(model)
    repo_folder = snapshot.parent.parent
    kept = {
        blob
        for other in _models_of(repo_folder)
        if other.path != model.path
        for blob in map(_blob, other.files)
    }
    with naming_disk_failures(repo_folder):
        freed = 0
        for link in model.files:
            blob = _blob(link)
            link.unlink()
            if blob != link and blob not in kept and blob.is_file():
                freed += blob.stat().st_size
                blob.unlink()
        for part in (repo_folder / "blobs").glob(f"*{PART_SUFFIX}"):
            freed += part.stat().st_size
            part.unlink()
        if not any(_files(repo_folder / "snapshots")):
            freed += _remove_tree(repo_folder)
    return freed


def _snapshot_of(model: PulledModel) -> Path:
    for folder in model.files[0].parents:
        if folder.parent.name == "snapshots":
            return folder
    raise ExlError("is not in the hub's cache", where=model.path)


def _remove_tree(folder: Path) -> int:
    """Deletes a repository's folder. Returns the bytes of its regular files."""
    import shutil

    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    freed = sum(path.stat().st_size for path in paths)
    shutil.rmtree(folder)
    return freed


def _models_of(folder: Path) -> list[PulledModel]:
    repo = "/".join(folder.name.split("--")[1:3])
    refs = _refs(folder)
    models = []
    for snapshot in sorted((folder / "snapshots").glob("*")):
        branches = [ref for ref, commit in refs.items() if commit == snapshot.name]
        branch = DEFAULT_BRANCH if DEFAULT_BRANCH in branches else (branches or [snapshot.name])[0]
        models += [_described(repo, branch, snapshot, one) for one in _file_sets(snapshot)]
    return models


def _described(repo: str, branch: str, snapshot: Path, one: ModelFileSet) -> PulledModel:
    tag = one.label
    revision = None if branch == DEFAULT_BRANCH else branch
    if tag is None and revision is not None and len(revision) < 40:
        tag, revision = revision, None
    files = tuple(snapshot / name for name in one.files)
    stats = [file.stat() for file in files]
    return PulledModel(
        name=str(HubName(repo, tag, revision)),
        path=files[0] if one.is_gguf else snapshot,
        files=files,
        size_bytes=sum(stat.st_size for stat in stats),
        format="gguf" if one.is_gguf else "safetensors",
        is_complete=one.missing == 0 and (one.is_gguf or _has_all_shards(snapshot)),
        modified_s=max(stat.st_mtime for stat in stats),
    )


def _has_all_shards(snapshot: Path) -> bool:
    """Are all files there that the index of the safetensors names?"""
    index = snapshot / "model.safetensors.index.json"
    if not index.exists():
        return True
    try:
        weight_map = read_json_object(index, ModelError).get("weight_map")
    except ModelError:
        return False
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    present = all((snapshot / str(name)).exists() for name in names)
    # EXL2 converters copy the index of the source model, which lists other files.
    is_source_index = any("-of-" not in file.name for file in snapshot.glob("*.safetensors"))
    return present or is_source_index


def _file_sets(snapshot: Path) -> list[ModelFileSet]:
    return model_file_sets(_files(snapshot))


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of the files, broken links left out."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _refs(folder: Path) -> dict[str, str]:
    """Commits by branch or tag."""
    refs = folder / "refs"
    return {
        path.relative_to(refs).as_posix(): path.read_text(encoding="ascii").strip()
        for path in sorted(refs.rglob("*"))
        if path.is_file()
    }


def _blob(link: Path) -> Path:
    return link.resolve()
