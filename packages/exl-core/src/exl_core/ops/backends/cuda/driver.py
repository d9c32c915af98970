"""Start of a GPU by a process that has not imported torch yet."""

from __future__ import annotations

from contextlib import suppress

from exl_kernels import cuda


def start_driver(index: int) -> None:
    """Starts the driver and the GPU `index` in a call that releases the GIL. A failure is left to
    `open_device`, which finds its cause."""
    with suppress(OSError, cuda.CudaError):
        cuda.load().call("open_device", index)
