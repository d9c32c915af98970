"""Whole models on a GPU against the exact path of the CPU: passes, graphs, engine, memory."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.scheduler import Scheduler
from exl_core.errors import DeviceError, RequestError, UnsupportedModelError, WeightValueError
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.lora.adapter import load_adapter
from exl_core.model import cuda_graphs
from exl_core.model.adapters import AdapterUse
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.backends.cuda import attention
from exl_core.ops.backends.cuda.attention import MET
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from support.adapters import LINEARS, random_pairs, stored, write_adapter
from support.gpu_models import BUILD, LATENT, two_layers_of_gpt_oss
from support.quantized_models import (
    METHODS,
    SIZES,
    quantize,
    quantized_llama,
)
from support.thread_ranks import mean_kl
from support.tiny_models import (
    VOCAB_SIZE,
    save,
    tiny_cohere,
    tiny_llama,
    tiny_qwen3_moe,
    tiny_starcoder2,
)

pytestmark = pytest.mark.cuda

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL, LAST, NONE = LogitRows.ALL, LogitRows.LAST, LogitRows.NONE
PAGES = 24
GREEDY = SamplerParams(temperature=0)
WITH_LAYER_NORMS = {"command-r": tiny_cohere, "starcoder2": tiny_starcoder2}
# Relative error of the logits. Activations are float16 on the GPU and float32 on the CPU, and
# small random models amplify the difference. Some keys are rounded to another code. A wrong page,
# position or permutation causes an error of about one. Q4: the largest error of a pass is 0.05 to
# 0.12, depending on the random tokens (six seeds, two models).
TOLERANCE = {KVFormat.FP16: 6e-3, KVFormat.Q8: 2e-2, KVFormat.Q4: 1.5e-1}


@pytest.mark.parametrize("kind", ["llama", "exl2"])
def test_an_embedding_on_the_host_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    folder = BUILD[kind](tmp_path / kind)
    ids = tuple(random.Random(5).randrange(3, VOCAB_SIZE) for _ in range(40))
    found, used = [], []
    for place in ("device", "cpu"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        one = load_model(str(folder), LoadOptions(device="cuda", embeddings_on=place))
        used.append(torch.cuda.memory_allocated() - before)
        runner = Runner(one.model, store_for(one.model, KVFormat.FP16, PAGES))
        found.append(runner.run([Segment(ids, 0, (0,), ALL)])[0].clone())
        del one, runner
        gc.collect()
    assert torch.equal(*found)
    assert used[1] < used[0]


def test_a_tied_embedding_cannot_stay_on_the_host(tmp_path: Path) -> None:
    folder = save(tiny_llama(**SIZES, tie_word_embeddings=True), tmp_path / "tied")
    with pytest.raises(RequestError, match="its head too"):
        load_model(folder, device="cuda", embeddings_on="cpu")


@pytest.mark.parametrize("head_dim", [20, 520])
def test_a_head_size_that_no_kernel_takes_is_refused_at_load(head_dim: int, tmp_path: Path) -> None:
    folder = save(tiny_llama(**{**SIZES, "head_dim": head_dim}), tmp_path / "odd")
    with pytest.raises(DeviceError, match=f"a multiple of 8 of at most 512, got {head_dim}"):
        load_model(folder, device="cuda")


class Pair:
    """One model on the CPU and on the GPU."""

    def __init__(self, path: Path) -> None:
        self.near = load_model(str(path), LoadOptions(exact=True))
        self.far = load_model(str(path), LoadOptions(device="cuda"))

    def runners(self, kv_format: KVFormat) -> tuple[Runner, Runner]:
        first, second = (
            Runner(one.model, store_for(one.model, kv_format, PAGES, num_states=4))
            for one in (self.near, self.far)
        )
        return first, second

    @property
    def is_hybrid(self) -> bool:
        return any(shape is not None for shape in self.near.config.state_shapes)


@pytest.fixture(scope="module", params=list(BUILD))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(BUILD[request.param](tmp_path_factory.mktemp("models") / request.param))


class Sequences:
    """Random tokens of a few sequences. Compares the logits of both devices."""

    def __init__(self, pair: Pair, kv_format: KVFormat) -> None:
        self._runners = pair.runners(kv_format)
        self._limit = TOLERANCE[kv_format]
        self._random = torch.Generator().manual_seed(8)
        self._lengths = [0] * 4

    def forget(self, i: int) -> None:
        """Starts the sequence again in the same pages."""
        self._lengths[i] = 0

    def feed(self, **counts: tuple[int, LogitRows]) -> None:
        """Runs one pass; `s2=(5, ALL)` feeds five more tokens of sequence 2."""
        segments = []
        for name, (count, logit_rows) in counts.items():
            i = int(name[1:])
            ids = torch.randint(3, VOCAB_SIZE, (count,), generator=self._random).tolist()
            pages = tuple(range(6 * i, 6 * i + 6))
            slot = (3 * i + 2) % 4
            segment = Segment(tuple(ids), self._lengths[i], pages, logit_rows, state_slot=slot)
            segments.append(segment)
            self._lengths[i] += count
        near, far = (runner.run(segments) for runner in self._runners)
        assert far.shape == near.shape
        if near.numel():
            error = (far.float().cpu() - near).norm() / near.norm()
            print(f"{counts}: {error:.1e}")
            assert error < self._limit, f"{counts}: {error:.1e}"


@pytest.mark.parametrize("name", list(WITH_LAYER_NORMS))
def test_projections_after_a_layer_norm_feed_quantized_outputs(name: str, tmp_path: Path) -> None:
    """Their results are float32, which attention does not write as prepared inputs."""
    folder = save(WITH_LAYER_NORMS[name](**SIZES), tmp_path / name)
    quantize(folder, *METHODS["gptq"])
    sequences = Sequences(Pair(folder), KVFormat.FP16)
    sequences.feed(s0=(40, ALL), s1=(7, ALL))
    sequences.feed(s0=(1, LAST), s1=(1, LAST))
    sequences.feed(s0=(1, LAST), s1=(20, ALL), s2=(3, ALL))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_that_are_not_finite_are_counted(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    file = save(tiny_llama(**SIZES), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name].to(dtype)
    tensors[name].view(-1)[[0, -1]] = torch.tensor([float("nan"), float("-inf")]).to(dtype)
    save_file(tensors, file)
    with pytest.raises(WeightValueError, match=rf"{name}.* 2 values that are NaN or infinite"):
        load_model(str(tmp_path), LoadOptions(device="cuda"))


@pytest.mark.parametrize("kv_format", list(TOLERANCE), ids=lambda kind: kind.value)
def test_passes_of_every_shape_agree_with_the_cpu(pair: Pair, kv_format: KVFormat) -> None:
    run = Sequences(pair, kv_format)
    run.feed(s0=(1, LAST))  # decoding from nothing
    run.feed(s1=(300, LAST), s2=(37, ALL))
    run.feed(s1=(300, NONE))
    run.feed(s3=(700, LAST))
    for i in range(PASSES_BEFORE_CAPTURE + 2):  # later ones as graphs
        run.feed(s0=(1, LAST), s1=(1, LAST), s2=(1, LAST))
        run.feed(s0=(4 + i % 2, ALL))
        run.feed(s1=(130 - i, LAST), s0=(1, LAST), s2=(1, LAST))
        run.feed(s2=(20, LAST))
    run.feed(s0=(1, LAST), s3=(1, LAST))


def test_predictions_are_those_of_the_cpu(pair: Pair) -> None:
    """Mean divergence over a prompt, and over decode passes, which are replayed graphs."""
    source = random.Random(12)
    ids = [source.randrange(3, VOCAB_SIZE) for _ in range(340)]
    found = []
    for runner in pair.runners(KVFormat.FP16):
        prompt = runner.run([Segment(tuple(ids[:300]), 0, (0, 1), ALL, state_slot=1)]).clone()
        steps = [
            runner.run([Segment((ids[i],), i, (0, 1), LAST, state_slot=1)]).clone()
            for i in range(300, 340)
        ]
        found.append((prompt.cpu(), torch.cat(steps).cpu()))
    divergences = [mean_kl(*both) for both in zip(*found, strict=True)]
    print(f"{pair.near.config.arch.name}: {divergences[0]:.1e}, {divergences[1]:.1e} nats a token")
    assert max(divergences) < 1e-4


def test_long_segments_agree_with_the_cpu(pair: Pair) -> None:
    """torch's attention computes them if no shorter sequence follows."""
    run = Sequences(pair, KVFormat.FP16)
    run.feed(s1=(300, LAST), s2=(37, ALL))
    run.feed(s2=(1, ALL), s1=(300, ALL))  # after cached tokens
    for _ in range(MET + 1):  # no cached tokens; after some repetitions by cuDNN
        run.forget(3)
        run.feed(s0=(2, ALL), s3=(700, ALL))
    run.feed(s3=(257, LAST), s1=(256, LAST))
    run.feed(s0=(1, LAST), s3=(1, LAST), s1=(1, ALL))


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.Q8], ids=lambda kind: kind.value)
def test_beginnings_of_prompts_as_graphs_agree_with_the_cpu(
    pair: Pair, kv_format: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have graphs of their own, in which torch's attention takes 16-bit keys and values."""
    captured = []

    def counted(*operands: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            captured.append(operands)
        plain(*operands)

    plain = attention._attend_without_past
    monkeypatch.setattr(attention, "_attend_without_past", counted)
    run = Sequences(pair, kv_format)
    for i in range(PASSES_BEFORE_CAPTURE + 2):
        run.forget(3)
        run.feed(s3=(300 - i, LAST))  # with padding
        run.feed(s3=(280, LAST))  # after cached tokens
        run.feed(s3=(1, LAST), s0=(3, ALL))
    if kv_format is not KVFormat.FP16:
        assert not captured
    elif pair.near.config.arch.name == "llama":  # others have windows or recurrence
        assert captured


def generator_of(loaded: LoadedModel, **changes: Any) -> DynamicGenerator:
    drafter = changes.pop("drafter", None)
    options = EngineOptions(**{"cache_tokens": 4096, "max_batch": 8, **changes})
    return DynamicGenerator(loaded, options, drafter=drafter)


def assert_alike(
    pair: Pair,
    prompt: list[int],
    near: list[int],
    far: list[int],
    adapters: tuple[AdapterUse, ...] = (),
) -> None:
    """Same tokens up to the first difference, where both tokens are almost equally likely."""
    first = next((i for i, (a, b) in enumerate(zip(near, far, strict=False)) if a != b), None)
    if first is None:
        assert len(near) == len(far)
        return
    runner, _ = pair.runners(KVFormat.FP16)
    known = Segment(
        tuple(prompt + near[:first]), 0, tuple(range(PAGES)), LAST, adapters, state_slot=0
    )
    logits: Tensor = runner.run([known])[0]
    assert logits[near[first]] - logits[far[first]] < 0.02 * logits.std(), f"token {first}"


def finishes(
    generator: DynamicGenerator, prompts: list[list[int]], **fields: Any
) -> list[FinishEvent]:
    jobs = [
        generator.enqueue(generator.request(prompt, stop=[], **{"sampler": GREEDY, **fields}))
        for prompt in prompts
    ]
    while generator.num_remaining_jobs:
        generator.iterate()
    for job in jobs:
        assert job.error is None
    return [job.finish for job in jobs if job.finish is not None]


def replies(generator: DynamicGenerator, prompts: list[list[int]], **fields: Any) -> list[Any]:
    return [list(end.token_ids) for end in finishes(generator, prompts, **fields)]


def prompts(count: int) -> list[list[int]]:
    source = random.Random(4)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(9 + 40 * i)] for i in range(count)]


