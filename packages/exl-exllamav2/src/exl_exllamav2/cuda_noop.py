"""`--cuda-noop`: on a machine without a GPU, calls that only synchronize or measure do nothing."""

from __future__ import annotations

import sys


def disable_cuda_calls() -> None:
    """Replace calls of torch.cuda that raise without a GPU. No effect where there is one."""
    import torch

    if torch.cuda.is_available():
        return

    def do_nothing(*_: object, **__: object) -> None:
        """Stands for a call that has nothing to do without a GPU."""

    for name in ("_lazy_init", "init", "synchronize", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cuda, name, do_nothing)
    print("exl: torch.cuda calls do nothing (--cuda-noop)", file=sys.stderr, flush=True)
