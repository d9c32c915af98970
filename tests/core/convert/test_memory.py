"""Memory of a conversion: that of one layer, not that of all layers.

Counts all resident memory at a time, pages of mapped files included. The model generates its own
calibration text, and tuning runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import tiny_models

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 8}
LAYERS = (3, 11)
MIB = 2**20

# The memory of several threads at a time depends on the load of the machine. The freed memory that
# the allocator keeps depends on earlier allocations.
QUIET = {"EXL_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}

PROGRAM = (  # VmHWM counts this program alone, while ru_maxrss remembers what it was forked from
    "import re, sys\n"
    "from exl_cli.main import main\n"
    "code = main(sys.argv[1:])\n"
    "status = open('/proc/self/status').read()\n"
    "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1], file=sys.stderr)\n"
    "sys.exit(code)\n"
)


def peak_bytes(folder: Path, layers: int) -> tuple[int, int]:
    """Peak memory of a conversion of a model with `layers` layers, and the size of its source."""
    model = tiny_models.tiny_llama(**SIZES, num_hidden_layers=layers)
    source = tiny_models.save(model, folder / f"source-{layers}")
    args = [source, "-o", folder / f"out-{layers}", "--json", "--force"]
    sizes = ["--rows", 2, "--length", 128, "--bits", 4.5]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "convert", *map(str, args), *map(str, sizes)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **QUIET},
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["stage"] for event in events if event["event"] == "step"} >= {"calibrate", "tune"}
    assert events[-1]["event"] == "done"
    return int(done.stderr.split()[-1]) * 1024, (source / "model.safetensors").stat().st_size


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_peak_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    (few, small), (many, large) = (peak_bytes(tmp_path, layers) for layers in LAYERS)
    print(
        f"peak {few / MIB:.0f} MiB of {LAYERS[0]} layers, {many / MIB:.0f} of {LAYERS[1]}; "
        f"sources {small / MIB:.0f} and {large / MIB:.0f} MiB"
    )
    assert large - small > 35 * MIB
    # Python objects of each layer, its candidates above all, take about 2 MiB at any width.
    assert many - few < (large - small) / 3
