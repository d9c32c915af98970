"""Sums over the GPUs of one host through memory that all of them can access
(`exl/cuda/exchange.h`).

A sum has two halves. A product writes its partial sums into the memory of all ranks. The next op
reads the parts of all ranks: usually the one that prepares the inputs of the next product, so that
an exchange has no launch of its own. In between the sum is pending: its target is not written yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.matmul import CudaInputs, Linears, PendingRows
from exl_core.ops.checks import OpInputError
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm, XIelu
from exl_core.ops.linear import Inputs, PackedLinear
from exl_kernels import cuda

_VALUE_BYTES = 4


class SharedMemory:
    """Memory of one GPU that other processes open by `handle`, and theirs that this one opens."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        """`CudaError` if the driver cannot share memory."""
        self._device = device
        self._library = cuda.load()
        self._opened: list[int] = []
        memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(cuda.HANDLE_BYTES)
        with torch.cuda.device(device):
            self._library.call("shared_new", size_bytes, ctypes.byref(memory), handle)
        self.address: int = memory.value or 0
        self.handle = handle.raw

    def open(self, handle: bytes) -> int:
        """The address of another process's memory. `CudaError` if it cannot be mapped."""
        memory = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._library.call("shared_open", handle, ctypes.byref(memory))
        self._opened.append(memory.value or 0)
        return self._opened[-1]

    def close(self) -> None:
        """Frees the memory, which no process may use any more. May be called again."""
        opened, self._opened = self._opened, []
        address, self.address = self.address, 0
        with torch.cuda.device(self._device):
            for one in opened:
                self._library.call("shared_close", one)
            if address:
                self._library.call("shared_free", address)


class _Pending(NamedTuple):
    """A sum whose parts have been sent. `x`: states that it is added to; None: zeros."""

    x: Tensor | None
    target: Tensor  # [m, k], receives x plus the sum
    stage: int


