"""A tiny model whose layers differ in everything a `LayerSpec` holds, and its torch reference.

Head counts, head sizes, windows, widths, RoPE tables, norms, biases and activations change from
layer to layer. Code that reads one of them from another layer computes other logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, silu

from exl_core.arch.layers import (
    Activation,
    Attention,
    Dense,
    HeadNorm,
    LayerSpec,
    NormPlacement,
)
from exl_core.arch.modules import module_table
from exl_core.arch.names import GGUF_SANDWICH, HF_SANDWICH
from exl_core.arch.rope import inverse_frequencies
from exl_core.arch.spec import ArchSpec, ModelConfig, RopeConfig
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.safetensors import SafetensorsSource
from exl_core.model.build import build_weights
from exl_core.model.transformer import Transformer
from exl_core.ops.open import get_table

PRE, SANDWICH = NormPlacement.PRE, NormPlacement.SANDWICH
VOCAB_SIZE = 50

LAYERS = (
    LayerSpec(
        Attention(4, 2, 16, scale=0.25, rope=0),
        Dense(96, Activation.SILU),
        PRE,
    ),
    LayerSpec(
        Attention(6, 1, 32, scale=0.2, rope=1, window=9, head_norm=HeadNorm.RMS),
        Dense(40, Activation.GELU_TANH, has_bias=True),
        SANDWICH,
    ),
    LayerSpec(
        Attention(3, 3, 64, scale=0.1, rope=2, window=21, softcap=3.0, has_qkv_bias=True),
        Dense(128, Activation.SILU),
        PRE,
    ),
    LayerSpec(
        Attention(8, 4, 24, scale=0.3, rope=None, has_qkv_bias=True, has_output_bias=True),
        Dense(72, Activation.GELU_TANH),
        SANDWICH,
    ),
)

CONFIG = ModelConfig(
    arch=ArchSpec(
        name="mixed",
        hf_names=(),
        gguf_names=(),
        safetensors=HF_SANDWICH,
        gguf=GGUF_SANDWICH,
    ),
    layers=LAYERS,
    ropes=(
        RopeConfig(base=10000.0, rotary_dim=16),
        RopeConfig(base=500.0, rotary_dim=32),
        RopeConfig(base=3000.0, rotary_dim=24),
    ),
    hidden_size=48,
    vocab_size=VOCAB_SIZE,
    max_seq_len=1024,
    norm_eps=1e-5,
    final_softcap=None,
    has_tied_embeddings=False,
    bos_id=None,
    eos_ids=(),
    pad_id=None,
)

CODES_CONFIG = replace(CONFIG, layers=LAYERS[1:3])
"""Layers whose head sizes a cache of codes can hold."""


def random_tensors(config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape, is_norm in ((r.name, r.shape, r.is_norm) for r in module_table(config).rows):
        noise = torch.randn(shape, generator=generator)
        scale = 0.2 if len(shape) == 1 else 1.2 / shape[1] ** 0.5
        tensors[name] = noise * scale + (1.0 if is_norm else 0.0)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> SafetensorsSource:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


def mixed_model(
    folder: Path,
    backend: str,
    config: ModelConfig = CONFIG,
    sample_ids: tuple[int, ...] = (),
) -> tuple[Transformer, dict[str, Tensor]]:
    """The model on a backend, and its tensors by canonical name."""
    tensors = random_tensors(config)
    checkpoint = Checkpoint(write_tensors(folder, tensors), config)
    ops = get_table(backend, threads=1)
    weights = build_weights(config, checkpoint, ops, threads=1)
    return Transformer(config, weights, ops, sample_ids), tensors


def reference_logits(config: ModelConfig, tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [len(ids), vocab_size] in float64, without a cache and without the op table."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    x = embedding(torch.tensor(ids), weights["model.embed_tokens.weight"])
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        x = _layer(config, layer, own, x)
    x = _norm(x, weights["model.norm.weight"], config.norm_eps)
    return x @ weights["lm_head.weight"].T


def _layer(config: ModelConfig, layer: LayerSpec, own: dict[str, Tensor], x: Tensor) -> Tensor:
    is_sandwich = layer.norms is SANDWICH

    def norm(y: Tensor, name: str) -> Tensor:
        return _norm(y, own[f"{name}.weight"], config.norm_eps)

    def product(y: Tensor, name: str) -> Tensor:
        return linear(y, own[f"{name}.weight"], own.get(f"{name}.bias"))

    h = norm(x, "input_layernorm")
    qkv = [product(h, f"self_attn.{part}_proj") for part in "qkv"]
    h = product(_attention(config, layer.attention, own, qkv), "self_attn.o_proj")
    x = x + (norm(h, "post_attention_layernorm") if is_sandwich else h)
    h = norm(x, "pre_feedforward_layernorm")
    gate, up = product(h, "mlp.gate_proj"), product(h, "mlp.up_proj")
    is_silu = layer.dense.activation is Activation.SILU
    h = product((silu(gate) if is_silu else gelu(gate, approximate="tanh")) * up, "mlp.down_proj")
    return x + (norm(h, "post_feedforward_layernorm") if is_sandwich else h)


def _attention(
    config: ModelConfig, spec: Attention, own: dict[str, Tensor], qkv: list[Tensor]
) -> Tensor:
    length = len(qkv[0])
    q, k, v = (y.view(length, -1, spec.head_dim).transpose(0, 1) for y in qkv)  # [H, T, D]
    if spec.head_norm is HeadNorm.RMS:
        q = _norm(q, own["self_attn.q_norm.weight"], config.norm_eps)
        k = _norm(k, own["self_attn.k_norm.weight"], config.norm_eps)
    rope = config.rope_of(spec)
    if rope is not None:
        q, k = _rotated(q, rope), _rotated(k, rope)
    group = spec.num_q_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    distance = torch.arange(length)[:, None] - torch.arange(length)
    is_hidden = (distance < 0) | (distance >= (spec.window or length))
    out = scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).reshape(length, -1)


def _rotated(x: Tensor, rope: RopeConfig) -> Tensor:
    frequencies = torch.tensor(inverse_frequencies(rope)[0], dtype=torch.float64)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies)
    half = rope.rotary_dim // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
