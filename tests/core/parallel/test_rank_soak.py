"""Random jobs on two ranks: no hang, the same memory throughout, right replies."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

GROWTH_LIMIT_KB = 6 * 1024
"""Growth of a process from the second tenth of the jobs to the last: pages of the heap that differ
by chance. A leak of a batch's tensors in every pass would be some hundred MB."""

TIE = 2e-3
"""Logits closer than this may change places: keys and values are cached in half precision."""
GPU_TIE = 0.05
"""The same where products round their inputs to half precision, and where the rows of a batch
choose the kernels."""
MOST_COMPARED = 100


def resident_kb(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0])


def used_kb(device: str) -> tuple[int, ...]:
    """Used memory of both GPUs; none on the CPU."""
    if device == "cpu":
        return ()
    sizes = [torch.cuda.mem_get_info(index) for index in range(2)]
    return tuple((total - free) >> 10 for free, total in sizes)


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


@dataclass(frozen=True)
class Soak:
    """`growth_kb`: limit on the growth of a process and of a GPU from the measurement `settled` to
    the last. There are about ten; graphs of passes are captured until all shapes have occurred.
    `most_others`: share of the replies that may differ from those of one process, whose sums have
    another order, and whose logits are then closer than `tie`."""

    device: str
    jobs: int
    max_batch: int
    growth_kb: int
    most_others: float
    tie: float
    settled: int = 1


ON_CPU = Soak("cpu", 10_000, 4, GROWTH_LIMIT_KB, 5e-4, TIE)
ON_GPUS = Soak("cuda", 10_000, 32, 4 * GROWTH_LIMIT_KB, 1.0, GPU_TIE)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "soak",
    [
        pytest.param(ON_CPU, marks=pytest.mark.soak, id="cpu"),
        pytest.param(ON_GPUS, marks=[pytest.mark.cuda, pytest.mark.soak, two_gpus], id="cuda"),
        pytest.param(
            replace(ON_GPUS, jobs=500, settled=5),
            marks=[pytest.mark.cuda, two_gpus],
            id="cuda-short",
        ),
    ],
)
def test_random_jobs(soak: Soak, tmp_path: Path) -> None:
    model = tiny_llama() if soak.device == "cpu" else tiny_llama(head_dim=32)
    path = save(model, tmp_path / "tiny")
    folders = [
        write_adapter(tmp_path / str(seed), stored(random_pairs(model, seed=seed)))
        for seed in (1, 2)
    ]
    memory: list[tuple[int, ...]] = []
    is_exact = soak.device == "cpu"
    divided = load_model(path, device=soak.device, exact=is_exact, threads=2, tensor_parallel=2)
    leader = divided.model
    assert isinstance(leader, LeadingTransformer)
    assert isinstance(leader.followers, Followers)
    processes = (os.getpid(), *leader.followers.process_ids)

    def measure(begun: int) -> None:
        gc.collect()
        return_freed_memory({leader.ops.device})
        memory.append((*map(resident_kb, processes), *used_kb(soak.device)))
        print(f"{begun} jobs: {', '.join(f'{one} kB' for one in memory[-1])}", flush=True)

    try:
        uses = adapters_of(divided, folders)
        found = run_jobs(divided, soak.jobs, uses, measure, max_batch=soak.max_batch)
    finally:
        divided.unload()
    assert len(found) >= soak.jobs - soak.jobs // 10
    for later in memory[soak.settled + 1 :]:
        growth = [now - then for then, now in zip(memory[soak.settled], later, strict=True)]
        assert max(growth) < soak.growth_kb, memory
    device = "cpu" if is_exact else "cuda:0"
    whole = load_model(path, device=device, exact=is_exact, threads=2, split="none")
    uses = adapters_of(whole, folders)
    expected = run_jobs(whole, soak.jobs, uses, max_batch=soak.max_batch)
    assert expected.keys() == found.keys()
    others = [name for name, reply in expected.items() if found[name] != reply]
    print(f"{len(others)} of {len(found)} replies differ from those of one process", flush=True)
    assert len(others) <= soak.most_others * soak.jobs
    for name in others[:MOST_COMPARED]:
        gap = gap_of(whole, expected[name], found[name], ((), *((use,) for use in uses)))
        assert gap < soak.tie
