"""Random jobs on several ranks: no hang, the same memory throughout, right replies."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from exl_core.cache.memory import return_freed_memory
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.session.load import LoadedModel, load_model
from support.adapters import random_pairs, stored, write_adapter
from support.random_jobs import Reply, run_jobs
from support.rank_processes import GROWTH_LIMIT_KB, resident_kb
from support.tiny_models import save, tiny_llama

TIE = 2e-3
"""Logits closer than this may change places: keys and values are cached in half precision."""
GPU_TIE = 0.05
"""The same where products round their inputs to half precision, and where the rows of a batch
choose the kernels."""
MOST_OTHERS = 5e-4
"""Share of the replies of ranks on the CPU that may differ from those of one process."""
MOST_COMPARED = 300
"""Replies of GPUs whose every token is compared with the logits of one GPU."""


def used_kb(soak: Soak) -> tuple[int, ...]:
    """Used memory of the ranks' GPUs; none on the CPU. With `EXL_TEST_SHARED_GPUS`, other programs
    use the GPUs too, and only rank 0's own memory counts."""
    if soak.device == "cpu":
        return ()
    if os.environ.get("EXL_TEST_SHARED_GPUS"):
        return (torch.cuda.memory_reserved(0) >> 10,)
    sizes = [torch.cuda.mem_get_info(index) for index in range(soak.ranks)]
    return tuple((total - free) >> 10 for free, total in sizes)


def adapters_of(loaded: LoadedModel, folders: list[Path]) -> tuple[AdapterUse, ...]:
    found = [AdapterUse(load_adapter(folder, loaded.model), 0.7) for folder in folders]
    return (found[0], found[1])


@dataclass(frozen=True)
class Soak:
    """`growth_kb`: limit on the growth of a process and of a GPU from the measurement `settled` to
    the last. There are about ten; graphs of passes are captured until all shapes have occurred."""

    device: str
    ranks: int
    jobs: int
    max_batch: int
    growth_kb: int
    settled: int = 1


CPU_SOAK = pytest.param(
    Soak("cpu", 2, 10_000, 4, GROWTH_LIMIT_KB), marks=pytest.mark.soak, id="cpu"
)


def gpu_soak(ranks: int, jobs: int, *marks: pytest.MarkDecorator, settled: int = 1) -> ParameterSet:
    soak = Soak("cuda", ranks, jobs, 32, 4 * GROWTH_LIMIT_KB, settled)
    has_gpus = torch.cuda.device_count() >= ranks
    needed = pytest.mark.skipif(not has_gpus, reason=f"needs {ranks} GPUs")
    return pytest.param(soak, marks=[pytest.mark.cuda, needed, *marks], id=f"cuda-{ranks}-{jobs}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "soak",
    [
        CPU_SOAK,
        *(gpu_soak(ranks, 10_000, pytest.mark.soak) for ranks in (2, 4, 8)),
        *(gpu_soak(ranks, 500, settled=5) for ranks in (2, 4)),
    ],
)
def test_random_jobs(soak: Soak, tmp_path: Path) -> None:
    heads = max(6, soak.ranks)
    model = tiny_llama(num_attention_heads=heads, head_dim=20 if soak.device == "cpu" else 32)
    path = save(model, tmp_path / "tiny")
    folders = [
        write_adapter(tmp_path / str(seed), stored(random_pairs(model, seed=seed)))
        for seed in (1, 2)
    ]
    memory: list[tuple[int, ...]] = []
    is_exact = soak.device == "cpu"
    divided = load_model(
        path, device=soak.device, exact=is_exact, threads=2, tensor_parallel=soak.ranks
    )
    leader = divided.model
    assert isinstance(leader, LeadingTransformer)
    assert isinstance(leader.followers, Followers)
    processes = (os.getpid(), *leader.followers.process_ids)
    started = time.monotonic()

    def measure(begun: int) -> None:
        gc.collect()
        return_freed_memory({leader.ops.device})
        memory.append((*map(resident_kb, processes), *used_kb(soak)))
        seconds = time.monotonic() - started
        sizes = ", ".join(f"{one} kB" for one in memory[-1])
        print(f"{begun} jobs after {seconds:.0f} s: {sizes}", flush=True)

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
    choices = ((), *((use,) for use in uses))
    if is_exact:
        expected = run_jobs(whole, soak.jobs, uses, max_batch=soak.max_batch)
        assert expected.keys() == found.keys()
        compared = [reply for name, reply in found.items() if expected[name] != reply]
        print(f"{len(compared)} of {len(found)} replies differ from those of one process")
        assert len(compared) <= MOST_OTHERS * soak.jobs
    else:
        compared = random.Random(3).sample([*found.values()], MOST_COMPARED)
    for reply in compared:
        assert gap_of(whole, reply, choices) < (TIE if is_exact else GPU_TIE)


def gap_of(whole: LoadedModel, reply: Reply, choices: Sequence[tuple[AdapterUse, ...]]) -> float:
    """The largest difference between the best logit of one process and that of a reply's token.
    The engine samples only ids that have a text."""
    ids = torch.tensor([(*reply.prompt, *reply.token_ids)])
    logits = Context(whole.model, 512).forward(ids, adapters=choices[reply.choice])[0]
    of_tokens = logits[len(reply.prompt) - 1 : -1, : whole.tokenizer.vocab_size]
    chosen = of_tokens.gather(1, ids[0, len(reply.prompt) :, None].to(of_tokens.device))[:, 0]
    return float((of_tokens.amax(1) - chosen).max())
