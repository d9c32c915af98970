"""Dequantized slices of weights: while one is multiplied, the next is written beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exl_core.ops.cuda.library import Gpu


class Slice:
    """A scratch buffer between the stream that fills it and the one that reads it."""

    def __init__(self, gpu: Gpu, filler: torch.cuda.Stream) -> None:
        self._gpu = gpu
        self._filler = filler
        self._is_captured = self._is_in_graphs = False
        self._make_events()
        self._held = gpu.empty(0, dtype=torch.float16)
        self._retired: list[torch.Tensor] = []  # captured graphs may still use them
        self.memory = self._held

    def begin_pass(self) -> None:
        if not self._is_captured:  # or `take` says so, since events are made anew
            self.release()

    def take(self, size: int) -> None:
        stream = torch.cuda.current_stream(self._gpu.device)
        is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured is not self._is_captured:
            # Events mean something within a capture or outside of it; this is where one begins.
            self._is_captured = is_captured
            self._make_events()
            self._is_read.record(stream)
        self._is_in_graphs |= is_captured
        self.memory = self._held[:size]

    def grow(self, size: int) -> None:
        """Room for so many numbers, before `take`."""
        if self._held.numel() >= size:
            return
        stream = torch.cuda.current_stream(self._gpu.device)
        # The stream that fills it may still be at the old one.
        stream.wait_stream(self._filler)
        if self._is_in_graphs:
            self._retired.append(self._held)
            self._is_in_graphs = False
        self._held = self._gpu.empty(size, dtype=torch.float16)
        self._held.record_stream(self._filler)
        self._is_read.record(stream)

    def _make_events(self) -> None:
        self._is_filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """What is launched inside runs as soon as the buffer has been read; readers wait for it."""
        self._filler.wait_event(self._is_read)
        with torch.cuda.stream(self._filler):
            yield
            self._is_filled.record(self._filler)
        torch.cuda.current_stream(self._gpu.device).wait_event(self._is_filled)

    def release(self) -> None:
        self._is_read.record(torch.cuda.current_stream(self._gpu.device))


class Slices:
    """Two buffers that take turns."""

    def __init__(self, gpu: Gpu) -> None:
        filler = torch.cuda.Stream(gpu.device)  # type: ignore[no-untyped-call]
        self._pair = Slice(gpu, filler), Slice(gpu, filler)
        self._turn = 0

    def begin_pass(self) -> None:
        """What is on its way by now has used the buffers before they are filled again: a graph does
        so without a word here. Nothing within a capture, which waits for nothing outside."""
        if not torch.cuda.is_current_stream_capturing():
            for one in self._pair:
                one.begin_pass()

    @contextmanager
    def next(self, size: int) -> Iterator[Slice]:
        """The buffer whose turn it is, with room for so many numbers; free again afterwards.

        Both grow at once: in a capture, which nothing that it has not seen may wait for, the turns
        may be the other way round than in the pass before it.
        """
        for one in self._pair:
            one.grow(size)
        taken = self._pair[self._turn]
        self._turn = 1 - self._turn
        taken.take(size)
        try:
            yield taken
        finally:
            taken.release()
