"""Linears: packed matrices, how they are filled, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from exl_core.ops.elementwise import ActivationKind, GateKind, Gating, Norm
from exl_core.ops.weights import WeightColumns, WeightLayout


class PackedLinear(Protocol):
    """Weights of one linear in a table's run-time form; only the table that made it can read it."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


L = TypeVar("L", bound=WeightLayout)


class LayoutSizes(Generic[L]):
    """Numbers of inputs and outputs of a run-time form that keeps its layout."""

    __slots__ = ()
    layout: L

    @property
    def out_features(self) -> int:
        return self.layout.out_features

    @property
    def in_features(self) -> int:
        return self.layout.in_features


class JoinedSizes:
    """Sizes of matrices with the same inputs, whose outputs are side by side."""

    __slots__ = ()
    parts: Sequence[PackedLinear]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear:
    """Dense weights [out_features, in_features] as a tensor, for backends that multiply so."""

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


class PreparedInputs(Protocol):
    """Buffer for the inputs of one linear in its kernel's own form; opaque outside its table."""


Inputs = Tensor | PreparedInputs
"""Inputs of a linear: a tensor [rows, in_features], or the buffer from `inputs_for`."""


class NextRead(NamedTuple):
    """How a sum of `linear_add_` is read next: by a product of norm(sum) with `w`."""

    norm: Norm
    w: PackedLinear


class ProductOps(Protocol):
    """Multiplies activations with packed matrices."""

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        """x [m, k] strided rows -> [m, n], accumulated in float32.

        With quantized w, the CPU kernels round x. For small m they round it to integers, relative
        to the largest value of each span of at most 128 stored rows. The integers have 16 bits, or
        12 where AMX multiplies 5 to 32 rows with codes of at most 4 bits. For large m they round x
        and w to bfloat16 with AMX, and neither without AMX. A batch-invariant table rounds x to 16
        bits for any m. The reference never rounds x.
        """
        ...

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        """Buffer for m rows of inputs of `w`, written by an op's `out` and read by `linear_add_`.

        Either `plain` [m, k] itself, or a `PreparedInputs` where the table's kernel gains from it.
        """
        ...

    def gate_heads(
        self, x: Tensor, gate: Tensor, gating: Gating, to: PackedLinear | None = None
    ) -> Inputs:
        """x, gate [m, d] strided rows -> norm(x) * act(gate), or norm(x * act(gate)), by head.

        gate [m, 1]: all heads of a row have the same gate.
        The result is [m, d], or has the form that the matrix `to` prefers as its inputs.
        """
        ...

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        """residual [m, n] contiguous += linear(x, w); returns the sum, here `residual` itself."""
        ...

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        """linear(norm(x), w), written to `out` if given, which is then returned: [m, n]
        contiguous. A GPU also writes to some columns of a wider tensor."""
        ...

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        """gated_activation(norm_linear(x, norm, w), kind): [m, n / 2].

        The first half of w's outputs is the gate. The result is written to `out` if given, which is
        then returned.
        """
        ...

    def norm_activated_linear(
        self,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,
    ) -> Inputs:
        """activation(norm_linear(x, norm, w), kind): [m, n].

        The result is written to `out` if given, which is then returned.
        """
        ...


class LinearOps(ProductOps, Protocol):
    """Allocates and fills packed matrices, and multiplies activations with them."""

    @property
    def min_group_rows(self) -> int:
        """Smallest group of integers that the table stores without padding, in rows: at most 32.

        It takes groups of any size. Smaller ones are padded to 32 rows, which costs memory and
        time.
        """
        ...

    def new_linear(self, layout: WeightLayout, *, on_host: bool = False) -> PackedLinear:
        """Allocates a matrix of that layout.

        Dense weights are zero until filled; codes must be filled before they are read. `on_host`:
        in memory of the host that the device can read, for `embedding` only.
        """
        ...

    def new_linears(self, layouts: Sequence[WeightLayout]) -> list[PackedLinear]:
        """Allocates matrices of codes that are kept as long as each other. On a GPU they share one
        allocation, because small ones waste up to half of their memory."""
        ...

    def fill_linear(self, w: PackedLinear, first_column: int, columns: WeightColumns) -> None:
        """Packs columns of a matrix from `first_column` on. Reorders, never rounds, except that a
        GPU rounds dense weights to float16.

        `columns` is of the kind of the matrix's layout. If it holds codes, `first_column` is a
        multiple of 32. So is the number of columns, unless they are the last ones. Several threads
        may fill disjoint ranges of columns at the same time.
        """
        ...

    def join(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        """Joins linears with the same k into one whose output concatenates theirs."""
        ...

    def embedding(self, token_ids: Tensor, w: PackedLinear) -> Tensor:
        """token_ids int64 [m] -> those rows of w, float32 [m, k]."""
        ...
