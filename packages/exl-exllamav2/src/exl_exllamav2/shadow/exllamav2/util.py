"""Helpers."""

from exl_exllamav2.sequences import SeqTensor
from exl_exllamav2.tools import (
    Timer,
    get_basic_progress,
    list_live_tensors,
    print_vram_usage,
)
