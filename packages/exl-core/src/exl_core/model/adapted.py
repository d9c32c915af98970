"""Adds LoRA deltas to the rows of a batch that use adapters.

`AdaptedOps` wraps the op table of a layer; embedding and head have functions of their own. Each
range of rows is multiplied by its own low-rank pair. One pass therefore serves rows with
different adapters, and rows without adapters get the same results as in a pass without any: the
same bits if the op table is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from exl_core.model.adapters import AdapterUse, Delta
from exl_core.model.batch import AdapterRows, Batch
from exl_core.model.layers.residual import normed
from exl_core.model.layers.steps import Steps, with_ops
from exl_core.model.weights import BlockWeights
from exl_core.ops.elementwise import ActivationKind, GateKind, Gating, Norm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.table import LayerOps, OpTable
from exl_core.ops.wrapped import WrappedOps, unmarked

FIXED_ROWS = 64
"""Rows of torch's products in the batch-invariant mode. The order in which it sums depends on the
number of rows."""


class AdaptedOps(WrappedOps):
    """Adds the adapters' deltas to the products of one layer's packed matrices."""

    def __init__(
        self,
        inner: LayerOps,
        ops: OpTable,
        adapters: Sequence[AdapterRows],
        layer: int,
        block: BlockWeights,
    ) -> None:
        super().__init__(inner)
        self._ops = ops
        self._adapters = adapters
        self._layer = layer
        self._names = {id(unmarked(matrix)): name for name, matrix in block.matrices.items()}

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:  # noqa: ARG002
        """`plain`: deltas need the inputs as a tensor."""
        return plain

    def gate_heads(
        self,
        x: Tensor,
        gate: Tensor,
        gating: Gating,
        to: PackedLinear | None = None,  # noqa: ARG002 - as above
    ) -> Inputs:
        return self.inner.gate_heads(x, gate, gating)

    def attend_latent(self, *operands: Any, **named: Any) -> Inputs:
        return self.inner.attend_latent(*operands, **{**named, "to": None})  # as above

    def joins_experts(self, rows: int) -> bool:  # noqa: ARG002
        return False  # an adapter may change the shared expert

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        y = self.inner.linear(x, w)
        self._add_deltas(y, x, w)
        return y

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        residual = self.inner.linear_add_(x, w, residual)
        self._add_deltas(residual, cast(Tensor, x), w)
        return residual

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        y = self.inner.norm_linear(x, norm, w, out)
        if self._is_adapted(w):
            self._add_deltas(y, normed(self.inner, x, norm), w)
        return y

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        if not self._is_adapted(w):
            return self.inner.norm_gated_linear(x, norm, w, kind, out)
        if not self._ops.is_batch_invariant:
            return self.inner.gated_activation(self.norm_linear(x, norm, w), kind)
        # The fused op may round differently. Rows without adapters always get its results.
        gated = cast(Tensor, self.inner.norm_gated_linear(x, norm, w, kind, out))
        for part, y in self._adapted_parts(x, norm, w):
            gated[part] = self.inner.gated_activation(y, kind)
        return gated

    def norm_activated_linear(
        self,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,
    ) -> Inputs:
        if not self._is_adapted(w):
            return self.inner.norm_activated_linear(x, norm, w, kind, out)
        if not self._ops.is_batch_invariant:
            return self.inner.activation(self.norm_linear(x, norm, w), kind)
        active = cast(Tensor, self.inner.norm_activated_linear(x, norm, w, kind, out))
        for part, y in self._adapted_parts(x, norm, w):
            active[part] = self.inner.activation(y, kind)
        return active

    def _adapted_parts(
        self, x: Tensor, norm: Norm, w: PackedLinear
    ) -> Iterator[tuple[slice, Tensor]]:
        """norm(x) @ w with its deltas, for each range of rows whose adapters change w."""
        for rows in self._adapters:
            if self._changes(rows, w):
                part = slice(rows.first_row, rows.last_row)
                y = self.inner.norm_linear(x[part], norm, w)
                self._add_deltas_of(rows, y, normed(self.inner, x[part], norm), w)
                yield part, y

    def _is_adapted(self, w: PackedLinear) -> bool:
        """Whether an adapter of any row changes this matrix."""
        return any(self._changes(rows, w) for rows in self._adapters)

    def _changes(self, rows: AdapterRows, w: PackedLinear) -> bool:
        return any(self._deltas(use, w) for use in rows.uses)

    def _add_deltas(self, y: Tensor, x: Tensor, w: PackedLinear) -> None:
        """y [R, out_features] += deltas of each row's adapters to w, for its inputs x [R, k]."""
        for rows in self._adapters:
            part = slice(rows.first_row, rows.last_row)
            self._add_deltas_of(rows, y[part], x[part], w)

    def _add_deltas_of(self, rows: AdapterRows, y: Tensor, x: Tensor, w: PackedLinear) -> None:
        """The same for the outputs y and inputs x of one range of rows."""
        for use in rows.uses:
            for delta in self._deltas(use, w):
                _add(self._ops, y, _reduced(self._ops, x, delta), delta, use.scale)

    def _deltas(self, use: AdapterUse, w: PackedLinear) -> tuple[Delta, ...]:
        """The adapter's deltas to a matrix; none to a router, which is not among the names."""
        name = self._names.get(id(w))
        return () if name is None else use.adapter.deltas(self._layer, name)


