"""Reads untrusted files with typed errors, and writes files atomically.

A damaged file raises an `ExlError` instead of crashing, and no reader ever sees a partly written
file. Knows JSON, UTF-8 and sizes, and nothing of the meaning of the contents.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from exl_core.errors import DiskFullError, ExlError, RequestError, WriteError

CONFIG_LIMIT_BYTES = 16 * 2**20
"""Limit on JSON files. Real configurations take kilobytes, or a few MiB with a vocabulary or a
chat template."""

TEXT_LIMIT_BYTES = 2**30
"""Limit on texts to measure or calibrate with."""
PROMPT_LIMIT_BYTES = 64 * 2**20
"""Limit on prompts: more than a context of ten million tokens holds."""

LFS_HEAD = b"version https://git-lfs.github.com/spec/v1"
"""First bytes of a Git LFS pointer (Git LFS specification, "The Pointer"). A clone without the LFS
extension has such a text of three lines in place of each large file."""

_PIECE_BYTES = 1 << 20
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,6})|/dev/stdin")


def is_present(path: Path, error: type[ExlError]) -> bool:
    """Whether `path` is a regular file. Raises `error` if it exists but is something else."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as cause:
        raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as cause:  # a broken link
        raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    if not is_regular:
        raise error("is not a regular file", where=path)
    return True


def read_optional_json_object(path: Path, error: type[ExlError]) -> dict[str, object]:
    """The object in a JSON file; {} if the file does not exist."""
    return read_json_object(path, error) if is_present(path, error) else {}


def open_regular(path: Path, error: type[ExlError]) -> BinaryIO:
    """Opens a file that a user named. Raises `error` for a FIFO, a device, a socket or a directory.

    Reading a FIFO waits for a writer that may never come, and a device may have no end.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits. It has no effect on a regular file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as cause:
        raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise error(
        "cannot be read",
        where=path,
        expected="a regular file",
        got={stat.S_IFIFO: "a FIFO or pipe", stat.S_IFDIR: "a directory"}.get(kind, "a device"),
        next_step="Save what it would give to a file first." if kind == stat.S_IFIFO else None,
    )


def read_bytes(path: Path, error: type[ExlError], limit_bytes: int) -> bytes:
    """Contents of a regular file. Raises `error` if it is larger than `limit_bytes`.

    Takes no more memory than the contents: `file.read(n)` allocates n bytes, whatever it reads.
    """
    with open_regular(path, error) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size + 1) if size <= limit_bytes else b""
            while size < len(data) <= limit_bytes:  # files of /proc say that they are empty
                more = file.read(min(_PIECE_BYTES, limit_bytes + 1 - len(data)))
                if not more:
                    break
                data += more
        except OSError as cause:
            raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    if max(size, len(data)) > limit_bytes:
        raise error(
            "file is too large for what it is",
            where=path,
            expected=f"at most {limit_bytes} bytes",
            got=f"{max(size, len(data))}",
        )
    return data


def check_no_lfs_pointer(data: bytes, error: type[ExlError], where: object) -> None:
    """Raises `error` if the file that begins with `data` is a Git LFS pointer."""
    if data.startswith(LFS_HEAD):
        raise error(
            "is a Git LFS pointer, not the file itself",
            where=where,
            next_step="Run 'git lfs pull' in its folder, or download the model with 'exl pull'.",
        )


def read_json_object(
    path: Path, error: type[ExlError], limit_bytes: int = CONFIG_LIMIT_BYTES
) -> dict[str, object]:
    """The JSON object in a file. Raises `error` for anything else."""
    return parse_json_object(read_bytes(path, error, limit_bytes), error, path)


def parse_json_object(data: bytes, error: type[ExlError], where: object) -> dict[str, object]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as cause:
        check_no_lfs_pointer(data, error, where)
        # ValueError includes bad UTF-8 and integers of thousands of digits.
        raise error("is not valid JSON", where=where, got=str(cause)[:200]) from cause
    if not isinstance(value, dict):
        raise error("holds no JSON object", where=where, got=type(value).__name__)
    return value


TEMPORARY_SUFFIX = ".tmp"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes `pieces` to `path`, synced to the disk, or leaves `path` unchanged.

    Raises `DiskFullError` for a full disk and `WriteError` for other failures. A killed process
    leaves `path` unchanged as well, but possibly a file with `TEMPORARY_SUFFIX`. Not safe for
    several writers of one path.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with naming_disk_failures(path):
        try:
            with temporary.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def check_writable(*paths: Path) -> None:
    """Raises `WriteError` for a path that `write_atomically` could not write.

    Called before long work, whose result these files become. Creates missing folders. The files
    themselves stay as they are.
    """
    for path in paths:
        folder = path.parent
        with naming_disk_failures(folder):
            if folder.exists() and not folder.is_dir():
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            folder.mkdir(parents=True, exist_ok=True)
        with naming_disk_failures(path):
            if path.is_dir():
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            with tempfile.NamedTemporaryFile(dir=folder):
                pass


def write_json(path: Path, value: Mapping[str, object], indent: int | None = 2) -> None:
    """Writes a JSON object with `write_atomically`, indented by default."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    write_atomically(path, [encode_text(text), b"\n"])


def encode_text(text: str) -> bytes:
    """UTF-8 of a text. Half a surrogate pair becomes an escape, such as `\\udcff`.

    Python has these in names of files that are not UTF-8. JSON reads the escape back.
    """
    return text.encode("utf-8", errors="backslashreplace")


def sync_folder(folder: Path) -> None:
    """Syncs the folder's directory entries, created and removed, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming_disk_failures(path: Path) -> Iterator[None]:
    """Converts file system errors inside the block to typed errors about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskFullError("there is no space left", where=path, got=error.strerror) from error
        raise WriteError("cannot be written", where=path, got=error.strerror or error) from error


def inherited_pipe(path: Path) -> int | None:
    """Descriptor of a pipe that the shell passed as a path, as bash does for `<(command)`, or that
    is `/dev/stdin`.

    None for any other path. A FIFO of the file system is no such pipe: it may never get a writer.
    """
    match = _DESCRIPTOR.fullmatch(str(path))
    if match is None:
        return None
    descriptor = int(match[1] or 0)
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return None
    return descriptor if is_pipe else None


def read_text_file(path: Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Text of a UTF-8 file given by the user. Line ends are preserved."""
    return decode_text(read_bytes(path, RequestError, limit_bytes), str(path))


def decode_text(data: bytes, where: str) -> str:
    """Decodes UTF-8, without the byte order mark that editors of Windows write. The error for
    invalid text names the byte and its offset."""
    text = data.removeprefix(BOM_UTF8)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = len(data) - len(text) + error.start
        raise RequestError(
            "the text is not UTF-8",
            where=where,
            got=f"byte 0x{data[offset]:02x} at offset {offset}",
            next_step="Convert it first, for example with iconv.",
        ) from error
