"""Process of a rank whose GPU memory a test limits, as another program that fills the GPU would.

In the rank named by `EXL_TEST_LIMIT` ("RANK:BYTES") torch may allocate BYTES, and so may
the cache, which takes its memory from the driver.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from exl_core.errors import OutOfMemoryError
from exl_core.session.follower import main

MODULE = "support.limited_follower"
LIMIT = "EXL_TEST_LIMIT"


def limit_memory(rank: int, limit_bytes: int) -> None:
    import torch

    total = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total, rank)

    from exl_core.ops.backends.cuda.growing import DriverMemory

    limit_mapping(DriverMemory, limit_bytes)


def limit_mapping(memory: Any, limit_bytes: int) -> None:
    """Lets the objects of the class `memory` map `limit_bytes` in all."""
    map_all, left = memory.map, limit_bytes

    def map_some(self: Any, address: int, size: int) -> None:
        nonlocal left
        if size > left:
            raise OutOfMemoryError(
                "the GPU has too little memory", got=f"a limit of {limit_bytes} B"
            )
        left -= size
        map_all(self, address, size)

    memory.map = map_some


if __name__ == "__main__":
    limited, _, size = os.environ[LIMIT].partition(":")
    if sys.argv[3] == limited:
        limit_memory(int(limited), int(size))
    main(sys.argv[1:])
