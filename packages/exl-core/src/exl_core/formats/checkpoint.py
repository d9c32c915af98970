"""A checkpoint's tensors under the model's names, with rows in the model's order.

Owns the differences between file formats of one architecture: rows permuted for another RoPE
convention, norms stored minus one. `locate.py` finds tensors under other names. A matrix is
available in its run-time form (`matrix`) and as its exact values (`chunks`). Every requested tensor
is checked: present, of the expected shape, and finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from exl_core.arch.layers import MLA
from exl_core.arch.modules import Kind, ModuleRow, module_table
from exl_core.arch.places import RowPermutation
from exl_core.arch.quantization import Quantization
from exl_core.arch.spec import ModelConfig
from exl_core.errors import UnsupportedModelError, WeightValueError
from exl_core.formats.codecs.rounded import matrix as rounded
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, stay
from exl_core.formats.containers.source import PLAIN_TYPES, StoredTensor, TensorSource
from exl_core.formats.locate import Located, locate, refuse_surplus, share
from exl_core.formats.quantized import (
    MATRIX,
    BlockMatrix,
    block_groups,
    block_layout,
    open_matrices,
    open_matrix,
    stored_layout,
)
from exl_core.ops.weights import (
    BLOCK_ROWS,
    FILL_STEP,
    HADAMARD,
    DenseColumns,
    DenseLayout,
    GroupedLayout,
    GroupRun,
    TrellisLayout,
    WeightColumns,
    WeightLayout,
)

CHUNK_VALUES = 1 << 18  # values decoded at a time: 1 MiB as float32, which stays in cache

_CODE_TYPES = {"MXFP4": torch.bfloat16, "EXL3": torch.float32}
"""Dtypes of the exact values of codes, if not float16. bfloat16 represents MXFP4 exactly. The
format of EXL3 has no roundings."""

Reader = Callable[[int, int, torch.dtype, Move], Tensor]
"""Returns the rows first .. last - 1 of a tensor as a dtype, moved to a device."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a tensor, in the model's order. `size_bytes` is their size in the file."""

    first_row: int
    values: Tensor
    size_bytes: int


