"""Latent attention of the reference table, in its absorbed form and in its expanded form."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from exl_core.ops.attention import AttentionBatch, CacheLayer, Scoring
from exl_core.ops.backends.latent import AbsorbedLatentOps
from exl_core.ops.backends.reference.attention import PlainBatch, ReferenceAttentionOps, gather
from exl_core.ops.backends.reference.elementwise import ReferenceElementwiseOps
from exl_core.ops.checks import F32, check, check_contiguous
from exl_core.ops.latent import DenseHeads, HeadMatrices, HeadUp


class ReferenceLatentOps(AbsorbedLatentOps):
    """LatentOps and HeadOps in plain torch. The table attends in the absorbed form; the other one
    is there for comparison."""

    @staticmethod
    def new_head_linear(weight: Tensor) -> DenseHeads:
        return DenseHeads(weight.clone())

    @staticmethod
    def head_linear(x: Tensor, w: HeadMatrices, out: Tensor | None = None) -> Tensor:
        weight = cast(DenseHeads, w).weight
        heads, n, k = weight.shape
        check("head_linear", "x", x, F32, None, heads, k)
        check_contiguous("head_linear", "x", x, 2)
        y = torch.einsum("mhk,hnk->mhn", x.double(), weight.double()).float()
        if out is None:
            return y
        check("head_linear", "out", out, F32, x.shape[0], heads, n)
        return out.copy_(y)

    @staticmethod
    def attend_expanded(
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: HeadUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
    ) -> Tensor:
        """`attend_latent` with the keys and values of all heads, in float64."""
        of = cast(PlainBatch, batch)
        keys_up, values_up = (cast(DenseHeads, w).weight.double() for w in (up.keys, up.values))
        rows, heads, rotated = q.shape[0], up.keys.num_heads, key.shape[1]
        row = torch.cat([key, latent], 1).unsqueeze(1)  # [R, 1, p + r]
        ReferenceElementwiseOps.rope_(row, of.cos, of.sin)
        ReferenceAttentionOps.write_kv(row, row, cache, of.slots)
        split = q.view(rows, heads, -1)
        plain, turned = split[..., :-rotated], split[..., -rotated:].contiguous()
        ReferenceElementwiseOps.rope_(turned, of.cos, of.sin)
        queries = torch.cat([plain, turned], -1).double().transpose(0, 1)  # [H, R, n + p]
        out = torch.empty(rows, heads, values_up.shape[1])
        for seq, pages in enumerate(of.rows.page_table):
            first, last = int(of.rows.row_starts[seq]), int(of.rows.row_starts[seq + 1])
            end = int(of.rows.past_lens[seq]) + last - first
            cached = gather(cache.keys, pages, end)[0]  # [end, p + r]
            k, c = cached[:, :rotated], cached[:, rotated:]
            own = torch.einsum("tr,hrn->htn", c, keys_up)
            keys = torch.cat([own, k.expand(heads, -1, -1)], -1)  # [H, end, n + p]
            scores = queries[:, first:last] @ keys.transpose(1, 2) * scoring.scale
            position = torch.arange(end - (last - first), end)[:, None]
            scores = scores.masked_fill(torch.arange(end) > position, -torch.inf)
            values = torch.einsum("tr,hvr->htv", c, values_up)
            out[first:last] = (scores.softmax(-1) @ values).transpose(0, 1)
        return out.flatten(1)
