"""Drawing tokens on the GPU: settings of all rows go there in one copy, tokens come back in one.

`RowSampler` draws and waits. What it is made of, `SampleBuffers`, has fixed memory on both sides
and so can be part of a captured graph: `fill` writes on the host, `enqueue` is what a graph
captures, and once the stream has got there `read` has the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl_core.ops.cuda.library import Gpu
from exl_core.ops.table import NOTHING_DRAWN, Drawn, RowSettings
from exl_kernels import cuda

_ROW = np.dtype(
    [
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("uniform", "<f8"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("num_top", "<i4"),
        ("first_edit", "<i4"),
        ("last_edit", "<i4"),
        ("row", "<i4"),
        ("mask", "<i8"),
    ]
)
"""`ExlSampleRow`."""

_ALIGNMENT = 16


class Capacity(NamedTuple):
    """The most that one set of buffers has room for."""

    rows: int
    edits: int = 0  # of all rows together
    mask_words: int = 0  # likewise
    top: int = 0  # likeliest tokens of each row

    def covers(self, other: Capacity) -> bool:
        return all(mine >= wanted for mine, wanted in zip(self, other, strict=True))

    def grown(self, other: Capacity) -> Capacity:
        """Room for both; what grows at all grows to a power of two."""
        return Capacity(
            *(
                mine if mine >= wanted else 1 << (wanted - 1).bit_length()
                for mine, wanted in zip(self, other, strict=True)
            )
        )


def wanted_capacity(rows: Sequence[RowSettings], vocab_size: int) -> Capacity:
    words = -(-vocab_size // 32)
    return Capacity(
        len(rows),
        sum(len(row.ids) for row in rows if row.ids is not None),
        sum(words for row in rows if row.mask is not None),
        max((row.num_top for row in rows), default=0),
    )


class _Part(NamedTuple):
    """Some of a buffer, on both sides: the host's as an array, the GPU's as an address."""

    host: np.ndarray[tuple[int], np.dtype[np.generic]]
    address: int
    end: int  # in bytes from the buffer's start


class _Mirror:
    """One buffer, pinned on the host and on the GPU, that is handed out part by part."""

    def __init__(self, gpu: Gpu, size_bytes: int) -> None:
        self._host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = gpu.empty(size_bytes, dtype=torch.uint8)
        self._bytes = self._host.numpy()
        self._end = 0

    def part(self, dtype: np.dtype[np.generic], count: int) -> _Part:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = start + count * dtype.itemsize
        host = self._bytes[start : self._end].view(dtype)
        return _Part(host, self._device.data_ptr() + start, self._end)

    def upload(self, size_bytes: int) -> None:
        self._device[:size_bytes].copy_(self._host[:size_bytes], non_blocking=True)

    def download(self) -> None:
        self._host.copy_(self._device, non_blocking=True)


class SampleBuffers:
    def __init__(self, gpu: Gpu, capacity: Capacity, vocab_size: int) -> None:
        self._gpu = gpu
        self.capacity = capacity
        self._vocab_size = vocab_size
        rows, edits, words, top = capacity
        given = _ROW.itemsize * rows + 12 * edits + 4 * words
        self._settings = _Mirror(gpu, given + 4 * _ALIGNMENT)
        self._rows = self._settings.part(_ROW, rows)
        self._edit_ids = self._settings.part(np.dtype(np.int64), edits)
        self._edit_values = self._settings.part(np.dtype(np.float32), edits)
        # Last, as they are large and most often there are none: then they are not copied.
        self._masks = self._settings.part(np.dtype(np.uint32), words)
        self._results = _Mirror(gpu, 8 * rows * (1 + top) + 4 * _ALIGNMENT)
        self._token_ids = self._results.part(np.dtype(np.int32), rows)
        self._probabilities = self._results.part(np.dtype(np.float32), rows)
        self._top_ids = self._results.part(np.dtype(np.int32), rows * top)
        self._top_probabilities = self._results.part(np.dtype(np.float32), rows * top)

    def fill(self, rows: Sequence[RowSettings]) -> int:
        """Settings of the coming rows, on the host; of how many bytes `enqueue` has to copy.

        Nothing that was enqueued before may still read them.
        """
        edits = words = 0
        for i, row in enumerate(rows):
            first_edit, mask = edits, -1
            if row.ids is not None and row.values is not None:
                edits += len(row.ids)
                self._edit_ids.host[first_edit:edits] = row.ids.numpy()
                self._edit_values.host[first_edit:edits] = row.values.numpy()
            if row.mask is not None:
                mask, words = words, words + -(-self._vocab_size // 32)
                self._masks.host[mask:words] = row.mask.numpy()[: words - mask].view(np.uint32)
            self._rows.host[i] = (
                row.top_p,
                row.min_p,
                row.uniform,
                row.temperature,
                min(row.top_k, self._vocab_size),
                row.num_top,
                first_edit,
                edits,
                row.row,
                mask,
            )
        return self._masks.end if words else self._edit_values.end if edits else self._rows.end

    def enqueue(self, logits: Tensor, num_rows: int, size_bytes: int | None = None) -> None:
        """Copies the settings, all of them unless a size is given, draws, and copies the tokens."""
        self._settings.upload(self._masks.end if size_bytes is None else size_bytes)
        workspace = self._gpu.workspace("sample", num_rows, self._vocab_size)
        args = cuda.Sample(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            rows=num_rows,
            vocab=self._vocab_size,
            settings=self._rows.address,
            edit_ids=self._edit_ids.address,
            edit_values=self._edit_values.address,
            masks=self._masks.address,
            max_top=self.capacity.top,
            token_ids=self._token_ids.address,
            probabilities=self._probabilities.address,
            top_ids=self._top_ids.address,
            top_probabilities=self._top_probabilities.address,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )
        self._gpu.call("sample", args)
        self._results.download()

    def read(self, rows: Sequence[RowSettings]) -> list[Drawn]:
        """What was drawn, after a wait for the stream."""
        token_ids = self._token_ids.host[: len(rows)].tolist()
        probabilities = self._probabilities.host[: len(rows)].tolist()
        return [
            NOTHING_DRAWN if token_id < 0 else Drawn(token_id, p, self._top(i, row.num_top))
            for i, (row, token_id, p) in enumerate(zip(rows, token_ids, probabilities, strict=True))
        ]

    def _top(self, i: int, num_top: int) -> list[tuple[int, float]]:
        first = i * self.capacity.top
        ids = self._top_ids.host[first : first + num_top].tolist()
        probabilities = self._top_probabilities.host[first : first + num_top].tolist()
        return [(one, p) for one, p in zip(ids, probabilities, strict=True) if one >= 0]


class RowSampler:
    """`sample_rows` of one GPU; no row may want more than `cuda.MAX_TOP` of the likeliest."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers: SampleBuffers | None = None
        self._vocab_size = 0

    def draw(self, logits: Tensor, rows: Sequence[RowSettings]) -> list[Drawn]:
        """logits [n, vocab], strided rows on the GPU. Waits for them and for the tokens."""
        if not rows:
            return []
        buffers = self._room(rows, logits.shape[1])
        size_bytes = buffers.fill(rows)
        buffers.enqueue(logits, len(rows), size_bytes)
        torch.cuda.current_stream(self._gpu.device).synchronize()
        return buffers.read(rows)

    def _room(self, rows: Sequence[RowSettings], vocab_size: int) -> SampleBuffers:
        wanted = wanted_capacity(rows, vocab_size)
        held = self._buffers
        if held is None or self._vocab_size != vocab_size or not held.capacity.covers(wanted):
            before = Capacity(0) if held is None else held.capacity
            held = SampleBuffers(self._gpu, before.grown(wanted), vocab_size)
            self._buffers, self._vocab_size = held, vocab_size
        return held
