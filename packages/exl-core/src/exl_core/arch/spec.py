"""Choices of an architecture (`ArchSpec`) and numbers of one checkpoint (`ModelConfig`).

Plain data without torch. A family of models is one `ArchSpec` literal in `families/`. No other
module tests for an architecture's name, only for its choices. RMSNorm, RoPE with its scalings,
soft-caps and windows follow the models' own definitions, so that parity tests can compare them with
an independent implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Norm(Enum):
    """Meaning of a stored norm weight: the factor itself, or the factor minus one."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"


class Residual(Enum):
    """PRE_NORM: x + f(norm(x)). SANDWICH: x + post_norm(f(pre_norm(x)))."""

    PRE_NORM = "pre_norm"
    SANDWICH = "sandwich"


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class HeadNorm(Enum):
    """Norm of each query and key head before RoPE."""

    NONE = "none"
    RMS = "rms"


class EmbedScale(Enum):
    NONE = "none"
    SQRT_HIDDEN = "sqrt_hidden"


class Window(Enum):
    """LOCAL layers attend to the last `sliding_window` keys, GLOBAL layers to all."""

    LOCAL = "local"
    GLOBAL = "global"


class RopeMethod(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One table of rotation angles; `arch/rope.py` turns it into inverse frequencies.

    `rotary_dim` values of each head are rotated in NeoX pairs (i, i + rotary_dim/2). `alpha` is the
    NTK factor on the base (1: none). `factor` divides positions (LINEAR) or stretches wavelengths
    (LLAMA3, YARN). `frequency_divisors`, if given, divide the frequencies elementwise: GGUF files
    of Llama 3 store their scaling in this form.
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


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """A family of models, as a set of choices."""

    name: str
    hf_names: tuple[str, ...]
    gguf_names: tuple[str, ...]
    norm: Norm = Norm.RMS
    residual: Residual = Residual.PRE_NORM
    activation: Activation = Activation.SILU
    head_norm: HeadNorm = HeadNorm.NONE
    embed_scale: EmbedScale = EmbedScale.NONE
    window_pattern: tuple[Window, ...] = (Window.GLOBAL,)
    """Repeated over the layers. A checkpoint's own `layer_types` or pattern length overrides it. If
    all entries are LOCAL, the layers of a checkpoint without a window size are GLOBAL."""
    sliding_window_default: int | None = None
    """Window size if a checkpoint lacks the key. A checkpoint that sets it to null has no
    window."""
    window_flag: str | None = None
    """Key that a checkpoint sets to true to enable its window, from layer `max_window_layers`
    on."""
    has_qkv_bias: bool = False
    """q, k and v have biases and the output projection has none, regardless of the checkpoint."""
    tie_embeddings_default: bool = False
    head_dim_default: int | None = None
    num_q_heads_default: int | None = None
    num_kv_heads_default: int | None = None
    vocab_size_default: int | None = None
    rope_base_default: float = 10000.0
    local_rope_base_default: float | None = None
    attention_softcap_default: float | None = None
    final_softcap_default: float | None = None
    is_gguf_rope_interleaved: bool = False
    """GGUF files of this family store q and k rows permuted for interleaved RoPE pairs."""
    is_gguf_norm_folded: bool = False
    """GGUF files of this family store norm weights with 1 already added."""
    key_roots: tuple[str, ...] = ("model.",)
    """Prefixes that checkpoints of this family use in place of `model.`; the first is canonical."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Numbers of one checkpoint. `layer_windows` has one entry per layer."""

    arch: ArchSpec
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None
    layer_windows: tuple[Window, ...]
    sliding_window: int | None
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    has_attention_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_tied_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window_of(self, layer: int) -> int:
        """Number of keys that a query of this layer attends to, its own included; 0 means all."""
        if self.layer_windows[layer] is Window.LOCAL and self.sliding_window is not None:
            return self.sliding_window
        return 0
