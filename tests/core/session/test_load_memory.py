"""Loading peaks at the size of the weights in memory, and reads the file once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

MEBIBYTE = 1 << 20
SCRIPT = """
import os, sys, torch
def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) << 10
def bytes_read():
    line = next(line for line in open("/proc/self/io") if line.startswith("read_bytes"))
    return int(line.split()[1])
torch.set_num_threads(1)
before = status("VmRSS")
from exl_core.session.load import LoadOptions, load_model
warm, path = sys.argv[1:]
first = load_model(warm, LoadOptions(threads=2))
peak = status("VmHWM") - before
del first
with open(path, "rb") as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
already = bytes_read()
load_model(path, LoadOptions(threads=2))
print(peak, bytes_read() - already)
"""


def test_loading_peaks_at_the_weights_and_reads_the_file_once(
    tmp_path: Path, smollm2_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"  # not in the page cache, unlike the libraries
    with copy.open("wb") as file:
        file.write(smollm2_path.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    size = copy.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(smollm2_path), str(copy)],
        check=True,
        capture_output=True,
        text=True,
    )
    peak, bytes_read = map(int, done.stdout.split())
    assert peak <= size + 150 * MEBIBYTE, f"{peak / MEBIBYTE:.0f} MiB"
    assert bytes_read <= 1.05 * size
