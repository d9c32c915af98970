"""Latent attention in its absorbed form, for tables that have paged attention."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from exl_core.ops.attention import AttendOps, AttentionBatch, CacheLayer, Scoring
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.latent import HeadOps, HeadUp, LatentUp
from exl_core.ops.linear import PackedLinear


class _Table(AttendOps, HeadOps, Protocol):
    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor: ...
    def activations(self, rows: int, columns: int) -> Tensor: ...


class AbsorbedLatentOps:
    """LatentOps in terms of `head_linear` and `attend_`."""

    def new_latent_up(self: HeadOps, keys: Tensor, values: Tensor) -> HeadUp:
        return HeadUp(self.new_head_linear(keys), self.new_head_linear(values))

    def attend_latent(
        self: _Table,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: LatentUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        norm: RmsNorm | None = None,
        to: PackedLinear | None = None,  # noqa: ARG002 - all matrices take tensors
    ) -> Tensor:
        latent = latent if norm is None else self.rms_norm(latent, norm)
        return attend_absorbed(
            self, q, latent, key, cast(HeadUp, up), batch=batch, cache=cache, scoring=scoring
        )


def attend_absorbed(
    table: _Table,
    q: Tensor,
    latent: Tensor,
    key: Tensor,
    up: HeadUp,
    *,
    batch: AttentionBatch,
    cache: CacheLayer,
    scoring: Scoring,
) -> Tensor:
    rows, heads, rotated = q.shape[0], up.keys.num_heads, key.shape[1]
    width = rotated + latent.shape[1]
    q = q.view(rows, heads, -1)  # [R, H, n + p]
    plain = q.shape[2] - rotated
    qkv = table.activations(rows, (heads + 1) * width)
    parts = qkv.view(rows, heads + 1, width)
    parts[:, :heads, :rotated].copy_(q[..., plain:])
    table.head_linear(q[..., :plain], up.keys, parts[:, :heads, rotated:])
    parts[:, heads, :rotated].copy_(key)
    parts[:, heads, rotated:].copy_(latent)
    mixed = cast(Tensor, table.attend_(qkv, batch, cache, scoring))  # [R, H * width]
    latents = mixed.view(rows, heads, width)[..., rotated:]  # [R, H, r]
    return table.head_linear(latents, up.values).flatten(1)
