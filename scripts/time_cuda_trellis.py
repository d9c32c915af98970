"""Times linears with trellis codes (EXL3) on a GPU. Usage: time_cuda_trellis.py

The linears of some layers of an 8B model run in one captured CUDA graph: query, key and value
behind a norm, output, gate and up behind a norm, down. Every layer has its own random codes. The
floor of a pass is the size of the codes at the bandwidth of a large copy on the same device. Prints
one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.linear import PackedLinear
from exl_core.ops.open import get_table
from exl_core.ops.weights import Codebook, TrellisColumns, TrellisLayout
from time_cuda_attention import copy_bandwidth, milliseconds
from time_cuda_experts import captured

HIDDEN, INNER, KV = 4096, 14336, 1024
PARTS = ("qkv", "o", "mlp")


class Layers:
    """Linears of `layers` layers with random codes."""

    def __init__(self, rate: float, book: Codebook, layers: int) -> None:
        self.table = cast(Any, get_table("cuda", threads=2))
        self.rate, self.book = rate, book
        self.norm = RmsNorm(torch.ones(HIDDEN, device="cuda"), 1e-6)
        join = self.table.join
        self.qkv = [
            join([self._matrix(HIDDEN, n) for n in (HIDDEN, KV, KV)]) for _ in range(layers)
        ]
        self.o = [self._matrix(HIDDEN, HIDDEN) for _ in range(layers)]
        self.gate_up = [
            join([self._matrix(HIDDEN, INNER) for _ in range(2)]) for _ in range(layers)
        ]
        self.down = [self._matrix(INNER, HIDDEN) for _ in range(layers)]

    def _matrix(self, k: int, n: int) -> PackedLinear:
        words = int(16 * self.rate)
        w = self.table.new_linear(TrellisLayout(n, k, words, self.book))
        codes = torch.randint(-(2**15), 2**15, (k // 16, n // 16, words), device="cuda")
        in_scales = torch.full((k,), 0.01, dtype=torch.float16, device="cuda")
        out_scales = torch.ones(n, dtype=torch.float16, device="cuda")
        self.table.fill_linear(w, 0, TrellisColumns(codes.short(), in_scales, out_scales))
        return cast(PackedLinear, w)

    def run(self, parts: tuple[str, ...], x: Tensor, heads: Tensor, qkv: Tensor) -> None:
        """x float32 [m, hidden], heads float16 [m, hidden], qkv float16 [m, hidden + 2 kv]."""
        table = self.table
        table._linears.begin_pass()
        for i in range(len(self.o)):
            if "qkv" in parts:
                table.norm_linear(x, self.norm, self.qkv[i], qkv)
            if "o" in parts:
                table.linear_add_(heads, self.o[i], x)
            if "mlp" in parts:
                plain = torch.empty(x.shape[0], INNER, dtype=torch.float16, device="cuda")
                h = table.inputs_for(self.down[i], plain)
                h = table.norm_gated_linear(x, self.norm, self.gate_up[i], "silu", h)
                table.linear_add_(h, self.down[i], x)

    def weights(self, parts: tuple[str, ...]) -> int:
        """Weights of one layer."""
        count = {"qkv": HIDDEN * (HIDDEN + 2 * KV), "o": HIDDEN**2, "mlp": 3 * HIDDEN * INNER}
        return sum(count[part] for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("--rows", default="1,4,8,16,32,64,2048")
    parser.add_argument("--rates", default="2,3,4")
    parser.add_argument("--books", default="mul1")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--split", action="store_true", help="times the linears apart, too")
    args = parser.parse_args()
    bandwidth, device = copy_bandwidth(), torch.cuda.get_device_name()
    for book in args.books.split(","):
        for rate in map(float, args.rates.split(",")):
            layers = Layers(rate, book, args.layers)
            for rows in map(int, args.rows.split(",")):
                for parts in (PARTS, *((part,) for part in PARTS if args.split)):
                    x = torch.randn(rows, HIDDEN, device="cuda")
                    heads = torch.randn(rows, HIDDEN, device="cuda").half()
                    qkv = torch.empty(rows, HIDDEN + 2 * KV, dtype=torch.float16, device="cuda")
                    work = captured(partial(layers.run, parts, x, heads, qkv))
                    us = milliseconds(work, 15) * 1e3 / args.layers
                    floor = layers.weights(parts) * rate / 8 / bandwidth * 1e6
                    figure = {"book": book, "rate": rate, "rows": rows, "parts": "+".join(parts)}
                    more = {"us": round(us, 1), "floor_us": round(floor, 1), "device": device}
                    print(json.dumps(figure | more), flush=True)
            del layers
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
