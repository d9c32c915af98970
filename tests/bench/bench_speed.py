"""CPU benchmarks: ops by instruction set, engine step, sampler, tokenizer, loading, conversion.

`nox -s bench` runs them on SmolLM2-135M, saves the timings as JSON under `.benchmarks/` and prints
the change against the previous run. No benchmark fails because of its time.
`docs/experiments/engine.md` states the noise floor; ignore differences below it. The default test
run does not collect this file, because its name does not begin with `test_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from exl_core.cache.format import KVFormat
from exl_core.convert.gptq import Variant, factorize, quantize_columns
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.model.weights import MlpWeights
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.open import available_isas, get_table
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval.workload import Workload

SLOW_ISAS = {"scalar"}  # a fallback that is slow everywhere; timing it would take minutes
ROWS = (1, 16, 512)
DEPTH = 512


@dataclass(frozen=True)
class Ready:
    """A loaded model and the instruction set of its kernels."""

    isa: str
    loaded: LoadedModel


@pytest.fixture(scope="module", params=[isa for isa in available_isas() if isa not in SLOW_ISAS])
def ready(request: pytest.FixtureRequest, smollm2_path: Path) -> Ready:
    isa: str = request.param
    return Ready(isa, load_model(str(smollm2_path), LoadOptions(device="cpu", isa=isa, threads=2)))


@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"m{m}")
def test_gated_linear_of_all_layers(benchmark: BenchmarkFixture, ready: Ready, rows: int) -> None:
    """Quantized gate and up projections of all 30 layers. Together they exceed the caches, so
    weights come from memory."""
    model, config = ready.loaded.model, ready.loaded.config
    x = torch.randn(rows, config.hidden_size)
    blocks = model._weights.blocks

    def run() -> None:
        for block in blocks:
            assert isinstance(block.mlp, MlpWeights)
            assert isinstance(block.mlp.norm, RmsNorm)
            model.ops.norm_gated_linear(x, block.mlp.norm, block.mlp.gate_up, "silu")

    benchmark(run)


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.Q8, KVFormat.Q4])
def test_decode_step_after_512_tokens(
    benchmark: BenchmarkFixture, ready: Ready, kv_format: KVFormat
) -> None:
    """One forward pass of one row, attention over the paged cache included."""
    work = Workload(ready.loaded.model, kv_format, tokens=DEPTH + 1, batch=1)
    newest = work.fill(DEPTH)
    benchmark(work.step, newest, DEPTH)


def test_prefill_of_512_tokens(benchmark: BenchmarkFixture, ready: Ready) -> None:
    work = Workload(ready.loaded.model, KVFormat.FP16, tokens=DEPTH, batch=1)
    benchmark(work.prefill, DEPTH)


@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa not in SLOW_ISAS])
@pytest.mark.parametrize("kind", ["delta", "delta-by-row", "scan"])
def test_recurrent_op_of_512_tokens(benchmark: BenchmarkFixture, isa: str, kind: str) -> None:
    """Sizes of Qwen3.5-0.8B, of Kimi-Linear with half of its heads, and of Granite 4 H Tiny."""
    table = get_table("cpu", isa=isa, threads=2)
    starts, past = torch.tensor([0, DEPTH], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows = StateRows(starts, past, torch.tensor([0]))
    if kind == "scan":
        decay, bias, skip = torch.rand(3, 48)
        scan = StateScan(48, 64, 128, 1, decay, bias, skip, steps=(0.0, 100.0))
        xbc, dt = torch.randn(DEPTH, 48 * 64 + 256), torch.randn(DEPTH, 48)
        benchmark(table.state_scan, xbc, dt, scan, torch.zeros(1, 48, 64, 128), rows)
        return
    decays = 128 if kind == "delta-by-row" else 1
    decay, bias = torch.rand(16), torch.randn(16 * decays)
    rule = DeltaRule(16, 16, 128, 128, decay, bias, is_by_row=decays > 1)
    qkv, ba = torch.randn(DEPTH, 3 * 2048), torch.randn(DEPTH, 16 + 16 * decays)
    benchmark(table.delta_rule, qkv, ba, rule, torch.zeros(1, 16, 128, 128), rows)


def test_engine_step_of_8_replies(benchmark: BenchmarkFixture, smollm2: LoadedModel) -> None:
    """A whole engine step: plan, forward pass, sampling, text, events."""
    engine = Engine(smollm2.model, smollm2.tokenizer, EngineOptions(cache_tokens=16384))
    for number in range(8):
        ids = tuple(smollm2.tokenizer.encode(f"Story {number}: once upon a time"))
        params = SamplerParams(temperature=0.8, top_k=40, top_p=0.95, seed=number)
        engine.submit(Request(ids, 1500, sampler=params))
    for _ in range(10):
        engine.step()
    benchmark.pedantic(engine.step, rounds=100)
    assert len(engine.live_requests) == 8


SAMPLERS = {
    "greedy": SamplerParams(temperature=0),
    "common": SamplerParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1),
    "steps": SamplerParams(temperature=0.8, top_a=0.1, typical=0.9, dry_multiplier=0.8, seed=1),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler(benchmark: BenchmarkFixture, smollm2: LoadedModel, name: str) -> None:
    """One token from 49,152 logits with 1,000 tokens of history."""
    sampler = Sampler(SAMPLERS[name], smollm2.model.ops)
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(smollm2.config.vocab_size, generator=generator)
    history = [i * 37 % 5000 for i in range(1000)]
    benchmark(sampler.sample, logits, history)


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_tokenizer(benchmark: BenchmarkFixture, smollm2: LoadedModel, kind: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/decisions.md").read_text(encoding="utf-8")
    ids = smollm2.tokenizer.encode(text)
    if kind == "encode":
        benchmark(smollm2.tokenizer.encode, text)
    else:
        benchmark(smollm2.tokenizer.decode, ids)


def test_load(benchmark: BenchmarkFixture, smollm2_path: Path) -> None:
    """Loading from the page cache: headers, tokenizer, repacking of 98 MB."""
    benchmark.pedantic(load_model, (str(smollm2_path),), rounds=5, warmup_rounds=1)


def test_quantize_one_matrix(benchmark: BenchmarkFixture) -> None:
    """GPTQ of one MLP matrix of SmolLM2's shape at 4 bits, the bulk of a layer's conversion."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2048, 576, generator=generator)
    weight = torch.randn(576, 1536, generator=generator)
    factor = factorize(inputs.T @ inputs)
    assert factor is not None
    variant = Variant(slice(1536), [(4, 64)] * 9)
    benchmark(quantize_columns, weight, factor, [variant], 16)
