"""Reading files that a stranger wrote, so that a damaged one is an error and not a crash.

Knows JSON, UTF-8 and sizes, and nothing of what the contents mean.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

from exl_core.errors import ModelError, RequestError

CONFIG_LIMIT_BYTES = 16 * 2**20
"""Real configurations take kilobytes; those with a vocabulary or a chat template, a few MiB."""


def is_present(path: Path, error: type[ModelError]) -> bool:
    """Whether there is a file; anything else by that name is an error, not its absence."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as cause:
        raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as cause:  # a link that leads nowhere
        raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    if not is_regular:
        raise error("is not a regular file", where=path)
    return True


def read_optional_json_object(path: Path, error: type[ModelError]) -> dict[str, object]:
    """The object in a JSON file; {} when there is no such file."""
    return read_json_object(path, error) if is_present(path, error) else {}


def read_bytes(path: Path, error: type[ModelError], limit_bytes: int) -> bytes:
    """The whole file, which must not be larger than `limit_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as cause:
        raise error("cannot be read", where=path, got=cause.strerror or cause) from cause
    if len(data) > limit_bytes:
        raise error(
            "file is too large for what it is",
            where=path,
            expected=f"at most {limit_bytes} bytes",
            got=f"{path.stat().st_size}",
        )
    return data


def read_json_object(
    path: Path, error: type[ModelError], limit_bytes: int = CONFIG_LIMIT_BYTES
) -> dict[str, object]:
    """The JSON object that a file holds; raises `error` for anything else."""
    return parse_json_object(read_bytes(path, error, limit_bytes), error, path)


def parse_json_object(data: bytes, error: type[ModelError], where: object) -> dict[str, object]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as cause:
        # ValueError also stands for bad UTF-8 and for integers of thousands of digits.
        raise error("is not valid JSON", where=where, got=str(cause)[:200]) from cause
    if not isinstance(value, dict):
        raise error("holds no JSON object", where=where, got=type(value).__name__)
    return value


def read_text_file(path: Path) -> str:
    """A UTF-8 file that a user names, whole; line ends stay as they are."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(
            "the file cannot be read", where=path, got=error.strerror, next_step="Check the path."
        ) from error
    return decode_text(data, str(path))


def decode_text(data: bytes, where: str) -> str:
    """UTF-8, or an error that says which byte is not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "the text is not UTF-8",
            where=where,
            got=f"byte 0x{data[error.start]:02x} at offset {error.start}",
            next_step="Convert it first, for example with iconv.",
        ) from error
