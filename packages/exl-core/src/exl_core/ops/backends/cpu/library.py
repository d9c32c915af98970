"""The compiled extension `exl_kernels`: checks that it can be loaded and has the right version.

The other modules of this backend take `exl_kernels` from here, so that a missing or a broken
library is reported with its cause.
"""

from __future__ import annotations

from exl_core.errors import BackendError

__all__ = ["exl_kernels", "native_isas"]

KERNELS_VERSION = "0.1.0"
INSTALL = "Install it with: python -m pip install ./csrc (from the repository's root)."

try:
    import exl_kernels
except ImportError as error:
    # A missing and a broken library both raise ImportError; the loader's message names the cause.
    raise BackendError(
        f"the kernel library cannot be loaded: {error}",
        where="exl_kernels",
        expected=f"version {KERNELS_VERSION}",
        next_step=INSTALL,
    ) from error

if exl_kernels.__version__ != KERNELS_VERSION:
    raise BackendError(
        "the kernel library does not match this exl-core",
        where=exl_kernels.__file__,
        expected=f"version {KERNELS_VERSION}",
        got=exl_kernels.__version__,
        next_step=INSTALL,
    )


def native_isas() -> tuple[str, ...]:
    """Instruction sets that both the kernels and the processor support, slowest first."""
    return exl_kernels.available_isas()
