"""Low-rank additions to a model's matrices, as the forward pass reads them.

`lora/` reads adapters from files and checks them. `Batch` says which rows use which adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from exl_core.arch.modules import Packed
from exl_core.arch.spec import ModelConfig
from exl_core.errors import RequestError, wrong_type
from exl_core.ops.linear import PackedLinear

_LARGEST_SCALE = torch.finfo(torch.float32).max


class Delta(NamedTuple):
    """Adds `x @ down @ up` to outputs first_out .. first_out + up.shape[1] of a packed matrix.

    down [in_features, r], up [r, out_features], float32. `up` includes the adapter's own scale.
    `linears` are the same matrices in the kernels' form, where the order of summation of torch's
    products would depend on the number of rows: on the CPU in the batch-invariant mode.
    """

    first_out: int
    down: Tensor
    up: Tensor
    linears: tuple[PackedLinear, PackedLinear] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """An adapter's changes to the embedding and to the head.

    `embed` and `head` replace the model's own. The deltas are added to the embedding's rows and to
    the logits. `embed_delta.down` is [vocab_size, r]; each token id selects one row of it.
    """

    embed: PackedLinear | None = None
    head: PackedLinear | None = None
    embed_delta: Delta | None = None
    head_delta: Delta | None = None


class Adapter(Protocol):
    """Deltas of one adapter, by layer and matrix. Compared and hashed by identity."""

    @property
    def serial(self) -> int:
        """Number that is unique in this process. It is part of the keys of cached pages."""
        ...

    @property
    def path(self) -> Path:
        """Folder of the adapter, where the other ranks of a divided model read their parts."""
        ...

    @property
    def digest(self) -> str:
        """Text that changes when the files are written again: from their size and time."""
        ...

    def deltas(self, layer: int, matrix: Packed) -> tuple[Delta, ...]:
        """Deltas to that matrix; empty for matrices that the adapter does not change."""
        ...

    @property
    def ends(self) -> Ends | None:
        """Changes to embedding and head; None if there are none."""
        ...

    def fits(self, config: ModelConfig) -> bool:
        """Whether the model has the matrices that the adapter changes, with equal shapes."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter and its strength; 1 applies it as it was trained.

    With strength 0 it is not applied at all: its own embedding and head are not used either.
    """

    adapter: Adapter
    scale: float = 1.0

    def __post_init__(self) -> None:
        given: object = self.adapter
        if isinstance(given, type) or not hasattr(given, "deltas"):
            raise wrong_type("adapter", "an adapter that load_adapter made", given)
        check_scale(self.scale)


def check_scale(scale: object) -> None:
    """Raise RequestError unless an adapter's strength is a number that float32 holds."""
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    number: Any = scale
    if not is_number or not -_LARGEST_SCALE <= number <= _LARGEST_SCALE:  # NaN is in no range
        raise RequestError(
            "the scale of an adapter is out of range",
            expected="a finite number",
            got=repr(scale)[:100],
        )
