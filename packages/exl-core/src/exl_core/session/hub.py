"""Downloads of models from the hub into its cache: chosen, resumed, verified.

`huggingface_hub` keeps nothing of a file whose download was interrupted. Therefore the contents are
fetched here, blob by blob, into files that the next run continues. Each is compared with the hash
that the hub lists before it gets its final name. `snapshot_download` then links the blobs into a
snapshot, as for any other program, and writes the branch's commit.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from exl_core.errors import DiskFullError, ExlError, ModelNotFoundError, WeightFileError
from exl_core.files import naming_disk_failures
from exl_core.session.names import (
    DEFAULT_BRANCH,
    HubName,
    ModelFileSet,
    did_you_mean,
    matching_branch,
    matching_file_set,
    model_file_sets,
    near_names,
)
from exl_core.session.pulled import (
    PART_SUFFIX,
    cache_folder,
    default_file_set,
    repository_folder,
)
from exl_core.settings import is_offline

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

Progress = Callable[[int, int], None]  # called with (bytes present, total bytes)

PARALLEL_FILES = 4
_HASHED_BYTES = 2**20
_NEAR_LIMIT = 200  # models of an owner that are compared with a name that does not exist


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at one commit."""

    name: str
    size_bytes: int
    blob: str
    """Name of its blob: SHA-256 of the contents for large files, else git's SHA-1."""

    @property
    def is_large(self) -> bool:
        return len(self.blob) == 64


def download(name: HubName, progress: Progress | None = None) -> Path:
    """Brings a model up to date in the hub's cache. Returns its folder or its first GGUF file.

    Raises ModelNotFoundError if the hub does not have it or cannot be reached, DiskFullError, and
    WeightFileError for contents that differ from the hub's hash.
    """
    from huggingface_hub import snapshot_download

    if is_offline():
        raise ModelNotFoundError(
            "is not on this machine, and exl is offline",
            where=name,
            next_step=f"Run 'exl pull {name}' with a network, without HF_HUB_OFFLINE, or see "
            "'exl list'.",
        )
    with _explaining(name):
        branch, info, chosen = _chosen(name)
        assert info.sha is not None
        files = [file for file in _files(info) if file.name in chosen.files]
        _fetch_blobs(name.repo, info.sha, files, progress)
        patterns = [escape(file.name) for file in files]
        folder = snapshot_download(
            name.repo, revision=branch, allow_patterns=patterns, tqdm_class=_no_bar()
        )
    return Path(folder, chosen.files[0]) if chosen.is_gguf else Path(folder)


def _chosen(name: HubName) -> tuple[str, ModelInfo, ModelFileSet]:
    """Branch, repository at that branch, and the files of the model that `name` means."""
    from huggingface_hub import HfApi

    branch = name.revision or DEFAULT_BRANCH
    info = HfApi().model_info(name.repo, revision=branch, files_metadata=True)
    found = model_file_sets(file.name for file in _files(info))
    if name.tag is None:
        return branch, info, _default(name, found)
    chosen = matching_file_set(found, name.tag)
    if chosen is not None:
        return branch, info, _whole(name, chosen)
    branches = [ref.name for ref in HfApi().list_repo_refs(name.repo).branches]
    other = matching_branch(branches, name.tag)
    if other is not None and name.revision is None:
        return _chosen(HubName(name.repo, revision=other))
    tags = [one.label for one in found if one.label] + [b for b in branches if b != DEFAULT_BRANCH]
    raise ModelNotFoundError(
        "the repository has no such quantization or branch",
        where=name,
        expected=", ".join(tags) or "no tag",
        got=name.tag,
        next_step=did_you_mean([f"{name.repo}:{tag}" for tag in near_names(name.tag, tags)]),
    )


def _default(name: HubName, found: Sequence[ModelFileSet]) -> ModelFileSet:
    chosen = default_file_set(found)
    if chosen is not None:
        return _whole(name, chosen)
    if found:
        tags = [one.label for one in found if one.label]
        raise ModelNotFoundError(
            "the repository has several quantizations and none is Q4_K_M",
            where=name,
            expected=" or ".join(tags),
            next_step=f"Name one, as in {name.repo}:{tags[0]}.",
        )
    from huggingface_hub import HfApi

    branches = [ref.name for ref in HfApi().list_repo_refs(name.repo).branches]
    others = [branch for branch in branches if branch != (name.revision or DEFAULT_BRANCH)]
    advice = f"Its branches may; name one, as in {name.repo}:{others[0]}." if others else None
    raise ModelNotFoundError(
        "the repository has no model in a known format",
        where=name,
        expected="config.json with safetensors, or GGUF files",
        got=f"branches {', '.join(others)}" if others else None,
        next_step=advice,
    )


def _whole(name: HubName, chosen: ModelFileSet) -> ModelFileSet:
    if chosen.missing:
        raise ModelNotFoundError(
            f"the repository lacks {chosen.missing} parts of the model", where=name
        )
    return chosen


def _files(info: ModelInfo) -> list[HubFile]:
    return [
        HubFile(
            one.rfilename,
            one.size or 0,
            one.lfs.sha256 if one.lfs is not None else one.blob_id or "",
        )
        for one in info.siblings or ()
    ]


