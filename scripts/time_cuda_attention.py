"""Times attention on a GPU: decode over caches of every precision, and prefill.

Decode runs like the layers of a model, in one captured CUDA graph: for each layer RoPE with the
cache write, then attention. Every layer has its own cache. Rates count the bytes of the keys and
values that queries see. The share is relative to the bandwidth of a large copy on the same device.
Values are random. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.cache_rows import row_size
from exl_kernels import cuda

F16, F8 = torch.float16, torch.float8_e4m3fn
FORMATS = {
    "f16": (F16, F16),
    "f8": (F8, F8),
    "q8": (torch.int8, torch.int8),
    "q6": (torch.int8, torch.uint8),
    "q4": (torch.uint8, torch.uint8),
}
Q_HEADS, KV_HEADS, D, PAGE = 32, 8, 128, 256
DECODE = [(1, 256), (1, 1024), (1, 32768), (8, 1024), (32, 1024)]


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work` over `repeats` runs."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(sorted(times)[len(times) // 2])


def copy_bandwidth() -> float:
    """Bandwidth of a large device copy in bytes per second, counting reads and writes."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source), 20)
    return 2 * source.nbytes / ms * 1e3


@dataclass
class Layer:
    """Cache of one layer, and a batch of sequences that use it."""

    gpu: Gpu
    keys: Tensor
    values: Tensor
    page_table: Tensor
    row_starts: Tensor
    past_lens: Tensor
    slots: Tensor
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    max_rows: int
    max_keys: int

    @property
    def cache(self) -> cuda.Cache:
        return cuda.Cache(
            self.keys.data_ptr(),
            self.values.data_ptr(),
            TYPES[self.keys.dtype],
            TYPES[self.values.dtype],
            KV_HEADS,
            D,
            PAGE,
            self.keys.shape[0],
        )

    def write(self) -> None:
        args = cuda.RopeWrite(
            qkv=self.qkv.data_ptr(),
            qkv_stride=self.qkv.stride(0),
            qkv_dtype=TYPES[self.qkv.dtype],
            rows=self.qkv.shape[0],
            q_heads=Q_HEADS,
            rotary_half=D // 2,
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            slots=self.slots.data_ptr(),
        )
        self.gpu.call("rope_write", args, self.cache)

    def attend(self) -> None:
        workspace = self.gpu.workspace("attention", False, D)
        args = cuda.Attention(
            q=self.qkv.data_ptr(),
            q_stride=self.qkv.stride(0),
            out=self.qkv.data_ptr(),
            out_stride=self.qkv.stride(0),
            dtype=TYPES[self.qkv.dtype],
            rows=self.qkv.shape[0],
            q_heads=Q_HEADS,
            seqs=self.past_lens.shape[0],
            page_table=self.page_table.data_ptr(),
            row_starts=self.row_starts.data_ptr(),
            past_lens=self.past_lens.data_ptr(),
            table_stride=self.page_table.shape[1],
            max_rows=self.max_rows,
            max_keys=self.max_keys,
            scale=D**-0.5,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )
        self.gpu.call("attention", args, self.cache)


