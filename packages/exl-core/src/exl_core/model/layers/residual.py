"""The borders of a layer's parts: how a part reads the residual stream, and how it adds to it.

Every kind of part uses these functions, so that the choices of a family that concern the residual
stream (placement and kind of norms) are made here.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from exl_core.model.weights import BlockWeights, GatedMixerWeights, RecurrentWeights
from exl_core.ops.elementwise import ActivationKind, GateKind, Gating, Norm, RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.table import LayerOps


def normed(ops: LayerOps, x: Tensor, norm: Norm) -> Tensor:
    """norm(x) [R, hidden]."""
    return ops.rms_norm(x, norm) if isinstance(norm, RmsNorm) else ops.layer_norm(x, norm)


def read_linear(
    ops: LayerOps, x: Tensor, norm: Norm | None, w: PackedLinear, out: Tensor | None = None
) -> Tensor:
    """norm(x) @ w; x @ w if the part has no norm before it."""
    return ops.linear(x, w) if norm is None else ops.norm_linear(x, norm, w, out)


def read_gated_linear(
    ops: LayerOps,
    x: Tensor,
    norm: Norm | None,
    w: PackedLinear,
    kind: GateKind,
    *,
    out: Inputs | None = None,
) -> Inputs:
    """The gated activation of norm(x) @ w, or of x @ w."""
    if norm is None:
        return ops.gated_activation(ops.linear(x, w), kind)
    return ops.norm_gated_linear(x, norm, w, kind, out)


def read_activated_linear(
    ops: LayerOps,
    x: Tensor,
    norm: Norm | None,
    w: PackedLinear,
    kind: ActivationKind,
    *,
    out: Inputs | None = None,
) -> Inputs:
    """The activation of norm(x) @ w, or of x @ w."""
    if norm is None:
        return ops.activation(ops.linear(x, w), kind)
    return ops.norm_activated_linear(x, norm, w, kind, out)


def inputs_buffer(ops: LayerOps, w: PackedLinear, plain: Tensor, post_norm: Norm | None) -> Inputs:
    """Buffer for the inputs of the matrix `w` whose outputs `add_output` adds: `plain` [R, k], or
    one in the form that the kernel of `w` prefers."""
    return ops.inputs_for(w, plain) if post_norm is None else plain


def gated_inputs(
    ops: LayerOps,
    h: Tensor,
    gate: Tensor,
    gating: Gating,
    w: PackedLinear,
    *,
    post_norm: Norm | None,
) -> Inputs:
    """Inputs of the matrix `w` whose outputs `add_output` adds: heads h [R, k] times their gates
    [R, k], or times one gate per row [R, 1]."""
    return ops.gate_heads(h, gate, gating, w if post_norm is None else None)


def add_output(
    ops: LayerOps, x: Tensor, h: Inputs, w: PackedLinear, post_norm: Norm | None
) -> Tensor:
    """x [R, hidden] plus the output h @ w of a part, after `post_norm` if there is one."""
    if post_norm is None:
        return ops.linear_add_(h, w, x)
    y = ops.linear(cast(Tensor, h), w)  # [R, hidden]
    return ops.add_(x, normed(ops, y, post_norm))


def add_gated(ops: LayerOps, x: Tensor, h: Tensor, gate: Tensor, block: BlockWeights) -> Tensor:
    """x [R, hidden] plus the output of a recurrent mixer with heads h [R, narrow.in_features] and
    their gates."""
    weights = cast(GatedMixerWeights, block.mixer)
    to, post_norm = weights.narrow, weights.post_norm
    inputs = gated_inputs(ops, h, gate, weights.gating, to, post_norm=post_norm)
    return add_output(ops, x, inputs, to, post_norm)


def add_mixed(ops: LayerOps, x: Tensor, h: Inputs, block: BlockWeights) -> Tensor:
    """x [R, hidden] plus the output of a recurrent mixer, for inputs h [R, narrow.in_features] of
    its last matrix."""
    weights = cast(RecurrentWeights, block.mixer)
    return add_output(ops, x, h, weights.narrow, weights.post_norm)
