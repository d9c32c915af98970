"""Choices of an architecture (`ArchSpec`) and numbers of one checkpoint (`ModelConfig`).

Plain data without torch. A family of models is one `ArchSpec` literal in `families/`. No other
module tests for an architecture's name, only for its choices. RMSNorm, RoPE with its scalings,
soft-caps and windows follow the models' own definitions, so that parity tests can compare them with
an independent implementation. `ModelConfig` has the numbers of the model as a whole; those of a
layer are in its `LayerSpec` (`arch/layers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from exl_core.arch.layers import (
    MLA,
    Activation,
    Attention,
    Dense,
    FeedForward,
    HeadNorm,
    KVShape,
    LayerSpec,
    Mixer,
    MoE,
    NoFeedForward,
    NoMixer,
    NormKind,
    NormPlacement,
    QueryTemperature,
    RouterBias,
    Scores,
    SharedExpert,
    StateShape,
)
from exl_core.arch.names import GGUF, HF, FileForm, PredictingForm


class EmbedScale(Enum):
    NONE = "none"
    SQRT_HIDDEN = "sqrt_hidden"


class NoRope(Enum):
    """Layers without RoPE. GLOBAL: layers without a window, if others have one. INTERVAL: each
    fourth layer, or as a checkpoint's `no_rope_layers` says. ALL: all layers, as positions have
    vectors that are added to the embedding. STATED: all layers, unless `position_embedding_type`
    is `rope`. ALWAYS: all layers, and positions have no vectors either."""

    NONE = "none"
    GLOBAL = "global"
    INTERVAL = "interval"
    ALL = "all"
    STATED = "stated"
    ALWAYS = "always"


class Window(Enum):
    """LOCAL layers attend to the last keys of a window, GLOBAL layers to all keys."""

    LOCAL = "local"
    GLOBAL = "global"


class Recurrence(Enum):
    """Kind of the layers that have a state of fixed size instead of attention."""

    NONE = "none"
    SHORT_CONV = "short_conv"
    DELTA_NET = "delta_net"
    KIMI_DELTA = "kimi_delta"
    MAMBA2 = "mamba2"


class RopeMethod(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One table of rotation angles; `arch/rope.py` turns it into inverse frequencies.

    `rotary_dim` values of each head are rotated in NeoX pairs (i, i + rotary_dim/2). `alpha` is the
    NTK factor on the base (1: none). `factor` divides positions (LINEAR) or stretches wavelengths
    (LLAMA3, YARN). `frequency_divisors`, if given, divide the frequencies elementwise: GGUF files
    of Llama 3 store their scaling in this form. LONGROPE has two lists of divisors: the first for
    contexts of up to `original_max_seq_len` positions, `long_divisors` for longer ones. `fitted`
    chooses between them. PROPORTIONAL rotates only the first `rotated_pairs` pairs; the others have
    the frequency 0.
    """

    base: float
    rotary_dim: int
    method: RopeMethod = RopeMethod.DEFAULT
    factor: float = 1.0
    alpha: float = 1.0
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    rotated_pairs: int = 0

    def fitted(self, context: int) -> RopeConfig:
        """The table for a cache of `context` positions.

        A table is chosen once per load: keys that were rotated with the other list could not be
        used any more.
        """
        if not self.long_divisors:
            return self
        is_long = context > self.original_max_seq_len
        divisors = self.long_divisors if is_long else self.frequency_divisors
        return replace(self, frequency_divisors=divisors, long_divisors=())


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors on the embedding, on the output of each part before it is added, and on logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """Choices of a family whose layers may have experts, and the keys of their numbers in
    `config.json`. Of several keys, the first one that is present counts."""

    num_experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k_key: str = "num_experts_per_tok"
    top_k_default: int | None = None
    size_key: str = "moe_intermediate_size"
    size_default: int | None = None
    scores: Scores = Scores.SOFTMAX
    bias: RouterBias = RouterBias.NONE
    normalizes: bool | None = True
    """Whether weights are divided by their sum; None: as `norm_topk_prob` says, or
    `normalizes_default`."""
    normalizes_default: bool = False
    norm_power_key: str | None = None
    """Key of the power of the norm that weights are divided by; null: they are not divided."""
    gguf_normalizes: bool = True
    """The same for GGUF files without `expert_weights_norm`."""
    eps: float = 0.0
    factor_default: float | None = None
    """Factor of the weights if a checkpoint lacks `routed_scaling_factor`; None: there is none."""
    has_groups: bool = False
    """A checkpoint may have `n_group` and `topk_group`, which count unless its `topk_method` is
    `greedy`."""
    group_scores: int = 2
    """Best scores of a group whose sum is the score of the group."""
    first_sparse_default: int = 0
    """First layer with experts if a checkpoint lacks `first_k_dense_replace`."""
    shared_count_key: str | None = None
    """Key of the width of the shared expert, as a multiple of that of an expert."""
    shared_count_default: int = 0
    shared_size_key: str | None = None
    """Key of the width of the shared expert itself."""
    has_shared_gate: bool = False
    flag_key: str | None = None
    """Key that a checkpoint sets to true if its layers have experts; None: all of the family's
    do."""
    is_beside_dense: bool = False
    """The dense MLP of a layer with experts is their shared expert, and each has its own norms."""
    weighs_inputs: bool = False
    has_router_norm: bool = False
    has_expert_factors: bool = False
    has_bias: bool = False
    """The matrices of the experts have biases."""
    is_optional: bool = False
    """A checkpoint may have 0 experts: then all layers are dense."""
    latent_size_key: str | None = None
    """Key of the width of the experts' inputs and outputs, if it is not the hidden size."""


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Numbers of one layer as a checkpoint gives them; `ArchSpec.layers` adds the choices of the
    family. The fields are those of `Attention` and `Dense`. `experts` replaces the dense MLP, and
    `recurrent` replaces attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: int | None
    window: int
    softcap: float | None
    has_qkv_bias: bool
    has_output_bias: bool
    intermediate_size: int
    has_mlp_bias: bool
    temperature: QueryTemperature | None = None
    head_norm: HeadNorm | None = None
    """None: the choice of the family."""
    clip: float | None = None
    chunk: int = 0
    is_value_key: bool = False
    activation_numbers: tuple[float, float] | None = None
    experts: MoE | None = None
    recurrent: Mixer | None = None
    latent: MLA | None = None
    """Replaces the attention. Its table is the one that `rope` says."""
    has_mixer: bool = True
    has_feed_forward: bool = True


