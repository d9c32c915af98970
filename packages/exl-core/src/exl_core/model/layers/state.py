"""State that the layers of one forward pass share: bound rows, cache, buffers.

The transformer makes it once per pass. The functions of the layers read their own entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from exl_core.arch.layers import Attention, LayerSpec, QueryTemperature
from exl_core.cache.state_store import LayerState
from exl_core.ops.attention import AttentionBatch, CacheLayer, KeySmoothing
from exl_core.ops.recurrent import Convolution, StateRows, Taps
from exl_core.ops.table import LayerOps


class Activations(Protocol):
    """Allocates activations between two fused ops; `OpTable.activations`."""

    def activations(self, rows: int, columns: int) -> Tensor: ...


class LayerCaches(Protocol):
    """Keys and values by layer; `KVStore.layer`."""

    def layer(self, layer: int) -> CacheLayer: ...


class LayerStates(Protocol):
    """States of sequences by layer; `StateStore.layer`."""

    def layer(self, layer: int) -> LayerState: ...


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory that all layers of the same sizes use, one after the other."""

    qkv: Tensor  # [R, (H + 2K) * D]; [R, 0] for layers without attention
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
    held_states: LayerStates | None = None
    held_rows: StateRows | None = None

    @property
    def recurrent(self) -> LayerStates:
        """States of the sequences. Only models with recurrent layers have some."""
        assert self.held_states is not None, "`Stage.bind` checks it"
        return self.held_states

    @property
    def state_rows(self) -> StateRows:
        """Rows of the sequences and their slots."""
        assert self.held_rows is not None, "`Stage.bind` checks it"
        return self.held_rows


def make_buffers(
    ops: Activations, layers: Mapping[int, LayerSpec], rows: int
) -> dict[int, Buffers]:
    """Buffers by layer. Layers of the same sizes share theirs."""
    made: dict[tuple[int, int, int], Buffers] = {}
    found = {}
    for index, layer in layers.items():
        widths = _attention_widths(layer)
        sizes = *widths, layer.feed_forward.inner_size
        if sizes not in made:
            qkv = ops.activations(rows, widths[0])
            gated = ops.activations(rows, layer.feed_forward.inner_size)
            made[sizes] = Buffers(qkv, qkv[:, : widths[1]], gated)
        found[index] = made[sizes]
    return found


def _attention_widths(layer: LayerSpec) -> tuple[int, int]:
    """Widths of the packed projection and of the queries; 0 for a layer without attention."""
    if not isinstance(layer.mixer, Attention):
        return 0, 0
    return layer.mixer.projected_size, layer.mixer.q_size


def convolved(
    ops: LayerOps, x: Tensor, taps: Taps, states: Tensor, rows: StateRows
) -> tuple[Tensor, Convolution | None]:
    """Inputs of a recurrent mixer: x [R, C] after the convolution, or x and the convolution, if
    the mixer convolves its inputs itself."""
    if ops.fuses_conv(x, taps, rows):
        return x, Convolution(taps, states)
    return ops.causal_conv(x, taps, states, rows), None
