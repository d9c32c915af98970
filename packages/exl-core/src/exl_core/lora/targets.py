"""Finds the model's matrix that a tensor of an adapter belongs to, by the tensor's name.

Names follow PEFT: an arbitrary prefix, the model's own root, the layer, the module, and the role of
the tensor in it. Knows shapes and no files.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from exl_core.arch.key_map import HEAD, checkpoint_names
from exl_core.arch.spec import ModelConfig
from exl_core.model.adapters import Matrix

End = Literal["embed", "head"]
Role = Literal["down", "up", "bias", "whole", "other"]

_TAILS: tuple[tuple[str, Role], ...] = (
    (r"lora_A(\.default)?\.weight", "down"),
    (r"lora_B(\.default)?\.weight", "up"),
    (r"lora_embedding_A(\.default)?", "down"),
    (r"lora_embedding_B(\.default)?", "up"),
    (r"lora_B(\.default)?\.bias", "bias"),
    (r"(base_layer\.)?bias", "bias"),
    (r"(base_layer\.|modules_to_save\.)?(default\.)?weight", "whole"),
)
_ROLES = tuple((re.compile(rf"(?P<module>.+?)\.{tail}"), role) for tail, role in _TAILS)


class Named(NamedTuple):
    """A parsed tensor name. `module` is PEFT's module name without PEFT's own prefix."""

    module: str
    role: Role
    is_embedding: bool


class LayerTarget(NamedTuple):
    """A range of outputs, from `first_out` on, of a packed matrix of a layer."""

    layer: int
    matrix: Matrix
    first_out: int
    in_features: int
    out_features: int


class EndTarget(NamedTuple):
    """The embedding (ids to states) or the head (states to logits)."""

    end: End
    in_features: int
    out_features: int


def parse_name(name: str) -> Named:
    for pattern, role in _ROLES:
        match = pattern.fullmatch(name)
        if match is not None:
            module = match["module"].removeprefix("base_model.model.")
            return Named(module, role, "lora_embedding" in name)
    return Named(name, "other", is_embedding=False)


def find_target(config: ModelConfig, module: str) -> LayerTarget | EndTarget | None:
    """Target of an adapter's module; None if the model does not have it."""
    hidden, vocab = config.hidden_size, config.vocab_size
    for root in config.arch.key_roots:
        if _ends_with(module, f"{root}embed_tokens"):
            return EndTarget("embed", vocab, hidden)
        _, found, rest = module.partition(f"{root}layers.")
        layer, _, part = rest.partition(".")
        if not found or not re.fullmatch(r"\d{1,6}", layer) or int(layer) >= config.num_layers:
            continue
        parts = _parts(config, int(layer))
        if part in parts:
            matrix, first_out, inputs, outputs = parts[part]
            return LayerTarget(int(layer), matrix, first_out, inputs, outputs)
    heads = (name.removesuffix(".weight") for name in checkpoint_names(config.arch, HEAD))
    if any(_ends_with(module, head) for head in heads):
        return EndTarget("head", hidden, vocab)
    return None


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _parts(config: ModelConfig, layer: int) -> dict[str, tuple[Matrix, int, int, int]]:
    """Packed matrix, first output in it, inputs and outputs of each module of the layer.

    Includes the fused projections of some checkpoints.
    """
    hidden, inner = config.hidden_size, config.layers[layer].dense.intermediate_size
    q, kv = config.layers[layer].attention.q_size, config.layers[layer].attention.kv_size
    return {
        "self_attn.q_proj": ("qkv", 0, hidden, q),
        "self_attn.k_proj": ("qkv", q, hidden, kv),
        "self_attn.v_proj": ("qkv", q + kv, hidden, kv),
        "self_attn.qkv_proj": ("qkv", 0, hidden, q + 2 * kv),
        "self_attn.o_proj": ("output", 0, q, hidden),
        "mlp.gate_proj": ("gate_up", 0, hidden, inner),
        "mlp.up_proj": ("gate_up", inner, hidden, inner),
        "mlp.gate_up_proj": ("gate_up", 0, hidden, 2 * inner),
        "mlp.down_proj": ("down", 0, inner, hidden),
    }
