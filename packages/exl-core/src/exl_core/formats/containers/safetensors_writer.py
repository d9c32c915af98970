"""Writes safetensors files of any size with the memory of one piece of a tensor.

The safetensors library needs all tensors of a file at once, which takes 8 GB for a shard of 8 GB.
This module writes the header first, and then each tensor in as many pieces as its owner provides
(format: safetensors documentation, "Format"). The library reads these files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exl_core.files import write_atomically

TYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8  # alignment of the data, so that every dtype can be read without a copy


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write. `pieces` is called when its values are written, and yields them in
    order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """A copy of the tensor, aligned like new tensors."""
        # Copy each piece: it may be a view of a mapped file, which is released after it.
        pieces = [piece.clone() for piece in self.pieces()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def whole(name: str, tensor: Tensor) -> Entry:
    """Entry for a tensor that is in memory."""
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def write_safetensors(path: Path, entries: Sequence[Entry]) -> None:
    """Writes the whole file or nothing. Equal entries give equal bytes. Raises the errors of
    `write_atomically`."""
    write_atomically(path, _file_pieces(entries))


def _file_pieces(entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    offset = 0
    for entry in entries:
        if entry.name in header:
            raise ValueError(f"two tensors are called {entry.name}")
        header[entry.name] = {
            "dtype": TYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.size_bytes],
        }
        offset += entry.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for entry in entries:
        left = entry.size_bytes
        for piece in entry.pieces():
            left -= piece.nbytes
            if piece.dtype is not entry.dtype or left < 0:
                raise ValueError(f"the pieces of {entry.name} are not what was announced")
            yield as_bytes(piece)
        if left:
            raise ValueError(f"the pieces of {entry.name} are {left} bytes short")


def as_bytes(tensor: Tensor) -> memoryview:
    """Bytes of the values in row-major order. No copy if the tensor is contiguous and on the
    CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
