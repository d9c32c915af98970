"""Process of a rank whose GPU memory a test limits, as another program that fills the GPU would.

Memory that torch allocates in the rank named by `EXL_TEST_LIMIT` ("RANK:BYTES") is limited.
"""

from __future__ import annotations

import os
import sys

from exl_core.session.follower import main

MODULE = "support.limited_follower"
LIMIT = "EXL_TEST_LIMIT"


def limit_memory(rank: int, limit_bytes: int) -> None:
    import torch

    total = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total, rank)


if __name__ == "__main__":
    limited, _, size = os.environ[LIMIT].partition(":")
    if sys.argv[3] == limited:
        limit_memory(int(limited), int(size))
    main(sys.argv[1:])
