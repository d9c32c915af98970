"""Experts on the CPU for the rows of a GPU, without synchronization of the host.

A stream of its own copies the rows to page-locked memory, calls the CPU's kernel as a host function
of the stream, and copies the results back. All of it is stream work, so that captured graphs may
contain it, and the main stream computes something else meanwhile.

The buffers are shared by all layers: their work is in the order of one stream. A captured graph
keeps the addresses of its buffers and calls, which are therefore never freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.table import CpuTable
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.moe import ExpertMlp, Routed
from exl_kernels import ExpertCall

MAX_CALLS = 1 << 14
"""Calls that are kept, about 300 bytes each: one for each layer and number of rows. Beyond it,
those that no graph has captured are dropped, after the GPU has finished."""


class _Buffers(NamedTuple):
    """Page-locked memory of the calls with up to some number of rows."""

    inputs: Tensor  # x [m, d], weights [m, k] and ids [m, k], one after the other
    outputs: Tensor  # [m, d]


class _Call(NamedTuple):
    """A call, and the experts whose address is its key."""

    experts: ExpertMlp
    call: ExpertCall


class CudaHostExperts:
    """HostExperts of one GPU."""

    def __init__(self, gpu: Gpu, cpu: CpuTable) -> None:
        self.cpu = cpu
        self._gpu = gpu
        self._stream = torch.cuda.Stream(gpu.device)  # type: ignore[no-untyped-call]
        self._buffers: dict[tuple[int, ...], _Buffers] = {}
        self._calls: dict[tuple[int, int, int], _Call] = {}
        self._captured: set[tuple[int, int, int]] = set()

    def start(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Callable[[], Tensor]:
        rows, top_k = routed.ids.shape
        buffers = self._buffers_for(rows, top_k, experts)
        call = self._call(rows, top_k, experts, buffers)
        ids = routed.ids.to(torch.int32).contiguous().view(torch.float32)
        parts = (x.float(), routed.weights, ids)
        packed = torch.cat([part.reshape(-1) for part in parts])  # [m * (d + 2 k)]
        size = experts.down.out_features
        y = self._gpu.empty(rows, size)
        main = torch.cuda.current_stream(self._gpu.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            buffers.inputs[: packed.numel()].copy_(packed, non_blocking=True)
            self._gpu.call("host_call", ExpertCall.function, call.data)
            y.copy_(buffers.outputs[: y.numel()].view(rows, size), non_blocking=True)

        def finish() -> Tensor:
            nonlocal packed
            main.wait_stream(self._stream)
            del packed  # its memory is free for work that comes after the copy
            return y

        return finish

    def _buffers_for(self, rows: int, top_k: int, experts: ExpertMlp) -> _Buffers:
        capacity = 1 << (rows - 1).bit_length()
        row_sizes = experts.gate_up.in_features + 2 * top_k, experts.down.out_features
        key = (capacity, *row_sizes)
        if key not in self._buffers:
            made = (torch.empty(capacity * size, pin_memory=True) for size in row_sizes)
            self._buffers[key] = _Buffers(*made)
        return self._buffers[key]

    def _call(self, rows: int, top_k: int, experts: ExpertMlp, buffers: _Buffers) -> ExpertCall:
        key = (id(experts), rows, top_k)
        is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            self._captured.add(key)
        if key not in self._calls:
            if len(self._calls) >= MAX_CALLS and not is_capturing:
                torch.cuda.synchronize(self._gpu.device)
                self._calls = {one: self._calls[one] for one in self._captured}
            self._calls[key] = _Call(experts, self._new_call(rows, top_k, experts, buffers))
        return self._calls[key].call

    def _new_call(self, rows: int, top_k: int, experts: ExpertMlp, buffers: _Buffers) -> ExpertCall:
        width = experts.gate_up.in_features
        x, weights, ids = buffers.inputs[: rows * (width + 2 * top_k)].split_with_sizes(
            (rows * width, rows * top_k, rows * top_k)
        )
        outputs = buffers.outputs[: rows * experts.down.out_features]
        routed = Routed(ids.view(torch.int32).view(rows, top_k), weights.view(rows, top_k))
        return self.cpu.expert_call(x.view(rows, width), routed, experts, outputs.view(rows, -1))
