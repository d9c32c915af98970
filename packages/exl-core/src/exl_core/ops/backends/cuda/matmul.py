"""Linears on the GPU: dense and quantized matrices, and their products.

Up to `MAX_DIRECT_ROWS` rows, kernels read the quantized codes directly: the decode kernel, or for
more than 8 rows on compute capability 9.0 the small-batch kernel, which converts codes to float16
weights in registers. For codes that are not integers (FP8, IQ4_NL) there is the decode kernel only,
up to 8 rows. With more rows the matrix is dequantized to float16 in slices of columns,
which torch multiplies, so that each weight is read once for all rows. Inputs and outputs are
float32 or float16.

The batch-invariant mode has one kernel and one order of summation for every number of rows.
Quantized matrices are multiplied in chunks of 64 rows by the small-batch kernel, or 8 rows at a
time by the decode kernel. Dense matrices are multiplied by torch in chunks of exactly `FIXED_ROWS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeGuard, cast

import torch
from torch import Tensor

from exl_core.errors import BackendError
from exl_core.ops.backends.cuda.dense import (
    add_fixed_product,
    add_product,
    are_few,
    multiply_few,
)
from exl_core.ops.backends.cuda.library import TYPES, Gpu, Slab
from exl_core.ops.backends.cuda.norms import PendingRows, after_layer_norm, prepare_args
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear
from exl_core.ops.backends.cuda.slices import Slices
from exl_core.ops.backends.cuda.trellis import (
    CudaTrellis,
    CudaTrellisInputs,
    Trellis,
    TrellisRead,
    is_pair,
)
from exl_core.ops.backends.cuda.upload import upload
from exl_core.ops.checks import OpInputError
from exl_core.ops.elementwise import GateKind, Norm
from exl_core.ops.linear import DenseLinear, JoinedSizes, PackedLinear
from exl_core.ops.weights import (
    DenseColumns,
    DenseLayout,
    GroupedLayout,
    TrellisLayout,
    WeightLayout,
)
from exl_kernels import cuda
from exl_kernels.cuda_exchange import SharedSums

MAX_DIRECT_ROWS = 96
"""Largest number of rows for which kernels read the codes directly. The kernels' limit is 128."""

PlainKind = Literal["silu", "gelu_tanh", "relu2"]
"""Activations that kernels compute."""

ANY_ROWS = 1 << 20  # more than a pass has

SCRATCH_HALVES = 48 << 20
"""Largest slice of dequantized weights, in float16 numbers: 96 MiB. `Slices` has several."""


class CudaLinear(DenseLinear):
    """A dense matrix on the GPU, in float16."""

    __slots__ = ()


Part = CudaLinear | CudaQuantLinear | CudaTrellis


@dataclass(frozen=True, slots=True, eq=False)
class CudaJoined(JoinedSizes):
    """Several linears with the same inputs, whose outputs are side by side."""

    parts: tuple[Part, ...]


@dataclass(slots=True, eq=False)
class CudaInputs:
    """Prepared inputs of one quantized linear: float16, pre-permuted to the order of its rows.

    A kernel whose next linear is known writes its result here, so that no kernel has to permute it
    in between.
    """

    w: CudaQuantLinear
    rows: int
    memory: Tensor  # float16, prepared (exl/cuda/linear.h)
    is_by_rows: bool = False  # layout of `memory`: interleaved by rows, written by a gated product

    @property
    def features(self) -> int:
        return self.w.in_features

    @property
    def inverse_permutation(self) -> int:
        """Address of the inverse permutation: the row of each feature."""
        return cast(Tensor, self.w.inverse_permutation).data_ptr()

    @property
    def target(self) -> cuda.Prepared:
        """Output of `exl_cuda_prepare` that fills this object."""
        permutation = self.w.permutation.data_ptr()
        return cuda.Prepared(permutation, self.memory.data_ptr(), self.w.num_blocks, 0)


