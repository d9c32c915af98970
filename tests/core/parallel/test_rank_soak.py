"""Ten thousand random jobs on two ranks: no hang, the same memory throughout, right replies."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from exl_core.cache.memory import return_freed_memory
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.session.load import LoadedModel, load_model
from support.adapters import random_pairs, stored, write_adapter
from support.random_jobs import Reply, run_jobs
from support.tiny_models import save, tiny_llama

JOBS = 10_000
GROWTH_LIMIT_KB = 6 * 1024
"""Growth of a process from the second tenth of the jobs to the last: pages of the heap that differ
by chance. A leak of a batch's tensors in every pass would be some hundred MB."""

MOST_OTHERS = 5
"""Replies that may differ from those of one process, whose sums have another order."""
TIE = 2e-3
"""Logits closer than this may change places: keys and values are cached in half precision."""


def resident_kb(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0])


def adapters_of(loaded: LoadedModel, folders: list[Path]) -> tuple[AdapterUse, ...]:
    found = [AdapterUse(load_adapter(folder, loaded.model), 0.7) for folder in folders]
    return (found[0], found[1])


def gap_of(
    whole: LoadedModel, one: Reply, other: Reply, choices: Sequence[tuple[AdapterUse, ...]]
) -> float:
    """Difference of the logits of the first tokens in which two replies differ."""
    assert (one.prompt, one.choice) == (other.prompt, other.choice)
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    at = next(index for index, (first, second) in pairs if first != second)
    ids = torch.tensor([(*one.prompt, *one.token_ids[:at])])
    logits = Context(whole.model, 512).forward(ids, adapters=choices[one.choice])[0, -1]
    return abs(float(logits[one.token_ids[at]] - logits[other.token_ids[at]]))


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
    uses = adapters_of(whole, folders)
    expected = run_jobs(whole, JOBS, uses)
    assert expected.keys() == found.keys()
    others = [name for name, reply in expected.items() if found[name] != reply]
    assert len(others) <= MOST_OTHERS
    for name in others:
        assert gap_of(whole, expected[name], found[name], ((), *((use,) for use in uses))) < TIE
