"""Opens an op table: selects the backend, and translates the errors of its device.

Backends are imported when they are opened, so that a missing library or GPU fails only there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import device

from exl_core.errors import BackendError, RequestError
from exl_core.ops.host_experts import HostExperts, NearExperts
from exl_core.ops.table import OpTable
from exl_core.settings import MAX_THREADS


def get_table(
    name: str, *, isa: str | None = None, threads: int, batch_invariant: bool = False
) -> OpTable:
    """Opens the table `reference`, `cpu`, or `cuda` (a device number may follow: `cuda:1`).

    `cpu` uses the best instruction set unless `isa` names one. With `batch_invariant`, no bit of
    the results of a row depends on the other rows of a call (`ops/table.py`). Raises DeviceError
    for a GPU that does not exist or cannot be used.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise RequestError("not a thread count", expected=f"1 to {MAX_THREADS}", got=threads)
    if batch_invariant and name == "reference":
        raise BackendError(
            "results that do not depend on the batch", expected="--device cpu or cuda", got=name
        )
    if name == "reference":
        if isa is not None:
            raise BackendError("the reference backend has no instruction sets", got=isa)
        from exl_core.ops.backends.reference.table import ReferenceTable

        return ReferenceTable(threads)
    if name == "cpu":
        from exl_core.ops.backends.cpu.table import CpuTable

        return CpuTable(isa, threads, batch_invariant=batch_invariant)
    if name.partition(":")[0] == "cuda":
        from exl_core.ops.backends.cuda.device import open_device

        # Opened before the imports below. Starting the driver releases the GIL, so that other
        # threads run meanwhile.
        gpu = open_device(name)
        from exl_core.ops.backends.cuda.table import CudaTable

        return CudaTable(gpu, threads, batch_invariant=batch_invariant)
    raise BackendError("no such backend", expected="cpu, cuda or reference", got=name)


def open_host_experts(device_table: OpTable, cpu: OpTable) -> HostExperts:
    """Experts that `cpu` (a table of the CPU) computes for layers of `device_table`."""
    if device_table.device.type != "cuda":
        return NearExperts(cpu)
    from exl_core.ops.backends.cpu.table import CpuTable
    from exl_core.ops.backends.cuda.table import CudaTable

    assert isinstance(device_table, CudaTable), "the table of a GPU"
    assert isinstance(cpu, CpuTable), "experts in the host's memory are computed by the CPU"
    return device_table.host_experts(cpu)


def min_group_rows(name: str) -> int:
    """`LinearOps.min_group_rows` of the table `name`, which need not be open."""
    if name == "reference":
        from exl_core.ops.backends.reference.linear import ReferenceLinearOps

        return ReferenceLinearOps.min_group_rows
    if name == "cpu":
        from exl_core.ops.backends.cpu.linear import CpuLinearOps

        return CpuLinearOps.min_group_rows
    return 16  # a GPU, whose library is loaded only when it is opened


def has_factors(name: str) -> bool:
    """Whether the table keeps scales as products (`ScaleParts`)."""
    return name not in ("reference", "cpu")


def has_transposes(name: str, *, batch_invariant: bool = False) -> bool:
    """Whether the table keeps the keys of latent attention transposed too (`HeadUp`)."""
    return name == "cpu" and not batch_invariant


def available_isas() -> tuple[str, ...]:
    """Instruction sets that both the kernels and the processor support, slowest first.

    Raises BackendError if the kernel library cannot be loaded.
    """
    from exl_core.ops.backends.cpu.library import native_isas

    return native_isas()


def device_failures(on: device, doing: str) -> AbstractContextManager[None]:
    """Context that turns a GPU's errors into DeviceError, or OutOfMemoryError with figures."""
    if on.type == "cpu":
        return nullcontext()
    from exl_core.ops.backends.cuda.device import failures

    return failures(doing)
