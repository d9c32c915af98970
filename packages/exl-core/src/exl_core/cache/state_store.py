"""Memory of the recurrent layers' states: slots of fixed size, one for each sequence or snapshot.

Knows shapes, which may differ between layers. Knows neither sequences nor what the states belong to
(`state.py`). All numbers are float32: a state is read and written once per token, and rounding it
would add up over a long text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.layers import StateShape
from exl_core.cache.memory import free_memory_bytes, zeros_when_touched
from exl_core.cache.state import SPARE_SLOTS, StateCopy
from exl_core.errors import OutOfMemoryError, RequestError

_MIB = 1024 * 1024


class LayerState(NamedTuple):
    """States of one layer: earlier inputs of its convolution [slots, rows, channels], and the
    matrix of each head [slots, heads, rows, columns], if it has one."""

    inputs: Tensor
    matrix: Tensor | None

    @property
    def states(self) -> Tensor:
        """The matrices, of a layer that has some."""
        assert self.matrix is not None, "the layer's mixer has them"
        return self.matrix


class StateStore:
    """States of `num_slots` sequences or snapshots in every recurrent layer."""

    def __init__(
        self,
        shapes: Sequence[StateShape | None],
        num_slots: int,
        devices: Sequence[torch.device],
    ) -> None:
        """`shapes` and `devices` are by layer; None for a layer without a state."""
        if num_slots < 1:
            raise RequestError("recurrent layers need at least one slot", got=num_slots)
        self.num_slots = num_slots
        self.bytes_per_slot = sum(shape.size_bytes for shape in shapes if shape is not None)
        self._check_fits(shapes, devices)
        self._layers = {
            layer: LayerState(
                self._slots(shape.inputs, where),
                None if shape.matrix is None else self._slots(shape.matrix, where),
            )
            for layer, (shape, where) in enumerate(zip(shapes, devices, strict=True))
            if shape is not None
        }

    @property
    def size_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot

    @property
    def spare_slot(self) -> int:
        """Slot that belongs to no sequence: padding rows of a batch write there. Layers on a GPU
        have it."""
        return self.num_slots

    def untouched_bytes(self, where: torch.device) -> int:
        """Memory of a device that the store has been promised and takes when states are written:
        all of it on a CPU, none on a GPU."""
        if where.type != "cpu":
            return 0
        tensors = self._tensors()
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")

    def layer(self, layer: int) -> LayerState:
        """States of a recurrent layer."""
        return self._layers[layer]

    @torch.inference_mode()  # the store may have been made in this mode
    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Makes the copies in every layer, one after the other."""
        for source, target in copies:
            if not (0 <= source < self.num_slots and 0 <= target < self.num_slots):
                raise ValueError(f"no such slots: {source}, {target} of {self.num_slots}")
            for tensor in self._tensors():
                tensor[target] = tensor[source]

    @torch.inference_mode()
    def transfer(self, to: StateStore, source: int, target: int) -> None:
        """Copies a slot to another store of the same shapes."""
        for ours, theirs in zip(self._tensors(), to._tensors(), strict=True):
            theirs[target] = ours[source]

    def _tensors(self) -> list[Tensor]:
        states = self._layers.values()
        return [tensor for state in states for tensor in state if tensor is not None]

    def _slots(self, shape: Sequence[int], where: torch.device) -> Tensor:
        if where.type == "cpu":
            return zeros_when_touched((self.num_slots, *shape), torch.float32)
        return torch.zeros((self._slots_on(where), *shape), device=where)

    def _slots_on(self, where: torch.device) -> int:
        """Slots of a layer on a device."""
        return self.num_slots + (0 if where.type == "cpu" else SPARE_SLOTS)

    def _check_fits(
        self, shapes: Sequence[StateShape | None], devices: Sequence[torch.device]
    ) -> None:
        """Raises OutOfMemoryError if the layers of a device do not fit there."""
        sizes: dict[torch.device, int] = {}
        for shape, where in zip(shapes, devices, strict=True):
            sizes[where] = sizes.get(where, 0) + (0 if shape is None else shape.size_bytes)
        for where, each in sizes.items():
            available, size = free_memory_bytes(where), each * self._slots_on(where)
            if available is not None and size > available:
                raise OutOfMemoryError(
                    f"the states of {self.num_slots} sequences and snapshots take "
                    f"{size / _MIB:.0f} MiB on {where}",
                    where="cache",
                    expected=f"at most {available / _MIB:.0f} MiB, which is what is free",
                    next_step="Run fewer sequences at once, or make the cache smaller.",
                )
