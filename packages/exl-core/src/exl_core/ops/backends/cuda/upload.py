"""Uploads from host memory at the bus's speed: pageable memory goes through pinned buffers.

The driver can copy from pageable memory (a mapped file) too, but with one thread only, and the
caller waits. Here each thread has two pinned buffers of its own. It fills one while the other is
uploaded.
"""

from __future__ import annotations

from threading import local

import torch
from torch import Tensor

BUFFER_BYTES = 8 << 20
SMALL_BYTES = 64 << 10  # up to this size the driver's own copy is as fast


class _Buffer:
    """Pinned memory, with an event for the end of the last upload from it."""

    def __init__(self) -> None:
        self._memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._read_event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(self, source: Tensor, target: Tensor) -> None:
        self._read_event.synchronize()  # returns at once if never recorded
        staged = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self._read_event.record()


class _Buffers(local):
    """Two buffers per thread and device, allocated on first use."""

    def __init__(self) -> None:
        self._held: dict[torch.device, tuple[_Buffer, _Buffer]] = {}

    def of(self, device: torch.device) -> tuple[_Buffer, _Buffer]:
        held = self._held.get(device)
        if held is None:
            held = self._held[device] = _Buffer(), _Buffer()
        return held


_buffers = _Buffers()


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the GPU in the current stream, as a contiguous tensor.

    A tensor that is on that GPU already is returned as it is. Afterwards the caller may change or
    free the tensor, with one exception: a pinned tensor may be freed (torch keeps its memory until
    it has been read), but not changed.
    """
    if tensor.device == device:
        return tensor
    if tensor.nbytes <= SMALL_BYTES or tensor.ndim == 0 or tensor.is_pinned():
        return tensor.contiguous().to(device, non_blocking=True)
    if tensor.ndim == 1 or tensor[0].nbytes > BUFFER_BYTES:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return _upload_in_pieces(tensor.view(-1), device).view(tensor.shape)
    return _upload_in_pieces(tensor, device)


def _upload_in_pieces(tensor: Tensor, device: torch.device) -> Tensor:
    """Uploads a tensor in pieces of rows. Each row fits into a buffer."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    rows = max(BUFFER_BYTES // max(tensor[0].nbytes, 1), 1)
    with torch.cuda.device(device):
        pair = _buffers.of(device)
        for i, first in enumerate(range(0, tensor.shape[0], rows)):
            piece = slice(first, first + rows)
            pair[i % 2].upload(tensor[piece], target[piece])
    return target