def with_windows(
    numbers: Sequence[LayerNumbers], windows: Sequence[Window], length: int | None, num_ropes: int
) -> tuple[LayerNumbers, ...]:
    """`numbers` of the layers, with the window and the RoPE table of each.

    LOCAL layers have a window of `length` and use the last of `num_ropes` tables. GLOBAL layers use
    the first.
    """
    return tuple(
        replace(one, window=length or 0, rope=num_ropes - 1) if window is Window.LOCAL else one
        for one, window in zip(numbers, windows, strict=True)
    )


def without_rope(
    numbers: Sequence[LayerNumbers], is_rotated: Sequence[bool]
) -> tuple[LayerNumbers, ...]:
    """`numbers` of the layers, without RoPE where `is_rotated` says so."""
    return tuple(
        one if rotated else replace(one, rope=None)
        for one, rotated in zip(numbers, is_rotated, strict=True)
    )


def decoder_layer(arch: ArchSpec, numbers: LayerNumbers) -> LayerSpec:
    """A layer of attention, latent or not, or a recurrence, and a dense MLP or experts."""
    part = _feed_forward(arch, numbers)
    if numbers.latent is not None and numbers.recurrent is None:
        latent = replace(numbers.latent, rope=numbers.rope)
        return LayerSpec(latent, part, arch.norm_placement, arch.norm_kind)
    attention = Attention(
        num_q_heads=numbers.num_q_heads,
        num_kv_heads=numbers.num_kv_heads,
        head_dim=numbers.head_dim,
        scale=numbers.scale,
        rope=numbers.rope,
        window=numbers.window,
        chunk=numbers.chunk,
        softcap=numbers.softcap,
        temperature=numbers.temperature,
        head_norm=numbers.head_norm or arch.head_norm,
        is_value_key=numbers.is_value_key,
        clip=numbers.clip,
        has_value_norm=arch.has_value_norm,
        has_sinks=arch.has_sinks,
        has_gate=arch.has_attention_gate,
        has_qkv_bias=numbers.has_qkv_bias,
        has_output_bias=numbers.has_output_bias,
    )
    mixer: Mixer = numbers.recurrent or attention
    if not numbers.has_mixer:
        mixer = NoMixer()
    return LayerSpec(mixer, part, arch.norm_placement, arch.norm_kind, arch.has_layer_scalar)