class Checkpoint:
    """The tensors of one model, by the canonical names of the module table.

    `is_exact`: all matrices are dense, dequantized as their formats define.
    `in_4bit`: matrices of the layers that are stored as floats are rounded to 4-bit codes.
    `has_factors`: all op tables which get the weights keep scales as products (`ScaleParts`).
    `has_transposes`: one of them keeps the keys of latent attention transposed too.
    `min_group_rows`: that of the op tables which get the weights (`LinearOps`), the largest if they
    differ. GGUF blocks with smaller groups are dequantized. So are matrices of trellis codes whose
    columns are stored in another order than the model's, because they cannot be reordered.
    `rows`: tensors to use instead of all tensors that the model needs.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        quantization: Quantization | None = None,
        *,
        is_exact: bool = False,
        in_4bit: bool = False,
        min_group_rows: int = BLOCK_ROWS,
        has_factors: bool = False,
        has_transposes: bool = False,
        rows: Iterable[ModuleRow] | None = None,
    ) -> None:
        self._source = source
        self._quantization = quantization
        self._is_exact = is_exact
        self._in_4bit = in_4bit
        self.min_group_rows = min_group_rows
        self._has_factors = has_factors
        self._layers = config.layers if has_transposes else ()
        if rows is None:
            rows = module_table(config).rows
            for surplus in module_table(config).surplus:
                refuse_surplus(source, surplus, quantization)
        self.rows = {row.name: row for row in rows}
        self._located: dict[str, Located] = {
            name: locate(source, row, config.arch.name, quantization)
            for name, row in self.rows.items()
        }
        self.stored: dict[str, StoredTensor] = {
            name: located.stored for name, located in self._located.items()
        }
        self._layouts: dict[str, WeightLayout] = {}
        self._opened: dict[str, RuntimeMatrix] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes in the files of all needed tensors."""
        return sum(tensor.size_bytes for tensor in self.stored.values())

    @property
    def used_names(self) -> set[str]:
        """Stored names of all tensors that the model needs."""
        return {part for name in self.stored for part in self._stored_names(name)}

    @property
    def packed_bytes(self) -> int:
        """Bytes that the weights will take in memory."""
        return sum(self._packed_bytes(name) for name in self.stored)

    @property
    def bytes_at_once(self) -> int:
        """Bytes in memory with one layer at a time: embedding, head, last norm, and the largest
        layer."""
        sizes = self.bytes_by_part
        layers = [size for part, size in sizes.items() if isinstance(part, int)]
        return sum(sizes.values()) - sum(layers) + max(layers, default=0)

    @property
    def bytes_by_part(self) -> dict[int | str, int]:
        """Bytes that the weights will take in memory: of each layer by its index, and of each
        tensor outside the layers by its role."""
        found: dict[int | str, int] = {}
        for name, row in self.rows.items():
            part = row.role if row.layer is None else row.layer
            found[part] = found.get(part, 0) + self._packed_bytes(name)
        return found

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes that the experts' matrices of each layer will take in memory."""
        layers = [row.layer for row in self.rows.values() if row.layer is not None]
        found = [0] * (max(layers, default=-1) + 1)
        for name, row in self.rows.items():
            if row.expert is not None and row.layer is not None:
                found[row.layer] += self._packed_bytes(name)
        return tuple(found)

    def _packed_bytes(self, name: str) -> int:
        if self.rows[name].is_matrix:
            return self.matrix_bytes(self.rows[name], self.layout(name))
        return self.stored[name].num_values * self.dtype(name).itemsize

    def matrix_bytes(self, row: ModuleRow, layout: WeightLayout) -> int:
        """Bytes that a matrix, or a part of it with this layout, will take in memory."""
        size = layout.size_bytes(self.min_group_rows, has_factors=self._has_factors)
        mixer = self._layers[row.layer].mixer if self._layers and row.layer is not None else None
        if isinstance(mixer, MLA) and row.role in ("kv_up", "k_up"):
            others = 0 if row.role == "k_up" else mixer.value_dim
            size += size * mixer.nope_dim // (mixer.nope_dim + others)
        return size

    def packed_bytes_of(self, row: ModuleRow) -> int:
        """Bytes that one tensor will take in memory."""
        return self._packed_bytes(row.name)

    def layout(self, name: str) -> WeightLayout:
        """Run-time layout of a matrix, from headers and group tables only.

        `matrix` may still find a permutation of the rows, or that no offsets are needed.
        """
        if name not in self._layouts:
            layout = self._layout_of_codes(name) or self._dense_layout(name)
            has_bias = self.bias_of(name) is not None
            same = layout.has_bias == has_bias
            self._layouts[name] = layout if same else replace(layout, has_bias=has_bias)
        return self._layouts[name]

    def _layout_of_codes(self, name: str) -> WeightLayout | None:
        """Layout of the codes, without the bias; None if the matrix has none, or none that an op
        reads."""
        located = self._located[name]
        if self._is_exact or self.rows[name].is_dense:
            return None
        if self.is_rounded(name):
            return rounded.layout_of(*located.stored.shape)
        if located.matrix is not None:
            stored = stored_layout(self._source, located.matrix, self._quantization)
            is_permuted = located.place.permutation is not None
            return None if is_permuted and isinstance(stored, TrellisLayout) else stored
        layout = block_layout(located.stored)
        if layout is None or any(run.rows < self.min_group_rows for run in layout.runs):
            return None
        return layout

    def is_rounded(self, name: str) -> bool:
        """Whether this matrix is stored as floats and rounded to 4-bit codes."""
        row = self.rows[name]
        if not self._in_4bit or row.layer is None or not row.is_matrix or row.role == "router":
            return False
        if row.is_dense:
            return False
        return self._located[name].matrix is None and self.stored[name].storage in PLAIN_TYPES

    def _dense_layout(self, name: str) -> DenseLayout:
        out_features, in_features = self.stored[name].shape
        return DenseLayout(out_features, in_features, self.dtype(name))

    def group_runs(self, name: str) -> tuple[GroupRun, ...]:
        """Bit widths and sizes of a matrix's groups, from headers and group tables only; () if the
        tensor has no groups."""
        located = self._located[name]
        if located.matrix is None:
            return block_groups(located.stored)
        layout = stored_layout(self._source, located.matrix, self._quantization)
        return layout.runs if isinstance(layout, GroupedLayout) else ()

    def trellis(self, name: str) -> TrellisLayout | None:
        """Layout of a matrix's trellis codes, from headers only; None if it has none."""
        matrix = self._located[name].matrix
        if matrix is None:
            return None
        layout = stored_layout(self._source, matrix, self._quantization)
        return layout if isinstance(layout, TrellisLayout) else None

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor's dense form: the stored one, or one that codes fit."""
        storage = self.stored[name].storage
        return PLAIN_TYPES.get(storage) or _CODE_TYPES.get(storage, torch.float16)

    def open_ahead(self, until: Callable[[], bool]) -> None:
        """Opens and thereby checks matrices of several tensors until `until()` is true.

        `load_model` calls this while a GPU starts.
        """
        for name, located in self._located.items():
            if until():
                return
            if located.matrix is not None and not self._is_exact:
                self._opened[name] = self._matrix(name)

    def bias_of(self, name: str) -> str | None:
        """Name of the matrix's bias; None if it has none, or none among these tensors."""
        bias = self.rows[name].bias
        return bias if bias in self.stored else None

    def matrix(self, name: str) -> RuntimeMatrix:
        """A matrix in its run-time form, with its bias if the model has one."""
        self._prefetch(name)
        bias, matrix = self.bias_of(name), self._opened.pop(name, None) or self._matrix(name)
        return matrix if bias is None else _WithBias(matrix, self.vector(bias))

    def matrices(self, names: Sequence[str]) -> list[RuntimeMatrix]:
        """`matrix` of several matrices, such as those of some experts. Codes of matrices that are
        stored alike are read and checked jointly."""
        joint = [name for name in names if self._can_join(name)]
        self._source.prefetch_all(part for name in joint for part in self._stored_names(name))
        coded = [one for name in joint if (one := self._located[name].matrix) is not None]
        matrices = open_matrices(self._source, coded, self._quantization)
        opened = dict(zip(joint, matrices, strict=True))
        return [opened[name] if name in opened else self.matrix(name) for name in names]

    def _can_join(self, name: str) -> bool:
        """Whether this matrix has codes, all in the order of the file, and no bias."""
        located = self._located[name]
        if located.matrix is None or located.place.permutation is not None:
            return False
        is_plain = self.bias_of(name) is None and name not in self._opened
        return is_plain and not isinstance(self.layout(name), DenseLayout)

    def release_all(self, names: Sequence[str]) -> None:
        """`release` of several whole tensors."""
        coded = [name for name in names if self._located[name].matrix is not None]
        self._source.release_all(part for name in coded for part in self._stored_names(name))
        for name in names:
            if self._located[name].matrix is None:
                self.release(name)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Releases the process's memory for these rows of the file (None: all), after reading.

        A range of rows is released only if it is contiguous in the file.
        """
        located = self._located[name]
        if located.matrix is None and located.place.is_transposed:
            if rows is None:
                within, _ = located.place.columns(located.stored.shape[1])
                self._source.release(located.stored.name, within)
            return
        if rows is None and located.place.experts:
            rows = slice(0, located.stored.shape[0])
        if rows is None:
            for part in self._stored_names(name):
                self._source.release(part)
        elif located.matrix is None and located.place.permutation is None:
            first = located.place.first_row
            self._source.release(located.stored.name, slice(first + rows.start, first + rows.stop))

    def _prefetch(self, name: str) -> None:
        located = self._located[name]
        rows = None
        if located.place.is_transposed and located.matrix is None:
            rows, _ = located.place.columns(located.stored.shape[1])
        elif located.place.experts and located.matrix is None:
            first = located.place.first_row
            rows = slice(first, first + located.stored.shape[0])
        for part in self._stored_names(name):
            self._source.prefetch(part, rows)

    def _stored_names(self, name: str) -> list[str]:
        """Stored names of the tensors that make up `name`."""
        matrix = self._located[name].matrix
        if matrix is None:
            return [self.stored[name].name]
        return [part.name for part in matrix.parts.values()]

    def chunks(self, name: str, dtype: torch.dtype) -> Iterator[Chunk]:
        """Iterates over the rows of a matrix or a vector as `dtype`, a multiple of 32 at a time.

        Memory of the file is released after reading.
        """
        self._prefetch(name)
        tensor, read = self.stored[name], self._reader(name)
        rows = tensor.shape[0]
        step = HADAMARD if tensor.storage == "EXL3" else FILL_STEP
        for start, stop in row_ranges(rows, max(1, tensor.num_values // rows), CHUNK_VALUES, step):
            part = read(start, stop, dtype, stay)
            yield Chunk(start, part, share(tensor.size_bytes, start, stop, rows))
            self.release(name, slice(start, stop))
        self.release(name)

    def _reader(self, name: str) -> Reader:
        """Function that reads exact values of the tensor's rows, and checks them.

        It checks and converts on the device to which the rows are moved.
        """
        located, tensor, row = self._located[name], self.stored[name], self.rows[name]
        codes = self._coded_matrix(name) if located.matrix is not None else None
        before, permutation = located.place.first_row, self._row_permutation(name)

        def stored_rows(first: int, last: int) -> Tensor:
            within = slice(before + first, before + last)
            if codes is not None:
                return codes.dense(first, last)
            if located.place.is_transposed:
                return self._transposed_rows(name, first, last)
            if located.place.experts and len(tensor.shape) == 1:  # a bias [experts, rows]
                flat = self._source.read(tensor.name, slice(None)).flatten()
                return flat[permutation[first:last] if permutation is not None else within]
            if len(self._source.tensors[tensor.name].shape) < len(tensor.shape):
                # A matrix of one row, stored as a vector.
                return self._source.read(tensor.name, slice(None)).view(tensor.shape)
            rows = within if permutation is None else permutation[first:last]
            return self._source.read(tensor.name, rows)

        def read(first: int, last: int, dtype: torch.dtype, move: Move) -> Tensor:
            part = move(stored_rows(first, last))
            _check_finite(tensor, part, "The file is damaged or its conversion failed")
            if row.is_normalized and codes is None:
                part = torch.nn.functional.normalize(part.to(torch.float32))
            if part.dtype is not dtype:
                part = part.to(dtype)
                _check_finite(tensor, part, f"As {dtype} they overflow")
            return part

        return read

    def _transposed_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a matrix that is stored as [in_features, out_features]."""
        place, tensor = self._located[name].place, self.stored[name]
        within, column = place.columns(tensor.shape[1])
        stored = self._source.read(tensor.name, within)
        permutation = self._row_permutation(name)
        if permutation is None:
            return stored[:, column + first : column + last].T.contiguous()
        before = place.first_row - column  # columns of the experts before this one
        return stored[:, permutation[first:last] - before].T.contiguous()

    def vector(self, name: str) -> Tensor:
        """A bias, float32 [rows]."""
        return torch.cat([chunk.values for chunk in self.chunks(name, torch.float32)])

    def norm(self, name: str) -> Tensor:
        """Factors of a norm, float32 [rows], with the 1 added where the file stores them minus one,
        or taps of a convolution [rows, taps]."""
        weight, place = self.vector(name), self._located[name].place
        if self.rows[name].kind is Kind.TAPS:
            return weight.view(self.rows[name].shape)
        flat = (Kind.NORM, Kind.ROUTER_VECTOR, Kind.VECTOR)
        if weight.dim() == MATRIX and self.rows[name].kind in flat:
            weight = weight.flatten()
        if place.is_decay:
            weight = self._logarithm(name, weight)
        if weight.dim() == MATRIX:
            if not torch.equal(weight, weight[:1].expand_as(weight)):
                raise UnsupportedModelError(
                    f"tensor {name!r} differs between heads", where=self.stored[name].file
                )
            weight = weight[0].contiguous()
        if place.permutation is not None:
            weight = weight[torch.tensor(place.permutation.stored_rows())]
        return weight + place.addend if place.addend else weight

    def _logarithm(self, name: str, weight: Tensor) -> Tensor:
        """A_log of a tensor that stores -exp(A_log), float32."""
        if bool((weight > 0).any()):
            raise WeightValueError(
                f"tensor {self.stored[name].name!r} holds a decay with which states would grow",
                where=self.stored[name].file,
                expected="numbers up to 0",
                got=weight.max().item(),
                next_step="The file is damaged or its conversion failed; get the model from"
                " another source.",
            )
        return torch.log(-weight)

    def _matrix(self, name: str) -> RuntimeMatrix:
        """The matrix in its run-time form, without its bias."""
        if isinstance(self.layout(name), DenseLayout):
            return _DenseMatrix(self._dense_layout(name), self._reader(name))
        return self._coded_matrix(name)

    def _coded_matrix(self, name: str) -> RuntimeMatrix:
        """The matrix as the codes that the file stores, or that its floats are rounded to."""
        located, permutation = self._located[name], self._row_permutation(name)
        if self.is_rounded(name):
            where = f"{located.stored.file}: {name}"
            return rounded.RoundedMatrix(located.stored.shape, self._reader(name), where)
        if located.matrix is not None:
            return open_matrix(self._source, located.matrix, self._quantization, permutation)
        return BlockMatrix(self._source, located.stored, located.place.first_row, permutation)

    def _row_permutation(self, name: str) -> Tensor | None:
        """Stored row of each of the model's rows; None if their order is the same.

        The elements of a norm are put in order by `norm`, because a file may repeat them.
        """
        place = self._located[name].place
        if place.permutation is None or self.rows[name].is_norm:
            return None
        return _stored_rows(place.permutation) + place.first_row


