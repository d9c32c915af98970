"""Matrices of trellis codes (EXL3) on the GPU, and their products.

A matrix is rotated on both sides. Its inputs are therefore prepared by one kernel (norm, factors,
Hadamard transform), multiplied with the rotated matrix by another, and a third transforms the sums
into results. Up to `exl_cuda_trellis_max_rows` rows, the product reads the codes: the decode kernel
up to 8 rows, or the small-batch kernel. With more rows the rotated matrix is decoded to float16,
which torch multiplies. Decoding on a second stream, beside another product, was slower.
`exl/cuda/trellis.h` has the forms of prepared inputs.

In the batch-invariant mode the small-batch kernel takes any number of rows. Devices without enough
shared memory for it take 8 rows at a time instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu, Slab
from exl_core.ops.backends.cuda.norms import PendingRows
from exl_core.ops.backends.cuda.upload import upload
from exl_core.ops.backends.reference.trellis import check_trellis_layout
from exl_core.ops.checks import OpInputError
from exl_core.ops.elementwise import GateKind, RmsNorm
from exl_core.ops.linear import LayoutSizes
from exl_core.ops.weights import HADAMARD, TILE, TrellisColumns, TrellisLayout
from exl_kernels import cuda
from exl_kernels.cuda_exchange import PartialCopies
from exl_kernels.cuda_trellis import TrellisInputs, TrellisLinear, TrellisMatrix, TrellisPrepare

DECODE_ROWS = 8
"""Largest number of rows of the decode kernel."""

INTEGER_ROWS = 4
"""Largest number of rows that the decode kernel multiplies as integers, with codes of mul1."""

PENDING_ROWS = 8
"""Most rows of sums of ranks that products read. Several thread blocks read the whole row of every
rank: with 32 rows that takes longer than a kernel that writes the sums."""

SCRATCH_HALVES = 64 << 20
"""Largest slice of decoded weights, in float16 numbers."""

JOINT_COLUMNS = 4096
"""Most columns of matrices that one call multiplies together, with decoded weights."""

FORMS = {"integers": 0, "halves": 1, "plain": 2}
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}


def trellis_bytes(layout: TrellisLayout) -> tuple[int, int, int]:
    """Sizes of the words, the input scales and the output scales of a matrix."""
    tiles = layout.stored_in // TILE * (layout.stored_out // TILE)
    return 2 * tiles * layout.tile_words, 2 * layout.stored_in, 2 * layout.stored_out


class CudaTrellis(LayoutSizes[TrellisLayout]):
    """A matrix of trellis codes on the GPU (`PackedLinear`).

    `matrix` is the struct that kernels take. It points into tensors that this object owns.
    """

    def __init__(self, layout: TrellisLayout, gpu: Gpu, memory: Slab | None = None) -> None:
        check_trellis_layout(layout)
        self.layout = layout
        self._gpu = gpu
        empty = gpu.empty if memory is None else memory.empty
        words, in_scales, out_scales = (size // 2 for size in trellis_bytes(layout))
        self._words = empty(words, dtype=torch.int16)
        self._in_scales = empty(in_scales, dtype=torch.float16)
        self._out_scales = empty(out_scales, dtype=torch.float16)
        self.bias = gpu.empty(layout.out_features) if layout.has_bias else None
        self.matrix = TrellisMatrix(
            words=self._words.data_ptr(),
            suh=self._in_scales.data_ptr(),
            svh=self._out_scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            k=layout.stored_in,
            n=layout.stored_out,
            in_features=layout.in_features,
            out_features=layout.out_features,
            first_in=layout.first_in,
            first_out=layout.first_out,
            tile_words=layout.tile_words,
            codebook=CODEBOOKS[layout.codebook],
        )

    @property
    def size_bytes(self) -> int:
        held = (self._words, self._in_scales, self._out_scales, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def fill(self, first_column: int, columns: TrellisColumns) -> None:
        """Repacks all columns. The operands may be on the CPU or the GPU."""
        _check_columns(self.layout, first_column, columns)
        device = self._gpu.device
        words = upload(columns.words, device)
        if words.stride()[1:] != (self.layout.tile_words, 1):
            words = words.contiguous()
        self._gpu.call("trellis_pack", self.matrix, words.data_ptr(), words.stride(0))
        self._in_scales.copy_(upload(columns.in_scales, device))
        self._out_scales.copy_(upload(columns.out_scales, device))
        if self.bias is not None and columns.bias is not None:
            self.bias.copy_(upload(columns.bias, device))

    def unpack(self, first: int, columns: int, out: Tensor) -> None:
        """Decodes columns of the rotated matrix: out float16 [columns, k] without gaps.

        The order of the k is that of plain prepared inputs. `first` and `columns` are multiples of
        64.
        """
        self._gpu.call("trellis_unpack", self.matrix, first, columns, out.data_ptr())


@dataclass(slots=True, eq=False)
class CudaTrellisInputs:
    """Prepared inputs of one matrix of trellis codes, in a form of `exl/cuda/trellis.h`."""

    w: CudaTrellis
    rows: int
    form: int
    form_rows: int  # rows that the form has space for
    memory: Tensor

    @property
    def features(self) -> int:
        return self.w.in_features

    @property
    def operand(self) -> TrellisInputs:
        return TrellisInputs(
            matrix=ctypes.pointer(self.w.matrix),
            out=self.memory.data_ptr(),
            form=self.form,
            rows=self.form_rows,
        )


class TrellisRead(NamedTuple):
    """Products of norm(x) with parts that one launch multiplies (`are_joint`)."""

    norm: RmsNorm
    parts: tuple[CudaTrellis, ...]


class _Ahead(NamedTuple):
    """Inputs of `read` that were prepared from x when it was written."""

    x: Tensor
    read: TrellisRead
    inputs: list[CudaTrellisInputs]


class Trellis:
    """Products with matrices of trellis codes on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._max_rows = gpu.trellis_max_rows
        self._max_n = self._max_halves = 1
        self._ahead: _Ahead | None = None

    def begin_pass(self) -> None:
        """Forgets inputs that a pass without an end has prepared."""
        self._ahead = None

    def new(self, layout: TrellisLayout, memory: Slab | None = None) -> CudaTrellis:
        self._max_n = max(self._max_n, layout.stored_out)
        halves = layout.stored_in * layout.stored_out
        self._max_halves = max(self._max_halves, min(halves, SCRATCH_HALVES))
        return CudaTrellis(layout, self._gpu, memory)

    def takes(self, rows: int) -> bool:
        """Whether `inputs_for` has a form for this number of rows."""
        return rows > 0 and (rows <= self._max_rows or not self._gpu.is_invariant)

    def inputs_for(self, w: CudaTrellis, rows: int) -> CudaTrellisInputs:
        """Buffer for prepared inputs of `w`."""
        form, form_rows = "plain", rows
        if rows <= self._max_rows:
            form = "halves"
            if self._gpu.is_invariant:  # one form for every number of rows
                if self._max_rows > DECODE_ROWS:
                    form_rows = max(rows, DECODE_ROWS + 1)
            elif rows <= INTEGER_ROWS and w.layout.codebook == "mul1":
                form = "integers"
        number = FORMS[form]
        size = self._gpu.size("trellis_inputs_bytes", number, form_rows, w.layout.stored_in)
        memory = self._gpu.empty(size, dtype=torch.uint8)
        return CudaTrellisInputs(w, rows, number, form_rows, memory)

    def _inputs_of(self, parts: Sequence[CudaTrellis], rows: int) -> list[CudaTrellisInputs]:
        """Buffers for the inputs of parts with the same number of stored inputs."""
        inputs = [self.inputs_for(part, rows) for part in parts]
        if inputs[0].form == FORMS["plain"]:  # successive, so that one product can take several
            size = inputs[0].memory.numel()
            memory = self._gpu.empty(len(parts), size, dtype=torch.uint8)
            for one, own in zip(inputs, memory, strict=True):
                one.memory = own
        return inputs

    def prepare(
        self,
        x: Tensor | PendingRows,
        norm: RmsNorm | None,
        inputs: Sequence[CudaTrellisInputs],
    ) -> None:
        """Fills up to three prepared inputs from x [m, k] strided rows, float32 or float16, or
        from pending states, which are written too."""
        args = _prepare_args(x.x if isinstance(x, PendingRows) else x, norm, inputs)
        if isinstance(x, PendingRows):
            self._gpu.call("trellis_prepare_sums", args, x.sums)
        else:
            self._gpu.call("trellis_prepare", args)

    def multiply(
        self,
        x: Tensor | PendingRows,
        parts: Sequence[CudaTrellis],
        out: Tensor,
        *,
        norm: RmsNorm | None = None,
        is_added: bool = False,
    ) -> None:
        """out [m, n] = x [m, k] @ parts. With `is_added`, adds to `out`, which is float32 then.
        Pending states are those of `reads_pending`."""
        for rows in self._chunks(x.shape[0]):
            first = 0
            for group in _groups(parts):
                last = first + sum(part.out_features for part in group)
                inputs = self._prepared(_rows_of(x, rows), norm, group)
                if isinstance(x, PendingRows):
                    x = x.total  # written by then
                epilogue = cuda.ADD if is_added else cuda.STORE
                self._launch(inputs, out[rows, first:last], epilogue)
                first = last

    def _prepared(
        self, x: Tensor | PendingRows, norm: RmsNorm | None, parts: Sequence[CudaTrellis]
    ) -> list[CudaTrellisInputs]:
        """Inputs of parts with the same number of stored inputs, from norm(x)."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.x is x and ahead.read.norm is norm:
            of_same = [one is part for one, part in zip(ahead.read.parts, parts, strict=False)]
            if len(parts) == len(ahead.read.parts) and all(of_same):
                return ahead.inputs
        inputs = self._inputs_of(parts, x.shape[0])
        self.prepare(x, norm, inputs)
        return inputs

    def multiply_prepared(
        self, x: CudaTrellisInputs, residual: Tensor, read: TrellisRead | None = None
    ) -> None:
        """residual [m, n] float32 += x @ w. If `read` is given, the inputs of its products are
        prepared too: the next call of this object reads `residual` so."""
        self._ahead = None
        if read is None or x.form == FORMS["plain"]:
            self._launch([x], residual, cuda.ADD)
            return
        inputs = self._inputs_of(read.parts, x.rows)
        self._launch([x], residual, cuda.ADD, then=_prepare_args(residual, read.norm, inputs))
        self._ahead = _Ahead(residual, read, inputs)

    def can_send(self, rows: int) -> bool:
        """Whether `multiply_sent` takes inputs of this number of rows."""
        return 0 < rows <= self._max_rows and not self._gpu.is_invariant

    def multiply_sent(
        self, x: CudaTrellisInputs, y: int, stride: int, copies: PartialCopies
    ) -> None:
        """Writes x @ w, float32 with rows `stride` values apart, to the address `y` and to all
        copies."""
        args = self._arguments([x], cuda.STORE)
        args.y, args.y_stride, args.y_dtype = y, stride, TYPES[torch.float32]
        self._add_workspace(args, [x])
        self._gpu.call("trellis_linear_sent", args, copies)

    def reads_pending(self, parts: Sequence[CudaTrellis], rows: int) -> bool:
        """Whether products take pending states. Their kernel reads rows of whole vectors."""
        return rows <= PENDING_ROWS and parts[0].in_features % 8 == 0

    def multiply_gated(
        self,
        x: Tensor | PendingRows,
        parts: Sequence[CudaTrellis],
        out: Tensor | CudaTrellisInputs,
        norm: RmsNorm | None,
        kind: GateKind,
    ) -> None:
        """out [m, n] = act(gate) * up for two parts that `is_pair` accepts."""
        if isinstance(out, CudaTrellisInputs):
            if _can_follow(out.w.layout, parts[0].layout) and len(self._chunks(out.rows)) == 1:
                inputs = self._prepared(x, norm, parts)
                self._launch(inputs, None, cuda.GATED, kind, out)
                return
            halves = self._gpu.empty(out.rows, parts[0].out_features, dtype=torch.float16)
            self.multiply_gated(x, parts, halves, norm, kind)
            self.prepare(halves, None, [out])
            return
        for rows in self._chunks(x.shape[0]):
            inputs = self._prepared(_rows_of(x, rows), norm, parts)
            self._launch(inputs, out[rows], cuda.GATED, kind)

    def _chunks(self, rows: int) -> list[slice]:
        """Ranges of rows that are multiplied on their own: all, except in the invariant mode."""
        step = self._max_rows if self._gpu.is_invariant else max(rows, 1)
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def _launch(
        self,
        inputs: Sequence[CudaTrellisInputs],
        out: Tensor | None,
        epilogue: int,
        gate: GateKind = "silu",
        to: CudaTrellisInputs | None = None,
        *,
        then: TrellisPrepare | None = None,
    ) -> None:
        args = self._arguments(inputs, epilogue)
        args.gate = cuda.GATES[gate]
        if then is not None:
            args.then = ctypes.pointer(then)
        if out is not None:
            args.y, args.y_stride, args.y_dtype = out.data_ptr(), out.stride(0), TYPES[out.dtype]
        if to is not None:
            args.next = to.operand
        held: list[Tensor] = []  # tensors that must live until the launch
        if inputs[0].form == FORMS["plain"]:
            held = self._products(inputs)
            for i, sums in enumerate(held):
                args.sums[i] = sums.data_ptr()
        else:
            self._add_workspace(args, inputs)
        self._gpu.call("trellis_linear", args)

    def _arguments(self, inputs: Sequence[CudaTrellisInputs], epilogue: int) -> TrellisLinear:
        """Arguments of `exl_cuda_trellis_linear` without results and workspace."""
        args = TrellisLinear(count=len(inputs), m=inputs[0].rows, epilogue=epilogue)
        for i, one in enumerate(inputs):
            args.parts[i] = one.operand
        return args

    def _add_workspace(self, args: TrellisLinear, inputs: Sequence[CudaTrellisInputs]) -> None:
        n = max(self._max_n, sum(one.w.layout.stored_out for one in inputs))
        form_rows = inputs[0].form_rows
        rows = form_rows if form_rows <= DECODE_ROWS else self._max_rows
        workspace = self._gpu.workspace("trellis_linear", n, rows)
        args.workspace, args.workspace_bytes = workspace.data_ptr(), workspace.numel()

    def _products(self, inputs: Sequence[CudaTrellisInputs]) -> list[Tensor]:
        """Plain inputs of each part times its rotated matrix, float16 [m, n]."""
        sums: list[Tensor] = []
        while len(sums) < len(inputs):
            first = inputs[len(sums)]
            rest = inputs[len(sums) :]
            count = next((i for i, x in enumerate(rest) if not _is_joint(first, x, i)), len(rest))
            sums += self._joint_product(rest[:count]) if count > 1 else [self._product(first)]
        return sums

    def _joint_product(self, inputs: Sequence[CudaTrellisInputs]) -> list[Tensor]:
        """The same for parts of one shape, whose inputs follow one another in memory.

        Alone, each would leave many multiprocessors idle.
        """
        layout = inputs[0].w.layout
        k, n, rows, count = layout.stored_in, layout.stored_out, inputs[0].rows, len(inputs)
        x = inputs[0].memory.view(torch.float16)
        x = x.as_strided((count, rows, k), (rows * k, k, 1))
        dense = self._scratch(count * n * k).view(count, n, k)
        for one, to in zip(inputs, dense, strict=True):
            one.w.unpack(0, n, to)
        sums = self._gpu.empty(count, rows, n, dtype=torch.float16)
        torch.bmm(x, dense.transpose(1, 2), out=sums)
        return list(sums)

    def _product(self, x: CudaTrellisInputs) -> Tensor:
        """Plain inputs times the rotated matrix, which is decoded in slices, float16 [m, n]."""
        k, n = x.w.layout.stored_in, x.w.layout.stored_out
        halves = x.memory.view(torch.float16).view(x.rows, k)
        sums = self._gpu.empty(x.rows, n, dtype=torch.float16)
        count = -(-n * k // SCRATCH_HALVES)
        width = -(-n // count // HADAMARD) * HADAMARD
        for first in range(0, n, width):
            last = min(first + width, n)
            dense = self._scratch((last - first) * k).view(last - first, k)
            x.w.unpack(first, last - first, dense)
            torch.mm(halves, dense.T, out=sums[:, first:last])
        return sums

    def _scratch(self, size: int) -> Tensor:
        """Buffer for decoded weights, float16 [size]."""
        memory = self._gpu.buffer("trellis_decoded", 2 * max(size, self._max_halves))
        return memory[: 2 * size].view(torch.float16)


def _rows_of(x: Tensor | PendingRows, rows: slice) -> Tensor | PendingRows:
    """Some rows of x, or x itself. Pending states are one range."""
    return x if isinstance(x, PendingRows) or rows == slice(0, len(x)) else x[rows]


def _prepare_args(
    x: Tensor, norm: RmsNorm | None, inputs: Sequence[CudaTrellisInputs]
) -> TrellisPrepare:
    """Arguments of `exl_cuda_trellis_prepare`."""
    args = TrellisPrepare(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        x_dtype=TYPES[x.dtype],
        m=x.shape[0],
        count=len(inputs),
    )
    if norm is not None:
        args.norm, args.eps = norm.weight.data_ptr(), norm.eps
    for i, one in enumerate(inputs):
        args.to[i] = one.operand
    return args


def _is_joint(first: CudaTrellisInputs, x: CudaTrellisInputs, before: int) -> bool:
    """Whether x can join a product of `before` parts that begins with `first`: all have one shape,
    and together at most JOINT_COLUMNS columns."""
    a, b = first.w.layout, x.w.layout
    is_alike = (a.stored_in, a.stored_out) == (b.stored_in, b.stored_out)
    return is_alike and (before + 1) * a.stored_out <= JOINT_COLUMNS


def _check_columns(layout: TrellisLayout, first_column: int, columns: TrellisColumns) -> None:
    """Raises OpInputError unless these are all columns of a matrix, on the CPU or the GPU."""
    k, n = layout.stored_in, layout.stored_out
    expected = {
        "words": (columns.words, torch.int16, (k // TILE, n // TILE, layout.tile_words)),
        "in_scales": (columns.in_scales, torch.float16, (k,)),
        "out_scales": (columns.out_scales, torch.float16, (n,)),
    }
    if columns.bias is not None:
        expected["bias"] = columns.bias, torch.float32, (layout.out_features,)
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype is not dtype or tensor.shape != shape:
            raise OpInputError(
                f"fill_linear: {name} (expected {dtype} {list(shape)}, got {tensor.dtype}"
                f" {list(tensor.shape)})"
            )
    if first_column != 0 or (columns.bias is None) == layout.has_bias:
        raise OpInputError("fill_linear: expected all columns, and a bias if the matrix has one")


def is_pair(parts: Sequence[CudaTrellis]) -> bool:
    """Whether these are gate and up, whose results one kernel can combine."""
    if len(parts) != 2:
        return False
    a, b = (part.layout for part in parts)
    sizes = [(one.out_features, one.first_out, one.stored_in) for one in (a, b)]
    return sizes[0] == sizes[1]


def are_joint(parts: Sequence[CudaTrellis]) -> bool:
    """Whether one launch multiplies all of these."""
    return len(list(_groups(parts))) == 1


def _can_follow(after: TrellisLayout, before: TrellisLayout) -> bool:
    """Whether outputs of `before` have the places in blocks of 128 that `after` expects."""
    return (after.in_features, after.first_in) == (before.out_features, before.first_out)


def _groups(parts: Sequence[CudaTrellis]) -> Iterator[list[CudaTrellis]]:
    """Successive parts that one call multiplies."""
    group: list[CudaTrellis] = []
    for part in parts:
        is_alike = not group or group[0].layout.stored_in == part.layout.stored_in
        if len(group) == cuda.MAX_PARTS or not is_alike:
            yield group
            group = []
        group.append(part)
    yield group
