"""Times the products of a layer as divided among ranks, on one GPU. Usage: time_divided_linears.py

A rank of tensor parallelism has some columns of query, key, value, gate and up, and some input
features of the matrices whose products are summed. These matrices are made here for rank 0, in EXL2
at about 4 bits with act-order and random codes, so that one GPU shows which kernels lose when a
matrix is divided. Each product runs in a captured CUDA graph, as often as matrices of it take 512
MB: none stays in the L2 cache.

  qkv       norm(x) @ w
  o, down   x += h @ w; with several ranks they are sent to slots in the memory of this GPU
  o-spread  the same as o, with the groups of its slice in the order of the file
  gate_up   act(norm(x) @ gate) * norm(x) @ up, as inputs of down
  sums      norm of x plus the sums of all ranks, as inputs of qkv

Prints one JSON object per line. The floor is the size of the codes at the bandwidth of a large
copy.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import torch

from exl_core.ops.backends.cuda.matmul import all_quantized, parts_of
from exl_core.ops.backends.cuda.norms import PendingRows
from exl_core.ops.backends.cuda.peer_linears import SentTo
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun
from exl_core.parallel.slices import deal, slice_rows
from exl_kernels.cuda_exchange import PartialCopies, PartialSums
from random_exl2 import GROUP, MIXES, SIZES, Size, group_widths, parse_mix
from time_cuda_attention import copy_bandwidth, milliseconds
from time_cuda_experts import captured

BYTES_AT_ONCE = 512 << 20
Work = Callable[[int], object]  # with a number of matrices


def whole_layout(k: int, n: int) -> GroupedLayout:
    """Layout of a matrix [k, n] with act-order."""
    widths = group_widths(k // GROUP, parse_mix(MIXES["4"]))
    runs = tuple(GroupRun(bits, widths.count(bits), GROUP) for bits in dict.fromkeys(widths))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k)).int()
    return GroupedLayout(n, k, runs, order, torch.float16, "middle")


def spread(layout: GroupedLayout) -> GroupedLayout:
    """The same groups in another order within each width, each a run of its own."""
    groups = [GroupRun(run.bits, 1, run.rows) for run in layout.runs for _ in range(run.groups)]
    random.Random(0).shuffle(groups)
    groups.sort(key=lambda run: -run.bits)
    return replace(layout, runs=tuple(groups))


def divided_layouts(size: Size, ranks: int) -> dict[str, list[GroupedLayout]]:
    """Layouts of rank 0's part of each matrix of a layer."""
    hidden, inner = size.hidden_size, size.intermediate_size
    own = hidden // ranks  # features of the rank's heads
    kv = own // size.num_attention_heads * size.num_key_value_heads
    output = slice_rows(whole_layout(hidden, hidden), torch.arange(own)).layout
    whole = whole_layout(inner, hidden)
    down = slice_rows(whole, deal(whole, [inner // ranks] * ranks)[0]).layout
    return {
        "qkv": [whole_layout(hidden, n) for n in (own, kv, kv)],
        "o": [cast(GroupedLayout, output)],
        "o-spread": [spread(cast(GroupedLayout, output))],
        "gate_up": [whole_layout(hidden, inner // ranks)] * 2,
        "down": [cast(GroupedLayout, down)],
    }


class Divided:
    """The products of rank 0 of `ranks`, with `rows` rows."""

    def __init__(self, size: Size, ranks: int, rows: int) -> None:
        self.table = cast(Any, get_table("cuda", threads=2))
        self.ranks, self.rows = ranks, rows
        self.hidden = hidden = size.hidden_size
        self.layouts = divided_layouts(size, ranks)
        widths = {hidden // ranks, size.intermediate_size // ranks}
        self.norm = RmsNorm(torch.ones(hidden, device="cuda"), 1e-6)
        self.x = torch.randn(rows, hidden, device="cuda")
        self.h = {k: torch.randn(rows, k, device="cuda").half() for k in widths}

    def matrix(self, name: str) -> PackedLinear:
        """Matrix, or joined matrices, of a product, with random codes."""
        found = []
        for layout in self.layouts[name]:
            w = self.table.new_linear(layout)
            shape = layout.in_features, layout.out_features
            codes = torch.randint(0, 8, shape, dtype=torch.uint8, device="cuda")
            scales = torch.full((layout.num_groups, shape[1]), 1e-3, device="cuda").half()
            self.table.fill_linear(w, 0, GroupedColumns("bytes", codes, scales=scales))
            found.append(w)
        return cast(PackedLinear, found[0] if len(found) == 1 else self.table.join(found))

    def works(self) -> Iterator[tuple[str, int, int, Work]]:
        """Name, bytes and number of matrices, and work of each product."""
        names = [name for name in self.layouts if self.ranks > 1 or name != "o-spread"]
        for name in names:
            first = self.matrix(name)
            size = sum(part.size_bytes for part in cast(Any, parts_of(first)))
            count = min(64, -(-BYTES_AT_ONCE // size))
            every = [first, *(self.matrix(name) for _ in range(count - 1))]
            yield name, size, count, partial(self._product(name, first), every)
        if self.ranks > 1 and self.rows <= 64:
            quantized = all_quantized(parts_of(self.matrix("qkv")))
            yield "sums", 0, 8, partial(self._read_sums, quantized)

    def _product(
        self, name: str, first: PackedLinear
    ) -> Callable[[list[PackedLinear], int], object]:
        table = self.table
        if name == "qkv":
            out = torch.empty(self.rows, first.out_features, device="cuda").half()
            return lambda every, _: [table.norm_linear(self.x, self.norm, w, out) for w in every]
        if name == "gate_up":
            down = self.matrix("down")

            def gated(every: list[PackedLinear], _: int) -> None:
                for w in every:
                    h = table.inputs_for(down, self.h[down.in_features])
                    table.norm_gated_linear(self.x, self.norm, w, "silu", h)

            return gated
        h = self.h[first.in_features]
        inputs = table.inputs_for(first, h)
        if inputs is not h:
            table._linears.prepare_for(inputs, h)
        if self.ranks == 1 or not table._linears.can_send(inputs, first, self.rows):
            return lambda every, _: [table.linear_add_(_of(inputs, w), w, self.x) for w in every]
        slots = torch.empty(self.ranks, self.rows, self.hidden, device="cuda")
        copies = PartialCopies(count=self.ranks - 1)
        for i in range(self.ranks - 1):
            copies.to[i] = slots[i + 1].data_ptr()
        to = SentTo(slots[0].data_ptr(), self.hidden, copies)
        self._slots = slots  # the graph writes to them

        def sent(every: list[PackedLinear], _: int) -> None:
            for w in every:
                table._linears.multiply_sent(_of(inputs, w), w, to)

        return sent

    def _read_sums(self, quantized: Any, count: int) -> None:
        sums = self.sums  # which makes the target
        pending = PendingRows(self.x, sums, self._target)
        for _ in range(count):
            self.table._linears._prepared(pending, self.norm, quantized)

    @cached_property
    def sums(self) -> PartialSums:
        """Zeros of all ranks. Only the stage beside them is emptied, so that they can be read again
        and again."""
        self._parts = torch.zeros(2, self.ranks, self.rows, self.hidden, device="cuda")
        self._target = torch.empty(self.rows, self.hidden, device="cuda")
        self._ended = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        return PartialSums(
            parts=self._parts[0].data_ptr(),
            sum=self._target.data_ptr(),
            spent=self._parts[1].data_ptr(),
            ended=self._ended.data_ptr(),
            ranks=self.ranks,
            early_rank=-1,
        )


def _of(inputs: Any, w: PackedLinear) -> Any:
    """Inputs for another matrix of the same layout."""
    return replace(inputs, w=w) if hasattr(inputs, "w") else inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("--size", choices=SIZES, default="70b")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rows", default="1,8,32,2048")
    args = parser.parse_args()
    bandwidth, device = copy_bandwidth(), torch.cuda.get_device_name()
    for ranks in map(int, args.ranks.split(",")):
        for rows in map(int, args.rows.split(",")):
            divided = Divided(SIZES[args.size], ranks, rows)
            for name, size, count, work in divided.works():
                divided.table._linears.begin_pass()
                us = milliseconds(captured(partial(work, count)), 5) * 1e3 / count
                figure = {"ranks": ranks, "rows": rows, "product": name, "us": round(us, 1)}
                floor = round(size / bandwidth * 1e6, 1)
                more = {"floor_us": floor, "tb_s": round(size / us / 1e6, 2), "device": device}
                print(json.dumps(figure | more), flush=True)
            del divided, work
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
