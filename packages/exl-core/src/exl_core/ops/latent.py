"""Attention to latent vectors: multi-head latent attention (MLA), DeepSeek-V2, arXiv 2405.04434.

The keys and values of all heads are linear in one latent vector c [r] per position. A key head is
[keys[h] c | k], where k [p] is rotated and the same for all heads, and a value head is values[h] c.
Two forms of the same sums:

  absorbed  A query [n | p] of head h becomes [p | keys[h]^T n], which is multiplied with the cached
            row [k | c] itself. The weighted sum of the c's is multiplied with values[h] at the end.
            All heads read the same row: one key-value head of p + r elements.
  expanded  Keys and values of all heads are computed for every position. A score then takes n + p
            products instead of p + r, which pays for prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exl_core.ops.attention import AttentionBatch, CacheLayer, Scoring
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear


class HeadMatrices(Protocol):
    """One dense matrix [n, k] per head, in a table's run-time form."""

    @property
    def num_heads(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseHeads:
    """Dense matrices [heads, n, k] as one tensor, for backends that multiply so."""

    weight: Tensor

    @property
    def num_heads(self) -> int:
        return self.weight.shape[0]

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes


class LatentUp(Protocol):
    """Matrices from a latent vector to keys and values, in a table's run-time form."""

    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadUp:
    """LatentUp of tables with a cache: keys [heads, r, n], from a query to a query for latent
    vectors, and values [heads, v, r]. A table that has the expanded form keeps the transposes of
    `keys` too: expanded_keys [heads, n, r]."""

    keys: HeadMatrices
    values: HeadMatrices
    expanded_keys: HeadMatrices | None = None

    @property
    def size_bytes(self) -> int:
        more = 0 if self.expanded_keys is None else self.expanded_keys.size_bytes
        return self.keys.size_bytes + self.values.size_bytes + more


class LatentOps(Protocol):
    """Latent attention as the layers call it."""

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
        """Latent attention between its projections: [rows, heads * v].

        q [rows, heads * (n + p)] strided rows: of each head the part without RoPE, then the other.
        latent [rows, r]; key [rows, p] strided rows, before RoPE. `cache` is shared
        (`CacheLayer.is_shared`), with one head of p + r elements. Writes the rows [key | latent] to
        the cache, and attends like `attend_`, with RoPE of the first elements of a row.

        norm   of `latent`, which is as it is without one
        to     the matrix that reads the result, which may then be in the form that its kernel reads
        """
        ...


class HeadOps(Protocol):
    """Products of each head with a matrix of its own."""

    def new_head_linear(self, weight: Tensor) -> HeadMatrices:
        """Packs dense matrices [heads, n, k]. A GPU rounds them to float16."""
        ...

    def head_linear(self, x: Tensor, w: HeadMatrices, out: Tensor | None = None) -> Tensor:
        """x [m, heads, k] -> [m, heads, n], each head times its matrix; written to `out` if given,
        which is then returned. Rows and heads of both may be farther apart than their length. All
        heads of x may be the same memory."""
        ...

    def new_latent_up(self, keys: Tensor, values: Tensor) -> HeadUp:
        """Packs the dense matrices keys [heads, r, n] and values [heads, v, r]."""
        ...
