"""Products whose results go to other GPUs, or whose inputs come from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.matmul import (
    CudaInputs,
    Linears,
    PendingRows,
    all_quantized,
    parts_of,
)
from exl_core.ops.backends.cuda.norms import prepare_args
from exl_core.ops.elementwise import Norm, RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_kernels import cuda
from exl_kernels.cuda_exchange import PartialCopies


class SentTo(NamedTuple):
    """Where a product goes that is sent to other GPUs: float32 at the address `y`, rows `stride`
    values apart, and copies with the same distance."""

    y: int
    stride: int
    copies: PartialCopies


class PeerLinears(Linears):
    """`Linears` that exchange with other GPUs."""

    def can_send(self, x: Inputs, w: PackedLinear, rows: int) -> bool:
        """Whether `multiply_sent` takes these operands."""
        if self._gpu.is_invariant or rows > cuda.CHUNK_ROWS:
            return False
        if isinstance(x, CudaInputs):
            return True
        quantized = all_quantized(parts_of(w))
        is_direct = quantized is not None and rows <= self._max_direct_rows(quantized)
        return is_direct and isinstance(x, Tensor) and len(parts_of(w)) == 1

    def multiply_sent(
        self, x: Tensor | CudaInputs, w: PackedLinear, to: SentTo, norm: Norm | None = None
    ) -> Tensor:
        """Sends norm(x) @ w; x @ w without a norm. Returns memory that the kernel reads."""
        parts = (x.w,) if isinstance(x, CudaInputs) else all_quantized(parts_of(w))
        assert parts is not None, "`can_send` has checked it"
        rows = x.rows if isinstance(x, CudaInputs) else x.shape[0]
        args = self._arguments_at(parts, to.y, (rows, to.stride), cuda.STORE)
        if isinstance(x, CudaInputs):
            memory, args.is_by_rows = x.memory, x.is_by_rows
        else:
            inputs, _ = self._prepared(x, norm, parts)
            (memory,) = inputs.values()
        args.inputs[0] = memory.data_ptr()
        self._gpu.call("quant_linear_sent", args, to.copies)
        return memory

    def can_read_pending(self, w: PackedLinear, rows: int, epilogue: int) -> bool:
        """Whether `multiply_pending` takes these operands."""
        quantized = all_quantized(parts_of(w))
        if quantized is None or len(quantized) > cuda.MAX_PARTS or w.in_features % 8:
            return False
        sizes = [part.out_features for part in quantized]
        if epilogue == cuda.GATED and sizes != [w.out_features // 2] * 2:
            return False
        if epilogue == cuda.ACTIVATED and len(sizes) != 1:
            return False
        return rows <= self._max_direct_rows(quantized)

    def multiply_pending(
        self,
        x: PendingRows,
        w: PackedLinear,
        out: Tensor | CudaInputs,
        norm: Norm,
        epilogue: int,
        *,
        gate: int = 0,
    ) -> None:
        """out = norm(x) @ w with an epilogue, for states that are exchanged on the way."""
        parts = all_quantized(parts_of(w))
        assert parts is not None, "`can_read_pending` has checked it"
        self._multiply_codes(x, parts, out, norm=norm, epilogue=epilogue, gate=gate)

    def settle_divided(self, x: PendingRows) -> None:
        """Writes sums that the ranks divide, for readers that are no products. The kernel that
        reads them computes a norm, which is not used."""
        rows, width = x.shape
        norm = RmsNorm(torch.ones(width, device=self._gpu.device), 1e-5)
        halves = self._gpu.empty(rows, width, dtype=torch.float16)
        prepare = prepare_args(x.x, norm)
        prepare.to[0] = cuda.Prepared(None, halves.data_ptr(), 0, 1)
        prepare.count = 1
        self._gpu.call("prepare_shared_sums", prepare, x.sums)
