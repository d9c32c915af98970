"""Times the attention side of layers in decode on a GPU.

A layer is a norm, the product for queries, keys and values, attention with head norms, RoPE and the
cache write, and the output product with the residual sum. Layers have their own weights, random
codes of 4 bits, and their own caches, and run one after the other in one captured CUDA graph. The
floor is the weights, keys and values at the bandwidth of a large copy on the same device. With
--kernels, the time of each kernel counts from the end of the previous one in torch's profiler.
Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from exl_core.ops.attention import AttentionRows, CacheLayer, HeadNorms, Scoring
from exl_core.ops.cache_rows import row_size
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import GroupedColumns, GroupedLayout, GroupRun
from time_cuda_attention import FORMATS, copy_bandwidth, milliseconds
from time_cuda_experts import captured

PAGE, GROUP = 256, 128


@dataclass(frozen=True)
class Shape:
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    has_norms: bool = True

    @property
    def width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def all_width(self) -> int:
        return self.width + 2 * self.kv_heads * self.head_dim


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 32, 4, 128),
    "heads of 64": Shape(2048, 64, 8, 64, has_norms=False),
    "llama-3.1-8b": Shape(4096, 32, 8, 128, has_norms=False),
    "heads of 256": Shape(2048, 16, 2, 256),
}


class Layers:
    """Attention sides of `count` layers, with a pass through all of them."""

    def __init__(self, shape: Shape, count: int, *, is_invariant: bool) -> None:
        self.shape, self.count = shape, count
        self.table = cast(Any, get_table("cuda", threads=2, batch_invariant=is_invariant))
        self.norm = RmsNorm(torch.ones(shape.hidden, device="cuda"), 1e-6)
        head = torch.ones(shape.head_dim, device="cuda")
        self.norms = HeadNorms(head, head, 1e-6) if shape.has_norms else HeadNorms(None, None, 0.0)
        kv = shape.kv_heads * shape.head_dim
        self.qkv = [self._joined([shape.width, kv, kv]) for _ in range(count)]
        self.output = [self._matrix(shape.hidden, shape.width) for _ in range(count)]

    def _joined(self, widths: list[int]) -> PackedLinear:
        parts = [self._matrix(n, self.shape.hidden) for n in widths]
        return cast(PackedLinear, self.table.join(parts))

    def _matrix(self, n: int, k: int) -> PackedLinear:
        runs = (GroupRun(4, k // GROUP, GROUP),)
        codes = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), device="cuda").int()
        scales = torch.full((k // GROUP, n), 0.2 / k**0.5, dtype=torch.float16, device="cuda")
        zeros = torch.full((k // GROUP, n), 8, dtype=torch.uint8, device="cuda")
        w = self.table.new_linear(GroupedLayout(n, k, runs, None, torch.float16, "zeros"))
        self.table.fill_linear(w, 0, GroupedColumns("words", codes, None, scales, zeros))
        return cast(PackedLinear, w)

    @property
    def weight_bytes(self) -> int:
        return self.qkv[0].size_bytes + self.output[0].size_bytes

    def set_batch(self, kind: str, rows: int, past: int) -> None:
        """Every sequence has `past` cached tokens and one row."""
        shape = self.shape
        each = -(-max(past + 1, 4096) // PAGE)  # the bound on the keys is loose, as in a model
        pages = each * rows
        self.caches = [
            CacheLayer(*(self._cache(one, pages) for one in FORMATS[kind]))
            for _ in range(self.count)
        ]
        table = torch.randperm(pages, device="cuda").int().view(rows, each)
        slots = table[:, past // PAGE].long() * PAGE + past % PAGE
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        pasts = torch.full((rows,), past, dtype=torch.int32, device="cuda")
        cos, sin = torch.rand(2, rows, shape.head_dim // 2, device="cuda")
        self.batch_of = partial(
            self.table.attention_batch,
            AttentionRows(table, starts, pasts),
            slots,
            cos,
            sin,
            num_pages=pages,
            page_size=PAGE,
        )
        self.buffer = torch.empty(rows, shape.all_width, dtype=torch.float16, device="cuda")

    def _cache(self, dtype: torch.dtype, pages: int) -> Tensor:
        size = row_size(dtype, self.shape.head_dim)
        cache = torch.empty(pages, self.shape.kv_heads, PAGE, size, dtype=dtype, device="cuda")
        if dtype is torch.float16:
            return cache.normal_()
        # Codes and scales whose bytes are 0x10 .. 0x1f: small positive scales.
        raw = cache.view(torch.uint8)
        raw.copy_(torch.randint(16, 32, raw.shape, dtype=torch.uint8, device="cuda"))
        return cache

    def run(self, x: Tensor) -> None:
        shape, batch = self.shape, self.batch_of()
        scoring = Scoring(shape.head_dim**-0.5)
        for qkv, output, cache in zip(self.qkv, self.output, self.caches, strict=True):
            h = self.table.norm_linear(x, self.norm, qkv, self.buffer)
            out = self.table.inputs_for(output, self.buffer[:, : shape.width])
            y = self.table.attend_(h, batch, cache, scoring, norms=self.norms, out=out)
            self.table.linear_add_(y, output, x)

    def key_bytes(self, kind: str, rows: int, past: int) -> int:
        row = sum(row_size(one, self.shape.head_dim) * one.itemsize for one in FORMATS[kind])
        return row * self.shape.kv_heads * rows * (past + 1)


def kernel_times(replay: Any, count: int) -> dict[str, float]:
    """Time of each kernel in us per layer, from the end of the previous kernel to its own end."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            replay()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()
    spans = sorted(
        (event.start_ns() + event.duration_ns(), event.start_ns(), event.name())
        for event in events
        if "exl" in event.name()
    )
    times: dict[str, float] = defaultdict(float)
    for (before, _, _), (end, _, name) in pairwise(spans):
        if end - before < 1e5:  # not the pause between two replays
            short = name.replace("void exl::cuda::", "").replace("(anonymous namespace)::", "")
            times[short.partition("(")[0][:60]] += (end - before) / 1e3 / count / 5
    return {name: round(us, 2) for name, us in sorted(times.items(), key=lambda one: -one[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["f16", "q8", "q4"])
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--past", default="16,4096")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--invariant", action="store_true", help="batch-invariant mode")
    parser.add_argument("--kernels", action="store_true", help="times of single kernels")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    for name in args.shape or ["qwen3-30b-a3b"]:
        layers = Layers(SHAPES[name], args.layers, is_invariant=args.invariant)
        for rows in map(int, args.rows.split(",")):
            for past in map(int, args.past.split(",")):
                for kind in args.formats:
                    layers.set_batch(kind, rows, past)
                    x = torch.randn(rows, layers.shape.hidden, device="cuda")
                    replay = captured(partial(layers.run, x))
                    us = milliseconds(replay, 40) / args.layers * 1e3
                    moved = layers.weight_bytes + layers.key_bytes(kind, rows, past)
                    floor = moved / bandwidth * 1e6
                    result: dict[str, object] = {
                        "shape": name,
                        "device": device,
                        "cache": kind,
                        "rows": rows,
                        "past": past,
                        "us": round(us, 2),
                        "floor_us": round(floor, 2),
                        "share": round(floor / us, 3),
                    }
                    if args.kernels:
                        result["kernels"] = kernel_times(replay, args.layers)
                    print(json.dumps(result), flush=True)
                    del replay


if __name__ == "__main__":
    main()
