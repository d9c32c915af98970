"""Layers as data: one `LayerSpec` per layer says how the layer mixes tokens and how its MLP works.

Plain data without torch. Nothing about a layer is global: head counts, head size, widths, window,
RoPE table and cache geometry are read from the layer's own `LayerSpec`. Code that handles one kind
of mixer or feed-forward part refuses the other kinds (`LayerSpec.attention`, `LayerSpec.dense`).

Invariant: two layers with equal specs have the same tensors, shapes and arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from exl_core.errors import UnsupportedModelError


class NormKind(Enum):
    """RMS: RMSNorm. LAYER: LayerNorm without a bias. LAYER_BIAS: LayerNorm with a bias."""

    RMS = "rms"
    LAYER = "layer"
    LAYER_BIAS = "layer_bias"


class NormPlacement(Enum):
    """PRE: x + f(norm(x)). SANDWICH: x + post_norm(f(pre_norm(x))). POST: x + post_norm(f(x)).
    PARALLEL: x + attention(norm(x)) + mlp(norm(x)), with one norm."""

    PRE = "pre"
    SANDWICH = "sandwich"
    POST = "post"
    PARALLEL = "parallel"


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    XIELU = "xielu"
    CLAMPED_SWIGLU = "clamped_swiglu"


class Scores(Enum):
    """Scores of the experts, from the router's logits: over all of them, or of each by itself."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class RouterBias(Enum):
    """LOGITS: the router's linear has a bias. CHOICE: numbers are added to the scores that choose
    the experts, but not to those that weigh them."""

    NONE = "none"
    LOGITS = "logits"
    CHOICE = "choice"


class HeadNorm(Enum):
    """Norm of queries and keys before RoPE: of each head, or of all heads together (WHOLE). LAYER
    is a LayerNorm of each head, with factors of its own for every head. RMS_AFTER_ROPE comes after
    RoPE; PLAIN_AFTER_ROPE does too, and has no factors."""

    NONE = "none"
    RMS = "rms"
    RMS_WHOLE = "rms_whole"
    LAYER = "layer"
    RMS_AFTER_ROPE = "rms_after_rope"
    PLAIN_AFTER_ROPE = "plain_after_rope"


XIELU_BETA = 0.5  # files store it too, always with this value


class QueryTemperature(NamedTuple):
    """Factor on the queries at position p: 1 + beta * ln(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


class KVShape(NamedTuple):
    """Keys and values that one layer caches per position: heads, and the elements of each."""

    num_kv_heads: int
    head_dim: int

    @property
    def is_shared(self) -> bool:
        """Whether keys and values are the same rows, which are cached once."""
        return False


class SharedKVShape(KVShape):
    """Rows that are keys and values at once."""

    __slots__ = ()

    @property
    def is_shared(self) -> bool:
        return True


class StateShape(NamedTuple):
    """Numbers that one recurrent layer keeps of a sequence, whatever its length, in float32.

    inputs  earlier inputs of the convolution: rows, and channels of each
    matrix  matrix of each head: heads, rows, columns; None if there is none
    """

    inputs: tuple[int, int]
    matrix: tuple[int, int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of one sequence."""
        count = math.prod(self.inputs) + (0 if self.matrix is None else math.prod(self.matrix))
        return 4 * count


