"""Recurrent mixers: causal convolutions, the gated delta rule, and the state scan of Mamba-2.

Each keeps a state of fixed size per sequence, in a slot of a float32 tensor that the op updates in
place. A sequence without cached tokens starts from zeros, whatever its slot contains. A row's
result depends on the earlier rows of its own sequence and on nothing else. `cpu` and `cuda` may
compute rows of a call in chunks of tokens, which begin where those rows begin. So the rounding may
depend on the division of a sequence into calls, unless the table is batch-invariant.

Dimensions: R rows, S slots, C channels, T taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

L2_EPS = 1e-6
"""Added to the sum of squares when queries and keys of the delta rule are normalized."""


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Rows of each sequence, and the slot of its state.

    row_starts int32 [seqs + 1], past_lens int32 [seqs], slots int64 [seqs]. Sequence s has the rows
    row_starts[s] to row_starts[s + 1] - 1. Its slot holds its state after past_lens[s] tokens. No
    two sequences have the same slot, except those without rows and padding.

    The three may be on the CPU. Those of a captured graph are on its device, where its padding rows
    from row_starts[seqs] on belong to no sequence; their results are zeros.
    """

    row_starts: Tensor
    past_lens: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Causal convolution of each channel by itself: weight [T, C], the newest input's factor last,
    and a bias [C] or None. `has_silu`: the result passes SiLU."""

    weight: Tensor
    bias: Tensor | None
    has_silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """Numbers of a gated delta rule. Its value heads share the key heads.

    decay    exp(A_log) by value head; dt_bias likewise
    is_tiled value head h uses key head h % key_heads, rather than h // (value_heads / key_heads)
    is_by_row  each row of the state decays by itself (Kimi delta attention): a and dt_bias have
             key_dim numbers of each value head
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay: Tensor
    dt_bias: Tensor
    is_tiled: bool = False
    is_by_row: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StateScan:
    """Numbers of a scan of Mamba-2. Its heads share B and C in groups of heads.

    decay  exp(A_log) by head; dt_bias likewise; skip is the factor of the inputs (D)
    steps  least and largest step after softplus
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    steps: tuple[float, float]


class RecurrentOps(Protocol):
    """Mixers with a state of fixed size."""

    def causal_conv(self, x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        """x [R, C] strided rows -> y [R, C]; y[p] = sum of weight[t] * x[p - T + 1 + t], plus bias.

        states [S, T - 1, C] hold the last T - 1 inputs of each sequence, the newest last.
        """
        ...

    def delta_rule(
        self, qkv: Tensor, ba: Tensor, rule: DeltaRule, states: Tensor, rows: StateRows
    ) -> Tensor:
        """qkv [R, 2 * key_heads * key_dim + value_heads * value_dim], ba [R, 2 * value_heads] (b
        first), strided rows -> o [R, value_heads * value_dim]. If the rule `is_by_row`, ba is
        [R, value_heads + value_heads * key_dim], and exp(g) has a number of each row of S.

        Queries and keys are divided by sqrt(sum of squares + L2_EPS), and queries by sqrt(key_dim).
        With g = -decay * softplus(a + dt_bias) and beta = sigmoid(b), for each token of a head:
        S = exp(g) * S; S = S + k (beta * (v - S^T k))^T; o = S^T q.

        states [S, value_heads, key_dim, value_dim].
        """
        ...

    def state_scan(
        self, xbc: Tensor, dt: Tensor, scan: StateScan, states: Tensor, rows: StateRows
    ) -> Tensor:
        """xbc [R, heads * head_dim + 2 * groups * state_size] (x, B, C), dt [R, heads], strided
        rows -> y [R, heads * head_dim].

        With d = clamp(softplus(dt + dt_bias), steps), for each token of a head:
        h = exp(-decay * d) * h + d * x B^T; y = h C + skip * x.

        states [S, heads, head_dim, state_size].
        """
        ...
