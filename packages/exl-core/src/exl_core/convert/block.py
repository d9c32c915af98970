"""One transformer block in plain torch, split at its matrices, for rows of whole sequences.

The block computes everything between the matrices: norms, RoPE, attention, gated activations and
residual sums. The caller multiplies by the matrices, source or quantized. It can read the inputs of
each matrix and take gradients.

States between blocks are float32. Matrix products may return a smaller float type, and attention
and gated activations then compute in that type. All rows start at position 0. There is no cache.

R rows, T tokens per row, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from exl_core.arch.layers import Activation, Attention, HeadNorm, NormPlacement
from exl_core.arch.spec import ModelConfig, RopeConfig
from exl_core.model.rotation import RotationTable

Linear = Callable[[str, Tensor], Tensor]
"""Takes a matrix's role (`q`, as in the module table) and its input. Returns its output, in the
float type in which it computes."""

QKV = ("q", "k", "v")
OUTPUT = "output"
GATE_UP = ("gate", "up")
DOWN = "down"
MATRICES = (*QKV, OUTPUT, *GATE_UP, DOWN)
STEPS = (QKV, (OUTPUT,), GATE_UP, (DOWN,))
"""Matrices grouped by the input they read, in the order in which these inputs are computed."""


class Block:
    """One layer without its matrices. `norms` are factors, by role."""

    def __init__(self, config: ModelConfig, layer: int, norms: Mapping[str, Tensor]) -> None:
        spec = config.layers[layer]
        self._eps = config.state_eps
        self._norms = norms
        self._attention, self._mlp = spec.attention, spec.dense
        self._rope = config.rope_of(spec.attention)
        self._is_sandwich = spec.norms is NormPlacement.SANDWICH

    def qkv_input(self, x: Tensor) -> Tensor:
        return self._norm(x, "attention_norm")

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [R, T, H * D], k and v [R, T, K * D]: [R, T, H * D]."""
        spec = self._attention
        rows, length, _ = q.shape
        q, k, v = (x.view(rows, length, -1, spec.head_dim).transpose(1, 2) for x in (q, k, v))
        if spec.head_norm is not HeadNorm.NONE:
            q, k = self._norm(q, "q_norm"), self._norm(k, "k_norm")
        q, k = self._apply_rope(q).to(v.dtype), self._apply_rope(k).to(v.dtype)  # [R, heads, T, D]
        out = _attention(q, k, v, spec)
        return out.transpose(1, 2).reshape(rows, length, -1)

    def after_attention(self, x: Tensor, output: Tensor) -> Tensor:
        if self._is_sandwich:
            output = self._norm(output, "attention_post_norm")
        return x + output

    def gate_up_input(self, x: Tensor) -> Tensor:
        return self._norm(x, "mlp_norm")

    def gated_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._mlp.activation is Activation.SILU:
            return silu(gate) * up
        return gelu(gate, approximate="tanh") * up

    def after_mlp(self, x: Tensor, output: Tensor) -> Tensor:
        if self._is_sandwich:
            output = self._norm(output, "mlp_post_norm")
        return x + output

    def run(self, x: Tensor, linear: Linear) -> Tensor:
        """Runs the whole layer: x [R, T, hidden] to the states after it."""
        h = self.qkv_input(x)
        q, k, v = (linear(name, h) for name in QKV)
        x = self.after_attention(x, linear(OUTPUT, self.attention(q, k, v)))
        h = self.gate_up_input(x)
        gate, up = (linear(name, h) for name in GATE_UP)
        return self.after_mlp(x, linear(DOWN, self.gated_activation(gate, up)))

    def _norm(self, x: Tensor, role: str) -> Tensor:
        return rms_norm(x, self._norms[role], self._eps)

    def _apply_rope(self, x: Tensor) -> Tensor:
        """Applies RoPE to x [R, heads, T, D], in pairs (i, i + rotary_dim / 2)."""
        if self._rope is None:
            return x
        half = self._rope.rotary_dim // 2
        cos, sin = _rope_tables(self._rope, x.shape[2], x.device)
        a, b, unrotated = x.split_with_sizes([half, half, x.shape[3] - 2 * half], dim=3)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], dim=3)


@lru_cache(maxsize=4)  # local and global layers, two sequence lengths
def _rope_tables(rope: RopeConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = RotationTable(rope, torch.device("cpu")).at(torch.arange(length))
    return cos.to(device), sin.to(device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight along the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _attention(q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> Tensor:
    """Causal attention over the last keys of the layer's window: [R, H, T, D]."""
    length, window = q.shape[2], spec.window
    is_plain = spec.softcap is None
    if is_plain and (window == 0 or window >= length):
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True
        )
    distance = torch.arange(length, device=q.device)
    distance = distance[:, None] - distance  # [T, T]
    is_visible = (distance >= 0) & (distance < window) if window else distance >= 0
    if is_plain:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=is_visible, scale=spec.scale, enable_gqa=True
        )
    assert spec.softcap is not None
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * spec.scale
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    return scores.masked_fill(~is_visible, -torch.inf).softmax(-1) @ v
