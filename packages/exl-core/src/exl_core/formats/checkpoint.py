"""A checkpoint's tensors under the model's names, with rows in the model's order.

Owns the differences between file formats of one architecture: rows permuted for another RoPE
convention, norms stored minus one. `locate.py` finds tensors under other names. A quantized matrix
is available as its codes (`quantized`) and as its exact values (`chunks`). Every requested tensor
is checked: present, of the expected shape, and finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exl_core.arch.modules import Kind, ModuleRow, module_table
from exl_core.arch.quantization import Quantization
from exl_core.arch.spec import ModelConfig
from exl_core.errors import UnsupportedModelError, WeightValueError
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, packed_bytes, stay
from exl_core.formats.containers.source import PLAIN_TYPES, StoredTensor, TensorSource
from exl_core.formats.locate import Located, locate, share
from exl_core.formats.quantized import (
    MATRIX,
    BlockMatrix,
    block_groups,
    block_layout,
    open_matrix,
    stored_groups,
    stored_layout,
)
from exl_core.ops.quantized import GroupRun, QuantColumns, QuantLayout

CHUNK_VALUES = 1 << 18  # values decoded at a time: 1 MiB as float32, which stays in cache
ROW_STEP = 32  # chunks start at multiples of it, which are whole packed words at any bit width


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a tensor, in the model's order. `size_bytes` is their size in the file."""

    first_row: int
    values: Tensor
    size_bytes: int