class PeerSums:
    """Sums of one rank with the others on the same host. All ranks make the same calls."""

    def __init__(self, gpu: Gpu, linears: Linears, rank: int, buffers: Sequence[int]) -> None:
        """`buffers`: addresses of the ranks' buffers, which have `buffer_bytes` each.
        There are at most `cuda.MAX_PEERS` other ranks."""
        self._gpu = gpu
        self._linears = linears
        self._rank = rank
        self._buffers = tuple(buffers)
        self._ended = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._shape: tuple[int, int] | None = None
        self._count = 0
        self._pending: _Pending | None = None
        self.timeout_ms = 0
        """Longest wait for another rank; 0: until `abort`."""

    def begin(self, rows: int, width: int) -> None:
        """Starts a pass over states [rows, width]. The caller then synchronizes the ranks on the
        GPU, before any of them sends."""
        values = cuda.STAGES * len(self._buffers) * rows * width
        self._gpu.call("exchange_begin", self._buffers[self._rank], values * _VALUE_BYTES)
        self._shape, self._count, self._pending = (rows, width), 0, None

    def end(self) -> None:
        """Ends the pass: `takes` is False until the next one."""
        self._shape = None

    @property
    def is_active(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._shape is not None

    def takes(self, part: Tensor) -> bool:
        """Whether sums of such tensors, float32 [m, k], are exchanged in this pass."""
        return self._shape == part.shape and part.dtype is torch.float32

    def abort(self) -> None:
        """Ends all waits on the GPU. Their results are void. May be called on any thread."""
        self._ended.fill_(1)

    @property
    def has_ended(self) -> bool:
        """Whether a wait has ended without an answer, or `abort` was called."""
        return bool(self._ended)

    def multiply(self, x: Inputs, w: PackedLinear) -> bool:
        """Sends x @ w. False if no kernel can: then the caller multiplies and calls `send`."""
        rows, width = self._active
        own_rows = x.rows if isinstance(x, CudaInputs) else cast(Tensor, x).shape[0]
        if (own_rows, w.out_features) != (rows, width):
            return False
        if not self._linears.can_send(x, w, rows):
            return False
        own, copies = self._slots()
        self._linears.multiply_sent(cast(Tensor | CudaInputs, x), w, own, copies)
        return True

    def send(self, part: Tensor) -> None:
        """Sends a partial sum [m, k]."""
        own, copies = self._slots()
        source = part.data_ptr(), part.stride(0), *part.shape
        self._gpu.call("exchange_send", *source, own, copies)

    def await_sum(self, x: Tensor | None, *, defers: bool) -> Tensor:
        """x plus the sum of what all ranks have sent last; the sum alone without x.

        With `defers` the result is written by the next op of this object, or by `settle`. Otherwise
        it may overwrite x.
        """
        rows, width = self._active
        in_place = x is not None and not defers and x.is_contiguous()
        target = x if in_place and x is not None else self._gpu.empty(rows, width)
        self._pending = _Pending(x, target, self._count % cuda.STAGES)
        self._count += 1
        if not defers:
            self.settle()
        return target

    def settle(self) -> None:
        """Writes the pending sum, if there is one."""
        if self._pending is None:
            return
        x, sums = self._pending.x, self._taken()
        rows, width = self._active
        source = (None, 0) if x is None else (x.data_ptr(), x.stride(0))
        self._gpu.call("exchange_settle", sums, *source, rows, width)

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None
    ) -> Tensor | None:
        """norm(x) @ w for a pending x, which is written too; None if x is not pending, or if this
        product cannot read it."""
        if not self._reads(x, w, cuda.STORE):
            return None
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features)
        self._linears.multiply_pending(self._rows(), w, out, norm, cuda.STORE)
        return out

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None
    ) -> Inputs | None:
        """The same for gated products."""
        if not self._reads(x, w, cuda.GATED) or not isinstance(out, Tensor | CudaInputs):
            return None
        self._linears.multiply_pending(self._rows(), w, out, norm, cuda.GATED, cuda.GATES[kind])
        return out

    def norm_activated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: ActivationKind, out: Inputs | None
    ) -> Inputs | None:
        """The same for activated products."""
        is_own = isinstance(out, Tensor | CudaInputs)
        if isinstance(kind, XIelu) or not is_own or not self._reads(x, w, cuda.ACTIVATED):
            return None
        own, gate = cast(Tensor | CudaInputs, out), cuda.ACTIVATIONS[kind]
        self._linears.multiply_pending(self._rows(), w, own, norm, cuda.ACTIVATED, gate)
        return out

    @property
    def _active(self) -> tuple[int, int]:
        if self._shape is None:
            raise OpInputError("peer sums: outside of a pass")
        return self._shape

    def _reads(self, x: Tensor, w: PackedLinear, epilogue: int) -> bool:
        pending = self._pending
        if pending is None or pending.target is not x or pending.x is None:
            return False
        return self._linears.can_read_pending(w, self._active[0], epilogue)

    def _rows(self) -> PendingRows:
        assert self._pending is not None and self._pending.x is not None, "`_reads` has checked it"
        return PendingRows(self._pending.x, self._taken())

    def _taken(self) -> cuda.PartialSums:
        """Operands that read the pending sum, which is not pending from then on."""
        assert self._pending is not None, "the callers have checked it"
        (_, target, stage), self._pending = self._pending, None
        own = self._buffers[self._rank]
        return cuda.PartialSums(
            parts=own + self._offset(stage, 0),
            spent=own + self._offset((stage - 1) % cuda.STAGES, 0),
            sum=target.data_ptr(),
            ended=self._ended.data_ptr(),
            ranks=len(self._buffers),
            timeout_ms=self.timeout_ms,
        )

    def _slots(self) -> tuple[int, cuda.PartialCopies]:
        """This rank's slots of the next exchange: in its own buffer, and in the others'."""
        self.settle()
        offset = self._offset(self._count % cuda.STAGES, self._rank)
        copies = cuda.PartialCopies(count=len(self._buffers) - 1)
        others = (one for rank, one in enumerate(self._buffers) if rank != self._rank)
        for i, buffer in enumerate(others):
            copies.to[i] = buffer + offset
        return self._buffers[self._rank] + offset, copies

    def _offset(self, stage: int, rank: int) -> int:
        """Bytes from the start of a buffer to a slot."""
        rows, width = self._active
        return (stage * len(self._buffers) + rank) * rows * width * _VALUE_BYTES


def buffer_bytes(ranks: int, rows: int, width: int) -> int:
    """Size of a rank's buffer for states [rows, width]."""
    return cuda.STAGES * ranks * rows * width * _VALUE_BYTES
