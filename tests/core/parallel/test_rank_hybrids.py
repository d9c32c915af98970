"""Models with recurrent layers divided among ranks: GGUF files, quantized weights, adapters.

`test_rank_models.py` has checkpoints of every family. The ranks are threads, except in the last
test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_core.errors import RequestError, UnsupportedModelError
from exl_core.parallel.plan import Rank, share_config
from exl_core.session.load import LoadOptions, load_model
from support import tiny_hybrids as hybrids
from support.gguf_hybrids import write_hybrid
from support.quantized_models import METHODS, SIZES, TIED, quantize
from support.random_jobs import run_jobs
from support.thread_ranks import (
    assert_logits_of_one_process,
    logits_on_one,
    logits_on_ranks,
    mean_kl,
)
from support.tiny_models import save

FAST = LoadOptions(device="cpu")
EXACT = LoadOptions(device="cpu", exact=True)
NO_LIMITS = {"time_step_limit": [0.0, float("inf")]}  # the format has no key for them
NO_STEPS = {"time_step_min": 1e-30, "n_group": 1, "topk_group": 1}
BLOCKS = {"layers_block_type": ["moe", "mamba", "attention", "mlp"]}
FILES: dict[str, Callable[[], Any]] = {
    "lfm2": hybrids.tiny_lfm2,
    "granitehybrid": lambda: hybrids.tiny_granite_hybrid(**NO_LIMITS),
    "nemotron_h_moe": lambda: hybrids.tiny_nemotron_h(**BLOCKS, **NO_STEPS, moe_latent_size=32),
    "qwen35": hybrids.tiny_qwen35,  # value heads in another order
    "qwen35-many-keys": lambda: hybrids.tiny_qwen35(
        linear_num_key_heads=4, linear_num_value_heads=8
    ),
    "qwen3next": lambda: hybrids.tiny_qwen3_next(mlp_only_layers=[]),
}


@pytest.mark.parametrize("name", FILES)
def test_gguf_files_of_hybrids(name: str, tmp_path: Path) -> None:
    path = write_hybrid(FILES[name](), tmp_path / "tiny.gguf", name.split("-", maxsplit=1)[0])
    assert_logits_of_one_process(path, EXACT)


QUANTIZED: dict[str, Callable[..., Any]] = {
    "delta-net": lambda **more: hybrids.tiny_qwen35(
        **{**SIZES, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        **more,
    ),
    "mamba-2": lambda **more: hybrids.tiny_granite_hybrid(
        **{**SIZES, "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_head": 16},
        **more,
    ),
    "short-conv": lambda **more: hybrids.tiny_lfm2(
        **{**SIZES, "head_dim": 16, "block_auto_adjust_ff_dim": False}, **more
    ),
}


@pytest.mark.parametrize("method", ["exl2", "gptq", "exl3"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_hybrids(kind: str, method: str, tmp_path: Path) -> None:
    path = save(QUANTIZED[kind](tie_word_embeddings=method in TIED), tmp_path / "model")
    quantize(path, *METHODS[method])
    for options, bounds in ((EXACT, (1e-7, 1e-7)), (FAST, (1e-4, 1e-5))):
        expected = logits_on_one(path, options)
        for count in (2, 3):
            if options is FAST and method == "exl3" and kind != "delta-net":
                with pytest.raises(UnsupportedModelError, match="trellis"):
                    logits_on_ranks(path, count, options)
                continue
            found = logits_on_ranks(path, count, options)
            for one, other, bound in zip(expected, found, bounds, strict=True):
                assert mean_kl(one, other) < bound


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    path = save(hybrids.tiny_kimi_linear(), tmp_path / "model")
    config = load_model(path, EXACT).config
    share_config(config, Rank(2, 3))
    with pytest.raises(RequestError, match="too few heads"):
        share_config(config, Rank(0, 4))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [hybrids.tiny_qwen35, hybrids.tiny_granite_hybrid, hybrids.tiny_lfm2],
    ids=["delta-net", "mamba-2", "short-conv"],
)
def test_random_jobs_on_processes(make: Callable[[], Any], tmp_path: Path) -> None:
    """Shared prefixes, drafts and preemption copy states between slots on all ranks."""
    path = save(make(), tmp_path / "model")
    divided = load_model(path, EXACT, threads=2, tensor_parallel=3)
    try:
        assert run_jobs(divided, 100) == run_jobs(load_model(path, EXACT), 100)
    finally:
        divided.unload()