class Checkpoint:
    """The tensors of one model, by the canonical names of the module table.

    `is_exact`: dequantizes all matrices as their formats define, so none is kept quantized.
    `rows`: tensors to use instead of all tensors that the model needs.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        quantization: Quantization | None = None,
        *,
        is_exact: bool = False,
        rows: Iterable[ModuleRow] | None = None,
    ) -> None:
        self._source = source
        self._quantization = quantization
        self._is_exact = is_exact
        rows = module_table(config).rows if rows is None else rows
        self.rows = {row.name: row for row in rows}
        self._located: dict[str, Located] = {
            name: locate(source, row, config.arch.name, quantization)
            for name, row in self.rows.items()
        }
        self.stored: dict[str, StoredTensor] = {
            name: located.stored for name, located in self._located.items()
        }
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
        layer_bytes: dict[int | None, int] = {}
        for name, row in self.rows.items():
            layer_bytes[row.layer] = layer_bytes.get(row.layer, 0) + self._packed_bytes(name)
        outside_layers = layer_bytes.pop(None, 0)
        return outside_layers + max(layer_bytes.values(), default=0)

    def _packed_bytes(self, name: str) -> int:
        layout = None if self._is_exact else self._layout(name)
        if layout is not None:
            return packed_bytes(layout)
        return self.stored[name].num_values * self.dtype(name).itemsize

    def _layout(self, name: str) -> QuantLayout | None:
        """Run-time layout, from headers and group tables only; None if the tensor has no codes."""
        located = self._located[name]
        if located.matrix is not None:
            return stored_layout(self._source, located.matrix, self._quantization)
        return block_layout(located.stored)

    def is_quantized(self, name: str) -> bool:
        """Whether `quantized` returns this tensor; otherwise only `chunks` does."""
        if self._is_exact:
            return False
        located = self._located[name]
        return located.matrix is not None or block_layout(located.stored) is not None

    def group_runs(self, name: str) -> tuple[GroupRun, ...]:
        """Bit widths and sizes of a matrix's groups, from headers and group tables only; () if the
        tensor has no groups."""
        located = self._located[name]
        if located.matrix is not None:
            return stored_groups(self._source, located.matrix, self._quantization)
        return block_groups(located.stored)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor's dense form: its stored dtype, or float16 if it is quantized."""
        return PLAIN_TYPES.get(self.stored[name].storage, torch.float16)

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

    def quantized(self, name: str) -> RuntimeMatrix:
        """A matrix as codes, with its bias if the model has one."""
        self._prefetch(name)
        bias, matrix = self.bias_of(name), self._opened.pop(name, None) or self._matrix(name)
        return matrix if bias is None else _WithBias(matrix, self.vector(bias))

    def release(self, name: str, rows: slice | None = None) -> None:
        """Releases the process's memory for these rows of the file (None: all), after reading.

        A range of rows is released only if it is contiguous in the file.
        """
        located = self._located[name]
        if rows is None:
            for part in self._stored_names(name):
                self._source.release(part)
        elif located.matrix is None and located.place.order is None:
            first = located.place.first_row
            self._source.release(located.stored.name, slice(first + rows.start, first + rows.stop))

    def _prefetch(self, name: str) -> None:
        for part in self._stored_names(name):
            self._source.prefetch(part)

    def _stored_names(self, name: str) -> list[str]:
        """Stored names of the tensors that make up `name`."""
        matrix = self._located[name].matrix
        if matrix is None:
            return [self.stored[name].name]
        return [part.name for part in matrix.parts.values()]

    def chunks(
        self,
        name: str,
        dtype: torch.dtype,
        within: tuple[int, int] | None = None,
        values: int = CHUNK_VALUES,
        move: Move = stay,
    ) -> Iterator[Chunk]:
        """Iterates over the rows of a matrix or a bias as `dtype`, about `values` values at a time
        (multiples of 32 rows).

        `within` (first, last) limits the rows to that range. The rows are checked and converted on
        the device to which `move` copies them. Memory of the file is released after reading.
        """
        self._prefetch(name)
        located, tensor = self._located[name], self.stored[name]
        num_rows = tensor.shape[0]
        first_row, last_row = within or (0, num_rows)
        values_a_row = max(1, tensor.num_values // num_rows)
        matrix = self._matrix(name) if located.matrix is not None else None
        permutation = self._row_permutation(name)
        for first, last in row_ranges(last_row - first_row, values_a_row, values):
            start, stop = first_row + first, first_row + last
            if matrix is not None:
                part = matrix.dense(start, stop)
            else:
                before = located.place.first_row
                part = self._source.read(
                    tensor.name,
                    slice(before + start, before + stop)
                    if permutation is None
                    else permutation[start:stop],
                )
            part = move(part)
            _check_finite(tensor, part, "The file is damaged or its conversion failed")
            if self.rows[name].is_normalized and matrix is None:
                part = torch.nn.functional.normalize(part.to(torch.float32))
            if part.dtype is not dtype:
                part = part.to(dtype)
                _check_finite(tensor, part, f"As {dtype} they overflow")
            yield Chunk(start, part, share(tensor.size_bytes, start, stop, num_rows))
            self.release(name, slice(start, stop))
        if within is None:
            self.release(name)

    def vector(self, name: str) -> Tensor:
        """A bias, float32 [rows]."""
        return torch.cat([chunk.values for chunk in self.chunks(name, torch.float32)])

    def norm(self, name: str) -> Tensor:
        """Factors of a norm, float32 [rows], with the 1 added where the file stores them minus
        one."""
        weight, place = self.vector(name), self._located[name].place
        if weight.dim() == MATRIX and self.rows[name].kind is Kind.NORM:
            weight = weight.flatten()
        if weight.dim() == MATRIX:
            if not torch.equal(weight, weight[:1].expand_as(weight)):
                raise UnsupportedModelError(
                    f"tensor {name!r} differs between heads", where=self.stored[name].file
                )
            weight = weight[0].contiguous()
        if place.order is not None:
            weight = weight[torch.tensor(place.order.stored_rows())]
        return weight + place.addend if place.addend else weight

    def _matrix(self, name: str) -> RuntimeMatrix:
        located = self._located[name]
        if located.matrix is not None:
            order = self._row_permutation(name)
            return open_matrix(self._source, located.matrix, self._quantization, order)
        return BlockMatrix(
            self._source, located.stored, located.place.first_row, self._row_permutation(name)
        )

    def _row_permutation(self, name: str) -> Tensor | None:
        """Stored row of each of the model's rows; None if their order is the same.

        The elements of a norm are put in order by `norm`, because a file may repeat them.
        """
        place = self._located[name].place
        if place.order is None or self.rows[name].is_norm:
            return None
        return torch.tensor(place.order.stored_rows()) + place.first_row


class _WithBias:
    """A quantized matrix and the bias of its columns, float32."""

    def __init__(self, matrix: RuntimeMatrix, bias: Tensor) -> None:
        self._matrix = matrix
        self._bias = bias
        self.layout: QuantLayout = replace(matrix.layout, has_bias=True)

    def columns(self, first: int, last: int, move: Move = stay) -> QuantColumns:
        return replace(self._matrix.columns(first, last, move), bias=self._bias[first:last])

    def dense(self, first: int, last: int) -> Tensor:
        return self._matrix.dense(first, last)


def row_ranges(rows: int, values_a_row: int, values: int) -> list[tuple[int, int]]:
    """Ranges of about `values` values that cover all rows. They start at multiples of ROW_STEP."""
    step = max(1, values // values_a_row // ROW_STEP) * ROW_STEP
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