def make_layer(
    gpu: Gpu, name: str, batch: int, past: int, rows: int, *, max_keys: int = 0
) -> Layer:
    """Layer in which every sequence has `past` cached keys and `rows` new ones.

    The whole cache is filled with random keys and values.
    """
    keys = past + rows
    pages_each = -(-keys // PAGE)
    pages = pages_each * batch
    key_type, value_type = FORMATS[name]
    caches = [
        torch.zeros(
            (pages, KV_HEADS, PAGE, row_size(one, D) * one.itemsize),
            dtype=torch.uint8,
            device="cuda",
        ).view(one)
        for one in (key_type, value_type)
    ]
    order = torch.randperm(pages, device="cuda")
    page_table = order.view(batch, pages_each)
    at = torch.arange(past, keys, device="cuda")
    slots = page_table[:, at // PAGE] * PAGE + at % PAGE
    total = batch * rows
    layer = Layer(
        gpu=gpu,
        keys=caches[0],
        values=caches[1],
        page_table=page_table.int().contiguous(),
        row_starts=torch.arange(0, total + 1, rows, dtype=torch.int32, device="cuda"),
        past_lens=torch.full((batch,), past, dtype=torch.int32, device="cuda"),
        slots=slots.flatten().contiguous(),
        qkv=torch.randn(total, (Q_HEADS + 2 * KV_HEADS) * D, device="cuda").half(),
        cos=torch.ones(total, D // 2, device="cuda"),
        sin=torch.zeros(total, D // 2, device="cuda"),
        max_rows=rows,
        max_keys=max(max_keys, keys),
    )
    for first in range(0, pages * PAGE, 16384):
        count = min(16384, pages * PAGE - first)
        new = torch.randn(2, count, KV_HEADS, D, device="cuda").half()
        at = torch.arange(first, first + count, device="cuda")
        gpu.call(
            "write_kv",
            layer.cache,
            new[0].data_ptr(),
            new[1].data_ptr(),
            TYPES[F16],
            KV_HEADS * D,
            at.data_ptr(),
            count,
        )
        torch.cuda.synchronize()
    return layer


def captured(layers: list[Layer], *parts: Callable[[Layer], None]) -> torch.cuda.CUDAGraph:
    """CUDA graph that runs all parts of each layer in turn."""
    for part in parts:
        part(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            for part in parts:
                part(layer)
    return graph


def time_decode(gpu: Gpu, name: str, batch: int, keys: int, bandwidth: float) -> dict[str, object]:
    row_bytes = sum(row_size(one, D) * one.itemsize for one in FORMATS[name])
    moved = batch * keys * KV_HEADS * row_bytes
    count = int(min(64, max(8, 1e9 // moved)))
    layers = [
        make_layer(gpu, name, batch, keys - 1, 1, max_keys=max(keys, 8192)) for _ in range(count)
    ]
    for layer in layers[1:]:  # the layers of a model share these operands
        layer.page_table, layer.slots = layers[0].page_table, layers[0].slots
        layer.row_starts, layer.past_lens = layers[0].row_starts, layers[0].past_lens
        layer.cos, layer.sin = layers[0].cos, layers[0].sin
    times = {}
    for label, parts in (
        ("both", (Layer.write, Layer.attend)),
        ("attention", (Layer.attend,)),
        ("write", (Layer.write,)),
    ):
        graph = captured(layers, *parts)
        times[label] = milliseconds(graph.replay, 30) / count * 1e3
    rate = moved / times["attention"] * 1e6
    row = {
        "op": "decode",
        "format": name,
        "batch": batch,
        "keys": keys,
        "us": round(times["both"], 2),
        "attention_us": round(times["attention"], 2),
        "write_us": round(times["write"], 2),
        "gb_s": round(rate / 1e9),
        "share": round(rate / bandwidth, 3),
    }
    print(
        f"{name:4} batch {batch:2} keys {keys:5}  {times['both']:7.2f} us"
        f" (attention {times['attention']:7.2f}, write {times['write']:5.2f})"
        f"  {rate / 1e9:5.0f} GB/s  {rate / bandwidth:5.2f}",
        flush=True,
    )
    return row


def time_prefill(gpu: Gpu, name: str, past: int, rows: int) -> dict[str, object]:
    layer = make_layer(gpu, name, 1, past, rows)
    graph = captured([layer] * 4, Layer.attend)
    us = milliseconds(graph.replay, 15) / 4 * 1e3
    write = milliseconds(captured([layer] * 4, Layer.write).replay, 15) / 4 * 1e3
    seen = rows * past + rows * (rows + 1) / 2
    rate = 4 * D * Q_HEADS * seen / us * 1e6
    print(
        f"{name:4} prefill past {past:5} rows {rows:5}  {us:8.1f} us  {rate / 1e12:6.1f} TFLOP/s"
        f"  (write {write:6.1f} us)",
        flush=True,
    )
    return {
        "op": "prefill",
        "format": name,
        "past": past,
        "rows": rows,
        "us": round(us, 1),
        "write_us": round(write, 1),
        "tflop_s": round(rate / 1e12, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    formats = parser.parse_args().formats
    gpu = Gpu(torch.device("cuda"))
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s")
    results = [
        time_decode(gpu, name, batch, keys, bandwidth) for batch, keys in DECODE for name in formats
    ]
    for past, rows in ((0, 512), (0, 2048), (0, 4096), (4096, 4096)):
        results += [time_prefill(gpu, name, past, rows) for name in formats]
    print(json.dumps({"copy_gb_s": round(bandwidth / 1e9), "results": results}))


if __name__ == "__main__":
    main()
