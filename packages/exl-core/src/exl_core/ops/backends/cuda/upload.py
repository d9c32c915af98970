"""Uploads from host memory at the bus's speed: pageable memory goes through pinned buffers.

The driver can copy from pageable memory (a mapped file) too, but with one thread only, and the
caller waits. Here each thread has two pinned buffers of its own. It fills one while the other is
uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import local

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import aligned

BUFFER_BYTES = 8 << 20
SMALL_BYTES = 64 << 10  # up to this size the driver's own copy is as fast


class _Buffer:
    """Pinned memory, with an event for the end of the last upload from it."""

    def __init__(self) -> None:
        self._memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._read_event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def put(self, source: Tensor, offset: int) -> None:
        """Copies a tensor to the buffer, from this byte on, after `wait`."""
        _view(self._memory, source, offset).copy_(source)

    def wait(self) -> None:
        """Waits until the last upload from the buffer has been read."""
        self._read_event.synchronize()  # returns at once if never recorded

    def send(self, target: Tensor) -> None:
        """Uploads the first bytes of the buffer to `target`, uint8."""
        target.copy_(self._memory[: target.numel()], non_blocking=True)
        self._read_event.record()

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


def upload_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """`upload` of many tensors, with one upload per pinned buffer instead of one per tensor.

    The results share one allocation. The caller must not keep one of them alone for long.
    """
    places: dict[int, int] = {}
    size = 0
    for index, tensor in enumerate(tensors):
        if tensor.device != device and 0 < tensor.nbytes <= BUFFER_BYTES:
            places[index] = size
            size += aligned(tensor.nbytes)
    if len(places) < 2:
        return [upload(tensor, device) for tensor in tensors]
    target = torch.empty(size, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        send_all(
            [(tensors[index], at) for index, at in places.items()], target, _buffers.of(device)
        )
    return [
        upload(tensor, device) if (at := places.get(index)) is None else _view(target, tensor, at)
        for index, tensor in enumerate(tensors)
    ]


def send_all(
    tensors: Sequence[tuple[Tensor, int]], target: Tensor, pair: tuple[_Buffer, _Buffer]
) -> None:
    """Copies tensors to their offsets in `target`, uint8, in ascending order. The buffers of `pair`
    take turns."""
    buffer, other = pair
    buffer.wait()
    first = last = 0
    for tensor, at in tensors:
        if at + tensor.nbytes - first > BUFFER_BYTES:
            buffer.send(target[first:last])
            buffer, other = other, buffer
            buffer.wait()
            first = at
        buffer.put(tensor, at - first)
        last = at + tensor.nbytes
    buffer.send(target[first:last])


def _view(memory: Tensor, like: Tensor, offset: int) -> Tensor:
    """A contiguous tensor with the shape and type of `like`, from a byte of `memory` (uint8) on."""
    strides, step = [0] * like.ndim, 1
    for i in range(like.ndim - 1, -1, -1):
        strides[i], step = step, step * like.shape[i]
    typed = memory if like.dtype is torch.uint8 else memory.view(like.dtype)
    return typed.as_strided(like.shape, strides, offset // like.itemsize)