def _feed_forward(arch: ArchSpec, numbers: LayerNumbers) -> FeedForward:
    experts, form = numbers.experts, arch.experts
    if not numbers.has_feed_forward:
        return NoFeedForward()
    if experts is not None and form is not None and form.is_beside_dense:
        shared = SharedExpert(numbers.intermediate_size)
        return replace(experts, shared=shared, is_beside_shared=True)
    return experts or Dense(
        numbers.intermediate_size,
        arch.activation,
        numbers.has_mlp_bias,
        arch.has_gated_mlp,
        numbers.activation_numbers,
    )


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """A family of models, as a set of choices."""

    name: str
    hf_names: tuple[str, ...]
    gguf_names: tuple[str, ...]
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_kind: NormKind = NormKind.RMS
    activation: Activation = Activation.SILU
    activation_aliases: tuple[str, ...] = ()
    """Other names under which this family's configurations mean `activation`."""
    text_types: tuple[str, ...] = ()
    """`model_type` of the language model, if `hf_names` has multimodal models whose language models
    belong to different families."""
    has_gated_mlp: bool = True
    experts: ExpertForm | None = None
    """None: all layers have dense MLPs."""
    recurrence: Recurrence = Recurrence.NONE
    """Mixer of the layers without attention, which a checkpoint's `layer_types` names."""
    least_step_key: str | None = None
    """Key of the least step of Mamba-2 in families whose checkpoints have no other limits of it."""
    has_single_parts: bool = False
    """A layer is a mixer or a feed-forward part, as the checkpoint's list of them says."""
    has_tiled_gguf: bool = False
    """GGUF files have the value heads of a `GatedDeltaNet` in tiled order."""
    head_norm: HeadNorm = HeadNorm.NONE
    has_value_norm: bool = False
    has_layer_scalar: bool = False
    has_sinks: bool = False
    has_attention_gate: bool = False
    has_latent: bool = False
    """Layers have latent attention (`MLA`)."""
    attention_scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim), or as a checkpoint says."""
    global_head_dim_default: int | None = None
    """Size of the heads of GLOBAL layers if it differs from that of the LOCAL ones."""
    required: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """Keys of `config.json` with the only values that are supported, which all items of a list must
    have."""
    renamed_keys: tuple[tuple[str, str], ...] = ()
    """Usual keys of `config.json`, and this family's keys for them. A dot leads into a section."""
    intermediate_size_key: str = "intermediate_size"
    optional_head_norm: HeadNorm | None = None
    """Norm that a checkpoint has if its `use_qk_norm` is true."""
    has_head_norm_default: bool = False
    """`use_qk_norm` of a checkpoint that lacks it."""
    may_normalize_head: bool = False
    """A checkpoint's `norm_head` says whether each row of the head is divided by its length."""
    embed_scale: EmbedScale = EmbedScale.NONE
    window_pattern: tuple[Window, ...] = (Window.GLOBAL,)
    """Repeated over the layers. A checkpoint's own `layer_types` or pattern length overrides it. If
    all entries are LOCAL, the layers of a checkpoint without a window size are GLOBAL."""
    is_window_optional: bool = False
    """All layers of a checkpoint without a window size are GLOBAL, whatever the pattern says."""
    no_rope: NoRope = NoRope.NONE
    is_rotated_without_list: bool = True
    """An empty `no_rope_layers` means RoPE in all layers, rather than the usual interval."""
    has_qkv_clip: bool = False
    """A checkpoint may limit queries, keys and values (`clip_qkv`)."""
    has_query_temperature: bool = False
    """A checkpoint may ask for a `QueryTemperature`."""
    temperature_default: QueryTemperature | None = None
    """Temperature, unless a checkpoint's `attn_temperature_tuning` is false. Its `attn_scale` and
    `floor_scale` replace beta and length."""
    chunk_default: int | None = None
    """Chunk of attention if a checkpoint lacks `attention_chunk_size`; None: the family has
    none."""
    has_multipliers: bool = False
    """A checkpoint may have `Multipliers` and a factor of the scores."""
    logit_scale_default: float | None = None
    """Factor on the logits if a checkpoint lacks `logit_scale`; None: the family has none."""
    sliding_window_default: int | None = None
    """Window size if a checkpoint lacks the key. A checkpoint that sets it to null has no
    window."""
    window_flag: str | None = None
    """Key that a checkpoint sets to true to enable its window, from layer `max_window_layers`
    on."""
    has_qkv_bias: bool = False
    """q, k and v have biases regardless of the checkpoint. The output projection has one only if
    the checkpoint says so (`attention_out_bias`)."""
    bias_key: str = "attention_bias"
    mlp_bias_key: str = "mlp_bias"
    partial_rotary_default: float = 1.0
    """Rotated share of each head if a checkpoint does not state it."""
    norm_eps_keys: tuple[str, ...] = ("rms_norm_eps",)
    norm_eps_default: float = 1e-6
    context_key: str | None = None
    """Key with the context size, if that is larger than `max_position_embeddings`."""
    has_bias_default: bool = False
    tie_embeddings_default: bool = False
    is_tied_by_outer: bool = False
    """`tie_word_embeddings` of a multimodal model counts rather than that of its language model,
    which writers leave at its default."""
    hidden_size_default: int | None = None
    intermediate_size_default: int | None = None
    has_rounded_intermediate_size: bool = False
    """The width of the MLP follows from a checkpoint's number by LFM2's rule."""
    intermediate_ratio: int | None = None
    """Width of the MLP as a multiple of the hidden size, if a checkpoint lacks it."""
    num_layers_default: int | None = None
    head_dim_default: int | None = None
    num_q_heads_default: int | None = None
    num_kv_heads_default: int | None = None
    vocab_size_default: int | None = None
    rope_base_default: float = 10000.0
    local_rope_base_default: float | None = None
    has_plain_local_rope: bool = False
    """LOCAL layers have the base of the GLOBAL ones, without their scaling."""
    has_rounded_yarn: bool = True
    """YaRN in GGUF files, which do not say it: the ends of its ramp are whole dimensions."""
    attention_softcap_default: float | None = None
    final_softcap_default: float | None = None
    safetensors: FileForm = HF
    """Names and storage of tensors in checkpoints of the hub, EXL2 and GPTQ files included."""
    gguf: FileForm = GGUF
    """Names and storage of tensors in GGUF files."""
    mtp: PredictingForm | None = None
    """Names of the layer for multi-token prediction that checkpoints may have; None: they have
    none."""
    make_layer: Callable[[ArchSpec, LayerNumbers], LayerSpec] = decoder_layer
    """Makes the layers of this family from their numbers."""

    def layers(self, numbers: Sequence[LayerNumbers]) -> tuple[LayerSpec, ...]:
        """One `LayerSpec` per layer."""
        return tuple(self.make_layer(self, one) for one in numbers)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Numbers of one checkpoint.

    `ropes` are the RoPE tables that `Attention.rope` selects from. The first one is that of the
    layers without a window, and the one that load options scale.
    """

    arch: ArchSpec
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeConfig, ...]
    hidden_size: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    final_softcap: float | None
    has_tied_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    multipliers: Multipliers = Multipliers()
    has_normalized_head: bool = False
    num_positions: int = 0
    """Positions with a vector that is added to the embedding; 0: there are no such vectors."""
    other_state_bytes: int = 0
    """Bytes of the states of one sequence in layers that other hosts have."""

    @property
    def embed_factor(self) -> float:
        """Factor on the embedding's rows.

        The states between the layers are those of the family divided by the residual multiplier:
        then every part adds its output as it is, which needs no other arithmetic.
        """
        root = math.sqrt(self.hidden_size)
        own = root if self.arch.embed_scale is EmbedScale.SQRT_HIDDEN else 1.0
        return own * self.multipliers.embedding / self.multipliers.residual

    @property
    def state_eps(self) -> float:
        """Epsilon of the norms of these states, which are unchanged by it."""
        return self.norm_eps / self.multipliers.residual**2

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def rope_of(self, attention: Attention | MLA) -> RopeConfig | None:
        """RoPE of a layer; None if it has none."""
        return None if attention.rope is None else self.ropes[attention.rope]

    @property
    def kv_shapes(self) -> tuple[KVShape | None, ...]:
        """Geometry of the cache, by layer; None for layers without keys and values."""
        return tuple(layer.kv_shape for layer in self.layers)

    @property
    def state_shapes(self) -> tuple[StateShape | None, ...]:
        """State of fixed size that each layer keeps of a sequence; None for layers without."""
        return tuple(layer.state_shape for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence; 0 if no layer has a state."""
        return self.other_state_bytes + sum(
            shape.size_bytes for shape in self.state_shapes if shape is not None
        )
