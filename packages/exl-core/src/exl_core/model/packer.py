"""Fills the op table's matrices from a checkpoint, on background threads, some columns at a time.

Knows which tensors are packed together. Knows neither the model nor the kinds of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from threading import Lock
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from exl_core.arch.layers import MLA
from exl_core.arch.modules import ModuleRow
from exl_core.errors import BackendError
from exl_core.formats.checkpoint import row_ranges
from exl_core.formats.codecs.runtime import RuntimeMatrix
from exl_core.formats.containers.source import Progress
from exl_core.formats.locate import share
from exl_core.formats.quantized import whole_columns
from exl_core.formats.tensors import WeightTensors
from exl_core.ops.latent import LatentUp
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, JoinedExperts, PackedExperts
from exl_core.ops.table import OpTable
from exl_core.ops.weights import DenseLayout, fused_layout, moved_columns

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES = 1 << 19  # of packed weights at a time: 2^18 float16 numbers, or 2^20 codes of 4 bits
GPU_CHUNK_BYTES = 1 << 24  # on a GPU, where a chunk costs some dozens of launches
SPLIT_VALUES = 1 << 22  # a matrix of at least twice this size is shared among several threads
GPU_SPLIT_VALUES = 1 << 25
JOINT_MATRICES = 48  # of experts in one job, at most
JOINT_BYTES = 1 << 25  # in files, of the matrices of such a job
GPU_THREADS = 4  # a repeated load takes 0.50 s; with two, six or eight threads 0.61 to 0.65 s


class _Member(NamedTuple):
    """One of the matrices that a job packs."""

    job: Future[list[PackedLinear]]
    place: int

    def result(self) -> PackedLinear:
        return self.job.result()[self.place]


class Packer:
    """Packs matrices on a thread pool: `start` queues one, `packed` waits for it and returns it.

    Leaving the context waits for the running jobs. If it is left by an exception, jobs that have
    not started are cancelled.
    """

    def __init__(
        self, checkpoint: WeightTensors, ops: OpTable, threads: int, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._progress = progress
        self._parts: dict[str, list[list[Future[PackedLinear] | _Member]]] = {}
        self._on_host: set[str] = set()
        self._done_bytes = 0
        self._lock = Lock()
        is_cpu = ops.device.type == "cpu"
        self._pool = ThreadPoolExecutor(threads if is_cpu else min(threads, GPU_THREADS))
        self._chunk_bytes = CHUNK_BYTES if is_cpu else GPU_CHUNK_BYTES
        self._split_values = SPLIT_VALUES if is_cpu else GPU_SPLIT_VALUES

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def start(self, rows: Sequence[ModuleRow], *, on_host: bool = False) -> None:
        """Queues the matrices of `rows`, which become one matrix, on the host if wanted."""
        names = [row.name for row in rows]
        if on_host:
            self._on_host.update(names)
        parts: list[list[str]] = []
        for name in names:
            last = [self._checkpoint.layout(one) for one in (*parts[-1], name)] if parts else []
            if last and fused_layout(last) is not None:
                parts[-1].append(name)
            else:
                parts.append([name])
        self._parts[names[0]] = [list(self._start_part(part)) for part in parts]

    def start_experts(self, experts: Sequence[Sequence[Sequence[ModuleRow]]]) -> None:
        """Queues the matrices of a layer's experts: for each expert, the rows of each of its
        matrices. Quantized ones are packed some experts at a time."""
        batch: list[Sequence[ModuleRow]] = []
        size = count = 0
        for matrices in experts:
            names = [row.name for rows in matrices for row in rows]
            if not all(map(self._is_small_and_coded, names)):
                for rows in matrices:
                    self.start(rows)
                continue
            batch += matrices
            count += len(names)
            size += sum(self._checkpoint.stored[name].size_bytes for name in names)
            if count + len(names) > JOINT_MATRICES or size >= JOINT_BYTES:
                self._start_joint(batch)
                batch, size, count = [], 0, 0
        if batch:
            self._start_joint(batch)

    def _is_small_and_coded(self, name: str) -> bool:
        is_small = self._checkpoint.stored[name].num_values < 2 * self._split_values
        return is_small and not isinstance(self._checkpoint.layout(name), DenseLayout)

    def _start_joint(self, matrices: Sequence[Sequence[ModuleRow]]) -> None:
        """Queues one job for all of these matrices."""
        job = self._submit(self._pack_all, [row.name for rows in matrices for row in rows])
        index = 0
        for rows in matrices:
            self._parts[rows[0].name] = [[_Member(job, index + i)] for i in range(len(rows))]
            index += len(rows)

    def packed(self, rows: Sequence[ModuleRow]) -> PackedLinear:
        """Waits for the matrix that `start` queued. Raises the error of a job that failed."""
        parts = [[job.result() for job in jobs][-1] for jobs in self._parts.pop(rows[0].name)]
        return parts[0] if len(parts) == 1 else self._ops.join(parts)

    def stack(self, experts: Sequence[PackedLinear]) -> PackedExperts:
        """The matrices of a layer's experts as one operand."""
        return self._ops.stack(experts)

    def join_experts(
        self,
        experts: ExpertMlp,
        gate_up: PackedLinear,
        down: PackedLinear,
        scores: PackedLinear | None,
    ) -> JoinedExperts | None:
        """The experts and a shared expert as one operand, if the op table joins them."""
        return self._ops.join_experts(experts, gate_up, down, scores)

    def latent_up(self, spec: MLA, rows: Sequence[ModuleRow]) -> LatentUp:
        """The matrices from latent vectors to keys and values, read in the calling thread."""
        parts = [self._dense(row).view(spec.num_q_heads, -1, row.shape[1]) for row in rows]
        if len(parts) == 1:
            keys, values = parts[0].split_with_sizes([spec.nope_dim, spec.value_dim], 1)
            parts = [keys.transpose(1, 2), values]  # [H, r, n], [H, v, r]
        return self._ops.new_latent_up(*parts)

    def _dense(self, row: ModuleRow) -> Tensor:
        values = self._open(row.name).dense(0, row.shape[0]).clone()
        self._checkpoint.release(row.name)
        self._report(self._checkpoint.stored[row.name].size_bytes)
        return values

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

    def _start_part(self, names: Sequence[str]) -> list[Future[PackedLinear]]:
        """Jobs that fill one matrix with the outputs of these tensors. The last one returns it."""
        if len(names) > 1 or self._checkpoint.stored[names[0]].num_values < 2 * self._split_values:
            return [self._submit(self._pack, names)]
        (name,) = names
        matrix = self._open(name)
        packed = self._ops.new_linear(matrix.layout, on_host=name in self._on_host)
        return self._start_pieces(
            name, lambda *piece: self._submit(self._fill, packed, name, matrix, piece)
        )

    def _start_pieces(
        self, name: str, start: Callable[[int, int], Future[PackedLinear]]
    ) -> list[Future[PackedLinear]]:
        """Jobs for ranges of a large tensor's rows. The last job to finish releases the tensor."""
        rows, *columns = self._checkpoint.stored[name].shape
        step = self._checkpoint.layout(name).fill_step
        pieces = row_ranges(rows, prod(columns), self._split_values, step)
        jobs = [start(*piece) for piece in pieces]

        def release_when_all_done(_: Future[PackedLinear]) -> None:
            if all(job.done() for job in jobs):
                self._checkpoint.release(name)

        for job in jobs:
            job.add_done_callback(release_when_all_done)
        return jobs

    def _submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return self._pool.submit(job, *args, **kwargs)
        except RuntimeError as error:  # the pool starts its threads lazily
            raise BackendError(
                "no thread can be started to read the weights",
                got=error,
                next_step="Raise the limits on processes and memory, or use fewer threads.",
            ) from error

    def _pack_all(self, names: Sequence[str]) -> list[PackedLinear]:
        """Each of these matrices by itself, read jointly."""
        matrices = self._checkpoint.matrices(names)
        columns = whole_columns(matrices, self._ops.bring)
        if self._ops.device.type != "cpu":
            columns = moved_columns(columns, self._ops.bring_all)
        packed = self._ops.new_linears([matrix.layout for matrix in matrices])
        for name, one, own in zip(names, packed, columns, strict=True):
            self._report_bias(name)
            self._ops.fill_linear(one, 0, own)
        self._checkpoint.release_all(names)
        self._report(sum(self._checkpoint.stored[name].size_bytes for name in names))
        return packed

    def _pack(self, names: Sequence[str]) -> PackedLinear:
        matrices = [self._open(name) for name in names]
        layout = fused_layout([matrix.layout for matrix in matrices])
        assert layout is not None, "`start` packs the others on their own"
        packed = self._ops.new_linear(layout, on_host=names[0] in self._on_host)
        column = 0
        for name, matrix in zip(names, matrices, strict=True):
            count = matrix.layout.out_features
            self._fill(packed, name, matrix, (0, count), at=column)
            self._checkpoint.release(name)
            column += count
        return packed

    def _open(self, name: str) -> RuntimeMatrix:
        matrix = self._checkpoint.matrix(name)
        self._report_bias(name)
        return matrix

    def _report_bias(self, name: str) -> None:
        bias = self._checkpoint.bias_of(name)
        if bias is not None:
            self._report(self._checkpoint.stored[bias].size_bytes)

    def _fill(
        self,
        packed: PackedLinear,
        name: str,
        matrix: RuntimeMatrix,
        within: tuple[int, int],
        *,
        at: int = 0,
    ) -> PackedLinear:
        """Fills `packed` with a range of the tensor's columns, and returns it. `at` is the column
        of `packed` that gets the tensor's first one."""
        tensor, layout = self._checkpoint.stored[name], matrix.layout
        column_bytes = max(1, layout.size_bytes() // layout.out_features)
        first, last = within
        size, step = self._chunk_bytes, layout.fill_step
        for start, stop in row_ranges(last - first, column_bytes, size, step):
            here, end = first + start, first + stop
            columns = matrix.columns(here, end, self._ops.bring)
            self._ops.fill_linear(packed, at + here, columns)
            self._checkpoint.release(name, slice(here, end))
            self._report(share(tensor.size_bytes, here, end, tensor.shape[0]))
        return packed

    def _report(self, size_bytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._checkpoint.size_bytes)
