"""File of results per window, so that a killed run can be resumed.

Layout: a header line of JSON with the settings of the run, followed by frames. A frame is the size
(8 bytes, little-endian) and the CRC-32 (4 bytes) of its body, and the body, which is tensors in
safetensors format.

A finished window is appended and flushed to the disk. An incomplete or damaged last frame comes
from an interrupted write: it is cut off and its window is computed again. A lock allows one run at
a time. This module knows bytes and tensors, not their meaning.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from exl_core.errors import ExlError, RequestError
from exl_core.files import is_present, naming_disk_failures

_FRAME = struct.Struct("<QI")
_HEADER_LIMIT_BYTES = 1024 * 1024


class WindowFile:
    """Results of windows 0, 1, ... of one run. A context manager: the file is locked until exit."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        """Opens or creates the file. Raises RequestError if it has another format, if its header
        differs from `header`, or if another run has locked it."""
        self.path = path
        try:
            self._file: BinaryIO = (
                path.open("r+b") if is_present(path, RequestError) else path.open("x+b")
            )
        except OSError as error:
            raise RequestError(
                "the file cannot be opened", where=path, got=error.strerror
            ) from error
        try:
            self._lock()
            self._starts: list[int] = []
            if self._file.seek(0, os.SEEK_END) == 0:
                with naming_disk_failures(path):
                    self._file.write(json.dumps(dict(header)).encode() + b"\n")
                    self._flush()
            self.header = self._read_header()
            self._check_header(header)
            self._find_frames()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        # Each write is flushed at once. What is left in the buffer belongs to a write that failed,
        # whose error has been raised.
        with suppress(OSError):
            self._file.close()

    def __len__(self) -> int:
        """Number of finished windows."""
        return len(self._starts)

    def read(self, number: int) -> dict[str, Tensor]:
        self._file.seek(self._starts[number])
        body = self._read_frame()
        try:
            if body is None:
                raise SafetensorError("the file has changed")
            return load(body)
        except SafetensorError as error:
            raise RequestError(
                f"window {number + 1} is damaged",
                where=self.path,
                got=str(error)[:200],
                next_step="Remove the file and start again.",
            ) from error

    def append(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds the next window. It is on the disk when this returns."""
        body = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
            self._flush()
        except OSError as error:
            raise ExlError(
                "the results so far cannot be saved", where=self.path, got=error.strerror
            ) from error
        self._starts.append(start)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RequestError("another run is writing to the file", where=self.path) from error

    def _read_header(self) -> dict[str, object]:
        self._file.seek(0)
        line = self._file.readline(_HEADER_LIMIT_BYTES)
        try:
            header = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise RequestError(
                "the file holds no windows of an evaluation",
                where=self.path,
                next_step="Name another file; this one is left as it is.",
            )
        return header

    def _check_header(self, wanted: Mapping[str, object]) -> None:
        for name, value in wanted.items():
            if self.header.get(name) != value:
                raise RequestError(
                    f"the file holds windows of another run: {name} differs",
                    where=self.path,
                    expected=value,
                    got=self.header.get(name),
                    next_step="Name another file; this one is left as it is.",
                )

    def _find_frames(self) -> None:
        """Finds the starts of all complete frames, and cuts off the rest of the file."""
        end = self._file.tell()
        while self._read_frame() is not None:
            self._starts.append(end)
            end = self._file.tell()
        self._file.truncate(end)

    def _read_frame(self) -> bytes | None:
        """Body of the frame at the current position; None if it is incomplete or damaged."""
        left = os.fstat(self._file.fileno()).st_size - self._file.tell() - _FRAME.size
        if left < 0:
            return None
        size, checksum = _FRAME.unpack(self._file.read(_FRAME.size))
        if size > left:
            return None
        body = self._file.read(size)
        return body if zlib.crc32(body) == checksum else None


def each_window(
    count: int, find: Callable[[int], Mapping[str, Tensor]], kept: WindowFile | None
) -> Iterator[tuple[Mapping[str, Tensor], bool]]:
    """Yields the results of windows 0 .. count - 1, and whether each came from an earlier run.

    `find` computes a window that `kept` does not have; the result is then added to `kept`. None
    computes all windows and saves none.
    """
    for number in range(count):
        if kept is not None and number < len(kept):
            yield kept.read(number), True
            continue
        found = find(number)
        if kept is not None:
            kept.append(found)
        yield found, False


@contextmanager
def opened(path: Path | None, header: Mapping[str, object]) -> Iterator[WindowFile | None]:
    """Opens the file and closes it after the block; None for no path."""
    if path is None:
        yield None
        return
    with WindowFile(path, header) as file:
        yield file
