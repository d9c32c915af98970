"""Parts of a layer before their names in files are known: which matrices and vectors a `LayerSpec`
has, with their shapes, heads and packing. `arch/modules.py` names them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, NamedTuple

from exl_core.arch.layers import (
    MLA,
    Activation,
    Attention,
    Dense,
    FeedForward,
    GatedDeltaNet,
    HeadNorm,
    KimiDeltaNet,
    LayerSpec,
    Mamba2,
    Mixer,
    MoE,
    NoFeedForward,
    NoMixer,
    NormKind,
    NormPlacement,
    RouterBias,
    ShortConv,
    unsupported,
)
from exl_core.arch.places import RowPermutation
from exl_core.arch.spec import ModelConfig


class Kind(Enum):
    EMBEDDING = "embedding"
    POSITIONS = "positions"
    LINEAR = "linear"
    HEAD = "head"
    BIAS = "bias"
    NORM = "norm"
    HEAD_NORM = "head norm"
    SCALAR = "scalar"
    SINKS = "sinks"
    ROUTER_VECTOR = "router vector"
    TAPS = "taps"
    VECTOR = "vector"


class Shard(Enum):
    """Dimension of a matrix that tensor parallelism divides."""

    OUT_FEATURES = "out_features"
    IN_FEATURES = "in_features"


Packed = Literal[
    "qkv",
    "q_up",
    "output",
    "mixer_in",
    "mixer_out",
    "decay_up",
    "gate_up_b",
    "gate_up",
    "down",
    "expert_gate_up",
    "expert_down",
    "shared_gate_up",
    "shared_down",
    "latent_down",
    "latent_up",
]
"""Matrices of a layer at run time. Projections that read the same input are packed into one. Each
expert has its own two."""


KIMI_TAPS = ("q_taps", "k_taps", "v_taps")
"""Taps of the convolution of a `KimiDeltaNet`, which files store by part."""


MTP_NORMS = ("mtp_embed_norm", "mtp_state_norm", "mtp_norm")
"""Norms of a layer for multi-token prediction: of the embedding, of the states of the layers
before, and of its own states."""


class Part(NamedTuple):
    """A row before its names are known. `heads` are its heads, with the rows of each that files may
    store as interleaved RoPE pairs."""

    role: str
    kind: Kind
    shape: tuple[int, ...]
    has_bias: bool = False
    packed: Packed | None = None
    shard: Shard | None = None
    num_heads: int = 0
    heads: RowPermutation | None = None
    is_converted: bool = False
    is_dense: bool = False
    stacked: int = 0  # matrices in the stored tensor, which then has three dimensions


def layer_parts(config: ModelConfig, layer: LayerSpec) -> list[Part]:
    hidden = config.hidden_size
    mixer = _mixer_parts(config, layer.mixer)
    matrices = [part for part in mixer if part.kind is Kind.LINEAR]
    others = [part for part in mixer if part.kind is not Kind.LINEAR]
    norms = {
        NormPlacement.PRE: ("attention_norm", "mlp_norm"),
        NormPlacement.POST: ("attention_post_norm", "mlp_post_norm"),
        NormPlacement.PARALLEL: ("attention_norm",),
        NormPlacement.SANDWICH: (
            *("attention_norm", "attention_post_norm"),
            *("mlp_norm", "mlp_post_norm"),
        ),
    }[layer.norms]
    absent = {"attention_norm"} if isinstance(layer.mixer, NoMixer) else set()
    absent |= {"mlp_norm"} if isinstance(layer.feed_forward, NoFeedForward) else set()
    return [
        *matrices,
        *_feed_forward_parts(hidden, layer.feed_forward),
        *(norm_part(role, hidden, layer.norm_kind) for role in norms if role not in absent),
        *([Part("scalar", Kind.SCALAR, (1,))] if layer.has_scalar else []),
        *others,
        *(_predicting_parts(config, layer.norm_kind) if layer.is_predicting else []),
    ]


def _predicting_parts(config: ModelConfig, kind: NormKind) -> list[Part]:
    """Parts of a layer for multi-token prediction that other layers do not have."""
    hidden, ends = config.hidden_size, (config.vocab_size, config.hidden_size)
    return [
        Part("mtp_join", Kind.LINEAR, (hidden, 2 * hidden), is_converted=True),
        *(norm_part(role, hidden, kind) for role in MTP_NORMS),
        Part("mtp_embed", Kind.EMBEDDING, ends),
        Part("mtp_head", Kind.HEAD, ends),
    ]


def norm_part(role: str, hidden: int, kind: NormKind) -> Part:
    return Part(role, Kind.NORM, (hidden,), has_bias=kind is NormKind.LAYER_BIAS)


def _mixer_parts(config: ModelConfig, mixer: Mixer) -> list[Part]:
    match mixer:
        case Attention():
            return _attention_parts(config, mixer)
        case MLA():
            return _latent_parts(config, mixer)
        case NoMixer():
            return []
        case _:
            return _recurrent_parts(config.hidden_size, mixer)


def _recurrent_parts(hidden: int, mixer: Mixer) -> list[Part]:
    match mixer:
        case ShortConv():
            return _short_conv_parts(hidden, mixer)
        case GatedDeltaNet():
            return _delta_net_parts(hidden, mixer)
        case KimiDeltaNet():
            return _kimi_delta_parts(hidden, mixer)
        case Mamba2():
            return _mamba2_parts(hidden, mixer)
        case _:
            raise unsupported("mixer", mixer)


def _attention_parts(config: ModelConfig, spec: Attention) -> list[Part]:
    hidden = config.hidden_size
    rope = config.rope_of(spec)

    def heads(num_heads: int, *, is_rotated: bool = True) -> RowPermutation:
        rotated = rope.rotary_dim if rope is not None and is_rotated else 0
        return RowPermutation(num_heads, spec.head_dim, rotated)

    parts = [
        Part(
            role,
            Kind.LINEAR,
            (num_heads * spec.head_dim, hidden),
            spec.has_qkv_bias,
            "qkv",
            Shard.OUT_FEATURES,
            heads=heads(num_heads, is_rotated=role in ("q", "k")),
            is_converted=True,
        )
        for role, num_heads in (
            ("q", spec.num_q_heads),
            ("k", spec.num_kv_heads),
            ("v", spec.num_kv_heads),
            ("q_gate", spec.num_q_heads if spec.has_gate else 0),
        )
        if num_heads and (role != "v" or not spec.is_value_key)
    ]
    parts.append(
        Part(
            "output",
            Kind.LINEAR,
            (hidden, spec.q_size),
            spec.has_output_bias,
            "output",
            Shard.IN_FEATURES,
            is_converted=True,
        )
    )
    if spec.has_sinks:
        parts.append(Part("sinks", Kind.SINKS, (spec.num_q_heads,)))
    if spec.head_norm not in (HeadNorm.NONE, HeadNorm.PLAIN_AFTER_ROPE):
        for role, num_heads in (("q_norm", spec.num_q_heads), ("k_norm", spec.num_kv_heads)):
            if spec.head_norm not in (HeadNorm.RMS, HeadNorm.RMS_AFTER_ROPE):
                whole = Part(role, Kind.NORM, (num_heads * spec.head_dim,))
                is_by_head = spec.head_norm is HeadNorm.LAYER
                count = num_heads if is_by_head else 0
                parts.append(whole._replace(num_heads=count, heads=heads(num_heads)))
                continue
            shape = (spec.head_dim,)
            parts.append(Part(role, Kind.HEAD_NORM, shape, num_heads=num_heads, heads=heads(1)))
    return parts


def _short_conv_parts(hidden: int, spec: ShortConv) -> list[Part]:
    taps = Part("taps", Kind.TAPS, (spec.size, spec.taps), spec.has_bias)
    return [*_ends_of_mixer(hidden, 3 * spec.size, spec.size, has_bias=spec.has_bias), taps]


def _ends_of_mixer(hidden: int, wide: int, narrow: int, *, has_bias: bool) -> list[Part]:
    """The matrices before and after a mixer that has one of each."""
    first = Part("mixer_in", Kind.LINEAR, (wide, hidden), has_bias, "mixer_in", Shard.OUT_FEATURES)
    last = Part("mixer_out", Kind.LINEAR, (hidden, narrow), has_bias, "mixer_out")
    last = last._replace(shard=Shard.IN_FEATURES)
    return [first._replace(is_converted=True), last._replace(is_converted=True)]


def _delta_net_parts(hidden: int, spec: GatedDeltaNet) -> list[Part]:
    shared = spec.value_heads // spec.key_heads  # value heads of a key head
    wide = []
    for role, each, is_converted in (
        ("delta_q", spec.key_dim, True),
        ("delta_k", spec.key_dim, True),
        ("delta_v", shared * spec.value_dim, True),
        ("delta_z", shared * spec.value_dim, True),
        ("delta_b", shared, False),
        ("delta_a", shared, False),
    ):
        part = Part(role, Kind.LINEAR, (spec.key_heads * each, hidden), packed="mixer_in")
        part = part._replace(shard=Shard.OUT_FEATURES)
        heads = RowPermutation(spec.key_heads, each, 0)
        wide.append(part._replace(heads=heads, is_converted=is_converted))
    narrow = Part("mixer_out", Kind.LINEAR, (hidden, spec.value_size), packed="mixer_out")
    return [
        *wide,
        narrow._replace(shard=Shard.IN_FEATURES, is_converted=True),
        Part("taps", Kind.TAPS, (spec.channels, spec.taps)),
        Part("decay", Kind.VECTOR, (spec.value_heads,)),
        Part("step_bias", Kind.VECTOR, (spec.value_heads,)),
        Part("mixer_norm", Kind.VECTOR, (spec.value_dim,)),
    ]


def _kimi_delta_parts(hidden: int, spec: KimiDeltaNet) -> list[Part]:
    def linear(role: str, out: int, inner: int, packed: Packed) -> Part:
        shard = Shard.IN_FEATURES if role == "mixer_out" else Shard.OUT_FEATURES
        is_whole = role in ("decay_a", "delta_z_a")  # inner vectors, which all heads read
        # The other matrices are 4 % of the mixer, and their rounding acts on decays and gates.
        is_converted = role in ("delta_q", "delta_k", "delta_v", "mixer_out")
        part = Part(role, Kind.LINEAR, (out, inner), packed=packed, is_converted=is_converted)
        return part._replace(shard=None if is_whole else shard)

    wide = [
        linear(role, out, hidden, "mixer_in")
        for role, out in (
            *((role, spec.size) for role in ("delta_q", "delta_k", "delta_v")),
            *((role, spec.head_dim) for role in ("decay_a", "delta_z_a")),
            ("delta_b", spec.heads),
        )
    ]
    return [
        *wide,
        linear("decay_b", spec.size, spec.head_dim, "decay_up"),
        linear("delta_z_b", spec.size, spec.head_dim, "gate_up_b"),
        linear("mixer_out", hidden, spec.size, "mixer_out"),
        *(Part(role, Kind.TAPS, (spec.size, spec.taps)) for role in KIMI_TAPS),
        Part("decay", Kind.VECTOR, (spec.heads,)),
        Part("step_bias", Kind.VECTOR, (spec.size,)),
        Part("mixer_norm", Kind.VECTOR, (spec.head_dim,)),
    ]


def _mamba2_parts(hidden: int, spec: Mamba2) -> list[Part]:
    width = spec.size + spec.channels + spec.heads
    return [
        *_ends_of_mixer(hidden, width, spec.size, has_bias=spec.has_bias),
        Part("taps", Kind.TAPS, (spec.channels, spec.taps), spec.has_taps_bias),
        *(Part(role, Kind.VECTOR, (spec.heads,)) for role in ("decay", "step_bias", "skip")),
        Part("mixer_norm", Kind.VECTOR, (spec.size,)),
    ]


def _latent_parts(config: ModelConfig, spec: MLA) -> list[Part]:
    """`attend_latent` multiplies with the dense matrices head by head."""
    hidden, heads, rank = config.hidden_size, spec.num_q_heads, spec.kv_rank

    def linear(role: str, shape: tuple[int, int], packed: Packed, **more: Any) -> Part:
        return Part(role, Kind.LINEAR, shape, packed=packed, is_converted=True, **more)

    wide = Shard.OUT_FEATURES  # of matrices with rows of heads; latent vectors are whole everywhere
    rotated = 0 if spec.rope is None else spec.rope_dim
    of_queries = RowPermutation(heads, spec.head_dim, rotated, before=spec.nope_dim)
    of_row = RowPermutation(1, spec.row_dim, rotated, before=rank)
    if spec.q_rank:
        first = linear("q_a", (spec.q_rank, hidden), "qkv", has_bias=spec.has_bias)
        queries = [linear("q_b", (spec.q_size, spec.q_rank), "q_up", heads=of_queries, shard=wide)]
        queries.append(Part("q_a_norm", Kind.NORM, (spec.q_rank,)))
    else:
        first, queries = linear("q", (spec.q_size, hidden), "qkv", heads=of_queries, shard=wide), []
    row = linear("kv_a", (spec.row_dim, hidden), "qkv", has_bias=spec.has_bias, heads=of_row)
    last = linear("output", (hidden, spec.output_size), "output", has_bias=spec.has_bias)
    last = last._replace(shard=Shard.IN_FEATURES)
    shapes = [("kv_up", heads * (spec.nope_dim + spec.value_dim), rank)]
    if spec.has_split_up:
        shapes = [("k_up", heads * rank, spec.nope_dim), ("v_up", heads * spec.value_dim, rank)]
    stacked = heads if spec.has_split_up else 0
    up = [
        Part(role, Kind.LINEAR, (n, k), shard=wide, is_dense=True, stacked=stacked)
        for role, n, k in shapes
    ]
    return [first, row, *queries, *up, last, Part("kv_a_norm", Kind.NORM, (rank,))]


def _feed_forward_parts(hidden: int, feed_forward: FeedForward) -> list[Part]:
    match feed_forward:
        case Dense(intermediate_size=inner, has_bias=has_bias, is_gated=is_gated) as spec:
            wide = Part("gate", Kind.LINEAR, (inner, hidden), has_bias, "gate_up")
            wide = wide._replace(shard=Shard.OUT_FEATURES, is_converted=True)
            down = Part("down", Kind.LINEAR, (hidden, inner), has_bias, "down")
            down = down._replace(shard=Shard.IN_FEATURES, is_converted=True)
            up = wide._replace(role="up")
            has_tensors = spec.activation is Activation.XIELU and spec.activation_numbers is None
            roles = ("alpha_p", "alpha_n") if has_tensors else ()
            numbers = [Part(role, Kind.SCALAR, (1,)) for role in roles]
            return [wide, up, down] if is_gated else [up, down, *numbers]
        case MoE() as spec:
            return _moe_parts(hidden, spec)
        case NoFeedForward():
            return []
        case _:
            raise unsupported("feed-forward part", feed_forward)


def _moe_parts(hidden: int, spec: MoE) -> list[Part]:
    """Parts of a layer with experts that every token passes."""
    count = spec.router.num_experts
    has_bias = spec.router.bias is RouterBias.LOGITS
    parts = [Part("router", Kind.LINEAR, (count, hidden), has_bias)]
    if spec.router.bias is RouterBias.CHOICE:
        parts.append(Part("router_bias", Kind.ROUTER_VECTOR, (count,)))
    if spec.router.has_expert_factors:
        parts.append(Part("expert_factors", Kind.ROUTER_VECTOR, (count,)))
    norms = ["router_norm"] if spec.router.has_norm else []
    if spec.is_beside_shared:
        norms += ["expert_norm", "expert_post_norm", "shared_post_norm"]
    parts += [Part(role, Kind.NORM, (hidden,)) for role in norms]
    if spec.latent_size:
        narrow = (spec.latent_size, hidden)
        latent = Part("latent_down", Kind.LINEAR, narrow, packed="latent_down", is_converted=True)
        back = latent._replace(role="latent_up", shape=narrow[::-1], packed="latent_up")
        parts += [latent, back]
    if spec.shared is None:
        return parts
    inner = spec.shared.intermediate_size
    wide = Part("shared_gate", Kind.LINEAR, (inner, hidden), packed="shared_gate_up")
    wide = wide._replace(shard=Shard.OUT_FEATURES, is_converted=True)
    down = Part("shared_down", Kind.LINEAR, (hidden, inner), packed="shared_down")
    down = down._replace(shard=Shard.IN_FEATURES, is_converted=True)
    parts += [*([wide] if spec.is_gated else []), wide._replace(role="shared_up"), down]
    if spec.shared.is_gated:
        parts.append(Part("shared_router", Kind.LINEAR, (1, hidden)))
    return parts


def expert_parts(hidden: int, spec: MoE) -> list[Part]:
    hidden = spec.latent_size or hidden
    wide = Part(
        *("expert_gate", Kind.LINEAR, (spec.intermediate_size, hidden), spec.has_bias),
        packed="expert_gate_up",
        shard=Shard.OUT_FEATURES,
        is_converted=True,
    )
    down = Part(
        *("expert_down", Kind.LINEAR, (hidden, spec.intermediate_size), spec.has_bias),
        packed="expert_down",
        shard=Shard.IN_FEATURES,
        is_converted=True,
    )
    return [*([wide] if spec.is_gated else []), wide._replace(role="expert_up"), down]
