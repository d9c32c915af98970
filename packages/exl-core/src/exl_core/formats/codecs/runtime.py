"""Interface of a validated stored matrix: columns for the op table, and exact values.

The two are separate. Codes stay as the file stores them, and the op table repacks them. The exact
dequantization is the format's own definition, roundings included; the codes are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exl_core.errors import WeightValueError
from exl_core.ops.weights import WeightColumns, WeightLayout

Move = Callable[[Tensor], Tensor]
"""Copies a stored tensor to the device on which it is unpacked."""


def stay(tensor: Tensor) -> Tensor:
    """The move that leaves the tensor where it is."""
    return tensor


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """Columns of a stored matrix that make up a matrix: consecutive ones from `first` on, or those
    that `stored` lists (int64)."""

    first: int
    stored: Tensor | None = None

    def span(self, first: int, last: int, step: int) -> tuple[slice, slice | Tensor]:
        """The range of stored columns, in whole steps, with the matrix's columns first .. last - 1,
        and the indices of these columns in it."""
        if self.stored is None:
            low, high = self.first + first, self.first + last
        else:
            wanted = self.stored[first:last]
            low, high = int(wanted.min()), int(wanted.max()) + 1
        start = low // step * step
        within = slice(start, -(-high // step) * step)
        if self.stored is None:
            return within, slice(low - start, high - start)
        return within, wanted - start


def stored_rows(count: int, first: int, stored: Tensor | None) -> Tensor:
    """Stored row of each of a matrix's `count` columns, int64, in files that store it transposed:
    consecutive ones from `first` on, or those that `stored` lists."""
    return torch.arange(first, first + count) if stored is None else stored


class RuntimeMatrix(Protocol):
    """A matrix [in_features, out_features] without padding, read in ranges of columns."""

    @property
    def layout(self) -> WeightLayout: ...

    def columns(self, first: int, last: int, move: Move = stay) -> WeightColumns:
        """Stored weights of columns first .. last - 1; `first` is a multiple of 16.

        Large tensors are moved in their stored form, before they are unpacked.
        """
        ...

    def dense(self, first: int, last: int) -> Tensor:
        """Exact values of these columns, [last - first, in_features]."""
        ...


def are_equal(layers: Sequence[Mapping[str, Tensor]], name: str) -> bool:
    """Whether all layers have the same values of one tensor."""
    values = torch.stack([layer[name] for layer in layers])
    return bool((values == values[:1]).all())


def are_finite(layers: Sequence[Mapping[str, Tensor]], *names: str) -> bool:
    """Whether all values of these tensors of all layers are finite."""
    values = torch.cat([layer[name].flatten() for layer in layers for name in names])
    return bool(values.isfinite().all())


def check_scales(scales: Tensor, name: str, where: object) -> None:
    """Raises WeightValueError if a scale, in any shape, is NaN or infinite."""
    finite = scales.isfinite()
    if not finite.all():
        at = int(finite.flatten().int().argmin())
        raise WeightValueError(
            f"tensor {name!r} has no usable value at index {at}",
            where=where,
            expected="a finite number",
            got=float(scales.flatten()[at]),
        )


def refuse_nan(count: int, name: str, where: object) -> None:
    """Raises WeightValueError unless `count`, the number of a tensor's values that are NaN, is
    0."""
    if count:
        raise WeightValueError(
            f"tensor {name!r} holds {count} values that are NaN",
            where=where,
            next_step="The file is damaged or its conversion failed; get the model from another"
            " source.",
        )


def exact_scales(scales: Tensor) -> Tensor:
    """The same values as float16 if it represents all of them, otherwise as float32.

    bfloat16 and float32 scales between 2^-17 and 65504 usually fit, and then take half the memory.
    """
    if scales.dtype is torch.float16:
        return scales
    exact, half = scales.float(), scales.half()
    return half if torch.equal(half.float(), exact) else exact
