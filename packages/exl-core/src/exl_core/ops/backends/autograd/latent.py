"""Latent attention of the autograd backend, in its expanded form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from exl_core.ops.attention import AttentionBatch, CacheLayer, Scoring
from exl_core.ops.backends.autograd.attention import WholeSequences, rotated
from exl_core.ops.backends.autograd.linear import AutogradProductOps, RoleMatrices
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.latent import LatentUp
from exl_core.ops.linear import PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class RoleUp:
    """LatentUp: one matrix from a latent vector to the key and the value of each head, in turn.
    `plain` is the size of a key without RoPE, `value` that of a value."""

    matrix: RoleMatrices
    plain: int
    value: int

    @property
    def size_bytes(self) -> int:
        return 0


class AutogradLatentOps:
    """LatentOps in plain torch, out of place."""

    @staticmethod
    def attend_latent(
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: LatentUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,  # noqa: ARG004 - there is none
        scoring: Scoring,
        norm: RmsNorm | None = None,
        to: PackedLinear | None = None,  # noqa: ARG004 - all matrices take tensors
    ) -> Tensor:
        """q [R, T, H * (n + p)], latent [R, T, r], key [R, T, p] -> [R, T, H * v]."""
        if norm is not None:
            latent = AutogradProductOps.rms_norm(latent, norm)
        own, angles = cast(RoleUp, up), cast(WholeSequences, batch)
        both = AutogradProductOps.linear(latent, own.matrix)  # [R, T, H * (n + v)]
        both = both.view(*both.shape[:2], -1, own.plain + own.value).transpose(1, 2)
        k, v = both.split_with_sizes([own.plain, own.value], -1)  # [R, H, T, n], [R, H, T, v]
        heads = q.view(*q.shape[:2], k.shape[1], -1).transpose(1, 2)  # [R, H, T, n + p]
        plain, turned = heads.split_with_sizes([own.plain, key.shape[-1]], -1)
        shared = rotated(key.unsqueeze(1), angles).expand(*k.shape[:3], -1)
        queries = torch.cat([plain, rotated(turned, angles)], -1).to(v.dtype)
        keys = torch.cat([k, shared.to(k.dtype)], -1)
        y = scaled_dot_product_attention(queries, keys, v, is_causal=True, scale=scoring.scale)
        return y.transpose(1, 2).flatten(-2)
