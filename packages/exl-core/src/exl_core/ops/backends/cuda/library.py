"""One GPU for the ops: the loaded library, torch's current stream, and workspaces."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from exl_kernels import cuda

TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.uint8: 5,
    torch.int8: 6,
    torch.float8_e4m3fn: 7,
}
"""Type numbers of `exl/cuda.h`."""

ALIGNMENT = 256
"""Alignment in bytes of tensors that share one allocation. Kernels load vectors of 16 bytes."""

FIXED_ROWS = 64
"""Rows that torch's ops get in the batch-invariant mode; missing rows are zeros. Torch's choice of
a kernel, and so the order of summation, depends on the number of rows."""


class Gpu:
    """Calls the library on torch's current stream. The host does not synchronize.

    `max_prepared_rows` is the largest number of rows for which a kernel can write its result as
    prepared inputs of the next linear, and `trellis_max_rows` that for which kernels read trellis
    codes. `is_invariant` selects the batch-invariant mode.
    """

    def __init__(self, device: torch.device, *, is_invariant: bool = False) -> None:
        self.device = device
        self.is_invariant = is_invariant
        self._library = cuda.load()
        self._is_only_gpu = torch.cuda.device_count() == 1
        with torch.cuda.device(device):
            self.max_prepared_rows = self._library.max_prepared_rows()
            self._least_rows = self._library.least_rows(has_integers=True)
            self._least_other_rows = self._library.least_rows(has_integers=False)
            self.trellis_max_rows = self._library.trellis_max_rows()
        self._workspaces: dict[str, Tensor] = {}
        self._retired: list[Tensor] = []

    def least_rows(self, *, has_integers: bool) -> int:
        """Rows that prepared inputs are laid out for, at least."""
        if not self.is_invariant:
            return 1
        return self._least_rows if has_integers else self._least_other_rows

    def call(self, name: str, *operands: object) -> None:
        """Calls `exl_cuda_<name>` with the stream as its last operand."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if self._is_only_gpu:
            self._library.call(name, *operands, stream)
            return
        with torch.cuda.device(self.device):  # a kernel is launched on the current device
            self._library.call(name, *operands, stream)

    def size(self, name: str, *operands: object) -> int:
        """Size in bytes that `exl_cuda_<name>` returns."""
        return self._library.size(name, *operands)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def workspace(self, op: str, *sizes: int) -> Tensor:
        """Workspace of one op, zero on first use. Every call leaves the counters in it zero."""
        return self.buffer(op, self._library.size(f"{op}_workspace", *sizes))

    def buffer(self, name: str, size_bytes: int) -> Tensor:
        """Buffer of at least `size_bytes`, kept under a name. It is zero whenever it is made anew.

        A buffer that became too small is kept as well, because a captured graph may still write to
        it.
        """
        held = self._workspaces.get(name)
        if held is None or held.numel() < size_bytes:
            if held is not None:
                self._retired.append(held)
            held = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
            self._workspaces[name] = held
        return held


class Slab:
    """One allocation that calls of `empty` divide in order. It lasts as long as one of the tensors.

    `sizes` are those of all calls, in bytes.
    """

    def __init__(self, gpu: Gpu, sizes: Sequence[int]) -> None:
        self._memory = gpu.empty(sum(map(aligned, sizes)), dtype=torch.uint8)
        self._used = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        first, size = self._used, prod(shape) * dtype.itemsize
        self._used += aligned(size)
        return self._memory[first : first + size].view(dtype).view(shape)


def aligned(size_bytes: int) -> int:
    """The size, rounded up to a multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