@dataclass(frozen=True, slots=True)
class Mixer:
    """Part of a layer in which tokens exchange information. Each kind is a subclass."""

    @property
    def kv_shape(self) -> KVShape | None:
        """Keys and values that the layer caches; None if it caches nothing per position."""
        return None

    @property
    def state_shape(self) -> StateShape | None:
        """State of fixed size that the layer keeps of a sequence; None if it keeps none."""
        return None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Part of a layer that transforms each token by itself. Each kind is a subclass."""

    @property
    def inner_size(self) -> int:
        """Width inside the MLP that every token passes; 0 if there is none."""
        return 0


@dataclass(frozen=True, slots=True)
class NoMixer(Mixer):
    """Layers of one part only (Nemotron-H): this one has a feed-forward part."""


@dataclass(frozen=True, slots=True)
class NoFeedForward(FeedForward):
    """Layers of one part only (Nemotron-H): this one has a mixer."""


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Attention with keys and values shared by groups of query heads.

    rope    index of the RoPE table in `ModelConfig.ropes`; None means no RoPE
    scale   factor of the scores
    window  number of keys that a query attends to, its own included; 0 means all
    chunk   positions of a chunk; a query attends to the keys of its own chunk. 0 means no chunks
    softcap limit of the scores, by tanh; None means no limit
    temperature  factor on the queries by position; None means 1
    clip    limit of the projected queries, keys and values, of either sign; None means no limit
    is_value_key  values are the projected keys, before norms and RoPE; there is no projection of v
    has_value_norm  values have an RMSNorm of each head, without factors
    has_sinks  each query head has a score of its own that takes weight from the keys
    has_gate  outputs are multiplied by the sigmoid of a projection of the same width
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: int | None = 0
    window: int = 0
    chunk: int = 0
    softcap: float | None = None
    temperature: QueryTemperature | None = None
    head_norm: HeadNorm = HeadNorm.NONE
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    clip: float | None = None
    is_value_key: bool = False
    has_value_norm: bool = False
    has_sinks: bool = False
    has_gate: bool = False

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def output_size(self) -> int:
        """Width of the inputs of the last matrix."""
        return self.q_size

    @property
    def attend_rope(self) -> int | None:
        """RoPE table that `attend_` applies; None if the layer has none, or rotates before it."""
        after = (HeadNorm.RMS_AFTER_ROPE, HeadNorm.PLAIN_AFTER_ROPE)
        return None if self.head_norm in after else self.rope

    @property
    def projected_size(self) -> int:
        """Width of the packed projection of q, k, v and the gate."""
        width = self.qkv_size - (self.kv_size if self.is_value_key else 0)
        return width + (self.q_size if self.has_gate else 0)

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class ShortConv(Mixer):
    """out(c * conv(b * x)), where (b, c, x) is one projection of the states (LFM2).

    The convolution is causal and runs over each channel by itself. It reads `taps` positions, the
    current one included.
    """

    size: int
    taps: int
    has_bias: bool = False

    @property
    def output_size(self) -> int:
        """Width of the inputs of the last matrix."""
        return self.size

    @property
    def state_shape(self) -> StateShape:
        return StateShape((self.taps - 1, self.size))


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(Mixer):
    """A linear attention whose state is corrected by each token (Qwen3-Next, Qwen3.5).

    The projected queries, keys and values pass a causal convolution of `taps` positions and SiLU.
    The outputs of each value head have an RMSNorm and are multiplied by SiLU of a gate.

    is_tiled  value head h uses key head h % key_heads, rather than h // (value_heads / key_heads).
              GGUF files of Qwen3.5 have their value heads in this order
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    is_tiled: bool = False

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def is_reordered(self) -> bool:
        """Whether the value heads are in another order than in a checkpoint of the hub."""
        return self.is_tiled and 1 < self.key_heads < self.value_heads

    @property
    def output_size(self) -> int:
        """Width of the inputs of the last matrix."""
        return self.value_size

    @property
    def channels(self) -> int:
        """Width of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> StateShape:
        matrix = (self.value_heads, self.key_dim, self.value_dim)
        return StateShape((self.taps - 1, self.channels), matrix)


@dataclass(frozen=True, slots=True)
class KimiDeltaNet(Mixer):
    """A linear attention like `GatedDeltaNet`, whose state decays row by row (Kimi-Linear).

    As many key heads as value heads, of the same size. The decays, and the gates of the outputs,
    are projected through vectors of `head_dim` numbers. The outputs have an RMSNorm of each head
    and are multiplied by the sigmoid of the gates.
    """

    heads: int
    head_dim: int
    taps: int

    @property
    def size(self) -> int:
        """Width of queries, keys, values, decays and gates."""
        return self.heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Width of the inputs of the last matrix."""
        return self.size

    @property
    def state_shape(self) -> StateShape:
        matrix = (self.heads, self.head_dim, self.head_dim)
        return StateShape((self.taps - 1, 3 * self.size), matrix)


@dataclass(frozen=True, slots=True)
class Mamba2(Mixer):
    """A state-space model (Mamba-2), whose heads share their input and output vectors in groups.

    The projected inputs and vectors pass a causal convolution of `taps` positions and SiLU. The
    outputs are multiplied by SiLU of a gate and have an RMSNorm, each group by itself.

    steps  least and largest step of the state; None for no largest one
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int
    has_bias: bool = False
    has_taps_bias: bool = True
    steps: tuple[float, float | None] = (0.0, None)

    @property
    def size(self) -> int:
        """Width of the inputs and outputs of the state."""
        return self.heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Width of the inputs of the last matrix."""
        return self.size

    @property
    def channels(self) -> int:
        """Width of the convolution."""
        return self.size + 2 * self.groups * self.state_size

    @property
    def state_shape(self) -> StateShape:
        matrix = (self.heads, self.head_dim, self.state_size)
        return StateShape((self.taps - 1, self.channels), matrix)


@dataclass(frozen=True, slots=True)
class MLA(Mixer):
    """Multi-head latent attention: the keys and values of all heads are computed from one latent
    vector per position, which is cached together with one rotated key that all heads share.

    q_rank     width of the latent vector of queries; 0 means that queries are projected directly
    kv_rank    width of the latent vector of keys and values
    nope_dim   elements of a query or key head without RoPE
    rope_dim   elements of a query or key head with RoPE
    value_dim  elements of a value head
    rope       index of the RoPE table in `ModelConfig.ropes`; None means no RoPE
    scale      factor of the scores
    temperature  factor on the queries by position; None means 1
    norm_eps   epsilon of the norms of latent vectors
    has_bias   the projections from the hidden size, and the one back to it, have biases
    has_split_up  files store the projections of keys and of values from latent vectors as separate
               tensors, that of keys transposed for each head
    """

    num_q_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: int | None = 0
    temperature: QueryTemperature | None = None
    norm_eps: float = 1e-6
    has_bias: bool = False
    has_split_up: bool = False

    @property
    def head_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def row_dim(self) -> int:
        """Elements of a cached row: the rotated key, then the latent vector."""
        return self.rope_dim + self.kv_rank

    @property
    def projected_size(self) -> int:
        """Width of the packed projection from the hidden size."""
        return (self.q_rank or self.q_size) + self.row_dim

    @property
    def output_size(self) -> int:
        return self.num_q_heads * self.value_dim

    @property
    def attend_rope(self) -> int | None:
        return self.rope

    @property
    def chunk(self) -> int:
        """Positions of a chunk of attention: there are no chunks."""
        return 0

    @property
    def kv_shape(self) -> KVShape:
        return SharedKVShape(1, self.row_dim)


