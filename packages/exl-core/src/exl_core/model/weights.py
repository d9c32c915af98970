"""Weights of a transformer: packed matrices and norm weights, block by block.

Projections that read the same input are packed as one matrix (q, k, v; gate, up), so that a pass
makes fewer and larger calls. Norm weights are float32 factors: where a family stores the factor
minus one, the one has already been added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exl_core.ops.attention import HeadNorms
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv [q_size + 2 kv_size, hidden], output [hidden, q_size], and the norms of the heads."""

    qkv: PackedLinear
    output: PackedLinear
    head_norms: HeadNorms


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up [2 * intermediate, hidden], gate first; down [hidden, intermediate]."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One transformer block; the post norms are None without sandwich norms."""

    attention_norm: RmsNorm
    attention: AttentionWeights
    attention_post_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: MlpWeights
    mlp_post_norm: RmsNorm | None

    @property
    def size_bytes(self) -> int:
        attention, mlp = self.attention, self.mlp
        matrices = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        norms = (
            *(self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm),
        )
        heads = attention.head_norms
        tensors = [norm.weight for norm in norms if norm is not None]
        tensors += [norm for norm in (heads.q, heads.k) if norm is not None]
        size = sum(matrix.size_bytes for matrix in matrices)
        return size + sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed and head are the same object in tied models: one copy in memory."""

    embed: PackedLinear
    blocks: Sequence[BlockWeights]
    final_norm: RmsNorm
    head: PackedLinear

    @property
    def size_bytes(self) -> int:
        """Bytes of all packed matrices and norms, tied ones once."""
        ends = self.embed.size_bytes + self.final_norm.weight.nbytes
        if self.head is not self.embed:
            ends += self.head.size_bytes
        return ends + sum(block.size_bytes for block in self.blocks)

    @property
    def decode_bytes(self) -> int:
        """Bytes that a decode pass reads: all weights except an untied embedding, of which it reads
        only a few rows."""
        is_tied = self.embed is self.head
        return self.size_bytes - (0 if is_tied else self.embed.size_bytes)


@dataclass(frozen=True, slots=True)
class StreamedWeights(ModelWeights):
    """Weights whose blocks are not all in memory at once.

    `packed_bytes` is the size that all weights would take in memory.
    """

    packed_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.packed_bytes
