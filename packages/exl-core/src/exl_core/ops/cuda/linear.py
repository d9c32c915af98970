"""Matrices on the GPU and what is done with them.

A linear of few rows reads its quantized codes directly; of more than 8 rows, on compute capability
9.0, they become float16 on their way to the products. Of many rows, so that the weights are read
once for all of them, it is dequantized to float16 in slices that a scratch buffer holds, and
multiplied by torch. Inputs are float32 or float16, outputs either.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.errors import BackendError
from exl_core.ops.checks import OpInputError
from exl_core.ops.cuda.library import TYPES, Gpu
from exl_core.ops.cuda.quantized import CudaQuantLinear
from exl_core.ops.cuda.slices import Slices
from exl_core.ops.cuda.upload import upload
from exl_core.ops.quantized import QuantColumns, QuantLayout
from exl_core.ops.table import GateKind, PackedLinear
from exl_kernels import cuda

FEW_ROWS = 96
"""Up to so many rows the codes are read directly; the kernel's own limit is 128."""

SCRATCH_HALVES = 48 << 20
"""Of weights dequantized at a time: 96 MiB, and as much again for the slice after it."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaLinear:
    """Weights [n, k], float16, on the GPU."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


Part = CudaLinear | CudaQuantLinear


@dataclass(frozen=True, slots=True, eq=False)
class CudaJoined:
    """Linears of one input, their outputs one after the other."""

    parts: tuple[Part, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(slots=True, eq=False)
class CudaInputs:
    """Inputs of one quantized linear, in the order of its rows: what kernels leave there that know
    the linear behind them, so that nothing has to be moved in between."""

    w: CudaQuantLinear
    rows: int
    memory: Tensor  # float16, prepared
    is_by_rows: bool = False  # as they have been left there

    @property
    def features(self) -> int:
        return self.w.in_features

    @property
    def places(self) -> int:
        """Address of the row of each feature."""
        return cast(Tensor, self.w.places).data_ptr()

    @property
    def form(self) -> cuda.Prepared:
        order = self.w.order.data_ptr()
        return cuda.Prepared(order, self.memory.data_ptr(), self.w.num_blocks, 0)


class Norm(NamedTuple):
    """RMS norm of the inputs, before they are multiplied."""

    weight: Tensor
    eps: float


class Linears:
    """Makes matrices, fills them and multiplies by them."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._max_n = 1
        self._slices = Slices(gpu)

    def begin_pass(self) -> None:
        """Call it ahead of the first product of a pass."""
        self._slices.begin_pass()

    def new_dense(self, out_features: int, in_features: int, has_bias: bool) -> CudaLinear:
        if out_features < 1 or in_features < 1:
            raise OpInputError(f"PackedLinear: {out_features} x {in_features}")
        device = self._gpu.device
        bias = torch.zeros(out_features, device=device) if has_bias else None
        weight = torch.zeros(out_features, in_features, dtype=torch.float16, device=device)
        return CudaLinear(weight, bias)

    def fill_dense(
        self, w: PackedLinear, row_offset: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        dense = cast(CudaLinear, w)
        rows = slice(row_offset, row_offset + weight.shape[0])
        halves = upload(weight, self._gpu.device).half()
        if weight.dtype is not torch.float16 and not halves.isfinite().all():
            raise BackendError(
                "weights are too large for float16, which the GPU computes with",
                got=float(weight.abs().amax()),
                next_step="Take --device cpu.",
            )
        dense.weight[rows].copy_(halves)
        if dense.bias is not None and bias is not None:
            dense.bias[rows].copy_(bias)

    def new_quantized(self, layout: QuantLayout) -> CudaQuantLinear:
        self._max_n = max(self._max_n, layout.out_features)
        return CudaQuantLinear(layout, self._gpu)

    @staticmethod
    def fill_quantized(w: PackedLinear, first_column: int, columns: QuantColumns) -> None:
        cast(CudaQuantLinear, w).fill(first_column, columns)

    def inputs_for(self, w: PackedLinear, rows: int) -> CudaInputs | None:
        """Room for them, where kernels can fill it."""
        part, *others = parts_of(w)
        if others or not isinstance(part, CudaQuantLinear) or part.places is None:
            return None
        if not 0 < rows <= self._gpu.most_placed_rows:
            return None
        halves = cuda.prepared_halves(rows, part.num_blocks)
        return CudaInputs(part, rows, self._gpu.empty(halves, dtype=torch.float16))

    def multiply_prepared(self, x: CudaInputs, residual: Tensor) -> None:
        """residual [m, n] float32 += x @ w."""
        args = self._arguments((x.w,), residual, cuda.ADD)
        args.inputs[0], args.is_by_rows = x.memory.data_ptr(), x.is_by_rows
        self._gpu.call("quant_linear", args)

    def multiply(
        self,
        x: Tensor,
        w: PackedLinear,
        out: Tensor,
        *,
        norm: Norm | None = None,
        is_added: bool = False,
    ) -> None:
        """out [m, n] = x [m, k] @ w, or += where `is_added`, which takes float32."""
        if x.shape[0] == 0:
            return
        parts = parts_of(w)
        quantized = _all_quantized(parts)
        is_few = x.shape[0] <= FEW_ROWS
        if quantized is not None and is_few and len(parts) <= cuda.MAX_PARTS:
            self._few(x, quantized, out, norm, cuda.ADD if is_added else cuda.STORE)
            return
        plain = self._plain(x, norm)
        first = 0
        for is_quantized, group in groupby(parts, lambda part: isinstance(part, CudaQuantLinear)):
            alike = tuple(group)
            last = first + sum(part.out_features for part in alike)
            columns = out[:, first:last]
            if not is_quantized:
                self._dense(plain, alike, columns, is_added)
            elif is_few:
                for part, own in _split(alike, columns):
                    kind = cuda.ADD if is_added else cuda.STORE
                    self._few(plain, (cast(CudaQuantLinear, part),), own, None, kind)
            else:
                self._many(plain, cast(tuple[CudaQuantLinear, ...], alike), columns, is_added)
            first = last

    def multiply_gated(
        self, x: Tensor, w: PackedLinear, out: Tensor | CudaInputs, norm: Norm, kind: GateKind
    ) -> None:
        """out [m, n / 2] = act(gate) * up, of rms_norm(x) @ w, gate first."""
        rows, columns = x.shape[0], w.out_features // 2
        if rows == 0:
            return
        quantized = _all_quantized(parts_of(w))
        is_pair = quantized is not None and [p.out_features for p in quantized] == [columns] * 2
        if quantized is not None and is_pair and rows <= FEW_ROWS:
            self._few(x, quantized, out, norm, cuda.GATED, kind)
            return
        if isinstance(out, CudaInputs):
            plain = self._gpu.empty(rows, columns, dtype=torch.float16)
            self.multiply_gated(x, w, plain, norm, kind)
            self.prepare_for(out, plain)
            return
        gate_up = self._gpu.empty(rows, 2 * columns, dtype=torch.float16)
        self.multiply(x, w, gate_up, norm=norm)
        self.gate(gate_up, kind, out)

    def gate(self, gate_up: Tensor, kind: GateKind, out: Tensor) -> None:
        rows, columns = out.shape
        if rows == 0:
            return
        source = gate_up.data_ptr(), TYPES[gate_up.dtype], gate_up.stride(0), cuda.GATES[kind]
        target = out.data_ptr(), TYPES[out.dtype], out.stride(0)
        self._gpu.call("gated_activation", *source, rows, columns, *target)

    def _few(  # noqa: PLR0917 - what the kernel needs
        self,
        x: Tensor,
        parts: tuple[CudaQuantLinear, ...],
        out: Tensor | CudaInputs,
        norm: Norm | None,
        epilogue: int,
        gate: GateKind = "silu",
    ) -> None:
        rows, gpu = x.shape[0], self._gpu
        if isinstance(out, CudaInputs):
            args = self._arguments(parts, out.memory.view(1, -1), epilogue, gate)
            args.m, args.places = rows, out.places
            out.is_by_rows = rows > cuda.TILE_ROWS
        else:
            args = self._arguments(parts, out, epilogue, gate)
        prepare = _prepare(x, norm)
        forms: dict[int, Tensor] = {}  # parts whose rows are in one order share their inputs
        for i, part in enumerate(parts):
            order = part.order.data_ptr()
            if order not in forms:
                halves = cuda.prepared_halves(rows, part.num_blocks)
                forms[order] = gpu.empty(halves, dtype=torch.float16)
                form = cuda.Prepared(order, forms[order].data_ptr(), part.num_blocks, 0)
                prepare.to[prepare.count] = form
                prepare.count += 1
            args.inputs[i] = forms[order].data_ptr()
        gpu.call("prepare", prepare)
        gpu.call("quant_linear", args)

    def prepare_for(self, to: CudaInputs, x: Tensor) -> None:
        prepare = _prepare(x, None)
        to.is_by_rows = False
        prepare.to[0] = to.form
        prepare.count = 1
        self._gpu.call("prepare", prepare)

    def _arguments(
        self,
        parts: tuple[CudaQuantLinear, ...],
        out: Tensor,
        epilogue: int,
        gate: GateKind = "silu",
    ) -> cuda.QuantLinear:
        """All but the inputs."""
        workspace = self._gpu.workspace("quant_linear", self._max_n, FEW_ROWS)
        args = cuda.QuantLinear(
            y=out.data_ptr(),
            y_stride=out.stride(0),
            y_dtype=TYPES[out.dtype],
            count=len(parts),
            m=out.shape[0],
            epilogue=epilogue,
            gate=cuda.GATES[gate],
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )
        for i, part in enumerate(parts):
            args.parts[i] = ctypes.pointer(part.matrix)
        return args

    @staticmethod
    def _dense(x: Tensor, parts: tuple[Part, ...], out: Tensor, is_added: bool) -> None:
        for part, columns in _split(parts, out):
            _product(x, cast(CudaLinear, part).weight.T, columns, is_added)
            if part.bias is not None:
                columns.add_(part.bias)

    def _many(
        self, x: Tensor, parts: tuple[CudaQuantLinear, ...], out: Tensor, is_added: bool
    ) -> None:
        """x float16 [m, k]; the matrices are dequantized in slices of columns.

        Dequantizing is bound by memory and multiplying is not, so the next slice is dequantized
        beside the product of this one, in a stream of its own.
        """
        rows, columns = x.shape[1], out.shape[1]
        count = -(-columns * rows // SCRATCH_HALVES)
        width = -(-columns // count // 128) * 128
        for first in range(0, columns, width):
            last = min(first + width, columns)
            pitch = -(-(last - first) // 8) * 8  # rows of whole 16 bytes
            with self._slices.next(rows * pitch) as slice_:
                dense = slice_.memory.view(rows, pitch)[:, : last - first]
                with slice_.filling():
                    _unpack(parts, first, last, dense)
                _product(x, dense, out[:, first:last], is_added)
        for part, own in _split(parts, out):
            if part.bias is not None:
                own.add_(part.bias)

    def _plain(self, x: Tensor, norm: Norm | None) -> Tensor:
        """x, normed if so, as float16 [m, k]; rows may lie apart."""
        if norm is None and x.dtype is torch.float16:
            return x
        out = self._gpu.empty(*x.shape, dtype=torch.float16)
        prepare = _prepare(x, norm)
        prepare.to[0] = cuda.Prepared(None, out.data_ptr(), 0, 1)
        prepare.count = 1
        self._gpu.call("prepare", prepare)
        return out


def parts_of(w: PackedLinear) -> tuple[Part, ...]:
    return w.parts if isinstance(w, CudaJoined) else (cast(Part, w),)


def _split(parts: Sequence[Part], out: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Each part with its columns of out."""
    first = 0
    for part in parts:
        yield part, out[:, first : first + part.out_features]
        first += part.out_features


def _unpack(parts: Sequence[CudaQuantLinear], first: int, last: int, dense: Tensor) -> None:
    """dense [k, last - first] = columns first .. last - 1 of the parts side by side."""
    start = 0
    for part in parts:
        inner = max(first - start, 0), min(last - start, part.out_features)
        if inner[0] < inner[1]:
            place = start + inner[0] - first
            width = inner[1] - inner[0]
            part.unpack(inner[0], width, dense[:, place : place + width])
        start += part.out_features


def _all_quantized(parts: Sequence[Part]) -> tuple[CudaQuantLinear, ...] | None:
    found = tuple(part for part in parts if isinstance(part, CudaQuantLinear))
    return found if len(found) == len(parts) else None


def _prepare(x: Tensor, norm: Norm | None) -> cuda.Prepare:
    """Inputs named, and no form of them yet."""
    rows, columns = x.shape
    args = cuda.Prepare(
        x=x.data_ptr(), x_stride=x.stride(0), x_dtype=TYPES[x.dtype], m=rows, k=columns
    )
    if norm is not None:
        args.norm, args.eps = norm.weight.data_ptr(), norm.eps
    return args


def _product(x: Tensor, weight: Tensor, out: Tensor, is_added: bool) -> None:
    """out = x [m, k] @ weight [k, n], summed in float32; out float16 or float32."""
    if is_added:
        torch.addmm(out, x, weight, out_dtype=torch.float32, out=out)
    elif out.dtype is torch.float16:
        torch.mm(x, weight, out=out)
    else:
        out.copy_(torch.mm(x, weight, out_dtype=torch.float32))
