"""Scratch buffers for dequantized slices of weights: one is filled while another is multiplied.

A second stream, the filler, dequantizes. Events order it against the current stream, within and
outside of the capture of a CUDA graph.

Dequantizing beside a product saves little time, because the product occupies all registers. Ranks
fill their slices during the sums between GPUs, which leave most multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exl_core.ops.backends.cuda.library import Gpu

BUFFERS = 2
EXCHANGE_BUFFERS = 1
"""Buffers that are added once GPUs exchange."""


class Slice:
    """Scratch buffer that the filler stream writes and the current stream reads."""

    def __init__(self, gpu: Gpu, filler: torch.cuda.Stream) -> None:
        self._gpu = gpu
        self._filler = filler
        self._is_captured = self._is_used_by_graphs = False
        self._make_events()
        self._buffer = gpu.empty(0, dtype=torch.float16)
        # Replaced buffers that captured graphs may still use.
        self._retired: list[torch.Tensor] = []
        self.memory = self._buffer

    @property
    def size(self) -> int:
        """Float16 numbers that the buffer holds."""
        return self._buffer.numel()

    def begin_pass(self) -> None:
        if not self._is_captured:  # after a capture, `enter` makes new events and records them
            self.release()

    def enter(self) -> None:
        """Makes events of its own for a capture, or for what comes after it."""
        stream = torch.cuda.current_stream(self._gpu.device)
        is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured is not self._is_captured:
            # An event is valid either within a capture or outside of it. A capture begins or has
            # ended here.
            self._is_captured = is_captured
            self._make_events()
            self._read_event.record(stream)

    def take(self, size: int) -> None:
        self.enter()
        self._is_used_by_graphs |= self._is_captured
        self.memory = self._buffer[:size]

    def grow(self, size: int) -> None:
        """Makes the buffer hold at least `size` float16 numbers. Precedes `take`."""
        if self._buffer.numel() >= size:
            return
        stream = torch.cuda.current_stream(self._gpu.device)
        # The filler stream may still write to the old buffer.
        stream.wait_stream(self._filler)
        if self._is_used_by_graphs:
            self._retired.append(self._buffer)
            self._is_used_by_graphs = False
        self._buffer = self._gpu.empty(size, dtype=torch.float16)
        self._buffer.record_stream(self._filler)
        self._read_event.record(stream)

    def _make_events(self) -> None:
        self._filled_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._read_event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Context whose kernels run on the filler stream, once the buffer has been read.

        Later kernels of the current stream wait for them.
        """
        self._filler.wait_event(self._read_event)
        with torch.cuda.stream(self._filler):
            yield
            self._filled_event.record(self._filler)
        torch.cuda.current_stream(self._gpu.device).wait_event(self._filled_event)

    def release(self) -> None:
        self._read_event.record(torch.cuda.current_stream(self._gpu.device))


class Slices:
    """Buffers that are used in turn: two, and one more once an exchange has begun."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._filler = torch.cuda.Stream(gpu.device)  # type: ignore[no-untyped-call]
        self._buffers = [Slice(gpu, self._filler) for _ in range(BUFFERS)]
        self._next_index = 0
        # Event that no fill has waited for, and whether it belongs to a capture.
        self._gate: tuple[torch.cuda.Event, bool] | None = None

    def begin_pass(self) -> None:
        """Makes later fills wait for all work enqueued so far: a graph may use the buffers.

        Within a capture they cannot wait for work outside of it.
        """
        self._gate = None
        if not torch.cuda.is_current_stream_capturing():
            for buffer in self._buffers:
                buffer.begin_pass()

    def begin_exchange(self) -> None:
        """Makes later fills of this pass wait for the work enqueued so far, and begin beside the
        exchange with other GPUs that follows. A third buffer is for the last matrix of an MLP, so
        that all of its products can be filled during the exchange before it.

        Nothing happens before the first slice.
        """
        if not self._buffers[0].size:
            return
        is_captured = torch.cuda.is_current_stream_capturing()
        if len(self._buffers) < BUFFERS + EXCHANGE_BUFFERS and not is_captured:
            self._buffers.append(Slice(self._gpu, self._filler))
            self._buffers[-1].grow(self._buffers[0].size)
        for buffer in self._buffers:
            buffer.enter()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._gpu.device))
        self._gate = event, is_captured

    @contextmanager
    def next(self, size: int) -> Iterator[Slice]:
        """Context with the next buffer, which holds at least `size` numbers; releases it at the
        end.

        All buffers grow together. Otherwise a capture that starts with another buffer than the
        pass before it might have to grow one, and a capture cannot wait for work outside of it.
        """
        for buffer in self._buffers:
            buffer.grow(size)
        buffer = self._buffers[self._next_index]
        self._next_index = (self._next_index + 1) % len(self._buffers)
        buffer.take(size)
        gate, self._gate = self._gate, None
        if gate is not None and gate[1] == torch.cuda.is_current_stream_capturing():
            self._filler.wait_event(gate[0])
        try:
            yield buffer
        finally:
            buffer.release()