def test_greedy_replies_agree_with_the_cpu(pair: Pair) -> None:
    asked = prompts(5)
    near, far = (replies(generator_of(one), asked, max_tokens=40) for one in (pair.near, pair.far))
    for prompt, *both in zip(asked, near, far, strict=True):
        assert_alike(pair, prompt, *both)


def test_replies_go_on_from_what_is_cached(pair: Pair) -> None:
    """A conversation, a shared prefix, and a reply that goes back from a banned string."""
    source = random.Random(6)
    shared = [source.randrange(3, VOCAB_SIZE) for _ in range(300)]
    near, far = (generator_of(one, max_batch=2) for one in (pair.near, pair.far))
    text = list(shared)
    for _ in range(3):
        answers = [replies(one, [text, [*shared, 7, 8]], max_tokens=12) for one in (near, far)]
        for prompt, *both in zip((text, [*shared, 7, 8]), *answers, strict=True):
            assert_alike(pair, prompt, *both)
        text = text + answers[0][0] + [source.randrange(3, VOCAB_SIZE) for _ in range(30)]
    (plain,) = finishes(far, [shared], max_tokens=20)
    banned = plain.text[4:7]
    (one,), (other,) = (
        finishes(each, [shared], max_tokens=20, banned_strings=(banned,)) for each in (near, far)
    )
    assert banned not in other.text
    assert_alike(pair, shared, list(one.token_ids), list(other.token_ids))


