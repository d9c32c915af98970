"""Sampling on the GPU: the settings of all rows are uploaded in one copy.

`RowSampler` samples and waits for the tokens. It is built on `SampleBuffers`, whose memory on host
and GPU has fixed addresses, so that a CUDA graph can contain it: `fill` writes the settings on the
host, a graph captures `enqueue`, and `read` returns the tokens once the stream has reached that
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl_core.ops.backends.cpu.sampling import CpuSamplingOps
from exl_core.ops.backends.cuda.library import FIXED_ROWS, Gpu
from exl_core.ops.sampling import (
    NOTHING_SAMPLED,
    NextStep,
    PartLogits,
    RowSettings,
    Sampled,
    SampleSettings,
    SamplesInTurn,
)
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
"""Layout of `ExlSampleRow` (exl/cuda/sampling.h)."""

_ALIGNMENT = 16


class Capacity(NamedTuple):
    """Sizes of one set of buffers."""

    rows: int
    edits: int = 0  # edited logits, of all rows together
    mask_words: int = 0  # words of bitmasks, of all rows together
    top: int = 0  # most likely tokens returned per row

    def covers(self, other: Capacity) -> bool:
        return all(own >= needed for own, needed in zip(self, other, strict=True))

    def grown(self, other: Capacity) -> Capacity:
        """Capacity that covers both. A size that grows is rounded up to a power of two."""
        return Capacity(
            *(
                own if own >= needed else 1 << (needed - 1).bit_length()
                for own, needed in zip(self, other, strict=True)
            )
        )


def wanted_capacity(rows: Sequence[RowSettings], vocab_size: int) -> Capacity:
    words = -(-vocab_size // 32)
    return Capacity(
        len(rows),
        sum(len(row.edits.ids) for row in rows if row.edits is not None),
        sum(words for row in rows if row.mask is not None),
        max((row.num_top for row in rows), default=0),
    )


class _Part(NamedTuple):
    """Part of a buffer: an array on the host, and the address of the same part for the GPU."""

    host: np.ndarray[tuple[int], np.dtype[np.generic]]
    address: int
    end: int  # in bytes from the buffer's start


class _Pinned:
    """Pinned host memory, allocated part by part. The GPU uses it directly or has a copy."""

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
    """Settings and results of sampling for up to `capacity` rows, at fixed addresses."""

    def __init__(self, gpu: Gpu, capacity: Capacity, vocab_size: int) -> None:
        self._gpu = gpu
        self.capacity = capacity
        self._vocab_size = vocab_size
        rows, edits, words, top = capacity
        settings = _Pinned(_ROW.itemsize * rows + 16 * edits + 4 * words)
        self._host_settings = settings.host
        self._device_settings = torch.empty_like(settings.host, device=gpu.device)
        self._rows = settings.part(_ROW, rows, self._device_settings)
        self._edit_ids = settings.part(np.dtype(np.int64), edits, self._device_settings)
        self._edit_factors = settings.part(np.dtype(np.float32), edits, self._device_settings)
        self._edit_offsets = settings.part(np.dtype(np.float32), edits, self._device_settings)
        # Masks come last, so that a batch without masks does not copy their space.
        self._masks = settings.part(np.dtype(np.uint32), words, self._device_settings)
        # The kernel writes the few words of results directly to host memory, which saves a copy.
        results = _Pinned(8 * rows * (1 + top))
        self._token_ids = results.part(np.dtype(np.int32), rows, results.host)
        self._probabilities = results.part(np.dtype(np.float32), rows, results.host)
        self._top_ids = results.part(np.dtype(np.int32), rows * top, results.host)
        self._top_probabilities = results.part(np.dtype(np.float32), rows * top, results.host)
        self._cached_slices = self._device_settings, self._host_settings
        self._args = cuda.Sample(
            vocab=vocab_size,
            settings=self._rows.address,
            edit_ids=self._edit_ids.address,
            edit_factors=self._edit_factors.address,
            edit_offsets=self._edit_offsets.address,
            masks=self._masks.address,
            max_top=top,
            token_ids=self._token_ids.address,
            probabilities=self._probabilities.address,
            top_ids=self._top_ids.address,
            top_probabilities=self._top_probabilities.address,
        )

    def fill(self, rows: Sequence[RowSettings], first_row: int = 0) -> int:
        """Writes the settings to host memory. Returns the number of bytes for `enqueue` to copy.
        `first_row` is the number of the first row of logits.

        The caller makes sure that no earlier `enqueue` still reads this memory.
        """
        edits = words = 0
        packed = []
        for row in rows:
            first_edit, mask = edits, -1
            if row.edits is not None:
                edits += len(row.edits.ids)
                self._edit_ids.host[first_edit:edits] = row.edits.ids.numpy()
                self._edit_factors.host[first_edit:edits] = row.edits.factors.numpy()
                self._edit_offsets.host[first_edit:edits] = row.edits.offsets.numpy()
            if row.mask is not None:
                mask, words = words, words + -(-self._vocab_size // 32)
                self._masks.host[mask:words] = row.mask.numpy()[: words - mask].view(np.uint32)
            top_k = min(row.top_k, self._vocab_size)
            chain = row.top_p, row.min_p, row.uniform, row.temperature, top_k, row.num_top
            packed.append((*chain, first_edit, edits, row.row - first_row, mask))
        self._rows.host[: len(rows)] = packed
        return self._masks.end if words else self._edit_offsets.end if edits else self._rows.end

    def enqueue(
        self,
        logits: Tensor,
        num_rows: int,
        size_bytes: int | None = None,
        next_ids: Tensor | None = None,
    ) -> None:
        """Enqueues the copy of the settings and the sampling of `num_rows` rows.

        Without `size_bytes`, copies the whole buffer. The tokens are also written to `next_ids`,
        int64 [num_rows] on the GPU.
        """
        to, source = self._settings_slices(self._masks.end if size_bytes is None else size_bytes)
        to.copy_(source, non_blocking=True)
        workspace = self._gpu.workspace("sample", num_rows, self._vocab_size)
        args = self._args
        args.logits, args.logits_stride = logits.data_ptr(), logits.stride(0)
        args.rows = num_rows
        args.next_ids = None if next_ids is None else next_ids.data_ptr()
        args.workspace, args.workspace_bytes = workspace.data_ptr(), workspace.numel()
        self._gpu.call("sample", args)

    def _settings_slices(self, size_bytes: int) -> tuple[Tensor, Tensor]:
        """Target and source of a copy of `size_bytes`. Caches the slices for repeated sizes."""
        if self._cached_slices[0].numel() != size_bytes:
            self._cached_slices = (
                self._device_settings[:size_bytes],
                self._host_settings[:size_bytes],
            )
        return self._cached_slices

    def read(self, rows: Sequence[RowSettings]) -> list[Sampled]:
        """Sampled tokens. The caller has waited for the stream."""
        token_ids = self._token_ids.host[: len(rows)].tolist()
        probabilities = self._probabilities.host[: len(rows)].tolist()
        return [
            NOTHING_SAMPLED if token_id < 0 else Sampled(token_id, p, self._top(i, row.num_top))
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
    """`sample_rows` of one GPU. `num_top` of each row is at most `cuda.MAX_TOP`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers: dict[int, SampleBuffers] = {}  # of each part
        self._vocab_size = 0
        self._sampled_event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def draw(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        """Samples from logits [n, vocab], strided rows on the GPU.

        Waits until the tokens are on the host, but not for the pass that `next_step` launches.
        """
        return self.draw_parts([PartLogits(logits)], [rows], [next_step]) if rows else []

    def draw_parts(
        self,
        parts: Sequence[PartLogits],
        rows: Sequence[Sequence[RowSettings]],
        next_steps: Sequence[NextStep | None],
    ) -> list[Sampled]:
        """`draw` for each part, on its stream. The host waits once, for the last one's tokens."""
        used: list[SampleBuffers] = []
        for index, (part, own, step) in enumerate(zip(parts, rows, next_steps, strict=True)):
            with nullcontext() if part.stream is None else torch.cuda.stream(part.stream):
                stream = torch.cuda.current_stream(self._gpu.device)
                buffers = self._buffers_for(index, own, part.logits.shape[1])
                size_bytes = buffers.fill(own, part.first_row)
                if used:
                    stream.wait_event(self._sampled_event)  # the parts share the op's workspace
                next_ids = None if step is None else step.token_ids
                buffers.enqueue(part.logits, len(own), size_bytes, next_ids)
                self._sampled_event.record(stream)
                if step is not None:
                    step.launch()
            used.append(buffers)
        self._sampled_event.synchronize()
        found = (buffers.read(own) for buffers, own in zip(used, rows, strict=True))
        return [one for sampled in found for one in sampled]

    def _buffers_for(
        self, index: int, rows: Sequence[RowSettings], vocab_size: int
    ) -> SampleBuffers:
        if self._vocab_size != vocab_size:
            self._buffers, self._vocab_size = {}, vocab_size
        needed, held = wanted_capacity(rows, vocab_size), self._buffers.get(index)
        if held is None or not held.capacity.covers(needed):
            before = Capacity(0) if held is None else held.capacity
            held = self._buffers[index] = SampleBuffers(self._gpu, before.grown(needed), vocab_size)
        return held


LOG_SUM_VALUES = 1 << 24  # number of logits that `log_sum_exp` processes at a time


class CudaSamplingOps(SamplesInTurn):
    """SamplingOps of one GPU. `sample` runs on the CPU, where its operands are."""

    _gpu: Gpu
    _cpu: CpuSamplingOps
    _row_sampler: RowSampler

    def log_sum_exp(self, x: Tensor) -> Tensor:
        if self._gpu.is_invariant:
            return torch.cat([_fixed_log_sum_exp(part) for part in torch.split(x, FIXED_ROWS)])
        rows = max(1, LOG_SUM_VALUES // max(1, x.shape[1]))  # torch makes a float32 copy
        found = torch.cat([part.float().logsumexp(1) for part in torch.split(x, rows)])
        return found.masked_fill_(found.isinf(), torch.nan)

    def sample(self, logits: Tensor, settings: SampleSettings) -> Sampled:
        return self._cpu.sample(logits, settings)

    def sample_rows(
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        on_gpu = [settings for settings in rows if settings.num_top <= cuda.MAX_TOP]
        if len(on_gpu) == len(rows):
            return self._row_sampler.draw(logits, rows, next_step)
        sampled = iter(self._row_sampler.draw(logits, on_gpu))
        all_drawn = [
            next(sampled)
            if settings.num_top <= cuda.MAX_TOP
            else self.sample(logits[settings.row].cpu(), settings)
            for settings in rows
        ]
        if next_step is not None:
            next_step.launch_after(all_drawn)
        return all_drawn

    def sample_parts(
        self,
        parts: Sequence[PartLogits],
        rows: Sequence[Sequence[RowSettings]],
        next_steps: Sequence[NextStep],
    ) -> list[Sampled]:
        if any(settings.num_top > cuda.MAX_TOP for own in rows for settings in own):
            return super().sample_parts(parts, rows, next_steps)
        return self._row_sampler.draw_parts(parts, rows, next_steps)


def _fixed_log_sum_exp(x: Tensor) -> Tensor:
    """Log-sum-exp of at most `FIXED_ROWS` rows, computed with zeros for missing rows: torch's order
    of summation may depend on the number of rows."""
    padded = x.new_zeros(FIXED_ROWS, x.shape[1], dtype=torch.float32)
    padded[: x.shape[0]] = x
    found = padded.logsumexp(1)[: x.shape[0]]
    return found.masked_fill_(found.isinf(), torch.nan)
