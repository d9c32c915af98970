"""Memory of weights: the peak while loading; what is left when a model or an adapter is gone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.adapters import stored, write_adapter

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


UNLOAD = """
import gc, sys, torch
from exl_core.generate.driver import generate
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadOptions
from exl_core.session.runtime import RuntimeOptions, open_runtime
from pathlib import Path
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10
def run(adapters):
    how = LoadOptions(device="cpu", threads=2)
    runtime = open_runtime(sys.argv[1], RuntimeOptions(load=how, adapters=adapters))
    ids = runtime.encode_prompt("Once upon a time", parse_special=False)
    sampler = SamplerParams(temperature=0.0)
    generate(runtime.engine, runtime.request(ids, max_tokens=8, sampler=sampler))
    return resident(), runtime.loaded.weights_bytes
torch.set_num_threads(1)
adapters = tuple((Path(path), 1.0) for path in sys.argv[2:])
for _ in range(6):  # the first time, libraries stay
    before = resident()
    peak, weights = run(adapters)
    gc.collect()
    print(before, peak, resident(), weights)
"""


@pytest.mark.parametrize("has_adapter", [False, True], ids=["model", "adapter"])
def test_memory_returns_when_the_last_reference_goes(
    has_adapter: bool, tmp_path: Path, smollm2_path: Path
) -> None:
    adapters: list[str] = []
    if has_adapter:
        pairs = {
            f"model.layers.{layer}.self_attn.q_proj": (torch.ones(256, 576), torch.ones(576, 256))
            for layer in range(30)
        }
        adapters.append(str(write_adapter(tmp_path / "lora", stored(pairs), r=256)))
    done = subprocess.run(
        [sys.executable, "-c", UNLOAD, str(smollm2_path), *adapters],
        check=True,
        capture_output=True,
        text=True,
    )
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()[1:]]
    for before, peak, _, weights in rounds:
        assert peak - before >= 0.9 * weights, "the weights were in memory"
    # The allocator keeps up to 50 MiB in some round and reuses them. A leak grows in every round.
    grown = statistics.median(after - before for before, _, after, _ in rounds)
    loaded = min(peak - before for before, peak, _, _ in rounds)
    assert grown <= 0.05 * loaded, f"{grown / MEBIBYTE:.0f} MiB per round"


UNLOAD_BY_CALL = """
import gc, sys, torch
from exl_core.errors import RequestError
from exl_core.lora.adapter import load_adapter
from exl_core.session.load import load_model
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10
torch.set_num_threads(1)
for _ in range(3):  # the first time, libraries stay
    before = resident()
    loaded = load_model(sys.argv[1], device="cpu", threads=2)
    adapter = load_adapter(sys.argv[2], loaded.model)
    with_both, size = resident(), adapter.size_bytes
    adapter.unload(); adapter.unload(); gc.collect()
    with_model = resident()
    loaded.unload(); loaded.unload(); gc.collect()
    print(before, with_both, with_model, resident(), loaded.weights_bytes, size)
    for use in (lambda: adapter.fits(loaded.config), lambda: loaded.model.check_loaded()):
        try:
            use()
        except RequestError as error:
            assert "has been unloaded" in str(error)
        else:
            raise AssertionError("unloaded, and used")
"""


def test_unloading_by_a_call_returns_memory_although_references_stay(
    tmp_path: Path, smollm2_path: Path
) -> None:
    pairs = {
        f"model.layers.{layer}.self_attn.q_proj": (torch.ones(256, 576), torch.ones(576, 256))
        for layer in range(30)
    }
    folder = write_adapter(tmp_path / "lora", stored(pairs), r=256)
    done = subprocess.run(
        [sys.executable, "-c", UNLOAD_BY_CALL, str(smollm2_path), str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    for line in done.stdout.splitlines()[1:]:
        before, with_both, with_model, after, weights, adapter = map(int, line.split())
        assert with_both - before >= 0.9 * (weights + adapter), "both were in memory"
        assert with_both - with_model >= 0.9 * adapter
        assert after - before <= 0.1 * (with_both - before), f"{(after - before) / MEBIBYTE:.0f}"
