"""Scratch buffers for dequantized slices of weights: one is filled while the other is multiplied.

A second stream, the filler, dequantizes. Events order it against the current stream, within and
outside of the capture of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exl_core.ops.backends.cuda.library import Gpu


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

    def begin_pass(self) -> None:
        if not self._is_captured:  # after a capture, `take` makes new events and records them
            self.release()

    def take(self, size: int) -> None:
        stream = torch.cuda.current_stream(self._gpu.device)
        is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured is not self._is_captured:
            # An event is valid either within a capture or outside of it. A capture begins or has
            # ended here.
            self._is_captured = is_captured
            self._make_events()
            self._read_event.record(stream)
        self._is_used_by_graphs |= is_captured
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
    """Two buffers that are used alternately."""

    def __init__(self, gpu: Gpu) -> None:
        filler = torch.cuda.Stream(gpu.device)  # type: ignore[no-untyped-call]
        self._pair = Slice(gpu, filler), Slice(gpu, filler)
        self._next_index = 0

    def begin_pass(self) -> None:
        """Makes later fills wait for all work enqueued so far: a graph may use the buffers.

        Does nothing within a capture, which cannot wait for work outside of it.
        """
        if not torch.cuda.is_current_stream_capturing():
            for buffer in self._pair:
                buffer.begin_pass()

    @contextmanager
    def next(self, size: int) -> Iterator[Slice]:
        """Context with the next buffer, which holds at least `size` numbers; releases it at the
        end.

        Both buffers grow together. Otherwise a capture that starts with the other buffer than the
        pass before it might have to grow one, and a capture cannot wait for work outside of it.
        """
        for buffer in self._pair:
            buffer.grow(size)
        buffer = self._pair[self._next_index]
        self._next_index = 1 - self._next_index
        buffer.take(size)
        try:
            yield buffer
        finally:
            buffer.release()