def test_async_passes_leave_replies_unchanged(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts arrive at once and all replies end at once, so that the passes are the same."""
    asked = prompts(5)
    sampler = SamplerParams(temperature=0.8, top_k=20, seed=3)
    begun: list[tuple[Any, ...]] = []
    run_on = Runner.run_on

    def counted(*operands: Any) -> Any:
        begun.append(operands)
        return run_on(*operands)

    monkeypatch.setattr(Runner, "run_on", counted)
    both = []
    for is_async in (True, False):
        if not is_async:
            monkeypatch.setattr(Scheduler, "next_segments", lambda *_: None)
        generator = generator_of(pair.far)
        for _ in range(2):  # the second round uses captured graphs
            generator.engine.forget_cache()
            before = len(begun)
            found = replies(generator, asked, max_tokens=70, sampler=sampler)
        both.append((found, len(begun) - before))
    assert both[0][0] == both[1][0]
    assert (both[0][1], both[1][1]) == (69, 0)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafts_leave_greedy_replies_unchanged(pair: Pair, kind: str) -> None:
    (prompt,) = prompts(1)
    asked = [prompt * 6]  # text with repetitions
    plain = replies(generator_of(pair.far), asked, max_tokens=40)
    drafter: Drafter = NgramDrafter()
    if kind == "model" and any(shape is not None for shape in pair.far.config.state_shapes):
        with pytest.raises(UnsupportedModelError, match="recurrent layers"):
            ModelDrafter(pair.far.model, vocab_size=VOCAB_SIZE, num_pages=16)
        return
    if kind == "model":
        drafter = ModelDrafter(pair.far.model, vocab_size=VOCAB_SIZE, num_pages=16)
    drafted = replies(generator_of(pair.far, drafter=drafter), asked, max_tokens=40)
    assert_alike(pair, asked[0], plain[0], drafted[0])


ADAPTED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "llama": (lambda: tiny_llama(**SIZES), LINEARS),
    "qwen3-moe": (
        lambda: tiny_qwen3_moe(**SIZES, moe_intermediate_size=64, num_experts_per_tok=8),
        ATTENTION,
    ),
    "gpt-oss": (two_layers_of_gpt_oss, ATTENTION),
    "deepseek2": (LATENT["deepseek2"], ("q_proj", "kv_a_proj_with_mqa", "o_proj")),
}
"""Models with adapters, and the modules that these change: of models with experts the attention."""


@pytest.mark.parametrize("name", ADAPTED)
def test_replies_with_an_adapter_agree_with_the_cpu(name: str, tmp_path: Path) -> None:
    build, modules = ADAPTED[name]
    model = build()
    pair = Pair(save(model, tmp_path / "model"))
    folder = write_adapter(tmp_path / "adapter", stored(random_pairs(model, modules)))
    asked = prompts(2)
    plain = replies(generator_of(pair.far), asked, max_tokens=20)
    uses = [(AdapterUse(load_adapter(folder, one.model)),) for one in (pair.near, pair.far)]
    near, far = (
        replies(generator_of(one), asked, max_tokens=20, adapters=use)
        for one, use in zip((pair.near, pair.far), uses, strict=True)
    )
    assert far != plain
    for prompt, one, other in zip(asked, near, far, strict=True):
        assert_alike(pair, prompt, one, other, uses[0])


class RandomJobs:
    """Rounds of jobs of all kinds, some of them cancelled."""

    def __init__(self, generator: DynamicGenerator, seed: int) -> None:
        self.generator = generator
        self.random = random.Random(seed)
        self.jobs = self.steps = 0

    def round(self) -> int:
        """Runs 30 jobs; returns the allocated bytes afterwards."""
        generator, source = self.generator, self.random
        jobs = []
        for _ in range(30):
            length = source.choice((1, 5, 60, 200, 400))
            prompt = [source.randrange(3, VOCAB_SIZE) for _ in range(length)]
            sampler = SamplerParams(
                temperature=source.choice((0, 1.0)), top_k=40, seed=source.randrange(1 << 30)
            )
            request = generator.request(prompt, sampler=sampler, max_tokens=source.randrange(1, 60))
            jobs.append(generator.enqueue(request))
        while generator.num_remaining_jobs:
            generator.iterate()
            self.steps += 1
            if source.random() < 0.05:
                generator.cancel(source.choice(jobs))
        assert all(job.error is None for job in jobs)
        self.jobs += len(jobs)
        pool = generator.engine.pool
        assert pool.num_available == pool.num_pages
        return allocated()


def allocated() -> int:
    """Bytes that live tensors of the GPU take, those of captured graphs included."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_240_random_jobs_leave_not_a_byte(pair: Pair) -> None:
    """All pages and all memory are released. The first generator leaves tables and workspaces to
    the model, which the second one finds. Both run the same jobs and then release their graphs."""

    def life() -> list[int]:
        jobs = RandomJobs(generator_of(pair.far, cache_tokens=2048), seed=9)
        return [jobs.round() for _ in range(8)]

    life()
    before = allocated()
    within = life()
    assert allocated() == before, f"{within} after each round"


def test_repeated_jobs_allocate_nothing(pair: Pair) -> None:
    """The same 30 jobs, eight times, in one engine. The first rounds capture graphs: that of a
    prompt's bucket at its third pass. Jobs that differ from round to round would go on to meet new
    buckets, each with a graph, so that their memory has no exact bound."""
    generator = generator_of(pair.far, cache_tokens=2048)
    after = []
    for _ in range(8):
        generator.engine.forget_cache()
        after.append(RandomJobs(generator, seed=9).round())
    assert after[5:] == [after[4]] * 3, f"{after} bytes"


LONG_S = 240.0
"""Enough for about 20,000 jobs, as many as in half an hour at twelve per second."""


@pytest.mark.soak
@pytest.mark.timeout(LONG_S + 120)
def test_memory_stays_constant_over_thousands_of_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory of the device does not shrink after the first quarter.

    By then the number of captured graphs has reached its limit.
    """
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 16)
    loaded = load_model(str(quantized_llama("exl2", tmp_path)), LoadOptions(device="cuda"))
    with_drafts, without = (
        RandomJobs(generator_of(loaded, drafter=drafter, cache_tokens=2048), seed=10)
        for drafter in (NgramDrafter(), None)
    )
    start = time.monotonic()
    held: list[tuple[int, int]] = []  # after each eighth: most allocated in it, free
    most = 0
    while len(held) < 8:
        most = max(most, with_drafts.round(), without.round())
        if time.monotonic() - start > LONG_S / 8 * (len(held) + 1):
            held.append((most, torch.cuda.mem_get_info()[0]))
            most = 0
    jobs, steps = with_drafts.jobs + without.jobs, with_drafts.steps + without.steps
    with capsys.disabled():
        print(f"\n{jobs} jobs, {steps} steps; bytes allocated and free: {held}")
    (allocated, free), (most_at_last, free_at_last) = held[1], held[-1]
    assert most_at_last <= allocated + (1 << 20)
    assert free_at_last >= free - (8 << 20)


def test_memory_of_a_model_is_released(tmp_path: Path) -> None:
    path = str(quantized_llama("exl2", tmp_path))

    def life() -> int:
        loaded = load_model(path, LoadOptions(device="cuda"))
        replies(generator_of(loaded), prompts(2), max_tokens=5)
        del loaded
        return allocated()

    before = life()
    assert [life() for _ in range(3)] == [before] * 3


def test_unloading_frees_the_memory_of_model_and_adapter(tmp_path: Path) -> None:
    """An engine with captured graphs refers to both, and refuses further passes."""
    source = tiny_llama(**SIZES)
    loaded = load_model(save(source, tmp_path / "model"), device="cuda")
    folder = write_adapter(tmp_path / "lora", stored(random_pairs(source)))
    adapter = load_adapter(folder, loaded.model)
    runner = Runner(loaded.model, store_for(loaded.model, KVFormat.FP16, PAGES))
    segment = Segment((5,), 0, (0,), LAST)
    for _ in range(PASSES_BEFORE_CAPTURE):
        runner.run([segment])

    both, size = allocated(), adapter.size_bytes
    adapter.unload()
    model_only = allocated()
    assert both - model_only >= size
    loaded.unload()
    assert model_only - allocated() >= 0.9 * loaded.weights_bytes
    with pytest.raises(RequestError, match="the model has been unloaded"):
        runner.run([segment])
    with pytest.raises(RequestError, match="the adapter has been unloaded"):
        loaded.model.check_adapters([AdapterUse(adapter)])


def test_guidance_agrees_with_the_cpu(pair: Pair) -> None:
    """A reply has two sequences, whose logits are combined before sampling."""
    ask, avoid = prompts(2)
    sampler = SamplerParams(temperature=0, cfg_scale=1.5)
    both = []
    for one in (pair.near, pair.far):
        generator = generator_of(one)
        job = generator.enqueue(
            generator.request(ask, negative=avoid, sampler=sampler, stop=[], max_tokens=12)
        )
        while generator.num_remaining_jobs:
            generator.iterate()
        assert job.finish is not None
        both.append(job.finish.token_ids)
    assert both[0][:4] == both[1][:4]
    assert list(both[1]) != replies(generator_of(pair.far), [ask], max_tokens=12)[0]