@lru_cache(maxsize=64)
def _stored_rows(permutation: RowPermutation) -> Tensor:
    return torch.tensor(permutation.stored_rows())


class _DenseMatrix:
    """A matrix of plain numbers, as stored or dequantized."""

    def __init__(self, layout: DenseLayout, read: Reader) -> None:
        self._read = read
        self.layout = layout

    def columns(self, first: int, last: int, move: Move = stay) -> DenseColumns:
        return DenseColumns(self._read(first, last, self.layout.dtype, move))

    def dense(self, first: int, last: int) -> Tensor:
        return self._read(first, last, self.layout.dtype, stay)


class _WithBias:
    """A matrix and the bias of its columns, float32."""

    def __init__(self, matrix: RuntimeMatrix, bias: Tensor) -> None:
        self._matrix = matrix
        self._bias = bias
        self.layout: WeightLayout = replace(matrix.layout, has_bias=True)

    def columns(self, first: int, last: int, move: Move = stay) -> WeightColumns:
        return replace(self._matrix.columns(first, last, move), bias=self._bias[first:last])

    def dense(self, first: int, last: int) -> Tensor:
        return self._matrix.dense(first, last)


def row_ranges(
    rows: int, row_size: int, size: int, multiple: int = FILL_STEP
) -> list[tuple[int, int]]:
    """Ranges of about `size` that cover all rows. They start at multiples of `multiple`."""
    step = max(1, size // row_size // multiple) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _check_finite(tensor: StoredTensor, values: Tensor, cause: str) -> None:
    # The sum is not finite if any value is not. Only then is each value examined: a sum of finite
    # values may overflow too.
    is_finite = math.isfinite(values.sum(dtype=torch.float32).item())
    if is_finite or torch.isfinite(values).all():
        return
    bad = int((~torch.isfinite(values)).sum())
    raise WeightValueError(
        f"tensor {tensor.name!r} holds {bad} values that are NaN or infinite",
        where=tensor.file,
        next_step=f"{cause}; get the model from another source.",
    )
