"""Weights of a transformer: packed matrices and norm weights, layer by layer and part by part.

Projections that read the same input are packed as one matrix (q, k, v; gate, up), so that a pass
makes fewer and larger calls. Norm weights are float32 factors: where a family stores the factor
minus one, the one has already been added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from exl_core.arch.layers import unsupported
from exl_core.arch.modules import Packed
from exl_core.ops.attention import HeadNorms
from exl_core.ops.elementwise import Gating, LayerNorm, Norm, RmsNorm, XIelu
from exl_core.ops.host_experts import HostExperts
from exl_core.ops.latent import LatentUp
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp, JoinedExperts
from exl_core.ops.recurrent import DeltaRule, StateScan, Taps


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv [q_size + 2 kv_size, hidden], output [hidden, q_size], and the norms of the heads.

    `norm` comes before qkv, `post_norm` after output; None where the layer has no such norm.
    `whole_norms` have factors for all queries and for all keys of a row. `value_norm` is the norm
    of each value head. `sinks` are scores of the query heads, float32 [q_heads].
    """

    norm: Norm | None
    qkv: PackedLinear
    head_norms: HeadNorms
    whole_norms: tuple[Norm, Norm] | None
    value_norm: Norm | None
    output: PackedLinear
    post_norm: Norm | None
    sinks: Tensor | None = None

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        return {"qkv": self.qkv, "output": self.output}

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        heads = (self.head_norms.q, self.head_norms.k, self.sinks)
        norms = (self.norm, self.post_norm, self.value_norm, *(self.whole_norms or ()))
        return (*_norm_weights(*norms), *(x for x in heads if x is not None))


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention. qkv: the matrix of queries, or of their latent vectors, then
    that of latent vectors with rotated keys. q_up: from latent vectors of queries to queries. `up`:
    from latent vectors to keys and values. `q_norm` and `kv_norm` are the norms of latent vectors.
    """

    norm: Norm | None
    qkv: PackedLinear
    q_norm: RmsNorm | None
    q_up: PackedLinear | None
    kv_norm: RmsNorm
    up: LatentUp
    output: PackedLinear
    post_norm: Norm | None

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        found: dict[Packed, PackedLinear] = {"qkv": self.qkv, "output": self.output}
        return found if self.q_up is None else found | {"q_up": self.q_up}

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return _norm_weights(self.norm, self.post_norm, self.q_norm, self.kv_norm)


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Weights that every recurrent mixer has: the matrix before the convolution, the taps of the
    convolution, and the matrix after the mixer.

    `norm` comes before wide, `post_norm` after narrow; None where the layer has no such norm.
    """

    norm: Norm | None
    wide: PackedLinear
    taps: Taps
    narrow: PackedLinear
    post_norm: Norm | None

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        return {"mixer_in": self.wide, "mixer_out": self.narrow}

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        bias = () if self.taps.bias is None else (self.taps.bias,)
        norms = _norm_weights(self.norm, self.post_norm)
        return (*norms, self.taps.weight, *bias, *self.own_vectors)

    @property
    def own_vectors(self) -> tuple[Tensor, ...]:
        """Vectors that only this kind of mixer has."""
        return ()


@dataclass(frozen=True, slots=True)
class ShortConvWeights(RecurrentWeights):
    """wide [3 * channels, hidden], narrow [hidden, channels]."""


@dataclass(frozen=True, slots=True)
class GatedMixerWeights(RecurrentWeights):
    """Weights of a mixer whose outputs are normed and gated by head or group; `gating` has the
    norm."""

    gating: Gating


@dataclass(frozen=True, slots=True)
class DeltaNetWeights(GatedMixerWeights):
    """wide [channels + value_size + 2 * value_heads, hidden]: queries, keys, values, gates, b, a;
    narrow [hidden, value_size]; the numbers of the delta rule."""

    rule: DeltaRule

    @property
    def own_vectors(self) -> tuple[Tensor, ...]:
        return *_norm_weights(self.gating.norm), self.rule.decay, self.rule.dt_bias


