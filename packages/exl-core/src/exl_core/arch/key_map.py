"""Names and shapes of a model's tensors, and their names in checkpoints and GGUF files.

Canonical names are those of the hub's Llama checkpoints (`model.layers.0.self_attn.q_proj.weight`).
Matrices are [out_features, in_features].
"""

from __future__ import annotations

import re

from exl_core.arch.layers import HeadNorm, LayerSpec, NormPlacement
from exl_core.arch.spec import ArchSpec, ModelConfig

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_GGUF_TOP = {EMBED: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NORMS = {
    NormPlacement.PRE: {"post_attention_layernorm": "ffn_norm"},
    NormPlacement.SANDWICH: {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_of(name: str) -> str:
    """Prefix of the layer that tensor `name` (canonical) belongs to; "" if it is in no layer."""
    match = _LAYER_NAME.fullmatch(name)
    return layer_prefix(int(match[1])) if match else ""


def layer_index(name: str) -> int:
    """Number of the layer that tensor `name` (canonical) belongs to."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not a tensor of a layer: {name}")
    return int(match[1])


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that the model needs, by name, in the order of the forward pass."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        tensors = _layer_tensors(config, config.layers[layer])
        shapes.update({prefix + name: shape for name, shape in tensors.items()})
    shapes[FINAL_NORM] = (hidden,)
    if not config.has_tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer_tensors(config: ModelConfig, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    attention, dense = layer.attention, layer.dense
    hidden, inner = config.hidden_size, dense.intermediate_size
    matrices = {
        "self_attn.q_proj": (attention.q_size, hidden, attention.has_qkv_bias),
        "self_attn.k_proj": (attention.kv_size, hidden, attention.has_qkv_bias),
        "self_attn.v_proj": (attention.kv_size, hidden, attention.has_qkv_bias),
        "self_attn.o_proj": (hidden, attention.q_size, attention.has_output_bias),
        "mlp.gate_proj": (inner, hidden, dense.has_bias),
        "mlp.up_proj": (inner, hidden, dense.has_bias),
        "mlp.down_proj": (hidden, inner, dense.has_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    norms = ["input_layernorm", *_GGUF_NORMS[layer.norms]]
    shapes.update({f"{name}.weight": (hidden,) for name in norms})
    if attention.head_norm is not HeadNorm.NONE:
        shapes["self_attn.q_norm.weight"] = (attention.head_dim,)
        shapes["self_attn.k_norm.weight"] = (attention.head_dim,)
    return shapes


def checkpoint_names(arch: ArchSpec, name: str) -> list[str]:
    """Possible names of tensor `name` in checkpoints of this family, most likely first."""
    if name.startswith("model."):
        return [root + name.removeprefix("model.") for root in arch.key_roots]
    roots = [root for root in arch.key_roots if root.endswith(".model.")]
    return [name, *(root.removesuffix("model.") + name for root in roots)]


def gguf_name(arch: ArchSpec, name: str) -> str:
    """Name of tensor `name` in a GGUF file."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no such tensor in any model: {name}")
    layer, part, kind = match.groups()
    return f"blk.{layer}.{(_GGUF_LAYER | _GGUF_NORMS[arch.norm_placement])[part]}.{kind}"


def bias_of(name: str) -> str:
    """Canonical name of the bias of matrix `name`; not every matrix has one."""
    return name.removesuffix("weight") + "bias"


def packed_together(name: str) -> list[str]:
    """Matrices that are packed into one with `name`, in order. They read the same input."""
    for parts in (("q", "k", "v"), ("gate", "up")):
        for part in parts:
            if name.endswith(f".{part}_proj.weight"):
                stem = name.removesuffix(f"{part}_proj.weight")
                return [f"{stem}{other}_proj.weight" for other in parts]
    return [name]


def fused_with(config: ModelConfig, name: str) -> tuple[str, int, int] | None:
    """The fused tensor that contains `name` in files that fuse projections (Phi-3).

    Returns its name, the first row of `name` in it, and its total number of rows; None if `name` is
    never part of a fused tensor.
    """
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return None
    attention = config.layers[int(match[1])].attention
    inner = config.layers[int(match[1])].dense.intermediate_size
    sizes = {
        "self_attn.qkv_proj": (
            ("q", attention.q_size),
            ("k", attention.kv_size),
            ("v", attention.kv_size),
        ),
        "mlp.gate_up_proj": (
            ("gate", inner),
            ("up", inner),
        ),
    }
    for fused, parts in sizes.items():
        module = fused.partition(".")[0]
        first_row = 0
        for part, rows in parts:
            stem, found, kind = name.partition(f"{module}.{part}_proj.")
            if found:
                return f"{stem}{fused}.{kind}", first_row, sum(count for _, count in parts)
            first_row += rows
    return None


def rotated_head_count(config: ModelConfig, name: str) -> int:
    """Number of heads in the rows of `name` if RoPE rotates them (weight and bias of q and k),
    else 0."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return 0
    attention = config.layers[int(match[1])].attention
    if ".self_attn.q_proj." in name:
        return attention.num_q_heads
    return attention.num_kv_heads if ".self_attn.k_proj." in name else 0
