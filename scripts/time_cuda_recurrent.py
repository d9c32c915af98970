"""Times the recurrent ops on a GPU: convolution, delta rule and state scan.

Each measurement is a captured CUDA graph of six layers with states of their own. The floor is the
inputs, the outputs and twice the states, at the bandwidth of a large copy on the same device.
"scan" is the time without the chunked form. Prints one JSON object per line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.recurrent import CudaRecurrentOps
from exl_core.ops.open import get_table
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan, Taps
from time_cuda_attention import copy_bandwidth, milliseconds

LAYERS = 6
Op = Callable[[Tensor, Tensor, StateRows], Tensor]
DELTA = {"qwen3.5-35b-a3b": (16, 32), "qwen3.5-0.8b": (16, 16)}
SCANS = {"nemotron-3-nano": (64, 8), "granite-4-h-small": (128, 1)}
LENGTHS: dict[str, tuple[int, ...]] = {
    **{f"{count} rows": (1,) * count for count in (1, 8, 32)},
    **{f"prompt of {count}": (count,) for count in (32, 64, 128, 256, 512, 2048)},
    "4 prompts of 512": (512,) * 4,
    "16 prompts of 128": (128,) * 16,
    "32 prompts of 64": (64,) * 32,
    "prompt of 1024 and 31 rows": (1024, *[1] * 31),
}


def delta_op(table: Any, key_heads: int, value_heads: int) -> tuple[Op, tuple[int, ...], int, int]:
    """The op, the shape of its state, its input width and its output width."""
    gates = torch.rand(2, value_heads, device="cuda")
    rule = DeltaRule(key_heads, value_heads, 128, 128, gates[0], gates[1])
    width = (2 * key_heads + value_heads) * 128

    def run(x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        return cast(Tensor, table.delta_rule(x[:, :width], x[:, width:], rule, states, rows))

    return run, (value_heads, 128, 128), width + 2 * value_heads, value_heads * 128


def scan_op(table: Any, heads: int, groups: int) -> tuple[Op, tuple[int, ...], int, int]:
    decay, dt_bias, skip = torch.rand(3, heads, device="cuda")
    scan = StateScan(heads, 64, 128, groups, decay, dt_bias, skip, (0.0, 100.0))
    width = heads * 64 + 2 * groups * 128

    def run(x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        return cast(Tensor, table.state_scan(x[:, :width], x[:, width:], scan, states, rows))

    return run, (heads, 64, 128), width + heads, heads * 64


def conv_op(table: Any, channels: int) -> tuple[Op, tuple[int, ...], int, int]:
    taps = Taps(torch.rand(4, channels, device="cuda"), None, has_silu=True)

    def run(x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        return cast(Tensor, table.causal_conv(x, taps, states, rows))

    return run, (3, channels), channels, channels


def microseconds(work: Callable[[], object]) -> float:
    """Time of one layer: `work` runs all of them, here as a captured graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return milliseconds(graph.replay, 7) * 1e3 / LAYERS


def all_layers(run: Op, x: Tensor, states: list[Tensor], rows: StateRows) -> None:
    for each in states:
        run(x, each, rows)


def time_op(name: str, op: tuple[Op, tuple[int, ...], int, int], bandwidth: float) -> None:
    run, shape, width, out_width = op
    for label, lengths in LENGTHS.items():
        seqs, count = len(lengths), sum(lengths)
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        past = torch.ones(seqs, dtype=torch.int32, device="cuda")
        rows = StateRows(starts, past, torch.arange(seqs, device="cuda"))
        x = torch.randn(count, width, device="cuda") / 4
        states = [torch.zeros(seqs, *shape, device="cuda") for _ in range(LAYERS)]

        work = partial(all_layers, run, x, states, rows)
        us = microseconds(work)
        moved = 4 * (count * (width + out_width) + 2 * seqs * states[0][0].numel())
        share = moved / bandwidth * 1e6 / us
        line = {"op": name, "rows": label, "us": round(us, 1), "share": round(share, 3)}
        if not name.startswith("conv") and count >= 64:
            own = CudaRecurrentOps._set_workspace
            cast(Any, CudaRecurrentOps)._set_workspace = lambda *_: None
            line["scan"] = round(microseconds(work), 1)
            cast(Any, CudaRecurrentOps)._set_workspace = own
        print(json.dumps(line), flush=True)


def main() -> None:
    table, bandwidth = get_table("cuda", threads=1), copy_bandwidth()
    print(json.dumps({"copy_bytes_per_s": bandwidth}), flush=True)
    ops = {f"delta rule, {name}": partial(delta_op, table, *heads) for name, heads in DELTA.items()}
    ops |= {f"state scan, {name}": partial(scan_op, table, *heads) for name, heads in SCANS.items()}
    ops["convolution, qwen3.5-35b-a3b"] = partial(conv_op, table, 8192)
    for name, make in ops.items():
        time_op(name, make(), bandwidth)


if __name__ == "__main__":
    main()