def adapted(steps: Steps, adapters: Sequence[AdapterRows], table: OpTable) -> Steps:
    """The same steps with the adapters of each row; without adapters, `steps` itself. `table` is
    the op table that the steps get, perhaps wrapped."""
    if not adapters:
        return steps

    def wrap(ops: LayerOps, layer: int, block: BlockWeights) -> LayerOps:
        return AdaptedOps(ops, table, adapters, layer, block)

    return with_ops(steps, wrap)


def adapt_embedding_(x: Tensor, batch: Batch, ops: OpTable) -> None:
    """Applies the adapters' embeddings and embedding deltas to x [R, hidden], in place.

    Runs before the family's embedding scale. If several adapters of a row bring an embedding, the
    first adapter's is used.
    """
    token_ids = batch.token_ids.to(x.device)
    for first_row, last_row, uses in batch.adapters:
        part = slice(first_row, last_row)
        ends = [(use.adapter.ends, use.scale) for use in uses]
        own = next((e.embed for e, _ in ends if e is not None and e.embed is not None), None)
        if own is not None:
            x[part] = ops.embedding(token_ids[part], own)
        for end, scale in ends:
            if end is not None and end.embed_delta is not None:
                picked = end.embed_delta.down.index_select(0, token_ids[part])
                _add(ops, x[part], picked, end.embed_delta, scale)


class HeadRows(NamedTuple):
    """Logits first .. last - 1 (indices into `logit_rows`) use this head, plus the deltas."""

    first: int
    last: int
    head: PackedLinear
    deltas: tuple[tuple[Delta, float], ...]


def head_rows(batch: Batch, base: PackedLinear) -> list[HeadRows]:
    """Ranges that cover all logits, in order, each with its head and deltas.

    If several adapters of a row bring a head, the first adapter's is used.
    """
    found: list[HeadRows] = []
    done, count = 0, batch.logit_rows.shape[0]
    for first_row, last_row, uses in batch.adapters:
        ends = [(use.adapter.ends, use.scale) for use in uses]
        head = next((e.head for e, _ in ends if e is not None and e.head is not None), base)
        deltas = tuple(
            (end.head_delta, scale)
            for end, scale in ends
            if end is not None and end.head_delta is not None
        )
        if head is base and not deltas:
            continue
        bounds = torch.tensor([first_row, last_row])
        first, last = torch.searchsorted(batch.logit_rows, bounds).tolist()
        if done < first:
            found.append(HeadRows(done, first, base, ()))
        if first < last:
            found.append(HeadRows(first, last, head, deltas))
        done = max(done, last)
    if done < count or not found:
        found.append(HeadRows(done, count, base, ()))
    return found


def add_to_logits_(
    ops: OpTable, logits: Tensor, x: Tensor, deltas: Sequence[tuple[Delta, float]]
) -> None:
    """logits [n, vocab_size] += these head deltas for the normed states x [n, hidden]."""
    for delta, scale in deltas:
        _add(ops, logits, _reduced(ops, x, delta), delta, scale)


def _reduced(ops: OpTable, x: Tensor, delta: Delta) -> Tensor:
    """x [m, in_features] @ down, float32 [m, r]."""
    x = x.to(delta.down.dtype)
    if not ops.is_batch_invariant:
        return x @ delta.down
    if delta.linears is not None:
        return ops.linear(x, delta.linears[0])
    return _fixed_product(x, delta.down)


def _add(ops: OpTable, y: Tensor, h: Tensor, delta: Delta, scale: float) -> None:
    """y [m, out_features] += scale * (h [m, r] @ up), in the columns of the delta."""
    columns = y[:, delta.first_out : delta.first_out + delta.up.shape[1]]
    if ops.is_batch_invariant:
        linear = None if delta.linears is None else delta.linears[1]
        product = _fixed_product(h, delta.up) if linear is None else ops.linear(h, linear)
        columns += product.mul_(scale)
    elif columns.dtype is h.dtype:
        columns.addmm_(h, delta.up, alpha=scale)
    else:
        columns += (h @ delta.up).mul_(scale)


def _fixed_product(x: Tensor, w: Tensor) -> Tensor:
    """x [m, k] @ w, in chunks of exactly `FIXED_ROWS` rows; missing rows are zeros."""
    parts = []
    for rows in torch.split(x, FIXED_ROWS):
        padded = x.new_zeros(FIXED_ROWS, x.shape[1])
        padded[: rows.shape[0]] = rows
        parts.append((padded @ w)[: rows.shape[0]])
    return torch.cat(parts)
