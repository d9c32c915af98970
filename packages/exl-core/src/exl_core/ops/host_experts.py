"""Experts whose matrices are in the host's memory, for rows on another device.

The matrices are packed for the op table of the CPU, which computes them. Rows, choices and weights
are copied there, and the results back. `open_host_experts` (`ops/open.py`) chooses the
implementation for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from exl_core.ops.moe import ExpertMlp, Routed
from exl_core.ops.table import OpTable


class HostExperts(Protocol):
    """Computes the experts of layers that are on another device."""

    @property
    def cpu(self) -> OpTable:
        """The table that packs and computes the experts' matrices."""
        ...

    def start(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Callable[[], Tensor]:
        """Starts `RoutedOps.expert_mlp` for operands on the device, and returns a function that
        makes later work of the device wait for the result and returns it: float32 [m, d].

        Work that the caller gives the device in between runs at the same time. The host does not
        wait for any of it.
        """
        ...


class NearExperts:
    """HostExperts of a device that is the CPU, such as the reference: nothing is copied."""

    def __init__(self, cpu: OpTable) -> None:
        self.cpu = cpu

    def start(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Callable[[], Tensor]:
        y = self.cpu.expert_mlp(x, routed, experts)
        return lambda: y
