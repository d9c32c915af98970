"""Memory of a conversion: that of one layer, not that of all layers.

Counts all resident memory at a time, pages of mapped files included. The model generates its own
calibration text, and tuning runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import tiny_models

WIDTHS = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}
EXPERTS = {
    **{"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 8},
    **{"head_dim": 32, "num_experts_per_tok": 2, "mlp_only_layers": []},
}
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "dense": (partial(tiny_models.tiny_llama, **WIDTHS, intermediate_size=1536), (3, 11)),
    "experts": (partial(tiny_models.tiny_qwen3_moe, **EXPERTS), (2, 6)),
}
"""Builders, and the numbers of layers that are compared. A layer with experts has 12 MiB."""
ROWS, LENGTH = 2, 128
MIB = 2**20

# The memory of several threads at a time depends on the load of the machine. The freed memory that
# the allocator keeps depends on earlier allocations. In bfloat16, oneDNN compiles a product per
# number of rows and keeps up to 1,024 of them, 0.3 MiB each. Experts have many numbers of rows.
# Without bfloat16 instructions products are float32, which MKL does not compile.
QUIET = {
    **{"EXL_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"},
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}

PROGRAM = (  # VmHWM counts this program alone, while ru_maxrss remembers what it was forked from
    "import re, sys\n"
    "from exl_cli.main import main\n"
    "code = main(sys.argv[1:])\n"
    "status = open('/proc/self/status').read()\n"
    "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1], file=sys.stderr)\n"
    "sys.exit(code)\n"
)


def peak_bytes(build: Callable[..., Any], folder: Path, layers: int) -> tuple[int, int]:
    """Peak memory of a conversion of a model with `layers` layers, and the size of its source."""
    model = build(num_hidden_layers=layers)
    source = tiny_models.save(model, folder / f"source-{layers}")
    args = [source, "-o", folder / f"out-{layers}", "--json", "--force"]
    sizes = ["--rows", ROWS, "--length", LENGTH, "--bits", 4.5]
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
@pytest.mark.parametrize("kind", MODELS)
def test_peak_memory_does_not_grow_with_layers(kind: str, tmp_path: Path) -> None:
    """States of all calibration rows before one layer are in memory at a time, 4 bytes for each of
    `ROWS` * `LENGTH` * hidden size values, for the source and for the quantized model: 0.5 MiB with
    experts and 1 MiB without, whatever the depth."""
    build, depths = MODELS[kind]
    (few, small), (many, large) = (peak_bytes(build, tmp_path, layers) for layers in depths)
    print(
        f"peak {few / MIB:.0f} MiB of {depths[0]} layers, {many / MIB:.0f} of {depths[1]}; "
        f"sources {small / MIB:.0f} and {large / MIB:.0f} MiB"
    )
    assert large - small > 35 * MIB
    # Python objects of each layer, its candidates above all, take about 2 MiB at any width.
    assert many - few < (large - small) / 3
