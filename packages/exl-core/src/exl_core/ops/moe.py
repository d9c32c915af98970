"""Mixture of experts: the router, and the MLPs of the experts that it chooses for each row.

Dimensions: m rows, E experts, k experts per row, d hidden size, i width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from torch import Tensor

from exl_core.ops.elementwise import ActivationKind, GateKind, RmsNorm
from exl_core.ops.linear import PackedLinear

ScoreKind = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of `top_k` experts for each row, and their weights.

    scores      of all E logits: softmax over them, or the sigmoid of each
    groups      the experts are divided into as many groups of equal size. Only experts of the best
                `kept_groups` are chosen. The score of a group is the sum of its `group_scores` best
                scores; among equal groups the first is better
    normalizes  the chosen scores are divided by their sum plus `eps`
    factor      factor of the weights
    """

    top_k: int
    scores: ScoreKind = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_scores: int = 2
    normalizes: bool = True
    eps: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Experts of each row, int32 [m, k], best first, and their weights, float32 [m, k]."""

    ids: Tensor
    weights: Tensor


class PackedExperts(Protocol):
    """One matrix [out_features, in_features] of each of several experts; only the table that made
    it can read it."""

    @property
    def num_experts(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMlp:
    """gate_up [2i, d] of each expert, the gate first, down [d, i], and the gate's activation.

    If the experts are not `is_gated`, gate_up is up [i, d], and `kind` the activation of its
    outputs.
    """

    gate_up: PackedExperts
    down: PackedExperts
    kind: GateKind | ActivationKind
    is_gated: bool = True

    @property
    def gate(self) -> GateKind:
        """The activation of experts with a gate."""
        assert self.is_gated, "the caller has checked it"
        return cast(GateKind, self.kind)

    @property
    def activation(self) -> ActivationKind:
        """The activation of experts without a gate."""
        assert not self.is_gated, "the caller has checked it"
        return cast(ActivationKind, self.kind)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedExperts:
    """Experts that a router chooses from, and after them the `shared` parts of a shared expert,
    each as wide as an expert. Every row passes these.

    scores   [1, d]: a row's shared parts have the weight sigmoid(x @ scores); None: they have 1
    """

    experts: ExpertMlp
    shared: int
    scores: PackedLinear | None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """A norm, a router, its routing and bias, and the experts.

    `joined` are the experts with a shared expert, which is then computed too.
    """

    norm: RmsNorm
    router: PackedLinear
    routing: Routing
    bias: Tensor | None
    experts: ExpertMlp
    joined: JoinedExperts | None = None


class RoutedOps(Protocol):
    """Routes rows, and computes their experts."""

    def route(
        self, x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None
    ) -> Routed:
        """x [m, d] strided rows, w [E, d] with a bias of the logits or without -> experts.

        The k experts with the highest score plus `bias` (float32 [E]) are chosen; among equal ones,
        the one with the lower index. `bias` does not enter the weights. All of it is in float32. A
        row's result does not depend on the other rows.
        """
        ...

    def expert_mlp(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        """Sum over j of weights[:, j] * down(act(gate(x)) * up(x)) with the experts ids[:, j], or
        of weights[:, j] * down(act(up(x))) without a gate.

        x [m, d] strided rows -> [m, d], float32. The k parts of a row are added in an order that
        depends on the row alone. Roundings of x and of the activations are those of `linear`.
        """
        ...

    def add_experts_(self, x: Tensor, layer: ExpertLayer) -> Tensor:
        """x [m, d] float32 += expert_mlp(h, routed, experts), with h = rms_norm(x, norm) and
        routed = route(h, router, routing, bias).

        With `joined`, which `joins_experts` has to allow, its shared parts are added too.
        """
        ...

    def joins_experts(self, rows: int) -> bool:
        """Whether `add_experts_` computes a shared expert beside the others for `rows` rows."""
        ...


class MoeOps(RoutedOps, Protocol):
    """Groups the matrices of experts, routes rows, and computes their experts."""

    def stack(self, experts: Sequence[PackedLinear]) -> PackedExperts:
        """The experts' matrices, of equal sizes, as one operand. They are not copied."""
        ...

    def join_experts(
        self,
        experts: ExpertMlp,
        gate_up: PackedLinear,
        down: PackedLinear,
        scores: PackedLinear | None,
    ) -> JoinedExperts | None:
        """The experts and a shared expert as one operand, without copies. None if the table cannot
        join them, or computes them faster one after the other."""
        ...