@dataclass(frozen=True, slots=True)
class KimiDeltaWeights(GatedMixerWeights):
    """wide [3 * size + 2 * head_dim + heads, hidden]: queries, keys, values, inner vectors of the
    decays and of the gates, b; narrow [hidden, size]; the matrices from the inner vectors to decays
    and to gates [size, head_dim]; the numbers of the delta rule."""

    decay_up: PackedLinear
    gate_up: PackedLinear
    rule: DeltaRule

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        own: dict[Packed, PackedLinear] = {"decay_up": self.decay_up, "gate_up_b": self.gate_up}
        return {"mixer_in": self.wide, "mixer_out": self.narrow, **own}

    @property
    def own_vectors(self) -> tuple[Tensor, ...]:
        return *_norm_weights(self.gating.norm), self.rule.decay, self.rule.dt_bias


@dataclass(frozen=True, slots=True)
class Mamba2Weights(GatedMixerWeights):
    """wide [size + channels + heads, hidden]: gates, inputs with the vectors of the groups, steps;
    narrow [hidden, size]; the numbers of the scan."""

    scan: StateScan

    @property
    def own_vectors(self) -> tuple[Tensor, ...]:
        scan = self.scan
        return *_norm_weights(self.gating.norm), scan.decay, scan.dt_bias, scan.skip


