"""Fills the op table's matrices from a checkpoint, on background threads, some columns at a time.

Knows which tensors are packed together and in which form. Knows neither blocks nor the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from threading import Lock
from typing import ParamSpec

import torch
from torch import Tensor

from exl_core.arch.modules import ModuleRow
from exl_core.errors import BackendError
from exl_core.formats.checkpoint import CHUNK_VALUES as DENSE_VALUES
from exl_core.formats.checkpoint import Checkpoint, row_ranges
from exl_core.formats.codecs.runtime import RuntimeMatrix
from exl_core.formats.containers.source import Progress
from exl_core.formats.locate import share
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable

P = ParamSpec("P")

# Sizes in matrix elements.
CHUNK_VALUES = 1 << 20  # quantized values repacked at a time: half a MiB of 4-bit codes
SPLIT_VALUES = 1 << 22  # a matrix of at least twice this size is shared among several threads
GPU_CHUNK_VALUES = 1 << 25  # both limits on a GPU, where a chunk costs some dozens of launches
GPU_DENSE_VALUES = 1 << 23  # dense values at a time on a GPU: each chunk waits for its finite check
GPU_THREADS = 4  # a repeated load takes 0.50 s; with two, six or eight threads 0.61 to 0.65 s


class Packer:
    """Packs matrices on a thread pool: `start` queues one, `packed` waits for it and returns it.

    Leaving the context waits for the running jobs. If it is left by an exception, jobs that have
    not started are cancelled.
    """

    def __init__(
        self, checkpoint: Checkpoint, ops: OpTable, threads: int, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._progress = progress
        self._parts: dict[str, list[list[Future[PackedLinear]]]] = {}
        self._done_bytes = 0
        self._lock = Lock()
        is_cpu = ops.device.type == "cpu"
        self._pool = ThreadPoolExecutor(threads if is_cpu else min(threads, GPU_THREADS))
        self._dense_values = DENSE_VALUES if is_cpu else GPU_DENSE_VALUES
        self._chunk_values = CHUNK_VALUES if is_cpu else GPU_CHUNK_VALUES
        self._split_values = SPLIT_VALUES if is_cpu else GPU_CHUNK_VALUES

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def start(self, rows: Sequence[ModuleRow]) -> None:
        """Queues the matrices of `rows`, which become one matrix."""
        checkpoint, names = self._checkpoint, [row.name for row in rows]
        name = names[0]
        is_plain = not any(checkpoint.is_quantized(part) for part in names)
        if is_plain and len({checkpoint.dtype(part) for part in names}) == 1:
            self._parts[name] = [self._start_dense(names)]
        else:
            self._parts[name] = [self._start_part(part) for part in names]

    def packed(self, rows: Sequence[ModuleRow]) -> PackedLinear:
        """Waits for the matrix that `start` queued. Raises the error of a job that failed."""
        parts = [[job.result() for job in jobs][-1] for jobs in self._parts.pop(rows[0].name)]
        return parts[0] if len(parts) == 1 else self._ops.join(parts)

    def norm(self, row: ModuleRow) -> Tensor:
        """Factors of a norm, read in the calling thread."""
        weight = self._checkpoint.norm(row.name)
        self._report(self._checkpoint.stored[row.name].size_bytes)
        # On a GPU this copy waits for the matrices packed before it, as other streams may read
        # them.
        return weight.to(self._ops.device)

    @property
    def device(self) -> torch.device:
        return self._ops.device

    def norm_bias(self, row: ModuleRow) -> Tensor | None:
        """Bias of a norm, or None if it has none."""
        if row.bias is None:
            return None
        self._report(self._checkpoint.stored[row.bias].size_bytes)
        return self._checkpoint.vector(row.bias).to(self._ops.device)

    def _start_part(self, name: str) -> list[Future[PackedLinear]]:
        if not self._checkpoint.is_quantized(name):
            return self._start_dense([name])
        if self._checkpoint.stored[name].num_values < 2 * self._split_values:
            return [self._submit(self._pack_quantized, name)]
        matrix = self._open(name)
        packed = self._ops.new_quantized(matrix.layout)
        return self._start_pieces(
            name, lambda first, last: self._submit(self._fill, name, matrix, packed, first, last)
        )

    def _start_dense(self, names: Sequence[str]) -> list[Future[PackedLinear]]:
        """Jobs that fill one dense matrix from the rows of several tensors."""
        if len(names) > 1 or self._checkpoint.stored[names[0]].num_values < 2 * self._split_values:
            return [self._submit(self._pack_dense, names)]
        packed = self._new_dense(names)
        return self._start_pieces(
            names[0],
            lambda first, last: self._submit(self._fill_dense, packed, names[0], 0, (first, last)),
        )

    def _start_pieces(
        self, name: str, start: Callable[[int, int], Future[PackedLinear]]
    ) -> list[Future[PackedLinear]]:
        """Jobs for ranges of a large tensor's rows. The last job to finish releases the tensor."""
        rows, *columns = self._checkpoint.stored[name].shape
        jobs = [start(*piece) for piece in row_ranges(rows, prod(columns), self._split_values)]

        def release_when_all_done(_: Future[PackedLinear]) -> None:
            if all(job.done() for job in jobs):
                self._checkpoint.release(name)

        for job in jobs:
            job.add_done_callback(release_when_all_done)
        return jobs

    def _submit(
        self, job: Callable[P, PackedLinear], *args: P.args, **kwargs: P.kwargs
    ) -> Future[PackedLinear]:
        try:
            return self._pool.submit(job, *args, **kwargs)
        except RuntimeError as error:  # the pool starts its threads lazily
            raise BackendError(
                "no thread can be started to read the weights",
                got=error,
                next_step="Raise the limits on processes and memory, or use fewer threads.",
            ) from error

    def _open(self, name: str) -> RuntimeMatrix:
        matrix = self._checkpoint.quantized(name)
        bias = self._checkpoint.bias_of(name)
        if bias is not None:
            self._report(self._checkpoint.stored[bias].size_bytes)
        return matrix

    def _pack_quantized(self, name: str) -> PackedLinear:
        matrix = self._open(name)
        packed = self._ops.new_quantized(matrix.layout)
        self._fill(name, matrix, packed, 0, matrix.layout.out_features)
        self._checkpoint.release(name)
        return packed

    def _fill(
        self, name: str, matrix: RuntimeMatrix, packed: PackedLinear, first: int, last: int
    ) -> PackedLinear:
        """Fills columns first .. last - 1 of `packed` and returns it."""
        tensor = self._checkpoint.stored[name]
        for start, stop in row_ranges(last - first, tensor.shape[1], self._chunk_values):
            columns = matrix.columns(first + start, first + stop, self._ops.bring)
            self._ops.fill_quantized(packed, first + start, columns)
            self._checkpoint.release(name, slice(first + start, first + stop))
            self._report(share(tensor.size_bytes, first + start, first + stop, tensor.shape[0]))
        return packed

    def _pack_dense(self, names: Sequence[str]) -> PackedLinear:
        packed = self._new_dense(names)
        first_row = 0
        for name in names:
            self._fill_dense(packed, name, first_row)
            first_row += self._checkpoint.stored[name].shape[0]
        return packed

    def _new_dense(self, names: Sequence[str]) -> PackedLinear:
        stored = [self._checkpoint.stored[name] for name in names]
        return self._ops.new_linear(
            sum(tensor.shape[0] for tensor in stored),
            stored[0].shape[1],
            self._checkpoint.dtype(names[0]),
            has_bias=self._checkpoint.bias_of(names[0]) is not None,
        )

    def _fill_dense(
        self,
        packed: PackedLinear,
        name: str,
        first_row: int,
        within: tuple[int, int] | None = None,
    ) -> PackedLinear:
        """Copies a tensor's rows, and its bias if there is one, to the matrix's rows from
        `first_row` on. `within` limits the copy to a range of the tensor's rows."""
        checkpoint, bias = self._checkpoint, None
        bias_name = checkpoint.bias_of(name)
        if bias_name is not None:
            bias = checkpoint.vector(bias_name)
            if within is None or within[0] == 0:
                self._report(checkpoint.stored[bias_name].size_bytes)
        dtype, values = checkpoint.dtype(name), self._dense_values
        for chunk in checkpoint.chunks(name, dtype, within, values, self._ops.bring):
            rows = slice(chunk.first_row, chunk.first_row + chunk.values.shape[0])
            part = None if bias is None else bias[rows]
            self._ops.fill_linear(packed, first_row + chunk.first_row, chunk.values, part)
            self._report(chunk.size_bytes)
        return packed

    def _report(self, size_bytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._checkpoint.size_bytes)
