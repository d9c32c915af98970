"""One GPU as the ops see it: the loaded library, torch's current stream, and workspaces."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_kernels import cuda

TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.uint8: 5,
    torch.int8: 6,
    torch.float8_e4m3fn: 7,
}
"""Numbers of types in the library's interface."""


class Gpu:
    """Calls go to torch's current stream; nothing here waits for them.

    `most_placed_rows`: of so many rows kernels can leave inputs prepared for the next linear.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library = cuda.load()
        with torch.cuda.device(device):
            self.most_placed_rows = self._library.most_placed_rows()
        self._workspaces: dict[str, Tensor] = {}
        self._retired: list[Tensor] = []

    def call(self, name: str, *operands: object) -> None:
        """`exl_cuda_<name>`, with the stream as its last operand."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._library.call(name, *operands, stream)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def workspace(self, op: str, *sizes: int) -> Tensor:
        """Zero when it is first handed out; each op has its own, and leaves its counters zero."""
        return self.room(op, self._library.size(f"{op}_workspace", *sizes))

    def room(self, name: str, size_bytes: int) -> Tensor:
        """Bytes that are kept under a name; zero at first, and again whenever they grow.

        What was too small is kept as well: a captured graph may still write there.
        """
        held = self._workspaces.get(name)
        if held is None or held.numel() < size_bytes:
            if held is not None:
                self._retired.append(held)
            held = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
            self._workspaces[name] = held
        return held
