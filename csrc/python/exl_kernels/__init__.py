"""The compiled CPU kernels: instruction sets, packed weights, and a table of ops per set.

Reads tensors through their attributes (`data_ptr`, `shape`, `stride`, `dtype`, `is_cpu`) and does
not import torch. The contracts of the ops are in `csrc/include/exl/ops/`. Inside exl_core only
`exl_core.ops.backends.cpu` calls this extension. The CUDA library has its own module,
`exl_kernels.cuda`, which `exl_core.ops.backends.cuda` calls.
"""

from exl_kernels._C import (
    ExpertCall,
    Experts,
    InputError,
    JoinedLinear,
    Linear,
    PackedLinear,
    QuantLinear,
    Table,
    TrellisLinear,
    __version__,
    available_isas,
)

__all__ = [
    "ExpertCall",
    "Experts",
    "InputError",
    "JoinedLinear",
    "Linear",
    "PackedLinear",
    "QuantLinear",
    "Table",
    "TrellisLinear",
    "__version__",
    "available_isas",
]