@dataclass(frozen=True, slots=True)
class Dense(FeedForward):
    """down(activation(gate(x)) * up(x)); without a gate down(activation(up(x))).

    `activation_numbers` are alpha_p and alpha_n of xIELU as files store them; None if the files
    have tensors of them.
    """

    intermediate_size: int
    activation: Activation
    has_bias: bool = False
    is_gated: bool = True
    activation_numbers: tuple[float, float] | None = None

    @property
    def inner_size(self) -> int:
        return self.intermediate_size


@dataclass(frozen=True, slots=True)
class Router:
    """Choice of `top_k` of `num_experts` experts for each token, and their weights.

    groups      the experts are divided into as many groups. Only those of the best `kept_groups`
                are chosen. The score of a group is the sum of its `group_scores` best scores
    normalizes  the chosen experts' scores are divided by their sum plus `eps`
    factor      factor of the weights
    has_norm    the router reads states with an RMSNorm of its own, whose factors are divided by the
                root of the hidden size
    has_expert_factors  the weights are multiplied by a number of each expert
    """

    num_experts: int
    top_k: int
    scores: Scores = Scores.SOFTMAX
    bias: RouterBias = RouterBias.NONE
    groups: int = 1
    kept_groups: int = 1
    group_scores: int = 2
    normalizes: bool = True
    eps: float = 0.0
    factor: float = 1.0
    has_norm: bool = False
    has_expert_factors: bool = False


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every token passes, beside its experts. If it `is_gated`, its output is
    multiplied by the sigmoid of a number of each token."""

    intermediate_size: int
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class MoE(FeedForward):
    """Mixture of experts: the sum of the chosen experts' outputs, each times its weight. An expert
    is a gated MLP of width `intermediate_size`, whose matrices may have biases. If it
    `weighs_inputs`, the weights are factors of the experts' inputs rather than of their outputs.

    If `is_beside_shared`, the experts have norms of their own before and after, and the shared
    expert has others. The norm after the layer's feed-forward part is that of their sum.

    If it is not `is_gated`, an expert is down(activation(up(x))), and so is the shared one.
    `latent_size`, if not 0, is the width of the inputs and outputs of the experts: one matrix of
    the layer narrows the states before them, another one widens the sum after them.
    """

    router: Router
    intermediate_size: int
    activation: Activation
    shared: SharedExpert | None = None
    is_beside_shared: bool = False
    weighs_inputs: bool = False
    has_bias: bool = False
    is_gated: bool = True
    latent_size: int = 0

    @property
    def inner_size(self) -> int:
        return 0 if self.shared is None else self.shared.intermediate_size


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: Mixer
    feed_forward: FeedForward
    norms: NormPlacement = NormPlacement.PRE
    norm_kind: NormKind = NormKind.RMS
    has_scalar: bool = False
    """The states after the layer are multiplied by a number of the checkpoint."""
    is_predicting: bool = False
    """The layer is one for multi-token prediction (`arch/mtp.py`)."""

    @property
    def attention(self) -> Attention:
        """The mixer, for code that handles attention only. Raises UnsupportedModelError for other
        mixers."""
        if isinstance(self.mixer, Attention):
            return self.mixer
        raise unsupported("mixer", self.mixer)

    @property
    def attending(self) -> Attention | MLA | None:
        """The mixer if it attends to cached rows, for code that handles either kind; None if it
        does not."""
        return self.mixer if isinstance(self.mixer, Attention | MLA) else None

    @property
    def dense(self) -> Dense:
        """The feed-forward part, for code that handles dense MLPs only. Raises
        UnsupportedModelError for other kinds."""
        if isinstance(self.feed_forward, Dense):
            return self.feed_forward
        raise unsupported("feed-forward part", self.feed_forward)

    @property
    def kv_shape(self) -> KVShape | None:
        return self.mixer.kv_shape

    @property
    def state_shape(self) -> StateShape | None:
        return self.mixer.state_shape


def inner_width(layer: LayerSpec) -> int:
    """Width inside the feed-forward part that one token passes, chosen experts included."""
    part = layer.feed_forward
    chosen = part.router.top_k * part.intermediate_size if isinstance(part, MoE) else 0
    return part.inner_size + chosen


def unsupported(part: str, found: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a layer has a {part} that is not supported here", got=type(found).__name__
    )
