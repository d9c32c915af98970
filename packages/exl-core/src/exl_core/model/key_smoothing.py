"""Key smoothing: a per-head mean and scale folded out of keys before 4-bit quantization.

Two changes leave attention's output unchanged. Subtracting one vector from every key of a head
shifts all scores of a query by the same amount, which softmax ignores. Dividing an element of the
keys by a number and multiplying the same element of the queries by it leaves the dot product as it
is. Keys have large elements that hardly vary between tokens, so 4-bit codes represent the smoothed
keys with much less error.

The mean and the scale are measured once per model, on a fixed text. They do not depend on the first
request, so keys that different requests cache can be shared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exl_core.ops.attention import (
    NO_HEAD_NORMS,
    AttentionBatch,
    CacheLayer,
    HeadNorms,
    KeySmoothing,
    Scoring,
)
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import Inputs
from exl_core.ops.table import LayerOps, OpTable
from exl_core.ops.wrapped import WrappedOps

_EXPONENT = 0.25
"""Exponent of the ratio (standard deviation of the keys / RMS of the queries), per element. 1/2
would minimize the error if both were known exactly. They are estimated from a short text, so the
exponent is smaller."""

_MAX_SCALE = 8.0

SAMPLE_POSITION_RANGE = 2048
"""The sample text's tokens get RoPE positions spread evenly over this range. At consecutive
positions, elements that rotate slowly would look as constant as those that do not rotate at all."""


def power_of(queries: Tensor, kv_heads: int) -> Tensor:
    """Mean square of each element of one text's queries [n, H, D], by the key head that they read:
    float64 [K, D]."""
    # The first token is left out: it is an attention sink, and its key is an outlier.
    group, d = queries.shape[1] // kv_heads, queries.shape[2]
    heads = queries[1:].double().view(-1, kv_heads, group, d)
    return heads.square().mean((0, 2))


def fit_key_smoothing(
    queries: Tensor, keys: Tensor, *, is_shifted: bool, query_power: Tensor | None = None
) -> KeySmoothing:
    """Fit to one text's queries [n, H, D] and keys [n, K, D], taken after RoPE.

    With `is_shifted`, the keys' mean is subtracted, which preserves the differences between a
    query's scores. Without it, the scores themselves are preserved. `query_power` [K, D] replaces
    `power_of` these queries, where there are more queries than these.
    """
    _, kv_heads, _ = keys.shape
    group = queries.shape[1] // kv_heads
    if query_power is None:
        query_power = power_of(queries, kv_heads)
    keys = keys[1:].double()  # without the first token, as `power_of`
    mean = keys.mean(0) if is_shifted else torch.zeros_like(keys[0])
    key_variance = (keys - mean).square().mean(0)  # [K, D]
    tiny = torch.finfo(torch.float32).tiny
    divisor = ((key_variance + tiny) / (query_power + tiny)).pow(_EXPONENT / 2)
    divisor /= divisor.log().mean(-1, keepdim=True).exp()
    divisor.clamp_(1 / _MAX_SCALE, _MAX_SCALE)
    query_scale = divisor.repeat_interleave(group, dim=0)  # [H, D]
    scale = torch.cat([query_scale, 1 / divisor]).flatten().float()
    shift = torch.cat([torch.zeros_like(query_scale), -mean / divisor]).flatten().float()
    return KeySmoothing(scale, shift)


class KeySmoothingOps(WrappedOps):
    """Fits the key smoothing of one layer during one pass over one sequence from its start."""

    def __init__(
        self,
        inner: LayerOps,
        ops: OpTable,
        angles: tuple[Tensor, Tensor] | None,
        found: Callable[[KeySmoothing], None],
        whole_power: Callable[[Tensor], Tensor],
    ) -> None:
        """`angles`: cos and sin of the layer's RoPE for the rows of the pass; None: no RoPE.
        `found` receives the fit. `whole_power` gets `power_of` the queries of the pass, and returns
        that of all queries that read the same keys."""
        super().__init__(inner)
        self._ops = ops
        self._angles = angles
        self._found = found
        self._whole_power = whole_power

    def attend_(
        self,
        qkv: Tensor,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        *,
        norms: HeadNorms = NO_HEAD_NORMS,
        smoothing: KeySmoothing | None = None,
        sinks: Tensor | None = None,
        out: Inputs | None = None,
    ) -> Inputs:
        num_kv, head_dim = cache.keys.shape[1], cache.keys.shape[3]  # of a float32 cache
        heads = qkv.float().clone().view(len(qkv), -1, head_dim)  # [n, H + 2K, D]
        queries, keys = heads[:, : -2 * num_kv], heads[:, -2 * num_kv : -num_kv]
        for x, weight in ((queries, norms.q), (keys, norms.k)):
            if weight is not None:
                self._ops.rms_norm_heads_(x, RmsNorm(weight, norms.eps))
            if self._angles is not None:
                self._ops.rope_(x, *self._angles)
        # A shift of the keys adds the same number to all scores of a query. It may do so only if
        # nothing but the differences between them counts.
        is_shifted = not scoring.softcap and sinks is None
        power = self._whole_power(power_of(queries, num_kv))
        self._found(fit_key_smoothing(queries, keys, is_shifted=is_shifted, query_power=power))
        return self.inner.attend_(
            qkv, batch, cache, scoring, norms=norms, smoothing=smoothing, sinks=sinks, out=out
        )
