"""State that the layers of one forward pass share: bound rows, cache, buffers.

The transformer makes it once per pass. The functions of the layers read their own entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from exl_core.arch.layers import LayerSpec, QueryTemperature
from exl_core.ops.attention import AttentionBatch, CacheLayer, KeySmoothing


class Activations(Protocol):
    """Allocates activations between two fused ops; `OpTable.activations`."""

    def activations(self, rows: int, columns: int) -> Tensor: ...


class LayerCaches(Protocol):
    """Keys and values by layer; `KVStore.layer`."""

    def layer(self, layer: int) -> CacheLayer: ...


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory that all layers of the same sizes use, one after the other."""

    qkv: Tensor  # [R, (H + 2K) * D]
    queries: Tensor  # [R, H * D], a view of qkv: attention's result overwrites the queries
    gated: Tensor  # [R, inner_size of the feed-forward part]


class RowsKey(NamedTuple):
    """RoPE table that `attend_` applies, None for none, and positions of a chunk of attention, 0
    for no chunks."""

    rope: int | None
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class PassState:
    """State that the layers of one pass share."""

    caches: LayerCaches
    rows: Mapping[RowsKey, AttentionBatch]
    smoothing: Sequence[KeySmoothing | None]  # by layer
    buffers: Mapping[int, Buffers]  # by layer
    temperatures: Mapping[QueryTemperature | None, Tensor] = field(default_factory=dict)
    """Factors on the queries [R]; no entry where all are 1."""
    angles: Mapping[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """cos and sin [R, rotary_dim / 2] by RoPE table, for layers that rotate by themselves."""


def make_buffers(
    ops: Activations, layers: Mapping[int, LayerSpec], rows: int
) -> dict[int, Buffers]:
    """Buffers by layer. Layers of the same sizes share theirs."""
    made: dict[tuple[int, int, int], Buffers] = {}
    found = {}
    for index, layer in layers.items():
        attention = layer.attention
        sizes = attention.projected_size, attention.q_size, layer.feed_forward.inner_size
        if sizes not in made:
            qkv = ops.activations(rows, attention.projected_size)
            gated = ops.activations(rows, layer.feed_forward.inner_size)
            made[sizes] = Buffers(qkv, qkv[:, : attention.q_size], gated)
        found[index] = made[sizes]
    return found
