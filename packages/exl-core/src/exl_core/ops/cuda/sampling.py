"""Drawing tokens on the GPU: the settings of all rows go there in one copy.

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
from exl_core.ops.table import NOTHING_DRAWN, Drawn, Onward, RowSettings
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
    """Some of a buffer: as the host's array, and as an address for the GPU."""

    host: np.ndarray[tuple[int], np.dtype[np.generic]]
    address: int
    end: int  # in bytes from the buffer's start


class _Pinned:
    """Memory of the host that the GPU can reach, or has a copy of, handed out part by part."""

    def __init__(self, size_bytes: int) -> None:
        self.host = torch.zeros(size_bytes + 4 * _ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        self._bytes = self.host.numpy()
        self._end = 0

    def part(self, dtype: np.dtype[np.generic], count: int, on_gpu: Tensor) -> _Part:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = start + count * dtype.itemsize
        host = self._bytes[start : self._end].view(dtype)
        return _Part(host, on_gpu.data_ptr() + start, self._end)


class SampleBuffers:
    def __init__(self, gpu: Gpu, capacity: Capacity, vocab_size: int) -> None:
        self._gpu = gpu
        self.capacity = capacity
        self._vocab_size = vocab_size
        rows, edits, words, top = capacity
        given = _Pinned(_ROW.itemsize * rows + 12 * edits + 4 * words)
        self._given, self._copied = given.host, torch.empty_like(given.host, device=gpu.device)
        self._rows = given.part(_ROW, rows, self._copied)
        self._edit_ids = given.part(np.dtype(np.int64), edits, self._copied)
        self._edit_values = given.part(np.dtype(np.float32), edits, self._copied)
        # Last, as they are large and most often there are none: then they are not copied.
        self._masks = given.part(np.dtype(np.uint32), words, self._copied)
        # Written by the kernel straight to the host: a few words, and nobody waits for a copy.
        drawn = _Pinned(8 * rows * (1 + top))
        self._token_ids = drawn.part(np.dtype(np.int32), rows, drawn.host)
        self._probabilities = drawn.part(np.dtype(np.float32), rows, drawn.host)
        self._top_ids = drawn.part(np.dtype(np.int32), rows * top, drawn.host)
        self._top_probabilities = drawn.part(np.dtype(np.float32), rows * top, drawn.host)
        self._sliced = self._copied, self._given
        self._args = cuda.Sample(
            vocab=vocab_size,
            settings=self._rows.address,
            edit_ids=self._edit_ids.address,
            edit_values=self._edit_values.address,
            masks=self._masks.address,
            max_top=top,
            token_ids=self._token_ids.address,
            probabilities=self._probabilities.address,
            top_ids=self._top_ids.address,
            top_probabilities=self._top_probabilities.address,
        )

    def fill(self, rows: Sequence[RowSettings]) -> int:
        """Settings of the coming rows, on the host; of how many bytes `enqueue` has to copy.

        Nothing that was enqueued before may still read them.
        """
        edits = words = 0
        packed = []
        for row in rows:
            first_edit, mask = edits, -1
            if row.ids is not None and row.values is not None:
                edits += len(row.ids)
                self._edit_ids.host[first_edit:edits] = row.ids.numpy()
                self._edit_values.host[first_edit:edits] = row.values.numpy()
            if row.mask is not None:
                mask, words = words, words + -(-self._vocab_size // 32)
                self._masks.host[mask:words] = row.mask.numpy()[: words - mask].view(np.uint32)
            top_k = min(row.top_k, self._vocab_size)
            chain = row.top_p, row.min_p, row.uniform, row.temperature, top_k, row.num_top
            packed.append((*chain, first_edit, edits, row.row, mask))
        self._rows.host[: len(rows)] = packed
        return self._masks.end if words else self._edit_values.end if edits else self._rows.end

    def enqueue(
        self,
        logits: Tensor,
        num_rows: int,
        size_bytes: int | None = None,
        next_ids: Tensor | None = None,
    ) -> None:
        """Copies the settings, all of them unless a size is given, and draws; the tokens go to
        `next_ids`, int64 [num_rows] on the GPU, as well."""
        to, source = self._copies(self._masks.end if size_bytes is None else size_bytes)
        to.copy_(source, non_blocking=True)
        workspace = self._gpu.workspace("sample", num_rows, self._vocab_size)
        args = self._args
        args.logits, args.logits_stride = logits.data_ptr(), logits.stride(0)
        args.rows = num_rows
        args.next_ids = None if next_ids is None else next_ids.data_ptr()
        args.workspace, args.workspace_bytes = workspace.data_ptr(), workspace.numel()
        self._gpu.call("sample", args)

    def _copies(self, size_bytes: int) -> tuple[Tensor, Tensor]:
        """Of so many bytes: to where, and from where; most often as many as the last time."""
        if self._sliced[0].numel() != size_bytes:
            self._sliced = self._copied[:size_bytes], self._given[:size_bytes]
        return self._sliced

    def read(self, rows: Sequence[RowSettings]) -> list[Drawn]:
        """What was drawn, after a wait for the stream."""
        token_ids = self._token_ids.host[: len(rows)].tolist()
        probabilities = self._probabilities.host[: len(rows)].tolist()
        return [
            NOTHING_DRAWN if token_id < 0 else Drawn(token_id, p, self._top(i, row.num_top))
            for i, (row, token_id, p) in enumerate(zip(rows, token_ids, probabilities, strict=True))
        ]

    def _top(self, i: int, num_top: int) -> list[tuple[int, float]]:
        if num_top == 0:
            return []
        part = slice(i * self.capacity.top, i * self.capacity.top + num_top)
        ids, probabilities = self._top_ids.host[part], self._top_probabilities.host[part]
        pairs = zip(ids.tolist(), probabilities.tolist(), strict=True)
        return [(token_id, p) for token_id, p in pairs if token_id >= 0]


class RowSampler:
    """`sample_rows` of one GPU; no row may want more than `cuda.MAX_TOP` of the likeliest."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers: SampleBuffers | None = None
        self._vocab_size = 0
        self._is_drawn = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def draw(
        self, logits: Tensor, rows: Sequence[RowSettings], onward: Onward | None = None
    ) -> list[Drawn]:
        """logits [n, vocab], strided rows on the GPU. Waits for them and for the tokens, but not
        for what `onward` has begun."""
        if not rows:
            return []
        buffers = self._room(rows, logits.shape[1])
        size_bytes = buffers.fill(rows)
        next_ids = None if onward is None else onward.token_ids
        buffers.enqueue(logits, len(rows), size_bytes, next_ids)
        self._is_drawn.record(torch.cuda.current_stream(self._gpu.device))
        if onward is not None:
            onward.begin()
        self._is_drawn.synchronize()
        return buffers.read(rows)

    def _room(self, rows: Sequence[RowSettings], vocab_size: int) -> SampleBuffers:
        wanted = wanted_capacity(rows, vocab_size)
        held = self._buffers
        if held is None or self._vocab_size != vocab_size or not held.capacity.covers(wanted):
            before = Capacity(0) if held is None else held.capacity
            held = SampleBuffers(self._gpu, before.grown(wanted), vocab_size)
            self._buffers, self._vocab_size = held, vocab_size
        return held
