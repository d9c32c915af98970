"""Mixture of experts of one GPU, without synchronization: captured graphs may contain it.

The host does not know which experts the rows use. Kernels of quantized and of float16 experts find
out on the device, and read each expert in use once (`experts.py`, `trellis_experts.py`). Experts
with other matrices are all computed for all rows, and the outputs of those that a row does not use
are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from exl_core.ops.backends.composed import ComposedExpertOps
from exl_core.ops.backends.cuda import trellis_experts
from exl_core.ops.backends.cuda.elementwise import CudaElementwiseOps
from exl_core.ops.backends.cuda.experts import CudaExperts, grouped, move_together
from exl_core.ops.backends.cuda.joined_experts import Pair, join
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.cuda.linear import CudaLinearOps
from exl_core.ops.backends.cuda.matmul import CudaJoined, CudaLinear, PlainKind, parts_of
from exl_core.ops.backends.cuda.trellis_experts import CudaTrellisExperts
from exl_core.ops.backends.routing import StackedExperts, choose
from exl_core.ops.elementwise import XIelu
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import (
    ExpertLayer,
    ExpertMlp,
    JoinedExperts,
    PackedExperts,
    Routed,
    Routing,
)
from exl_kernels import cuda

MAX_ROUTER_ROWS = 64
"""Most rows whose logits the router's kernel computes. With more rows, torch's product is faster;
it does not keep a row independent of the others."""

MAX_PAIRS = 1 << 15
"""Most pairs of a row and an expert that are computed at once: their outputs take memory."""

SMALL_TILE, TILE = 8, 32
"""Rows of an expert that are multiplied at once: with up to 8 rows in all, and with more. Kernels
of small groups have the small tile only."""

MANY_ROWS = 32
"""Rows per expert, on average, from which the kernel for prompts is used. It multiplies tiles of
128 rows, and rounds weights to float16: a row does not keep its bits."""


class CudaMoeOps(CudaLinearOps, CudaElementwiseOps):
    """MoeOps of one GPU."""

    _gpu: Gpu

    def stack(self, experts: Sequence[PackedLinear]) -> PackedExperts:
        self._counters(1)  # made here, and not in a capture
        self._row_counters()
        stacked = StackedExperts.of(experts)
        parts = [parts_of(one) for one in experts]
        indexed = grouped(parts)
        if indexed is not None:
            move_together(indexed)
            return CudaExperts.of(indexed, self._gpu)
        trellis = CudaTrellisExperts.of(parts, self._gpu)
        return stacked if trellis is None else trellis

    def route(
        self, x: Tensor, w: PackedLinear, routing: Routing, bias: Tensor | None = None
    ) -> Routed:
        if w.out_features > cuda.MAX_EXPERTS:
            return choose(self.linear(x, w), routing, bias)
        if self._can_fuse_router(x, w):
            call = self._new_route(len(x), w, routing, bias)
            self._call_router(call, x, cast(CudaLinear, w))
            return call.routed
        call = self._new_route(len(x), w, routing, bias, logits=self.linear(x, w))
        if len(x):
            self._gpu.call("route", call.args)
        return call.routed

    def _can_fuse_router(self, x: Tensor, w: PackedLinear) -> bool:
        is_known = isinstance(w, CudaLinear) and w.out_features <= cuda.MAX_EXPERTS
        return is_known and (len(x) <= MAX_ROUTER_ROWS or self._gpu.is_invariant)

    def _new_route(
        self,
        rows: int,
        w: PackedLinear,
        routing: Routing,
        bias: Tensor | None,
        *,
        joined: JoinedExperts | None = None,
        logits: Tensor | None = None,
    ) -> _RouterCall:
        """Arguments of `exl_cuda_route`, and the memory that it writes."""
        shared = 0 if joined is None else joined.shared
        scores = None if joined is None else cast(CudaLinear | None, joined.scores)
        if logits is None:
            logits = self._gpu.empty(rows, w.out_features + (scores is not None))
        slots = routing.top_k + shared
        ids = self._gpu.empty(rows, slots, dtype=torch.int32)
        weights = self._gpu.empty(rows, slots)
        args = cuda.Route(
            shared_weight=None if scores is None else scores.weight.data_ptr(),
            shared=shared,
            logits=logits.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            m=rows,
            experts=w.out_features,
            top_k=routing.top_k,
            scores=cuda.SCORES[routing.scores],
            groups=routing.groups,
            kept_groups=routing.kept_groups,
            group_scores=routing.group_scores,
            normalizes=routing.normalizes,
            eps=routing.eps,
            factor=routing.factor,
        )
        return _RouterCall(args, Routed(ids, weights), logits)

    def _call_router(self, call: _RouterCall, x: Tensor, w: CudaLinear) -> None:
        """Computes the logits and the choice by one kernel."""
        args = call.args
        args.x, args.x_stride, args.x_dtype = x.data_ptr(), x.stride(0), TYPES[x.dtype]
        args.weight, args.d = w.weight.data_ptr(), x.shape[1]
        args.logit_bias = None if w.bias is None else w.bias.data_ptr()
        args.counters = self._counters(len(x)).data_ptr()
        if len(x):
            self._gpu.call("route", args)

    def _counters(self, rows: int) -> Tensor:
        """Counters of the router's kernel for that many rows."""
        return self._gpu.buffer("router", max(4 * rows, 4096))

    def expert_mlp(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        y = self._gpu.empty(len(x), experts.down.out_features)
        self._write_experts(x, routed, experts, y, is_added=False)
        return y

    def add_experts_(self, x: Tensor, layer: ExpertLayer) -> Tensor:
        joined = layer.joined
        if not self._can_fuse_router(x, layer.router):
            return ComposedExpertOps.add_experts_(self, x, layer)
        experts = layer.experts if joined is None else joined.experts
        h = self._gpu.empty(*x.shape)
        call = self._new_route(len(x), layer.router, layer.routing, layer.bias, joined=joined)
        args, routed = call.args, call.routed
        args.norm, args.norm_eps = layer.norm.weight.data_ptr(), layer.norm.eps
        args.normed = h.data_ptr()
        matrices = _indexed(experts)
        if len(x) == 1 and matrices is not None and _choose_themselves(routed, matrices):
            args.ids = args.weights = None
            self._call_router(call, x, cast(CudaLinear, layer.router))
            self._experts_of_one_row(h, routed, matrices, experts, x, is_added=True, route=args)
            return x
        self._call_router(call, x, cast(CudaLinear, layer.router))
        self._write_experts(h, routed, experts, x, is_added=True)
        return x

    def join_experts(
        self,
        experts: ExpertMlp,
        gate_up: PackedLinear,
        down: PackedLinear,
        scores: PackedLinear | None,
    ) -> JoinedExperts | None:
        is_known = scores is None or (isinstance(scores, CudaLinear) and scores.bias is None)
        pair = experts.gate_up, experts.down
        is_known = is_known and _indexed(experts) is not None and not self._gpu.is_invariant
        if not is_known or not all(isinstance(one, CudaExperts) for one in pair):
            return None
        found = join(cast(Pair, pair), parts_of(gate_up), parts_of(down), self._gpu)
        if found is None:
            return None
        wide, narrow, count = found
        return JoinedExperts(replace(experts, gate_up=wide, down=narrow), count, scores)

    def joins_experts(self, rows: int) -> bool:
        return rows <= MAX_ROUTER_ROWS

    def _write_experts(
        self, x: Tensor, routed: Routed, experts: ExpertMlp, y: Tensor, *, is_added: bool
    ) -> None:
        """Writes `expert_mlp` to y [m, d], or adds it."""
        if isinstance(experts.gate_up, CudaTrellisExperts) and not isinstance(experts.kind, XIelu):
            pair = trellis_experts.pair_of(experts.gate_up, experts.down, is_gated=experts.is_gated)
            if pair is not None:
                _, kind = _activation(experts)
                trellis_experts.compute(self._gpu, x, routed, pair, y, gate=kind, is_added=is_added)
                return
        found = _indexed(experts)
        if found is None:
            outputs = self._all_experts(x, routed, experts)
            y.add_(outputs) if is_added else y.copy_(outputs)
            return
        top_k = routed.ids.shape[1]
        if len(x) == 1 and top_k <= cuda.MAX_ROW_EXPERTS:
            self._experts_of_one_row(x, routed, found, experts, y, is_added=is_added)
            return
        most = max(MAX_PAIRS // top_k, 1)
        for first in range(0, len(x), most):
            rows = slice(first, first + most)
            part = Routed(routed.ids[rows].contiguous(), routed.weights[rows].contiguous())
            compute = self._indexed_experts
            if self._are_many_rows(part, found):
                compute = self._experts_of_many_rows
            compute(x[rows], part, found, experts, y[rows], is_added=is_added)

    def _are_many_rows(self, routed: Routed, matrices: tuple[CudaExperts, CudaExperts]) -> bool:
        gpu, (gate_up, down) = self._gpu, matrices
        return (
            routed.ids.numel() >= MANY_ROWS * gate_up.num_experts
            and not gpu.is_invariant
            and not down.shared  # its kernel takes whole matrices
            and torch.cuda.get_device_capability(gpu.device)[0] == 9
            and gate_up.k_tiles is not None
            and gate_up.has_common_order
            and down.k_tiles is not None
            and down.is_plain
        )

    def _experts_of_many_rows(
        self,
        x: Tensor,
        routed: Routed,
        matrices: tuple[CudaExperts, CudaExperts],
        experts: ExpertMlp,
        y: Tensor,
        *,
        is_added: bool,
    ) -> None:
        """`_indexed_experts` for prompts: inputs are gathered by item."""
        gpu, (rows, top_k), (gate_up, down) = self._gpu, routed.ids.shape, matrices
        items = _Items(gpu, rows, top_k, gate_up.num_experts, cuda.EXPERT_ITEM_ROWS)
        item_rows = items.max_items * cuda.EXPERT_ITEM_ROWS
        inputs, inner = (
            gpu.empty(item_rows, 32 * one.num_blocks, dtype=torch.float16)
            for one in (gate_up, down)
        )
        args = _input_args(x, routed.ids, gate_up)
        items.set_in(args)
        gpu.call("expert_inputs", args)  # sorts the pairs
        args.out[0] = inputs.data_ptr()
        if gate_up.permutation is not None:
            args.permutation = gate_up.permutation.data_ptr()
        gpu.call("expert_gather", args, items.max_items)
        product = items.product(gate_up, _Inputs([inputs], 1), inner)
        product.epilogue, product.gate = _activation(experts)
        gpu.call("expert_many_rows", product, *_k_tiles(gate_up))
        outputs = gpu.empty(rows * top_k, down.out_features)
        product = items.product(down, _Inputs([inner], 1), outputs)
        gpu.call("expert_many_rows", product, *_k_tiles(down))
        self._sum_experts(outputs, routed.weights, y, is_added=is_added)

    def _indexed_experts(
        self,
        x: Tensor,
        routed: Routed,
        matrices: tuple[CudaExperts, CudaExperts],
        experts: ExpertMlp,
        y: Tensor,
        *,
        is_added: bool,
    ) -> None:
        gpu, (rows, top_k), (gate_up, down) = self._gpu, routed.ids.shape, matrices
        tile_rows = SMALL_TILE if rows <= SMALL_TILE or _are_small(matrices) else TILE
        items = _Items(gpu, rows, top_k, gate_up.num_experts, tile_rows)
        inputs = self._expert_inputs(x, routed.ids, gate_up, items)
        inner = self._new_inner(rows * top_k, down)
        args = items.product(gate_up, inputs, inner)
        _store_inner(args, experts, down)
        gpu.call("expert_linear", args)
        outputs = gpu.empty(rows * top_k, down.out_features)
        inputs = self._inner_inputs(inner, routed.ids, down)  # kept until the launch
        args = items.product(down, inputs, outputs)
        args.is_early = True
        gpu.call("expert_linear", args)
        self._sum_experts(outputs, routed.weights, y, is_added=is_added)

    def _experts_of_one_row(
        self,
        x: Tensor,
        routed: Routed,
        matrices: tuple[CudaExperts, CudaExperts],
        experts: ExpertMlp,
        y: Tensor,
        *,
        is_added: bool,
        route: cuda.Route | None = None,
    ) -> None:
        """`_indexed_experts` of one row, with the same bits: its pairs need no sorting.

        With `route`, whose logits are known, the kernels choose the experts themselves, and
        `routed` is not read.
        """
        gpu, top_k, (gate_up, down) = self._gpu, routed.ids.shape[1], matrices
        inner = self._new_inner(top_k, down)
        # The kernel rounds the row itself where the experts take it in the order of the features.
        is_raw = gate_up.is_plain and gate_up.has_common_order and _is_whole(x)
        inputs = _Inputs([x], top_k)
        if not is_raw:
            inputs = self._expert_inputs(x, routed.ids, gate_up, None)
        first = _product(gate_up, inputs, inner)
        _store_inner(first, experts, down)
        ids = weights = None
        if route is None:
            ids, weights = routed.ids.data_ptr(), routed.weights.data_ptr()
        chosen = route, ids, weights, top_k, self._row_counters().data_ptr()
        is_one_call = down.has_inverses and (gate_up.source == "dense") == (down.source == "dense")
        if not is_one_call:
            gpu.call("expert_row", first, None, *chosen)
        inputs = self._inner_inputs(inner, routed.ids, down)  # kept until the launch
        last = _product(down, inputs, y)
        last.epilogue = cuda.ADD if is_added else cuda.STORE
        gpu.call("expert_row", first if is_one_call else None, last, *chosen)

    def _row_counters(self) -> Tensor:
        return self._gpu.buffer("expert_row", cuda.ROW_COUNTERS_BYTES)

    def _new_inner(self, pairs: int, down: CudaExperts) -> Tensor:
        """Memory for the inputs of `down`: in the order of its rows, unless some are padding."""
        width = 32 * down.num_blocks if down.has_inverses else down.in_features
        return self._gpu.empty(pairs, width, dtype=torch.float16)

    def _inner_inputs(self, inner: Tensor, ids: Tensor, down: CudaExperts) -> _Inputs:
        """`_new_inner`, which `gate_up` has written, as inputs of `down`."""
        if down.has_inverses:
            return _Inputs([inner], 1)
        return self._expert_inputs(inner, ids.view(-1, 1), down, None)

    def _sum_experts(self, outputs: Tensor, weights: Tensor, y: Tensor, *, is_added: bool) -> None:
        """Writes the weighted sums of the outputs [m * k, d] to y [m, d], or adds them."""
        rows, top_k = weights.shape
        operands = outputs.data_ptr(), weights.data_ptr(), rows, top_k, outputs.shape[1]
        self._gpu.call("expert_sum", *operands, is_added, y.data_ptr(), y.stride(0))

    def _expert_inputs(
        self, x: Tensor, ids: Tensor, experts: CudaExperts, items: _Items | None
    ) -> _Inputs:
        """x [rows, k] in the order of the experts' rows, and sorts the pairs into `items`."""
        gpu, (rows, top_k) = self._gpu, ids.shape
        is_by_row = experts.has_common_order
        forms = 1 if is_by_row or experts.has_one_order else experts.parts
        count = rows if is_by_row else rows * top_k
        width = 32 * experts.num_blocks
        outputs = [gpu.empty(count, width, dtype=torch.float16) for _ in range(forms)]
        args = _input_args(x, ids, experts, forms)
        for i, out in enumerate(outputs):
            args.out[i] = out.data_ptr()
        if not is_by_row:
            args.matrices, args.matrix_stride = experts.table.data_ptr(), experts.parts
        elif experts.permutation is not None:
            args.permutation = experts.permutation.data_ptr()
        if items is not None:
            items.set_in(args)
        gpu.call("expert_inputs", args)
        return _Inputs(outputs, top_k if is_by_row else 1)

    def _all_experts(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        gate_up, down = _each(experts.gate_up), _each(experts.down)
        weights = x.new_zeros(len(x), len(down), dtype=torch.float32)
        weights.scatter_(1, routed.ids.long(), routed.weights)  # [m, E]
        y = x.new_zeros(len(x), down[0].out_features, dtype=torch.float32)
        for expert, (wide, narrow) in enumerate(zip(gate_up, down, strict=True)):
            h = self.linear(x, wide)
            if experts.is_gated:
                h = self.gated_activation(h, experts.gate)
            else:
                h = self.activation(h, experts.activation)
            weight = weights[:, expert, None]
            # An output of infinity times a weight of zero would be NaN.
            y += torch.where(weight == 0, 0.0, self.linear(h, narrow) * weight)
        return y


class _RouterCall(NamedTuple):
    """Arguments of `exl_cuda_route`, and the memory that they point to. It has to be kept until the
    last kernel that gets the arguments is launched: torch gives freed memory to the next tensor."""

    args: cuda.Route
    routed: Routed
    logits: Tensor


class _Inputs(NamedTuple):
    """Prepared inputs: one form for all parts, or one of each part."""

    forms: list[Tensor]
    pairs_per_row: int


class _Items:
    """Memory for the pairs sorted by expert, and for the items, which thread blocks take."""

    def __init__(self, gpu: Gpu, rows: int, top_k: int, experts: int, tile_rows: int) -> None:
        pairs = rows * top_k
        self.tile_rows = tile_rows
        self.max_items = cuda.max_items(pairs, experts, self.tile_rows)
        item_words = cuda.EXPERT_ITEM_BYTES // 4
        self._memory = gpu.empty(item_words * (1 + self.max_items) + pairs, dtype=torch.int32)
        self.num_items = self._memory.data_ptr()
        self.items = self.num_items + cuda.EXPERT_ITEM_BYTES
        self.pairs = self.items + cuda.EXPERT_ITEM_BYTES * self.max_items

    def set_in(self, args: cuda.ExpertInputs) -> None:
        args.tile_rows, args.num_items = self.tile_rows, self.num_items
        args.items, args.pairs = self.items, self.pairs

    def product(self, experts: CudaExperts, x: _Inputs, y: Tensor) -> cuda.ExpertLinear:
        """Arguments of `exl_cuda_expert_linear` that stores y."""
        args = _product(experts, x, y)
        args.num_items, args.max_items = self.num_items, self.max_items
        args.items, args.pairs, args.tile_rows = self.items, self.pairs, self.tile_rows
        return args


def _input_args(x: Tensor, ids: Tensor, experts: CudaExperts, forms: int = 0) -> cuda.ExpertInputs:
    """Arguments of `exl_cuda_expert_inputs`, without outputs and the order of the rows."""
    rows, top_k = ids.shape
    return cuda.ExpertInputs(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        ids=ids.data_ptr(),
        num_blocks=experts.num_blocks,
        count=forms,
        x_dtype=TYPES[x.dtype],
        m=rows,
        k=experts.in_features,
        top_k=top_k,
        experts=experts.num_experts,
    )


def _k_tiles(experts: CudaExperts) -> tuple[int, int]:
    return cast(tuple[int, int], experts.k_tiles)


def _product(experts: CudaExperts, x: _Inputs, y: Tensor) -> cuda.ExpertLinear:
    """Arguments of a product with experts that stores y, without the items and pairs."""
    loads, first = experts.common_loads, x.forms[0]
    args = cuda.ExpertLinear(
        matrices=experts.table.data_ptr(),
        loads=None if loads is None else loads.data_ptr(),
        y=y.data_ptr(),
        num_loads=experts.num_loads,
        x_stride=first.shape[1],
        y_stride=y.stride(0),
        n=experts.columns,
        parts=experts.parts,
        pairs_per_row=x.pairs_per_row,
        load_bytes=experts.load_bytes,
        k=first.shape[1],
        x_dtype=TYPES[first.dtype],
        source=cuda.EXPERT_SOURCES[experts.source],
        only=experts.only,
        has_bias=experts.has_bias,
        shared_from=experts.num_experts - experts.shared,
    )
    for i, places in enumerate(experts.places):
        if places is not None:
            args.places[i] = cuda.ExpertPlaces(*places)
    args.x[0], args.x[1] = first.data_ptr(), x.forms[-1].data_ptr()
    return args


def _indexed(experts: ExpertMlp) -> tuple[CudaExperts, CudaExperts] | None:
    """gate_up and down, if kernels can index them by expert."""
    gate_up, down = experts.gate_up, experts.down
    if not (isinstance(gate_up, CudaExperts) and isinstance(down, CudaExperts)):
        return None
    if experts.is_gated and gate_up.parts == 1:
        if gate_up.halves is None:
            return None
        gate_up = gate_up.halves
    has_parts = gate_up.parts == (2 if experts.is_gated else 1) and down.parts == 1
    return (gate_up, down) if has_parts and not isinstance(experts.kind, XIelu) else None


def _choose_themselves(routed: Routed, matrices: tuple[CudaExperts, CudaExperts]) -> bool:
    """Whether the kernels of one row can choose its experts: no other kernel needs their ids."""
    gate_up, down = matrices
    has_few = routed.ids.shape[1] <= cuda.MAX_ROW_EXPERTS
    return has_few and gate_up.has_common_order and down.has_inverses


def _are_small(matrices: Sequence[CudaExperts]) -> bool:
    return any(one.source == "small_groups" for one in matrices)


def _activation(experts: ExpertMlp) -> tuple[int, int]:
    """Epilogue and activation of gate and up, or of up alone."""
    if experts.is_gated:
        return cuda.GATED, cuda.GATES[experts.gate]
    return cuda.ACTIVATED, cuda.ACTIVATIONS[cast(PlainKind, experts.activation)]


def _store_inner(args: cuda.ExpertLinear, experts: ExpertMlp, down: CudaExperts) -> None:
    """Lets a product with `gate_up` store the inputs of `down` (`_new_inner`)."""
    args.epilogue, args.gate = _activation(experts)
    if down.has_inverses and not down.is_plain:
        args.next = down.table.data_ptr()


def _is_whole(x: Tensor) -> bool:
    """The row consists of aligned vectors of 16 bytes, and of whole blocks of 32 numbers."""
    return x.data_ptr() % 16 == 0 and x.shape[1] % 32 == 0


def _each(experts: PackedExperts) -> Sequence[PackedLinear]:
    if isinstance(experts, CudaExperts | CudaTrellisExperts):
        return [parts[0] if len(parts) == 1 else CudaJoined(parts) for parts in experts.matrices]
    return cast(StackedExperts, experts).experts
