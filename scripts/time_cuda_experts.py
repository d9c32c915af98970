"""Times layers of experts on a GPU: router, experts and their sum. Usage: time_cuda_experts.py

Decode runs like the layers of a model, in one captured CUDA graph: for each layer a norm, the
router, and the experts of the rows. Every layer has its own experts, with random weights and a
random router. The floor of a pass is the size of the distinct experts in use, and of the router, at
the bandwidth of a large copy on the same device. All random numbers are the same in every run.
Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from exl_core.ops.elementwise import GateKind, RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertLayer, ExpertMlp, Routing
from exl_core.ops.open import get_table
from exl_core.ops.weights import (
    Codebook,
    DenseColumns,
    DenseLayout,
    Formula,
    GroupedColumns,
    GroupedLayout,
    GroupRun,
    TrellisColumns,
    TrellisLayout,
)
from time_cuda_attention import copy_bandwidth, milliseconds

Runs = tuple[GroupRun, ...]


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    routing: Routing
    kind: GateKind
    wide: Runs  # of gate and up
    narrow: Runs  # of down
    formula: Formula | None  # None: float16
    scale_dtype: torch.dtype
    is_permuted: bool
    layers: int
    codebook: Codebook | None = None  # trellis codes of 4 bits


def gptq(hidden: int, inner: int, experts: int, *, layers: int) -> Shape:
    """8 experts per row, in GPTQ of 4 bits."""
    wide, narrow = (GroupRun(4, k // 128, 128) for k in (hidden, inner))
    sizes = hidden, inner, experts, Routing(8), "silu"
    return Shape(*sizes, (wide,), (narrow,), "zeros", torch.float16, False, layers)  # type: ignore[arg-type]


def qwen3(
    wide: Runs, narrow: Runs, formula: Formula | None, *, is_permuted: bool = False, layers: int = 6
) -> Shape:
    sizes = 2048, 768, 128, Routing(8), "silu"
    return Shape(*sizes, wide, narrow, formula, torch.float16, is_permuted, layers)  # type: ignore[arg-type]


def qwen3_trellis(codebook: Codebook) -> Shape:
    return replace(qwen3((), (), None), codebook=codebook)


SHAPES = {
    "qwen3-30b-a3b gptq": gptq(2048, 768, 128, layers=6),
    # Two of the experts stand for the shared ones.
    "deepseek-v2-lite gptq": gptq(2048, 1408, 66, layers=6),
    "glm-4.5-air gptq": gptq(4096, 1408, 128, layers=3),
    "qwen3-30b-a3b float16": qwen3((), (), None, layers=3),
    "qwen3-30b-a3b exl2": qwen3(
        (GroupRun(5, 4, 32), GroupRun(4, 13, 128), GroupRun(3, 8, 32)),
        (GroupRun(5, 2, 32), GroupRun(4, 5, 128), GroupRun(3, 2, 32)),
        "middle",
        is_permuted=True,
    ),
    "qwen3-30b-a3b exl3 mul1": qwen3_trellis("mul1"),
    "qwen3-30b-a3b exl3 mcg": qwen3_trellis("mcg"),
    "gpt-oss-20b mxfp4": Shape(
        2880,
        2880,
        32,
        Routing(4),
        "clamped_swiglu",
        (GroupRun(4, 90, 32),),
        (GroupRun(4, 90, 32),),
        "mxfp4",
        torch.uint8,
        is_permuted=False,
        layers=6,
    ),
}


class Layers:
    """Layers of random experts, with a pass through all of them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.table = cast(Any, get_table("cuda", threads=2))
        self.norm = RmsNorm(torch.ones(shape.hidden, device="cuda"), 1e-6)
        self.routers = [self._router() for _ in range(shape.layers)]
        self.experts = [self._experts() for _ in range(shape.layers)]

    def _router(self) -> PackedLinear:
        shape = self.shape
        w = self.table.new_linear(DenseLayout(shape.experts, shape.hidden, torch.float16))
        weight = torch.randn(shape.experts, shape.hidden, device="cuda") / shape.hidden**0.5
        self.table.fill_linear(w, 0, DenseColumns(weight.half()))
        return cast(PackedLinear, w)

    def _experts(self) -> ExpertMlp:
        shape, table = self.shape, self.table
        wide, narrow = [], []
        for _ in range(shape.experts):
            order = self._order(shape.hidden)
            pair = [self._matrix(order, is_wide=True) for _ in range(2)]
            wide.append(table.join(pair))
            narrow.append(self._matrix(self._order(shape.inner), is_wide=False))
        return ExpertMlp(table.stack(wide), table.stack(narrow), shape.kind)

    def _order(self, k: int) -> Tensor | None:
        return torch.randperm(k).int() if self.shape.is_permuted else None

    def _matrix(self, order: Tensor | None, *, is_wide: bool) -> PackedLinear:
        shape = self.shape
        runs = shape.wide if is_wide else shape.narrow
        n, k = (shape.inner, shape.hidden) if is_wide else (shape.hidden, shape.inner)
        if shape.codebook is not None:
            return self._trellis(n, k, shape.codebook)
        if shape.formula is None:
            w = self.table.new_linear(DenseLayout(n, k, torch.float16))
            weight = torch.randn(n, k, device="cuda") / k**0.5
            self.table.fill_linear(w, 0, DenseColumns(weight.half()))
            return cast(PackedLinear, w)
        bits = sum(run.bits * run.groups * run.rows for run in runs)
        groups = sum(run.groups for run in runs)
        layout = GroupedLayout(n, k, runs, order, shape.scale_dtype, shape.formula)
        codes = torch.randint(-(2**31), 2**31 - 1, (bits // 32, n), device="cuda").int()
        if shape.formula == "mxfp4":
            scales = torch.full((groups, n), 120, dtype=torch.uint8, device="cuda")
        else:
            scales = torch.full((groups, n), 0.2 / k**0.5, dtype=shape.scale_dtype, device="cuda")
        has_zeros = shape.formula == "zeros"
        zeros = torch.full((groups, n), 8, dtype=torch.uint8, device="cuda") if has_zeros else None
        w = self.table.new_linear(layout)
        self.table.fill_linear(w, 0, GroupedColumns("words", codes, None, scales, zeros))
        return cast(PackedLinear, w)

    def _trellis(self, n: int, k: int, codebook: Codebook) -> PackedLinear:
        layout = TrellisLayout(n, k, 16 * 4, codebook)
        shape = k // 16, n // 16, layout.tile_words
        words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
        scales = [torch.randn(size, device="cuda").sign().half() for size in (k, n)]
        w = self.table.new_linear(layout)
        self.table.fill_linear(w, 0, TrellisColumns(words, scales[0] / k**0.5, scales[1]))
        return cast(PackedLinear, w)

    def run(self, x: Tensor) -> None:
        for router, experts in zip(self.routers, self.experts, strict=True):
            layer = ExpertLayer(self.norm, router, self.shape.routing, None, experts)
            self.table.add_experts_(x, layer)

    def used_bytes(self, x: Tensor) -> float:
        """Bytes of the distinct experts of a layer, on average, and of its router."""
        total = 0.0
        x = x.clone()
        for router, experts in zip(self.routers, self.experts, strict=True):
            h = self.table.rms_norm(x, self.norm)
            routed = self.table.route(h, router, self.shape.routing)
            self.table.add_(x, self.table.expert_mlp(h, routed, experts))
            share = len(routed.ids.unique()) / self.shape.experts
            total += share * (experts.gate_up.size_bytes + experts.down.size_bytes)
            total += router.size_bytes
        return total / self.shape.layers


def captured(work: Callable[[], object]) -> Callable[[], object]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,2048")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    for name in args.shape or SHAPES:
        torch.manual_seed(0)
        layers = Layers(SHAPES[name])
        for rows in map(int, args.rows.split(",")):
            torch.manual_seed(rows)
            start = torch.randn(rows, layers.shape.hidden, device="cuda")
            x, floor = start.clone(), layers.used_bytes(start) / bandwidth * 1e6
            work = captured(partial(layers.run, x))
            x.copy_(start)
            us = milliseconds(work, 21) * 1e3 / layers.shape.layers
            figure = {"figure": "layer of experts", "shape": name, "rows": rows, "us": round(us, 2)}
            more = {"floor_us": round(floor, 2), "share": round(floor / us, 3), "device": device}
            print(json.dumps(figure | more), flush=True)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
