"""The compiled kernels: instruction sets, packed weights, and a table of ops per set.

Knows tensors by their attributes (`data_ptr`, `shape`, `stride`, `dtype`, `is_cpu`) and imports no
torch. The op contracts are in `csrc/include/exl/ops/`; `exl_core.ops.native` is the one caller.
"""

from exl_kernels._C import (
    InputError,
    JoinedLinear,
    Linear,
    PackedLinear,
    QuantLinear,
    Table,
    __version__,
    available_isas,
)

__all__ = [
    "InputError",
    "JoinedLinear",
    "Linear",
    "PackedLinear",
    "QuantLinear",
    "Table",
    "__version__",
    "available_isas",
]
