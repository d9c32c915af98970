"""Products whose results go to other GPUs, or whose inputs come from them."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.matmul import (
    CudaInputs,
    Linears,
    PlainKind,
    all_quantized,
    are_trellis,
    parts_of,
)
from exl_core.ops.backends.cuda.norms import PendingRows, after_layer_norm, prepare_args
from exl_core.ops.backends.cuda.trellis import CudaTrellis, CudaTrellisInputs, is_pair
from exl_core.ops.elementwise import GateKind, Norm, RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_kernels import cuda
from exl_kernels.cuda_exchange import PartialCopies


class SentTo(NamedTuple):
    """Where a product goes that is sent to other GPUs: float32 at the address `y`, rows `stride`
    values apart, and copies with the same distance."""

    y: int
    stride: int
    copies: PartialCopies


class NormedProduct(NamedTuple):
    """out = norm(states) @ w, with an epilogue."""

    w: PackedLinear
    norm: Norm
    out: Inputs
    epilogue: int = cuda.STORE
    kind: GateKind | PlainKind | None = None  # of a gated or an activated product


class PeerLinears(Linears):
    """`Linears` that exchange with other GPUs."""

    def can_send(self, x: Inputs, w: PackedLinear, rows: int) -> bool:
        """Whether `multiply_sent` takes these operands."""
        if self._gpu.is_invariant or rows > cuda.CHUNK_ROWS:
            return False
        if isinstance(x, CudaInputs):
            return True
        parts = parts_of(w)
        if len(parts) != 1:
            return False
        if are_trellis(parts):
            is_own = isinstance(x, Tensor | CudaTrellisInputs)
            return is_own and self._trellis.can_send(rows)
        quantized = all_quantized(parts)
        is_direct = quantized is not None and rows <= self._max_direct_rows(quantized)
        return is_direct and isinstance(x, Tensor)

    def can_divide(self, w: PackedLinear) -> bool:
        """Whether `multiply_sent` can send each row to one rank."""
        return not are_trellis(parts_of(w))

    def multiply_sent(
        self,
        x: Tensor | CudaInputs | CudaTrellisInputs,
        w: PackedLinear,
        to: SentTo,
        norm: Norm | None = None,
    ) -> Tensor:
        """Sends norm(x) @ w; x @ w without a norm. Returns memory that the kernel reads."""
        own = parts_of(w)
        if are_trellis(own):
            return self._send_trellis(cast(Tensor | CudaTrellisInputs, x), own[0], to, norm)
        assert not isinstance(x, CudaTrellisInputs), "`can_send` has checked it"
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

    def _send_trellis(
        self, x: Tensor | CudaTrellisInputs, w: CudaTrellis, to: SentTo, norm: Norm | None
    ) -> Tensor:
        if isinstance(x, Tensor):
            inputs = self._trellis.inputs_for(w, x.shape[0])
            states, factors = after_layer_norm(x, norm)
            self._trellis.prepare(states, factors, [inputs])
            x = inputs
        self._trellis.multiply_sent(x, to.y, to.stride, to.copies)
        return x.memory

    def can_read_pending(self, to: NormedProduct, rows: int, *, is_divided: bool) -> bool:
        """Whether `multiply_pending` takes these operands. `is_divided`: the ranks divide the
        sums."""
        parts, is_tensor = parts_of(to.w), isinstance(to.out, Tensor)
        if are_trellis(parts):
            takes_out = is_tensor or isinstance(to.out, CudaTrellisInputs)
            is_known = to.epilogue == cuda.STORE or (to.epilogue == cuda.GATED and is_pair(parts))
            is_plain = isinstance(to.norm, RmsNorm) and not is_divided
            return takes_out and is_known and is_plain and self._trellis.reads_pending(parts, rows)
        if not (is_tensor or isinstance(to.out, CudaInputs)):
            return False
        quantized = all_quantized(parts)
        if quantized is None or len(quantized) > cuda.MAX_PARTS or to.w.in_features % 8:
            return False
        sizes = [part.out_features for part in quantized]
        if to.epilogue == cuda.GATED and sizes != [to.w.out_features // 2] * 2:
            return False
        if to.epilogue == cuda.ACTIVATED and len(sizes) != 1:
            return False
        return rows <= self._max_direct_rows(quantized)

    def multiply_pending(self, x: PendingRows, to: NormedProduct) -> None:
        """Computes the product for states that are exchanged on the way."""
        own = parts_of(to.w)
        if are_trellis(own):
            norm = cast(RmsNorm, to.norm)
            if to.epilogue == cuda.GATED:
                out, kind = cast(Tensor | CudaTrellisInputs, to.out), cast(GateKind, to.kind)
                self._trellis.multiply_gated(x, own, out, norm, kind)
            else:
                self._trellis.multiply(x, own, cast(Tensor, to.out), norm=norm)
            return
        parts = all_quantized(own)
        assert parts is not None, "`can_read_pending` has checked it"
        codes, gate = cast(Tensor | CudaInputs, to.out), 0
        if to.epilogue == cuda.GATED:
            gate = cuda.GATES[cast(GateKind, to.kind)]
        elif to.epilogue == cuda.ACTIVATED:
            gate = cuda.ACTIVATIONS[cast(PlainKind, to.kind)]
        self._multiply_codes(x, parts, codes, norm=to.norm, epilogue=to.epilogue, gate=gate)

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
