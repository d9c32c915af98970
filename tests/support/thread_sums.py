"""`PeerSums` among ranks that are threads, for passes through shared memory without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from exl_core.model.layers.residual import read_linear
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.table import OpTable
from exl_core.parallel.model import RankTransformer
from exl_core.parallel.peers import PeerExchange
from exl_core.session.load import LoadOptions
from exl_core.session.open import open_model
from support.thread_ranks import ThreadExchange, logits_of, on_ranks, rank_model

T = TypeVar("T")


class _Pending(NamedTuple):
    x: Tensor | None
    target: Tensor
    total: Tensor


class ThreadSums:
    """Sums of one rank. A target is NaN until its sum is complete, so that an op that reads it too
    early is noticed. Every other product and every third reader is one that the kernels refuse."""

    ops: OpTable

    def __init__(self, exchange: ThreadExchange, width: int) -> None:
        self.has_ended = False
        self.timeout_ms = 0
        self.num_deferred = 0
        self._exchange = exchange
        self._width = width
        self._shape: tuple[int, int] | None = None
        self._sent: Tensor | None = None
        self._pending: _Pending | None = None
        self._sends = cycle((True, False))
        self._reads = cycle((True, True, False))

    def add(self, part: Tensor) -> Tensor | None:
        """The sum in place of the part, for one of two parts."""
        return self._exchange.sum(part) if len(part) % 2 else None

    def begin(self, rows: int) -> None:
        assert self._shape is None
        self._shape = rows, self._width

    def end(self) -> None:
        assert self._pending is None, "every sum of a model is read"
        assert self._sent is None
        self._shape = None

    def cancel(self) -> None:
        self._shape = self._pending = self._sent = None

    def abort(self) -> None:
        self.has_ended = True

    @property
    def is_active(self) -> bool:
        return self._shape is not None

    def takes(self, part: Tensor) -> bool:
        return self._shape == part.shape and part.dtype is torch.float32

    def share_tokens(
        self, token_ids: Tensor, own: range, *, spreads: bool
    ) -> tuple[Tensor, Tensor]:
        if spreads:
            self._exchange.spread_(token_ids)
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        return torch.where(is_own, token_ids - own.start, 0), is_own.int()

    def embed(self, part: Tensor, is_own: Tensor) -> Tensor:
        assert part.shape == self._shape
        return self._exchange.sum(torch.where(is_own.bool()[:, None], part, 0.0))

    def multiply(self, x: Inputs, w: PackedLinear, *, defers: bool) -> bool:
        if not next(self._sends):
            return False
        plain = x.plain if isinstance(x, Prepared) else cast(Tensor, x)
        if (len(plain), w.out_features) != self._shape:
            return False
        self.send(self.ops.linear(plain, w))
        return True

    def send(self, part: Tensor) -> None:
        self.settle()
        assert self.takes(part)
        assert self._sent is None, "the sum before has been awaited"
        self._sent = part.clone()

    def await_sum(self, x: Tensor | None, *, defers: bool) -> Tensor:
        assert self._sent is not None
        total, self._sent = self._sent, None
        parts = [one.clone() for one in self._exchange._all(total)]
        self._exchange._barrier.wait()
        total = torch.zeros_like(total) if x is None else x.clone()
        for part in parts:
            total += part
        target = torch.full_like(total, torch.nan) if x is None or defers else x.fill_(torch.nan)
        self._pending = _Pending(x, target, total)
        if defers:
            self.num_deferred += 1
        else:
            self.settle()
        return target

    def settle(self) -> None:
        if self._pending is not None:
            self._pending.target.copy_(self._pending.total)
            self._pending = None

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None
    ) -> Tensor | None:
        return self.ops.norm_linear(x, norm, w, out) if self._reads_pending(x) else None

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None
    ) -> Inputs | None:
        if not self._reads_pending(x):
            return None
        return self.ops.norm_gated_linear(x, norm, w, kind, out)

    def norm_activated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: ActivationKind, out: Inputs | None
    ) -> Inputs | None:
        if not self._reads_pending(x):
            return None
        return self.ops.norm_activated_linear(x, norm, w, kind, out)

    def send_logits(self, x: Tensor, norm: Norm | None, w: PackedLinear, first: int) -> None:
        if len(x):
            self._all_logits(read_linear(self.ops, x, norm, w))
        assert first > 0

    def gather_logits(self, logits: Tensor, first: int) -> None:
        if len(logits):
            logits.copy_(torch.cat(self._all_logits(logits[:, :first]), -1))

    def _all_logits(self, part: Tensor) -> list[Tensor]:
        found = [one.clone() for one in self._exchange._all(part)]
        self._exchange._barrier.wait()
        return found

    def _reads_pending(self, x: Tensor) -> bool:
        if self._pending is None or self._pending.target is not x or not next(self._reads):
            return False
        self.settle()
        return True


class NoMemory:
    """Memory of a rank, for tests in which no other rank opens it."""

    address, handle = 0, b""

    def close(self) -> None:
        pass


def through_memory(
    path: Path, count: int, options: LoadOptions, work: Callable[[RankTransformer, ThreadSums], T]
) -> list[T]:
    """Results of `work` by rank, for a model whose small passes go through shared memory."""
    width = open_model(path).config.hidden_size

    def run(exchange: ThreadExchange) -> T:
        sums: Any = ThreadSums(exchange, width)
        memory: Any = NoMemory()
        peers: Any = PeerExchange(exchange, sums, memory)
        model = rank_model(path, peers, options)
        sums.ops = act_like_a_gpu(model.ops)
        return work(model, sums)

    return on_ranks(count, run)


def logits_through_memory(
    path: Path, count: int, options: LoadOptions
) -> tuple[tuple[Tensor, Tensor], int]:
    """Logits as `logits_on_ranks` has them, and the number of sums that a later op completes."""

    def work(model: RankTransformer, sums: ThreadSums) -> tuple[tuple[Tensor, Tensor], int]:
        return logits_of(model), sums.num_deferred

    return through_memory(path, count, options, work)[0]


class Prepared(NamedTuple):
    """Inputs in a kernel's own form: only the table knows what is in it."""

    plain: Tensor


def act_like_a_gpu(table: Any) -> OpTable:
    """Lets a CPU table write to columns of a tensor, and to prepared inputs of a matrix."""
    product, add = table.norm_linear, table.linear_add_

    def norm_linear(x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None) -> Tensor:
        if out is None or out.is_contiguous():
            return product(x, norm, w, out)
        return out.copy_(product(x, norm, w))

    def linear_add_(x: Tensor | Prepared, w: PackedLinear, residual: Tensor) -> Tensor:
        return add(x.plain if isinstance(x, Prepared) else x, w, residual)

    def writing(op: Any, place: int | None) -> Any:
        """`op` with prepared inputs as `out`, which may be its argument number `place`."""

        def run(*operands: Any, **named: Any) -> Any:
            if place is not None and len(operands) > place:
                operands, named["out"] = operands[:place], operands[place]
            out = named.get("out")
            if not isinstance(out, Prepared):
                return op(*operands, **named)
            found = op(*operands, **{**named, "out": None})
            out.plain.copy_(found)
            return out

        return run

    table.norm_linear, table.linear_add_ = norm_linear, linear_add_
    table.attend_ = writing(table.attend_, None)
    for name in ("norm_gated_linear", "norm_activated_linear"):
        setattr(table, name, writing(getattr(table, name), 4))
    table.inputs_for = lambda _, plain: Prepared(plain)
    return cast(OpTable, table)