class Linears:
    """Creates matrices, fills them, and multiplies activations with them."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._max_n = 1
        self.slices = Slices(gpu)
        self._trellis = Trellis(gpu)

    def begin_pass(self) -> None:
        """Starts a pass: `Stage.bind` calls this before the first product of its layers."""
        self.slices.begin_pass()
        self._trellis.begin_pass()

    def new(self, layout: WeightLayout, on_host: bool, memory: Slab | None = None) -> Part:
        match layout:
            case DenseLayout():
                return self._new_dense(layout, on_host)
            case GroupedLayout():
                self._max_n = max(self._max_n, layout.out_features)
                return CudaQuantLinear(layout, self._gpu, on_host=on_host, memory=memory)
            case TrellisLayout():
                if on_host:
                    raise OpInputError("new_linear: no embedding has trellis codes")
                return self._trellis.new(layout, memory)

    def few_parts(self, parts: Sequence[Part]) -> list[Part]:
        """The parts, of which neighbors are merged if one launch would not take all of them."""
        groups = [list(group) for _, group in groupby(parts, type)]
        for group in groups:
            quantized = all_quantized(group)
            if quantized is not None and len(group) > cuda.MAX_PARTS:
                merged = CudaQuantLinear.merged(quantized)
                if merged is not None:
                    self._max_n = max(self._max_n, merged.out_features)
                    group[:] = [merged]
        return [part for group in groups for part in group]

    def _new_dense(self, layout: DenseLayout, on_host: bool) -> CudaLinear:
        """Weights in float16, whatever the layout's dtype.

        Page-locked memory of the host has one address for both: kernels read it over the bus.
        """
        n, k = layout.out_features, layout.in_features
        if n < 1 or k < 1:
            raise OpInputError(f"new_linear: {n} x {k}")
        device = self._gpu.device
        bias = torch.zeros(n, device=device) if layout.has_bias else None
        if on_host:
            weight = torch.zeros(n, k, dtype=torch.float16, pin_memory=True)
        else:
            weight = torch.zeros(n, k, dtype=torch.float16, device=device)
        return CudaLinear(weight, bias)

    def fill_dense(self, w: CudaLinear, first_column: int, columns: DenseColumns) -> None:
        weight, bias = columns.weight, columns.bias
        rows = slice(first_column, first_column + weight.shape[0])
        halves = upload(weight, self._gpu.device).half()
        if weight.dtype is not torch.float16 and not halves.isfinite().all():
            raise BackendError(
                "weights are too large for float16, which the GPU computes with",
                got=float(weight.abs().amax()),
                next_step="Take --device cpu.",
            )
        w.weight[rows].copy_(halves)
        if w.bias is not None and bias is not None:
            w.bias[rows].copy_(bias)

    def inputs_for(self, w: PackedLinear, rows: int) -> CudaInputs | CudaTrellisInputs | None:
        """Buffer for prepared inputs of `w`, or None if kernels cannot write to it directly."""
        part, *others = parts_of(w)
        if not others and isinstance(part, CudaTrellis):
            return self._trellis.inputs_for(part, rows) if self._trellis.takes(rows) else None
        if others or not isinstance(part, CudaQuantLinear) or part.inverse_permutation is None:
            return None
        least = self._gpu.least_rows(has_integers=part.has_integers)
        most = min(self._gpu.max_prepared_rows, self._max_direct_rows((part,)))
        if not least <= rows <= most:
            return None
        halves = cuda.prepared_halves(rows, part.num_blocks)
        return CudaInputs(part, rows, self._gpu.empty(halves, dtype=torch.float16))

    def multiply_prepared(
        self,
        x: CudaInputs | CudaTrellisInputs,
        residual: Tensor,
        read: TrellisRead | None = None,
    ) -> None:
        """residual [m, n] float32 += x @ w. `read`, as in `Trellis`, is for trellis codes only."""
        if isinstance(x, CudaTrellisInputs):
            self._trellis.multiply_prepared(x, residual, read)
            return
        args = self._new_arguments((x.w,), residual, cuda.ADD)
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
        """out [m, n] = x [m, k] @ w. With `is_added`, adds to `out`, which is float32 then."""
        if x.shape[0] == 0:
            return
        parts = parts_of(w)
        if are_trellis(parts):
            x, factors = after_layer_norm(x, norm)
            self._trellis.multiply(x, parts, out, norm=factors, is_added=is_added)
            return
        most = self._max_direct_rows(parts)
        is_direct = x.shape[0] <= most
        if self._gpu.is_invariant and not is_direct:
            for one, sums in zip(torch.split(x, most), torch.split(out, most), strict=True):
                self.multiply(one, w, sums, norm=norm, is_added=is_added)
            return
        if is_direct and not any(isinstance(part, CudaTrellis) for part in parts):
            codes = cast(tuple[CudaLinear | CudaQuantLinear, ...], parts)
            self._multiply_mixed(x, codes, out, norm, is_added)
            return
        halves = self._as_float16(x, norm)
        first = 0
        for kind, group in groupby(parts, type):
            same_kind = tuple(group)
            last = first + sum(part.out_features for part in same_kind)
            columns = out[:, first:last]
            if are_trellis(same_kind):
                self._trellis.multiply(halves, same_kind, columns, is_added=is_added)
            elif kind is CudaLinear:
                self._multiply_dense(halves, same_kind, columns, is_added)
            elif is_direct:
                for part, own in _split(same_kind, columns):
                    epilogue = cuda.ADD if is_added else cuda.STORE
                    alone = (cast(CudaQuantLinear, part),)
                    self._multiply_codes(halves, alone, own, epilogue=epilogue)
            else:
                self._multiply_slices(
                    halves, cast(tuple[CudaQuantLinear, ...], same_kind), columns, is_added
                )
            first = last

    def _multiply_mixed(
        self,
        x: Tensor,
        parts: tuple[CudaLinear | CudaQuantLinear, ...],
        out: Tensor,
        norm: Norm | None,
        is_added: bool,
    ) -> None:
        """out = norm(x) @ parts, or +=. Kernels read the codes of quantized parts. All parts share
        one preparation of the inputs, unless they need more forms than a kernel writes, or their
        kernels read different layouts (`Gpu.least_rows`)."""
        groups = tuple(_runs(parts, out))
        if self._gpu.is_invariant and len(set(_layouts(groups))) > 1:
            for group, columns in groups:
                same = cast(tuple[CudaLinear | CudaQuantLinear, ...], group)
                self._multiply_mixed(x, same, columns, norm, is_added)
            return
        quantized = tuple(part for part in parts if isinstance(part, CudaQuantLinear))
        dense = tuple(part for part in parts if isinstance(part, CudaLinear))
        is_few = are_few(x, dense, norm, out) and not (is_added or self._gpu.is_invariant)
        inputs, halves = self._prepared(x, norm, quantized, has_halves=bool(dense) and not is_few)
        epilogue = cuda.ADD if is_added else cuda.STORE
        for group, columns in groups:
            if isinstance(group[0], CudaQuantLinear):
                codes = cast(tuple[CudaQuantLinear, ...], group)
                args = self._new_arguments(codes, columns, epilogue)
                self._launch_codes(args, codes, inputs)
            elif is_few:
                multiply_few(self._gpu, x, norm, _split(group, columns))
            else:
                self._multiply_dense(cast(Tensor, halves), group, columns, is_added)

    def multiply_gated(
        self,
        x: Tensor,
        w: PackedLinear,
        out: Tensor | CudaInputs | CudaTrellisInputs,
        norm: Norm,
        kind: GateKind,
    ) -> None:
        """out [m, n / 2] = act(gate) * up, where norm(x) @ w is gate and up side by side."""
        rows, columns = x.shape[0], w.out_features // 2
        if rows == 0:
            return
        parts = parts_of(w)
        if are_trellis(parts) and is_pair(parts) and not isinstance(out, CudaInputs):
            x, factors = after_layer_norm(x, norm)
            self._trellis.multiply_gated(x, parts, out, factors, kind)
            return
        quantized = all_quantized(parts)
        are_halves = quantized is not None and [p.out_features for p in quantized] == [columns] * 2
        is_direct = quantized is not None and rows <= self._max_direct_rows(quantized)
        is_own = not isinstance(out, CudaTrellisInputs)
        if quantized is not None and are_halves and is_direct and is_own:
            own = cast(Tensor | CudaInputs, out)
            gate = cuda.GATES[kind]
            self._multiply_codes(x, quantized, own, norm=norm, epilogue=cuda.GATED, gate=gate)
            return
        if isinstance(out, CudaInputs | CudaTrellisInputs):
            halves = self._gpu.empty(rows, columns, dtype=torch.float16)
            self.multiply_gated(x, w, halves, norm, kind)
            self.prepare_for(out, halves)
            return
        if self._gpu.is_invariant and quantized is not None and are_halves:
            most = self._max_direct_rows(quantized)
            for one, results in zip(torch.split(x, most), torch.split(out, most), strict=True):
                self.multiply_gated(one, w, results, norm, kind)
            return
        gate_up = self._gpu.empty(rows, 2 * columns, dtype=torch.float16)
        self.multiply(x, w, gate_up, norm=norm)
        self.gate(gate_up, kind, out)

    def multiply_activated(
        self,
        x: Tensor,
        w: PackedLinear,
        out: Tensor | CudaInputs | CudaTrellisInputs,
        norm: Norm,
        kind: PlainKind,
    ) -> None:
        """out [m, n] = act(norm(x) @ w)."""
        rows, columns = x.shape[0], w.out_features
        if rows == 0:
            return
        quantized = all_quantized(parts_of(w))
        is_direct = quantized is not None and rows <= self._max_direct_rows(quantized)
        is_own = not isinstance(out, CudaTrellisInputs)
        if quantized is not None and len(quantized) == 1 and is_direct and is_own:
            own, gate = cast(Tensor | CudaInputs, out), cuda.ACTIVATIONS[kind]
            self._multiply_codes(x, quantized, own, norm=norm, epilogue=cuda.ACTIVATED, gate=gate)
            return
        if isinstance(out, CudaInputs | CudaTrellisInputs):
            halves = self._gpu.empty(rows, columns, dtype=torch.float16)
            self.multiply_activated(x, w, halves, norm, kind)
            self.prepare_for(out, halves)
            return
        if self._gpu.is_invariant and quantized is not None and len(quantized) == 1:
            most = self._max_direct_rows(quantized)
            for one, results in zip(torch.split(x, most), torch.split(out, most), strict=True):
                self.multiply_activated(one, w, results, norm, kind)
            return
        y = self._gpu.empty(rows, columns, dtype=torch.float16)
        self.multiply(x, w, y, norm=norm)
        self.activate(y, kind, out)

    def activate(self, x: Tensor, kind: PlainKind, out: Tensor) -> None:
        if x.numel():
            source = x.data_ptr(), TYPES[x.dtype], x.stride(0), cuda.ACTIVATIONS[kind]
            self._gpu.call(
                "activation", *source, *x.shape, out.data_ptr(), TYPES[out.dtype], out.stride(0)
            )

    def gate(self, gate_up: Tensor, kind: GateKind, out: Tensor) -> None:
        rows, columns = out.shape
        if rows == 0:
            return
        source = gate_up.data_ptr(), TYPES[gate_up.dtype], gate_up.stride(0), cuda.GATES[kind]
        target = out.data_ptr(), TYPES[out.dtype], out.stride(0)
        self._gpu.call("gated_activation", *source, rows, columns, *target)

    def _multiply_codes(
        self,
        x: Tensor | PendingRows,
        parts: tuple[CudaQuantLinear, ...],
        out: Tensor | CudaInputs,
        *,
        norm: Norm | None = None,
        epilogue: int,
        gate: int = 0,
    ) -> None:
        rows = x.shape[0]
        if isinstance(out, CudaInputs):
            args = self._new_arguments(parts, out.memory.view(1, -1), epilogue, gate)
            args.m, args.inverse_permutation = rows, out.inverse_permutation
            out.is_by_rows = rows > cuda.TILE_ROWS
        else:
            args = self._new_arguments(parts, out, epilogue, gate)
        inputs, _ = self._prepared(x, norm, parts)
        self._launch_codes(args, parts, inputs)

    def _launch_codes(
        self,
        args: cuda.QuantLinear,
        parts: tuple[CudaQuantLinear, ...],
        inputs: dict[int, Tensor],
    ) -> None:
        for i, part in enumerate(parts):
            args.inputs[i] = inputs[part.permutation.data_ptr()].data_ptr()
        self._gpu.call("quant_linear", args)

    def _prepared(
        self,
        x: Tensor | PendingRows,
        norm: Norm | None,
        parts: tuple[CudaQuantLinear, ...],
        *,
        has_halves: bool = False,
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Prepared inputs by permutation: parts with the same one share them. And norm(x) float16
        [m, k] if `has_halves`."""
        rows, gpu = x.shape[0], self._gpu
        least_rows = gpu.least_rows(has_integers=all(part.has_integers for part in parts))
        halves: Tensor | None = None
        targets: list[cuda.Prepared] = []
        if has_halves:
            if norm is None and isinstance(x, Tensor) and x.dtype is torch.float16:
                halves = x
            else:
                halves = gpu.empty(*x.shape, dtype=torch.float16)
                targets.append(cuda.Prepared(None, halves.data_ptr(), 0, 1))
        inputs: dict[int, Tensor] = {}
        for part in parts:
            permutation = part.permutation.data_ptr()
            if permutation not in inputs:
                size = cuda.prepared_halves(rows, part.num_blocks, least_rows)
                held = inputs[permutation] = gpu.empty(size, dtype=torch.float16)
                targets.append(cuda.Prepared(permutation, held.data_ptr(), part.num_blocks, 0))
        for first in range(0, len(targets), cuda.MAX_PARTS):
            prepare = prepare_args(x.x if isinstance(x, PendingRows) else x, norm)
            prepare.least_rows = least_rows
            for i, target in enumerate(targets[first : first + cuda.MAX_PARTS]):
                prepare.to[i] = target
                prepare.count = i + 1
            if isinstance(x, PendingRows):
                assert len(targets) <= cuda.MAX_PARTS, "the sums are read once"
                is_shared = isinstance(x.sums, SharedSums)
                gpu.call("prepare_shared_sums" if is_shared else "prepare_sums", prepare, x.sums)
            else:
                gpu.call("prepare", prepare)
        return inputs, halves

    def prepare_for(self, to: CudaInputs | CudaTrellisInputs, x: Tensor) -> None:
        if isinstance(to, CudaTrellisInputs):
            self._trellis.prepare(x, None, [to])
            return
        prepare = prepare_args(x, None)
        to.is_by_rows = False
        prepare.to[0] = to.target
        prepare.count = 1
        self._gpu.call("prepare", prepare)

    def _new_arguments(
        self,
        parts: tuple[CudaQuantLinear, ...],
        out: Tensor,
        epilogue: int,
        gate: int = 0,
    ) -> cuda.QuantLinear:
        """Arguments of `exl_cuda_quant_linear` without its inputs."""
        shape = out.shape[0], out.stride(0)
        args = self._arguments_at(parts, out.data_ptr(), shape, epilogue)
        args.y_dtype, args.gate = TYPES[out.dtype], gate
        return args

    def _arguments_at(
        self,
        parts: tuple[CudaQuantLinear, ...],
        y: int,
        shape: tuple[int, int],
        epilogue: int,
    ) -> cuda.QuantLinear:
        """The same for float32 at the address `y`. `shape`: rows, and the distance between them."""
        workspace = self._gpu.workspace("quant_linear", self._max_n, MAX_DIRECT_ROWS)
        args = cuda.QuantLinear(
            y=y,
            y_stride=shape[1],
            y_dtype=TYPES[torch.float32],
            count=len(parts),
            m=shape[0],
            epilogue=epilogue,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
            is_invariant=self._gpu.is_invariant,
        )
        for i, part in enumerate(parts):
            args.parts[i] = ctypes.pointer(part.matrix)
        return args

    def _multiply_dense(
        self, x: Tensor, parts: tuple[Part, ...], out: Tensor, is_added: bool
    ) -> None:
        multiply = add_fixed_product if self._gpu.is_invariant else add_product
        for part, columns in _split(parts, out):
            multiply(x, cast(CudaLinear, part).weight.T, columns, is_added)
            if part.bias is not None:
                columns.add_(part.bias)

    def _multiply_slices(
        self, x: Tensor, parts: tuple[CudaQuantLinear, ...], out: Tensor, is_added: bool
    ) -> None:
        """Multiplies x float16 [m, k] with matrices that are dequantized in slices of columns.

        The next slice is dequantized on a second stream (`slices.py`).
        """
        rows, columns = x.shape[1], out.shape[1]
        count = -(-columns * rows // SCRATCH_HALVES)
        width = -(-columns // count // 128) * 128
        for first in range(0, columns, width):
            last = min(first + width, columns)
            pitch = -(-(last - first) // 8) * 8  # a multiple of 16 bytes
            with self.slices.next(rows * pitch) as slice_:
                dense = slice_.memory.view(rows, pitch)[:, : last - first]
                with slice_.filling():
                    _unpack(parts, first, last, dense)
                add_product(x, dense, out[:, first:last], is_added)
        for part, own in _split(parts, out):
            if part.bias is not None:
                own.add_(part.bias)

    def _max_direct_rows(self, parts: Sequence[Part]) -> int:
        """Largest number of rows for which kernels read the codes of these parts directly."""
        quantized = (part for part in parts if isinstance(part, CudaQuantLinear))
        if not all(part.has_integers for part in quantized):
            return cuda.TILE_ROWS
        return ANY_ROWS if self._gpu.is_invariant else MAX_DIRECT_ROWS

    def _as_float16(self, x: Tensor, norm: Norm | None) -> Tensor:
        """x, after the norm if there is one, as float16 [m, k] with any row stride."""
        if norm is None and x.dtype is torch.float16:
            return x
        out = self._gpu.empty(*x.shape, dtype=torch.float16)
        prepare = prepare_args(x, norm)
        prepare.to[0] = cuda.Prepared(None, out.data_ptr(), 0, 1)
        prepare.count = 1
        self._gpu.call("prepare", prepare)
        return out


def parts_of(w: PackedLinear) -> tuple[Part, ...]:
    return w.parts if isinstance(w, CudaJoined) else (cast(Part, w),)


def _runs(parts: Sequence[Part], out: Tensor) -> Iterator[tuple[tuple[Part, ...], Tensor]]:
    """Yields parts of one kind that follow one another, with their columns of `out`. Kernels take
    at most MAX_PARTS quantized ones at a time."""
    start = 0
    for kind, group in groupby(parts, type):
        alike = tuple(group)
        most = cuda.MAX_PARTS if kind is CudaQuantLinear else len(alike)
        for first in range(0, len(alike), most):
            some = alike[first : first + most]
            end = start + sum(part.out_features for part in some)
            yield some, out[:, start:end]
            start = end


def _layouts(groups: Iterable[tuple[tuple[Part, ...], Tensor]]) -> Iterator[bool]:
    """Yields for each quantized group whether all of its codes are integers."""
    for group, _ in groups:
        quantized = all_quantized(group)
        if quantized is not None:
            yield all(part.has_integers for part in quantized)


def _split(parts: Sequence[Part], out: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Yields each part with its columns of `out`."""
    first = 0
    for part in parts:
        yield part, out[:, first : first + part.out_features]
        first += part.out_features


def _unpack(parts: Sequence[CudaQuantLinear], first: int, last: int, dense: Tensor) -> None:
    """Dequantizes columns first .. last - 1 of the joined parts: dense [k, last - first]."""
    start = 0
    for part in parts:
        inner = max(first - start, 0), min(last - start, part.out_features)
        if inner[0] < inner[1]:
            offset = start + inner[0] - first
            width = inner[1] - inner[0]
            part.unpack(inner[0], width, dense[:, offset : offset + width])
        start += part.out_features


def are_trellis(parts: tuple[Part, ...]) -> TypeGuard[tuple[CudaTrellis, ...]]:
    return all(isinstance(part, CudaTrellis) for part in parts)


def all_quantized(parts: Sequence[Part]) -> tuple[CudaQuantLinear, ...] | None:
    found = tuple(part for part in parts if isinstance(part, CudaQuantLinear))
    return found if len(found) == len(parts) else None