def _fetch_blobs(
    repo: str, commit: str, files: Sequence[HubFile], progress: Progress | None
) -> None:
    """Downloads the contents that the cache lacks, several files at a time, and verifies them."""
    folder = repository_folder(repo) / "blobs"
    missing = [file for file in files if file.blob and not (folder / file.blob).exists()]
    total = sum(file.size_bytes for file in files)
    started = [folder / f"{file.blob}{PART_SUFFIX}" for file in missing]
    present = sum(part.stat().st_size for part in started if part.exists())
    needed = sum(file.size_bytes for file in missing) - present
    _check_space(needed, folder, repo)
    count = _Count(total - sum(file.size_bytes for file in missing), total, progress)
    with naming_disk_failures(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        jobs = [pool.submit(_fetch_blob, repo, commit, file, folder, count) for file in missing]
        try:
            for job in jobs:
                job.result()
        except BaseException:  # Ctrl-C too: the parts stay for the next run
            count.is_stopped = True
            pool.shutdown(cancel_futures=True)
            raise


def _check_space(needed: int, folder: Path, where: str) -> None:
    """Raises DiskFullError if `needed` bytes do not fit on the file system of `folder`."""
    present = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(present).free
    if needed > free:
        raise DiskFullError(
            "the model does not fit on the disk",
            where=where,
            expected=f"{needed / 1e6:.0f} MB in {cache_folder()}",
            got=f"{free / 1e6:.0f} MB free",
            next_step="Remove models with 'exl rm', or set HF_HOME to a folder on another disk.",
        )


def _fetch_blob(repo: str, commit: str, file: HubFile, folder: Path, count: _Count) -> None:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._fixes import WeakFileLock
    from huggingface_hub.utils._headers import build_hf_headers

    if file.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # only the hub's own protocol transfers such a file; snapshot_download uses it
    blob, part = folder / file.blob, folder / f"{file.blob}{PART_SUFFIX}"
    lock = cache_folder() / ".locks" / folder.parent.name / f"{file.blob}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # the lock that huggingface_hub takes for this blob
        if blob.exists():  # another process was faster
            return
        with _disk_failures(part), part.open("ab") as target:
            have = target.tell()
            if have > file.size_bytes:
                have = target.truncate(0)
            count.add(have)
            http_get(
                hf_hub_url(repo, file.name, revision=commit),
                _Counted(target, count),  # type: ignore[arg-type]
                resume_size=have,
                headers=build_hf_headers(),
                expected_size=file.size_bytes,
                displayed_filename=file.name,
                tqdm_class=_no_bar(),
            )
        _verify(part, file, repo)
        part.rename(blob)


@contextmanager
def _disk_failures(part: Path) -> Iterator[None]:
    """Like `naming_disk_failures`. Errors of the connection, which have no number, pass through."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(part)):
            raise
        with naming_disk_failures(part):
            raise


def _verify(part: Path, file: HubFile, repo: str) -> None:
    """Compares a downloaded file with its hash. Deletes it and raises WeightFileError if they
    differ."""
    digest = hashlib.sha256() if file.is_large else hashlib.sha1(usedforsecurity=False)
    if not file.is_large:
        digest.update(f"blob {file.size_bytes}\0".encode())
    with part.open("rb") as contents:
        while piece := contents.read(_HASHED_BYTES):
            digest.update(piece)
    if digest.hexdigest() != file.blob:
        part.unlink()
        raise WeightFileError(
            "the downloaded contents differ from the hub's hash",
            where=f"{repo}/{file.name}",
            expected=file.blob,
            got=digest.hexdigest(),
            next_step="Run the same command again; a proxy or a cache may have damaged the file.",
        )


def _no_bar() -> Any:
    """Class of progress bars that are never shown: progress goes to the caller."""
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return NoBar


class _Count:
    """Bytes of all files of one download, from several threads."""

    def __init__(self, present: int, total: int, progress: Progress | None) -> None:
        self.present = present
        self.total = total
        self.is_stopped = False
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.present += size
            if self._progress is not None:
                self._progress(self.present, self.total)


class _Counted:
    """A file that counts what is written, for `http_get`, and ends a stopped download."""

    def __init__(self, file: BinaryIO, count: _Count) -> None:
        self._file = file
        self._count = count

    def write(self, data: bytes) -> int:
        if self._count.is_stopped:
            raise ExlError("the download was stopped")
        size = self._file.write(data)
        self._count.add(size)
        return size

    def truncate(self) -> int:
        """Called after `seek`, where a server ignored the range: what follows starts anew."""
        before = self._file.seek(0, 2)
        self._count.add(-before)
        return self._file.truncate(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _explaining(name: HubName) -> Iterator[None]:
    """Converts the exceptions of the hub's client into one error with the next step."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    advice: str | None = "Check the network; 'exl list' shows the models on this machine."
    try:
        yield
        return
    except GatedRepoError as error:
        cause: Exception = error
        what = "the hub gives this model only to those who have accepted its terms"
        advice = "Accept them on the model's page, then log in with 'hf auth login'."
    except RepositoryNotFoundError as error:
        cause, what = error, "the hub has no such model, or it is private"
        near = _near_on_hub(name.repo)
        advice = did_you_mean(near) or "Check the spelling, and 'hf auth login' for private models."
    except RevisionNotFoundError as error:
        cause, what = error, "the repository has no such branch, tag or commit"
        advice = "Check the spelling; the model's page lists its branches."
    except HFValidationError as error:
        cause, what, advice = error, "is no name of a model on the hub", None
    except (HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, ExlError):
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            with naming_disk_failures(Path(error.filename)):  # the cache, and not the network
                raise
        cause, what = error, "the hub did not give the model"
    raise ModelNotFoundError(what, where=name, got=_first_line(cause), next_step=advice) from cause


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _near_on_hub(repo: str) -> list[str]:
    """Models of the same owner with similar names; none if the hub does not answer."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        models = list(HfApi().list_models(author=repo.partition("/")[0], limit=_NEAR_LIMIT))
    except (HfHubHTTPError, HTTPError, OSError):
        return []
    return near_names(repo, [model.id for model in models])
