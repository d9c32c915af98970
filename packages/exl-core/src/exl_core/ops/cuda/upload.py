"""Host memory to the GPU, at the bus's speed: pageable memory goes through pinned buffers.

The driver copies from pageable memory (a mapped file) too, but one thread's worth at a time and
with the caller waiting. Here each thread has two buffers of its own: while one is on its way, it
fills the other.
"""

from __future__ import annotations

from threading import local

import torch
from torch import Tensor

BUFFER_BYTES = 8 << 20
SMALL_BYTES = 64 << 10  # up to so many bytes the driver's own copy is as fast


class _Buffer:
    """Pinned memory, and when what it holds has been read."""

    def __init__(self) -> None:
        self._memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pass_on(self, source: Tensor, target: Tensor) -> None:
        self._is_read.synchronize()  # at once where it was never used
        held = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        held.copy_(source)
        target.copy_(held, non_blocking=True)
        self._is_read.record()


class _Buffers(local):
    """Two for each thread and device, made when first needed."""

    def __init__(self) -> None:
        self._held: dict[torch.device, tuple[_Buffer, _Buffer]] = {}

    def of(self, device: torch.device) -> tuple[_Buffer, _Buffer]:
        held = self._held.get(device)
        if held is None:
            held = self._held[device] = _Buffer(), _Buffer()
        return held


_buffers = _Buffers()


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy on the GPU, in the current stream; what lies there already is not copied.

    The tensor may be changed or let go of afterwards; one that is pinned may only be let go of, and
    torch keeps it until it has been read.
    """
    if tensor.device == device:
        return tensor
    if tensor.nbytes <= SMALL_BYTES or tensor.ndim == 0 or tensor.is_pinned():
        return tensor.contiguous().to(device, non_blocking=True)
    if tensor.ndim == 1 or tensor[0].nbytes > BUFFER_BYTES:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return _in_pieces(tensor.view(-1), device).view(tensor.shape)
    return _in_pieces(tensor, device)


def _in_pieces(tensor: Tensor, device: torch.device) -> Tensor:
    """Of rows that fit into a buffer each."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    rows = max(BUFFER_BYTES // max(tensor[0].nbytes, 1), 1)
    with torch.cuda.device(device):
        pair = _buffers.of(device)
        for i, first in enumerate(range(0, tensor.shape[0], rows)):
            piece = slice(first, first + rows)
            pair[i % 2].pass_on(tensor[piece], target[piece])
    return target
