"""Low-rank additions to a model's matrices, as the forward pass reads them.

What an adapter is on disk, and how it is checked, is `lora/`'s; which rows of a batch use which is
the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.ops.table import PackedLinear

Matrix = Literal["qkv", "output", "gate_up", "down"]


class Delta(NamedTuple):
    """`x @ down @ up` is added to outputs first_out .. first_out + up.shape[1] of a packed matrix.

    down [in_features, r], up [r, out_features], float32. The adapter's own scale is in `up`.
    """

    first_out: int
    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What an adapter does to the embedding and to the head.

    `embed` and `head` take the place of the model's own. A delta is added to what is looked up or
    computed; of `embed_delta`, `down` is [vocab_size, r], and a token picks its row of it.
    """

    embed: PackedLinear | None = None
    head: PackedLinear | None = None
    embed_delta: Delta | None = None
    head_delta: Delta | None = None


class Adapter(Protocol):
    """Compared and hashed by identity."""

    @property
    def serial(self) -> int:
        """No other adapter of this process has it: cached keys and values depend on it."""
        ...

    def deltas(self, layer: int, matrix: Matrix) -> tuple[Delta, ...]:
        """What is added to that matrix; nothing for most of most adapters."""
        ...

    @property
    def ends(self) -> Ends | None:
        """None for an adapter that leaves embedding and head alone."""
        ...

    def fits(self, config: ModelConfig) -> bool:
        """Whether the model has the matrices that the adapter changes, in their sizes."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter and how strongly it is applied; 1 is as it was trained.

    With 0 it is not applied at all: an embedding or a head that it brings is not used either.
    """

    adapter: Adapter
    scale: float = 1.0
