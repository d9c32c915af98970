"""Sums over GPUs in long passes, while this GPU computes the next product.

The rows of a pass are divided in halves. After the product of a half, a second stream sums it over
the ranks. Meanwhile the current stream computes the other half, and then the first half of the
next product, which needs that half's sums alone. So an exchange is hidden behind a product unless
it takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.peer_linears import PeerLinears, RowGroups
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm, XIelu
from exl_core.ops.linear import Inputs, PackedLinear

MIN_ROWS = 1536
"""Fewest rows that are divided. With fewer, halves use the GPU less well than they hide."""
_STEP = 128  # rows of a tile of products


class _Summed(NamedTuple):
    """States that a second stream sums over the ranks, and an event after each half."""

    target: Tensor
    halves: dict[range, torch.cuda.Event]


class OverlappedSums:
    """Sums of one GPU with those of other ranks. All ranks make the same calls."""

    def __init__(self, gpu: Gpu, linears: PeerLinears, reduce: Callable[[Tensor], Tensor]) -> None:
        """`reduce` sums a contiguous tensor over the ranks in place, on the current stream."""
        self._gpu = gpu
        self._linears = linears
        self._reduce = reduce
        self._side = torch.cuda.Stream(gpu.device)  # type: ignore[no-untyped-call]
        self._pending: _Summed | None = None

    def takes(self, x: Inputs, w: PackedLinear, residual: Tensor) -> bool:
        """Whether `multiply` takes these operands."""
        rows = len(residual)
        is_long = rows >= MIN_ROWS and isinstance(x, Tensor)
        return is_long and residual.is_contiguous() and self._linears.can_group(w, rows)

    def multiply(self, x: Tensor, w: PackedLinear, target: Tensor, *, is_added: bool) -> None:
        """target = x @ w, or += with `is_added`, summed over the ranks. Its values are there after
        `settle`, or for the next product of this object."""
        stream = torch.cuda.current_stream(self._gpu.device)
        halves: dict[range, torch.cuda.Event] = {}

        def after(rows: range) -> None:
            self._side.wait_event(_recorded(stream))
            with torch.cuda.stream(self._side):
                self._reduce(target[rows.start : rows.stop])
            halves[rows] = _recorded(self._side)

        groups = RowGroups(halves_of(len(target)), _nothing, after)
        self._linears.multiply_groups(x, w, target, groups, is_added=is_added)
        self._pending = _Summed(target, halves)

    def settle(self) -> None:
        """Makes the current stream wait for pending sums."""
        if self._pending is not None:
            for rows in self._pending.halves:
                self._wait(rows)
            self._pending = None

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None
    ) -> Tensor | None:
        """norm(x) @ w for pending sums x; None if they are not pending, or if this product cannot
        read them."""
        if not self._reads(x, w):
            return None
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features)
        self._multiply(x, norm, w, out)
        return out

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None
    ) -> Inputs | None:
        """The same for gated products."""
        if not isinstance(out, Tensor) or not self._reads(x, w):
            return None
        gate_up = self._gpu.empty(x.shape[0], w.out_features, dtype=torch.float16)
        self._multiply(x, norm, w, gate_up)
        self._linears.gate(gate_up, kind, out)
        return out

    def norm_activated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: ActivationKind, out: Inputs | None
    ) -> Inputs | None:
        """The same for activated products."""
        if isinstance(kind, XIelu) or not isinstance(out, Tensor) or not self._reads(x, w):
            return None
        y = self._gpu.empty(x.shape[0], w.out_features, dtype=torch.float16)
        self._multiply(x, norm, w, y)
        self._linears.activate(y, kind, out)
        return out

    def _reads(self, x: Tensor, w: PackedLinear) -> bool:
        is_pending = self._pending is not None and self._pending.target is x
        return is_pending and self._linears.can_group(w, len(x))

    def _multiply(self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor) -> None:
        groups = RowGroups(halves_of(len(x)), self._wait, _nothing)
        self._linears.multiply_groups(x, w, out, groups, norm=norm)
        self._pending = None

    def _wait(self, rows: range) -> None:
        assert self._pending is not None, "`_reads` has checked it"
        torch.cuda.current_stream(self._gpu.device).wait_event(self._pending.halves[rows])


def halves_of(rows: int) -> tuple[range, range]:
    """The rows of a pass in two parts, the first one in whole tiles."""
    middle = min(rows, -(-rows // 2 // _STEP) * _STEP)
    return range(middle), range(middle, rows)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _nothing(rows: range) -> None:
    """Nothing has to happen before or after a group of rows."""
