"""Selects a GPU, checks that it can be used, and translates its failures into `ExlError`s.

This module calls no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from exl_core.errors import DeviceError, OutOfMemoryError, RequestError
from exl_core.ops.backends.cuda.driver import start_driver
from exl_kernels import cuda, cuda_recurrent

OLDEST = 75
"""Lowest compute capability, times ten, that the kernels support."""

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_MIB = 1 << 20
_USE_CPU = "Without a GPU: --device cpu."


def default_device() -> str:
    """`cuda` if torch sees a GPU and the kernels are installed, otherwise `cpu`."""
    return "cuda" if torch.cuda.is_available() and cuda.LIBRARY.is_file() else "cpu"


def parse_device(name: str) -> str:
    """Returns `cpu`, `cuda` and `cuda:N` unchanged, and the default device for `auto`.

    RequestError for anything else.
    """
    if name == "auto":
        return default_device()
    kind, colon, index = name.partition(":")
    is_index = index.isascii() and index.isdecimal() and len(index) < 4
    if name == "cpu" or (kind == "cuda" and (is_index or not colon)):
        return name
    raise RequestError(
        "no such device", expected="auto, cpu, cuda or cuda:N", got=name or "nothing"
    )


HEAD_STEP = 8
MAX_HEAD_DIM = 512
MAX_SHARED_ROW = 576


def check_head_dims(head_dims: Iterable[int], where: object, *, is_shared: bool = False) -> None:
    """Raises DeviceError for a head size that the attention kernels do not take. `is_shared`: of
    rows that are keys and values at once."""
    most = MAX_SHARED_ROW if is_shared else MAX_HEAD_DIM
    for head_dim in dict.fromkeys(head_dims):
        if head_dim % HEAD_STEP or not 0 < head_dim <= most:
            raise DeviceError(
                "a GPU cannot run a model with heads of this size",
                where=where,
                expected=f"a multiple of {HEAD_STEP} of at most {most}",
                got=head_dim,
                next_step=_USE_CPU,
            )


def check_states(sizes: Iterable[tuple[str, int]], where: object) -> None:
    """Raises DeviceError for a size of recurrent layers that the kernels do not take: of "taps" of
    a convolution, or of a "depth" (elements of a key, or of Mamba-2's state)."""
    most = {"taps": cuda_recurrent.MAX_TAPS, "depth": cuda_recurrent.MAX_STATE_DEPTH}
    names = {"taps": "convolutions over so many tokens", "depth": "states of this depth"}
    for kind, size in dict.fromkeys(sizes):
        if size > most[kind]:
            raise DeviceError(
                f"a GPU cannot run a model with {names[kind]}",
                where=where,
                expected=f"at most {most[kind]}",
                got=size,
                next_step=_USE_CPU,
            )


def open_device(name: str) -> torch.device:
    """Opens the GPU that `cuda` or `cuda:N` names, and loads the kernel library.

    DeviceError if there is no such GPU, or if the library cannot run on it.
    """
    index = int(name.partition(":")[2] or 0)
    # Starts the driver in a call that releases the GIL. torch's first query of the GPUs would hold
    # the GIL meanwhile. The code below finds the cause of a failure.
    start_driver(index)
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU can be used", where=name, got=_reason_without_gpu(), next_step=_USE_CPU
        )
    library = _open_library()
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            "no such GPU",
            where=name,
            expected=" or ".join(f"cuda:{i}" for i in range(count)),
            next_step=_USE_CPU,
        )
    with failures("the GPU's start"):
        library.call("open_device", index)
    major, minor = torch.cuda.get_device_capability(index)
    capability, made_for = 10 * major + minor, library.architectures
    if capability < OLDEST:
        raise DeviceError(
            f"{torch.cuda.get_device_name(index)} is too old",
            where=name,
            expected=f"compute capability {OLDEST / 10} or later",
            got=f"{capability / 10}",
            next_step=_USE_CPU,
        )
    if not any(capability >= one for one in made_for):
        raise DeviceError(
            "the CUDA library was built for later GPUs",
            where=name,
            expected=f"code for compute capability {capability / 10}",
            got=", ".join(f"{one / 10}" for one in made_for),
            next_step="Install exl-kernels with EXL_CUDA_ARCH naming it, or unset.",
        )
    device = torch.device("cuda", index)
    with failures("the GPU's start"), torch.cuda.device(device):
        library.call("prepare_device")
    return device


@contextmanager
def failures(doing: str) -> Iterator[None]:
    """Turns errors of CUDA and torch into OutOfMemoryError, with memory sizes, or DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _no_memory(doing) from error
    except torch.AcceleratorError as error:
        raise _failed(doing, str(error).partition("\n")[0]) from error
    except cuda.CudaError as error:
        if error.code == _OUT_OF_MEMORY:
            raise _no_memory(doing) from error
        raise _failed(doing, f"{error.call}: {error.name}, {error.text}") from error


def _failed(doing: str, why: str) -> DeviceError:
    return DeviceError(
        f"{doing} failed on the GPU",
        got=why,
        next_step="'exl doctor' tests the kernels of this machine.",
    )


def _no_memory(doing: str) -> OutOfMemoryError:
    free, total = torch.cuda.mem_get_info()
    return OutOfMemoryError(
        f"{doing} does not fit into the GPU's memory",
        got=f"{free / _MIB:.0f} MiB free of {total / _MIB:.0f}",
        next_step="Take a smaller --ctx-size, a smaller --cache-type, or --device cpu.",
    )


def _open_library() -> cuda.CudaLibrary:
    try:
        return cuda.load()
    except OSError as error:
        missing = not cuda.LIBRARY.is_file()
        raise DeviceError(
            "this install has no CUDA kernels" if missing else "the CUDA kernels cannot be loaded",
            where="exl_kernels",
            got=None if missing else error,
            next_step="Install exl-kernels where nvcc is on PATH (python -m pip install ./csrc). "
            + _USE_CPU,
        ) from error


def _reason_without_gpu() -> str:
    """Reason why torch cannot use a GPU."""
    if torch.version.cuda is None:
        return "a torch that was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # its message names the driver's version
        return str(error).partition("\n")[0]
    return "no device"
