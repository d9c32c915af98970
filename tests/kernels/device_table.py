"""Op table of a GPU for tests that have their operands on the CPU.

Every call copies the whole memory that its operands lie in to the GPU, runs the op, and copies the
memory back. Operands therefore have the same strides, gaps and shared memory on the GPU as on the
CPU, and the CPU sees writes outside of an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exl_core.ops.moe import Routed
from exl_core.ops.table import OpTable

TAKES_CPU_OPERANDS = frozenset(
    {
        *("new_linear", "fill_linear", "join", "stack"),
        *("attention_batch", "sample"),
    }
)
"""Ops whose operands are on the CPU on every backend, or may be."""


class Mirror:
    """Copies of the memory of CPU tensors on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}  # by address: bytes here and there
        self._tensors: list[tuple[Tensor, Tensor]] = []  # operands here and there

    def to_device(self, value: Any) -> Any:
        """A tensor, or a dataclass of tensors, on the GPU. Other values are returned unchanged."""
        if isinstance(value, Tensor):
            return self._tensor(value) if value.device.type == "cpu" else value
        if not is_dataclass(value) or isinstance(value, type):
            return value
        parts = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        moved = {name: self.to_device(part) for name, part in parts.items()}
        changed = {name: part for name, part in moved.items() if part is not parts[name]}
        return replace(value, **changed) if changed else value

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        here = torch.empty(0, dtype=torch.uint8).set_(storage)
        if storage.data_ptr() not in self._memory:
            self._memory[storage.data_ptr()] = here, here.to(self._device, copy=True)
        there = self._memory[storage.data_ptr()][1]
        view = torch.empty(0, dtype=tensor.dtype, device=self._device).set_(
            there.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        self._tensors.append((tensor, view))
        return view

    def copy_back(self) -> None:
        for here, there in self._memory.values():
            here.copy_(there)

    def to_host(self, result: Any) -> Any:
        """Result of the op on the CPU; an operand that the op returns is the caller's tensor."""
        if isinstance(result, Routed):
            return Routed(result.ids.cpu(), result.weights.cpu())
        if not isinstance(result, Tensor):
            return result
        for tensor, view in self._tensors:
            if view is result:
                return tensor
        return result.cpu()


class DeviceTable:
    """Op table whose operands and results are on the CPU; `on_device` is the table of the GPU."""

    def __init__(self, on_device: OpTable) -> None:
        self.on_device = on_device

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.on_device, name)
        if name in TAKES_CPU_OPERANDS or not callable(member):
            return member
        return partial(self._call, member)

    def _call(self, op: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        memory = Mirror(self.on_device.device)
        result = op(
            *(memory.to_device(operand) for operand in operands),
            **{name: memory.to_device(option) for name, option in options.items()},
        )
        memory.copy_back()
        return memory.to_host(result)
