"""Attention of the autograd backend: over whole sequences, without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from exl_core.ops.attention import (
    NO_HEAD_NORMS,
    AttentionBatch,
    CacheLayer,
    HeadNorms,
    KeySmoothing,
    Scoring,
)
from exl_core.ops.backends.autograd.linear import AutogradProductOps
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import Inputs


@dataclass(frozen=True, slots=True, eq=False)
class WholeSequences:
    """AttentionBatch of sequences from position 0 on: cos and sin float32 [T, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor


def no_pages(num_kv_heads: int, head_dim: int) -> CacheLayer:
    """A cache of no pages, from which attention learns the sizes of a layer's heads."""
    keys, values = (torch.empty(0, num_kv_heads, 1, head_dim) for _ in range(2))
    return CacheLayer(keys, values)


class AutogradAttendOps:
    """AttendOps in plain torch, out of place."""

    @staticmethod
    def attend_(
        qkv: Tensor,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        *,
        norms: HeadNorms = NO_HEAD_NORMS,
        smoothing: KeySmoothing | None = None,  # noqa: ARG004 - there are no cached keys
        sinks: Tensor | None = None,
        out: Inputs | None = None,  # noqa: ARG004 - out of place
    ) -> Tensor:
        """qkv [R, T, (H + 2K) * D] of R sequences of T tokens -> [R, T, H * D]."""
        rows, length, width = qkv.shape
        _, num_kv, _, head_dim = cache.keys.shape
        sizes = [width // head_dim - 2 * num_kv, num_kv, num_kv]
        heads = qkv.view(rows, length, -1, head_dim).transpose(1, 2)  # [R, H + 2K, T, D]
        q, k, v = heads.split_with_sizes(sizes, dim=1)
        if norms.q is not None:
            q = AutogradProductOps.rms_norm(q, RmsNorm(norms.q, norms.eps))
        if norms.k is not None:
            k = AutogradProductOps.rms_norm(k, RmsNorm(norms.k, norms.eps))
        q, k = (rotated(x, cast(WholeSequences, batch)).to(v.dtype) for x in (q, k))
        y = _attention(q, k, v, scoring, sinks)  # [R, H, T, D]
        return y.transpose(1, 2).reshape(rows, length, -1)


def rotated(x: Tensor, batch: WholeSequences) -> Tensor:
    """x [R, heads, T, D] after RoPE, in pairs (i, i + rotary_dim / 2)."""
    half = batch.cos.shape[1]
    a, b, unrotated = x.split_with_sizes([half, half, x.shape[3] - 2 * half], dim=3)
    cos, sin = batch.cos, batch.sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], dim=3)


def _attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Tensor | None) -> Tensor:
    """Causal attention over the last keys of the layer's window: [R, H, T, D]."""
    length, window, softcap = q.shape[2], scoring.window, scoring.softcap
    is_plain = not softcap and sinks is None
    if is_plain and (window == 0 or window >= length):
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=True
        )
    distance = torch.arange(length, device=q.device)
    distance = distance[:, None] - distance  # [T, T]
    is_visible = (distance >= 0) & (distance < window) if window else distance >= 0
    if is_plain:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=is_visible, scale=scoring.scale, enable_gqa=True
        )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scoring.scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
