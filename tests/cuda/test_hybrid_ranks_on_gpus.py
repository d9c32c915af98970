"""Hybrids divided among ranks on one, two and four GPUs, against the same models on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support.driving import ask, run_all, submit
from support.thread_ranks import (
    assert_alike,
    logits_of,
    logits_on_one,
    logits_on_ranks,
    mean_kl,
)
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_kimi_linear,
    tiny_lfm2,
    tiny_nemotron_h,
    tiny_qwen35,
    tiny_qwen35_moe,
)
from support.tiny_models import save

pytestmark = pytest.mark.cuda


def _qwen35_moe(width: int) -> Any:
    """Experts whose widths are multiples of 32 have kernels that round inputs to float16. Others
    are multiplied in float32. All shares of `width` are of the kind of the whole: otherwise every
    later rounding of this model differs between both. Its KL is then twice that of float16 to
    float32, which is 3e-5 for the prompt and 1e-5 for decode.
    """
    sizes = {**HEADS, "linear_value_head_dim": 32, "moe_intermediate_size": width}
    return tiny_qwen35_moe(**sizes, num_experts_per_tok=8)


HEADS = {"hidden_size": 96, "head_dim": 32}
ALL_EXPERTS = {"n_group": 1, "topk_group": 1}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32),
    "qwen3.5": lambda: tiny_qwen35(**HEADS, intermediate_size=160, linear_value_head_dim=32),
    "qwen3.5-moe": lambda: _qwen35_moe(40),
    "qwen3.5-moe-kernels": lambda: _qwen35_moe(128),
    "granite4-hybrid": lambda: tiny_granite_hybrid(
        hidden_size=192, head_dim=32, mamba_d_head=64, shared_intermediate_size=160
    ),
    "nemotron-h": lambda: tiny_nemotron_h(**HEADS, **ALL_EXPERTS, num_experts_per_tok=8),
    "kimi-linear": lambda: tiny_kimi_linear(
        **{"hidden_size": 96, "linear_head_dim": 40, "linear_num_heads": 4},
        **ALL_EXPERTS,
        num_experts_per_token=8,
    ),
}
DECODE_LIMIT = 1e-5
DECODE_LIMITS = {"qwen3.5-moe-kernels": 3e-5}  # twice that of float16 to float32 is 2e-5
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5] * 30, [11, 12], [200, 3, 4, 250] * 8)


def replies(loaded: LoadedModel, max_tokens: int = 40) -> list[tuple[int, ...]]:
    """Greedy replies of a batch; passes run eagerly, are captured, and are replayed."""
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(max_batch=3, cache_tokens=4096))
    for number, ids in enumerate(PROMPTS):
        submit(engine, ask(list(ids), max_tokens=max_tokens, request_id=str(number)))
    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    return [end.token_ids for end in sorted(ends, key=lambda end: end.request_id)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_ranks_that_share_a_gpu_have_its_logits(name: str, tmp_path: Path) -> None:
    """The ranks are threads. Kernels run on shares of any number of heads."""
    path, options = save(HYBRIDS[name](), tmp_path / "model"), LoadOptions(device="cuda:0")
    expected = [one.cpu() for one in logits_on_one(path, options)]
    for count in (2, 3):
        found = [one.cpu() for one in logits_on_ranks(path, count, options)]
        kls = [mean_kl(one, other) for one, other in zip(expected, found, strict=True)]
        print(f"{name}, {count} ranks: KL of prompt and decode {kls[0]:.1e}, {kls[1]:.1e}")
        assert kls[0] <= 1e-4
        assert kls[1] <= DECODE_LIMITS.get(name, DECODE_LIMIT)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_gpus_write_the_text_of_one(name: str, count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    path = save(HYBRIDS[name](), tmp_path / "model")
    whole = load_model(path, device="cuda:0", split="none")
    expected, text = [one.cpu() for one in logits_of(whole.model)], replies(whole)
    divided = load_model(path, device="cuda", tensor_parallel=count)
    try:
        found = [one.cpu() for one in logits_of(divided.model)]
        kls = [mean_kl(one, other) for one, other in zip(expected, found, strict=True)]
        print(f"{name}, {count} GPUs: KL of prompt and decode {kls[0]:.1e}, {kls[1]:.1e}")
        assert kls[0] <= 1e-4
        assert kls[1] <= DECODE_LIMITS.get(name, DECODE_LIMIT)
        same = replies(divided)
        for prompt, *both in zip(PROMPTS, text, same, strict=True):
            assert_alike(whole.model, prompt, *both)
        assert replies(divided) == same  # the second time with the same graphs' shapes
    finally:
        divided.unload()
        whole.unload()