MixerWeights = AttentionWeights | LatentWeights | RecurrentWeights


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up [2 * intermediate, hidden], gate first; down [hidden, intermediate]; the numbers of
    the activation if it has some.

    `norm` comes before gate_up, `post_norm` after down; None where the layer has no such norm.
    """

    norm: Norm | None
    gate_up: PackedLinear  # up alone, if the MLP has no gate
    down: PackedLinear
    post_norm: Norm | None
    xielu: XIelu | None = None

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        return {"gate_up": self.gate_up, "down": self.down}

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return _norm_weights(self.norm, self.post_norm)


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router [num_experts, hidden], numbers that are added to the scores that choose, factors of
    the weights by expert, and the matrices of all experts.

    `norm` comes before router, experts and shared expert, `post_norm` after their sum; None where
    the layer has no such norm. `router_norm` and `expert_norm` replace `norm` for the router and
    for the experts. `expert_post_norm` comes after the experts. `shared` is an MLP that every token
    passes, with at most a `post_norm`, and `shared_router` [1, hidden] scores its output.
    `latent_down` [latent, hidden] is before the experts, `latent_up` [hidden, latent] after them.
    `host` computes the experts, if they are in the host's memory and the layer is on another
    device. `joined` are the experts with the shared expert, where the op table joins them.
    """

    norm: Norm | None
    router: PackedLinear
    router_bias: Tensor | None
    experts: ExpertMlp
    shared: MlpWeights | None
    shared_router: PackedLinear | None
    post_norm: Norm | None
    router_norm: Norm | None = None
    expert_factors: Tensor | None = None
    expert_norm: Norm | None = None
    expert_post_norm: Norm | None = None
    latent_down: PackedLinear | None = None
    latent_up: PackedLinear | None = None
    host: HostExperts | None = None
    joined: JoinedExperts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether experts, and a shared expert if there is one, read the same normed states, and
        add their outputs to the states as they are."""
        others = (
            *(self.expert_factors, self.latent_down),
            *(self.post_norm, self.router_norm, self.expert_norm, self.expert_post_norm),
            None if self.shared is None else self.shared.post_norm,
        )
        return all(one is None for one in others)

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        """Matrices that every token passes, except the routers."""
        found: dict[Packed, PackedLinear] = {}
        if self.latent_down is not None and self.latent_up is not None:
            found = {"latent_down": self.latent_down, "latent_up": self.latent_up}
        if self.shared is not None:
            found |= {"shared_gate_up": self.shared.gate_up, "shared_down": self.shared.down}
        return found

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        shared = () if self.shared is None else self.shared.vectors
        own = self.router_norm, self.expert_norm, self.expert_post_norm
        of_experts = (self.router_bias, self.expert_factors)
        norms = _norm_weights(self.norm, self.post_norm, *own)
        return (*norms, *shared, *(vector for vector in of_experts if vector is not None))

    @property
    def other_bytes(self) -> int:
        """Bytes of the routers and of the experts, which are not among `matrices`."""
        routers = (self.router, self.shared_router)
        size = sum(router.size_bytes for router in routers if router is not None)
        return size + self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.experts.gate_up.size_bytes + self.experts.down.size_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the experts if they are in the host's memory, else 0."""
        return 0 if self.host is None else self.expert_bytes


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One layer: the weights of its mixer and of its feed-forward part.

    A part is None if the layer has none. `scalar` multiplies the states after the layer; None:
    there is no such factor.
    """

    mixer: MixerWeights | None
    mlp: MlpWeights | MoeWeights | None
    scalar: float | None = None

    @property
    def attention(self) -> AttentionWeights:
        """The mixer, for code that handles attention only. Raises UnsupportedModelError for other
        mixers."""
        if isinstance(self.mixer, AttentionWeights):
            return self.mixer
        raise unsupported("mixer", self.mixer)

    @property
    def matrices(self) -> dict[Packed, PackedLinear]:
        """Packed matrices by their names in the module table, without those of experts."""
        parts = (part.matrices for part in (self.mixer, self.mlp) if part is not None)
        return {name: matrix for matrices in parts for name, matrix in matrices.items()}

    @property
    def size_bytes(self) -> int:
        parts = (part for part in (self.mixer, self.mlp) if part is not None)
        vectors = [vector for part in parts for vector in part.vectors]
        size = sum(matrix.size_bytes for matrix in self.matrices.values())
        if isinstance(self.mlp, MoeWeights):
            size += self.mlp.other_bytes
        if isinstance(self.mixer, LatentWeights):
            size += self.mixer.up.size_bytes
        return size + sum(vector.nbytes for vector in vectors)


def _norm_weights(*norms: Norm | None) -> tuple[Tensor, ...]:
    weights = [norm.weight for norm in norms if norm is not None]
    layer_norms = (norm for norm in norms if isinstance(norm, LayerNorm))
    return (*weights, *(norm.bias for norm in layer_norms if norm.bias is not None))


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A layer for multi-token prediction: the matrix [hidden, 2 * hidden] that joins embedding and
    states, their norms, the layer, and the norm before the head. The model's own `norm`, `embed`
    and `head` take the place of those that are None."""

    join: PackedLinear
    embed_norm: Norm
    state_norm: Norm
    block: BlockWeights
    norm: Norm | None
    embed: PackedLinear | None
    head: PackedLinear | None

    @property
    def size_bytes(self) -> int:
        matrices = (one for one in (self.join, self.embed, self.head) if one is not None)
        norms = _norm_weights(self.embed_norm, self.state_norm, self.norm)
        size = sum(one.size_bytes for one in matrices) + sum(one.nbytes for one in norms)
        return size + self.block.size_bytes


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed and head are the same object in tied models: one copy in memory. positions
    [num_positions, hidden] are added to the embedding, in families that have them."""

    embed: PackedLinear
    positions: PackedLinear | None
    blocks: Sequence[BlockWeights]
    final_norm: Norm
    head: PackedLinear

    @property
    def size_bytes(self) -> int:
        """Bytes of all packed matrices and norms, tied ones once."""
        ends = self.embed.size_bytes + self.final_norm.weight.nbytes
        if self.head is not self.embed:
            ends += self.head.size_bytes
        if self.positions is not None:
            ends += self.positions.size_bytes
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
