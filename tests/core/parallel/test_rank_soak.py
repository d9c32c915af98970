"""Ten thousand random jobs on two ranks: no hang, the same memory throughout, right replies."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from exl_core.cache.memory import return_freed_memory
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.session.load import LoadedModel, load_model
from support.adapters import random_pairs, stored, write_adapter
from support.random_jobs import run_jobs
from support.tiny_models import save, tiny_llama

JOBS = 10_000
GROWTH_LIMIT_KB = 6 * 1024
"""Growth of a process from the second tenth of the jobs to the last: pages of the heap that differ
by chance. A leak of a batch's tensors in every pass would be some hundred MB."""


def resident_kb(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0])


def adapters_of(loaded: LoadedModel, folders: list[Path]) -> tuple[AdapterUse, ...]:
    found = [AdapterUse(load_adapter(folder, loaded.model), 0.7) for folder in folders]
    return (found[0], found[1])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_random_jobs(tmp_path: Path) -> None:
    path = save(tiny_llama(), tmp_path / "tiny")
    folders = [
        write_adapter(tmp_path / str(seed), stored(random_pairs(tiny_llama(), seed=seed)))
        for seed in (1, 2)
    ]
    memory: list[tuple[int, ...]] = []
    divided = load_model(path, device="cpu", exact=True, threads=2, tensor_parallel=2)
    model = divided.model
    assert isinstance(model, LeadingTransformer)
    assert isinstance(model.followers, Followers)
    processes = (os.getpid(), *model.followers.process_ids)

    def measure(begun: int) -> None:
        gc.collect()
        return_freed_memory({model.ops.device})
        memory.append(tuple(map(resident_kb, processes)))
        print(f"{begun} jobs: {', '.join(f'{one} kB' for one in memory[-1])}", flush=True)

    try:
        found = run_jobs(divided, JOBS, adapters_of(divided, folders), measure)
    finally:
        divided.unload()
    assert len(found) >= JOBS - JOBS // 10
    for later in memory[2:]:
        assert all(now - then < GROWTH_LIMIT_KB for then, now in zip(memory[1], later, strict=True))
    whole = load_model(path, device="cpu", exact=True, threads=2)
    assert run_jobs(whole, JOBS, adapters_of(whole, folders)) == found
