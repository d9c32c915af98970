"""What a transformer holds: packed matrices and norm weights, block by block.

Projections that read the same input are packed as one matrix (q, k, v; gate, up), so that a step
makes fewer, larger calls. Norm weights are float32 factors: what a family stores as "less one" has
been made whole here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from exl_core.ops.table import PackedLinear


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv [q_size + 2 kv_size, hidden], output [hidden, q_size], head norms [head_dim] or None."""

    qkv: PackedLinear
    output: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up [2 * intermediate, hidden], gate first; down [hidden, intermediate]."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One transformer block; the post norms are None without sandwich norms."""

    attention_norm: Tensor
    attention: AttentionWeights
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: MlpWeights
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed and head are the same object in tied models: one copy in memory."""

    embed: PackedLinear
    blocks: Sequence[BlockWeights]
    final_norm: Tensor
    head: PackedLinear

    @property
    def size_bytes(self) -> int:
        """Bytes of all packed matrices and norms, tied ones once."""
        matrices = {id(self.embed): self.embed, id(self.head): self.head}
        norms = [self.final_norm]
        for block in self.blocks:
            for matrix in (
                block.attention.qkv,
                block.attention.output,
                block.mlp.gate_up,
                block.mlp.down,
            ):
                matrices[id(matrix)] = matrix
            norms += [block.attention_norm, block.mlp_norm]
            optional = (
                block.attention_post_norm,
                block.mlp_post_norm,
                block.attention.q_norm,
                block.attention.k_norm,
            )
            norms += [norm for norm in optional if norm is not None]
        return sum(m.size_bytes for m in matrices.values()) + sum(n.nbytes for n in norms)

    @property
    def decode_bytes(self) -> int:
        """What a decode step reads: all but an untied embedding, of which it reads rows."""
        is_tied = self.embed is self.head
        return self.size_bytes - (0 if is_tied else self.embed.size_bytes)


@dataclass(frozen=True, slots=True)
class StreamedWeights(ModelWeights):
    """Of which the blocks are not all there at once; `packed_bytes` is what they would take."""

    packed_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.packed_bytes
