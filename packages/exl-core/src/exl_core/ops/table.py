"""The op table: the protocol of all ops that a model consists of, and the choice of a backend.

Every table computes the same functions: `reference` in plain torch, `cpu` with compiled kernels for
one instruction set, `cuda` with the kernels of one GPU. A table knows tensors, never layers or
models.

Tensors are on the table's device and have a contiguous last dimension. "Strided rows" means that
rows may be farther apart than their length, as in a view of a fused projection's output. Tensors
without a stated type are float32. On a GPU, activations between two fused ops (`activations`) are
float16, and inputs and `out` may be of either type. An operand that violates the contract of an op
is a bug in the caller and raises ValueError.

A table is batch-invariant if no bit of the results of a row depends on the other rows of a call, on
the division of a sequence into calls, or on the number of threads. `cpu` is, except for quantized
linears on instruction sets without byte dot products and with AMX, for latent attention, and for
prompts of recurrent layers; `get_table` makes these so too.
`cuda` is in a mode of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, device

from exl_core.ops.attention import AttendOps, AttentionOps
from exl_core.ops.elementwise import ElementwiseOps, RowOps
from exl_core.ops.latent import HeadOps, LatentOps
from exl_core.ops.linear import LinearOps, NextRead, ProductOps
from exl_core.ops.moe import MoeOps, RoutedOps
from exl_core.ops.recurrent import RecurrentOps
from exl_core.ops.rings import RingOps
from exl_core.ops.sampling import SamplingOps


class LayerOps(ProductOps, AttendOps, LatentOps, RowOps, RoutedOps, RecurrentOps, Protocol):
    """The functions that the layers of a model call, a part of `OpTable`.

    A backend, or a wrapper around one, may compute them out of place: then `out` and the operand
    that an op ending in `_` names are left as they are, and only the returned value counts. The
    layers use returned values only.
    """


class OpTable(
    LinearOps,
    AttentionOps,
    LatentOps,
    HeadOps,
    ElementwiseOps,
    MoeOps,
    RecurrentOps,
    SamplingOps,
    RingOps,
    Protocol,
):
    """The functions that a backend provides. Ops ending in `_` work in place."""

    @property
    def name(self) -> str:
        """`reference`, `cpu-` and the instruction set, or `cuda-` and the compute capability."""
        ...

    @property
    def device(self) -> device:
        """Device of the operands; those of `attention_batch` may be on the CPU too."""
        ...

    @property
    def threads(self) -> int:
        """Number of threads: as requested, or fewer once the system has refused to start them."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the table was opened as batch-invariant (`get_table`)."""
        ...

    def bring(self, tensor: Tensor) -> Tensor:
        """Copies the tensor to the table's device by the fastest path; no copy if it is there."""
        ...

    def bring_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`bring` of many small tensors, with few copies to the device. They share memory there,
        which is free when none of them is in use."""
        ...

    def begin_pass(self) -> None:
        """Precedes all products of a pass, or of a stage of it, after work of any other kind, such
        as a captured graph. `Stage.bind` calls it."""
        ...

    @property
    def before(self) -> Callable[[NextRead], LayerOps | None] | None:
        """Function that returns ops for a step whose sum nothing but the next op of the table
        reads, as its argument says: they prepare the inputs of that op when they write the sum. It
        returns None for inputs that are not prepared. None for a table that prepares none."""
        ...

    def activations(self, rows: int, columns: int) -> Tensor:
        """Allocates activations between two fused ops: [rows, columns], uninitialized."""
        ...
