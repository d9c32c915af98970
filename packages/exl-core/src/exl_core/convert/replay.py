"""CUDA graphs for steps of many small operations: one launch instead of hundreds.

The host takes about 15 us to launch an operation that runs for 3 us. A step that is called with
operands of the same shapes again and again, layer by layer, is captured at its third call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from exl_core.model.cuda_graphs import capture

CAPTURE_AT_CALL = 3  # with operands of the same shapes; fewer calls are not worth a graph
MAX_GRAPHS = 64  # per step

Step = Callable[..., tuple[Tensor, ...]]


class Replay:
    """Function of tensors and hashable choices that returns tensors; a GPU replays it as a graph.

    The function may change its operands, which are copies in a replay. It must not synchronize with
    the GPU or copy host data to it. Results on a CPU belong to the caller. Results on a GPU are
    valid until the next call.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *tensors: Tensor, choices: tuple[Hashable, ...] = ()) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self._step(*tensors, *choices)
        key = (choices, *((x.shape, x.dtype, x.device) for x in tensors))
        if key not in self._graphs:
            self._calls[key] += 1
            if self._calls[key] < CAPTURE_AT_CALL or len(self._graphs) >= MAX_GRAPHS:
                return self._step(*tensors, *choices)
            pool = next((graph.pool for graph in self._graphs.values()), None)
            self._graphs[key] = _Graph(self._step, tensors, choices, pool)
        return self._graphs[key].run(tensors)


class _Graph:
    """Captured graph of one step for operands of certain shapes."""

    def __init__(
        self,
        step: Step,
        tensors: tuple[Tensor, ...],
        choices: tuple[Hashable, ...],
        pool: Any,
    ) -> None:
        self._operands = tuple(
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors
        )
        self._graph = torch.cuda.CUDAGraph()
        device = tensors[0].device
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), capture(self._graph, device, pool):
            self._results = step(*self._operands, *choices)

    @property
    def pool(self) -> Any:
        """Memory pool that all graphs of a step share: only the last results are still in use."""
        return self._graph.pool()

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for operand, x in zip(self._operands, tensors, strict=True):
            operand.copy_(x)
        self._graph.replay()
        return self._results
