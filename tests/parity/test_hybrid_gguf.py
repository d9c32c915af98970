"""A GGUF file of a hybrid gives the logits of its source model in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

from exl_core.errors import WeightValueError
from exl_core.session.load import LoadOptions, load_model
from support.gguf_hybrids import write_hybrid
from support.paged import logits_of
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_nemotron_h,
    tiny_qwen3_next,
    tiny_qwen35,
    tiny_qwen35_moe,
)
from support.tiny_models import VOCAB_SIZE

NO_LIMITS = {"time_step_limit": [0.0, float("inf")]}  # the format has no key for them
NO_STEPS = {"time_step_min": 1e-30, "n_group": 1, "topk_group": 1}
BUILDERS: dict[str, Callable[[], Any]] = {
    "lfm2": tiny_lfm2,
    "lfm2moe": lambda: tiny_lfm2_moe(routed_scaling_factor=1.0),
    "granitehybrid": lambda: tiny_granite_hybrid(**NO_LIMITS),
    "granitehybrid-moe": lambda: tiny_granite_hybrid(
        **NO_LIMITS, num_local_experts=4, intermediate_size=40, position_embedding_type="rope"
    ),
    "nemotron_h": lambda: tiny_nemotron_h(
        layers_block_type=["mamba", "mlp", "attention", "mlp"], **NO_STEPS
    ),
    "nemotron_h_moe": lambda: tiny_nemotron_h(
        layers_block_type=["mamba", "moe", "attention", "moe"], **NO_STEPS
    ),
    "nemotron_h_moe-latent": lambda: tiny_nemotron_h(
        layers_block_type=["moe", "mamba", "attention"], moe_latent_size=32, **NO_STEPS
    ),
    "qwen35": tiny_qwen35,
    "qwen35moe": tiny_qwen35_moe,
    "qwen3next": lambda: tiny_qwen3_next(mlp_only_layers=[]),
}


@pytest.mark.parametrize("arch", BUILDERS)
def test_gguf_logits_of_hybrids_match_transformers(tmp_path: Path, arch: str) -> None:
    model = BUILDERS[arch]()
    ids = torch.randint(3, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(11)).tolist()
    path = write_hybrid(model, tmp_path / "tiny.gguf", arch.split("-", maxsplit=1)[0])
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]

    logits = logits_of(path, ids, LoadOptions(exact=True))

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("value", [0.5, -float("inf")])
def test_states_that_would_grow_are_refused(tmp_path: Path, value: float) -> None:
    """A file has -exp(A_log). The logarithm of another sign would be NaN."""
    path = write_hybrid(tiny_qwen35(), tmp_path / "tiny.gguf", "qwen35")
    reader = GGUFReader(path, "r+")
    next(one for one in reader.tensors if one.name.endswith("ssm_a")).data[0] = value
    reader.data.flush()
    with pytest.raises(WeightValueError, match="ssm_a"):
        load_model(str(path))
