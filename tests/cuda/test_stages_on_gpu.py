"""Models divided between GPU stages and a CPU stage, against the same models on one device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Report, Request
from exl_core.engine.scheduler import Scheduler
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.model import microbatch
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import NextPart, Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.backends.cuda.table import CudaTable
from exl_core.ops.sampling import PartLogits
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, load_model
from support.quantized_models import SIZES, quantized_llama
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3

pytestmark = pytest.mark.cuda

TOLERANCE = 1e-2
"""Relative RMS error of logits where a layer runs on the CPU, whose kernels round inputs in another
way than the GPU's: about 0.004 here, with a largest error of 0.02 of the largest logit. A wrong
page, position or permutation causes an error of about one."""


@pytest.fixture(scope="module", params=["exl2", "gptq", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "gemma3":
        return save(tiny_gemma3(**SIZES, query_pre_attn_scalar=32), path)
    return quantized_llama(request.param, path)


def split_of(folder: Path, first: str) -> str:
    count = load_model(str(folder), device="cpu").config.num_layers
    return f"{first}=1,cuda:0={count - 1}"


def on_two_stages(folder: Path, second: str, **options: Any) -> LoadedModel:
    """The first layer on the first GPU, the others on `second`."""
    if int(second[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    last = load_model(str(folder), device="cpu").config.num_layers - 1
    return load_model(str(folder), split=f"cuda:0=1,{second}={last}", **options)


def run(loaded: LoadedModel) -> Tensor:
    """Logits of prompts and of decode passes, eager and captured."""
    torch.manual_seed(2)
    store = store_for(loaded.model, KVFormat.FP16, 12)
    runner = Runner(loaded.model, store)
    found = []
    for sequence in range(PASSES_BEFORE_CAPTURE + 1):
        ids = tuple(torch.randint(0, VOCAB_SIZE, (100,)).tolist())
        pages = (2 * sequence,)
        found.append(runner.run([Segment(ids[:90], 0, pages, LogitRows.ALL)]).clone())
        for i in range(90, 100):
            one = Segment(ids[i : i + 1], i, pages, LogitRows.LAST)
            found.append(runner.run([one]).clone())
    return torch.cat(found).cpu()


def test_two_stages_on_a_gpu_compute_the_bits_of_one(folder: Path) -> None:
    whole = run(load_model(str(folder), device="cuda", split="none"))
    found = run(load_model(str(folder), split=split_of(folder, "cuda:0")))
    assert torch.equal(found, whole)


def test_layers_on_the_cpu_compute_the_logits_of_the_gpu(folder: Path) -> None:
    whole = run(load_model(str(folder), device="cuda", split="none"))
    mixed = load_model(str(folder), device="cuda", cpu_layers=1)
    assert [stage.device for stage in mixed.plan] == ["cpu", "cuda:0"]
    assert (run(mixed) - whole).norm() <= TOLERANCE * whole.norm()


def test_a_model_that_the_gpu_cannot_hold_gets_layers_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU appears to have memory for all but the first layer."""
    whole = load_model(str(folder), device="cuda:0", split="none")
    assert whole.plan == ()
    needed = load_model(str(folder), device="cuda:0", cpu_layers=1).plan[1]
    free = needed.weights_bytes + needed.cache_bytes + (600 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    found = load_model(str(folder), device="cuda:0")
    assert [(stage.device, stage.layers.stop) for stage in found.plan][:1] == [("cpu", 1)]


@pytest.mark.parametrize("second", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize(("divided_from", "least"), [(128, 8), (128, 2), (2, 2)])
def test_passes_of_stages_begin_before_their_tokens_are_read(
    folder: Path, second: str, divided_from: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are those of passes that begin afterwards, also if each pass has two parts."""
    loaded = on_two_stages(folder, second)
    monkeypatch.setattr(microbatch, "MIN_SPLIT_SEQUENCES", divided_from)
    monkeypatch.setattr(microbatch, "MIN_PART_SEQUENCES", least)
    begun: list[int] = []
    run_on = Runner.run_on

    def counted(runner: Runner, part: NextPart) -> PartLogits:
        begun.append(len(part.segments))
        return run_on(runner, part)

    monkeypatch.setattr(Runner, "run_on", counted)
    sampler = SamplerParams(temperature=0.8, top_k=20, seed=3)
    prompts = [chr(ord("a") + i) * 20 for i in range(5)]
    found: list[list[str]] = []
    for is_async in (True, False):
        if not is_async:
            monkeypatch.setattr(Scheduler, "next_segments", lambda *_: None)
        generator = DynamicGenerator(loaded, EngineOptions(cache_tokens=4096, max_batch=8))
        for _ in range(2):  # the second round uses captured graphs
            generator.engine.forget_cache()
            replies = generator.generate(
                prompts, sampler=sampler, max_tokens=60, stop=(), completion_only=True
            )
        assert replies is not None
        found.append(replies)
    assert found[0] == found[1]
    assert set(begun) == ({3, 2} if least == 2 else {5})


@pytest.mark.parametrize("second", ["cuda:0", "cuda:1"])
def test_jobs_in_parts_have_the_text_of_one_device(
    folder: Path, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that begin and end at different times, with penalties, which need the tokens before."""
    monkeypatch.setattr(microbatch, "MIN_PART_SEQUENCES", 2)
    divided: list[int] = []
    sample_parts = CudaTable.sample_parts

    def counted(*operands: Any) -> Any:
        divided.append(len(operands[1]))
        return sample_parts(*operands)

    monkeypatch.setattr(CudaTable, "sample_parts", counted)
    whole = load_model(str(folder), device="cuda:0", split="none", batch_invariant=True)
    wanted = replies_of_jobs(whole)
    assert not divided
    found = replies_of_jobs(on_two_stages(folder, second, batch_invariant=True))
    assert found == wanted
    assert len(divided) > 100 and set(divided) == {2}


def replies_of_jobs(loaded: LoadedModel) -> dict[str, tuple[int, ...]]:
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(8192, max_batch=12))
    rng = random.Random(5)
    replies: dict[str, tuple[int, ...]] = {}
    for i in range(40):
        prompt = "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 300)))
        request = Request(
            tuple(loaded.tokenizer.encode(prompt)),
            request_id=str(i),
            sampler=SamplerParams(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=i),
            max_tokens=rng.randrange(1, 90),
            report=Report(log_probs=2 if i % 7 == 0 else 0),
        )
        engine.submit(request)
    while not engine.is_idle:
        ends = (event for event in engine.step() if isinstance(event, FinishEvent))
        replies |= {event.request_id: event.token_ids for event in ends}
    assert not engine.pool.held_pages
    assert len(replies) == 40
    return replies


@pytest.mark.parametrize("first", ["cpu", "cuda:0"])
def test_jobs_on_stages_end_and_leave_no_page_behind(folder: Path, first: str) -> None:
    """Greedy replies of jobs with shared prefixes, more than one batch of them."""
    loaded = load_model(str(folder), split=split_of(folder, first))
    generator = DynamicGenerator(loaded, EngineOptions(cache_tokens=4096, max_batch=8))
    rng = random.Random(3)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randrange(1, 300))) for _ in range(12)]
    prompts += [prompt + prompt[:40] for prompt in prompts[:4]]
    greedy = SamplerParams(temperature=0)
    replies = generator.generate(
        prompts, sampler=greedy, max_tokens=24, stop=(), completion_only=True
    )
    assert replies is not None and all(replies)
    assert not generator.engine.pool.held_pages
