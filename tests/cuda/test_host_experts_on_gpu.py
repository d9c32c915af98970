"""Experts in the host's memory of models on a GPU: eager passes, captured graphs, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import EngineOptions
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import load_model
from support.families import EXPERT_FAMILIES
from support.tiny_models import VOCAB_SIZE, save, tiny_llama4

pytestmark = pytest.mark.cuda

TOLERANCE = 1e-2
"""Relative RMS error of logits: kernels of the CPU round inputs in another way than the GPU's."""

BUILDERS: dict[str, Callable[..., Any]] = {
    "qwen3-moe": EXPERT_FAMILIES["qwen3-moe"],
    "qwen2-moe": EXPERT_FAMILIES["qwen2-moe"],  # a shared expert, on the GPU meanwhile
    # Weights on the inputs of the experts. The GPU takes no heads of 20, the default.
    "llama4": lambda: tiny_llama4(head_dim=32),
}


def with_all_experts(name: str) -> Any:
    """A model whose tokens use all experts, so that rounding does not change a choice."""
    model = BUILDERS[name]()
    config = model.config
    if hasattr(config, "num_experts"):
        config.num_experts_per_tok = config.num_experts
    return model


@pytest.fixture(scope="module", params=BUILDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(with_all_experts(request.param), tmp_path_factory.mktemp(request.param))


def run(model: Transformer) -> Tensor:
    """Logits of prompts and of decode passes of 1 and 3 rows, eager and captured."""
    torch.manual_seed(2)
    runner = Runner(model, store_for(model, KVFormat.FP16, 16))
    ids = torch.randint(0, VOCAB_SIZE, (3, 100)).tolist()
    found = []
    for _ in range(PASSES_BEFORE_CAPTURE + 1):
        for sequence, text in enumerate(ids):
            one = Segment(tuple(text[:90]), 0, (sequence,), LogitRows.ALL)
            found.append(runner.run([one]).clone())
        for count in (1, 3):
            for i in range(90, 100):
                rows = [Segment((ids[s][i],), i, (s,), LogitRows.LAST) for s in range(count)]
                found.append(runner.run(rows).clone())
    return torch.cat(found).cpu()


def test_experts_on_the_cpu_give_the_logits_of_the_gpu(folder: Path) -> None:
    whole = run(load_model(folder, device="cuda", experts_on="device").model)
    mixed = load_model(folder, device="cuda", experts_on="cpu")
    assert mixed.model.host_bytes > 0
    found = run(mixed.model)
    assert (found - whole).norm() <= TOLERANCE * whole.norm()
    assert torch.equal(run(mixed.model), found), "results do not depend on earlier passes"


def test_experts_of_some_layers_leave_the_memory_of_the_gpu(folder: Path) -> None:
    sizes = []
    for where in ("device", "1", "cpu"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loaded = load_model(folder, device="cuda", experts_on=where)
        sizes.append((torch.cuda.memory_allocated() - before, loaded.model.host_bytes))
        del loaded
    (whole, none), (one, first), (rest, everything) = sizes
    assert none == 0 < first < everything
    assert whole > one > rest


def test_a_full_gpu_leaves_experts_to_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU appears to have memory for all but the experts of one layer."""
    (stage,) = load_model(folder, device="cuda", experts_on="1").plan
    free = stage.weights_bytes + stage.cache_bytes + (600 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    found = load_model(folder, device="cuda:0")
    assert [len(stage.host_layers) for stage in found.plan] == [1]


def test_replies_of_a_batch_are_those_of_one_request(folder: Path) -> None:
    """Async scheduling launches passes before their tokens are known."""
    loaded = load_model(folder, device="cuda", experts_on="cpu", batch_invariant=True)
    prompts = ["abc def", "xyz", "the first letter of the alphabet"]
    greedy = SamplerParams(temperature=0)

    def replies(texts: list[str]) -> list[str]:
        generator = DynamicGenerator(loaded, EngineOptions(cache_tokens=4096, max_batch=4))
        found = generator.generate(
            texts, sampler=greedy, max_tokens=24, stop=(), completion_only=True
        )
        assert found is not None
        return list(found)

    assert replies(prompts) == [replies([one])[0] for one in prompts]
