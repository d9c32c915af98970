"""Base of op tables that change some ops of another table and pass the rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from exl_core.ops.attention import (
    NO_HEAD_NORMS,
    AttentionBatch,
    CacheLayer,
    HeadNorms,
    KeySmoothing,
    Scoring,
)
from exl_core.ops.elementwise import ActivationKind, GateKind, Gating, LayerNorm, Norm, RmsNorm
from exl_core.ops.latent import LatentUp
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.moe import ExpertLayer, ExpertMlp, Routed, Routing
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan, Taps
from exl_core.ops.table import LayerOps


@dataclass(frozen=True, slots=True, eq=False)
class MarkedLinear:
    """A matrix that a `WrappedOps` recognizes. Its `inner` table gets `part` instead."""

    part: PackedLinear

    @property
    def out_features(self) -> int:
        return self.part.out_features

    @property
    def in_features(self) -> int:
        return self.part.in_features

    @property
    def size_bytes(self) -> int:
        return self.part.size_bytes


def unmarked(w: PackedLinear) -> PackedLinear:
    return w.part if isinstance(w, MarkedLinear) else w


class WrappedOps:
    """LayerOps of the table `inner`, for subclasses to change."""

    def __init__(self, inner: LayerOps) -> None:
        self.inner = inner

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        return self.inner.linear(x, w)

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        return self.inner.inputs_for(w, plain)

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        return self.inner.linear_add_(x, w, residual)

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        return self.inner.norm_linear(x, norm, w, out)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        return self.inner.norm_gated_linear(x, norm, w, kind, out)

    def norm_activated_linear(
        self,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,
    ) -> Inputs:
        return self.inner.norm_activated_linear(x, norm, w, kind, out)

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
        return self.inner.attend_(
            qkv, batch, cache, scoring, norms=norms, smoothing=smoothing, sinks=sinks, out=out
        )

    def attend_latent(
        self,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: LatentUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        norm: RmsNorm | None = None,
        to: PackedLinear | None = None,
    ) -> Inputs:
        return self.inner.attend_latent(
            *(q, latent, key, up),
            batch=batch,
            cache=cache,
            scoring=scoring,
            norm=norm,
            to=None if to is None else unmarked(to),
        )

    def route(
        self, x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None
    ) -> Routed:
        return self.inner.route(x, w, routing, bias)

    def expert_mlp(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        return self.inner.expert_mlp(x, routed, experts)

    def add_experts_(self, x: Tensor, layer: ExpertLayer) -> Tensor:
        return self.inner.add_experts_(x, layer)

    def joins_experts(self, rows: int) -> bool:
        return self.inner.joins_experts(rows)

    def causal_conv(self, x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        return self.inner.causal_conv(x, taps, states, rows)

    def delta_rule(
        self, qkv: Tensor, ba: Tensor, rule: DeltaRule, states: Tensor, rows: StateRows
    ) -> Tensor:
        return self.inner.delta_rule(qkv, ba, rule, states, rows)

    def state_scan(
        self, xbc: Tensor, dt: Tensor, scan: StateScan, states: Tensor, rows: StateRows
    ) -> Tensor:
        return self.inner.state_scan(xbc, dt, scan, states, rows)

    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor:
        return self.inner.rms_norm(x, norm)

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        return self.inner.layer_norm(x, norm)

    def activation(self, x: Tensor, kind: ActivationKind) -> Tensor:
        return self.inner.activation(x, kind)

    def gated_activation(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        return self.inner.gated_activation(gate_up, kind)

    def gate_heads(
        self, x: Tensor, gate: Tensor, gating: Gating, to: PackedLinear | None = None
    ) -> Inputs:
        return self.inner.gate_heads(x, gate, gating, None if to is None else unmarked(to))

    def add_(self, residual: Tensor, y: Tensor) -> Tensor:
        return self.inner.add_(residual, y)


if TYPE_CHECKING:

    def _is_complete(ops: WrappedOps) -> LayerOps:
        return ops
